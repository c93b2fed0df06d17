"""SGLang's dialect, and that of a stranger: `docs/dialects.py`, copied into a folder of its own and named in a recipe.

The servers are fakes that speak the documented JSON of SGLang and of llama.cpp's router, and sample with our engine.
"""

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from servers import adapted, fake_server, logprobs_are_of
from tiny_models import tiny_model

from command import Command
from covey import GRPOConfig
from covey.adapters import CONFIG_FILE, WEIGHTS_FILE, read_adapter, read_config
from covey.errors import AdapterError, ConfigError, GenerationError, ServingError
from covey.observe.run_folder import RunFolder
from covey.pytorch.engine import Engine
from covey.pytorch.engine.merge import AdaptedWeights, weights_of
from covey.rollout.learning import Weights
from covey.serving import InferenceClient, RemoteEngine
from covey.serving.dialect import Dialect
from covey.serving.dialects import DIALECTS, find_dialect
from covey.types import Completion, Request, SamplingSettings
from fakes import raises, slow

OF_A_STRANGER = Path(__file__).parents[2] / "docs" / "dialects.py"
SETTINGS = SamplingSettings(temperature=0.9, max_tokens=12, eos_token_ids=(2,))
REQUESTS = [Request(np.array([5 + i, 6, 7]), (1, i)) for i in range(11)]
CONVERTER = """
import shutil, sys
source, outfile = sys.argv[1], sys.argv[sys.argv.index("--outfile") + 1]
shutil.copy(source + "/model.safetensors", outfile)
"""
OWN = """
from covey.serving.dialect import Dialect
def helper(client, trainer, folder): ...
class Unfinished(Dialect):
    def request(self, requests, settings): ...
class Erring(Unfinished):
    def publish(self, upload): 1 / 0
    def read(self, answer, count): ...
"""


class Fake:
    """What both fakes share: an engine that takes adapters and whole weights from files."""

    def __init__(self) -> None:
        self.model = tiny_model("llama")
        self.engine, self.lock = Engine(self.model), threading.Lock()
        self.names, self.paths = dict[str, Path](), list[str]()

    def load_adapter(self, path: Path) -> None:
        weights, config = ((path / name).read_bytes() for name in (WEIGHTS_FILE, CONFIG_FILE))
        adapter = read_adapter(weights, read_config(config))
        self.engine.publish(Weights(0, lambda: AdaptedWeights(self.model, adapter)))

    def load_weights(self, file: Path) -> None:
        other = tiny_model("llama")
        other.load_state_dict(load_file(file), strict=False)
        self.engine.publish(weights_of(other, 0))

    def sample(self, prompts: list[list[int]], temperature: float, most: int, ends: Any, seed: int = 9) -> Any:
        requests = [Request(np.array(ids), (seed, place)) for place, ids in enumerate(prompts)]
        settings = SamplingSettings(temperature, max_tokens=most, eos_token_ids=tuple(ends or ()))
        return self.engine(requests, settings, policy_version=0)

    def __call__(self, path: str, body: bytes) -> tuple[int, Any]:
        with self.lock:
            self.paths.append(path)
            return self.answer(path, json.loads(body) if body else {})  # type: ignore[attr-defined]


class FakeSGLang(Fake):
    version = "default"

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/load_lora_adapter":
            if body["lora_name"] in self.names:
                return 400, {"success": False, "error_message": "already loaded"}
            self.names[body["lora_name"]] = Path(body["lora_path"])
            return 200, {"success": True, "loaded_adapters": {}}
        if path == "/unload_lora_adapter":
            return 200, {"success": self.names.pop(body["lora_name"], None) is not None}
        if path == "/update_weights_from_disk":
            self.load_weights(Path(body["model_path"]) / "model.safetensors")
            self.version = body["weight_version"]
            return 200, {"success": True, "message": "Succeeded to update model weights."}
        if path != "/generate":
            return 200, {"model_path": "tiny"}
        if "lora_path" in body:
            if body["lora_path"] not in self.names:
                return 400, {"error": {"message": f"LoRA adapter {body['lora_path']} is not loaded"}}
            self.load_adapter(self.names[body["lora_path"]])
        p = body["sampling_params"]
        assert p["ignore_eos"] == (p["stop_token_ids"] is None)
        found = self.sample(body["input_ids"], p["temperature"], p["max_new_tokens"], p["stop_token_ids"])
        return 200, [{"text": "", "output_ids": c.token_ids.tolist(), "meta_info": self.meta(c)} for c in found]

    def meta(self, c: Completion) -> dict[str, Any]:
        told = [[lp, token, None] for lp, token in zip(c.logprobs.tolist(), c.token_ids.tolist(), strict=True)]
        reason = {"type": c.finish_reason}
        return {"weight_version": self.version, "finish_reason": reason, "output_token_logprobs": told}


