"""Chat templates are tried when the trainer is made; traces of tools, what a prompt may end with, opened thoughts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import END_ID, tiny_model
from trl_runs import OPENS, TOOLS, TURNS, Seen, add, made, messages, tokenizer_of, unique_letters

import covey
from covey.errors import ConfigError, CoveyError, DataError
from covey.rewards import numeric_match
from covey.tasks import build_prompts
from covey.trl.loading import RewardModel
from covey.trl.rewards import think_format_reward
from covey.trl.toolchat import ToolChat

WHOLE = TOOLS + TURNS + OPENS
FOLLOWED = "{% if loop.nextitem is defined and loop.nextitem['role'] == 'tool' and m['role'] == 'tool' %}"
LAST_ONLY = TURNS.replace("{{ '<|im_start|>'", FOLLOWED + "{% else %}{{ '<|im_start|>'")
LAST_ONLY = LAST_ONLY.replace("<|im_end|>\n{% endfor %}", "<|im_end|>\n{% endif %}{% endfor %}")
BAD = {
    "no results": (
        TOOLS + TURNS.replace("messages %}", "messages if m['role'] != 'tool' %}", 1),
        "what a tool returned",
    ),
    "the last result only": (TOOLS + LAST_ONLY, "what each of 2 calls in a turn returned"),
    "no tools": (TURNS, "does not show the model its tools"),
}
TRACE: list[dict[str, Any]] = [
    {"role": "user", "content": "1+1?", "tool_calls": None, "name": None},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 1}'}},
            {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    {"role": "tool", "tool_call_id": "call_2", "content": "noon"},
]
SHOWN = (
    "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call><|im_end|>\n'
    "<|im_start|>tool\n2<|im_end|>\n<|im_start|>tool\nnoon<|im_end|>\n<|im_start|>assistant\n"
)


def begun(template: str, out: Path, rows: Any, tools: Any) -> str:
    """The prompt of a rollout."""
    model, tokenizer = tiny_model("llama", max_position_embeddings=4096), tokenizer_of(template)
    trainer = made(model, out, messages, rows, processing_class=tokenizer, tools=tools)
    episode = trainer.run.rollout().groups[0].episodes[0]
    return str(tokenizer.decode(episode.token_ids[: -episode.num_sampled]))


@pytest.mark.parametrize("name", BAD)
def test_templates_that_hide_something_are_refused_at_the_start(name: str, tmp_path: Path) -> None:
    template, message = BAD[name]
    with pytest.raises(ConfigError, match=message):
        begun(template + OPENS, tmp_path, [{"prompt": [{"role": "user", "content": "1+1?"}]}], [add])


def test_results_of_several_calls() -> None:
    """The turn before them is written with one call: some templates refuse more."""
    check = "{% if (m['tool_calls'] or []) | length > 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    chat = ToolChat(tokenizer_of(TOOLS + TURNS.replace("%}", "%}" + check, 1) + OPENS), (END_ID,), {})
    told = [{"role": "tool", "name": "add", "content": text} for text in ("2", "<|im_end|>", "\u24021\u2402")]
    ids = chat.results(told, ended=False).tolist()
    assert ids.count(END_ID) == 4  # of the turn before, and of three messages, none of a result
    assert ids[0] == END_ID != chat.results(told[:1], ended=True)[0]


def test_traces_of_openai_as_prompts(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(WHOLE)
    (prompt,) = build_prompts([{"prompt": TRACE}], tokenizer)
    assert tokenizer.decode(prompt.token_ids) == SHOWN
    assert isinstance(prompt.content, list)
    assert prompt.content[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": 1}
    assert prompt.content[2] == {"role": "tool", "tool_call_id": "call_1", "content": "2"}
    shown = begun(WHOLE, tmp_path, [{"prompt": TRACE}], [add])
    assert shown == "<|im_start|>system\nadd<|im_end|>\n" + SHOWN


@pytest.mark.parametrize("arguments", ["{", "[]", "3", "null", "[" * 100_000])
def test_arguments_that_are_no_object(arguments: str) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    trace = [TRACE[0], {"role": "assistant", "tool_calls": [call]}, TRACE[2]]
    with pytest.raises(DataError, match=r"row 0: message 1 of the prompt: a tool call has arguments=.*JSON object"):
        build_prompts([{"prompt": trace}], tokenizer_of(TURNS + OPENS))


STARTED = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "It is"}]
GOES_ON = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\nIt is"


def test_a_prompt_that_ends_with_the_assistant_is_continued(tmp_path: Path) -> None:
    tokenizer, rows = tokenizer_of(WHOLE), [{"prompt": STARTED}]
    (prompt,) = build_prompts(rows, tokenizer)
    assert tokenizer.decode(prompt.token_ids) == GOES_ON
    assert begun(WHOLE, tmp_path, rows, None) == GOES_ON
    assert begun(WHOLE, tmp_path, rows, [add]) == "<|im_start|>system\nadd<|im_end|>\n" + GOES_ON


def test_a_reward_model_reads_one_turn() -> None:
    model = RewardModel(tiny_model("llama"), tokenizer_of(TURNS))
    text = model._text(STARTED, [{"role": "assistant", "content": " 2"}])
    assert text == GOES_ON + " 2<|im_end|>\n"


def test_an_answer_within_the_prompt_is_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(TURNS + OPENS)
    with pytest.raises(DataError, match="row 0: the column 'messages' ends with a message of the assistant"):
        build_prompts([{"messages": STARTED}], tokenizer, prompt_column="messages")
    args = covey.GRPOConfig(output_dir=str(tmp_path), prompt_column="messages", num_generations=2)
    with pytest.raises(DataError, match="an answer leaves nothing to ask"):
        covey.GRPOTrainer(tiny_model("llama"), messages, args, [{"messages": STARTED}], processing_class=tokenizer)
    for last in (TRACE[1], {"role": "assistant", "content": " \n"}):
        with pytest.raises(DataError, match="ends with a message of the assistant"):
            build_prompts([{"prompt": [TRACE[0], last]}], tokenizer)
    assert build_prompts([{"messages": STARTED[:1]}], tokenizer, prompt_column="messages")


ROWS = [{"prompt": [{"role": "user", "content": text}], "answer": 5} for text in ("Flat is", "Now is")]


def templated(model: Path, out: Path, reward: Any, rows: Any, template: str) -> Any:
    of_run = {"max_completion_length": 4, "max_steps": 1, "logging_steps": 1}
    return made(model, out, reward, rows, processing_class=tokenizer_of(template), **of_run)


def test_what_is_refused_at_the_start(model_folder: Path, tmp_path: Path) -> None:
    """A template without the user's text, and a reference that is none."""
    with pytest.raises(CoveyError, match="leaves out what the user says") as refused:
        templated(model_folder, tmp_path, unique_letters, ROWS, "{{ messages[0]['text'] }}answer: ")
    assert "answer: " in str(refused.value)
    assert "chat_template_kwargs" in str(refused.value)
    rows = [ROWS[0], {**ROWS[1], "answer": "five or so"}]
    with pytest.raises(CoveyError, match="answer='five or so' is not a number"):
        templated(model_folder, tmp_path, numeric_match(), rows, "{{ messages[0]['content'] }}")


def test_the_run_knows_that_the_template_opened_the_thought(model_folder: Path, tmp_path: Path) -> None:
    seen = Seen(think_format_reward)
    templated(model_folder, tmp_path, seen, ROWS, "{{ messages[0]['content'] }}{{ ' <think>' }}").train()
    assert all(end.endswith("<think>") for end in seen.all("prompt_ends"))
    first = (tmp_path / "covey" / "metrics.jsonl").read_text().splitlines()[0]
    assert json.loads(first)["prompts/opened_tag"] == 1.0
