"""Files written here and read by PEFT and transformers, the other way round, and what is refused."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM

from covey import adapters
from covey.adapters import read_adapter
from covey.errors import ModelError, RunFolderError
from covey.files import folder_problem, publishing
from covey.jax import ModelConfig, Transformer, load_hf
from covey.jax.saving import adapter_tensors, load_adapter, lora_from_tensors, model_tensors, save_adapter, save_model
from covey.pytorch.models.lora import attach_adapter, linear_layers
from fakes import raises

TOKENS = np.random.default_rng(0).integers(0, 97, (2, 9))
ROOT = "base_model.model.model.layers."


class Base(NamedTuple):
    """One model on both sides; `fresh` makes the PyTorch one again, since PEFT changes what it is given."""

    folder: Path
    fresh: Callable[[], Any]
    hf_config: Any
    config: ModelConfig
    params: Any


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Base:
    """A tied Llama without biases, and an untied Qwen2 with them."""
    family = request.param

    def fresh() -> Any:
        return tiny_model(family, tie_word_embeddings=family == "llama")

    folder = tmp_path_factory.mktemp(family)
    fresh().save_pretrained(folder)
    return Base(folder, fresh, json.loads((folder / "config.json").read_text()), *load_hf(folder))


def micro(**changes: Any) -> ModelConfig:
    """Two layers of width 2: one number for most things."""
    shape = {"vocab_size": 3, "hidden_size": 2, "intermediate_size": 3, "num_layers": 2, "num_heads": 1}
    shape |= {"num_kv_heads": 1, "lora_rank": 1, "lora_modules": ("q_proj", "down_proj")}
    return ModelConfig(**(shape | changes))


def random_collection(config: ModelConfig, name: str, dtype: Any = jnp.float32, seed: int = 1) -> Any:
    """Random values in place of initial ones, B included."""
    shapes = jax.eval_shape(Transformer(config).init, jax.random.key(0), TOKENS)[name]
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.1, leaf.shape), dtype), shapes)


def our_logits(config: ModelConfig, variables: Any) -> Any:
    """In float64: rounding in float32 alone comes to 1e-5 here."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), variables)
        return np.asarray(jax.jit(Transformer(config).apply)(wide, TOKENS))


def their_logits(model: Any) -> Any:
    with torch.no_grad():
        return model.double().eval()(input_ids=torch.from_numpy(TOKENS)).logits.numpy()


