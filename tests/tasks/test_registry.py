"""Tasks by name."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import covey.tasks
from covey.errors import ConfigError
from covey.recipes.arithmetic.arithmetic import Arithmetic
from covey.tasks import GSM8K, get_task, register_task, registry, task_names


def test_by_name_and_with_options() -> None:
    task = get_task("arithmetic", kinds="gcd", digits=2)
    assert isinstance(task, Arithmetic)
    assert (task.kinds, task.digits) == (("gcd",), 2)
    written = get_task("arithmetic:kinds=sum+gcd, digits=2,strict=true,system_prompt=none")
    assert isinstance(written, Arithmetic)
    assert (written.kinds, written.digits, written.strict, written.system_prompt) == (
        ("sum", "gcd"),
        2,
        True,
        None,
    )
    assert get_task("arithmetic:digits=2", digits=3).digits == 3
    assert isinstance(get_task("gsm8k", path="a.jsonl"), GSM8K)  # reads nothing yet
    assert task_names() == tuple(sorted({"arithmetic", "gsm8k", *task_names()}))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("arithmetics", {}, "task='arithmetics': no such task; did you mean 'arithmetic'"),
        ("zzz", {}, "use one of arithmetic"),
        ("arithmetic", {"digit": 2}, "no option 'digit'; did you mean 'digits'"),
        ("arithmetic", {"path": "a"}, "no option 'path'"),
        ("arithmetic:gcd", {}, "'gcd' is no option; write name:option=value"),
        ("arithmetic", {"digits": "two"}, "arithmetic"),
        ("arithmetic:kinds=sums", {}, "kinds='sums'"),
    ],
)
def test_what_is_not_there(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        get_task(name, **options)


def test_one_of_your_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_TASKS", dict(registry._TASKS))
    register_task("sums", lambda digits=1: Arithmetic(kinds="sum", digits=digits))
    task = get_task("sums:digits=2")
    assert isinstance(task, Arithmetic)
    assert task.digits == 2


def test_what_the_room_exports_and_needs() -> None:
    assert all(hasattr(covey.tasks, name) for name in covey.tasks.__all__)
    program = "import sys, covey.tasks, covey.rewards; sys.exit('torch' in sys.modules or 'jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
