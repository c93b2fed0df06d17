"""`benchmarks/gpu.py` on a CPU: every part reports a result or a reason, whatever becomes of the others."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fakes import ends, slow

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu  # noqa: E402
import gpu_work  # noqa: E402
from gpu_table import Row, markdown, read_rows  # noqa: E402

SAYS = "from gpu_table import Rows; import sys, time; rows = Rows(); rows.say('first', 'ok', 'a|b', seconds=0.5)"
ALIKE = ("update-512", "update-4096", "step-1.5", "step-smollm2")
"""Parts that do with tiny shapes what `step-0.5` does."""
ALL = tuple(part.name for part in gpu.PARTS)


def run(code: str, tmp_path: Path, seconds: float = 60) -> list[Row]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "benchmarks")}
    part = gpu.Part("some", "some part", (), 0)
    return gpu.run(part, [sys.executable, "-c", code], environment, seconds, tmp_path / "some.log")


def test_what_was_found_before_a_failure_stays(tmp_path: Path) -> None:
    first, second = run(f"{SAYS}; raise ValueError('no more')", tmp_path)
    assert (first.what, first.state, first.numbers) == ("first", "ok", {"seconds": 0.5})
    assert (second.what, second.state) == ("some part", "failed")
    assert "exit status 1: ValueError: no more" in second.text


def test_a_part_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    began = time.monotonic()
    child = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    child += f"open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid))"
    first, second = run(f"{SAYS}; {child}; time.sleep(600)", tmp_path, seconds=3)
    assert (first.state, second.text.partition(" (")[0]) == ("ok", "ended after 3 s, its limit")
    assert time.monotonic() - began < 60
    assert ends(int((tmp_path / "pid").read_text())), "the child goes on"


def test_silence_is_a_failure_and_a_later_finding_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    (only,) = run("print('row is cut off')", tmp_path)
    assert (only.state, only.text.partition(" (")[0]) == ("failed", "it found nothing")
    told = [{"what": "x", "state": "ok", "text": text, "numbers": {}} for text in ("one", "two")]
    lines = [f"row {json.dumps(one)}" for one in told] + ["noise", 'row {"what": "y']
    assert read_rows("p", "\n".join(lines)) == [Row("p", "x", "ok", "two")]
    text = markdown([Row("p", "x", "ok", "a|b", {"seconds": 0.5, "peak_device": 2e9}), Row("p", "y", "failed", "why")])
    assert all(words in text for words in ("| p | x | ok | a/b |", "| p | y | failed | why |"))
    assert text.endswith("| part | what | step s | peak GB |\n| --- | --- | --- | --- |\n| p | x | 0.500 | 2.00 |\n")


def test_work_by_hand() -> None:
    """One layer of one head, width 2: 8 + 8 weights in attention, 12 in the MLP; 2 prompts of 3, 2 x 2 of 2 tokens."""
    config = {"hidden_size": 2, "intermediate_size": 2, "num_hidden_layers": 1, "num_attention_heads": 1}
    config |= {"num_key_value_heads": 1, "vocab_size": 5}
    done = gpu_work.Rollout(prompts=2, prompt_tokens=3, completions=4, completion_tokens=8, longest=2)
    assert gpu_work.body_weights(config) == 2 * 2 * 2 + 2 * 2 * 2 + 3 * 2 * 2 == 28
    assert (done.unique, done.pairs) == (14, 2 * 4.5 + 8 * 3 + 4 * 2)
    sampling, update = gpu_work.sampling(config, done), gpu_work.update(config, done)
    assert sampling.operations == 2 * 28 * 14 + 2 * 10 * 8 + 4 * 2 * 41
    assert sampling.bytes == 2 * (2 * 38 + 2 * 3 * 8) + 8 * 8
    assert update.operations == 4 * 28 * 14 + 4 * 10 * 8 + 12 * 2 * 41
    whole = gpu_work.step(config, done)
    assert whole.shares(2.0, 1e4, 1e3)["matrix_share"] == (sampling.operations + update.operations) / 2e4
    assert whole.shares(2.0, 0, 0) == {}


def script(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--out", str(tmp_path), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=570, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done


def test_wheels_that_are_not_there_and_no_time_left_are_said(tmp_path: Path) -> None:
    assert "make gpu-wheels" in gpu.install(sys.executable, tmp_path, tmp_path / "site")
    done = script(tmp_path, "--minutes", "0.1")
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert ({row["state"] for row in found["rows"]}, len(found["rows"])) == ({"skipped"}, len(gpu.PARTS))
    assert (tmp_path / "gpu.md").read_text().endswith(done.stdout)


SOME = (("machine", "parity", "units"), ("parity",))


@pytest.mark.parametrize(("parts", "broken"), [slow(*SOME), slow(ALL, ALIKE)], ids=["some", "all"])
def test_parts_report_though_some_break(parts: tuple[str, ...], broken: tuple[str, ...], tmp_path: Path) -> None:
    tiny = ("--device", "cpu", "--tiny", "--models", str(tmp_path / "models"))
    done = script(tmp_path, *tiny, "--only", ",".join(parts), "--break", ",".join(broken))
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in json.loads((tmp_path / "gpu.json").read_text())["rows"]:
        rows.setdefault(row["part"], []).append(row)
    assert tuple(rows) == parts
    for name, found in rows.items():
        states = {row["state"] for row in found}
        assert states - {"skipped"} == ({"failed"} if name in broken else {"ok"}), found
        assert name not in broken or ("broken on purpose" in found[0]["text"] and states == {"failed"})
    assert "step-0.5" not in parts or "| step-0.5 | Covey, own engine | ok |" in done.stdout
    assert sorted(path.name for path in tmp_path.glob("*.log")) == sorted(f"{name}.log" for name in broken)
