"""reasoning-gym as a task: which answer is read, what a scorer is given, limits, held-out items, errors."""

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from covey.errors import ConfigError, DataError
from covey.recipes.reasoning_gym.gym_task import _PLAIN, HELD_OUT, PARSED, ReasoningGym, read_answer
from covey.tasks import get_task
from fakes import raises

installed = pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="needs reasoning-gym")
quietly = pytest.mark.filterwarnings("ignore")  # what the package imports warns of itself


def test_which_answer_is_read() -> None:
    for form, text, answer in (
        ("tags", "so <answer> 7 </answer>.", "7"),
        ("tags", "<answer>6</answer> no, <answer>7</answer>", "7"),
        *(
            ("tags", text, None)
            for text in ("7", "<answer>7", "7</answer>", "</answer>7<answer>", "<answer> </answer>")
        ),
        ("last", "2 + 5 is 7.0 legs.", "7.0"),
        ("last", "-$1,250", "-1250"),
        ("last", "seven", None),
        ("word", " **Yes**, it does", "Yes"),
        ("word", "-3.", "-3"),
        ("word", "...", None),
        ("text", " a\nb ", "a\nb"),
        ("text", " \n", None),
    ):
        assert read_answer(text, form) == answer, (form, text)


def test_no_answer_is_evaluated_that_calls_or_names_something() -> None:
    hostile = ["__import__('os').system('x')", "[exit()]", "f(x)", "x.y", "x . y", "1..y", "(1).y", "ab", "'a'", "x[0]"]
    hostile += ["x, y", "x if y else z", "x=1", "lambda: x", "entry", "x\\", "x#", "9" * 10**6 + "!", "１", "ａ"]
    for dataset, pattern in _PLAIN.items():
        for text in hostile:
            assert not re.fullmatch(pattern, text), (dataset, text)
        plain = (
            ["2*x**2 - 3*x*(y + 1)/4.5", "C + exp(x) + sin(2*x)"]
            if dataset in PARSED
            else ["0 1 1\n1 0 2", "_ Q _", "ABBA"]
        )
        assert all(re.fullmatch(pattern, text) for text in plain), dataset


@pytest.mark.filterwarnings("default")
def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.delitem(sys.modules, "reasoning_gym.factory", raising=False)
    raises(ConfigError, re.escape("pip install 'covey[reasoning-gym]'"), get_task, "reasoning_gym:dataset=gcd")


@installed
@quietly
def test_what_is_wrong_is_told() -> None:
    for options, message in (
        ("dataset=leg_countin", "dataset='leg_countin': no such dataset; did you mean 'leg_counting'"),
        ("dataset=gcd|knight_swap", "dataset='knight_swap': a seed does not make the same items again"),
        ("dataset=gcd,config=max_valu=3", "no option 'max_valu'; did you mean 'max_value'"),
        ("dataset=gcd,config=lcm.max_value=3", "config='lcm.max_value=3': it begins with none of dataset='gcd'"),
        ("dataset=gcd,config=seed=3", "seed cannot be set"),
        ("dataset=gcd,config=max_value=0", "config='max_value=0': max_value must be"),
        ("dataset=gcd,config=max_value=few", "must be a whole number"),
        ("dataset=gcd,answer=tag", "did you mean 'tags'"),
        ("dataset=gcd,num_eval=0", "num_eval=0"),
    ):
        raises(ConfigError, message, get_task, f"reasoning_gym:{options}")


def made(name: str = "gcd|ransom_note|countdown", **options: object) -> ReasoningGym:
    given = {"config": "gcd.max_value=20", "num_train": 60, "num_eval": 30, "answer": "text", "seconds": 20.0} | options
    return get_task(f"reasoning_gym:dataset={name}", **given)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def task() -> Iterator[ReasoningGym]:
    task = made()
    yield task
    task._pool.close()


@installed
@quietly
def test_rows_are_the_same_in_every_process_and_none_is_on_both_sides(
    task: ReasoningGym, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out, trained = task.eval_rows(), [task.train_rows(seed) for seed in (1, 2)]
    texts = [{row["prompt"][0]["content"] for row in rows} for rows in (held_out, *trained)]
    assert (len(held_out), len(texts[0]), {row["kind"] for row in held_out}) == (
        30,
        30,
        {"gcd", "ransom_note", "countdown"},
    )
    assert not texts[0] & (texts[1] | texts[2])
    assert max(row["item"][2] for rows in trained for row in rows) < HELD_OUT // 2 + 10**6
    assert not {row["uid"] for row in trained[0]} & {row["uid"] for row in trained[1]}
    monkeypatch.setenv("PYTHONHASHSEED", "7")  # ransom_note goes through a set
    other = made()
    assert (other.train_rows(1), other.eval_rows()) == (trained[0], held_out)
    other._pool.close()


@installed
@quietly
def test_scores(task: ReasoningGym, tmp_path: Path) -> None:
    rows = task.eval_rows()
    hard = next(row for row in rows if row["kind"] == "countdown")
    task._pool._time_limit = 3.0
    texts = [hard["answer"], f"__import__('os').system('touch {tmp_path / 'mark'}')", "9**9**9", "", "9**9**9"]
    logged: dict[str, float] = {}
    assert task.score(texts, [hard["item"]] * 5, log_metric=logged.__setitem__) == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert logged == {"reasoning_gym/failed": 0.4}
    assert not (tmp_path / "mark").exists()
    for row in rows[:9]:
        assert (task.is_correct(row["answer"], row), task.is_correct("zzz", row)) == (True, False)
    raising = ["prime_factorization", "{}", HELD_OUT]  # its scorer raises ValueError for what is no number
    assert task.score([[{"role": "assistant", "content": "zzz"}]], [raising], log_metric=logged.__setitem__) == [0.0]
    assert logged == {"reasoning_gym/failed": 1.0}


@installed
@quietly
def test_too_few_questions() -> None:
    task = made("gcd", config="max_value=3", num_train=20)
    raises(DataError, "all 20 training questions are held out.*lower num_eval=30", task.train_rows, 0)
    task._pool.close()
