"""Rewards of a text: matches, numbers, patterns, tags, JSON, lengths; and the words that they record."""

from contextlib import closing
from typing import Any

import pytest

from covey.errors import ConfigError, RewardError
from covey.recipes.arithmetic.arithmetic import Arithmetic
from covey.rewards import exact_match, format_reward, numeric_match
from covey.rewards.code import CodeReward
from covey.rewards.maths import MathReward
from covey.rewards.text import has_tags, json_reward, length_reward, say, tags_reward
from covey.rollout.scoring import Scorer
from covey.tasks import build_prompts
from covey.tasks.usmle import USMLERewardModel, _correct_letter
from covey.trl.rewards import think_format_reward
from fakes import FakeTokenizer, fake_episode, raises

TAGGED = {
    "<think>a</think><answer>b</answer>": True,
    "\n<think>a\nb</think>\n <answer> c </answer>\n": True,
    "<think>a</think> so <answer>b</answer>": False,
    "<answer>b</answer><think>a</think>": False,
    "<think> </think><answer>b</answer>": False,
    "<think>a</think><answer>b</answer> bye": False,
    "<think>a</think><answer>b</answer><answer>c</answer>": False,
    "<think>a<answer>b</answer></think><answer>b</answer>": False,
    "<think>a </answer> b</think><answer>c</answer>": False,
    "<think>a</think>": False,
    "": False,
}
THINK = "reason</think><answer>4</answer>"


def chat(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def test_exact_match() -> None:
    reward = exact_match()
    assert reward.__name__ == "exact_match"
    assert reward(completions=["Paris", " Paris\n", "paris", "In Paris"], answer=["Paris"] * 4) == [1, 1, 0, 0]
    assert exact_match(ignore_case=True)(completions=chat("PARIS"), answer=["Paris"]) == [1.0]
    assert exact_match("capital")(completions=["Rome"], capital=["Rome"], answer=["x"]) == [1.0]
    assert exact_match()(completions=["1"], answer=[None]) == [None]  # a row without a reference is not scored


def test_numeric_match_lenient_and_strict() -> None:
    texts = ["7", "It is 7.", "The answer is 7, not 8", "8", "no idea"]
    lenient, strict = numeric_match(), numeric_match(strict=True)
    assert lenient(completions=texts, answer=["7"] * 5) == [1, 1, 1, 0, 0]
    assert strict(completions=texts, answer=[7] * 5) == [1, 0, 0, 0, 0]
    assert (lenient.__name__, strict.__name__) == ("numeric_match", "strict_numeric_match")


def test_numbers_are_compared_exactly() -> None:
    reward = numeric_match()
    assert reward(completions=["0.1", "1/10", "0.10000000000000001"], answer=[0.1] * 3) == [1.0, 0.0, 0.0]
    assert reward(completions=["9007199254740993"], answer=[9007199254740992]) == [0.0]
    assert reward(completions=["1", "1"], answer=[None, 1]) == [None, 1.0]


def test_a_bad_reference_is_the_datasets_fault() -> None:
    with pytest.raises(RewardError, match="answer='seven' is not a number") as caught:
        numeric_match()(completions=["1", "7"], answer=["1", "seven"])
    assert caught.value.sample == 1
    with pytest.raises(RewardError, match=r"'answer', which is absent \(present: label\)"):
        numeric_match()(completions=["1"], label=["1"])


def test_format_reward() -> None:
    reward = format_reward(r"<think>.*</think>\s*\d+", name="think")
    assert reward.__name__ == "think"
    assert reward(completions=chat("<think>a\nb</think> 4\n", "<think>a</think>", "x <think></think>4")) == [1, 0, 0]
    assert format_reward("[0-9]", full=False)(completions=["a1b", "ab"]) == [1.0, 0.0]
    raises(ConfigError, "pattern='\\('", format_reward, "(")


def test_tags() -> None:
    assert {text: has_tags(text, ("think", "answer")) for text in TAGGED} == TAGGED
    assert tags_reward("think", "answer")([*TAGGED]) == [float(good) for good in TAGGED.values()]


def test_json() -> None:
    schema = {"type": "object", "required": ["answer"], "properties": {"answer": {"type": "integer"}}}
    texts = ['{"answer": 3}', 'So:\n```json\n{"answer": 3}\n```', '{"answer": "3"}', "{}", "[", "3", "[" * 100_000]
    assert json_reward(schema)(texts) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert json_reward()(texts) == [1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0]
    raises(ConfigError, "schema", json_reward, {"type": "thing"})


def test_length() -> None:
    ids, texts = [[], [1] * 4, [1] * 5, [1] * 7, [1] * 9], [""] * 5
    assert length_reward(4)(texts, completion_ids=ids) == [0.0, 1.0, 0.0, 0.0, 0.0]
    assert length_reward(5, over=4, least=0 + 1)(texts, completion_ids=ids) == [0.0, 1.0, 1.0, 0.5, 0.0]
    with pytest.raises(RewardError, match="completion_ids"):
        length_reward(4)(["x"])
    for wrong in ({"most": 0}, {"most": 3, "least": 4}, {"most": 3, "over": -1}):
        raises(ConfigError, None, length_reward, **wrong)


def test_names() -> None:
    assert [f.__name__ for f in (tags_reward("a"), json_reward(), length_reward(3))] == ["tags", "json", "length"]
    for wrong in ((), ("a b",), ("<a>",)):
        raises(ConfigError, "tags=", tags_reward, *wrong)


def test_hostile_json_is_no_json_of_the_schema() -> None:
    price = json_reward({"type": "object", "properties": {"price": {"type": "number", "multipleOf": 0.01}}})
    assert price(['{"price": 1e999}', '{"price": 2}']) == [0.0, 1.0]
    assert json_reward()(["NaN", "[-Infinity]", "Infinity", "[1]"]) == [0.0, 0.0, 0.0, 1.0]
    node = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}}
    either = [{**node, "required": [name]} for name in ("x", "y")]
    deep = json_reward({"$ref": "#/$defs/n", "$defs": {"n": {"anyOf": either}}}, time_limit=1.0)
    assert deep(['{"a":' * 24 + "{}" + "}" * 24, '{"x": 1}']) == [0.0, 1.0]


