"""Questions that the package reasoning-gym makes and scores (Stojanovski et al. 2025, arXiv 2505.24760).

Item i of seed s is drawn from `Random(s + i)`, its `place`, so training and held-out items have places far apart.
Scorers are foreign code: some evaluate the answer as Python, raise, or do not end. So items are made and answers scored
in processes with limits of time and memory, and what would be evaluated must be a plain value or arithmetic.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import io
import json
import logging
import random
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cached_property, lru_cache, partial
from typing import Any, ClassVar

from covey.errors import ConfigError, DataError
from covey.functions import nearest, read_value
from covey.rewards.extract import completion_text, last_number_text
from covey.rewards.parallel import ItemTimeout, NotStartedError, WorkerPool
from covey.rewards.text import column_of, found_word, say
from covey.rewards.verifier import RewardFunction
from covey.tasks.base import Task, as_prompt, question_key
from covey.tasks.dataset import Row

log = logging.getLogger(__name__)
HELD_OUT = 2_000_000_000
"""The first place of held-out items; training items have places below 1.1 billion."""
REFUSED = {
    "composite": "it mixes other datasets; name them: dataset=gcd|leg_counting",
    **dict.fromkeys(("knight_swap", "list_functions"), "a seed does not make the same items again"),
}
EVALUATED = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
PARSED = ("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration")
"""Datasets whose scorers give an answer to `eval`, and to SymPy's `parse_expr`, which calls `eval`."""
_LETTERS = re.compile(r"[A-Z0-9_\s]*")  # no keyword, no name that a scorer has
_FUNCTIONS = "(?:a?(?:sin|cos|tan)h?|cot|sec|csc|exp|log|ln|sqrt|pi|[A-Za-z])"
_ARITHMETIC = re.compile(rf"(?:[-+*/^()\s]|[0-9]++(?:\.[0-9]*+)?+|\b{_FUNCTIONS}\b)*+", re.ASCII)
_AT_ONCE = ("acre", "gsm_symbolic")  # what all items are about is drawn when the dataset is made
_MEMORY_MB, _MOST_ITEMS, _REMEMBERED, _OURS = 2048, 1_000_000, 10_000, ("seed", "size")
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


def is_plain(dataset: str, answer: str) -> bool:
    """Whether nothing is called or looked up if the dataset's scorer evaluates the answer as Python."""
    if dataset in PARSED:
        return _ARITHMETIC.fullmatch(answer) is not None
    if dataset not in EVALUATED or _LETTERS.fullmatch(answer):
        return True
    with contextlib.suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        ast.literal_eval(answer)
        return True
    return False


def work(dataset: str, options: str, place: int, answer: str | None = None) -> Any:
    """In a worker: question and answer of an item, or the score (0 to 1) of an answer to it."""
    item = _item(dataset, options, place)
    if answer is None:
        return [item["question"], item["answer"]]
    score = _data(dataset, options).score_answer(answer, copy.deepcopy(item)) if is_plain(dataset, answer) else 0.0
    return min(1.0, max(0.0, float(score)))  # in this order NaN is 0


@lru_cache(256)
def _data(dataset: str, options: str, seed: int = 0) -> Any:
    size = 1 if dataset in _AT_ONCE else 1 << 31
    return _package().create_dataset(dataset, seed=seed, size=size, **json.loads(options))


@lru_cache(2048)
def _item(dataset: str, options: str, place: int) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()):
        return dict(_data(dataset, options, place)[0] if dataset in _AT_ONCE else _data(dataset, options)[place])


def _prepare(options: Mapping[str, str]) -> None:
    for name, given in options.items():
        _data(name, given)  # may read files for seconds: not in an item's time


def _package() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import reasoning_gym
    return reasoning_gym


