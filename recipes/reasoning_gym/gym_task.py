"""Questions that the package reasoning-gym makes and scores (Stojanovski et al. 2025, arXiv 2505.24760).

Its scorers raise, do not end, or evaluate the answer as Python. So items are made and answers scored in processes with
limits of time and memory, and no answer is evaluated in which something could be called or looked up.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import logging
import random
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache, partial
from importlib import metadata
from typing import Any, ClassVar

from covey.errors import ConfigError, DataError
from covey.functions import make_named, nearest, read_options
from covey.rewards.extract import completion_text, last_number_text
from covey.rewards.parallel import ItemTimeout, WorkerPool
from covey.rewards.text import found_word, say
from covey.rewards.verifier import RewardFunction
from covey.tasks.base import Task, as_prompt, question_key
from covey.tasks.dataset import Row

log = logging.getLogger(__name__)
VERSION = "0.1.25"
"""Of reasoning-gym, whose scorers were read."""
HELD_OUT = 2_000_000_000
"""Seed of the first held-out item. Each item has a seed of its own; those of training are below 1.1 billion."""
REFUSED = {
    "game_of_life_halting": "its scorer takes every answer as right",
    "coin_flip": "its scorer takes every beginning of the right answer as right, such as 0",
    "composite": "it mixes other datasets; name them: dataset=gcd|leg_counting",
    **dict.fromkeys(("knight_swap", "list_functions"), "a seed does not make the same items again"),
}
EVALUATED = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
PARSED = ("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration")
"""Datasets whose scorers give an answer to `eval`, and to SymPy's `parse_expr`, which calls `eval`."""
_NAMES = r"(?:(?:a?(?:sin|cos|tan)h?|cot|sec|csc|exp|log|ln|sqrt|pi)\b|[A-Za-z]\b(?!\s*\())"
_ARITHMETIC = rf"(?a:[-+*/^()\s]|[0-9]++(?:\.[0-9]*+)?+|\b{_NAMES})*+"
_NO_NAN = r"(?is)(?!.*nan).*"  # NaN differs from no number, so these scorers take it as right
_PLAIN = dict.fromkeys(EVALUATED, r"[A-Z0-9_\s]*") | dict.fromkeys(PARSED, _ARITHMETIC)
_PLAIN |= dict.fromkeys(("complex_arithmetic", "number_sorting"), _NO_NAN)
_ONE_BY_ONE = ("acre", "gsm_symbolic")  # draw what all items are about when a dataset is made: it is made for each item
_FORMS = {
    "tags": ("Answer the question. Put the final answer, and nothing else, between <answer> and </answer>.", 256),
    "last": ("Answer the question. End with the number that is the answer.", 256),
    "word": ("Answer the question with one word or number and nothing else.", 8),
    "text": ("Answer the question with the final answer and nothing else.", 64),
}


def read_answer(text: str, form: str) -> str | None:
    """The answer in a completion: in the last `<answer></answer>` for `form` "tags", the last number for "last", the
    first word without punctuation around it for "word", everything for "text". None = there is none.
    """
    if form == "tags":
        _, opened, inside = text.rpartition("</answer>")[0].rpartition("<answer>")
        text = inside if opened else ""
    elif form == "last":
        text = last_number_text(text).replace(",", "").replace("$", "").replace("−", "-")
    elif form == "word":
        text = next(iter(text.split(maxsplit=1)), "").strip(".,;:!?*`'\"()")
    return text.strip() or None


def work(dataset: str, options: str, index: int, answer: str | None = None) -> Any:
    """In a worker: question and answer of an item, or the score (0 to 1) of an answer to it."""
    item = _item(dataset, options, index)
    if answer is None:
        return [item["question"], item["answer"]]
    if not re.fullmatch(_PLAIN.get(dataset, "(?s:.*)"), answer):
        return 0.0
    return min(1.0, max(0.0, float(_data(dataset, options).score_answer(answer, copy.deepcopy(item)))))  # 0 for NaN


@lru_cache(256)
def _data(dataset: str, options: str, seed: int = 0) -> Any:
    from reasoning_gym import create_dataset

    return create_dataset(dataset, seed=seed, size=1, **json.loads(options))


