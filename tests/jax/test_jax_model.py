"""The Flax decoder against transformers, its cache, narrow factors; a batch's gradients are the PyTorch learner's."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from learner_cases import make_batch, make_learner
from tiny_models import tiny_model, tiny_tokenizer

from covey.errors import ConfigError, ModelError
from covey.jax import GRPOConfig, GRPOTrainer, ModelConfig, Transformer, load_hf
from covey.jax.model import wide_product
from covey.jax.scoring import score
from covey.pytorch.learner import Learner
from covey.pytorch.policy import Policy
from covey.types import Batch
from fakes import raises

TOKENS = np.random.default_rng(0).integers(0, 97, (3, 11))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_log_probabilities_and_gradients_equal_those_of_transformers(family: str, tied: bool, tmp_path: Path) -> None:
    """Of the embedding, in which PyTorch leaves the row of the padding token alone where it is read."""
    small = tiny_model(family, tie_word_embeddings=tied, num_layers=2 if tied else 1)
    theirs = type(small)(type(small).config_class(**(small.config.to_dict() | {"pad_token_id": 5}))).eval()
    theirs.load_state_dict(small.state_dict())  # larger than transformers' own at the beginning, biases too
    theirs.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    config, params = load_hf(tmp_path)
    tokens = np.concatenate([TOKENS, np.full((3, 2), 5)], axis=1)

    def loss(params: Any) -> Any:
        logp = jax.nn.log_softmax(Transformer(config).apply(params, jnp.asarray(tokens)), -1)
        return logp[..., 7].sum(), logp

    expected = torch.log_softmax(theirs(input_ids=torch.from_numpy(tokens)).logits, -1)
    expected[..., 7].sum().backward()
    gradient = theirs.get_input_embeddings().weight.grad.numpy()
    found, logp = jax.jit(jax.grad(loss, has_aux=True))(params)
    np.testing.assert_allclose(np.asarray(logp), expected.detach().numpy(), atol=1e-4)
    embedding = np.asarray(found["params"]["embedding"])
    np.testing.assert_allclose(embedding, gradient, atol=1e-5 * np.abs(gradient).max())
    assert tied == bool(np.abs(embedding[5]).max())


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_rope_scaling_equals_that_of_transformers(kind: str, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": kind, "rope_theta": 100.0, "factor": 4.0}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    shape = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    theirs = LlamaForCausalLM(LlamaConfig(vocab_size=97, rope_parameters=rope, **shape)).eval()
    theirs.save_pretrained(tmp_path)
    config, params = load_hf(tmp_path)
    tokens = np.arange(60)[None] % 97
    with torch.no_grad():
        expected = theirs(input_ids=torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(np.asarray(jax.jit(Transformer(config).apply)(params, tokens)), expected, atol=1e-5)


@pytest.mark.parametrize("window", [None, 4])
def test_cache_and_columns_change_nothing(window: int | None) -> None:
    """Rows at different positions, decoded token by token, give the logits of the whole sequence."""
    model = Transformer(ModelConfig(31, 16, 24, 1, 4, 2, sliding_window=window))
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 31, (2, 9)))
    params, apply = jax.jit(model.init)(jax.random.key(0), tokens), jax.jit(model.apply)
    whole, columns = apply(params, tokens), jnp.asarray([[3, 1], [8, 0]])
    picked = apply(params, tokens, columns=columns)
    np.testing.assert_allclose(picked, jnp.take_along_axis(whole, columns[:, :, None], axis=1), atol=1e-6)
    logits, cache = apply(params, tokens[:, :5], cache=model.init_cache(2, 9))
    np.testing.assert_allclose(logits, whole[:, :5], atol=1e-5)
    # The second row goes back to position 3: what later slots hold must not be seen.
    position = jnp.asarray([5, 3])
    for _ in range(2):
        now = jnp.take_along_axis(tokens, position[:, None], axis=1)
        logits, cache = apply(params, now, positions=position[:, None], cache=cache)
        np.testing.assert_allclose(logits, jnp.take_along_axis(whole, position[:, None, None], axis=1), atol=1e-5)
        position = position + 1


def test_lora_is_a_collection_that_can_be_left_out() -> None:
    model, tokens = Transformer(ModelConfig(31, 16, 24, 1, 2, 1, lora_rank=2)), jnp.arange(6)[None]
    variables, apply = jax.jit(model.init)(jax.random.key(0), tokens), jax.jit(model.apply)
    assert {leaf.shape[-1] for leaf in jax.tree.leaves(variables["lora"]["layer_0_mlp"]["up_proj"])} == {2, 24}
    plain = apply({"params": variables["params"]}, tokens)
    np.testing.assert_array_equal(apply(variables, tokens), plain)  # B = 0
    moved = {**variables, "lora": jax.tree.map(lambda x: x + 0.1, variables["lora"])}
    assert float(jnp.abs(apply(moved, tokens) - plain).max()) > 1e-3


def test_sums_of_narrow_factors_stay_wide() -> None:
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=size), jnp.bfloat16) for size in ((2, 5, 300), (2, 300, 7)))
    found, exact = wide_product(x, y), np.asarray(x, np.float64) @ np.asarray(y, np.float64)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, exact, atol=2e-5)
    assert abs(np.asarray(x @ y, np.float64) - exact).max() > 1e-2  # what would be lost
    weights = jnp.asarray(rng.normal(size=found.shape), jnp.float32)
    gradients = jax.grad(lambda x, y: jnp.sum(weights * wide_product(x, y)), argnums=(0, 1))(x, y)
    g = np.asarray(weights, np.float64)
    turned = [np.asarray(each, np.float64).swapaxes(1, 2) for each in (x, y)]
    for gradient, wanted in zip(gradients, (g @ turned[1], turned[0] @ g), strict=True):
        assert gradient.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(gradient, np.float64), wanted, atol=0.02 * abs(wanted).max())
    for dtype in (jnp.float32, jnp.float64):  # wide factors are multiplied as ever
        with jax.enable_x64(True):
            x = jnp.asarray(rng.normal(size=(4, 4)), dtype)
            assert wide_product(x, x).dtype == dtype
            np.testing.assert_array_equal(wide_product(x, x), x @ x)


def test_what_cannot_be_loaded_says_why_and_config_errors_name_value_and_fix(tmp_path: Path) -> None:
    raises(ModelError, r"config\.json: cannot be read", load_hf, tmp_path)
    tiny_model("gpt2").save_pretrained(tmp_path)
    raises(ModelError, "model_type='gpt2' is not supported in JAX; use one of llama", load_hf, tmp_path)
    tiny_model("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, message in [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"vocab_size": 98}, r"embed_tokens.weight is \[97, 32\], the model's is \[98, 32\]"),
        ({"num_hidden_layers": 3}, "lacks model.layers.2"),
        ({"num_hidden_layers": 1}, "it has model.layers.1"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type='yarn'"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        raises(ModelError, message, load_hf, tmp_path)
    for heads, head_dim, message in ((3, None, r"num_kv_heads=3.*divisor"), (2, 3, r"head_dim=3.*even")):
        raises(ConfigError, message, ModelConfig, 31, 16, 24, 1, 4, heads, head_dim=head_dim)


LAYERS = {"self_attn": "attention", "mlp": "mlp"}
KL = ("exact_weighted", "k1", "k3+", "k3_unbiased")
NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}


def as_record(batch: Batch) -> dict[str, Any]:
    """A batch of the PyTorch trainer as what `rollout` returns."""
    count, width = batch.mask.shape
    lengths = np.array([episode.prompt_length for episode in batch.episodes])
    tokens = np.zeros((count, lengths.max() + width), np.int32)
    for row, episode in enumerate(batch.episodes):
        tokens[row, : len(episode.token_ids)] = episode.token_ids
    responses = np.take_along_axis(tokens, lengths[:, None] + np.arange(width), axis=1)
    record = {"tokens": tokens, "lengths": lengths.astype(np.int32), "responses": responses, "mask": batch.mask}
    record |= {"old_logprobs": batch.old_logprobs, "advantages": batch.advantages}
    record |= {"rewards": np.zeros(count, np.float32), "finished": np.ones(count, bool), "valid": np.ones(count, bool)}
    return {name: jnp.asarray(value) for name, value in record.items()}


def as_tree(gradients: dict[str, Any]) -> dict[str, Any]:
    """PyTorch's gradients by name, in the layout of the Flax parameters."""
    tree: dict[str, Any] = {}
    for name, value in gradients.items():
        parts = name.removeprefix("base_model.model.").removeprefix("model.").split(".")
        if parts[0] == "embed_tokens":
            tree["embedding"] = value
        elif parts[0] == "norm":
            tree["final_norm"] = {"scale": value}
        elif parts[2] in NORMS:
            tree[f"layer_{parts[1]}_{NORMS[parts[2]]}"] = {"scale": value}
        else:
            into = tree.setdefault(f"layer_{parts[1]}_{LAYERS[parts[2]]}", {}).setdefault(parts[3], {})
            into[{"lora_A": "a", "lora_B": "b"}.get(parts[4], "kernel")] = value.T
    return tree