class FakeVLLM(Fake):
    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/load_lora_adapter":
            self.names[body["lora_name"]] = Path(body["lora_path"])
        if path == "/v1/unload_lora_adapter":
            del self.names[body["lora_name"]]
        if path == "/v1/models":
            return 200, {"data": [{"id": "tiny", "max_model_len": 99}]}
        if path != "/v1/completions":
            return 200, b"Success"
        if body["model"] not in self.names:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        self.load_adapter(self.names[body["model"]])
        choices = [
            {"index": index, "token_ids": c.token_ids.tolist(), "finish_reason": c.finish_reason}
            | {"logprobs": {"token_logprobs": c.logprobs.tolist()}}
            for index, c in enumerate(self.sample(body["prompt"], body["temperature"], body["max_tokens"], (2,)))
        ]
        return 200, {"model": body["model"], "choices": choices[::-1]}


class FakeLlamaCpp(Fake):
    loaded, folder = "", Path()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/models?reload=1":
            self.names = {file.stem: file for file in self.folder.glob("*.gguf")}
        if path.startswith("/models?") or path == "/models":
            status = {name: "loaded" if name == self.loaded else "unloaded" for name in self.names}
            return 200, {"data": [{"id": name, "status": {"value": status[name]}} for name in self.names]}
        if path == "/models/load":
            self.load_weights(self.names[body["model"]])
            self.loaded = body["model"]
        if path != "/completion":
            return 200, {"success": True}
        assert (body["model"], body["samplers"]) == (self.loaded, ["temperature", "top_k", "top_p", "min_p"])
        ends = () if body["ignore_eos"] else (2,)
        (c,) = self.sample([body["prompt"]], body["temperature"], body["n_predict"], ends, body["seed"])
        said = zip(c.token_ids.tolist(), np.exp(c.logprobs.astype(np.float64)).tolist(), strict=True)
        told = [{"id": token, "prob": chance, "top_probs": []} for token, chance in said]
        reason = "limit" if c.finish_reason == "length" else "eos"
        return 200, {"content": "", "stop_type": reason, "completion_probabilities": told}


def remote(url: str, kind: str, folder: Path) -> RemoteEngine:
    dialect = find_dialect(kind if kind in DIALECTS else f"{OF_A_STRANGER}:{kind}")
    client = InferenceClient(url, timeout=20, retry_seconds=5)
    return RemoteEngine(client, trainer="test", dialect=dialect, folder=folder)


def checked(model: Any, there: RemoteEngine, version: int) -> list[Completion]:
    """Completions of this version, whose log-probabilities are the model's."""
    found = there(REQUESTS, SETTINGS, policy_version=version)
    for request, completion in zip(REQUESTS, found, strict=True):
        logprobs_are_of(model, request, completion, SETTINGS.temperature, atol=1e-4)
        assert completion.policy_version == version
    return found


def two_versions(there: RemoteEngine, make: Callable[[int], Any] = adapted) -> tuple[Any, list[Completion]]:
    """Publishes two versions and samples from each; the last one's model and completions."""
    for version in (1, 2):
        model = make(version)
        there.publish(weights_of(model, version))
        found = checked(model, there, version)
    return model, found


def scaled(version: int) -> Any:
    model = tiny_model("llama")
    for parameter in model.parameters():
        parameter.data *= 1.1**version
    return model


@pytest.fixture
def converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "convert.py").write_text(CONVERTER)
    monkeypatch.setenv("CONVERT_HF_TO_GGUF", str(tmp_path / "convert.py"))


def test_sglang_adapters_and_conversations(tmp_path: Path) -> None:
    fake = FakeSGLang()
    with fake_server(fake) as url:
        there = remote(url, "sglang", tmp_path)
        model, _ = two_versions(there)
        assert len(fake.names) == 1  # the one before is gone
        there.dialect.per_request = 2  # six requests at once, which all find the adapter lost
        for _ in range(3):
            fake.names.clear()  # the server is restarted
            checked(model, there, 2)
        assert fake.paths.count("/load_lora_adapter") == 5
        with pytest.raises(GenerationError, match="SGLang cannot keep supports or choose"):
            there([Request(np.array([5]), (0,), ((5, 2),))], SETTINGS, policy_version=2)
        session = there.session(SETTINGS, policy_version=2, rows=2, own_tokens=40, prompt_lengths=[3])
        row, history = session.start(REQUESTS[0], keep=True), [5, 6, 7]
        for extended in (False, True):
            if extended:
                history += [*session.completion(row).token_ids.tolist(), 8, 9]
                session.extend(row, np.array([8, 9]), (1, 1))
            while session.busy:
                session.advance()
        assert row.history().tolist()[: len(history)] == history
        session.drop(row)


