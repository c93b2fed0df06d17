"""The reference policy, without a second model in memory.

Three states, told apart by the snapshot:

    LoRA, no snapshot       the base model: the same network with its adapters off. Costs nothing
    LoRA, with snapshot     another adapter, or another model's weights for a network with its adapters off; its
                            tensors take the place of the current ones for a moment
    full fine-tuning        a frozen copy of the trained weights, or another model's, used in the same way

Taking the place means exchanging `parameter.data` pointers: nothing is copied, tied weights stay tied, and a graph that
was built before and is walked backward after sees its own tensors. With `optim.offload` a snapshot lies in the host's
memory, and copies of it take the place.

The exponential moving average is over the trainable tensors: for LoRA over A and B separately, whose product is not the
average of the products; with the usual decays of 0.9 and more the difference is small.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor, nn

from covey.adapters import CONFIG_FILE, check_fits
from covey.errors import ConfigError, ModelError
from covey.pytorch.models.loading import load_model
from covey.pytorch.models.lora import adapters_off, load_adapter
from covey.pytorch.optimizers import HostMemory


class Reference:
    """The policy that the KL term holds on to, with its updates.

    Example:
        >>> with reference.active():
        ...     hidden = model(input_ids)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        update: str = "none",
        every: int = 1,
        ema_decay: float = 0.99,
        from_current: bool = False,
        needed: bool = True,
        host: HostMemory | None = None,
    ) -> None:
        """Make a reference that equals the policy as it is now; `ConfigError` where a value is out of range."""
        if update not in ("none", "copy", "ema"):
            raise ConfigError(f"update={update!r}: is not a rule for a reference; use none, copy or ema")
        if every < 1:
            raise ConfigError(f"algorithm.reference_update_steps={every}: must be 1 or more")
        if not 0.0 <= ema_decay < 1.0:
            raise ConfigError(f"algorithm.reference_ema_decay={ema_decay}: must be at least 0 and below 1")
        self._model, self._host = model, host
        self.how: dict[str, Any] = {"update": update, "every": every, "ema_decay": ema_decay, "needed": needed}
        self._update, self._every, self._ema_decay = update if needed else "none", every, ema_decay
        self._needed = needed
        self._snapshot: dict[str, Tensor] = {}
        self._is_base_of_another = False
        if needed and (not isinstance(model, PeftModel) or from_current or update == "ema"):
            self.copy_current()

    @property
    def is_base_model(self) -> bool:
        """True while the reference is the base model with its adapters off."""
        return not self._snapshot

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside the block the model computes with the reference's weights, without gradients."""
        if not self._needed:
            raise ModelError("the policy was built without a reference; build it with reference={'needed': True}")
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if self.is_base_model or self._is_base_of_another:
                stack.enter_context(adapters_off(self._model))
            if not self.is_base_model:
                stack.enter_context(self._exchanged())
            yield

    def hold(self, other: nn.Module | str | Path, setting: str = "ref_model") -> None:
        """Hold on to another checkpoint: a folder with an adapter of the policy's form, or a model of its form, loaded
        or by its name. Beside an adapter a model needs the model's own layers (`model.fused_layers` off). Errors name
        the `setting`.

        Raises `ModelError`: it is of another form; the reference is what it was.
        """
        lora, path = isinstance(self._model, PeftModel), other if isinstance(other, str | Path) else None
        if path and (Path(path) / CONFIG_FILE).is_file():
            merged = "or give a folder of it merged (covey export)"
            if not lora:
                raise ModelError(f"{setting}={path}: is an adapter, and the policy has none; train one, {merged}")
            mine = {name: p.detach().clone() for name, p in self._trainable().items()}
            try:
                load_adapter(cast(PeftModel, self._model), Path(path))
            except ModelError as error:
                raise ModelError(f"{setting}: {error}; {merged}") from error
            self.copy_current()
            for name, parameter in self._trainable().items():
                parameter.data.copy_(mine[name])
            return
        like = next(self._model.parameters())
        dtype, device = str(like.dtype).removeprefix("torch."), str(like.device)
        found = load_model(path, dtype=dtype, device=device).model if path else cast(nn.Module, other)
        theirs, held = dict(found.named_parameters()), dict(self._model.named_parameters())
        own = {re.sub(r"^base_model\.model\.|(?<=\.)(base_layer|original_module)\.", "", n): n for n in held}
        own = {bare: name for bare, name in own.items() if not re.search(r"\.(lora_|modules_to_save)", name)}
        what = f"{setting}={path or type(found).__name__}"
        check_fits({bare: held[name].shape for bare, name in own.items()}, theirs, what, "give a model of its form")
        self._snapshot, self._is_base_of_another = {}, lora
        for bare, name in own.items():
            self._keep(name, theirs[bare].detach().to(held[name]))
        self._settle()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward pass with the reference's weights, without gradients."""
        with self.active():
            return self._model(*args, **kwargs)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Its weights by the model's names, frozen ones too; an adapter only where it holds on to one."""
        for name, parameter in self._model.named_parameters():
            if name in self._snapshot or not parameter.requires_grad:
                yield name, self._snapshot.get(name, parameter.detach())

    def get_parameter(self, name: str) -> Tensor:
        """One of them; `KeyError` where there is none of that name."""
        return dict(self.named_parameters())[name]

    @contextmanager
    def _exchanged(self) -> Iterator[None]:
        replaced = {name: p for name, p in self._model.named_parameters() if name in self._snapshot}
        current = [(parameter, parameter.data) for parameter in replaced.values()]
        try:
            for name, parameter in replaced.items():
                parameter.data = self._brought(name)
            yield
        finally:
            for parameter, data in current:
                parameter.data = data

    def after_step(self, step: int) -> bool:
        """Update by the rule after optimiser step `step`, counted from 1. Returns whether it changed."""
        if self._update == "none" or step % self._every:
            return False
        if self._update == "copy":
            self.copy_current()
        else:
            for name, parameter in self._trainable().items():
                moved = self._brought(name).lerp_(parameter.detach(), 1.0 - self._ema_decay)
                if self._host is not None:
                    self._host.keep(moved, self._snapshot[name])
            self._settle()
        return True

    def copy_current(self) -> None:
        """Make the reference equal to the policy as it is now."""
        for name, parameter in self._trainable().items():
            self._keep(name, parameter.detach())
        self._settle()

    def state_dict(self) -> dict[str, Tensor]:
        """The snapshot, empty for the base model: all that a resumed run needs."""
        held = {} if self._is_base_of_another else self._snapshot
        return {name: value.clone() for name, value in held.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned; others than this model's trained tensors change nothing: `ModelError`."""
        own = self._trainable()
        if not state and (isinstance(self._model, PeftModel) or not self._needed):
            self._snapshot = self._snapshot if self._is_base_of_another else {}
            return
        check_fits({name: p.shape for name, p in own.items()}, state, "the saved reference")
        for name, parameter in own.items():
            self._keep(name, state[name].to(device=parameter.device, dtype=parameter.dtype))
        self._settle()

    def _keep(self, name: str, tensor: Tensor) -> None:
        if self._host is None:
            self._snapshot[name] = tensor.clone()
        else:
            self._snapshot[name] = self._host.keep(tensor, self._snapshot.get(name))

    def _brought(self, name: str) -> Tensor:
        """A snapshot's tensor where the model is."""
        held = self._snapshot[name]
        return held if self._host is None else self._host.bring(held)

    def _settle(self) -> None:
        if self._host is not None:
            self._host.settle()

    def _trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self._model.named_parameters() if p.requires_grad}
