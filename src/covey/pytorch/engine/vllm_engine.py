"""vLLM in this process, in the place of Covey's own engine: token ids in and out, everything in one batch.

An adapter is written to a folder in memory and loaded at run time, and what vLLM holds is compared with what was
published. Without an adapter, or with one that is merged, all weights are handed over. While the policy learns vLLM
sleeps: its weights go to the host, or are given up and loaded again.

Of a prompt with pictures vLLM gets their pixels and one placeholder for each. It expands these by the processor beside
the model, and the token ids that it then reports are compared with the policy's.

vLLM draws from torch's generators, which are seeded for each call from the first request's stream and are given back as
they were: a run repeats where vLLM's batches and kernels do. It does not choose among sequences, and keeps no supports.

Tried with vLLM's build for CPUs, which cannot sleep. Not measured on a GPU.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import re
import shutil
import tempfile
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from importlib import import_module, util
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from peft import PeftModel
from pydantic import ValidationError
from torch import Tensor, nn

from covey.adapters import Adapter
from covey.config.sampling import VLLMConfig
from covey.errors import AdapterError, ConfigError, GenerationError, ModelError
from covey.files import save_tokenizer
from covey.pytorch.engine.merge import EffectiveWeights, bare_model, weights_of
from covey.pytorch.models.lora import album_of
from covey.rollout.drawing import drawing, room_for_rank
from covey.rollout.learning import NO_VERSION, Weights, check_call
from covey.rollout.turns import Device, Drawn, GenerationStats, Row, Session
from covey.tasks.pictures import rgb
from covey.types import Completion, IntArray, Progress, Request, SamplingSettings

if TYPE_CHECKING:
    from covey.pytorch.models.pictures import Album

_LOG = logging.getLogger(__name__)

_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # this process's threads train as well
}
INSTEAD = "or sampling.engine to covey"
_IN_MEMORY = Path("/dev/shm")
_MEMORY = ("out of memory", "no available memory", "free memory", "kv cache", "requested memory")


class VLLMEngine:
    """A `Sampler` with vLLM; `ConfigError` if it is not installed, refuses the settings, or has too little memory. Its
    `policy_version` is that of the weights held, -1 after `release`.
    """

    runner = "vllm"

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        folder: str | None,
        dtype: torch.dtype,
        options: VLLMConfig,
        kv_cache_bytes: int,
        logprobs_mode: str,
        seed: int = 0,
        trust_remote_code: bool = False,
    ) -> None:
        for name, value in _VARIABLES.items():
            os.environ.setdefault(name, value)
        self._album = album = album_of(model)
        if album is not None and not (folder and album.reads):
            told = "it samples vision models that have a folder or a name, of the families whose pictures are read"
            raise ConfigError(f"sampling.engine='vllm': {told}; set covey")
        if album is not None and (changed := album.changed(folder)):
            told = f"the processor that was passed has another {', '.join(changed)} than the one that vLLM reads"
            raise ConfigError(f"sampling.engine='vllm': {told} from {folder}; pass that one, or set covey")
        vllm = _installed()
        self._vllm, self._tokenizer, self._dtype = vllm, tokenizer, dtype
        self._vocabulary = len(bare_model(model).get_input_embeddings().weight)  # type: ignore[operator]
        on_cpu = bool(vllm.platforms.current_platform.is_cpu())
        rank = _rank(model) if options.llm_argument("enable_lora", not on_cpu) else 0
        self._scratch = Path(tempfile.mkdtemp(prefix="covey-vllm-", dir=_scratch()))
        weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)
        self._adapter: Any = None
        self._numbers = itertools.count(1)
        self.policy_version, self._asleep = NO_VERSION, False
        bare_model(model).config.save_pretrained(str(self._scratch / "tokenizer"))  # type: ignore[operator, union-attr]
        save_tokenizer(tokenizer, self._scratch / "tokenizer")
        arguments: dict[str, Any] = {
            "model": folder or str(_write_base(model, self._scratch / "model")),
            "tokenizer": str(self._scratch / "tokenizer"),
            "dtype": str(dtype).removeprefix("torch."),
            "seed": seed % 2**31,
            "generation_config": "vllm",
            "logprobs_mode": logprobs_mode,
            "trust_remote_code": trust_remote_code,
            "use_tqdm_on_load": False,
            "enable_sleep_mode": not on_cpu,
        }
        share = {"gpu_memory_utilization": options.gpu_memory_utilization}
        arguments |= {"kv_cache_memory_bytes": kv_cache_bytes} if on_cpu else share
        if album is not None and album.options:
            album.check()  # its errors are clearer than vLLM's
            arguments |= {"mm_processor_kwargs": dict(album.options)}
            if hasattr(vllm.EngineArgs, "mm_device_do_normalize"):  # on the device it does not know these options
                arguments |= {"mm_device_do_normalize": False}
        if rank:
            arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": room_for_rank(rank)}
        arguments |= options.llm_arguments
        self._sleeps, self._one_worker = arguments["enable_sleep_mode"], arguments.get("tensor_parallel_size", 1) == 1
        if self._sleeps:
            keep_segments_fixed()
        threads = torch.set_num_threads  # vLLM's build for CPUs puts one that does nothing in its place
        try:
            self._llm: Any = vllm.LLM(**arguments)
        except Exception as error:  # vLLM and the processors that it loads raise what they like
            raise _start_problem(error) from error
        finally:
            torch.set_num_threads = threads
        self._engine = self._llm.llm_engine
        self._by_adapter = rank > 0
        self.context_length = int(self._llm.model_config.max_model_len)
        self._session: Session[VLLMDevice] | None = None

    @property
    def last_stats(self) -> GenerationStats:
        return GenerationStats() if self._session is None else self._session.stats()

    def publish(self, weights: Weights) -> None:
        """Take an adapter or all weights, and forget what was computed; `ModelError` if vLLM then holds others."""
        self.policy_version = NO_VERSION
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False
        if self._by_adapter:
            self._load_adapter(cast(Adapter, weights.adapter))
        else:
            self._load_weights(weights.tensors())
        self._engine.reset_prefix_cache()
        if self._album is not None:  # the workers have forgotten pictures with the old weights
            self._engine.reset_mm_cache()
            self._engine.reset_encoder_cache()
        self.policy_version = weights.version

    def release(self) -> None:
        """Sleep until the next `publish`; on a CPU vLLM keeps its memory."""
        self.policy_version = NO_VERSION
        if self._sleeps and not self._asleep:
            self._llm.sleep(level=1)
            self._asleep = True

    def close(self) -> None:
        """Nothing runs beside this process but vLLM's workers, which end with it."""

    def __call__(
        self,
        requests: Sequence[Request],
        settings: SamplingSettings,
        *,
        policy_version: int,
        progress: Progress | None = None,
    ) -> list[Completion]:
        """Sample one completion for each request, in order; see `covey.types.Generator`.

        Raises:
            GenerationError: other weights than `policy_version` are held, a prompt is empty or does not fit the
                context, or it asks for what vLLM does not do.
            ConfigError: the settings describe no distribution.
        """
        session = self._open(settings, policy_version, 1 << 62)
        try:
            return session.run([session.start(request) for request in requests], progress)
        finally:
            session.device.end()

    def session(
        self,
        settings: SamplingSettings,
        *,
        policy_version: int,
        rows: int,
        own_tokens: int,
        prompt_lengths: Sequence[int],
    ) -> Session[VLLMDevice]:
        """See `covey.pytorch.engine.Engine.session`; vLLM decides how many rows run at once."""
        return self._open(settings, policy_version, own_tokens)

    def _open(self, settings: SamplingSettings, policy_version: int, own_tokens: int) -> Session[VLLMDevice]:
        check_call(settings, policy_version, held=self.policy_version, tokenizer=self._tokenizer)
        if settings.keep_support:
            raise GenerationError(f"vLLM cannot keep supports; set algorithm.keep_sampling_mask to false, {INSTEAD}")
        if self._session is not None:
            self._session.device.end()
        device = VLLMDevice(self._vllm, self._engine, self._adapter, self.context_length, own_tokens, self._vocabulary)
        device.album = self._album
        self._session = _Session(device, settings, policy_version=policy_version, tokenizer=self._tokenizer)
        return self._session

    def _load_adapter(self, adapter: Adapter) -> None:
        number, before = next(self._numbers), self._adapter
        path = self._scratch / f"adapter-{number}"
        adapter.write(path)
        if self._album is not None:
            self._album.rename_saved(path)
        request = self._vllm.lora.request.LoRARequest(f"covey-{number}-{adapter.sha256[:8]}", number, str(path))
        try:
            self._engine.add_lora(request)
        except (ValueError, RuntimeError) as error:
            raise ModelError(f"vLLM does not load the adapter: {_first_line(error)}") from error
        self._adapter = request
        self._compare(adapter, number)
        if before is not None:
            with suppress(KeyError, ValueError):
                self._engine.remove_lora(before.lora_int_id)
            shutil.rmtree(before.lora_path, ignore_errors=True)

    def _compare(self, adapter: Adapter, number: int) -> None:
        """Refuse to sample from other numbers than were published."""
        try:
            held = self._llm.collective_rpc(_held_adapter, args=(number,))
        except (AttributeError, KeyError, TypeError) as error:
            _LOG.warning("this vLLM does not show which adapter it holds (%s): it is not compared", _first_line(error))
            return
        factors = [(torch.from_numpy(one.a), torch.from_numpy(one.b), one.scaling) for one in adapter.factors.values()]
        wanted = sorted(_digest(a.to(self._dtype), b.to(self._dtype) * scaling) for a, b, scaling in factors)
        for worker, found in enumerate(held):
            if sorted(found) != wanted:
                strangers = len(set(found) - set(wanted))
                raise ModelError(
                    f"vLLM's worker {worker} holds {len(found)} adapted layers, {strangers} of them with other numbers "
                    f"than the {len(wanted)} that were published; set sampling.engine to covey"
                )

    def _load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        prefix = "model." if self._album is None else self._album.prefix
        named = ((re.sub(r"^model\.", prefix, name), tensors[name].detach()) for name in tensors)
        if self._one_worker:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named})
            return
        path = _write(named, self._scratch / "weights")  # vLLM's workers are other processes
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})


