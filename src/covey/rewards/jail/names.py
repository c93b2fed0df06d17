"""Which names of a test are the program's, so that no program supplies what a test judges it with."""

from __future__ import annotations

import ast
import builtins
import sys
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

from .errors import JailError

_LIBRARY = "collections copy decimal fractions functools itertools math random re statistics"
_HELPERS = {name for module in _LIBRARY.split() for name in dir(__import__(module)) if not name.startswith("_")}


@lru_cache(maxsize=4096)
def free_names(setup: str, tests: tuple[str, ...], named: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Names that the tests use and nothing trusted defines: all, and those of the standard library's modules.

    Args:
        setup: code that runs before the tests.
        tests: of which each is a piece of code.
        named: what is said to be the program's; where nothing is, all are that cannot be a helper.

    Raises:
        JailError: the tests are no Python, or use a name that a program could define to suit itself.
    """
    bound, parts, calls = {*dir(builtins), *named}, list[set[str]](), Counter[str]()
    for source in (setup, *tests):
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise JailError(f"the test code is no Python: {error}: {source!r:.200}") from None
        parts.append(set())
        for name, uses in _names(tree):
            (bound if uses is None else parts[-1]).add(name)
            calls[name] += uses or 0
    free = set().union(*parts) - bound
    modules = {name for name in free & sys.stdlib_module_names if not calls[name]}
    unknown = free - modules if named else {name for name in free - modules if name.islower() and not calls[name]}
    for part in () if named else parts:  # a helper beside what can only be the program's
        own = (part | parts[0]) & free - modules
        unknown |= own & _HELPERS if own - _HELPERS else set()
    if unknown and "*" not in bound:  # else the process of the tests sees what is unknown when it has run the setup
        raise JailError(
            f"the tests use {', '.join(sorted(unknown))}, which neither they nor their setup define or import, so that "
            "a program could; import or define it in setup, or name it in entry_points with all that is the program's"
        )
    return sorted(free), sorted(modules)


def _names(tree: ast.AST) -> Iterator[tuple[str, int | None]]:
    """Names that are bound (None) or used (1; the use in `name.attribute` is taken back by a -1)."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=context):
                yield name, 1 if isinstance(context, ast.Load) else None
            case ast.Attribute(value=ast.Name(id=name)):
                yield name, -1
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, None
            case ast.alias(name=name, asname=other):
                yield (other or name).split(".")[0], None
            case ast.arg(arg=str(name)) | ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                yield name, None
            case ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                yield name, None