class GymScore:
    """The reward: what the dataset's scorer gives the answer in a completion, 0 to 1; 0 without an answer.

    0 too where the scorer raises, ends its process or exceeds a limit; `reasoning_gym/failed` is the share of these.
    """

    __name__ = "reasoning_gym"
    required_columns = ("item",)

    def __init__(self, options: Mapping[str, str], form: str, seconds: float) -> None:
        self._given, self._form = (options, form, seconds), form
        prepare = partial(_prepare, options)
        self.pool = WorkerPool(work, workers=2, time_limit=seconds, memory_mb=_MEMORY_MB, prepare=prepare)
        self._known: dict[tuple[Any, ...], tuple[float, str]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return GymScore, self._given  # for processes that score elsewhere: they start their own

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        """Score as a reward function does. Raises `RewardError`: a process cannot be started."""
        items = column_of(columns, "item", "answers are scored by", function=self.__name__)
        results = self.results([completion_text(completion) for completion in completions], items)
        say(columns, self.__name__, [word for _, word in results])
        if "log_metric" in columns and results:
            failed = sum(word.startswith("failed") for _, word in results)
            columns["log_metric"]("reasoning_gym/failed", failed / len(results))
        return [score for score, _ in results]

    def results(self, texts: Sequence[str], items: Sequence[Sequence[Any]]) -> list[tuple[float, str]]:
        """Scores, and what was found or how the scorer failed; equal answers are scored once."""
        keys = [(*item, read_answer(text, self._form)) for item, text in zip(items, texts, strict=True)]
        if len(self._known) > _REMEMBERED:
            self._known.clear()
        new = [key for key in dict.fromkeys(keys) if key[-1] is not None and key not in self._known]
        for key, found in zip(new, self.pool.map(new), strict=True):
            if isinstance(found, NotStartedError):
                raise found
            failed = isinstance(found, Exception)
            self._known[key] = (0.0, f"failed: {found}") if failed else (found, found_word(key[-1]))
        return [self._known.get(key, (0.0, found_word(None))) for key in keys]


class ReasoningGym(Task):
    """Made questions: `{"prompt": [...], "answer": "12", "kind": "gcd", "item": ["gcd", "{}", 17], "uid": "gcd-17"}`.

    Args:
        dataset: datasets of reasoning-gym with `|` between them; each row's `kind` is its dataset.
        answer: where an answer stands: "tags", "last", "word" or "text"; see `read_answer`.
        config: the datasets' options, as in `max_animals=2|gcd.max_value=20`: with a name and a dot for that dataset,
            else for all that have it. `;` separates the values of a list.
        num_train: number of training items, in equal parts of each dataset, before held-out ones are left out.
        num_eval: number of held-out items, in equal parts; fewer if a dataset has not so many different ones.
        seconds: time limit for making an item and for scoring an answer.

    Raises `ConfigError`: reasoning-gym is not installed, no such dataset or option, or a value out of range.
    """

    name: ClassVar[str] = "reasoning_gym"

    def __init__(
        self, dataset: str, answer: str = "tags", config: str = "", num_train: int = 2000, num_eval: int = 100,
        seconds: float = 5.0,
    ) -> None:  # fmt: skip
        self._options = _options(dataset.split("|"), config)
        if answer not in _FORMS:
            raise ConfigError(f"answer={answer!r}: {nearest(answer, _FORMS)}")
        if not 1 <= min(num_train, num_eval) <= max(num_train, num_eval) <= _MOST_ITEMS or seconds <= 0:
            limits = f"from 1 to {_MOST_ITEMS}, and above 0"
            raise ConfigError(f"num_train={num_train}, num_eval={num_eval}, seconds={seconds}: {limits}")
        self._num_train, self._num_eval, self._form = num_train, num_eval, answer
        self.system_prompt, self.max_completion_length = _FORMS[answer]
        self._score = GymScore(self._options, answer, float(seconds))

    @property
    def reward_funcs(self) -> list[RewardFunction]:
        """One function, `GymScore`."""
        return [self._score]

    def train_rows(self, seed: int) -> list[Row]:
        """Items of all datasets in turn. Raises `DataError`: none can be made, or all are held out."""
        held_out, first = {_text(row) for row in self._held_out}, random.Random(seed).randrange(10**9)
        rows = self._make(list(self._options), first, self._num_train)
        if left := [row for row in rows if _text(row) not in held_out]:
            return left
        raise DataError(
            f"data.task: all {len(rows)} training questions are held out, since there are few different ones; lower "
            f"num_eval={self._num_eval}, or make items harder with config"
        )

    def eval_rows(self) -> list[Row]:
        """Different items of each dataset."""
        return list(self._held_out)

    @cached_property
    def _held_out(self) -> list[Row]:
        rows, share = list[Row](), -(-self._num_eval // len(self._options))
        for name in self._options:
            found: dict[str, Row] = {}
            for first in range(HELD_OUT, HELD_OUT + 4 * share, share):  # a few more places where questions are equal
                if len(found) < share:
                    found = {_text(row): row for row in self._make([name], first, share)} | found
            rows += list(found.values())[:share]
        return rows

    def _make(self, names: Sequence[str], first: int, number: int) -> list[Row]:
        each = [(names[n % len(names)], first + n // len(names)) for n in range(number)]
        items = [(name, self._options[name], place) for name, place in each]
        rows, problem = list[Row](), ""
        for item, made in zip(items, self._score.pool.map(items), strict=True):
            if isinstance(made, Exception):
                problem = f"dataset={item[0]}: item {item[2]}: {made}"
                if isinstance(made, ItemTimeout | NotStartedError):
                    raise DataError(f"{problem}; raise seconds, or make items easier with config")
            else:
                row = {"prompt": as_prompt(made[0]), "answer": str(made[1] or ""), "kind": item[0]}
                rows.append(row | {"item": list(item), "uid": f"{item[0]}-{item[2]}"})
        if not rows:
            raise DataError(f"{problem}; no item can be made: change config")
        if problem:  # some draw what cannot be made, in the same places each time
            log.warning("%d of %d items are left out; %s", number - len(rows), number, problem)
        return rows

    def is_correct(self, text: str, row: Mapping[str, Any]) -> bool:
        """True if the score is at least 0.99."""
        return self._score.results([text], [row["item"]])[0][0] >= 0.99

    def has_answer(self, text: str, row: Mapping[str, Any]) -> bool:
        """True if an answer can be read, right or not."""
        return read_answer(text, self._form) is not None


def _text(row: Row) -> str:
    return question_key(row["prompt"][0]["content"])


def _options(datasets: Sequence[str], config: str) -> dict[str, str]:
    """Options of each dataset as JSON."""
    try:
        kinds = {name: kind for name, (_, kind) in _package().factory.DATASETS.items() if name not in REFUSED}
    except ImportError:
        raise ConfigError("data.task='reasoning_gym' needs a package: pip install 'covey[reasoning-gym]'") from None
    for name in datasets:
        if name not in kinds:
            reason = REFUSED.get(name) or f"no such dataset; {nearest(name, sorted(kinds))}"
            raise ConfigError(f"dataset={name!r}: {reason}")
    takes = {name: [field.name for field in fields(kinds[name])] for name in datasets}
    options: dict[str, dict[str, Any]] = {name: {} for name in datasets}
    for item in filter(None, config.split("|")):
        key, _, text = item.partition("=")
        owner, dot, option = key.strip().rpartition(".")
        value = [read_value(part) for part in text.split(";") if part] if ";" in text else read_value(text)
        those = [name for name in datasets if owner in ("", name) and option in takes[name] and option not in _OURS]
        if not those:
            known = dict.fromkeys(f"{name * bool(dot)}{dot}{one}" for name in datasets for one in takes[name])
            raise ConfigError(f"config={item!r}: no such option; {nearest(key, known)}")
        for name in those:
            options[name][option] = value
    for name, given in options.items():
        try:
            kinds[name](**given).validate()
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(f"dataset={name!r}, config={config!r}: {error}; correct config") from None
    return {name: json.dumps(given) for name, given in options.items()}
