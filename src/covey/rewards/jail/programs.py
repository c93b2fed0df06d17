"""What a harness reads: the program in a completion, names in tests, values. Linear in the text, and runs nothing."""

from __future__ import annotations

import ast
import builtins
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from . import JailError

_LANGUAGE = re.compile(r"(?:```|~~~)[ \t]*([\w+-]*)")
_LONGEST_NUMBER = 400
_STARTS = re.compile(
    r"^(?:def |class |import |from \w[\w.]* import |@|async def |(?:if|for|while|with) [^\n]*:[ \t]*$|try:|#|"
    r"[A-Za-z_][\w.]* ?[-+*/]?= ?\S|[a-z_][\w.]*(?:, ?[a-z_][\w.]*)+ ?= ?\S|"
    r"[A-Za-z_][\w.]*\([^\n]*\)[ \t]*$)",
    re.MULTILINE,
)


def extract_code(text: str) -> str:
    """The program in a completion: its last fenced Python block that is not empty, else its last fenced block, else the
    text from the first line on that looks like Python, else the text.
    """
    blocks = list(_fenced(text))
    python = [body for language, body in blocks if language in ("python", "py", "python3")]
    if python or blocks:
        return python[-1] if python else blocks[-1][1]
    start = _STARTS.search(text)
    return text[start.start() :] if start else text


def _fenced(text: str) -> Iterator[tuple[str, str]]:
    """(language, body) of each fenced block that is not empty, the last one to the text's end if nothing closes it.

    One pass over the lines.
    """
    language: str | None = None
    body: list[str] = []
    lines = text.split("\n") if "```" in text or "~~~" in text else []
    for line in (*(line + "\n" for line in lines[:-1]), *lines[-1:], "```"):
        bare = line.strip(" \t\r\n")
        if language is not None and bare in ("```", "~~~"):
            if any(part.strip() for part in body):
                yield language, "".join(body)
            language, body = None, []
        elif language is not None:
            body.append(line)
        elif found := _LANGUAGE.match(bare):
            language = found[1].lower()


def same_output(found: str, expected: str, tolerance: float = 0.0) -> bool:
    """Are two printed texts the same, white space at line ends and empty lines at the end aside?"""
    lines, wanted = ([line.rstrip() for line in text.rstrip().split("\n")] for text in (found, expected))
    if lines == wanted:
        return True
    if tolerance <= 0 or len(lines) != len(wanted):
        return False
    pairs = [(a.split(), b.split()) for a, b in zip(lines, wanted, strict=True) if a != b]
    return all(len(a) == len(b) and all(map(_close_words, a, b, [tolerance] * len(a))) for a, b in pairs)


def same_value(found: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """Are two plain values equal, floats within a tolerance and lists as good as tuples?"""
    if isinstance(expected, list | tuple):
        alike = isinstance(found, list | tuple) and len(found) == len(expected)
        return alike and all(same_value(a, b, tolerance) for a, b in zip(found, expected, strict=True))
    if isinstance(expected, dict):
        alike = isinstance(found, dict) and found.keys() == expected.keys()
        return alike and all(same_value(found[key], value, tolerance) for key, value in expected.items())
    if isinstance(expected, float) and isinstance(found, int | float):
        if math.isnan(expected):
            return math.isnan(found)
        return bool(found == expected or math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance))
    return bool(found == expected)


def _close_words(a: str, b: str, tolerance: float) -> bool:
    if a == b:
        return True
    if len(a) > _LONGEST_NUMBER:
        return False
    try:
        return math.isclose(float(a), float(b), rel_tol=tolerance, abs_tol=tolerance)
    except ValueError:
        return False


_LIBRARY = "collections copy datetime decimal fractions functools itertools json math random re statistics unittest"
_HELPERS = {name for module in _LIBRARY.split() for name in dir(__import__(module)) if not name.startswith("_")}
_HELPERS |= {"allclose", "approx", "raises"}


