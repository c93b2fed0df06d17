"""reasoning-gym as a task: which answer is read, what a scorer is given, limits, held-out items, errors."""

import pickle
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from covey.errors import ConfigError, DataError
from covey.recipes.reasoning_gym.gym_task import (
    _PLAIN,
    EVALUATED,
    HELD_OUT,
    PARSED,
    REFUSED,
    ReasoningGym,
    read_answer,
)
from covey.tasks import get_task
from fakes import raises

pytestmark = pytest.mark.filterwarnings("ignore")  # what the package imports warns of itself
installed = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs reasoning-gym")


def test_which_answer_is_read() -> None:
    for form, answers in {
        "tags": {"so <answer> 7 </answer>.": "7", "<answer>6</answer> no, <answer>7</answer>": "7"}
        | dict.fromkeys(("7", "<answer>7", "7</answer>", "</answer>7<answer>", "<answer> </answer>")),
        "last": {"2 and 5: 7.0 legs.": "7.0", "-$1,250": "-1250", "two": None},
        "word": {" **Yes**, it does": "Yes", "-3.": "-3", "...": None},
        "text": {" a\nb ": "a\nb", " \n": None},
    }.items():
        assert {text: read_answer(text, form) for text in answers} == answers


def test_no_answer_is_evaluated_that_calls_or_names_something() -> None:
    hostile = ["__import__('os').system('x')", "[exit()]", "f(x)", "x.y", "x . y", "1..y", "(1).y", "ab", "'a'", "x[0]"]
    hostile += ["x, y", "x if y else z", "x=1", "lambda: x", "entry", "x\\", "x#", "9" * 10**6 + "!", "１", "ａ"]
    arithmetic, letters = ["2*x**2 - 3*x*(y + 1)/4.5", "C + exp(x) + sin(2*x)"], ["0 1 1\n1 0 2", "_ Q _", "ABBA"]
    for dataset in (*EVALUATED, *PARSED):
        pattern = _PLAIN[dataset]
        assert not [text for text in hostile if re.fullmatch(pattern, text)], dataset
        assert all(re.fullmatch(pattern, text) for text in (arithmetic if dataset in PARSED else letters)), dataset


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("reasoning_gym", "reasoning_gym.factory"):
        monkeypatch.setitem(sys.modules, module, None)
    raises(ConfigError, re.escape("pip install 'covey[reasoning-gym]'"), get_task, "reasoning_gym:dataset=gcd")


@installed
def test_what_is_wrong_is_told() -> None:
    for options, message in (
        ("dataset=leg_countin", "dataset='leg_countin': no such dataset; did you mean 'leg_counting'"),
        ("dataset=gcd|knight_swap", "dataset='knight_swap': a seed does not make the same items again"),
        ("dataset=gcd,config=max_valu=3", "no option 'max_valu'; did you mean 'max_value'"),
        ("dataset=gcd,config=lcm.max_value=3", "config='lcm.max_value=3': it begins with none of dataset='gcd'"),
        ("dataset=gcd,config=seed=3", r"no option 'seed' \(items follow run.seed, .*max_value$"),
        ("answer=last", "task='reasoning_gym:answer=last' lacks its option 'dataset'; write reasoning_gym:dataset="),
        ("dataset=gcd,config=max_value=0", "config='max_value=0': max_value must be"),
        ("dataset=gcd,config=max_value=few", "must be a whole number"),
        ("dataset=gcd,answer=tag", "did you mean 'tags'"),
        ("dataset=gcd,num_eval=0", "num_eval=0"),
        ("dataset=gcd,seconds=nan", "seconds=nan: write a number above 0"),
        ("dataset=3", "dataset='3': no such dataset"),
        ("dataset=gcd,config=3", "'3' is not an option"),
        ("dataset=gcd,answer=3", "answer=3: use one of tags"),
    ):
        raises(ConfigError, message, get_task, f"reasoning_gym:{options}")


@installed
def test_every_dataset_and_its_own_options() -> None:
    from reasoning_gym.factory import DATASETS

    names = [name for name in DATASETS if name not in REFUSED]
    task = ReasoningGym("|".join(names), config="gcd.max_value=20|gcd.min_value=2|lcm.max_value=9")
    given = {"gcd": '{"max_value": 20, "min_value": 2}', "lcm": '{"max_value": 9}'}
    assert task._options == dict.fromkeys(names, "{}") | given
    task = ReasoningGym("gcd|lcm", config="gcd.max_value=20|max_value=30")
    assert task._options == {"gcd": '{"max_value": 20}', "lcm": '{"max_value": 30}'}


@installed
@pytest.mark.slow
def test_items_that_take_for_ever() -> None:
    config = "needle_haystack.min_num_statements=99999999|needle_haystack.max_num_statements=99999999"
    task = ReasoningGym("gcd|needle_haystack", config=config, seconds=1.0)
    raises(DataError, "needle_haystack-2000000000: longer than 1 s to make; raise seconds", task.eval_rows)
    task._pool.close()


@pytest.fixture(scope="module")
def task() -> Iterator[ReasoningGym]:
    options = "answer=text,config=gcd.max_value=20,num_train=60,num_eval=30,seconds=20"
    task = get_task(f"reasoning_gym:dataset=gcd|ransom_note|countdown,{options}")
    yield task
    task._pool.close()


@installed
def test_rows_are_the_same_everywhere_and_on_one_side(task: ReasoningGym, monkeypatch: pytest.MonkeyPatch) -> None:
    held_out, trained = task.eval_rows(), [task.train_rows(seed) for seed in (1, 2)]
    texts = [{row["prompt"][0]["content"] for row in rows} for rows in (held_out, *trained)]
    assert (len(held_out), len(texts[0])) == (30, 30)
    assert {row["kind"] for row in held_out} == {"gcd", "ransom_note", "countdown"}
    assert not texts[0] & (texts[1] | texts[2])
    assert max(row["item"][2] for rows in trained for row in rows) < HELD_OUT // 2 + 10**6
    assert not {row["uid"] for row in trained[0]} & {row["uid"] for row in trained[1]}
    monkeypatch.setenv("PYTHONHASHSEED", "7")  # ransom_note goes through a set
    other = pickle.loads(pickle.dumps(task))
    assert (other.train_rows(1), other.eval_rows()) == (trained[0], held_out)
    other._pool.close()


@installed
def test_scores(task: ReasoningGym, tmp_path: Path) -> None:
    rows, logged = task.eval_rows(), dict[str, float]()
    hard = next(row for row in rows if row["kind"] == "countdown")
    for row in rows[:9]:
        assert (task.is_correct(row["answer"], row), task.is_correct("zzz", row)) == (True, False)
    task._pool._time_limit = 3.0
    texts = [hard["answer"], f"__import__('os').system('touch {tmp_path / 'mark'}')", "9**9**9", "", "9**9**9"]
    assert task.score(texts, [hard["item"]] * 5, log_metric=logged.__setitem__) == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert (logged, (tmp_path / "mark").exists()) == ({"reasoning_gym/failed": 0.4}, False)
    raising = ["prime_factorization", "{}", HELD_OUT]  # its scorer raises ValueError for what is no number
    assert task.score([[{"role": "assistant", "content": "zzz"}]], [raising], log_metric=logged.__setitem__) == [0.0]
    assert logged == {"reasoning_gym/failed": 1.0}
    for name, answer in {"complex_arithmetic": "nan", "number_sorting": "['NaN', 'NaN', 'NaN', 'NaN', 'NaN']"}.items():
        assert task.score([answer], [[name, "{}", HELD_OUT]]) == [0.0]