def of_kl(kind: str) -> tuple[bool, dict[str, Any]]:
    return True, {"loss_type": "dapo", "kl_estimator": kind, "kl_coeff": 0.1}


def as_jax(named: dict[str, Any]) -> Any:
    return jax.tree.map(jnp.asarray, as_tree({name: p.detach().numpy() for name, p in named.items()}))


@pytest.mark.parametrize(
    ("lora", "settings"),
    [
        (True, {"loss_type": "dapo", "kl_estimator": "k3", "kl_coeff": 0.1, "entropy_coef": 0.01}),
        (False, {"loss_type": "grpo", "kl_coeff": 0.0}),
        of_kl(KL[0]),
        *(pytest.param(*of_kl(kind), marks=pytest.mark.slow) for kind in KL[1:]),
    ],
    ids=["lora", "all weights", *KL],
)
def test_loss_and_gradients_equal_those_of_pytorch(lora: bool, settings: dict[str, Any], tmp_path: Path) -> None:
    learner, batch, rows = make_learner(), make_batch(), np.arange(12)
    if not lora:
        policy = Policy.load(tiny_model("llama"), tiny_tokenizer(), use_peft=False, reference={"needed": False})
        learner = Learner(policy, learning_rate=1e-2)
    options = GRPOConfig(num_samples_per_prompt=4, max_completion_length=12, temperature=0.8, **settings)
    reference = learner.scores(batch, rows, temperature=0.8, reference=True)[0] if lora else None
    how: dict[str, Any] = {"temperature": 0.8, "max_completion_length": 12, "reference": reference}
    theirs = learner.forward_backward(batch, rows, options.algorithm.objective(), **how)
    named = dict(learner.policy.named_trainable_parameters())
    expected = as_tree({name: p.grad.numpy() for name, p in named.items()})
    tiny_model("llama").save_pretrained(tmp_path)
    config, params = load_hf(tmp_path, lora_rank=4 if lora else 0, lora_alpha=32)
    model = Transformer(config)
    trainer = GRPOTrainer(model, model, optax.sgd(1.0), lambda responses: [], options)
    state = trainer.create_train_state(jax.random.key(0), jnp.zeros((1, 4), jnp.int32), params=params)
    trained, record = state.params, as_record(batch)
    if lora:
        trained, ref = {"lora": as_jax(named)}, trainer._scores(model, params, record).logp
        np.testing.assert_allclose(np.where(batch.mask, ref, 0), reference, atol=2e-5)
        record["ref_logprobs"] = ref
    loss, gradient = jax.jit(jax.value_and_grad(trainer.compute_loss))(trained, record)
    assert float(loss) == pytest.approx(theirs.metrics["loss"], rel=1e-5)
    (gradient,) = gradient.values()
    assert jax.tree.structure(gradient) == jax.tree.structure(expected)
    for path, ours in jax.tree.leaves_with_path(gradient):
        other = expected
        for key in path:
            other = other[key.key]
        assert np.linalg.norm(ours - other) < 1e-5 * np.linalg.norm(other), jax.tree_util.keystr(path)


