"""From what users pass as a dataset to rows and prompts: everything that can be wrong is found here.

Reading fails before training, with the row, the reason and the fix, never in the middle of a run. A prompt that does
not fit is an error unless `long_prompts` says otherwise: a truncated question may have another answer.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import mimetypes
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from covey.errors import DataError, shown
from covey.files import no_path
from covey.functions import later
from covey.types import PICTURE_COLUMNS, PICTURES, IntArray, Message, Prompt

if TYPE_CHECKING:
    from covey.tasks import pictures, sources
else:
    pictures, sources = later("covey.tasks", "pictures sources")

log = logging.getLogger(__name__)

Row = dict[str, Any]
"""One dataset row: column name -> value."""

_READ_AGAIN = 1000  # rows, evenly spread, whose rendered conversation is searched for what the user says
_SENSES = {"pixel_value": "pictures", "video": "video", "audio": "sound"}
"""Columns, or their plurals, for models of more than text and pictures, and what they hold."""
_BEGIN = ("data:image/", "data:video/", "data:audio/", "iVBORw0K", "/9j/", "UklGR", "R0lGOD")
"""Of such a thing in a text: an URL that holds it, PNG, JPEG, WebP, WAV and GIF files in base64."""
_USUAL_PROMPT_COLUMNS = ("question", "problem", "instruction", "input", "query", "messages", "text")


def load_rows(source: Any, *, split: str = "train", what: str = "training") -> list[Row]:
    """Read a dataset into a list of rows, at least one.

    Args:
        source: a list of dicts, a Hugging Face `Dataset`, a dict of splits, a DataFrame of pandas or polars, or an
            Arrow table. It may also be a .jsonl, .json or .csv file (.gz too), a .parquet file, or a dataset on the
            Hugging Face hub: `owner/name` or `owner/name:configuration` (needs `datasets`).
        split: the split to take if there are several.
        what: name of the part that needs the rows, for messages.

    Raises `DataError`: the source is empty, cannot be read, or holds something other than rows.
    """
    folder = None
    if isinstance(source, str | os.PathLike):
        name = os.fspath(source)
        if problem := no_path(name):
            raise DataError(f"dataset={shown(name)}: {problem}")
        path = Path(name)
        if sources.data_format(path) or os.path.exists(path):
            entries: Iterable[Any] = sources.read_file(path)
            folder = path.parent
        else:
            entries = as_entries(sources.read_hub(name, split))
    elif isinstance(source, Mapping):
        name = "dataset"
        entries = pick_split(source, split)
    else:
        name = type(source).__name__ if not isinstance(source, list | tuple) else "dataset"
        entries = as_entries(source)
    rows = []
    for index, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            raise DataError(
                f"{name}: row {index} is {shown(entry)}, not an object with named columns; "
                'every row must look like {"prompt": ..., ...}'
            )
        if unnamed := [column for column in entry if not isinstance(column, str)]:
            raise DataError(f"{name}: row {index} has a column {shown(unnamed[0])}; rename it: its name must be text")
        rows.append(_senses(entry, f"row {index}", folder))
    if not rows:
        raise DataError(f"{name}: no rows; {what} needs at least one prompt, so give a dataset that has some")
    return rows


def split_rows(rows: Sequence[Row], fraction: float, prompt_column: str) -> tuple[list[Row], list[Row]]:
    """Training rows and held-out rows: `fraction` of the distinct prompts, those with the smallest hashes.

    Raises `DataError`: a row has no prompt, or nothing would be left to train on.
    """
    _check_column(rows, prompt_column)
    asked = [repr(row[prompt_column]) + (repr(pictures.of_row(row)) if _may_show(row) else "") for row in rows]
    hashes = [hashlib.sha256(text.encode("utf-8", "replace")).digest() for text in asked]
    distinct = sorted(set(hashes))
    count = max(round(fraction * len(distinct)), 1)
    if count >= len(distinct):
        told = f"{count} of {len(distinct)} distinct prompts would be held out, and none is left; give more rows"
        raise DataError(f"data.eval_fraction={fraction:g}: {told}")
    last, pairs = distinct[count - 1], list(zip(rows, hashes, strict=True))
    return [row for row, own in pairs if own > last], [row for row, own in pairs if own <= last]


def build_prompts(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    prompt_column: str = "prompt",
    system_prompt: str | None = None,
    max_prompt_length: int | None = None,
    context_length: int | None = None,
    max_completion_length: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    long_prompts: str = "error",
    album: Any = None,
) -> list[Prompt]:
    """Render and tokenise the prompt of every row.

    A conversation goes through the tokenizer's chat template with the generation prompt; a last message of the
    assistant is continued. A plain string is tokenised as it is. With `system_prompt`, a conversation without a
    system message gets one. A plain string then becomes a conversation (system, user), also for reward functions, if
    the tokenizer has a template.

    Args:
        rows: from `load_rows`.
        tokenizer: a transformers tokenizer: callable on text, with `apply_chat_template` and `chat_template`.
        prompt_column: column that holds the prompt, a string or a list of `{"role": ..., "content": ...}`.
        system_prompt: see above.
        max_prompt_length: longest prompt, in tokens; None = only the context limits it.
        context_length: the model's context, in tokens; None = not checked.
        max_completion_length: tokens that a prompt must leave free in the context; None = 1.
        chat_template_kwargs: more arguments for the chat template, such as `enable_thinking`.
        long_prompts: what to do with a prompt that is too long: "error", "truncate" (keep its last tokens; reward
            functions see the whole text) or "drop" (leave its row out).
        album: how the model reads pictures (`covey.pytorch.models.pictures`); None = it reads none.

    Returns:
        One prompt for each row, in order. `columns` holds the row without `prompt_column`. `uid` is the row's `uid` or
        `id` as text, if all rows have different ones, else the row's index.

    Raises `DataError`: a prompt is missing, malformed, empty, too long or without the user's text; or all rows are
    dropped.
    """
    _check_column(rows, prompt_column)
    uids = _uids(rows)
    prompts = []
    kwargs = dict(chat_template_kwargs or {})
    no_system: list[int] = []
    for index, row in enumerate(rows):
        row = _senses(row, f"row {index}")
        content = _content(row[prompt_column], index, system_prompt, tokenizer)
        last: Message = {} if isinstance(content, str) else content[-1]
        begun = prompt_column == "prompt" and not last.get("tool_calls") and str(last.get("content", "")).strip()
        if last.get("role") == "assistant" and not begun:
            raise DataError(
                f"row {index}: the column {prompt_column!r} ends with a message of the assistant: an answer leaves "
                "nothing to ask, a call wants its result; leave it out (what begins an answer is continued in 'prompt')"
            )
        content, seen = _placed(content, row, index)
        if seen and album is None:
            kind, name = ("column", column) if (column := pictures.column_of(row)) else ("messages of", prompt_column)
            raise DataError(
                f"row {index} has pictures ({kind} {name!r}), and the model reads none: they would be ignored; use a "
                "vision model (docs/pictures.md), or remove them, or rename a column that only a reward function reads"
            )
        if album is not None and not seen and (column := pictures.unread(row)):
            raise DataError(
                f"row {index}: the column {column!r} holds {shown(row[column])}, which is no picture; give the path of "
                "a file with its ending, or another form (docs/pictures.md), or rename the column"
            )
        token_ids = _tokenize(content, index, tokenizer, kwargs)
        end = str(tokenizer.decode(token_ids[-16:]))
        if album is not None and (seen or album.placeholder_id in token_ids):
            try:
                token_ids = album.expand(token_ids, seen)
            except DataError as error:
                raise DataError(f"row {index}: {error}") from None
        columns = {name: value for name, value in row.items() if name != prompt_column}
        prompts.append(Prompt(token_ids, content, columns, uids[index], end))
        if isinstance(content, list) and not seen and index % -(-len(rows) // _READ_AGAIN) == 0:
            no_system += [index] * ("system" in _left_out(content, index, tokenizer, kwargs))
    if no_system:
        what = "the chat template leaves out the system message; write it into the user's message"
        log.warning("row %d (and %d more): %s", no_system[0], len(no_system) - 1, what)
    if long_prompts == "error":
        _check_lengths(prompts, max_prompt_length, context_length, max_completion_length or 1)
        return prompts
    limits = [max_prompt_length, None if context_length is None else context_length - (max_completion_length or 1)]
    return _shorten(prompts, min((limit for limit in limits if limit is not None), default=None), long_prompts)


def _shorten(prompts: list[Prompt], limit: int | None, long_prompts: str) -> list[Prompt]:
    """Cut or leave out prompts of more than `limit` tokens, and say how many."""
    if limit is None or not (long := sum(len(prompt.token_ids) > limit for prompt in prompts)):
        return prompts
    what = "only their last tokens are kept" if long_prompts == "truncate" else "they are left out"
    log.warning("%d of %d prompts have more than %d tokens: %s", long, len(prompts), limit, what)
    if long_prompts == "truncate" and any(len(p.token_ids) > limit and p.has_pictures for p in prompts):
        raise DataError("data.long_prompts='truncate': it would cut pictures in a prompt that is too long; set drop")
    if long_prompts == "truncate":
        return [replace(prompt, token_ids=prompt.token_ids[-limit:]) for prompt in prompts]
    if long == len(prompts):
        raise DataError(
            f"data.long_prompts='drop': each of the {len(prompts)} prompts has more than {limit} tokens, so none is "
            "left; raise data.max_prompt_length, or lower sampling.max_completion_length"
        )
    return [prompt for prompt in prompts if len(prompt.token_ids) <= limit]


def _check_column(rows: Sequence[Mapping[str, Any]], column: str) -> None:
    for index, row in enumerate(rows):
        if column in row:
            continue
        present = [str(name) for name in row]
        usual = [name for name in _USUAL_PROMPT_COLUMNS if name in present]
        near = difflib.get_close_matches(column, present, n=1) or usual
        fix = "set data.prompt_column to the column that holds the prompt"
        fix = f"did you mean prompt_column={near[0]!r}?" if near else fix
        raise DataError(f"row {index} has no column {column!r} (columns: {', '.join(present) or 'none'}); {fix}")


def _uids(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    for name in ("uid", "id"):
        values = [str(row[name]) for row in rows if row.get(name) is not None]
        if len(values) == len(rows) == len(set(values)):
            return values
    return [str(index) for index in range(len(rows))]


def _content(value: Any, index: int, system_prompt: str | None, tokenizer: Any) -> str | list[Message]:
    if isinstance(value, str):
        if system_prompt is None:
            return value
        if not _has_template(tokenizer):
            raise DataError(
                f"row {index}: system_prompt is set, but this tokenizer has no chat template to put it in "
                "front of a plain prompt; use a chat model, or write the instruction into the prompt"
            )
        return [{"role": "system", "content": system_prompt}, {"role": "user", "content": value}]
    if not isinstance(value, list | tuple | np.ndarray) or len(value) == 0:
        raise DataError(
            f"row {index}: the prompt is {shown(value)}; it must be text, or a list of messages "
            '[{"role": "user", "content": "..."}]'
        )
    messages = [_message(entry, index, number) for number, entry in enumerate(value)]
    if not _has_template(tokenizer):
        raise DataError(
            f"row {index}: the prompt is a conversation, but this tokenizer has no chat template; use a chat "
            "model, or give prompts as plain text"
        )
    if system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def _message(entry: Any, index: int, number: int) -> Message:
    where = f"row {index}: message {number} of the prompt"
    calls = entry.get("tool_calls") if isinstance(entry, Mapping) else None
    if isinstance(calls, list | tuple | np.ndarray) and len(calls):
        content = "" if entry.get("content") is None else entry["content"]
        entry = {**entry, "content": content, "tool_calls": [_call(call, where) for call in calls]}
    if not isinstance(entry, Mapping) or not {"role", "content"} <= entry.keys():
        raise DataError(f'{where} is {shown(entry)}; it must be {{"role": "user", "content": "..."}}')
    _senses({name: value for name, value in entry.items() if name not in PICTURE_COLUMNS}, where)
    if any(_is_file(entry.get(name)) for name in PICTURE_COLUMNS):
        raise DataError(f"{where} has a key of pictures; give them in the row's column images, or as parts")
    entry = {**entry, "content": _text_of(entry["content"])}
    for name in ("role", "content"):
        parts = entry[name] if name == "content" and isinstance(entry[name], list) else [None]
        if not isinstance(entry[name], str) and not all(map(_is_part, parts)):
            raise DataError(f"{where} has {name}={shown(entry[name])}; it must be text, or parts of text and images")
    return {name: value for name, value in entry.items() if value is not None}


def _call(call: Any, where: str) -> Any:
    """A call as chat templates write it: they take arguments as an object, and OpenAI gives the JSON of one."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise DataError(f"{where}: a tool call has arguments={shown(function['arguments'])}; it must be a JSON object")
    return {**call, "function": {**function, "arguments": arguments}}