def test_sglang_whole_weights(tmp_path: Path) -> None:
    fake = FakeSGLang()
    with fake_server(fake) as url:
        there = remote(url, "sglang", tmp_path)
        two_versions(there, scaled)
        fake.version = "somebody else's"
        raises(ServingError, "somebody else", there, REQUESTS, SETTINGS, policy_version=2)


def test_llama_cpp(tmp_path: Path, converter: None) -> None:
    fake = FakeLlamaCpp()
    fake.folder = tmp_path / "gguf"
    with fake_server(fake) as url:
        there = remote(url, "LlamaCpp", tmp_path)
        model, found = two_versions(there)
        assert checked(model, there, 2)[3].token_ids.tolist() == found[3].token_ids.tolist()
        assert ([file.stem for file in fake.folder.iterdir()], "/models/unload" in fake.paths) == ([fake.loaded], True)


@pytest.mark.parametrize(
    ("kind", "peft"), [("dialects.py:LlamaCpp", True), slow("sglang", True), slow("sglang", False)]
)
@pytest.mark.usefixtures("converter")
def test_a_recipe_names_a_dialect(
    kind: str, peft: bool, recipe_folder: Path, tmp_path: Path, covey: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(recipe_folder, folder)
    shutil.copy(OF_A_STRANGER, folder / "dialects.py")
    fake = FakeSGLang() if kind == "sglang" else FakeLlamaCpp()
    fake.folder = folder / "files" / "gguf"  # type: ignore[attr-defined]
    monkeypatch.chdir(folder)
    server = {"upload_adapters_to_server": "true", "inference_server_kind": kind, "adapter_folder": "files"}
    with fake_server(fake) as url:
        code, out, err = covey(
            *("train", "recipe.toml", "run.output_dir=run", "schedule.max_steps=2", f"model.use_peft={peft}".lower()),
            *(f"server.{name}={value}" for name, value in (server | {"inference_server_url": url}).items()),
            *([] if peft else ["algorithm.beta=0"]),
        )
    assert code == 0, out + err
    records = [r for r in RunFolder.read("run").read_metrics() if "loss" in r]
    assert len(records) == 2
    assert all(record["sampling/sampling_logp_difference/max"] < 1e-3 for record in records)


def test_vllm_adapters(tmp_path: Path) -> None:
    fake = FakeVLLM()
    with fake_server(fake) as url:
        there = remote(url, "vllm", tmp_path)
        model, _ = two_versions(there)
        assert [*fake.names] == [path.name for path in tmp_path.iterdir()]  # the one before is gone
        assert len(fake.names) == 1
        fake.names.clear()  # the server is restarted
        checked(model, there, 2)
    with fake_server(lambda path, body: (404 if "lora" in path else 200, {"detail": "Not Found"})) as url:
        there = remote(url, "vllm", tmp_path)
        with pytest.raises(ServingError, match="loads no adapters; start vLLM with --enable-lora and the environment"):
            there.publish(weights_of(model, 1))


def test_vllm_reads_whole_weights_from_its_folder(tmp_path: Path) -> None:
    asked: list[tuple[str, Any]] = []

    def answer(path: str, body: bytes) -> tuple[int, Any]:
        asked.append((path, json.loads(body) if body else None))
        return 200, {"data": [{"id": "served", "max_model_len": 77}]} if path == "/v1/models" else {}

    with fake_server(answer) as url:
        there, model = remote(url, "vllm", tmp_path), tiny_model("llama")
        assert there.context_length == 77
        there.publish(weights_of(model, 1))
    assert asked[2:] == [("/collective_rpc", {"method": "reload_weights"}), ("/reset_prefix_cache", {})]
    saved = load_file(tmp_path / "model.safetensors")
    assert (saved["model.norm.weight"] == model.state_dict()["model.norm.weight"]).all()


def test_what_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    raises(ConfigError, "inference_server_kind", GRPOConfig, inference_server_kind="tgi")
    for kind, words in (
        ("nowhere.py:SGLang", "no such file"),
        (f"{tmp_path}/own.py:helper", r"own.py:helper'.* not a class derived from covey.serving.dialect.Dialect"),
        (f"{tmp_path}/own.py:Unfinished", r"own.py:Unfinished'.* lacks publish, read; add it"),
    ):
        raises(ConfigError, words, find_dialect, kind)
    assert issubclass(find_dialect("vllm"), Dialect)
    erring = find_dialect(f"{tmp_path}/own.py:Erring")
    with fake_server(lambda path, body: (200, {})) as url:
        there = RemoteEngine(InferenceClient(url), trainer="test", dialect=erring, folder=tmp_path)
        words = r"Erring.publish raised ZeroDivisionError: .* at .*own.py:\d+, in publish"
        raises(ConfigError, words, there.publish, weights_of(adapted(), 1))
        there = remote(url, "covey", tmp_path)
        raises(AdapterError, "no LoRA adapter", there.publish, weights_of(tiny_model("llama"), 1))
