r"""Which option of a multiple-choice question does a text choose?

    "The answer is (b)."                                B       a statement
    "A. Fever\nB. Cough\nC. Rash\nD. Gout\n\nB"         B       a line that is a letter; a list of options is none
    "A 65-year-old man ... most likely D. Gout"         D       a letter where an option is named; an article is none
    "It is not A."                                      None    what is denied is not chosen

Statements win over lines and lines over mentions; of equals the last one wins, since a text may correct itself. A
statement of two letters ("A or B") chooses nothing. Only the last `MAX_TAIL` characters are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from covey.errors import ConfigError
from covey.rewards.extract import MAX_TAIL

_CONNECTOR = r"because|since|as|due|for|and|or|given|based|with|which|but|although|is|was|in|on|from|over|not|instead"
"""Words that follow a letter A which is no article."""
_OPENS, _CLOSES = r"[\"'“‘(\[{<]", r"[\"'”’)\]}>]"
_HEDGE = (
    r"(?:(?:therefore|thus|hence|clearly|probably|likely|definitely|indeed|actually|also|then|so|now|still|really) )*"
)
_BEST = r"(?:single )?(?:best|correct|right|most (?:likely|appropriate|probable|consistent)|accurate)"
_CUE = (
    r"\b(?:answers?|(?:correct|best|right|final|appropriate|likely|my) (?:choice|option|letter|selection|response)|"
    r"(?:choice|option|letter|selection) (?:is|would be|should be|must be))\b"
)
_IS = r"is|are|was|would be|should be|must be|will be|has to be|seems to be|might be|may be"
_LINK = (
    r"(?:\s{0,3}(?:\([^()\n]{0,40}\)|to (?:this|the) (?:question|case)|here|choice|option|letter)){0,2}"
    rf"\s{{0,3}}(?:{_HEDGE}(?:{_IS})\b|[:=\-–—→]{{1,2}}>?)?"
    rf"\s{{0,3}}:?\s{{0,3}}{_HEDGE}(?:either )?(?:(?:option|choice|letter|answer) )?"
)
_CHOOSES = (
    r"\b(?:choose|select|pick|go(?:ing)? with|opt(?:ing)? for|settle on|chose|selected|picked|choosing|selecting)\b"
    r"\s{0,3}:?\s{0,3}(?:(?:option|choice|letter|answer) )?"
)
_CONCLUDES = (
    r"(?:^|[.,;:!\n]\s{0,3}|\s)(?:therefore|thus|hence|so|conclusion|in summary),?\s{1,3}"
    r"(?:it is |it's |it must be |option |choice )?"
)
_MARKED = r"####\s{0,3}|\\boxed\{\s{0,3}(?:\\(?:text|mathrm|textbf|mathbf)\{)?\s{0,3}|<answer>\s{0,9}"
_NAMED = r"\b(?:option|choice|answer) "

_NO = (
    r"(?:\b(?:not|never|neither|nor|no|cannot|except|besides|without|unlike|doubt\w{0,3}|against|wrong(?:ly)?|"
    r"incorrect(?:ly)?|rul(?:e|es|ed|ing) out|exclud\w{1,4}|eliminat\w{1,4}|discard\w{0,3}|reject\w{0,3}|"
    r"rather than|instead of|other than|less likely than|unlikely)|n['’]t)\b"
)
_DENIED_BEFORE = re.compile(rf"{_NO}(?:[ \"'(]+[\w'’-]+){{0,5}}[ \"'(:]*$", re.IGNORECASE)
_DENIED_RIGHT_BEFORE = re.compile(
    rf"{_NO}(?: (?:be|think|believe|option|choice|answer|letter|the|a|an|likely)){{0,3}}[ \"'(]*$", re.IGNORECASE
)
_DENIED_AFTER = re.compile(
    rf"{_CLOSES}?[.):,]?(?: [^.;:\n]{{0,60}}?)?\s?\b(?:(?:is|are|was|were|would be|seems|can be|could be)\b[ ]?{_HEDGE}"
    r"(?:not|incorrect|wrong|false|unlikely|less likely|excluded|ruled out|eliminated|out\b)|"
    r"(?:is|was|does|do|can|would)n['’]t|cannot|does not|do not)",
    re.IGNORECASE,
)
_OTHER = r"[ ,]{0,3}(?:or|and|/|&|,|versus|vs\.?)[ ]?(?:option |choice |either |\()?"
_SPECIES = (
    "albicans|anthracis|botulinum|burgdorferi|cereus|diff|difficile|diphtheriae|fragilis|henselae|immitis|jejuni|"
    "neoformans|perfringens|pertussis|pneumoniae|psittaci|quintana|subtilis|tetani|trachomatis"
)
_KINDS = (
    "vitamin|hepatitis|type|group|grade|stage|class|factor|protein|influenza|h(?:a)?emoglobin|apolipoprotein|category|pugh|"
    "subtype|immunoglobulin|ig|lipid|strep|streptococcus|streptococci|serotype|part|figure|table|drug|patient|person|plan|"
    "hospital|area|serogroup|haplotype|blood|toxin|phase|mr|mrs|dr|coxsackie|cyclosporin|amphotericin|polymyxin|"
    "interferon|cyclin|cathepsin"
)
_NOUNS = (
    "cells?|lymphocytes?|symptoms?|waves?|dimers?|peptides?|chains?|fibers?|fibres?|virus|antigens?|sections?|section"
)


class _Found(NamedTuple):
    place: int
    letter: str | None  # None: a statement that chooses nothing


def extract_choice(text: str, letters: Sequence[str] = "ABCD") -> str | None:
    """The option letter that a text chooses, or None. Raises `ConfigError`: `letters` are not single capital letters.

    Args:
        text: a completion.
        letters: the capital letters of the options.
    """
    reader = _Reader(tuple(letters))
    cleaned = re.sub(r"[*`]|(?<!\w)_+|_+(?!\w)", "", text[-MAX_TAIL:])
    cleaned = re.sub(r"[ \t  ]+", " ", cleaned)
    for tier in (reader.statements, reader.lines, reader.mentions):
        found = max(tier(cleaned), key=lambda f: f.place, default=None)
        if found is not None:
            return found.letter
    return None


@lru_cache(maxsize=32)
class _Reader:
    """Patterns for a set of letters."""

    def __init__(self, names: tuple[str, ...]) -> None:
        letters = "".join(names)
        if not letters or any(len(x) != 1 or not "A" <= x <= "Z" for x in names) or len(set(names)) < len(names):
            raise ConfigError(f"letters={names!r}: options are named by different single capital letters, as in 'ABCD'")
        self._letters = letters
        both = letters + letters.lower()
        # after a cue: any letter that ends there; a bare a/A before a word is an article
        bare = rf"(?P<bare>[{both}])(?![\w'’])(?!-\w)"
        wrapped = rf"{_OPENS}{{1,2}} ?(?P<wrapped>[{both}]) ?[.):]?{_CLOSES}"
        letter = rf"(?:{wrapped}|{_OPENS}?{bare})"
        cues = "|".join((rf"{_CUE}{_LINK}", _CHOOSES, _CONCLUDES, _MARKED))
        self._cued = re.compile(rf"(?:{cues}){letter}", re.IGNORECASE)
        subject = rf"(?<![\w'’-])(?:option |choice |answer )?{_OPENS}?(?P<bare>[{letters}])(?![\w'’-])"
        self._subject = re.compile(
            rf"{subject}{_CLOSES}?[.):,]?(?: [^.;:?!\n]{{0,60}}?)? ?"
            rf"\b(?:is|seems|would be|must be|should be|appears) {_HEDGE}"
            rf"(?:the |to be the |an? )?(?P<verdict>(?:not |in)?{_BEST})"
        )
        self._label = re.compile(rf"(?<![\w'’-])\(?([{letters}])(?:[.):]|\)) ?(?=\S)")
        self._line = re.compile(
            rf"^ ?{_OPENS}?(?:(?P<alone>[{both}])[.):]?{_CLOSES}?[.]?|"
            rf"(?P<led>[{letters}])(?:[.:]|{_CLOSES}) ?(?P<rest>\S[^\n]*)) ?$",
            re.MULTILINE,
        )
        self._mention = re.compile(
            rf"(?<![\w'’.-])(?:\((?P<round>[{both}])\)|(?:{_NAMED})?{_OPENS}?(?P<plain>[{letters}])(?![\w'’-]))"
        )
        self._pair_before = re.compile(rf"(?<![\w'’-])[{letters}]{_CLOSES}?{_OTHER}$")
        self._another = re.compile(rf"{_CLOSES}?{_OTHER}(?P<other>[{both}])(?![\w'’-])(?! [a-z])", re.IGNORECASE)

    def statements(self, text: str) -> Iterator[_Found]:
        for match in self._cued.finditer(text):
            letter, end = match["wrapped"] or match["bare"], match.end()
            if match["bare"] and self._is_article(letter, text, end):
                continue
            goes_on = re.match(r" [a-z]", text[end : end + 2]) and not _connects(text, end)
            if letter.islower() and match["bare"] and goes_on:
                continue
            if _asks(text, end) or _DENIED_BEFORE.search(_clause(text, match.start())):
                continue
            yield _Found(match.start(), None if self._names_another(text, end, letter) else letter.upper())
        for match in self._subject.finditer(text):
            if self._is_article(match["bare"], text, match.end("bare")) and not _connects(text, match.end("bare")):
                continue
            denied = match["verdict"].startswith(("not", "in")) or re.search(_NO, match[0], re.IGNORECASE)
            if not denied and not _DENIED_RIGHT_BEFORE.search(_clause(text, match.start())):
                yield _Found(match.start(), match["bare"])

    def lines(self, text: str) -> Iterator[_Found]:
        echoed = self._echoed(text)
        for match in self._line.finditer(text):
            letter, place = match["alone"] or match["led"], match.start("alone" if match["alone"] else "led")
            if place in echoed or (match["rest"] and re.match(_SPECIES, match["rest"], re.IGNORECASE)):
                continue
            if not _DENIED_AFTER.match(text[match.end("led") :] if match["led"] else ""):
                yield _Found(place, letter.upper())

    def mentions(self, text: str) -> Iterator[_Found]:
        echoed = self._echoed(text)
        for match in self._mention.finditer(text):
            letter = match["round"] or match["plain"]
            place = match.start("round" if match["round"] else "plain")
            end = match.end("round") + 1 if match["round"] else match.end("plain")
            no_option = match["plain"] and (self._is_article(letter, text, end) or self._is_name(text, place, end))
            if place in echoed or no_option or _asks(text, end) or _DENIED_AFTER.match(text[end : end + 120]):
                continue
            if _DENIED_BEFORE.search(_clause(text, match.start())):
                continue
            paired = self._pair_before.search(text, max(place - 24, 0), place) or self._names_another(text, end, letter)
            yield _Found(place, None if paired else letter.upper())

    def _is_article(self, letter: str, text: str, end: int) -> bool:
        """Is this A the article? Then a word or a number follows that cannot go on after an option's name."""
        return letter in "Aa" and bool(re.match(r" [a-z0-9]", text[end : end + 2])) and not _connects(text, end)

    def _is_name(self, text: str, place: int, end: int) -> bool:
        """Is the letter part of a name: vitamin D, B cells, C. difficile?"""
        before, after = text[max(place - 24, 0) : place], text[end : end + 24]
        return bool(
            re.search(rf"\b(?:{_KINDS})[ -]$", before, re.IGNORECASE)
            or re.match(rf"\.? (?:{_SPECIES})\b| (?:{_NOUNS})\b", after, re.IGNORECASE)
            or re.match(r"\.[A-Z]", after)
        )

    def _names_another(self, text: str, end: int, letter: str) -> bool:
        other = self._another.match(text, end)
        return other is not None and other["other"].upper() != letter.upper()

    def _echoed(self, text: str) -> set[int]:
        """Places of the labels of a list of options: at least three in a row, in order, from the first on."""
        echoed: set[int] = set()
        run: list[int] = []
        for letter, place in [*((match[1], match.start(1)) for match in self._label.finditer(text)), ("", 0)]:
            if letter != self._letters[len(run) : len(run) + 1] or not letter:
                echoed.update(run if len(run) >= min(3, len(self._letters)) else ())
                run = []
            if letter == self._letters[len(run) : len(run) + 1]:
                run.append(place)
        return echoed


def _connects(text: str, end: int) -> bool:
    return re.match(rf" (?:{_CONNECTOR})\b", text[end : end + 12]) is not None


def _asks(text: str, end: int) -> bool:
    return re.match(r"[)\]\"'. ]{0,2}\?", text[end : end + 4]) is not None


def _clause(text: str, end: int) -> str:
    """What stands before `end` in its clause."""
    return re.split(r"[.,;!?\n]|\bbut\b", text[max(end - 80, 0) : end])[-1]