def keep_segments_fixed() -> None:
    """Switch off what `covey` has set for PyTorch's memory: vLLM's weights sleep in a pool, which cannot expand."""
    if os.environ.get("PYTORCH_ALLOC_CONF") == "expandable_segments:True":
        del os.environ["PYTORCH_ALLOC_CONF"]
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def _installed() -> Any:
    if util.find_spec("vllm") is None:
        raise ConfigError(
            "sampling.engine='vllm': vLLM is not installed in this environment; install it (pip install vllm), or set "
            "sampling.engine to covey"
        )
    for part in ("lora.request", "platforms", "sampling_params"):
        import_module(f"vllm.{part}")
    return import_module("vllm")


def _rank(model: nn.Module) -> int:
    """Of an adapter that vLLM can load; 0 = all weights are published."""
    try:
        adapter = weights_of(model, 0).adapter
        return 0 if adapter is None else max(len(one.a) for one in adapter.factors.values())
    except AdapterError as error:
        _LOG.warning("the whole model is published to vLLM, since it is not plain LoRA: %s", error)
        return 0


def _scratch() -> str | None:
    """A folder in memory where there is one with room, else the system's for temporary files."""
    writable = os.access(_IN_MEMORY, os.W_OK) and shutil.disk_usage(_IN_MEMORY).free > 1 << 30
    return str(_IN_MEMORY) if writable else None


