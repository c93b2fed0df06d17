"""A loss of one's own, in a file: found, tried, as on the shelf; and credit that is lost where a ratio is shared."""

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from algorithm_cases import jax_gradient, loss_of, random_case, torch_gradient

import covey.algorithms
from covey.algorithms import LOSSES, LossInputs, Surrogate, find_estimator, find_loss, loss, make_objective, policy_loss
from covey.config import GRPOConfig
from covey.errors import ConfigError
from covey.jax.grpo_config import GRPOConfig as JaxConfig
from covey.training.setup import check_estimator
from fakes import raises

RECIPE = Path(__file__).parents[2] / "recipes" / "gmpo" / "gmpo.py"
HEAD = "import numpy as np; from covey.algorithms import LossInputs, Surrogate, loss; "
HEAD += "from covey.algorithms.arrays import stop_gradient\n"
WIDE = {"epsilon_high": 1e9, "epsilon": 1.0}  # as without a clip


def mine(returned: str, parameters: str = "x", before: str = "") -> str:
    return f"{before}def mine({parameters}):\n    return {returned}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory that has nothing to do with the package."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_gmpo_in_a_file_is_gmpo_on_the_shelf_and_the_same_value_each_time(folder: Path) -> None:
    assert len(RECIPE.read_text().splitlines()) <= 30
    shutil.copy(RECIPE, folder / "mine.py")
    case = random_case(seed=5)
    own, shelf = make_objective("mine.py:gmpo", clip=0.2, beta=0.1), make_objective("gmpo", epsilon=0.2, beta=0.1)
    for gradient_of in (torch_gradient, jax_gradient):
        both = [gradient_of(case, lambda c, o=objective: loss_of(c, o).loss) for objective in (own, shelf)]
        (value, gradient), (expected, wanted) = both
        assert value == expected
        np.testing.assert_array_equal(gradient, wanted)
    metrics, expected = loss_of(case, own).metrics, loss_of(case, shelf).metrics
    assert {name: float(value) for name, value in metrics.items()} == {n: float(v) for n, v in expected.items()}
    assert float(metrics["clip_high_sum"]) > 0
    first, second = (GRPOConfig(loss_type="mine.py:gmpo").algorithm.objective() for _ in range(2))
    assert (first, hash(first)) == (second, hash(second))  # a static argument of compiled code
    with pytest.raises(ConfigError, match="loss_parameters='clap': no such name; did you mean 'clip'"):
        GRPOConfig(loss_type="mine.py:gmpo", loss_parameters={"clap": 1.0}).algorithm.objective()
    (folder / "mine.py").unlink()  # a run that has begun goes on
    assert GRPOConfig(loss_type="mine.py:gmpo").algorithm.objective() == first


def plain(x: LossInputs) -> Surrogate:
    return Surrogate(-x.ratio * x.advantages)


def test_parameters_of_a_setting_s_name_get_the_setting(folder: Path) -> None:
    code = mine("Surrogate(-epsilon * tau * x.ratio * x.advantages)", "x, epsilon=0.4, tau=1.0", "@loss()\n")
    (folder / "mine.py").write_text(HEAD + code)
    assert dict(GRPOConfig(loss_type="mine.py:mine").algorithm.objective().parameters) == {}
    config = GRPOConfig(loss_type="mine.py:mine", epsilon=0.1, loss_parameters={"tau": 2.0})
    assert dict(config.algorithm.objective().parameters) == {"epsilon": 0.1, "tau": 2.0}
    with pytest.raises(ConfigError, match=r"set algorithm\.adaptive_entropy"):  # a setting of another name
        GRPOConfig(loss_parameters={"adaptive_entropy": True})


def test_what_a_loss_asks_for() -> None:
    @loss(aggregation="token_mean", entropy=True, always=True)
    def explores(x: LossInputs) -> Surrogate:
        return Surrogate(-x.ratio * x.advantages - 0.1 * x.entropy + 0.0 * x.sampler)

    objective, bonus = make_objective(explores), make_objective("bnpo", entropy_coef=0.1, **WIDE)
    assert objective.differentiates_entropy
    assert objective.needs_every_row
    case = random_case(seed=7)
    case.correction = np.ones_like(case.correction)
    expected = float(loss_of(case, bonus).loss)
    assert float(loss_of(case, objective).loss) == pytest.approx(expected, rel=1e-12)
    assert expected != 0


