"""Memory is read from the system, and its peak can start anew."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from covey.observe.memory import forget_peak, memory_metrics, peak_rss_bytes, rss_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot forget a peak")


def test_the_peak_remembers_what_was_given_back_until_it_is_forgotten() -> None:
    before = rss_bytes()
    held = np.ones(50_000_000)  # 400 MB
    assert rss_bytes() > before + 350_000_000
    del held
    assert peak_rss_bytes() > before + 350_000_000
    assert forget_peak()
    assert peak_rss_bytes() < before + 100_000_000
    assert memory_metrics()["memory/peak_gb"] == pytest.approx(peak_rss_bytes() / 1e9, rel=0.05)