def _is_part(part: Any) -> bool:
    if not isinstance(part, Mapping) or part.get("type") not in ("text", "image"):
        return False
    return isinstance(part.get("text"), str) if part["type"] == "text" else not {*part} - {"type", "image", "text"}


def _senses(row: Mapping[Any, Any], where: str, folder: Path | None = None) -> Row:
    """A row with its pictures read; `DataError` for films and sounds, and for pixels."""
    for name, value in row.items():
        what = _SENSES.get(str(name).lower().rstrip("s"))
        if what is not None and _is_file(value):
            raise DataError(
                f"{where} has {what} ({name!r}), which no model reads here: they would be ignored; remove that, or "
                "rename it where only a reward function reads it (pictures are read from images or image)"
            )
    if not _may_show(row):
        return dict(row)
    named = {name: value for name, value in row.items() if name not in PICTURE_COLUMNS or _is_file(value)}
    return {**row, **pictures.read_pictures(named, where, folder)}


def _may_show(row: Mapping[Any, Any]) -> bool:
    """Whether a row may have pictures: in a column, or as parts of messages."""
    messages = [m for value in row.values() if isinstance(value, list | tuple) for m in value if isinstance(m, Mapping)]
    return not row.keys().isdisjoint(PICTURE_COLUMNS) or any(isinstance(m.get("content"), list) for m in messages)