def torch_scores(policy: Any, dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """`[N, T]` log-probabilities of the weights rounded to bfloat16, by the plain model in a precision."""
    model = policy.model
    for name, parameter in model.named_parameters():
        held = parameter.data if "lora_" in name else parameter.data.bfloat16()
        parameter.data = held.to(dtype if "lora_" not in name else torch.float32)
    batch = make_batch()
    found = np.zeros(batch.mask.shape)
    for row, episode in enumerate(batch.episodes):
        ids = torch.from_numpy(episode.token_ids)
        with torch.no_grad():
            logp = model(input_ids=ids[None]).logits[0, :-1].float().log_softmax(-1)
        chosen = logp.gather(1, ids[1:, None])[:, 0][torch.from_numpy(episode.sampled[1:])]
        found[row, : len(chosen)] = chosen.numpy()
    return found


def test_bfloat16_is_as_exact_as_the_plain_model_s(tmp_path: Path) -> None:
    """No further from the float32 numbers of the same weights than three times what transformers' code is."""
    batch, lora = make_batch(), as_jax(dict(make_learner().policy.named_trainable_parameters()))
    truth, theirs = (torch_scores(make_learner().policy, dtype) for dtype in (torch.float32, torch.bfloat16))
    tiny_model("llama").save_pretrained(tmp_path)
    config, params = load_hf(tmp_path, dtype="bfloat16", lora_rank=4, lora_alpha=32)
    record = as_record(batch)
    how = {name: record[name] for name in ("tokens", "lengths", "responses")} | {"config": GRPOConfig()}
    found = jax.jit(lambda variables: score(Transformer(config), variables, **how).logp)({**params, "lora": lora})
    assert found.dtype == jnp.float32
    own, ours = (abs(np.asarray(logp) - truth)[batch.mask].mean() for logp in (theirs, found))
    assert 0 < ours < 3 * own