def _write_base(model: nn.Module, folder: Path) -> Path:
    """The model without its adapter, as vLLM reads models."""
    with model.disable_adapter() if isinstance(model, PeftModel) else nullcontext():
        return _write(EffectiveWeights(model).items(), folder, bare_model(model))


def _write(tensors: Iterable[tuple[str, Tensor]], folder: Path, base: Any = None) -> Path:
    """Safetensors of these, with the config of `base` if any."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    whole = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    if base is not None:
        base.config.save_pretrained(str(folder))
    return folder


def _held_adapter(worker: Any, number: int) -> list[str]:
    """Run in vLLM's worker: a digest of each layer of the adapter of this number, as it is applied."""
    manager = worker.model_runner.lora_manager._adapter_manager
    found = []
    for layer in manager.get_adapter(number).loras.values():
        packed = isinstance(layer.lora_a, list | tuple)
        for a, b in zip(*([layer.lora_a, layer.lora_b] if packed else [[layer.lora_a], [layer.lora_b]]), strict=True):
            if a is not None:
                found.append(_digest(a, b))
    return found


def _digest(a: Tensor, b: Tensor) -> str:
    parts = [one.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for one in (a, b)]
    return hashlib.sha256(b"%d " % len(parts[0]) + b"".join(parts)).hexdigest()