def _placed(content: Any, row: Mapping[str, Any], index: int) -> tuple[Any, list[Any]]:
    """Messages with the row's pictures in their places, and all pictures in them."""
    if not _may_show({**row, "": content}):
        return content, []
    content = pictures.placed(content, row, f"row {index}")
    return content, pictures.pictures_in(content)


def _is_file(value: Any) -> bool:
    """Whether a value is a picture, a film, a sound or a list with one; None, numbers and plain words are not."""
    if isinstance(value, str):
        kind = mimetypes.guess_type("a" + os.path.splitext(value)[1], strict=False)[0] or ""
        named = kind.startswith(("image/", "video/", "audio/")) or "://" in value.partition(" ")[0]
        return named or value.startswith(_BEGIN)
    if isinstance(value, list | tuple):  # numbers with a point, or lists of numbers, are samples and pixels
        return any(_is_file(each) or (bool(each) and isinstance(each, list | tuple | float)) for each in value)
    if isinstance(value, Mapping):
        return any(value.get(name) is not None for name in ("bytes", "path", "url", "image_url", "array"))
    return value is not None and not isinstance(value, bool | int | float)


def _text_of(content: Any) -> Any:
    """A list of text parts as the text that they make; anything else as it is."""
    parts = list(content) if isinstance(content, list | tuple | np.ndarray) else []
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    whole = 0 < len(texts) == len(parts) and all(isinstance(text, str) for text in texts)
    return "".join(map(str, texts)) if whole else content


