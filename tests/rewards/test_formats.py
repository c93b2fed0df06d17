"""Rewards for form."""

from __future__ import annotations

import pytest

from covey.errors import ConfigError, RewardError
from covey.rewards import format_reward
from covey.rewards.formats import has_tags, json_reward, length_reward, tags_reward
from covey.rollout.scoring import Scorer
from covey.tasks import build_prompts
from covey.trl.rewards import think_format_reward
from fakes import FakeTokenizer, fake_episode


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("<think>a</think><answer>b</answer>", True),
        ("\n<think>a\nb</think>\n <answer> c </answer>\n", True),
        ("<think>a</think> so <answer>b</answer>", False),
        ("<answer>b</answer><think>a</think>", False),
        ("<think> </think><answer>b</answer>", False),
        ("<think>a</think><answer>b</answer> bye", False),
        ("<think>a</think><answer>b</answer><answer>c</answer>", False),
        ("<think>a<answer>b</answer></think><answer>b</answer>", False),
        ("<think>a</think>", False),
        ("", False),
    ],
)
def test_tags(text: str, good: bool) -> None:
    assert has_tags(text, ("think", "answer")) is good
    assert tags_reward("think", "answer")([text]) == [float(good)]


def test_json() -> None:
    schema = {"type": "object", "required": ["answer"], "properties": {"answer": {"type": "integer"}}}
    texts = ['{"answer": 3}', 'So:\n```json\n{"answer": 3}\n```', '{"answer": "3"}', "{}", "[", "3", "[" * 100_000]
    assert json_reward(schema)(texts) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert json_reward()(texts) == [1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0]
    with pytest.raises(ConfigError, match="schema"):
        json_reward({"type": "thing"})


def test_length() -> None:
    ids = [[], [1] * 4, [1] * 5, [1] * 7, [1] * 9]
    texts = [""] * 5
    assert length_reward(4)(texts, completion_ids=ids) == [0.0, 1.0, 0.0, 0.0, 0.0]
    assert length_reward(5, over=4, least=0 + 1)(texts, completion_ids=ids) == [0.0, 1.0, 1.0, 0.5, 0.0]
    with pytest.raises(RewardError, match="completion_ids"):
        length_reward(4)(["x"])
    for wrong in ({"most": 0}, {"most": 3, "least": 4}, {"most": 3, "over": -1}):
        with pytest.raises(ConfigError):
            length_reward(**wrong)


def test_names() -> None:
    assert [f.__name__ for f in (tags_reward("a"), json_reward(), length_reward(3))] == ["tags", "json", "length"]
    for wrong in ((), ("a b",), ("<a>",)):
        with pytest.raises(ConfigError, match="tags="):
            tags_reward(*wrong)


def test_hostile_json_is_no_json_of_the_schema() -> None:
    price = json_reward({"type": "object", "properties": {"price": {"type": "number", "multipleOf": 0.01}}})
    assert price(['{"price": 1e999}', '{"price": 2}']) == [0.0, 1.0]
    assert json_reward()(["NaN", "[-Infinity]", "Infinity", "[1]"]) == [0.0, 0.0, 0.0, 1.0]
    node = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}}
    either = [{**node, "required": [name]} for name in ("x", "y")]
    deep = json_reward({"$ref": "#/$defs/n", "$defs": {"n": {"anyOf": either}}}, time_limit=1.0)
    assert deep(['{"a":' * 24 + "{}" + "}" * 24, '{"x": 1}']) == [0.0, 1.0]


def test_a_closing_tag_elsewhere() -> None:
    assert not has_tags("<think>a </answer> b</think><answer>c</answer>", ("think", "answer"))


THINK = "reason</think><answer>4</answer>"


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
    prompts = build_prompts(
        [{"prompt": [{"role": "user", "content": "2+2"}]}] * 2,
        FakeTokenizer(),
        chat_template_kwargs={"enable_thinking": 1},
    )
    scorer = Scorer([think_format_reward, tags_reward("think", "answer")])
    rewards, _ = scorer.score(prompts, [fake_episode(text, p) for text, p in zip([THINK, "4"], prompts, strict=True)])
    assert rewards.tolist() == [2.0, 0.0]
    assert scorer.take_logged().metrics == {"prompts/opened_tag": 1.0}
    (plain,) = build_prompts([{"prompt": "2+2="}], FakeTokenizer())
    assert scorer.score([plain], [fake_episode(THINK, plain)])[0].tolist() == [0.0]
    assert scorer.take_logged().metrics == {}
