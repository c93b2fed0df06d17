"""`pytest.raises` for a single call, in one line."""

from typing import Any

import pytest


def raises(error: type[BaseException], words: str, call: Any, /, *arguments: Any, **options: Any) -> None:
    """The call raises this error, in whose text the regular expression `words` is found."""
    with pytest.raises(error, match=words):
        call(*arguments, **options)