def prompt_ending(content: str | Sequence[Message]) -> dict[str, bool]:
    """How `apply_chat_template` is to end a prompt: the assistant's turn begins, or its last message goes on."""
    goes_on = not isinstance(content, str) and content[-1]["role"] == "assistant"
    return {"add_generation_prompt": not goes_on, "continue_final_message": goes_on}


def _has_template(tokenizer: Any) -> bool:
    return getattr(tokenizer, "chat_template", None) is not None


def tokenize_prompt(content: str | list[Message], tokenizer: Any, kwargs: dict[str, Any]) -> IntArray:
    """Token ids of a text, or of messages in the tokenizer's chat template, to which `kwargs` go."""
    if isinstance(content, str):
        encoded = tokenizer(content)
    else:
        encoded = tokenizer.apply_chat_template(content, tokenize=True, **prompt_ending(content), **kwargs)
    # Depending on its version, the template returns ids or an encoding that holds them, with a batch axis or without.
    ids = encoded["input_ids"] if isinstance(encoded, Mapping) or hasattr(encoded, "input_ids") else encoded
    return np.asarray(ids, dtype=np.int64).reshape(-1)


def _tokenize(content: str | list[Message], index: int, tokenizer: Any, kwargs: dict[str, Any]) -> IntArray:
    try:
        token_ids = tokenize_prompt(content, tokenizer, kwargs)
    except Exception as error:  # a template may raise whatever it likes, and text may hold lone surrogates
        raise DataError(
            f"row {index}: the prompt {shown(content)} cannot be tokenised ({type(error).__name__}: "
            f"{error}); correct the row, or data.chat_template_kwargs"
        ) from error
    if not len(token_ids) or (isinstance(content, str) and not content.strip()):
        raise DataError(f"row {index}: the prompt is empty; write something in it, or remove the row")
    return token_ids