def test_the_sampler_s_log_probabilities_are_those_before_the_correction() -> None:
    seen = []

    def looks(x: LossInputs) -> Surrogate:
        seen.append((x.old, x.sampler))
        return Surrogate(-x.advantages * x.logp)

    logp, old, sampler, ones = (torch.full((2, 3), value) for value in (-1.0, -1.1, -1.3, 1.0))
    objective = make_objective(looks)
    for more, before in (({"correction": ones, "sampler": sampler}, sampler), ({}, old)):
        policy_loss(logp, old, ones, ones.bool(), ones, objective, **more)
        assert seen[-1][0].equal(old)
        assert seen[-1][1].equal(before)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def other(x):\n    return Surrogate(x.logp)\n", "has no 'mine'; it has .*other"),
        ("mine = 3\n", "'mine' is a int, not a function"),
        (mine("Surrogate(x.lopg)"), r"raised AttributeError: .*'lopg'.* at .*mine.py:3, in mine"),
        (mine("x.logp.sum()"), r"loss 'mine.py:mine' \(.*mine.py:2\) returned float64; return"),
        (mine("Surrogate(x.logp.sum())"), r"returned loss of shape \(\); return \[N, T\], here"),
        (mine("Surrogate(-x.advantages * x.logp, x.mask[:1])"), r"returned low of shape \(1, 5\)"),
        (mine("Surrogate(-x.advantages * x.logp, True)"), "returned low of bool"),
        (mine("Surrogate(x.advantages / 0 * x.logp)"), "returned (nan|inf|-inf) for ordinary tokens"),
        (mine("Surrogate(x.logp)"), r"gives tokens of advantage 0 a loss; declare it with @loss\(alw"),
        (mine("Surrogate(-x.advantages * x.logp)", "x, tau"), "lacks its parameter 'tau'; set algorithm.l"),
        (mine("Surrogate(-x.advantages * x.logp)", before="@loss(aggregation='men')\n"), "aggregation='men'"),
        (mine("x", before="@loss(select=lambda x: x.mask[0])\n"), "selects something else than tokens"),
        (mine("Surrogate(x.advantages * x.old)"), r"\(.*mine.py:2\) has no gradient; compute it from x.logp"),
        (mine("Surrogate(-x.advantages * stop_gradient(x.logp))"), "has no gradient; "),
        (mine("Surrogate(np.exp(x.logp) * x.advantages)"), "mine.py:3, in mine; .* the functions of x.xp"),
        (mine("Surrogate(x.advantages.fill(0))"), "ValueError: .*read-only at .*mine.py:3"),
        (mine("Surrogate(-x.advantages * x.logp, x.ratio)"), "low or high that are not booleans"),
        (mine("x", before="@loss(select=lambda x: 1 / 0)\n"), "its select raised ZeroDivisionError"),
        ("raise OSError('no')\n", "importing mine.py failed with OSError: no at .*mine.py:2"),
        (None, r"loss_type='mine.py:mine': mine.py: no such file; give its path from the w"),
    ],
)
def test_a_bad_loss_is_an_error_that_names_file_and_function(folder: Path, code: str | None, message: str) -> None:
    if code is not None:
        (folder / "mine.py").write_text(HEAD + code)
    with pytest.raises(ConfigError, match=message) as raised:
        check("mine.py:mine")
    assert "mine" in str(raised.value)


@pytest.mark.parametrize("gradient_of", [torch_gradient, jax_gradient])
def test_what_only_the_arrays_of_a_backend_refuse_is_named_too(folder: Path, gradient_of: Any) -> None:
    """NumPy's own functions work in the trial, and not on arrays that a gradient is asked of."""
    code = mine("Surrogate(np.asarray(-x.ratio * x.advantages))", before="import numpy as np\n")
    (folder / "mine.py").write_text(HEAD + code)
    objective = make_objective("mine.py:mine")
    with pytest.raises(ConfigError, match=r"(?s)loss 'mine.py:mine' .* raised .* at .*mine.py:4, in mine; .*x\.xp"):
        gradient_of(random_case(seed=5), lambda c: loss_of(c, objective).loss)


def test_errors_in_training_are_named_and_memory_that_runs_out_stays_what_it_is() -> None:
    def greedy(x: LossInputs) -> Surrogate:
        raise RuntimeError("CUDA out of memory")  # the learner halves its micro-batch

    def shrinks(x: LossInputs) -> Surrogate:
        found = -x.advantages * x.logp
        return Surrogate(found if x.logp.shape == (4, 5) else found[:1])

    raises(RuntimeError, r"^CUDA out of memory$", find_loss(greedy).surrogate, LossInputs(*[np.ones((1, 1))] * 4), {})
    with pytest.raises(ConfigError, match=r"returned loss of shape \(1, 6\); return \[N, T\], here \(5, 6\)"):
        loss_of(random_case(seed=8), make_objective(shrinks))


def test_every_loss_of_the_shelf_names_its_source_and_every_function_says_what_it_does() -> None:
    assert all(one.function.__doc__ and one.name == name for name, one in LOSSES.items())
    exported = {name: getattr(covey.algorithms, name) for name in covey.algorithms.__all__}
    assert [name for name, what in exported.items() if callable(what) and not what.__doc__] == []


def group_free(step: Any) -> Any:
    return step.rewards - 0.5


