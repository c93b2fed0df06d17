"""Tools that return pictures: their tokens, what is scored, recorded and refused, and runs that go on as they were.

Which token is drawn is written down, so that there are calls; log-probabilities are the model's own.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from test_tools import call, sampled
from tiny_models import END_ID, tiny_model, tiny_tokenizer
from tiny_vision import IMAGE_ID, picture, tiny_processor, tiny_vision, vision_folder, vision_tokenizer
from training_runs import Settings, StopAt, same_weights

from covey import GRPOConfig, GRPOTrainer, trl
from covey.environments.actions import Call
from covey.errors import ConfigError
from covey.observe.run_folder import RunFolder
from covey.pytorch.engine import device as engine_device
from covey.pytorch.engine.sampling import Draw
from covey.pytorch.models.loading import load_model
from covey.rollout.calls import AsyncRunner
from covey.rollout.toolchat import ToolChat
from covey.rollout.tools import Calls, Order
from covey.tasks.pictures import read_picture
from covey.training.replay import replay
from covey.types import PICTURES
from fakes import raises

TOOLS = '''
import numpy as np
from PIL import Image

def look(n: int):
    """Look.

    Args:
        n: Where.
    """
    shown = Image.fromarray(np.random.default_rng(n).integers(0, 256, (14, 20, 3), np.uint8))
    return shown if n < 5 else [f"<image> at {n}", {"type": "image", "image": shown}, {"type": "text", "text": "."}]

def rewarded(completions, **columns):
    seen = [[part for message in said for part in message["content"] if isinstance(part, dict)] for said in completions]
    assert all(part["image"].size == (20, 14) for parts in seen for part in parts if part["type"] == "image")
    return [float(len(parts)) + len(said[-1]["content"]) / 7 for said, parts in zip(completions, seen)]
'''
TRIMS = (
    "{{ tools }}{% for m in messages %}{{ '<|im_start|>' + m.role + ':' }}{% for p in m.tool_calls %}"
    "<tool_call>{{ p.function | tojson }}</tool_call>{% endfor %}{% if m.content is string %}{{ m.content | trim }}"
    "{% else %}{% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text | trim }}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
ASKED = [{"role": "user", "content": "What?"}]


def script(sample: int, turn: int) -> str:
    return call("look", n=4 * sample + turn) if turn < 1 + sample else f"Seen {sample + turn}."


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = vision_tokenizer()

    def draw(rows: Any, logits: torch.Tensor) -> Draw:
        chosen = [[*tokenizer(script(*row.stream[-2:])).input_ids, END_ID][row.sampled] for row in rows]
        tokens = torch.tensor(chosen)
        return Draw(tokens.numpy(), logits.float().log_softmax(-1)[torch.arange(len(rows)), tokens].numpy(), None)

    monkeypatch.setattr(engine_device, "draw_tokens", draw)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return long_folder("smolvlm", tmp_path_factory.mktemp("vision") / "model")


def long_folder(name: str, folder: Path) -> str:
    """A model that reads long prompts, since tools are told in them."""
    vision_folder(name, folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 4096
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture
def acting(model: str, tmp_path: Path) -> Settings:
    (tmp_path / "tools.py").write_text(TOOLS)
    own: Settings = {"model": model, "output_dir": str(tmp_path / "run"), "max_completion_length": 100, "max_steps": 2}
    own |= {"tools": [f"{tmp_path}/tools.py:look"], "functions": f"{tmp_path}/tools.py:rewarded", "save_steps": 1}
    own |= {"num_generations": 2, "prompts_per_step": 2, "learning_rate": 1e-2, "max_conversation_tokens": 2000}
    return own | {"prompt_order": "given", "keep_batches": True, "progress": False, "report_to": ()}


def trainer(settings: Settings, callbacks: Any = None, **changes: Any) -> GRPOTrainer:
    rows = [{"prompt": ASKED}, {"prompt": ASKED, "image": picture(9)}]
    return GRPOTrainer(args=GRPOConfig(**settings | changes), train_dataset=rows, callbacks=callbacks)


def test_what_is_read_is_scored_as_the_whole_model_does(acting: Settings, says: None) -> None:
    run = trainer(acting)
    album: Any = run.policy.album
    _, group = sampled(run)
    own = [picture(9), *(picture(n) for n in (4, 5))]
    ids = group.episodes[1].token_ids
    assert (ids >= PICTURES).sum() == 3 * 20
    keys = [album.open(read_picture(each, "here")) for each in own]
    assert ids[ids >= PICTURES].tolist() == [place for each in keys for place in each if place >= PICTURES]
    text = run.policy.tokenizer.decode(album.placeholders(ids))
    first, second = (f"{call('look', n=n)}<|im_end|>\n<|im_start|>user:" for n in (4, 5))
    assert f"{first}<fake_token_around_image>" in text.replace("<row_1_col_1>", "")
    assert "<tool_response>\n\n</tool_response><|im_end|>\n" in text
    assert "<tool_response>\n<image> at 5\n.\n</tool_response><|im_end|>\n" in text
    assert second in text
    inputs = album.processor(text=["<image>" * 3], images=[own], return_tensors="pt")
    shown = {name: inputs[name] for name in ("pixel_values", "pixel_attention_mask")}
    with torch.no_grad():
        logits = album.whole(input_ids=torch.from_numpy(album.placeholders(ids))[None], **shown).logits[0, :-1]
    expected = logits.log_softmax(-1)[range(len(ids) - 1), ids[1:].clip(max=127)]
    place = group.episodes[1].sampled
    assert np.abs(expected.numpy()[place[1:]] - group.episodes[1].logprobs[place]).max() < 1e-5
    run.close()


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_with_the_same_bits(acting: Settings, says: None) -> None:
    whole = trainer(acting)
    whole.train()
    gaps = [r["sampling/sampling_logp_difference/max"] for r in whole.state.log_history if "loss" in r]
    assert max(gaps) < 1e-5
    run = RunFolder.read(acting["output_dir"])
    assert len([*run.pictures.iterdir()]) == 4
    row = run.read_completions(1)[3]
    assert row["reward"] == pytest.approx(1 + 1 + 3 + len("Seen 3.") / 7 - 1)
    assert row["completion"].count("[picture ") == 2
    for step in (1, 2):
        assert replay(run.path, step).exact
    acting["output_dir"] += "-again"
    with pytest.raises(KeyboardInterrupt):
        trainer(acting, [StopAt(1)]).train()
    again = trainer(acting)
    again.train(resume_from_checkpoint=True)
    assert same_weights(whole, again)


def test_pictures_that_the_model_cannot_take_are_told(acting: Settings, says: None, tmp_path: Path) -> None:
    pixels = "np.random.default_rng(n).integers(0, 256, (14, 20, 3), np.uint8)"
    (tmp_path / "tools.py").write_text(TOOLS.replace(pixels, "np.zeros((700, 1, 3), np.uint8)"))
    run = trainer(acting, model=long_folder("qwen2_5_vl", tmp_path / "qwen"))
    (one, other), _ = (group.with_tools for group in sampled(run))
    for turn in (one.turns[1], *other.turns[1:]):
        assert "a picture of 1 x 700 pixels: absolute aspect ratio" in turn.observation
        assert turn.pictures == ()
    run.close()


def test_pictures_that_cannot_be_read_are_told(acting: Settings) -> None:
    def made(**more: Any) -> list[Any]:
        return [{"type": "image", "image": picture(0), **more}]

    tools: Any = {"many": lambda: made() * 17, "none": lambda: made(image=None), "bytes": lambda: made(image=b"x")}
    tools |= {"wide": lambda: [Image.new("RGB", (8000, 5000))] * 2}
    tools |= {"large": lambda: [Image.fromarray(np.random.default_rng(0).integers(0, 256, (2000, 2000, 3), np.uint8))]}

    async def soon() -> Any:
        return "so", picture(1)

    tools["soon"] = soon
    *told, good = Calls(AsyncRunner(), 20, blind="").run([Order(0, Call(name), tools) for name in tools])
    assert [each.failed for each in told] == [True] * 5
    words = (
        "a list of up to 16",
        "is a NoneType; give a PIL image",
        "cannot be read",
        "64,000,000 pixels",
        "of more than 8 MiB",
    )
    for each, said in zip(told, words, strict=True):
        assert said in each.text
    assert (good.text, good.failed, [each.size for each in good.pictures]) == ("so", False, [(20, 14)])


def test_a_template_that_writes_results_itself() -> None:
    """Pictures are where it puts them; a text that it would trim stands as it is, and is never special."""
    processor: Any = tiny_processor("llava")
    processor.tokenizer.chat_template = TRIMS
    loaded: Any = load_model(tiny_vision("llava"), processor)
    album = loaded.model.album
    chat = ToolChat(loaded.tokenizer, [END_ID], {}, album=album)
    shown = read_picture(picture(0), "here")
    told: Any = [{"role": "tool", "name": "f", "content": "<image>\n", "pictures": (shown, shown)}]
    told += [{"role": "tool", "name": "f", "content": " b"}]
    ids = chat.results(told, ended=True)
    assert (ids >= PICTURES).sum() == 2 * 16
    assert IMAGE_ID not in ids
    words = loaded.tokenizer.decode(ids[ids < PICTURES])
    loaded.tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant:",
        "fields": {"content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"}},
    }
    said = loaded.tokenizer("well<|im_end|>", add_special_tokens=False).input_ids
    message, calls = chat.read(said, ids.tolist(), [], ended=True)
    assert (message["content"], calls) == ("well", [])
    assert words == "\n<|im_start|>tool:<image>\n<|im_end|>\n<|im_start|>tool: b<|im_end|>\n<|im_start|>assistant:"


def test_trl_shows_pictures_of_tools(acting: Settings, says: None, model: str, tmp_path: Path) -> None:
    def look(n: int) -> Any:
        """Look.

        Args:
            n: Where.
        """
        return [picture(n), "here"]

    def rewarded(completions: Any, **_: Any) -> list[float]:
        assert completions[0][1]["content"][0]["image"].size == (20, 14)
        return [float(len(each)) for each in completions]

    args = trl.GRPOConfig(str(tmp_path / "out"), report_to="none", num_generations=2, per_device_train_batch_size=4,
                          max_steps=1, max_completion_length=400, save_strategy="no")  # fmt: skip
    processor: Any = tiny_processor("smolvlm")
    processor.tokenizer.chat_template = processor.chat_template = TRIMS
    rows = [{"prompt": ASKED, "image": picture(9)}] * 2
    made = trl.GRPOTrainer(model, rewarded, args, rows, processing_class=processor, tools=[look])
    made.train()


def test_samples_ahead_are_compared_before_the_run(acting: Settings) -> None:
    """A thread that samples during an update may meet the first picture, when the weights cannot be compared."""
    wrong = acting | {"processor_kwargs": {"size": "large"}, "max_staleness": 1}
    args, rows = GRPOConfig(**wrong), [{"prompt": ASKED}] * 2
    raises(
        ConfigError, "data.processor_kwargs=.*: the processor cannot read", GRPOTrainer, args=args, train_dataset=rows
    )


def test_a_model_of_text_reads_none(acting: Settings, says: None, tmp_path: Path) -> None:
    text = tmp_path / "text"
    tiny_model("llama", max_position_embeddings=4096).save_pretrained(text)
    tiny_tokenizer().save_pretrained(text)
    words = "the tool look returned a picture: the model reads none; use a vision model"
    run = GRPOTrainer(args=GRPOConfig(**acting | {"model": str(text)}), train_dataset=[{"prompt": ASKED}] * 2)
    raises(ConfigError, words, run.train)
    run.close()
