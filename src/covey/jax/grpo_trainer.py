"""Group Relative Policy Optimization in JAX, as one function that compiles.

    trainer = GRPOTrainer(policy_model, ref_model, optimizer, reward_fn, grpo_config)
    state = trainer.create_train_state(key, dummy_input)
    state, metrics = trainer.train_step(state, {"prompts": [[5, 6, 7], [8, 9]]})

`compute_loss(params, batch)` samples, scores, compares and returns the loss. A batch of `rollout` holds the sampled
part already: its loss is that of the recorded responses, as often as wanted. The formulas are those of
`covey.algorithms`, the same functions as in the PyTorch trainer.

Limits: one turn for each prompt. A KL over the vocabulary (`exact`) and `keep_sampling_mask` hold `[rows, T, V]`
numbers for `rows_per_pass` rows at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from covey.algorithms import Outcomes, combine_masks, count_step, policy_masks, token_weights, uncertain_tokens
from covey.errors import ConfigError, RewardError
from covey.jax.batches import as_column, check_fit, check_tokens, is_numeric, pad_prompts
from covey.jax.grpo_config import GRPOConfig
from covey.jax.rewarding import Decode, HostRewards, call_jax_reward, is_jax_reward
from covey.jax.sampling import sample
from covey.jax.scoring import Scores, loss_terms, score
from covey.jax.sharding import check_mesh, keep_placed, place, place_rows, variables_sharding
from covey.jax.trainer import Metrics, Trainer, TrainState

Batch = Mapping[str, Any]


class GRPOTrainer(Trainer):
    """Trains a policy by comparing the responses to each prompt with each other.

    Args:
        policy_model: any causal Flax module with `init(key, tokens)` and `apply(params, tokens) -> logits`. With an
            `init_cache` like `Transformer`'s it samples token by token.
        ref_model: the reference, a module of the same kind. A bound module (`module.bind(...)`) keeps its variables;
            else the reference is the policy as `create_train_state` made it. None = no reference.
        optimizer: any Optax gradient transformation.
        reward_fn: `f(responses) -> list of numbers`, see `HostRewards`; or a JAX function marked by `jax_reward`.
        grpo_config: a `GRPOConfig`, or a dictionary of its fields.
        decode: token ids -> text, e.g. `tokenizer.decode`. Without it reward functions get lists of ids, and a function
            that takes texts (an argument `completions`, a hint with `str`, a verifier) is refused.
        mesh: devices with the axis `data` for prompts, the axis `tensor` for weights and optimiser state, or both; see
            `covey.jax.sharding`. None = one device.

    Attributes:
        ref_params: variables of the reference, which you may replace. None with LoRA: the reference is then the policy
            with its adapters off.
        frozen_params: collections of the policy that are not trained, such as the base weights with LoRA.
    """

    def __init__(
        self,
        policy_model: Any,
        ref_model: Any,
        optimizer: optax.GradientTransformation,
        reward_fn: Any,
        grpo_config: GRPOConfig | Mapping[str, Any],
        *,
        decode: Decode | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__(optimizer)
        self.grpo_config = config = GRPOConfig.of(grpo_config)
        self.passes_per_batch = config.algorithm.num_iterations
        if ref_model is None and config.algorithm.uses_reference:
            told = f"ref_model=None: kl_coeff={config.kl_coeff} compares with it; pass it, or set kl_coeff to 0"
            raise ConfigError(told)
        self._objective = config.algorithm.objective()
        self._reads_reference = self._objective.estimates_kl or config.algorithm.reference_drift is not None
        self.policy_model, self.ref_model = policy_model, ref_model
        self.reward_fn, self.mesh = reward_fn, check_mesh(mesh)
        self.ref_params = None
        self._ref_is_bound = getattr(ref_model, "scope", None) is not None
        if self._ref_is_bound:
            self.ref_model, self.ref_params = ref_model.unbind()
        self._host_rewards = None if is_jax_reward(reward_fn) else HostRewards(reward_fn, config, decode)
        if config.validity_min_length is not None and self._host_rewards is None:
            raise ConfigError("validity_min_length: a JAX reward function sees no text; use a Python one, or unset it")
        self.frozen_params: dict[str, Any] = {}
        self._reward_failure: RewardError | None = None
        self._sample = jax.jit(self._sample_rows)
        self._record = jax.jit(self._record_rows)

    @property
    def ref_params(self) -> Any:
        """Variables of the reference, placed like the policy's."""
        return self._ref_params

    @ref_params.setter
    def ref_params(self, variables: Any) -> None:
        model = self.policy_model if self.ref_model is None else self.ref_model
        self._ref_params = place(variables, self.mesh, model)

    def create_train_state(self, key: jax.Array, dummy_input: jax.Array, *, params: Any = None) -> TrainState:
        """Make a state at step 0, and set the reference.

        Args:
            key: random key of the parameters and LoRA factors.
            dummy_input: `[B, L]` token ids.
            params: `{"params": ...}` to begin with, e.g. from `load_hf`; None = random ones.

        Raises `ConfigError`: the dummy input has another shape or type, or the parameters do not fit the model.
        """
        check_tokens("dummy_input", dummy_input)
        shapes = jax.eval_shape(self.policy_model.init, key, dummy_input)
        given = {} if params is None else dict(params)
        check_fit(given, {name: shapes[name] for name in given if name in shapes})
        variables = place(given, self.mesh, self.policy_model)
        if missing := set(shapes) - set(given):

            def make(key: jax.Array, dummy_input: jax.Array) -> Any:
                found = self.policy_model.init(key, dummy_input)
                return {name: found[name] for name in missing}

            variables |= self._made(make, *place((key, dummy_input), self.mesh))
        logits = jax.eval_shape(self.policy_model.apply, variables, dummy_input)
        shape = getattr(logits, "shape", None)
        if shape is None or len(shape) != 3 or shape[:2] != dummy_input.shape:
            returned = f"returned {shape or type(logits).__name__} for tokens of shape {dummy_input.shape}"
            raise ConfigError(f"policy_model: apply(params, tokens) {returned}; it must return logits [B, L, V]")
        trained = "lora" if "lora" in variables else "params"
        policy: Any = {trained: variables[trained]} if trained in variables else variables
        self.frozen_params = {name: value for name, value in variables.items() if name not in policy}
        if not self._ref_is_bound:
            self.ref_params = None if trained == "lora" else variables
        tx, step = self.optimizer, place(jnp.zeros((), jnp.int32), self.mesh)
        opt_state = tx.init(policy) if self.mesh is None else self._made(tx.init, policy)
        return TrainState(step=step, apply_fn=self.policy_model.apply, params=policy, tx=tx, opt_state=opt_state)

    def _made(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function makes, each array split from the beginning: no device needs to hold all of it."""
        made = jax.eval_shape(function, *arguments)
        where = None if self.mesh is None else variables_sharding(made, self.mesh, self.policy_model)
        return jax.jit(function, out_shardings=where)(*arguments)

    def constants(self) -> dict[str, Any]:
        """The reference, unless it is the frozen base."""
        return {} if self.ref_params is None else {"reference": self.ref_params}

    def set_constants(self, constants: Mapping[str, Any]) -> None:
        self.ref_params = constants.get("reference")

    def _given(self) -> dict[str, Any]:
        return {"frozen": self.frozen_params, "reference": self.ref_params}

    def prepare_batch(self, state: TrainState, batch: Batch) -> Batch:
        """Pad, check and place a batch. It also samples the batch if a column is not an array, or for a Python reward
        on a mesh.

        Args:
            state: its step is the random key, unless the batch has a `key`.
            batch: a result of `rollout`, or `prompts` as lists of ids, or as `[B, P]` padded on the right with
                `prompt_lengths` `[B]`. Optional `columns`: name -> one entry for each prompt.

        Raises `ConfigError`: prompts are empty, have another shape or unknown ids, or cannot be divided among the mesh.
        """
        if "constants" in batch:
            return batch
        if "responses" in batch:
            return {**place_rows(dict(batch), self.mesh, "responses"), "constants": self._given()}
        key = batch.get("key")
        if key is None:
            key = jax.random.fold_in(jax.random.key(self.grpo_config.seed), state.step)
        ready = {**self._arrays(batch), "key": place(key, self.mesh), "constants": self._given()}
        # Several passes need one record; text cannot enter compiled code; and where a callback on one device of a mesh
        # fails, the others wait for it until the process is ended.
        outside = self.passes_per_batch > 1 or (self.mesh is not None and self._host_rewards is not None)
        if outside or not all(is_numeric(value) for value in ready["columns"].values()):
            return self.rollout(state.params, ready)
        return ready

    def _arrays(self, batch: Batch) -> dict[str, Any]:
        prompts, lengths = pad_prompts(batch, self.grpo_config, self.policy_model)
        arrays = place_rows({"prompts": prompts, "prompt_lengths": lengths}, self.mesh)
        columns = {name: as_column(name, value, len(lengths)) for name, value in batch.get("columns", {}).items()}
        placed = {name: place_rows(x, self.mesh) if is_numeric(x) else x for name, x in columns.items()}
        return {**arrays, "columns": placed}

    def compute_loss(self, params: Any, batch: Batch) -> jax.Array:
        """The loss of a batch; differentiable in `params`, and one function for `jax.jit`.

        1. Sample N responses to each prompt. 2. Reward them. 3. Compute advantages in groups. 4. Compute
        log-probabilities under the policy. 5. Compute the surrogate. 6. Compute the KL from the reference. 7. Add both.
        Steps 1 to 3 are constants for differentiation. A batch from `rollout` begins at step 4.

        Args:
            params: `TrainState.params`.
            batch: a result of `rollout`, or `prompts` `[B, P]` padded on the right, `prompt_lengths` `[B]` (default:
                all P), `key` (default: from the seed) and `columns` of arrays.

        Raises `RewardError`: the reward function failed. In compiled code JAX raises its own error, which `train_step`
        converts. On a mesh, compile for results of `rollout`; see `prepare_batch`.
        """
        return self.loss_and_metrics(params, batch)[0]

    def loss_and_metrics(self, params: Any, batch: Batch) -> tuple[jax.Array, Metrics]:
        """The loss, and metrics."""
        record = batch if "responses" in batch else self.rollout(params, batch)
        algorithm, objective = self.grpo_config.algorithm, self._objective
        given = record.get("constants", self._given())
        reference = None if objective.vocabulary_kl is None else (lambda: self._reference(given))
        found = self._scores(self.policy_model, {**given["frozen"], **params}, record, reference)
        current, entropy = jax.lax.stop_gradient((found.logp, found.entropy))
        old, sampled = record["old_logprobs"], record["mask"]
        keep: dict[str, Any] = {}
        if algorithm.mask_truncated_completions:
            keep["mask_truncated_completions"] = record["finished"]
        if algorithm.validity_min_length is not None:
            keep["validity_mask"] = record["valid"]
        base, _ = combine_masks(sampled, keep)
        # These look at the policy of this very pass, over the tokens that are left.
        ref = record.get("ref_logprobs")
        mask, advantages, excluded = policy_masks(algorithm, current, old, ref, entropy, record["advantages"], base)

        def weights(of: jax.Array, aggregation: str) -> jax.Array:
            limit, dtype = self.grpo_config.sampling.max_completion_length, found.logp.dtype
            return token_weights(of, count_step(of), aggregation, limit, dtype=dtype)

        loss = objective.loss
        rows = {"mask": mask, "old": old, "advantages": advantages, "weights": weights(mask, loss.aggregation)}
        if loss.kl_aggregation is not None:
            rows["kl_weights"] = weights(sampled, loss.kl_aggregation)
        if objective.entropy_by_token:
            rows["entropy_weights"] = weights(uncertain_tokens(mask, excluded), "token_mean")
        if self._reads_reference:
            rows["reference"] = ref
        if algorithm.correction is not None:
            rows["trainer_old"] = record["trainer_old"]
        if objective.loss.select is not None:
            before = rows.get("trainer_old", old)
            rows["selected"] = objective.select(current, before, advantages, mask, entropy)
        terms = loss_terms(found, rows, objective, algorithm.correction)
        left, _ = combine_masks(base, {name: ~tokens for name, tokens in excluded.items()})
        return terms.loss, _metrics(record, terms.metrics, left)

    def _advance(self, state: TrainState, ready: Mapping[str, Any]) -> tuple[TrainState, Metrics]:
        self._reward_failure = None
        try:
            found = super()._advance(state, ready)
            jax.block_until_ready(found[1]["loss"])
        except jax.errors.JaxRuntimeError as error:  # JAX's report that a callback failed
            if self._reward_failure is None:
                raise
            raise self._reward_failure from error
        return found

    def rollout(self, params: Any, batch: Batch, key: jax.Array | None = None) -> dict[str, Any]:
        """Steps 1 to 3 of `compute_loss`: responses, rewards, advantages, and log-probabilities of the reference.

        Outside compiled code the reward function is called directly and columns may have any type. Inside, it is called
        by a callback.

        Args:
            params: parameters of the policy that samples.
            batch: see `prepare_batch`, or `compute_loss`.
            key: random key; None = the batch's.

        Returns:
            A batch for `compute_loss`, R = B · N rows, a prompt's next to each other: `tokens` `[R, P + T]`, `lengths`
            `[R]`, `responses`, `mask` and `old_logprobs` `[R, T]`, `rewards` and `advantages` `[R]`, `finished` `[R]`;
            where needed `ref_logprobs`, `trainer_old`, `support`.
        """
        inside = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(batch.get("prompts")))
        if not inside and "constants" not in batch:
            batch = {**batch, **self._arrays(batch)}
        given = batch.get("constants", self._given())
        key = batch.get("key", jax.random.key(self.grpo_config.seed)) if key is None else key
        prompts: Any = jnp.asarray(batch["prompts"]).astype(jnp.int32)
        lengths: Any = batch.get("prompt_lengths")
        lengths = jnp.full(prompts.shape[0], prompts.shape[1]) if lengths is None else jnp.asarray(lengths)
        lengths = lengths.astype(jnp.int32)
        params = jax.lax.stop_gradient(params)
        sampled = self._sample(params, given, prompts, lengths, key)
        rewards, valid = self._rewards(prompts, lengths, sampled, batch.get("columns", {}))
        return {**self._record(params, given, sampled, rewards, valid), "constants": given}

    def _sample_rows(self, params: Any, given: Any, prompts: Any, lengths: Any, key: Any) -> dict[str, jax.Array]:
        return sample(self.policy_model, {**given["frozen"], **params}, prompts, lengths, key, self.grpo_config)

    def _rewards(self, prompts: Any, lengths: Any, sampled: Batch, columns: Batch) -> tuple[Any, Any]:
        """Rewards `[R]`, NaN where there is none, and what the validity mask keeps `[R]`."""
        group, responses, mask = self.grpo_config.sampling.num_generations, sampled["responses"], sampled["mask"]
        count = len(mask)
        if self._host_rewards is None:
            shared = {**columns, "prompts": prompts, "prompt_lengths": lengths}
            repeated = {name: jnp.repeat(jnp.asarray(value), group, axis=0) for name, value in shared.items()}
            return call_jax_reward(self.reward_fn, responses, mask, repeated), np.ones(count, np.bool_)
        dtype = np.float32  # whatever the model's: a callback's thread does not know of JAX's 64-bit mode

        def host(prompts: Any, lengths: Any, responses: Any, mask: Any, columns: Mapping[str, Any]) -> tuple[Any, Any]:
            assert self._host_rewards is not None
            rows = (np.repeat(np.asarray(prompts), group, axis=0), np.repeat(np.asarray(lengths), group))
            repeated = {name: [entry for entry in value for _ in range(group)] for name, value in columns.items()}
            try:
                rewards, valid = self._host_rewards(*rows, np.asarray(responses), np.asarray(mask), repeated)
            except RewardError as error:
                self._reward_failure = error
                raise
            return rewards.astype(dtype), valid

        if not isinstance(mask, jax.core.Tracer):
            self._reward_failure = None
            return host(prompts, lengths, responses, mask, columns)
        for name, value in columns.items():
            if not is_numeric(value):
                raise ConfigError(
                    f"columns[{name!r}] holds no numbers: text cannot enter compiled code; call rollout(params, batch) "
                    "first and compute_loss on what it returns, or train_step"
                )
        shapes = (jax.ShapeDtypeStruct((count,), dtype), jax.ShapeDtypeStruct((count,), np.bool_))
        return jax.pure_callback(host, shapes, prompts, lengths, responses, mask, dict(columns))

    def _record_rows(self, params: Any, given: Any, sampled: Batch, rewards: Any, valid: Any) -> dict[str, Any]:
        algorithm, group = self.grpo_config.algorithm, self.grpo_config.sampling.num_generations
        logprobs = sampled["old_logprobs"]
        rewards = jax.lax.stop_gradient(jnp.asarray(rewards, logprobs.dtype))
        groups = jnp.arange(len(rewards)) // group
        step = Outcomes(rewards, groups, **algorithm.scaling, mask=sampled["mask"], logprobs=logprobs)
        advantages = algorithm.estimator(step)
        record = {**sampled, "valid": jnp.asarray(valid), "rewards": rewards, "advantages": advantages}
        if self._reads_reference:
            model, variables = self._reference(given)
            record["ref_logprobs"] = self._scores(model, variables, record).logp
        if algorithm.correction is not None:
            record["trainer_old"] = self._scores(self.policy_model, {**given["frozen"], **params}, record).logp
        return record

    def _reference(self, given: Any) -> tuple[Any, Any]:
        """Module and variables of the reference; with LoRA the base alone."""
        return self.ref_model, given["frozen"] if given["reference"] is None else given["reference"]

    def _scores(self, model: Any, variables: Any, record: Batch, reference: Any = None) -> Scores:
        """`score` on all rows, or on `rows_per_pass` at a time, each recomputed in the backward pass."""
        rows = {name: record[name] for name in ("tokens", "lengths", "responses", "support") if name in record}

        def some(rows: Mapping[str, Any]) -> Scores:
            return score(model, variables, config=self.grpo_config, reference=reference, **rows)

        count, size = rows["lengths"].shape[0], self.grpo_config.rows_per_pass
        if size is None or size >= count:
            return some(rows)
        if count % size:
            raise ConfigError(f"rows_per_pass={size}: does not divide the batch's {count} responses; choose a divisor")
        # A pass takes every (count / size)-th row, not the next ones: so it has rows of all devices.
        parts = jax.tree.map(lambda x: x.reshape(size, count // size, *x.shape[1:]).swapaxes(0, 1), rows)
        found = jax.lax.map(jax.checkpoint(some), parts)
        return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(count, *x.shape[2:]), found)

    def _step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        after, metrics = super()._step(state, batch)
        return keep_placed(after, self.mesh, self.policy_model), metrics


def _metrics(record: Batch, sums: Mapping[str, jax.Array], left: jax.Array) -> Metrics:
    """See `covey.metric_names`; `left` `[R, T]` are the tokens whose surrogate no mask takes."""
    tokens = jnp.maximum(sums["active_tokens"], 1)
    found = {
        "policy_loss": sums["policy_loss"],
        "reward": jnp.nanmean(record["rewards"]),
        "completions/mean_length": jnp.sum(record["mask"]) / record["mask"].shape[0],
        "completions/clipped_ratio": jnp.mean(~record["finished"]),
        "mask_ratio": jnp.mean(jnp.any(left, axis=1)),
        "sampling_steps": record["steps"] if "steps" in record else jnp.zeros((), jnp.int32),
    }
    names = {"ratio_sum": "ratio/mean", "kl_sum": "kl", "entropy_sum": "entropy"}
    names |= {"clip_low_sum": "clip_ratio/low_mean", "clip_high_sum": "clip_ratio/high_mean"}
    return found | {new: sums[name] / tokens for name, new in names.items() if name in sums}
