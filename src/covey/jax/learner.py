"""The JAX learner: log-probabilities, gradients of a whole optimiser step, and AdamW from Optax.

A step is cut into micro-batches of few shapes (`covey.jax.packing`), each compiled once. Token weights carry the
denominators of the whole step (`covey.algorithms.aggregation`), so the cut changes memory and time, never the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

from covey.algorithms import Correction, Objective, add_metrics
from covey.jax.compiling import CompiledFunction
from covey.jax.packing import MicroBatch, fill, pack_step, sequence_length, size_up
from covey.jax.policy import Policy, from_names, named_leaves, to_names
from covey.jax.scoring import loss_terms, score_batch
from covey.jax.sharding import DATA, keep_placed, place, place_rows
from covey.rollout.learning import FloatNT, Gradients, entropy_weights, loss_weights
from covey.rollout.packing import Pack, count_tokens
from covey.types import Batch, BoolArray

Arrays = dict[str, Any]

_MATRICES = ("kernel", "a", "b", "embedding", "head")
"""What weight decay acts on; norms and biases get none."""


class Learner:
    """Trains a `covey.jax.policy.Policy` with AdamW; does what `covey.pytorch.learner.Learner` does."""

    def __init__(
        self,
        policy: Policy,
        *,
        learning_rate: float,
        embedding_lr: float | None = None,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
        max_grad_norm: float = 1.0,
        tokens_per_micro_batch: int = 1024,
    ) -> None:
        self.policy, self.tokens_per_micro_batch, self.steps = policy, tokens_per_micro_batch, 0
        embeddings = 1.0 if embedding_lr is None else embedding_lr / learning_rate

        def per_leaf(value: Any) -> Any:
            names = named_leaves(policy.trained)
            return jax.tree.unflatten(jax.tree.structure(policy.trained), [value(n, x) for n, x in names.items()])

        decayed = per_leaf(lambda name, leaf: name.rsplit("/")[-1] in _MATRICES)
        self._factors = per_leaf(lambda name, leaf: embeddings if name in ("params/embedding", "params/head") else 1.0)
        self._optimizer = optax.chain(
            optax.clip_by_global_norm(max_grad_norm) if max_grad_norm > 0 else optax.identity(),
            optax.scale_by_adam(b1=betas[0], b2=betas[1], eps=epsilon),
            optax.add_decayed_weights(weight_decay, mask=decayed),
        )
        self._state = place(jax.jit(self._optimizer.init)(policy.trained), policy.mesh, policy.transformer)
        self._gradient: Any = None
        self._sequence, self._budget = 0, tokens_per_micro_batch
        self._score = CompiledFunction(self._scores_of, ("temperature", "entropy"))
        self._grad = CompiledFunction(self._gradient_of, ("objective", "temperature", "correction"), donate=("total",))
        self._zeros = jax.jit(lambda trained: self._placed(jax.tree.map(jnp.zeros_like, trained)))
        self._step = jax.jit(self._step_of, donate_argnames=("trained", "state"))

    def expect(self, sequence: int, step: int) -> None:
        """Tell what is to come: all that it needs is compiled when the first step needs some of it."""
        self._sequence, self._budget = sequence, min(self.tokens_per_micro_batch, size_up(step))

    # ------------------------------------------------------------------ log-probabilities

    def scores(
        self,
        batch: Batch,
        rows: NDArray[np.int64],
        *,
        temperature: float,
        reference: bool = False,
        entropy: bool = False,
    ) -> tuple[FloatNT, FloatNT | None]:
        """Log-probabilities, and entropies if asked for, of the rows' sampled tokens. `[N, T]`, 0 elsewhere."""
        variables = self.policy.reference.variables if reference else self.policy.variables
        logp = np.zeros(batch.mask.shape, np.float32)
        uncertainty = np.zeros(batch.mask.shape, np.float32) if entropy else None
        settings = {"temperature": temperature, "entropy": entropy}
        for part, arrays in self._parts(batch, rows, self._score, lambda arrays: (variables, arrays), settings):
            found = self._score(variables, arrays, **settings)
            part.put(np.asarray(found[0]), logp)
            if uncertainty is not None:
                part.put(np.asarray(found[1]), uncertainty)
        return logp, uncertainty

    def _scores_of(
        self, variables: Any, arrays: Arrays, *, temperature: float, entropy: bool
    ) -> tuple[jax.Array, jax.Array | None]:
        found = score_batch(self.policy.transformer.config, variables, arrays, temperature)
        return found.logp, found.entropy if entropy else None

    # ------------------------------------------------------------------ gradients

    def forward_backward(
        self,
        batch: Batch,
        rows: NDArray[np.int64],
        objective: Objective,
        *,
        temperature: float,
        max_completion_length: int,
        reference: FloatNT | None = None,
        trainer_old: FloatNT | None = None,
        correction: Correction | None = None,
        selected: BoolArray | None = None,
        entropy_coef: float | None = None,
    ) -> Gradients:
        """Accumulate the gradient of the whole step; see `covey.pytorch.learner.Learner.forward_backward`."""
        weights, kl_weights = loss_weights(batch, objective, max_completion_length)
        known: dict[str, NDArray[Any] | None] = {
            "mask": batch.mask,
            "old": batch.old_logprobs,
            "advantages": batch.advantages,
            "weights": weights,
            "reference": reference,
            "trainer_old": trainer_old,
            "kl_weights": kl_weights,
            "selected": selected,
            "entropy_weights": entropy_weights(batch, objective),
        }
        values = {name: array for name, array in known.items() if array is not None}
        given = {"frozen": self.policy.frozen}
        if objective.adaptive_entropy:  # a number that is another one in each step must not be compiled in
            given["entropy_coef"] = jnp.float32(objective.entropy_coef if entropy_coef is None else entropy_coef)
        if objective.vocabulary_kl is not None:
            given["reference"] = self.policy.reference.variables
        total = self._zeros(self.policy.trained)
        found: list[dict[str, NDArray[np.float64]]] = []
        packs: list[Pack] = []
        settings = {"objective": objective, "temperature": temperature, "correction": correction}

        def arguments(arrays: Arrays) -> tuple[Any, ...]:
            return self.policy.trained, given, arrays, total

        kept = np.zeros((2 if objective.vocabulary_kl is None else 3, *batch.mask.shape), np.float32)
        scored = np.zeros(batch.mask.shape, np.bool_)
        for part, arrays in self._parts(batch, rows, self._grad, arguments, settings, values):
            total, scores, metrics = self._grad(*arguments(arrays), **settings)
            found.append({name: np.asarray(value, np.float64) for name, value in metrics.items()})
            for each, whole in zip(scores, kept, strict=True):
                part.put(np.asarray(each), whole)
            part.put(np.ones(scores[0].shape, np.bool_), scored)
            packs += part.packs
        self._gradient = total if found else None  # no row, no step
        logp, uncertainty, *kl = kept
        told = {name: float(value) for name, value in add_metrics(found).items()}
        counts = count_tokens(batch.episodes, rows, sum(pack.num_tokens for pack in packs))
        return Gradients(told, logp, scored, uncertainty, kl[0] if kl else None, counts)

    def gradient(self) -> dict[str, NDArray[np.float32]]:
        """The gradient that `forward_backward` has left, by the parameters' names."""
        left = {} if self._gradient is None else to_names(self._gradient)
        return {name: np.asarray(value, np.float32) for name, value in left.items()}

    def _gradient_of(
        self,
        trained: Any,
        given: Any,
        arrays: Arrays,
        total: Any,
        *,
        objective: Objective,
        temperature: float,
        correction: Correction | None,
    ) -> tuple[Any, list[jax.Array], dict[str, jax.Array]]:
        """`total` plus the gradient of a micro-batch; log-probabilities, entropies, KLs if any; and the metrics."""

        def loss_of(trained: Any) -> tuple[jax.Array, tuple[list[jax.Array], dict[str, jax.Array]]]:
            variables, config = {**given["frozen"], **trained}, self.policy.transformer.config
            other, kl = given.get("reference"), objective.kl_estimator
            found = score_batch(config, variables, arrays, temperature, reference=other, kl_estimator=kl)
            terms = loss_terms(found, arrays, objective, correction, given.get("entropy_coef"))
            scores = [found.logp, found.entropy, *([] if found.kl is None else [found.kl])]
            return terms.loss, (scores, terms.metrics)

        (_, (scores, metrics)), gradient = jax.value_and_grad(loss_of, has_aux=True)(trained)
        gradient = jax.tree.map(jnp.add, total, gradient)
        return self._placed(gradient), scores, metrics

    def optim_step(self, learning_rate: float) -> float:
        """Clip the gradient, take one AdamW step, drop the gradient."""
        gradient, self._gradient = self._gradient, None
        if gradient is None:
            return 0.0
        norm = float(optax.tree.norm(gradient))
        if np.isfinite(norm):
            self.policy.trained, self._state = self._step(
                self.policy.trained, self._state, gradient, jnp.float32(learning_rate)
            )
            self.steps += 1
            self.policy.reference.after_step(self.steps)
        return norm

    def _step_of(self, trained: Any, state: Any, gradient: Any, rate: jax.Array) -> tuple[Any, Any]:
        updates, state = self._optimizer.update(gradient, state, trained)
        moved = jax.tree.map(lambda p, u, f: p - (rate * f * u).astype(p.dtype), trained, updates, self._factors)
        return self._placed(moved), self._placed(state)

    # ------------------------------------------------------------------ saving

    def tensors(self) -> dict[str, dict[str, NDArray[Any]]]:
        """What a resumed run needs: trained weights, reference, and the optimiser's moments."""
        snapshot = self.policy.reference.snapshot
        return {
            "policy": to_names(self.policy.trained),
            "reference": {} if snapshot is None else to_names(snapshot),
            "optimizer": to_names(self._state),
        }

    def restore(self, tensors: Mapping[str, Mapping[str, Any]], steps: int) -> None:
        """Take back what `tensors` returned after so many optimiser steps.

        Raises:
            ModelError: it is of another model or other adapter settings.
        """
        self.policy.load_state_dict(tensors["policy"])
        self.policy.reference.load_state_dict(tensors["reference"])
        self._state = from_names(self._state, tensors["optimizer"], "the saved optimiser")
        self.steps = steps

    @property
    def compilations(self) -> int:
        """Programs compiled so far: one for each shape of micro-batch and each objective."""
        step: Any = self._step
        return self._score.compilations + self._grad.compilations + int(step._cache_size())

    # ------------------------------------------------------------------ parts

    def _placed(self, tree: Any) -> Any:
        """Inside compiled code: where the policy's weights lie."""
        return keep_placed(tree, self.policy.mesh, self.policy.transformer)

    def _parts(
        self,
        batch: Batch,
        rows: NDArray[np.int64],
        program: CompiledFunction,
        arguments: Callable[[Arrays], tuple[Any, ...]],
        settings: Mapping[str, Any],
        values: Mapping[str, NDArray[Any]] | None = None,
    ) -> Iterator[tuple[MicroBatch, Arrays]]:
        """Micro-batches of the rows, and their arrays. A program that has to be compiled is compiled for all shapes."""
        mesh, episodes = self.policy.mesh, batch.episodes
        spread = 1 if mesh is None else int(mesh.shape.get(DATA, 1))
        sequence = max([self._sequence, *(sequence_length(episodes[row]) for row in rows)])
        shapes, parts = pack_step(episodes, rows.tolist(), sequence, self._budget, spread)
        for part in parts:
            arrays = self._arrays(part, batch, values)
            if not program.knows(*arguments(arrays), **settings):
                for shape in shapes:
                    program.prepare(*arguments(self._arrays(fill([], shape), batch, values)), **settings)
            yield part, arrays

    def _arrays(self, part: MicroBatch, batch: Batch, values: Mapping[str, NDArray[Any]] | None = None) -> Arrays:
        """A micro-batch on the devices, with its part of `[N, T]` arrays."""
        arrays: Arrays = dict(part.arrays)
        if any(episode.support is not None for episode in batch.episodes):
            arrays["support"] = part.support_bits(batch.episodes, self.policy.transformer.config.vocab_size)
        arrays |= {name: part.take(array) for name, array in (values or {}).items()}
        placed: Arrays = place_rows(arrays, self.policy.mesh)
        return placed