@lru_cache(maxsize=4096)
def free_names(setup: str, tests: tuple[str, ...], named: tuple[str, ...]) -> tuple[list[str], list[str], list[str]]:
    """Names that the tests use and nothing trusted defines: all, modules of the standard library, the program's.

    `named` are said to be the program's; where none are, all are that cannot be a helper. Raises `JailError`: the tests
    are no Python, or use a name that a program could define to suit itself.
    """
    bound, parts, calls = {*dir(builtins), *named}, list[set[str]](), Counter[str]()
    judges: list[tuple[str, set[str]]] = []
    for source in (setup, *tests):
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise JailError(f"the test code is not Python: {error}: {source!r:.200}") from None
        parts.append(set())
        for name, uses in _names(tree):
            (bound if uses is None else parts[-1]).add(name)
            calls[name] += uses or 0
        judges += [judge for node in ast.walk(tree) if isinstance(node, ast.Assert | ast.If) for judge in _judges(node)]
    free = set().union(*parts) - bound
    modules = {name for name in free & sys.stdlib_module_names if not calls[name]}
    unknown = free - modules
    if not named:  # a helper beside what can only be the program's, or one that judges it; not what is tested alone
        own = [(part | parts[0]) & unknown for part in parts]
        alone = (names for names, test in zip(own[1:], tests, strict=True) if len(names) == 1 and "assert" in test)
        tested = set().union(*alone)
        unknown = {name for name in unknown if name.islower() and not calls[name]}
        unknown |= {name for name, judged in judges if name in free - tested and judged & free - {name}}
        unknown |= set().union(*(names & _HELPERS - tested for names in own if names - _HELPERS))
    if unknown and "*" not in bound:  # else the process of the tests sees what is unknown when it has run the setup
        raise JailError(
            f"the tests use {', '.join(sorted(unknown))}, which neither they nor their setup define or import, so that "
            "a program could; import or define it in setup, or name it in entry_points with all that is the program's"
        )
    return sorted(free), sorted(modules), sorted(free - modules - unknown)


def _judges(said: ast.AST) -> Iterator[tuple[str, set[str]]]:
    """Functions whose word is all that an assertion wants, as in `assert close(f(1), 1)`, and those that they judge."""
    match said:
        case ast.Assert(test=inner) | ast.If(test=inner) | ast.UnaryOp(operand=inner) | ast.ListComp(elt=inner):
            yield from _judges(inner)
        case ast.GeneratorExp(elt=inner) | ast.Compare(left=inner, ops=[ast.Lt() | ast.LtE()]):
            yield from _judges(inner)
        case ast.Compare(left=inner, comparators=[ast.Constant(value=bool())]):
            yield from _judges(inner)
        case ast.BoolOp(values=parts) | ast.List(elts=parts) | ast.Call(func=ast.Name(id="all" | "any"), args=parts):
            for part in parts:
                yield from _judges(part)
        case ast.Call(func=ast.Name(id=judge)):
            calls = (node.func for node in ast.walk(said) if isinstance(node, ast.Call))
            yield judge, {call.id for call in calls if isinstance(call, ast.Name) and not call.id[0].isupper()}


def _names(tree: ast.AST) -> Iterator[tuple[str, int | None]]:
    """Names that are bound (None) or used (1; the use in `name.attribute` is taken back by a -1)."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=context):
                yield name, 1 if isinstance(context, ast.Load) else None
            case ast.Attribute(value=ast.Name(id=name)):
                yield name, -1
            case ast.alias(name=name, asname=other):
                yield (other or name).split(".")[0], None
            case ast.arg(arg=str(name)) | ast.MatchMapping(rest=str(name)):
                yield name, None
            case ast.FunctionDef(name=str(name)) | ast.AsyncFunctionDef(name=str(name)) | ast.ClassDef(name=str(name)):
                yield name, None
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name, None
