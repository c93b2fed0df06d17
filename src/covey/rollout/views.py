"""What a teacher reads: its own prompt, then a row's tokens from the first sampled one on.

    row     prompt                            answer    sampled ids are the policy's, id for id
    view    prompt with privileged context    answer    so that column t of `[N, T]` is the same token in both

The prompt is the row's own conversation with its last user message rewritten. Contexts: a column of the dataset,
another completion of the group that succeeded, or what reward functions said of this completion (SDPO arXiv 2601.20802,
OPSD 2601.18734, SDFT 2601.19897).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from covey.config.teacher import TeacherSource
from covey.types import Episode, Group, IntArray, Message

Render = Callable[[str | list[Message]], IntArray]
"""Token ids of a prompt, with all that the chat template puts around it."""
_PLACES = re.compile(r"\{(prompt|context)\}")


@dataclass(frozen=True, slots=True)
class Views:
    """The views of a step; `longest` is the most tokens that the model takes. Groups that are not served have none."""

    teacher: TeacherSource
    render: Render
    longest: int
    serves: Callable[[Group], bool] = lambda group: True

    def __call__(self, groups: Sequence[Group]) -> tuple[list[Episode | None], int]:
        """A view of each row, None where there is no context or it is too long; and how many were too long."""
        found: list[Episode | None] = []
        rendered: dict[str, IntArray] = {}
        too_long = 0
        for group in groups:
            if not self.serves(group):
                found += [None] * len(group.episodes)
                continue
            for row, episode in enumerate(group.episodes):
                view: Episode | None = episode
                if self.teacher.context != "none":
                    text = self._context(group, row)
                    if text and text not in rendered:
                        rendered[text] = self.render(self._prompt(group.prompt.content, text))
                    view = _after(rendered[text], episode) if text else None
                if view is not None and len(view.token_ids) > self.longest:
                    view, too_long = None, too_long + 1
                found.append(view)
            rendered.clear()
        return found, too_long

    def _context(self, group: Group, row: int) -> str:
        """What is shown for a row; empty where there is nothing."""
        around = self.teacher.around
        for choice in self.teacher.choices:
            found = [(kind, text) for kind, column in choice if (text := self._part(group, row, kind, column))]
            if found:
                parts = [around[kind].replace("{context}", text) if kind in around else text for kind, text in found]
                return ("" if around else "\n\n").join(parts)
        return ""

    def _part(self, group: Group, row: int, kind: str, column: str) -> str:
        rewards, least = group.rewards, self.teacher.success
        if kind == "column":
            return self.teacher.says(group.prompt.columns, column)
        if kind == "feedback":
            said = group.feedback[row] if group.feedback else None
            return (said or "") if rewards[row] < least else ""
        solution = next((n for n in np.flatnonzero(rewards >= least) if n != row), None)
        return "" if solution is None else group.episodes[solution].text.strip()

    def _prompt(self, content: str | list[Message], context: str) -> str | list[Message]:
        if isinstance(content, str):
            return self._filled(content, context)
        last = max((n for n, message in enumerate(content) if message["role"] == "user"), default=None)
        if last is None:
            return [*content, {"role": "user", "content": self._filled("", context)}]
        asked = content[last]
        return [
            *content[:last],
            asked | {"content": self._filled(str(asked["content"]), context)},
            *content[last + 1 :],
        ]

    def _filled(self, prompt: str, context: str) -> str:
        values = {"prompt": prompt, "context": context}
        return _PLACES.sub(lambda place: values[place[1]], self.teacher.text)


def _after(prompt: IntArray, episode: Episode) -> Episode:
    """The episode with another prompt before its first sampled token."""
    begins, more = episode.prompt_length, len(prompt)
    return replace(
        episode,
        token_ids=np.concatenate([prompt, episode.token_ids[begins:]]),
        sampled=np.concatenate([np.zeros(more, np.bool_), episode.sampled[begins:]]),
        logprobs=np.concatenate([np.zeros(more, np.float32), episode.logprobs[begins:]]),
    )