def _left_out(content: list[Message], index: int, tokenizer: Any, kwargs: dict[str, Any]) -> set[str]:
    """Roles of messages that the template does not render whole; `DataError` if the user is one of them."""
    # marks are looked for, since templates may escape a text, break its lines or put it in capitals
    told = [m | {"content": f"begun{n}. {m['content']} done{n}."} for n, m in enumerate(content)]
    told = [m if m["role"] in ("user", "system") else old for m, old in zip(told, content, strict=True)]
    try:
        rendered = tokenizer.apply_chat_template(told, tokenize=False, **prompt_ending(told), **kwargs)
    except Exception:  # without the marks it was rendered
        return set()
    there = str(rendered).casefold()
    marks = {f"{mark}{n}.": m["role"] for n, m in enumerate(told) if m is not content[n] for mark in ("begun", "done")}
    missing = {role for mark, role in marks.items() if isinstance(rendered, str) and mark not in there}
    if "user" in missing:
        raise DataError(
            f"row {index}: the chat template {shown(tokenizer.chat_template)} leaves out what the user says: "
            f"{shown(told)} becomes {shown(rendered)}; give the tokenizer the template that the model was trained "
            "with, or correct data.chat_template_kwargs"
        )
    return missing


def _check_lengths(
    prompts: Sequence[Prompt], max_prompt_length: int | None, context_length: int | None, reserve: int
) -> None:
    """Raise for the first prompt that is too long, and say how many are."""
    limits = []
    if max_prompt_length is not None:
        name = "data.max_prompt_length"
        limits.append((max_prompt_length, f"{name}={max_prompt_length}", f"raise {name}"))
    if context_length is not None:
        room = f"the model's context of {context_length} less {reserve} for the completion"
        limits.append((context_length - reserve, room, "lower sampling.max_completion_length"))
    lengths = [len(prompt.token_ids) for prompt in prompts]
    for limit, name, remedy in limits:
        if long := [index for index, length in enumerate(lengths) if length > limit]:
            first = long[0]
            uid = "" if prompts[first].uid == str(first) else f" (id {prompts[first].uid})"
            seen = int((prompts[first].token_ids >= PICTURES).sum())
            told = f", {seen:,} of them for pictures (data.processor_kwargs may make them smaller)" if seen else ""
            raise DataError(
                f"row {first}{uid}: the prompt has {lengths[first]} tokens{told}, more than {name} allows "
                f"({len(long)} of {len(prompts)} rows are too long, the longest has {max(lengths)}); shorten or "
                f"remove those rows, set data.long_prompts to {'drop' if seen else 'truncate or drop'}, or {remedy}"
            )


def pick_split(source: Mapping[Any, Any], split: str) -> Iterable[Any]:
    """One entry of a dict of splits."""
    if split in source and not isinstance(source[split], str):
        return as_entries(source[split])
    raise DataError(
        f"dataset: a dict with the keys {', '.join(map(repr, source)) or 'none'} has no split {split!r}; "
        "pass a list of rows, or the split that you want"
    )


def as_entries(source: Any) -> Sequence[Any]:
    """Something with a length that can be iterated over, or an error: a stream may never end."""
    if hasattr(source, "iloc") and hasattr(source, "columns"):  # pandas
        if twice := [name for name in source.columns if list(source.columns).count(name) > 1]:
            raise DataError(f"dataset: the DataFrame has the column {shown(twice[0])} twice; rename or remove one")
        source = source.astype(object).where(source.notna(), None).to_dict("records")
    elif hasattr(source, "columns") and (listed := getattr(source, "to_dicts", getattr(source, "to_pylist", None))):
        source = listed()  # polars, Arrow
    if hasattr(source, "__len__") and hasattr(source, "__getitem__") and not hasattr(source, "__iter__"):
        return [source[index] for index in range(len(source))]  # a map-style dataset of PyTorch
    if not hasattr(source, "__len__") or not hasattr(source, "__iter__"):
        raise DataError(
            f"dataset={shown(source)}: a {type(source).__name__} is not a list of rows; "
            "pass a list of dicts, a Dataset, or a path (of a stream, a finite part: list(stream.take(1000)))"
        )
    return source  # type: ignore[no-any-return]