def test_a_tag_that_the_prompt_opened_is_only_closed() -> None:
    reward = tags_reward("think", "answer")
    ends = ["<think>\n", "<|assistant|><think>", "", "<think>done</think>", "<other>"]
    assert reward([THINK] * 5, prompt_ends=ends) == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert reward([THINK, THINK], prompts=["2+2=<think>\n", [{"role": "user", "content": "2+2"}]]) == [1.0, 0.0]
    twice = ["<think>" + THINK, "a<think>" + THINK, "reason<answer>4</answer>"]
    assert reward(twice, prompt_ends=["<think>"] * 3) == [0.0, 0.0, 0.0]
    assert reward(["<think>" + THINK], prompt_ends=[""]) == [1.0]
    assert think_format_reward([THINK, "<think>" + THINK, "open"], prompt_ends=["<think>\n"] * 3) == [1.0, 0.0, 0.0]
    assert think_format_reward([THINK, "<think>" + THINK]) == [0.0, 1.0]
    pattern = format_reward(r"<think>[^<]+</think>\s*<answer>\d</answer>")
    assert pattern([THINK, THINK, "<think>" + THINK], prompt_ends=["<think>\n", "", ""]) == [1.0, 0.0, 1.0]


def test_rewards_learn_from_the_trainer_how_a_templates_prompt_ends() -> None:
    rows, thinking = [{"prompt": [{"role": "user", "content": "2+2"}]}] * 2, {"enable_thinking": 1}
    prompts = build_prompts(rows, FakeTokenizer(), chat_template_kwargs=thinking)
    scorer = Scorer([think_format_reward, tags_reward("think", "answer")])
    rewards, _ = scorer.score(prompts, [fake_episode(text, p) for text, p in zip([THINK, "4"], prompts, strict=True)])
    assert (rewards.tolist(), scorer.take_logged().metrics) == ([2.0, 0.0], {"prompts/opened_tag": 1.0})
    (plain,) = build_prompts([{"prompt": "2+2="}], FakeTokenizer())
    assert scorer.score([plain], [fake_episode(THINK, plain)])[0].tolist() == [0.0]
    assert scorer.take_logged().metrics == {}


def verdicts(reward: Any, texts: list[str], **columns: Any) -> dict[str, list[Any]]:
    """What a run's table would have beside the rewards."""
    kept: dict[str, list[Any]] = {}
    reward(completions=texts, log_extra=lambda name, values: kept.setdefault(name, []).extend(values), **columns)
    return kept


def test_numbers_and_letters_are_told() -> None:
    texts = ["so it is #### 42", "no idea"]
    for second, word in (("1", "found no answer"), (None, None)):
        said = verdicts(numeric_match(), texts, answer=["42", second])
        assert said == {"verdict/numeric_match": ["found 42", word]}
    assert verdicts(exact_match(), texts, answer=["42", "1"]) == {}
    options = [{"A": "x", "B": "y"}] * 2
    for reward, name in ((_correct_letter, "correct_letter"), (USMLERewardModel(), "usmle_reward")):
        said = verdicts(reward, ["The answer is B.", "hm"], answer=["A", "A"], options=options)
        assert said == {f"verdict/{name}": ["found B", "found no answer"]}
    (reward,) = Arithmetic().reward_funcs
    said = verdicts(reward, ["It is 7.", "seven"], answer=["7", "7"], kind=["sum", "sum"])
    assert said == {"verdict/correct_number": ["found 7", "found no answer"]}


def test_the_expression_that_was_read_is_told() -> None:
    pytest.importorskip("math_verify")
    with closing(MathReward(workers=1)) as reward:
        said = verdicts(reward, [r"thus $\boxed{\frac{1}{2}}$", "dunno"], answer=["0.5", "1"])["verdict/math"]
    assert ("frac{1}{2}" in said[0], said[1]) == (True, "found no answer")


def test_the_test_that_failed_is_told() -> None:
    texts = [f"```python\ndef add(a, b):\n    return a {sign} b\n```" for sign in "-+"]
    with closing(CodeReward(unprotected=True, workers=1)) as reward:
        said = verdicts(reward, texts, tests=[["assert add(2, 0) == 2", "assert add(1, 2) == 3"]] * 2)
    failed, passed = said["verdict/passes_tests"]
    assert failed.startswith("1 of 2 tests passed; test 2: ")
    assert passed == "2 of 2 tests passed"


def test_words_are_short_and_wanted_by_nobody_else() -> None:
    kept: dict[str, list[Any]] = {}
    say({"log_extra": kept.__setitem__}, "x", ["y" * 10_000, None])
    assert [word and len(word) for word in kept["verdict/x"]] == [200, None]
    say({}, "x", ["nobody keeps it"])
    assert numeric_match()(completions=["7"], answer=["7"]) == [1.0]
