"""GRPOConfig: names, sections, TOML, overrides, TRL's vocabulary, and errors that name value, reason and fix."""

import copy
import io
import json
import pickle
import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from covey.algorithms import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS, LOSSES, VOCABULARY_KL, make_objective
from covey.config import GRPOConfig
from covey.config.algorithm import AdvantageEstimator, AlgorithmConfig, KLEstimator
from covey.config.effects import without_effect
from covey.config.names import FIELDS, HINTS, MEANS, OPTIONS, SECTIONS, SYNONYMS, canonical_names
from covey.config.sampling import ModelConfig, SamplingConfig
from covey.config.text import explain, parse_overrides, render_explain
from covey.errors import ConfigError
from fakes import raises

Settings = dict[str, Any]


def problem(**settings: Any) -> str:
    with pytest.raises(ConfigError) as error:
        GRPOConfig(**settings)
    return str(error.value)


def test_every_name_has_one_meaning() -> None:
    names = [name for section in SECTIONS.values() for name in section.model_fields]
    assert len(names) == len(set(names)) == len(FIELDS)
    assert {name: field.annotation for name, field in GRPOConfig.model_fields.items()} == dict(SECTIONS)
    assert not set(MEANS) & set(FIELDS)  # no synonym and no option is also a field
    assert len(MEANS) == len(SYNONYMS) + len(OPTIONS)
    assert set(MEANS.values()) <= set(FIELDS)
    assert {field.partition(".")[0] for field in HINTS.values()} <= set(FIELDS)
    assert not set(HINTS) & {*MEANS, *FIELDS, *SECTIONS}  # of these none is read
    with pytest.raises(AttributeError, match="'lr'; did you mean learning_rate"):
        _ = GRPOConfig().lr
    assert [f"{line.section}.{line.name}" for line in explain() if len(line.meaning) < 10] == []


def test_flat_and_sectioned_forms_are_the_same() -> None:
    flat = GRPOConfig(num_generations=8, learning_rate=2e-5, output_dir="runs/x", beta=0.0)
    of_run, of_algorithm = {"output_dir": Path("runs/x")}, AlgorithmConfig(beta=0.0)
    sections = {"sampling": {"num_generations": 8}, "optim": {"learning_rate": 2e-5}}
    dotted = {"sampling.num_generations": 8, "optim.learning_rate": 2e-5}
    assert flat == GRPOConfig(**sections, run=of_run, algorithm=of_algorithm)
    assert flat == GRPOConfig("runs/x", **dotted, beta=0.0)  # the folder may come first without a name
    assert flat.sampling.num_generations == flat.num_generations == 8
    default = GRPOConfig()
    assert (default.num_generations, default.beta, default.epsilon) == (16, 0.04, 0.2)  # grpo-architecture.md
    assert (default.loss_type, default.scale_rewards, default.kl_estimator) == ("grpo", "group", "k3")
    section = SamplingConfig(num_generations=4)
    assert GRPOConfig(sampling=section, temperature=0.5).sampling == SamplingConfig(num_generations=4, temperature=0.5)
    assert GRPOConfig(model="folder").model.model == "folder"  # a section and a field
    assert GRPOConfig(model={"model": "folder", "lora_r": 4}).model.lora_r == 4
    assert GRPOConfig(model=ModelConfig(model="folder")) == GRPOConfig(model=Path("folder"))


def test_configs_are_immutable_and_can_be_copied() -> None:
    config = GRPOConfig(beta=0.5)
    with pytest.raises(ValueError, match="frozen"):
        config.run = config.run
    with pytest.raises(ConfigError, match="frozen"):
        config.num_samples_per_prompt = 8
    for frozen in (config, config.sampling):
        with pytest.raises(ConfigError, match=r"temperature=0.7: settings are frozen; .*replace\(temperature.*phases"):
            frozen.temperature = 0.7
    with pytest.raises(AttributeError, match="did you mean num_generations"):
        _ = config.num_generation
    assert not hasattr(config, "__array__")
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    assert config != GRPOConfig(beta=0.25)