def assert_same(found: Any, expected: Any) -> None:
    """Equal trees: structure, types, every bit."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_factors_are_transposed_and_named_as_in_peft() -> None:
    config = micro(num_layers=1, lora_modules=("down_proj",))
    a, b = jnp.asarray([[1.0], [2.0], [3.0]]), jnp.asarray([[4.0, 5.0]])  # [in, r] and [r, out]
    found = adapter_tensors(config, {"layer_0_mlp": {"down_proj": {"a": a, "b": b}}})
    assert {name: value.tolist() for name, value in found.items()} == {
        f"{ROOT}0.mlp.down_proj.lora_A.weight": [[1.0, 2.0, 3.0]],
        f"{ROOT}0.mlp.down_proj.lora_B.weight": [[4.0], [5.0]],
    }


@pytest.mark.parametrize("modules", [("q_proj", "v_proj", "down_proj"), None], ids=["some", "all"])
def test_peft_computes_what_was_trained_here(base: Base, modules: tuple[str, ...] | None, tmp_path: Path) -> None:
    config = replace(base.config, lora_rank=3, lora_alpha=8.0, lora_modules=modules or base.config.lora_modules)
    lora = random_collection(config, "lora")
    with publishing(tmp_path / "adapter") as aside:
        save_adapter(aside, config, {"lora": lora}, base_model=str(base.folder))
    assert folder_problem(tmp_path / "adapter") == ""
    theirs = PeftModel.from_pretrained(base.fresh(), str(tmp_path / "adapter"))
    ours = our_logits(config, {**base.params, "lora": lora})
    np.testing.assert_allclose(their_logits(theirs), ours, atol=1e-5)
    assert np.abs(ours - their_logits(base.fresh())).max() > 0.1
    found = load_adapter(tmp_path / "adapter")
    assert found[:3] == (3, 8.0, config.lora_modules)
    assert_same(lora_from_tensors(config, found.tensors, tmp_path), lora)


@pytest.mark.parametrize("targets", ["all-linear", ["v_proj", "gate_proj"], r".*layers\.\d\.mlp\.up_proj"])
def test_an_adapter_of_peft_computes_the_same_here(base: Base, targets: Any, tmp_path: Path) -> None:
    rank_stabilised = targets == "all-linear"
    how = {"use_rslora": rank_stabilised, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    settings = LoraConfig(r=4, lora_alpha=6, lora_dropout=0.1, target_modules=targets, **how)
    theirs = get_peft_model(base.fresh(), settings)
    theirs.save_pretrained(str(tmp_path), save_embedding_layers=False)
    rank, alpha, modules, tensors = load_adapter(tmp_path)
    assert (rank, alpha) == (4, 12.0 if rank_stabilised else 6.0)  # 6 / sqrt(4) = 12 / 4
    config = replace(base.config, lora_rank=rank, lora_alpha=alpha, lora_modules=modules)
    lora = lora_from_tensors(config, tensors, tmp_path)
    np.testing.assert_allclose(our_logits(config, {**base.params, "lora": lora}), their_logits(theirs), atol=1e-5)
    assert_same(adapter_tensors(config, lora), tensors)


def test_the_pytorch_trainer_and_the_server_take_what_is_saved_here(base: Base, tmp_path: Path) -> None:
    config = replace(base.config, lora_rank=2, lora_alpha=3.0)
    lora = random_collection(config, "lora")
    save_adapter(tmp_path, config, lora, base_model="any")
    attached = attach_adapter(base.fresh(), tmp_path)
    found = attached.get_parameter(f"{ROOT}1.self_attn.k_proj.lora_A.default.weight").detach().numpy()
    np.testing.assert_array_equal(found, np.asarray(lora["layer_1_attention"]["k_proj"]["a"]).T)
    told = json.loads((tmp_path / "adapter_config.json").read_text())
    upload = read_adapter((tmp_path / "adapter_model.safetensors").read_bytes(), told, linear_layers(base.fresh()))
    assert len(upload.factors) == 14  # 7 linear layers in each of 2
    assert {factors.scaling for factors in upload.factors.values()} == {1.5}


def test_bfloat16_factors_keep_every_bit_and_a_tree_that_is_no_adapter_is_not_saved(tmp_path: Path) -> None:
    config = micro(lora_alpha=0.5)
    lora = random_collection(config, "lora", jnp.bfloat16)
    save_adapter(tmp_path, config, lora, base_model="any")
    found = load_adapter(tmp_path)
    assert found.alpha == 0.5
    assert_same(lora_from_tensors(config, found.tensors, tmp_path), lora)
    config = micro()
    lora = random_collection(config, "lora")
    part = {name: value for name, value in lora.items() if name != "layer_1_mlp"}
    for tree, message in [
        ({}, "lora: holds no arrays"),
        (part, "lora: no layer_1_mlp/down_proj/a"),
        (lora | {"layer_2_mlp": lora["layer_1_mlp"]}, "layer_2_mlp/down_proj/a has no place"),
        (jax.tree.map(lambda x: x[:, :1], lora), r"layer_0_attention/q_proj/b has shape \(1, 1\), the config says"),
    ]:
        raises(ModelError, message, save_adapter, tmp_path / "adapter", config, tree, base_model="any")
    assert not (tmp_path / "adapter").exists()


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any]]:
    """Config and tensors of a sound adapter."""
    folder = tmp_path_factory.mktemp("sound")
    save_adapter(folder, micro(), random_collection(micro(), "lora"), base_model="any")
    return json.loads((folder / "adapter_config.json").read_text()), load_adapter(folder).tensors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3'; it must be LORA"),
        ({"use_dora": True}, "use_dora=True: a magnitude"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern="),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern="),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
        ({"bias": "lora_only"}, "bias='lora_only'"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"layers_to_transform": [0]}, "layers_to_transform="),
        ({"init_lora_weights": "pissa_niter_4"}, "the base weights are changed with it"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules has 'lm_head': factors are on q_proj, k_proj"),
        ({"target_modules": ["model.layers.0.self_attn.q_proj"]}, "holds factors of down_proj, but"),
        ({"r": 0}, "r=0; it must be a number above 0"),
        ({"r": 1.5}, r"r=1\.5; it must be a whole number"),
        ({"lora_alpha": float("nan")}, "lora_alpha=nan; it must be a number above 0"),
        ({"lora_alpha": None}, "lora_alpha=None; it must be a number above 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_adapter_of_more_than_plain_lora_is_refused(adapter: Any, change: Any, message: str, tmp_path: Path) -> None:
    settings, tensors = adapter
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings | change))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    raises(ModelError, message, load_adapter, tmp_path)


def test_damaged_adapter_files_are_refused(adapter: Any, tmp_path: Path) -> None:
    settings, tensors = adapter
    config_file, weights_file = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"

    def refused(message: str) -> None:
        raises(ModelError, message, load_adapter, tmp_path)

    refused("holds no adapter_config.json")
    config_file.write_text("[" * 100_000)
    (tmp_path / "adapter_model.bin").write_bytes(b"pickled")
    refused("pickled .bin adapters are not read")
    weights_file.write_bytes(b"\xff" * 40)
    refused("damaged .adapter_config cannot be read")
    config_file.write_text("[]")
    refused("not a JSON object")
    config_file.write_text(json.dumps(settings))
    refused("damaged .adapter_weights is not a safetensors file")
    save_file({}, weights_file)
    refused("holds no LoRA tensors")
    for name, value, message in [
        (f"{ROOT}0.self_attn.q_proj.lora_magnitude_vector", np.ones(2, np.float32), "is not a LoRA tensor"),
        ("model.layers.0.self_attn.q_proj.weight", np.ones((2, 2), np.float32), "is not a LoRA tensor"),
        (f"{ROOT}0.self_attn.q_proj.lora_A.weight", np.ones((1, 2), np.int8), "must be a matrix of floats"),
    ]:
        save_file(tensors | {name: value}, weights_file)
        refused(f"{name}.*{message}")


def test_tensors_that_do_not_fit_are_named(adapter: Any) -> None:
    tensors, config = adapter[1], micro()
    name, other = f"{ROOT}1.mlp.down_proj.lora_A.weight", f"{ROOT}2.mlp.down_proj.lora_A.weight"
    bad = tensors[name].copy()
    bad[0, 1] = np.inf
    for changed, change, message in [
        ({key: value for key, value in tensors.items() if key != name}, {}, f"lacks {name}"),
        (tensors | {other: tensors[name]}, {}, f"it has {other}"),
        (tensors, {"lora_modules": ("q_proj",)}, "it has .*down_proj.*set lora_rank and lora_modules to what load"),
        (tensors, {"lora_rank": 2}, r"q_proj.lora_A.weight is \[1, 2\], the model's is \[2, 2\]"),
        (tensors | {name: np.ones(3, np.float32)}, {}, rf"{name} is \[3\], the model's is \[1, 3\]"),
        (tensors | {name: bad}, {}, f"{name} has values that are not finite"),
        (tensors | {name: np.full((1, 3), 1e300)}, {}, f"{name} has values that are not finite"),
    ]:
        with pytest.raises(ModelError, match=f"somewhere: .*{message}"):
            lora_from_tensors(replace(config, **change), changed, "somewhere")


def test_transformers_loads_a_saved_model(base: Base, tmp_path: Path) -> None:
    """And what was only loaded is saved as the same file."""
    save_model(tmp_path, base.config, base.params["params"], base.hf_config)
    before, after = load_file(base.folder / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert_same(after, before)
    assert ("lm_head.weight" in after) is not base.config.tie_embeddings
    assert json.loads((tmp_path / "config.json").read_text()) == base.hf_config
    moved = jax.tree.map(lambda x: x * 1.01, base.params)
    save_model(tmp_path, base.config, moved, base.hf_config)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    np.testing.assert_allclose(their_logits(theirs), our_logits(base.config, moved), atol=1e-5)
    config, back = load_hf(tmp_path)
    assert config == base.config
    assert_same(back, moved)


@pytest.mark.parametrize("changes", [{"qk_norm": True, "head_dim": 4}, {"qkv_bias": True, "out_bias": True}])
def test_every_array_has_a_name_of_its_own(changes: Any) -> None:
    """The shapes that the two families above leave out: head norms, a bias on the output projection."""
    config = micro(tie_embeddings=False, **changes)
    params = random_collection(config, "params")
    found = model_tensors(config, params)
    assert len(found) == len(jax.tree.leaves(params))
    extra, shape = ("k_norm.weight", (4,)) if config.qk_norm else ("o_proj.bias", (2,))
    assert found[f"model.layers.1.self_attn.{extra}"].shape == shape
    assert found["lm_head.weight"].tolist() == params["head"].T.tolist()


def test_bfloat16_weights_keep_every_bit_and_are_announced(base: Base, tmp_path: Path) -> None:
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), base.params)
    save_model(tmp_path, base.config, params, base.hf_config | {"torch_dtype": "float32"})
    assert_same(load_hf(tmp_path, dtype=jnp.bfloat16)[1], params)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert theirs.dtype == torch.bfloat16
    kernel = params["params"]["layer_1_mlp"]["up_proj"]["kernel"]
    found = theirs.model.layers[1].mlp.up_proj.weight.detach().float().numpy()
    np.testing.assert_array_equal(found, np.asarray(kernel.T, np.float32))


def test_a_model_that_does_not_fit_is_not_saved(tmp_path: Path) -> None:
    config = micro(tie_embeddings=False)
    params = random_collection(config, "params")
    hf = {"vocab_size": 3, "hidden_size": 2, "intermediate_size": 3, "num_hidden_layers": 2, "num_attention_heads": 1}
    without = {name: value for name, value in params.items() if name != "layer_1_mlp_norm"}
    for tree, settings, message in [
        (without, hf, "params: no layer_1_mlp_norm/scale"),
        (params | {"layer_2_mlp_norm": {"scale": jnp.ones(2)}}, hf, "layer_2_mlp_norm/scale has no place"),
        (params | {"embedding": jnp.ones((4, 2))}, hf, r"embedding has shape \(4, 2\), the config says \(3, 2\)"),
        ({"params": params, "lora": {}}, hf, "params: no embedding"),
        (params, hf | {"tie_word_embeddings": True}, "tie_word_embeddings=True, but the model has False"),
        (params, hf | {"num_key_value_heads": 2}, "num_key_value_heads=2, but the model has 1"),
        (params, {}, "vocab_size=None, but the model has 3"),
    ]:
        raises(ModelError, message, save_model, tmp_path / "model", config, tree, settings)
    assert not (tmp_path / "model").exists()
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(ModelError, match=r"holds model-00001-of-00002\.safetensors, which readers would mix"):
        save_model(tmp_path, config, params, hf)


def test_a_write_that_fails_leaves_the_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, lora = micro(), random_collection(micro(), "lora")
    save_adapter(tmp_path, config, lora, base_model="any")
    names = ["adapter_config.json", "adapter_model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1  # readable by the same people

    def full(tensors: Any, path: Path, **kwargs: Any) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(adapters, "save_file", full)
        with pytest.raises(RunFolderError, match=r"adapter_model\.safetensors: cannot write: no space left"):
            save_adapter(tmp_path, config, jax.tree.map(jnp.zeros_like, lora), base_model="any")
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert_same(lora_from_tensors(config, load_adapter(tmp_path).tensors, tmp_path), lora)
    raises(RunFolderError, "in the way", save_adapter, tmp_path / names[0], config, lora, base_model="any")


def test_saving_needs_no_torch() -> None:
    code = "import sys, covey.jax.saving; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
