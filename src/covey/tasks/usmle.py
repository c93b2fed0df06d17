"""USMLE questions: prompt, answer extraction and rewards, as described in the recipe (recipes/usmle).

    {"question": "A 65-year-old man ...", "options": {"A": "Gout", ..., "D": "Sepsis"}, "answer": "D"}

`answer_idx` is read as the letter where there is one (MedQA keeps the option's text in `answer`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from covey.errors import ConfigError, DataError
from covey.rewards.extract import completion_text
from covey.rewards.option_letter import extract_choice
from covey.rewards.text import found_word, say
from covey.rewards.verifier import RewardFunction
from covey.tasks.base import FileTask, as_prompt, question_key
from covey.tasks.dataset import Row, load_rows
from covey.tasks.sources import read_file
from covey.types import Message

Wording = Literal["document", "brief"]
Completions = Sequence[str | list[Message]]
Answers = Sequence[str]
Options = Sequence[Mapping[str, str]]
_ENDS = {
    "document": "\nAnalyze the case and provide the correct answer ({letters}): ",
    "brief": "\nGive the letter of the correct answer first, then one sentence of explanation.",
}
_AFTER_PROMPT = re.compile(r"answer \(A(?:, [B-Z])*,? or [B-Z]\): ", re.IGNORECASE)
_LITERAL = (r"\b([A-D])\b", r"[Aa]nswer:?\s*([A-D])", r"[Oo]ption\s*([A-D])")
_OWN_TERMS = Path(__file__).with_name("medical_terms.txt")


def format_usmle_prompt(example: Mapping[str, Any], wording: Wording = "document") -> str:
    """A question with its options, sorted by letter, and the request for an answer."""
    options = sorted(example["options"].items())
    letters = [letter for letter, _ in options]
    named = f"{', '.join(letters[:-1])}, or {letters[-1]}" if len(letters) > 2 else " or ".join(letters)
    text = f"Medical Question: {example['question']}\n\nOptions:\n"
    text += "".join(f"{letter}. {option}\n" for letter, option in options)
    return text + _ENDS[wording].format(letters=named)


def extract_answer(generated_text: str, letters: Sequence[str] = "ABCD") -> str | None:
    """The letter that a text chooses, or None; a repeated prompt before it is cut off. See `extract_choice`."""
    return extract_choice(_without_prompt(generated_text), letters)


def extract_answer_literal(generated_text: str) -> str | None:
    """The letter by the patterns and in the order that usmle-qa.md prints.

    Its first pattern takes any capital A to D that stands alone, so that "A 65-year-old" gives A and the other patterns
    are never reached. Kept to reproduce it.
    """
    text = _without_prompt(generated_text)
    for pattern in _LITERAL:
        if match := re.search(pattern, text):
            return match[1].upper()
    for line in text.split("\n"):  # `([A-D])\..*correct`, without reading the line's rest again for every letter
        if match := re.search(r"([A-D])\.", line[: max(line.rfind("correct"), 0)]):
            return match[1]
    return None


def compute_reward(prompt: Mapping[str, Any], generated_text: str) -> tuple[float, dict[str, Any]]:
    """1.0 for the right letter, else 0.0, and what usmle-qa.md logs."""
    predicted = extract_answer(generated_text, sorted(prompt.get("options") or "ABCD"))
    reward = 1.0 if predicted is not None and predicted == prompt["answer"] else 0.0
    return reward, {
        "predicted": predicted,
        "ground_truth": prompt["answer"],
        "correct": reward == 1.0,
        "has_valid_answer": predicted is not None,
        "response_length": len(generated_text),
    }


class USMLERewardModel:
    """Correctness with a small bonus for medical words and a penalty for very short answers, clamped to [0, 1].

    Raises `ConfigError`: the file cannot be read or holds no words.
    """

    __name__ = "usmle_reward"
    required_columns = ("answer", "options")

    def __init__(
        self,
        vocabulary: Iterable[str] | str | Path | None = None,
        *,
        term_bonus: float = 0.05,
        short_penalty: float = 0.1,
        short_length: int = 50,
    ) -> None:
        self.medical_terms = load_medical_vocabulary(vocabulary)
        self.term_bonus, self.short_penalty, self.short_length = term_bonus, short_penalty, short_length

    def uses_medical_terms(self, text: str) -> bool:
        """Does a word of the vocabulary occur?"""
        words = re.findall(r"[a-z][a-z'-]*", text.lower())
        return any(word in self.medical_terms or word.removesuffix("s") in self.medical_terms for word in words)

    def compute_reward(self, prompt: Mapping[str, Any], generated_text: str) -> float:
        """The reward of one answer, between 0 and 1."""
        total, _ = compute_reward(prompt, generated_text)
        if self.uses_medical_terms(generated_text):
            total += self.term_bonus
        if len(generated_text) < self.short_length:
            total -= self.short_penalty
        return min(max(total, 0.0), 1.0)

    def __call__(self, completions: Completions, answer: Answers, options: Options, **columns: Any) -> list[float]:
        """Score as a reward function does."""
        return _scores(self.compute_reward, self.__name__, completions, answer, options, columns)


def load_medical_vocabulary(source: Iterable[str] | str | Path | None = None) -> frozenset[str]:
    """Words in lower case. Raises `ConfigError`: the file cannot be read or holds no words."""
    source = _OWN_TERMS if source is None else source
    if isinstance(source, str | Path):
        try:
            source = Path(source).read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"vocabulary={str(source)!r}: {error}; give a text file with one word a line") from None
    words = frozenset(word.strip().lower() for word in source if word.strip())
    if not words:
        raise ConfigError("vocabulary holds no words; give a text file with one word on each line")
    return words


def _scores(
    judge: Callable[[Row, str], float], name: str, said: Completions, answer: Answers, options: Options, columns: Row
) -> list[float]:
    """Judge each completion, and record which letter it chooses."""
    texts = [completion_text(each) for each in said]
    chosen = [extract_answer(text, sorted(given)) for text, given in zip(texts, options, strict=True)]
    say(columns, name, [found_word(letter) for letter in chosen])
    rows = zip(texts, answer, options, strict=True)
    return [judge({"answer": right, "options": given}, text) for text, right, given in rows]


def _correct_letter(completions: Completions, answer: Answers, options: Options, **columns: Any) -> list[float]:
    def judge(row: Row, text: str) -> float:
        return compute_reward(row, text)[0]

    return _scores(judge, "correct_letter", completions, answer, options, columns)


_correct_letter.__name__ = "correct_letter"
_correct_letter.required_columns = ("answer", "options")  # type: ignore[attr-defined]


class USMLE(FileTask):
    """Multiple-choice questions: `{"prompt": [...], "question", "options", "answer", "uid"}`.

    Args:
        path: a .jsonl file or another source for `load_rows`, in the format above.
        eval_path: held-out questions; None = hold out `num_eval` questions of `path`, those with the lowest hash.
        num_train: number of training questions, drawn with the seed; None = all.
        num_eval: number of held-out questions; None = all of `eval_path`.
        wording: of the prompt; see `format_usmle_prompt`.
        reward: "correct" (usmle-qa.md's compute_reward) or "model" (its USMLERewardModel).
        vocabulary: file of medical words for "model".
        system_prompt: put before each question; None = none.

    Raises `ConfigError`: an option has a wrong value.
    """

    name: ClassVar[str] = "usmle"

    def __init__(
        self,
        path: Any = None,
        eval_path: Any = None,
        num_train: int | None = None,
        num_eval: int | None = 200,
        wording: str = "document",
        reward: str = "correct",
        vocabulary: str | None = None,
        system_prompt: str | None = None,
    ) -> None:
        if path is None:
            raise ConfigError(
                "task usmle: give the questions, e.g. data.dataset=medqa_train.jsonl; each line has question, "
                "options and answer"
            )
        if wording not in _ENDS:
            raise ConfigError(f"wording={wording!r}: use one of {', '.join(_ENDS)}")
        if reward not in ("correct", "model"):
            raise ConfigError(f"reward={reward!r}: use correct or model")
        if (num_eval is not None and num_eval < 1) or (num_train is not None and num_train < 1):
            raise ConfigError(f"num_train={num_train}, num_eval={num_eval}: both must be 1 or more")
        self.path, self.eval_path, self.num_train, self.num_eval = path, eval_path, num_train, num_eval
        self.wording, self.system_prompt, self.max_completion_length = cast(Wording, wording), system_prompt, 512
        self._reward: RewardFunction = USMLERewardModel(vocabulary) if reward == "model" else _correct_letter

    @property
    def reward_funcs(self) -> list[RewardFunction]:
        """Reward 1.0 for the right letter, else 0.0; or the score of the reward model."""
        return [self._reward]

    def is_correct(self, text: str, row: Mapping[str, Any]) -> bool:
        """True if the text chooses the right letter."""
        return compute_reward(row, text)[0] == 1.0

    def has_answer(self, text: str, row: Mapping[str, Any]) -> bool:
        """True if the text chooses one of the letters."""
        return self.chosen(text, row) is not None

    def chosen(self, text: str, row: Mapping[str, Any]) -> str | None:
        """The letter that the text chooses."""
        return extract_answer(text, sorted(row["options"]))

    def rotated(self, row: Mapping[str, Any], shift: int) -> Row:
        """The question with each option moved by `shift` letters: with shift 1, option A becomes B."""
        letters = sorted(row["options"])
        turned = {letter: letters[(place + shift) % len(letters)] for place, letter in enumerate(letters)}
        options = dict(sorted((turned[letter], text) for letter, text in row["options"].items()))
        new = {**row, "options": options, "answer": turned[row["answer"]], "uid": f"{row['uid']}-rotated-{shift}"}
        return {**new, "prompt": as_prompt(format_usmle_prompt(new, self.wording))}

    def read(self, source: Any, split: str) -> list[Row]:
        """The questions with their prompts."""
        rows = [row | {"uid": f"usmle-{split}-{row['line']}"} for row in load_questions(source, split)]
        return [{"prompt": as_prompt(format_usmle_prompt(row, self.wording)), **row} for row in rows]


def load_questions(source: Any, split: str = "train") -> list[Row]:
    """Questions as `{"question", "options", "answer", "line"}`, each checked.

    Raises `DataError`: a line is no question, or one question stands there twice with different answers; with its
    number.
    """
    is_jsonl = isinstance(source, str | Path) and str(source).endswith(".jsonl")
    where = str(source) if isinstance(source, str | Path) else "dataset"
    entries = read_file(Path(source), numbered=True) if is_jsonl else enumerate(load_rows(source, split=split), 1)
    questions: list[Row] = []
    seen: dict[str, Row] = {}
    for line, entry in entries:
        try:
            question = _question(entry)
        except ValueError as error:
            raise DataError(f"{where}: line {line}: {error}") from None
        question["line"] = line
        earlier = seen.setdefault(question_key(question["question"]), question)
        right, wrong = (row["options"][row["answer"]] for row in (earlier, question))
        if right != wrong:
            raise DataError(
                f"{where}: line {line}: the question of line {earlier['line']} with another answer; "
                "correct or remove one"
            )
        questions.append(question)
    if not questions:
        raise DataError(f"{where}: there are no questions in it")
    return questions


def _question(entry: Any) -> Row:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{entry!r:.60} is not an object with question, options and answer")
    question, options = entry.get("question"), entry.get("options")
    if not isinstance(question, str) or not question.strip():
        raise ValueError("there is no question")
    if not isinstance(options, Mapping) or len(options) < 2:
        raise ValueError('options must be an object such as {"A": "...", "B": "..."} with at least two')
    for letter, text in options.items():
        if not isinstance(letter, str) or not re.fullmatch("[A-Z]", letter):
            raise ValueError(f"option {letter!r} is not named by a single capital letter")
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"option {letter} has no text")
    answer = entry.get("answer_idx", entry.get("answer"))
    if not isinstance(answer, str) or answer not in options:
        raise ValueError(f"the answer {answer!r:.60} is not one of the options {', '.join(sorted(options))}")
    kept = {name: entry[name] for name in ("explanation", "topic", "meta_info") if name in entry}
    if isinstance(kind := entry.get("topic", entry.get("meta_info")), str):
        kept["kind"] = kind
    return {"question": question, "options": dict(sorted(options.items())), "answer": answer, **kept}


def _without_prompt(text: str) -> str:
    ends = list(_AFTER_PROMPT.finditer(text))
    return text[ends[-1].end() :] if ends else text