@lru_cache(2048)
def _item(dataset: str, options: str, index: int) -> dict[str, Any]:
    data = _data(dataset, options, index if dataset in _ONE_BY_ONE else 0)
    data.seed = data.config.seed = index  # the others read one of them when an item is made
    return dict(data[0])


def _prepare(names: Sequence[str]) -> None:
    """Reads and imports what a first item and a first score need, for seconds: not in an item's time."""
    for name in names:
        with contextlib.suppress(Exception):
            work(name, "{}", 0, "1")  # given options may make items that take for ever


class ReasoningGym(Task):
    """Rows `{"prompt": [...], "answer": "12", "kind": "gcd", "item": ["gcd", "{}", 17], "uid": "gcd-17"}`.

    Args:
        dataset: datasets of reasoning-gym with `|` between them; each row's `kind` is its dataset.
        answer: where an answer stands: "tags", "last", "word" or "text"; see `read_answer`.
        config: options of the datasets, as in `max_animals=2|min_animals=1`, or `gcd.max_value=20` for one of several.
        num_train: number of training items of all datasets together, before held-out ones are left out.
        num_eval: number of held-out items of all together; fewer if there are not so many different ones.
        seconds: time limit for making an item and for scoring an answer.

    Raises `ConfigError`: reasoning-gym is not installed, no such dataset or option, or a value out of range.
    """

    name: ClassVar[str] = "reasoning_gym"

    def __init__(
        self, dataset: str, answer: str = "tags", config: str = "", num_train: int = 2000, num_eval: int = 100,
        seconds: float = 5.0,
    ) -> None:  # fmt: skip
        self._given = (dataset, answer, config, num_train, num_eval, seconds)
        self._options = _options(str(dataset).split("|"), str(config))  # an option's text may be read as a number
        if answer not in _FORMS:
            raise ConfigError(f"answer={answer!r}: {nearest(str(answer), _FORMS)}")
        if not 1 <= min(num_train, num_eval) <= max(num_train, num_eval) <= 10**6:
            raise ConfigError(f"num_train={num_train}, num_eval={num_eval}: write numbers from 1 to 10^6")
        if not 0 < seconds <= 3600:
            raise ConfigError(f"seconds={seconds}: write a number above 0 and at most 3600")
        self._num_train, self._num_eval, self._form = num_train, num_eval, answer
        self.system_prompt, self.max_completion_length = _FORMS[answer]
        how: dict[str, Any] = {"workers": 2, "time_limit": float(seconds), "memory_mb": 2048}
        self._pool = WorkerPool(work, prepare=partial(_prepare, [*self._options]), **how)
        self._known: dict[tuple[Any, ...], float | Exception] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return ReasoningGym, self._given  # another process that scores has processes of its own

    @property
    def reward_funcs(self) -> list[RewardFunction]:
        """One function: the score, 0 to 1, that reasoning-gym gives the answer; 0 without one."""
        return [self.score]

    def train_rows(self, seed: int) -> list[Row]:
        """Items of all datasets in turn. Raises `DataError`: none can be made, or all are held out."""
        rows = self._make(random.Random(seed).randrange(10**9), self._num_train)
        if left := [row for text, row in rows if text not in self._held_out]:
            return left
        told = f"all {len(rows)} training questions are held out, for few are different"
        raise DataError(f"data.task: {told}; lower num_eval={self._num_eval}, or make items harder with config")

    def eval_rows(self) -> list[Row]:
        """Items of all datasets in turn, each text once."""
        return list(self._held_out.values())

    def is_correct(self, text: str, row: Mapping[str, Any]) -> bool:
        """True if the score is at least 0.99."""
        return self.score([text], [row["item"]])[0] >= 0.99

    def has_answer(self, text: str, row: Mapping[str, Any]) -> bool:
        """True if an answer can be read, right or not."""
        return read_answer(text, self._form) is not None

    def score(self, completions: Sequence[Any], item: Sequence[Sequence[Any]], **columns: Any) -> list[float]:
        """A reward function. Where a scorer raises or exceeds a limit the score is 0; `reasoning_gym/failed` is the
        share of these. Equal answers are scored once. Raises `RewardError`: a process cannot be started.
        """
        answers = [read_answer(completion_text(completion), self._form) for completion in completions]
        keys = [(*each, answer) for each, answer in zip(item, answers, strict=True)]
        known = self._known = {} if len(self._known) > 10_000 else self._known
        new = [key for key in dict.fromkeys(keys) if key[-1] is not None and key not in known]
        known |= zip(new, self._pool.map(new), strict=True)
        found = [known.get(key, 0.0) for key in keys]
        failed = [f"failed: {one}" if isinstance(one, Exception) else "" for one in found]
        say(columns, "score", [why or found_word(answer) for why, answer in zip(failed, answers, strict=True)])
        if "log_metric" in columns and failed:
            columns["log_metric"]("reasoning_gym/failed", sum(map(bool, failed)) / len(failed))
        return [0.0 if isinstance(one, Exception) else one for one in found]

    @cached_property
    def _held_out(self) -> dict[str, Row]:
        made = dict(self._make(HELD_OUT, 2 * self._num_eval)[::-1])  # of equal ones the first
        return dict([*made.items()][::-1][: self._num_eval])

    def _make(self, first: int, number: int) -> list[tuple[str, Row]]:
        """Texts and rows; what cannot be made, in the same places each time, is left out."""
        names, problem, rows = list(self._options), "", list[tuple[str, Row]]()
        places = [(names[n % len(names)], first + n // len(names)) for n in range(number)]
        items = [(name, self._options[name], index) for name, index in places]
        # no more at a time than there are processes, so that the first one that takes too long ends it
        results = (made for at in range(0, number, 2) for made in self._pool.map(items[at : at + 2]))
        for item, made in zip(items, results, strict=True):
            uid = f"{item[0]}-{item[2]}"
            if isinstance(made, ItemTimeout):
                raise DataError(f"{uid}: {made} to make; raise seconds, or make items easier with config")
            if isinstance(made, Exception):
                problem = f"{uid}: {made}"
                continue
            row = {"prompt": as_prompt(made[0]), "answer": str(made[1] or ""), "kind": item[0], "item": [*item]}
            rows.append((question_key(made[0]), row | {"uid": uid}))
        if not rows:
            raise DataError(f"{problem}; no item can be made: change config")
        if problem:
            log.warning("%d of %d items cannot be made and are left out; %s", number - len(rows), number, problem)
        return rows


def _options(datasets: Sequence[str], config: str) -> dict[str, str]:
    """Options of each dataset, as JSON."""
    try:
        from reasoning_gym.factory import DATASETS

        found = metadata.version("reasoning-gym")
    except ImportError:
        raise ConfigError("data.task='reasoning_gym' needs a package: pip install 'covey[reasoning-gym]'") from None
    if found != VERSION:
        log.warning("reasoning-gym %s: install %s; scorers of others may run answers as code", found, VERSION)
    kinds = {name: kind for name, (_, kind) in DATASETS.items() if name not in REFUSED}
    items = [item.strip() for item in config.split("|") if item]
    owners = {item: item.partition("=")[0].rpartition(".")[0] for item in items}
    if wrong := [item for item, owner in owners.items() if owner not in ("", *datasets)]:
        raise ConfigError(f"config={wrong[0]!r}: it begins with none of dataset={'|'.join(datasets)!r}")
    options = {}
    for name in datasets:
        if name in REFUSED:
            raise ConfigError(f"dataset={name!r}: {REFUSED[name]}")
        # those of this dataset alone come last and win
        own = [item.removeprefix(f"{name}.") for one in ("", name) for item, owner in owners.items() if owner == one]
        given = read_options("dataset", name, ",".join(own))
        options_of = inspect.signature(kinds[name]).parameters if name in kinds else given
        free = [option for option in options_of if option not in ("seed", "size")]
        if unknown := [option for option in given if option not in free]:
            why = " (items follow run.seed, num_train, num_eval)" if unknown[0] in options_of else ""
            raise ConfigError(f"dataset={name!r} has no option {unknown[0]!r}{why}; {nearest(unknown[0], free)}")
        try:
            made: Any = make_named("dataset", name, kinds, object, **given)
            getattr(made, "validate", int)()  # two have none
        except (AssertionError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"dataset={name!r}, config={config!r}: {error}; correct config") from None
        options[name] = json.dumps(given)
    return options
