import os
import subprocess
import sys
from pathlib import Path

from covey.observe import memory_metrics, peak_rss_bytes

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src")}


def printed_by(code):
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_the_peak_rises_by_what_is_touched_stays_and_is_not_inherited():
    child = "from covey.processes import peak_rss_bytes as peak; print(peak())"
    before, risen, after, inherited = map(
        int,
        printed_by(
            "import subprocess, sys\n"
            "from covey.processes import peak_rss_bytes as peak\n"
            "before = peak(); block = bytearray(b'x') * 200_000_000; risen = peak(); del block\n"
            f"child = subprocess.run([sys.executable, '-c', {child!r}], capture_output=True, text=True)\n"
            "print(before, risen, peak(), child.stdout)"
        ),
    )
    assert 195e6 < risen - before < 250e6
    assert after > risen - 5e6  # the kernel's counters are exact to some pages for each CPU
    assert inherited < risen - 100e6


def test_a_peak_can_be_forgotten():
    before, risen, after, held = map(
        int,
        printed_by(
            "from covey.processes import forget_peak, peak_rss_bytes as peak\n"
            "before = peak(); block = bytearray(b'x') * 200_000_000; del block\n"
            "risen = peak(); assert forget_peak(); print(before, risen, peak(), "
            "int(open('/proc/self/statm').read().split()[1]) * __import__('resource').getpagesize())"
        ),
    )
    assert risen - before > 195e6
    assert after < risen - 150e6
    assert abs(after - held) < 10e6


def test_metric_is_in_gigabytes():
    assert abs(memory_metrics()["memory/peak_gb"] * 1e9 - peak_rss_bytes()) < 5e6


def test_watching_a_run_imports_nothing_heavy():
    code = "import sys, covey.observe; covey.observe.memory_metrics(); "
    code += "print([m for m in ('torch', 'jax', 'matplotlib', 'pyarrow', 'wandb') if m in sys.modules])"
    assert printed_by(code) == ["[]"]
