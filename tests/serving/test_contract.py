"""What any server must do, whoever wrote it: run against ours, and against a real vLLM where one is installed.

`make test-vllm` installs vLLM in an environment of its own, starts it on loopback, and runs these tests on both.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from servers import free_port, logprobs_are_of, serving, with_lora
from tiny_models import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from covey import GRPOConfig, GRPOTrainer
from covey.observe.run_folder import RunFolder
from covey.pytorch.engine import Engine
from covey.pytorch.engine.merge import weights_of
from covey.serving import InferenceClient, RemoteEngine
from covey.serving.dialects import find_dialect
from covey.types import Request, SamplingSettings

VLLM_PYTHON, VLLM_MODEL = os.environ.get("COVEY_VLLM_PYTHON"), os.environ.get("COVEY_VLLM_MODEL")


@dataclass
class Served:
    kind: str
    url: str
    model: str
    tokenizer: Any
    folder: Path

    def fresh_model(self) -> Any:
        if self.kind == "covey":
            return tiny_model("llama")
        return AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32).eval()

    def adapted(self, seed: int) -> Any:
        return with_lora(self.fresh_model(), seed, r=4, scale=0.05)

    def engine(self) -> Any:
        client = InferenceClient(self.url, timeout=120, retry_seconds=5)
        return RemoteEngine(client, trainer="contract", dialect=find_dialect(self.kind), folder=self.folder)

    def requests(self, count: int) -> list[Request]:
        ids = self.tokenizer("the kitchen is")["input_ids"]
        return [Request(np.array([*ids[i % 2 :]]), (7, i)) for i in range(count)]


@pytest.fixture(scope="module", params=[pytest.param("covey", marks=pytest.mark.slow), "vllm"])
def served(request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: Any) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    if request.param == "covey":
        with serving() as server:
            yield Served("covey", server.url, str(model_folder), tiny_tokenizer(), folder)
        return
    if not VLLM_PYTHON or not VLLM_MODEL:
        pytest.skip("no vLLM here; see make test-vllm")
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [VLLM_PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", VLLM_MODEL, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--enable-lora", "--max-lora-rank", "16"]
    command += ["--max-model-len", "512", "--logprobs-mode", "processed_logprobs"]
    said = ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_CPU_KVCACHE_SPACE", "HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS")
    env = os.environ | dict.fromkeys(said, "1")
    env.pop("PYTHONPATH", None)
    with (folder / "vllm.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)
    try:

        def still_starting(seconds: float) -> None:
            assert process.poll() is None, (folder / "vllm.log").read_text()[-3000:]
            time.sleep(seconds)

        InferenceClient(url, retry_seconds=600, sleep=still_starting).health(retry=True)
        yield Served("vllm", url, VLLM_MODEL, AutoTokenizer.from_pretrained(VLLM_MODEL), folder)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_completions_come_from_the_weights_that_were_uploaded(served: Served) -> None:
    engine, requests, said = served.engine(), served.requests(3), []
    greedy = SamplingSettings(temperature=0, max_tokens=16)
    for version in (1, 2):
        model = served.adapted(version)
        engine.publish(weights_of(model, version))
        found = engine(requests, greedy, policy_version=version)
        expected = Engine(model)(requests, greedy, policy_version=0)
        assert [c.token_ids.tolist() for c in found] == [c.token_ids.tolist() for c in expected]
        assert {c.policy_version for c in found} == {version}
        for request, completion in zip(requests, found, strict=True):
            logprobs_are_of(model, request, completion, 1.0, atol=2e-3)
        said.append([c.token_ids.tolist() for c in found])
    assert said[0] != said[1]
    engine.close()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_ids_have_their_logprobs(served: Served, temperature: float) -> None:
    engine, model, requests = served.engine(), served.adapted(3), served.requests(12)
    engine.publish(weights_of(model, 3))
    eos = (int(served.tokenizer.eos_token_id),)
    settings = SamplingSettings(temperature=temperature, max_tokens=12, eos_token_ids=eos)
    found = engine(requests, settings, policy_version=3)
    assert len({tuple(c.token_ids.tolist()) for c in found}) > 6
    for request, completion in zip(requests, found, strict=True):
        logprobs_are_of(model, request, completion, temperature, atol=2e-3)
        ended = completion.token_ids[-1] in eos
        assert completion.finish_reason == ("stop" if ended else "length")
        assert ended or len(completion.token_ids) == 12
        assert not set(completion.token_ids[:-1].tolist()) & set(eos)
    engine.close()


def test_a_run(served: Served, settings: dict[str, Any], tmp_path: Path) -> None:
    def length(completions: list[Any], **columns: Any) -> list[float]:
        return [float(len(c if isinstance(c, str) else c[0]["content"])) for c in completions]

    serving = {"inference_server_url": served.url, "inference_server_kind": served.kind}
    run = {"model": served.model, "output_dir": f"{tmp_path}/run", "max_steps": 3, "upload_adapters_to_server": True}
    args = GRPOConfig(**(settings | run | serving))
    rows = [{"prompt": f"say {word}: "} for word in ("one", "two", "three")]
    trainer = GRPOTrainer(args=args, reward_funcs=length, train_dataset=rows)
    trainer.train()
    trainer.close()
    records = [record for record in RunFolder.read(args.run.output_dir).read_metrics() if "loss" in record]
    assert len(records) == 3
    assert all(record["sampling/sampling_logp_difference/max"] < 5e-3 for record in records)