def _start_problem(error: Exception) -> ConfigError:
    words = f"{type(error).__name__}: {_first_line(error)}"
    fix = "change the vllm section, or set sampling.engine to covey"
    if any(part in str(error).lower() for part in _MEMORY):
        fix = (
            "give it a larger share (vllm.gpu_memory_utilization; on a CPU sampling.kv_cache_gb), a shorter context "
            "(max_model_len in vllm.llm_arguments), or set sampling.engine to covey"
        )
    return ConfigError(f"sampling.engine='vllm': vLLM does not start: {words}; {fix}")


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(" ".join(one["msg"].split()) for one in error.errors())[:400]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0][:400]


class VLLMDevice(Device):
    """Turns in vLLM's batch; a `covey.rollout.turns.Device`. A row's `place` is its request's name."""

    album: Album | None = None

    def __init__(self, vllm: Any, engine: Any, adapter: Any, context: int, own_tokens: int, vocabulary: int) -> None:
        super().__init__(context, own_tokens)
        self._vllm, self._engine, self._adapter, self._vocabulary = vllm, engine, adapter, vocabulary
        self._rows: dict[str, Row] = {}
        self._asked = itertools.count()
        self._generators: list[Tensor] = []

    def begin(self, queue: deque[Row]) -> Iterator[Drawn]:
        """Hand all rows to vLLM, which batches them as it likes."""
        while queue:
            self._ask(queue.popleft())
        return iter(())

    def extend(self, resuming: list[Row]) -> Iterator[Drawn]:
        """Hand all answered rows to vLLM, with everything that was said before."""
        while resuming:
            self._ask(resuming.pop(0))
        return iter(())

    def decode(self, waiting: int) -> Iterator[Drawn]:
        """Steps of vLLM until a turn is over; the turns that are."""
        over: list[Any] = []
        while self._rows and not over:
            try:
                with self._own_numbers():
                    over = [one for one in self._engine.step() if one.finished]
            except (RuntimeError, ValueError) as error:  # torch's out-of-memory error is a RuntimeError
                raise GenerationError(
                    f"vLLM fails while it samples: {error!s:.400}; lower max_model_len in vllm.llm_arguments, {INSTEAD}"
                ) from error
        for one in over:
            row = self._rows.pop(one.request_id, None)
            if row is not None:
                self._check_prompt(row.history(), one.prompt_token_ids)
                yield self._drawn(row, one.outputs[0])

    def drop(self, row: Row) -> None:
        """Nobody waits for its turn any more."""
        if self._rows.pop(row.place, None) is not None:
            self._engine.abort_request([row.place])

    def end(self) -> None:
        """Forget all rows: whoever asked for them has gone."""
        names, self._rows = list(self._rows), {}
        if names:
            self._engine.abort_request(names)

    def _ask(self, row: Row) -> None:
        if row.choices is not None:
            raise GenerationError(
                f"vLLM does not choose among sequences; set environment.action_format to text or tags, {INSTEAD}"
            )
        if not self._generators and not self._rows:
            with torch.random.fork_rng(self._devices()):
                torch.manual_seed(row.key)
                self._generators = self._states()
        row.place = f"covey-{id(self)}-{next(self._asked)}"
        settings = drawing(replace(row.settings, max_tokens=row.limit))
        kind = self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY
        how = self._vllm.SamplingParams(**settings, output_kind=kind, detokenize=bool(row.settings.stop_strings))
        try:
            self._engine.add_request(row.place, self._prompt(row.history()), how, lora_request=self._adapter)
        except (ValueError, RuntimeError, AssertionError) as error:
            raise GenerationError(
                f"vLLM refuses a prompt: {_first_line(error)}; set sampling.engine to covey"
            ) from error
        self._rows[row.place] = row

    def _prompt(self, ids: IntArray) -> dict[str, Any]:
        ids, pictures = (ids, []) if self.album is None else self.album.collapse(ids)
        images = {"image": [rgb(one.open()) for one in pictures]}
        names = {"image": [one.sha256 for one in pictures]}
        shown = {"multi_modal_data": images, "multi_modal_uuids": names} if pictures else {}
        return {"prompt_token_ids": ids.tolist(), **shown}

    def _check_prompt(self, ids: IntArray, made: list[int]) -> None:
        """Refuse what was drawn after another prompt than the policy reads."""
        if self.album is None or np.array_equal(made, wanted := self.album.placeholders(ids)):
            return
        theirs, ours = (int((np.asarray(each) == self.album.placeholder_id).sum()) for each in (made, wanted))
        raise GenerationError(
            f"vLLM made {len(made)} tokens of a prompt, {theirs} of them places of pictures, that the policy reads as "
            f"{len(wanted)} with {ours}; set data.processor_kwargs as in the processor beside the model, {INSTEAD}"
        )

    def _drawn(self, row: Row, found: Any) -> Drawn:
        ids = np.array(found.token_ids, dtype=np.int64)
        if len(ids) == 0 or ids.max() >= self._vocabulary or found.finish_reason not in ("stop", "length"):
            raise GenerationError(
                f"vLLM ended a completion with {found.finish_reason!r} and the token ids {found.token_ids!r:.80}; the "
                f"policy's are 0 to {self._vocabulary - 1}"
            )
        logprobs = [told[token].logprob for token, told in zip(found.token_ids, found.logprobs, strict=True)]
        return Drawn([row], ids[None], np.array([logprobs], dtype=np.float32), None, [found.finish_reason])

    @contextmanager
    def _own_numbers(self) -> Iterator[None]:
        """Torch's generators as they were when this device drew last, and afterwards as the process had them."""
        with torch.random.fork_rng(self._devices()):
            torch.set_rng_state(self._generators[0])
            for device, state in zip(self._devices(), self._generators[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            yield
            self._generators = self._states()

    def _states(self) -> list[Tensor]:
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._devices())]

    @staticmethod
    def _devices() -> list[int]:
        return [torch.cuda.current_device()] if torch.cuda.is_available() else []


class _Session(Session[VLLMDevice]):
    def room_for_turn(self, row: Row, said: int) -> int:
        """None after a sampled placeholder: vLLM would look for a picture in its place."""
        album = self.device.album
        return 0 if album is not None and album.placeholder_id in row.own else super().room_for_turn(row, said)