def test_replace_validates_and_leaves_the_original() -> None:
    config = GRPOConfig(num_generations=8)
    assert config.replace(kl_coef=0.5, optim={"learning_rate": 0.1}).algorithm.beta == 0.5
    assert (config.replace(beta=0.5).num_generations, config.algorithm.beta, config.replace()) == (8, 0.04, config)
    raises(ConfigError, "at least 2 completions", config.replace, num_generations=1)
    # epsilon follows the loss until somebody sets it
    assert config.replace(loss_type="gspo").epsilon == GRPOConfig(loss_type="gspo").epsilon == 3e-4
    assert config.replace(loss_type="gspo").replace(loss_type="grpo").epsilon == 0.2
    assert GRPOConfig(epsilon=0.1).replace(loss_type="gspo").epsilon == 0.1


def test_the_default_section_gives_the_loss_its_own_parameters() -> None:
    """Naming a loss is enough: what the section sets are the loss's own defaults."""
    for loss_type in LOSSES:
        objective = GRPOConfig(loss_type=loss_type, beta=0.0).algorithm.objective()
        given = {**objective.loss.parameters, **dict(objective.parameters)}
        assert given == dict(LOSSES[loss_type].parameters), loss_type
        assert (objective.loss, objective.beta) == (make_objective(loss_type).loss, 0.0)
    assert set(get_args(KLEstimator)) == {*KL_ESTIMATORS, *VOCABULARY_KL}
    assert set(get_args(AdvantageEstimator)) == set(ADVANTAGE_ESTIMATORS)


def read_back(config: AlgorithmConfig) -> AlgorithmConfig:
    return GRPOConfig(**tomllib.loads(GRPOConfig(algorithm=config).to_toml())).algorithm


def test_parameters_without_a_setting_are_in_a_table_of_their_own() -> None:
    config = GRPOConfig(loss_type="vespo", loss_parameters={"k_pos": 2.5}).algorithm
    assert (dict(config.objective().parameters), read_back(config)) == ({"k_pos": 2.5}, config)
    for entry in ("processor_kwargs.size={longest_edge=9}", "data.processor_kwargs={size={longest_edge=9}}"):
        assert GRPOConfig.from_overrides([entry]).processor_kwargs == {"size": {"longest_edge": 9}}
    assert GRPOConfig.from_overrides(["loss_type=vespo", "loss_parameters={k_neg = 1}"]).loss_parameters == {"k_neg": 1}
    own = GRPOConfig(loss_type="losses/mine.py:mine").algorithm  # read when the run begins, with its own defaults
    assert (own.epsilon, own.loss_parameters, read_back(own)) == (None, {}, own)


FIVE = {"steps": 5, "kl_coef": 0.02, "num_samples_per_prompt": 8}
MEANT: list[tuple[Settings, Settings]] = [
    ({"kl_coef": 0.1}, {"beta": 0.1}),
    ({"kl_coeff": 0.1}, {"beta": 0.1}),
    ({"algorithm": {"kl_coef": 0.1}}, {"beta": 0.1}),
    ({"num_samples_per_prompt": 4}, {"num_generations": 4}),
    ({"env.rollout.n": 4}, {"num_generations": 4}),
    ({"env": {"rollout": {"n": 4}}}, {"num_generations": 4}),
    ({"max_new_tokens": 512}, {"max_completion_length": 512}),
    ({"clip_epsilon": 0.1}, {"epsilon": 0.1}),
    ({"num_epochs": 2}, {"num_train_epochs": 2.0}),
    ({"update_reference_every": 10}, {"reference_update_steps": 10}),
    ({"normalize_advantages": False}, {"scale_rewards": "none"}),
    ({"normalize_advantages": False, "scale_rewards": "none"}, {"scale_rewards": "none"}),
    ({"norm_adv_by_std_in_grpo": True}, {"scale_rewards": "group"}),
    ({"algorithm.norm_adv_by_std_in_grpo": False}, {"scale_rewards": "none"}),
    ({"scale_rewards": True}, {"scale_rewards": "group"}),
    ({"scale_rewards": False}, {"scale_rewards": "none"}),
    ({"report_to": "wandb"}, {"report_to": ["wandb"]}),
    ({"report_to": "none"}, {"report_to": []}),
    ({"kl_coef": 0.1, "beta": 0.1}, {"beta": 0.1}),
    ({"phases": [FIVE]}, {"phases": [{"steps": 5, "beta": 0.02, "num_generations": 8}]}),
]