def test_a_function_from_python_needs_no_decorator_and_is_named_where_it_is_found_again() -> None:
    config = GRPOConfig(loss_type=plain, adv_estimator=group_free).algorithm
    assert find_loss(config.loss_type).function is plain
    assert find_estimator(config.adv_estimator).function is group_free
    for setting in ("loss_type", "adv_estimator"):
        with pytest.raises(ConfigError, match=rf"algorithm.{setting}=.* a lambda.*define it with def at the top"):
            GRPOConfig(**{setting: lambda x: x})
    raises(ConfigError, "stands in the program that began the run", find_loss, "__main__:no_such_function")
    raises(ConfigError, r"takes no options after its name; .*loss_parameters", find_loss, "mine.py:gmpo:clip=0.3")
    case, found = random_case(seed=6), find_loss(plain)
    assert (found.aggregation, dict(found.parameters)) == ("sequence_mean", {})
    assert loss(plain) == loss()(plain) == found
    assert loss_of(case, make_objective(plain)).loss == loss_of(case, make_objective("grpo", **WIDE)).loss
    config = GRPOConfig(loss_type=plain)
    assert config.loss_type == f"{__name__}:plain"
    assert GRPOConfig(**config.to_dict()).algorithm.objective().loss.function is plain


SHARED = {"gspo", "luspo", "gmpo"}
BY_TOKEN: list[dict[str, Any]] = [
    {"adv_estimator": "optimal_token_baseline"},
    {"adv_estimator": "reinforce_plus_plus", "adv_parameters": {"gamma": 0.9}},
]
OWN = """
import numpy as np
from covey.algorithms import LossInputs, Surrogate
from covey.algorithms.losses import sequence_ratio
def shared(x: LossInputs) -> Surrogate: return Surrogate(-sequence_ratio(x.logp, x.old, x.mask) * x.advantages)
def single(x: LossInputs) -> Surrogate: return Surrogate(-x.ratio * x.advantages)
def falling(step): return step.rewards[:, None] * 0.5 ** np.arange(step.tokens.shape[1])
def level(step): return step.rewards - step.rewards.mean()
"""


@pytest.mark.parametrize("name", LOSSES)
def test_which_losses_share_their_credit(name: str) -> None:
    by_torch = (torch.func.grad, torch.asarray)
    objective = make_objective(name)
    assert objective.shares_credit(*by_torch) == (name in SHARED)
    assert objective.shares_credit(jax.grad, jnp.asarray) == (name in SHARED)
    if "importance_sampling_level" in objective.loss.parameters:
        levels = [make_objective(name, importance_sampling_level=level) for level in ("sequence", "gspo_token")]
        # cispo's ratio is a constant, so the gradient stays the token's
        assert [each.shares_credit(*by_torch) for each in levels] == [name != "cispo", False]


def check(loss: str, world: object = None, **more: Any) -> None:
    check_estimator(GRPOConfig(loss_type=loss, **more), world)  # type: ignore[arg-type]


def test_credit_of_tokens_needs_a_ratio_of_tokens_and_that_of_completions_goes_with_every_loss() -> None:
    for more in BY_TOKEN:
        for name in sorted(SHARED):
            raises(ConfigError, rf"{more['adv_estimator']}.*{name}.*gspo_token", check, name, **more)
        with pytest.raises(ConfigError, match="gspo_token"):
            check("dapo", loss_parameters={"importance_sampling_level": "sequence"}, **more)
        for fine in ("gspo_token", "grpo", "vespo", "cispo"):
            check(fine, **more)
        check("luspo", loss_parameters={"importance_sampling_level": "gspo_token"}, **more)
    # the trainer for Flax modules says so too
    raises(ConfigError, "gspo_token", JaxConfig, loss_type="gspo", **BY_TOKEN[1])
    JaxConfig(loss_type="gspo_token", **BY_TOKEN[1])
    for estimator in ("grpo", "rloo", "opo", "reinforce_plus_plus", "remax"):
        for name in LOSSES:
            check(name, adv_estimator=estimator)


def test_turns_of_agents_have_a_credit_of_their_own() -> None:
    """`grpo` compares the turns by `step_score`; with `history_length` a row is one turn."""
    agents = {"loss": "gspo", "world": object()}
    for more in ({"adv_estimator": "gigpo"}, {"adv_parameters": {"step_score": "return"}}):
        raises(ConfigError, "gspo_token", check, **agents, **more)
        check(**agents, **more, history_length=2)
        check(**agents | {"loss": "gspo_token"}, **more)
    check(**agents)
    check(**agents, adv_estimator="naive_grpo")
    check(**agents, adv_estimator="gigpo", adv_parameters={"step_advantage_weight": 0.0})


def test_losses_and_estimators_of_a_file(folder: Path) -> None:
    (folder / "mine.py").write_text(OWN)
    raises(ConfigError, r"mine.py:falling.*mine.py:shared", check, "mine.py:shared", adv_estimator="mine.py:falling")
    check("mine.py:shared", adv_estimator="mine.py:level")
    check("mine.py:single", adv_estimator="mine.py:falling")
