"""The table `algorithm.teacher`: a second distribution at the tokens that the policy sampled."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from covey.algorithms.kl import Distillation, Use
from covey.config.section import Section
from covey.types import Group

DEFAULT_TEMPLATES = {
    "column": "{prompt}\n\n{context}",
    "solution": "{prompt}\n\nThis is a right answer:\n{context}\n\nNow write your own.",
    "feedback": "{prompt}\n\nAn earlier answer of yours was wrong:\n{context}\n\nNow answer correctly.",
}
_PART = "(solution|feedback|column:[^+|]+)"
_REFUSED = {
    "k1": "its gradient has no teacher in it; use k1+",
    "k3": "its gradient is the forward KL's; use estimator='exact' with beta=0, or k3+ for the reverse KL's",
}

_ACTS_WITH = {"coef": "sum position gate loss", "task_coef": "sum position loss", "discount": "sum position"}
_ACTS_WITH |= {"clip": "sum position reweigh gate", "reweigh_share reweigh_range": "reweigh", "gate_slope": "gate"}
_ACTS_WITH |= {"position_slope": "position", "estimator ratio_cap": "loss"}
"""Settings -> the values of `use` with which they act."""


def _whole(value: str) -> str:
    return os.path.abspath(value) if value not in ("", "ema", "base", "live") and os.path.exists(value) else value


class TeacherSource(Section, frozen=True):
    """Whose distribution a teacher is, and what it reads."""

    weights: Annotated[str, AfterValidator(_whole)] = "ema"
    """Weights of the same network: ema (moving average of the policy's), base (those at the start), live (the
    policy's, before the step), or the folder of an adapter. Or another network with the same tokenizer, of any width:
    the folder, .gguf file or hub id of a model; or, behind a server, http://HOST:PORT or http://HOST:PORT#MODEL."""
    context: Annotated[str, Field(pattern=rf"^(none|{_PART}([+|]{_PART})*)$")] = "none"
    """What the teacher reads besides the prompt: none, solution (another completion of the group that succeeded),
    feedback (what reward functions said of this completion), column:NAME of the dataset. A+B = both, where they are to
    be had; A|B = B where there is no A."""
    template: str | None = None
    """The last user message as the teacher reads it, with {prompt} and {context}."""
    around: dict[Literal["solution", "feedback", "column"], str] = Field(default_factory=dict)
    """Text around each part of the context, with {context}; parts without one are set apart by empty lines."""
    success: float = 1.0
    """Reward from which a completion is a solution; below it there is feedback."""

    @property
    def is_remote(self) -> bool:
        """True for a server."""
        return self.weights.lower().startswith(("http://", "https://"))

    @property
    def is_own(self) -> bool:
        """True for other weights of the policy's network."""
        return self.weights in ("ema", "base") or os.path.isfile(os.path.join(self.weights, "adapter_config.json"))

    @property
    def is_network(self) -> bool:
        """True for a model beside the policy's."""
        return not (self.is_own or self.is_remote or self.weights == "live")

    @property
    def choices(self) -> list[list[tuple[str, str]]]:
        """Contexts of which the first that is to be had is read: of each its parts, (kind, column)."""
        named = self.context.split("|") if self.context != "none" else []
        return [[part.partition(":")[::2] for part in one.split("+")] for one in named]

    @property
    def columns(self) -> list[str]:
        """Of the dataset, with what the teacher reads."""
        return [name for one in self.choices for _, name in one if name]

    @staticmethod
    def says(columns: Mapping[str, object], name: str) -> str:
        """What a column of the dataset says; empty where there is nothing but white space."""
        value = columns.get(name)
        return "" if value is None or not str(value).strip() else str(value)

    @property
    def text(self) -> str:
        """The template."""
        kinds = [kind for one in self.choices for kind, _ in one]
        return self.template or (DEFAULT_TEMPLATES[kinds[0] if len(kinds) == 1 else "column"] if kinds else "{prompt}")

    def may_teach(self, group: Group) -> bool:
        """True if some completion of a group may have a teacher."""
        good = group.rewards >= self.success
        may = {"solution": len(good) > 1 and bool(good.any()), "feedback": bool((group.rewards < self.success).any())}
        return not self.choices or any(may.get(kind, True) for one in self.choices for kind, _ in one)

    def problems(self) -> Iterator[str]:
        if self.weights == "live" and self.context == "none":
            yield (
                "weights='live' with context='none': the policy would be its own teacher, and the gap only the "
                "difference of sampler and trainer; set context, or weights to ema, base or an adapter's folder"
            )
        if not self.weights.strip() or (self.is_remote and "@" in self.weights.partition("#")[0]):
            yield "weights: empty, or an address with a password in it; give that in COVEY_TEACHER_TOKEN"
        if self.weights.startswith(("/", ".", "~")) and not os.path.exists(os.path.expanduser(self.weights)):
            yield f"weights={self.weights!r}: there is no such file or folder; give one, a hub id, ema, base or live"
        if self.template is not None and (self.context == "none" or "{context}" not in self.template):
            yield f"template={self.template!r:.80}: needs {{context}} in it, and a context to put there; set context"
        kinds, said = {kind for one in self.choices for kind, _ in one}, f"context={self.context!r}"
        for kind, text in self.around.items():
            if kind not in kinds or "{context}" not in text:
                yield f"around.{kind}={text!r:.80} with {said}: it needs {{context}} in it, and {kind} in the context"
        if self.success != 1 and not kinds & {"solution", "feedback"}:
            yield f"success={self.success} with {said}: no effect; set context to solution or feedback"


class TeacherConfig(TeacherSource, frozen=True):
    """One teacher, or several of which each row has one; and how log-probabilities become advantages or a loss."""

    key: str | None = None
    """With teachers: the column of the dataset that names a row's teacher."""
    teachers: dict[str, TeacherSource] = Field(default_factory=dict)
    """Several teachers by name, each a table of weights, context, template, around and success."""
    ema_decay: float = Field(default=0.95, ge=0, lt=1)
    """Share of the old average that an update keeps."""
    update_steps: int = Field(default=1, ge=1)
    """Optimiser steps between updates of ema."""
    use: Use = "sum"
    """sum, reweigh, gate or position: a part of the advantages; loss: a term of the loss."""
    coef: float = Field(default=1.0, ge=0)
    """Weight of the teacher's part."""
    task_coef: float = Field(default=1.0, ge=0)
    """Weight of the rewards' advantages; 0 = they are measured, not trained on."""
    discount: float = Field(default=0.0, ge=0, le=1)
    """Of later tokens' gaps, for sum and position; 0 = each token answers for itself."""
    clip: float | None = Field(default=None, gt=0)
    """Largest gap of a token, in nats; none = no limit, 5 is a good one."""
    skip_tokens: int = Field(default=0, ge=0)
    """First sampled tokens that have no teacher."""
    reweigh_share: float = Field(default=0.5, ge=0, le=1)
    reweigh_range: float = Field(default=0.2, ge=0, lt=1)
    gate_slope: float = Field(default=5.0, gt=0)
    position_slope: float = Field(default=0.5, ge=0)
    estimator: Literal["exact", "k1+", "k2", "k3+", "k3_unbiased", "k1", "k3"] = "exact"
    """Of the divergence, for use = loss: exact (over the vocabulary), or from the sampled token's log-probabilities."""
    beta: float = Field(default=1.0, ge=0, le=1)
    """Of exact: 1 reverse KL, 0 forward KL, between these the generalised Jensen-Shannon divergence."""
    top_k: int = Field(default=0, ge=0)
    """Of exact: over the k most likely ids of the policy, with beta 0 of the teacher; 0 = all."""
    tail: bool = True
    """With top_k: all other ids count as one more; false = both are renormalised over the k."""
    ratio_cap: float | None = Field(default=None, gt=0)
    """For use = loss: a token's divergence times its ratio to the policy that sampled, at most this; none = alone."""

    @property
    def sources(self) -> Mapping[str, TeacherSource]:
        """The teachers by name; a single one has none."""
        return self.teachers or {"": self}

    def name_of(self, columns: Mapping[str, object]) -> str:
        """The name of the teacher of a row with these columns; it need not be one of `sources`."""
        return "" if self.key is None else str(columns.get(self.key))

    @property
    def term(self) -> Distillation | None:
        """Of the loss; None where the teacher speaks through the advantages."""
        if self.use != "loss":
            return None
        named = ("coef", "task_coef", "estimator", "beta", "top_k", "tail", "ratio_cap")
        return Distillation(**{name: getattr(self, name) for name in named}, skip=self.skip_tokens)

    @property
    def over_vocabulary(self) -> bool:
        """True where the teacher's whole distributions are needed."""
        return self.use == "loss" and self.estimator == "exact"

    def may_teach(self, group: Group) -> bool:
        """True if some completion of a group may have a teacher."""
        own = self.teachers.get(self.name_of(group.prompt.columns))
        return super().may_teach(group) if own is None else own.may_teach(group)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if (self.key is None) == bool(self.teachers):
            yield f"key={self.key!r} with {len(self.teachers)} teachers: set both, or none of them"
        if self.teachers and any(getattr(self, name) != value for name, value in TeacherSource().model_dump().items()):
            yield "weights, context, template, ... beside teachers: each teacher has its own; move them there"
        if self.over_vocabulary and (self.teachers or self.is_remote):
            which = "several teachers" if self.teachers else f"weights={self.weights!r}"
            yield f"{which} with estimator='exact': it takes one teacher, in this process; set estimator to k1+"
        if self.estimator in _REFUSED:
            yield f"estimator={self.estimator!r}: as a loss {_REFUSED[self.estimator]}"
        idle = dict[str, str]()
        for names, uses in _ACTS_WITH.items():
            if self.use not in uses.split():
                idle |= dict.fromkeys(names.split(), f"use to {uses.replace(' ', ' or ')}")
        if all(source.weights != "ema" for source in self.sources.values()):
            idle |= dict.fromkeys(("ema_decay", "update_steps"), "weights to ema")
        if not self.over_vocabulary:
            idle |= dict.fromkeys(("beta", "top_k", "tail"), "use to loss and estimator to exact")
        for name, instead in idle.items():
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                yield f"{name}={value!r}: no effect here; set {instead}, or leave {name} out"
        if not self.tail and self.top_k < 2:
            yield f"tail=False with top_k={self.top_k}: compares nothing; set top_k to 2 or more, or tail to true"
        if self.task_coef == 0 and (self.coef == 0 or (self.weights, self.context, self.key) == ("ema", "none", None)):
            yield f"task_coef=0.0, coef={self.coef}, weights={self.weights!r}: nothing would be learnt; change one"