def test_synonyms_are_read_and_never_written() -> None:
    for written, meant in MEANT:
        config = GRPOConfig(**written)
        assert config == GRPOConfig(**meant), written
        saved = {name for section in config.to_dict().values() for name in section}
        assert saved == set(FIELDS) - {"server_token"}  # never written down
    for written in (
        {"kl_coef": 0.1, "beta": 0.2},
        {"kl_coef": 0.1, "kl_coeff": 0.2},
        {"beta": 0.1, "algorithm": {"beta": 0.2}},
        {"normalize_advantages": True, "scale_rewards": "none"},
        {"num_generations": 8, "env": {"rollout": {"n": 4}}},
    ):
        assert "to different values; keep one" in problem(**written), written


def test_toml_round_trip_is_exact() -> None:
    config = GRPOConfig(
        num_generations=8,
        learning_rate=1.2345678901234567e-05,
        loss_parameters={"delta": 4.0},
        adaptive_entropy={"target": 0.3},
        stop_strings=["</s>", 'quote " backslash \\ newline \n tab \t \x7f é 🐦'],
        lora_target_modules=["q_proj", "v_proj"],
        chat_template_kwargs={"enable_thinking": False, "a key": "x", "n": 3, "f": 0.5},
        reward_weights=[1, 0.5],
        report_to=["tensorboard", "wandb"],
        phases=[{"name": "warm up", "steps": 100, "beta": 0.02}, {"minutes": 1.5, "temperature": 0.7}],
    )
    text = config.to_toml()
    assert (GRPOConfig(**tomllib.loads(text)), GRPOConfig(**tomllib.loads(text)).to_toml()) == (config, text)
    assert (GRPOConfig(**config.to_dict()), GRPOConfig(**json.loads(json.dumps(config.to_dict())))) == (config, config)


def test_none_is_the_default_wherever_it_is_allowed(tmp_path: Path) -> None:
    """TOML cannot say None: leaving a setting out must mean the same, and so does the word, as in an override."""
    fields = {name: SECTIONS[section].model_fields[name] for name, section in FIELDS.items()}
    nullable = [name for name, field in fields.items() if type(None) in get_args(field.annotation)]
    assert len(nullable) > 10
    assert GRPOConfig(**dict.fromkeys(nullable)) == GRPOConfig()
    words = recipe(tmp_path, "".join(f'{name} = "None"\n' for name in nullable) + 'scale_rewards = "none"\n')
    assert GRPOConfig.from_toml(words, ["output_dir=runs/covey", "scale_rewards=group"]) == GRPOConfig()


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"))  # NUL is refused
VALUES = {
    "beta": st.floats(0, 10),
    "temperature": st.floats(0.01, 10),
    "seed": st.integers(0, 2**62),
    "num_generations": st.integers(2, 10**6),
    "run_name": st.none() | TEXT,
    "stop_strings": st.lists(TEXT.filter(bool)),
    "reward_weights": st.none() | st.lists(st.floats(0.1, 9), min_size=1),
    "chat_template_kwargs": st.dictionaries(TEXT, st.booleans() | st.integers(-(2**62), 2**62) | TEXT),
    "max_minutes": st.none() | st.floats(2, 9),
    "loss_type": st.sampled_from(sorted(LOSSES)),
}


@settings(max_examples=40, deadline=None)
@given(st.fixed_dictionaries({}, optional=VALUES))
def test_any_config_survives_toml(values: Settings) -> None:
    config = GRPOConfig(**values)
    assert GRPOConfig(**tomllib.loads(config.to_toml())) == config


def recipe(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_files_are_found_and_named_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, beside = tmp_path / "here", tmp_path / "beside"
    for folder in (here / "adapter", beside / "adapter"):
        folder.mkdir(parents=True)
    for file in (here / "rows.jsonl", beside / "held_out.jsonl", here / "own.py", beside / "own.py"):
        file.touch()
    monkeypatch.chdir(here)
    (beside / "recipe.toml").write_text(
        'dataset = "rows.jsonl"\neval_dataset = "held_out.jsonl"\nadapter = "adapter"\nmodel = "an/id"\n'
        'functions = ["own.py:a", "exact_match"]\ndown_sampling = "own.py:b"\n'
    )
    found = GRPOConfig.from_toml("../beside/recipe.toml", ["task=own.py:c"])
    assert (found.data.dataset, found.data.eval_dataset) == (f"{here}/rows.jsonl", f"{beside}/held_out.jsonl")
    assert (found.model.adapter, found.model.model) == (f"{here}/adapter", "an/id")  # a run's recipe has others beside
    assert found.rewards.functions == (f"{beside}/own.py:a", "exact_match")
    assert (found.algorithm.down_sampling, found.data.task) == (f"{beside}/own.py:b", f"{here}/own.py:c")
    assert GRPOConfig.from_overrides(["dataset=rows.jsonl"]).data.dataset == f"{here}/rows.jsonl"
    plain = GRPOConfig(dataset="rows.jsonl", model="adapter", eval_dataset="not/here")
    assert plain.data.dataset == "rows.jsonl"
    whole = plain.with_whole_paths()
    assert (whole.data.dataset, whole.model.model) == (f"{here}/rows.jsonl", f"{here}/adapter")
    assert whole.data.eval_dataset == "not/here"


def test_recipes_in_one_folder_have_run_folders_of_their_own(tmp_path: Path) -> None:
    for name in ("r1.toml", "r2.v2.toml", "recipe.toml"):
        (tmp_path / name).write_text("beta = 0.1")
    found = [GRPOConfig.from_toml(path).output_dir for path in sorted(tmp_path.iterdir())]
    assert found == ["runs/r1", "runs/r2.v2", f"runs/{tmp_path.name}"]
    assert GRPOConfig.from_toml(tmp_path / "r1.toml", overrides=["output_dir=a"]).output_dir == "a"
    (tmp_path / "config.toml").write_text(GRPOConfig().to_toml())  # of a run, which names its folder
    assert GRPOConfig.from_toml(tmp_path / "config.toml").output_dir == GRPOConfig().output_dir == "runs/covey"


def test_overrides_win_over_the_file_whatever_names_both_use(tmp_path: Path) -> None:
    text = "kl_coef = 0.01\n[sampling]\nnum_samples_per_prompt = 4\n[schedule]\nmax_minutes = 4.0\n"
    path = recipe(tmp_path, text + '[[schedule.phases]]\nname = "warmup"\nsteps = 10\ntemperature = 0.7\n')
    config = GRPOConfig.from_toml(path)
    assert (config.beta, config.num_generations, config.max_minutes) == (0.01, 4, 4.0)
    assert [(phase.name, phase.steps, phase.temperature) for phase in config.schedule.phases] == [("warmup", 10, 0.7)]
    overrides = ["beta=0.5", "env.rollout.n=8", "schedule.max_minutes=none", "run.output_dir=runs/a=b", "beta=0.25"]
    config = GRPOConfig.from_toml(str(path), overrides)
    assert (config.beta, config.num_generations, config.max_minutes, config.output_dir) == (0.25, 8, None, "runs/a=b")


def test_override_values() -> None:
    for text, value in (
        ("sampling.num_generations=8", 8),
        ("learning_rate=1e-5", 1e-5),
        ("beta=.5", 0.5),
        ("eval_at_end=False", False),
        ("use_peft=true", True),
        ("scale_rewards=none", "none"),
        ("max_minutes=None", None),
        ("run_name=7", "7"),
        ("run_name=2024-01-01", "2024-01-01"),
        ('run_name="a b"', "a b"),
        ("model=some/folder", "some/folder"),
        ("device=cuda:1", "cuda:1"),
        ('stop_strings=["a", "b"]', ["a", "b"]),
        ("chat_template_kwargs={enable_thinking = false}", {"enable_thinking": False}),
        ("run_name=x\nseed = 1", "x\nseed = 1"),
    ):
        (found,) = parse_overrides([text]).values()
        assert found == value, text


def test_bad_overrides_and_unreadable_files(tmp_path: Path) -> None:
    for override, message in (
        ("sampling.num_generations", "write section.name=value"),
        ("sampling.num_generation=8", r"did you mean sampling.num_generations\?"),
        ("sampling.num_generations=many", "sampling.num_generations='many': must be int"),
    ):
        raises(ConfigError, message, GRPOConfig.from_toml, recipe(tmp_path, ""), [override])
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    for name in ("absent", "binary"):
        raises(ConfigError, "cannot be read", GRPOConfig.from_toml, tmp_path / f"{name}.toml")
    with pytest.raises(ConfigError, match=r"recipe.toml: is not valid TOML .*line 2"):
        GRPOConfig.from_toml(recipe(tmp_path, "beta = 1\nbeta = = 2"))


NONE = "there is no such setting; did you mean"
WRONG = [
    ({"num_generations": 1}, "sampling.num_generations=1: a group needs at least 2 completions to compare; set sampl"),
    ({"num_generations": 1}, " to compare; set sampling.num_generations to 2 or more"),
    ({"embedding_lr": 2e-4}, "optim.embedding_lr=0.0002: with LoRA the embedding is frozen; remove it"),
    ({"use_baseline": False}, "use_baseline=False: GRPO needs the group's mean"),
    ({"use_baseline": False}, "; remove "),
    ({"use_unbiased_kl": "yes"}, "use_unbiased_kl='yes': "),
    ({"use_unbiased_kl": "yes"}, " true or false"),
    ({"use_off_policy_masking": True, "reference_drift_threshold": 0.3}, "both set algorithm.reference_drift_thresh"),
    ({"use_unbiased_kls": True}, "did you mean use_unbiased_kl"),
    ({"loss_parameters": {"delta": "x"}}, "algorithm.loss_parameters.delta='x' is str, and must"),
    ({"adv_parameters": {"std_correction": 0.5}}, "algorithm.adv_parameters: std_correction=0.5 is float, and must be"),
    ({"adv_parameters": {"std_correction": 9}}, "std_correction=9: choose 1 (divided by G - 1) or 0 (by G)"),
    ({"adv_parameters": {"step_score": "foo"}}, "step_score='foo': no such name; choose one of episode, return, step"),
    ({"adaptive_entropy": {"goal": 0.2}}, "adaptive_entropy: has no 'goal'; choose target, delta, min, max"),
    ({"adaptive_entropy": {"target": "x"}}, "algorithm.adaptive_entropy.target='x': must be float, >= 0"),
    ({"optimizer_parameters": {"lr": 1}}, "has no 'lr'; choose weight_decay, beta1, beta2, epsilon"),
    ({"loss_parameters": {"epsilon_high": float("nan")}}, "algorithm.loss_parameters.epsilon_high=nan: must be "),
    ({"down_sampling": "first:four"}, "'four' is not a number and neither selected nor group; write first:4 or first"),
    ({"down_sampling": "first:4:all"}, "'all' is not a number and neither"),
    ({"inference_server_kind": "tgi"}, "(`covey serve`), vllm (vLLM's"),
    ({"inference_server_url": "http://a:1,localhost:9"}, "url='localhost:9': not an address; begin it with http://"),
    ({"dataset": ""}, "data.dataset='': is empty; "),
    ({"loss_type": "dap"}, "algorithm.loss_type='dap': must be grpo | bnpo | "),
    ({"loss_type": "dap"}, "did you mean 'dapo'?"),
    ({"top_p": 1.5}, "sampling.top_p=1.5: must be float, > 0, <= 1 (Sample only from"),
    ({"temperature": 0}, "sampling.temperature=0: must be float, >= 0.001, <= 100"),
    ({"temperature": float("nan")}, "sampling.temperature=nan"),
    ({"learning_rate": float("inf")}, "optim.learning_rate=inf"),
    ({"num_generations": "8"}, "sampling.num_generations='8': must be int"),
    ({"num_generations": 8.0}, "sampling.num_generations=8.0: must be int"),
    ({"num_generations": True}, "sampling.num_generations=True: must be int"),
    ({"eval_at_end": "yes"}, "evaluation.eval_at_end='yes': must be bool"),
    ({"device": "gpu"}, "model.device='gpu': must be one of auto, cpu, cuda or cuda:N"),
    ({"report_to": "neptune"}, "run.report_to='neptune': must be list of (tensorboard | wandb | trackio | mlflow)"),
    ({"lora_target_modules": 5}, "model.lora_target_modules=5: must be str | list of str"),
    ({"stop_strings": [""]}, "an empty text would end every completion"),
    ({"reward_weights": [0, 0]}, "rewards.reward_weights=[0.0, 0.0]: with these weights"),
    ({"beta": None}, "algorithm.beta=None: must be float, >= 0"),
    ({"max_steps": 0}, "schedule.max_steps=0: a run of 0 steps trains nothing"),
    ({"warmup_steps": 5.5}, "optim.warmup_steps=5.5: must be a whole number of steps"),
    ({"phases": [{"name": "a"}]}, "schedule.phases[0]: no length: a phase needs exactly one length"),
    ({"phases": [{"steps": 1, "tokens": 2}]}, "schedule.phases[0]: steps and tokens: a phase needs exactly one"),
    ({"phases": [{"steps": 1}, {"minutes": -1}]}, "schedule.phases[1].minutes=-1: must be float | none, > 0"),
    ({"phases": [{"steps": 1, "temprature": 1}]}, "schedule.phases[0].temprature: there is no such setting; did you"),
    ({"phases": [3]}, "schedule.phases[0]=3: a phase is a table"),
    ({"phases": 3}, "schedule.phases=3: must be list of table"),
    ({"loss_type": "gspo", "loss_parameters": {"importance_sampling_level": "token"}}, "by its sequence ratio"),
    ({"loss_type": "my_loss"}, "or FILE.py:NAME for a loss of your own"),
    ({"loss_type": "vespo", "loss_parameters": {"k_pso": 1}}, "loss_parameters='k_pso': no such name; did you mean"),
    ({"loss_parameters": {"epsilon": 0.1}}, "loss_parameters.epsilon: it is a setting of its own; set"),
    ({"loss_parameters": {"delta": 1.1}}, "algorithm.loss_parameters.delta=1.1: below 1 + epsilon_high = 1.2 it would"),
    ({"importance_sampling_correction": "token_mask:3:2"}, "the smallest ratio 3 must be 0 or more and less than"),
    ({"importance_sampling_correction": "off:2"}, "off has no bounds; write off alone"),
    ({"importance_sampling_correction": "token_trunc:2"}, "'token_trunc:2': must be auto | off | token_truncate"),
    ({"down_sampling": "max_varianc:2"}, "'max_varianc:2': must be none | max_variance"),
    ({"down_sampling": "shortest:16"}, "algorithm.down_sampling='shortest:16': groups have at most 16 completions"),
    ({"reference_drift_threshold": "mean:2"}, "'mean:2': must be a number, of the mean over tokens, or sum: and"),
    ({"optimizer_parameters": {"beta1": 1.0}}, "optim.optimizer_parameters.beta1=1.0: must be 0 or more, below 1"),
    ({"adaptive_entropy": {}, "entropy_coef": 2.0}, "entropy_coef=2.0: adaptive_entropy keeps it from min=0.0 to"),
    ({"use_peft": False, "adapter": "a"}, "model.adapter='a' with use_peft=False: an adapter"),
    ({"keep_sampling_mask": True}, "algorithm.keep_sampling_mask=True: no token is ever excluded"),
    ({"soft_overlong_cache": 256}, "rewards.soft_overlong_cache=256: must be smaller than"),
    ({"max_generations": 8, "num_generations": 8}, "sampling.max_generations=8: must be more than the 8 compl"),
    ({"eval_steps": 0, "load_best_model_at_end": True}, "evaluation.load_best_model_at_end=True: eval_steps=0 makes"),
    ({"eval_steps": 0, "early_stopping_patience": 3}, "evaluation.early_stopping_patience=3: eval_steps=0 makes"),
    ({"num_generations_eval": 4}, "evaluation.num_generations_eval=4: all greedy"),
    ({"upload_adapters_to_server": False, "inference_server_url": "http://a:1"}, "both set server.inference_serv"),
    ({"learning_rat": 1}, "learning_rat: there is no such setting; did you mean optim.learning_rate?"),
    ({"sampling": {"temprature": 1}}, f"sampling.temprature: {NONE} sampling.temperature?"),
    ({"algoritm": {"beta": 1}}, "algoritm.beta: there is no section 'algoritm'; write algorithm.beta"),
    ({"algorithm": {"num_generations": 4}}, "is not in section algorithm; write sampling.num_generations"),
    ({"algorithm": {"num_samples_per_prompt": 4}}, "write sampling.num_generations"),
    ({"sampling": 3}, "sampling: is a section; give it a table"),
    ({"lr": 1e-5}, "lr: there is no such setting; did you mean optim.learning_rate?"),
    ({"ppo_epochs": 1}, "ppo_epochs: there is no such setting; did you mean algorithm.num_iterations?"),
    ({"model": {"use_lora": True}}, "model.use_lora: there is no such setting; did you mean model.use_peft?"),
    ({"trainer": {"batch_size": 4}}, "there is no section 'trainer'; did you mean data.prompts_per_step?"),
    ({"overwrite_output_dir": True}, "did you mean run.overwrite?"),
    ({"zzzzqqq": 3}, "`covey config --explain` lists all settings"),
    ({"smpling": {}}, "smpling: there is no such setting"),
]


@pytest.mark.parametrize(("written", "message"), WRONG)
def test_errors_name_value_reason_and_fix(written: Settings, message: str) -> None:
    assert message in problem(**written)


def test_one_error_names_all_that_is_wrong() -> None:
    lines = problem(top_p=2.0, beta=-1, num_generations=0).splitlines()
    assert [line.split("=")[0] for line in lines] == ["algorithm.beta", "sampling.num_generations", "sampling.top_p"]
    assert len(problem(loss_type="nonsense").splitlines()) == 1


def test_names_of_the_usmle_document() -> None:
    for written, fields in (
        ({"use_baseline": True}, {}),
        ({"use_unbiased_kl": True}, {"kl_estimator": "k3_unbiased"}),
        ({"use_unbiased_kl": False}, {"kl_estimator": "k1"}),
        ({"use_off_policy_masking": True}, {"reference_drift_threshold": 0.5}),
        ({"off_policy_threshold": 0.3}, {"reference_drift_threshold": 0.3}),
        ({"use_off_policy_masking": True, "off_policy_threshold": 0.7}, {"reference_drift_threshold": 0.7}),
        ({"use_off_policy_masking": False, "off_policy_threshold": 0.7}, {"reference_drift_threshold": None}),
        ({"algorithm": {"use_unbiased_kl": True, "kl_coef": 0.01}}, {"kl_estimator": "k3_unbiased", "beta": 0.01}),
    ):
        assert canonical_names(written) == fields, written


def test_what_has_no_effect_is_said() -> None:
    for written, named in (
        ({"beta": 0.0, "kl_estimator": "k1"}, "algorithm.kl_estimator='k1'"),
        ({"loss_type": "reinforce", "epsilon": 0.1}, "algorithm.epsilon=0.1"),
        ({"importance_sampling_correction": "auto:2"}, "algorithm.importance_sampling_correction='auto:2'"),
        ({"adv_estimator": "rloo", "scale_rewards": "batch"}, "algorithm.scale_rewards='batch'"),
        ({"beta": 0.0, "reference_update_steps": 7}, "algorithm.reference_update_steps=7"),
        ({"reference_ema_decay": 0.5}, "algorithm.reference_ema_decay=0.5"),
        ({"adv_estimator": "reinforce_plus_plus", "max_generations": 32}, "sampling.max_generations=32"),
        ({"max_steps": 5, "num_train_epochs": 2.0}, "schedule.num_train_epochs=2.0"),
        ({"use_peft": False, "lora_r": 8}, "model.lora_r=8"),
        ({"inference_server_kind": "vllm"}, "server.inference_server_kind="),
        ({"phases": [{"steps": 1, "name": "a", "learning_rate_cut": 0.1}]}, "phase 'a': learning_rate_cut"),
    ):
        with pytest.warns(UserWarning, match=f"{re.escape(named)}.* has no effect: it acts only if"):
            config = GRPOConfig(**written)
        assert GRPOConfig() == GRPOConfig(**GRPOConfig().to_dict())  # a default is nobody's wish: no warning
        assert config.to_dict()


def test_what_has_an_effect_is_not_said_to_have_none() -> None:
    for shared in ({"learners": 2}, {"samplers": 0}):
        assert without_effect(GRPOConfig(**shared, timeout_seconds=60.0, max_restarts=0, groups_per_unit=3)) == []
    with pytest.warns(UserWarning, match=r"distributed\.max_restarts=0 has no effect"):
        GRPOConfig(max_restarts=0)
    # an update of a reference, where something reads it
    GRPOConfig(beta=0.0, reference_update_steps=9, reference_drift_threshold=0.5)
    GRPOConfig(beta=0.0, reference_update_steps=9, phases=[{"steps": 1, "beta": 0.1}])
    for cut in ({"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert GRPOConfig(keep_sampling_mask=True, **cut).keep_sampling_mask
    for trained in ({"use_peft": False}, {"lora_target_modules": ["q_proj", "embed_tokens"]}):
        assert GRPOConfig(embedding_lr=2e-4, **trained).embedding_lr == 2e-4


def test_names_of_trl_point_to_its_room() -> None:
    """They have one meaning, TRL's, and it is not here."""
    for name in ("per_device_train_batch_size", "bf16", "use_vllm", "eval_strategy", "deepspeed"):
        assert f"{name}: is an option of TRL; run TRL scripts with `from covey.trl import" in problem(**{name: 1})


def rendered(*only: str) -> tuple[int, str]:
    output = io.StringIO()
    return render_explain(Console(file=output, width=200), *only), output.getvalue()


def test_explain_covers_every_field_once() -> None:
    lines = {line.name: line for line in explain()}
    assert list(lines) == list(FIELDS)
    top_p = lines["top_p"]
    assert (top_p.section, top_p.type, top_p.default) == ("sampling", "float, > 0, <= 1", "1.0")
    assert (lines["max_minutes"].default, lines["epsilon"].default) == ("none", "0.2")
    assert lines["report_to"].type == "list of (tensorboard | wandb | trackio | mlflow)"
    assert lines["lora_target_modules"].type == "str | list of str"
    found, shown = rendered()
    assert (found, "[sampling]" in shown, "num_generations" in shown) == (len(FIELDS), True, True)
    found, shown = rendered("sampling.top_")
    assert (found, "learning_rate" in shown, rendered("no such thing")[0]) == (2, False, 0)


def test_names_of_other_places_say_what_to_write() -> None:
    for other, words in (
        ({"model": {"backend": "jax"}}, r"^model\.backend: there is no such setting; .*covey\.jax\.GRPOTrainer"),
        ({"epsilon_high": 0.3}, r"^epsilon_high: .*did you mean algorithm\.loss_parameters\.epsilon_high\?"),
        ({"optim": {"adam_beta2": 0.9}}, r"^optim\.adam_beta2: .* mean optim\.optimizer_parameters\.beta2\?"),
    ):
        raises(ConfigError, words, GRPOConfig, **other)


def test_a_server_is_switched_on_and_off() -> None:
    at = {"inference_server_url": "http://127.0.0.1:8000"}
    assert GRPOConfig(upload_adapters_to_server=True) == GRPOConfig(**at)
    assert GRPOConfig(upload_adapters_to_server=True, inference_server_url="http://a:1").server.urls == ("http://a:1",)
    assert GRPOConfig(**at).replace(upload_adapters_to_server=False) == GRPOConfig()
    raises(ConfigError, "both set", GRPOConfig, upload_adapters_to_server=False, **at)
    assert GRPOConfig(dynamic_sampling=True).dynamic_sampling == 3


def test_an_entry_of_a_table_is_set_beside_the_others() -> None:
    config = GRPOConfig(loss_parameters={"delta": 4.0}).with_overrides(["algorithm.loss_parameters.epsilon_high=.3"])
    assert config.loss_parameters == {"delta": 4.0, "epsilon_high": 0.3}


def test_help_finds_a_setting_by_its_other_names() -> None:
    for name, setting in {
        "kl_coef": "beta",
        "env.rollout.n": "num_generations",
        "use_off_policy_masking": "reference_drift_threshold",
        "off_policy_threshold": "reference_drift_threshold",
        "num_samples_per_prompt": "num_generations",
    }.items():
        found, shown = rendered(name)
        assert (found, f"{setting} " in shown) == (1, True)
        assert re.search(rf"{name}[^.]* means? this\.", " ".join(shown.replace("│", " ").split())), name
