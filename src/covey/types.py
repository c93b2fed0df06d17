"""The values that flow through Covey: prompt -> completions -> groups -> batch.

All are frozen and hold NumPy arrays, so all packages (tasks, engine, learner, JAX) can share them without copies. One
sequence, drawn:

    Prompt      "2+3="           token_ids [11 12 13 14]
    Completion  " 5<eos>"        token_ids [21 2]      logprobs [-0.7 -0.1]
    Episode     prompt + answer  token_ids [11 12 13 14 21  2]
                                 sampled   [ 0  0  0  0  1  1]
                                 logprobs  [ 0  0  0  0 -.7 -.1]

An agent's episode has several sampled segments, with foreign tokens (observations) between them:

                                 token_ids [11 12 13 14 21 2 31 32 33 22 2]
                                 sampled   [ 0  0  0  0  1 1  0  0  0  1 1]

In a `Batch`, column t of an `[N, T]` array is the t-th *sampled* token of the row; foreign tokens do not appear. The
example above has 4 such tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.floating[Any]]

Message = dict[str, Any]
"""One chat message: `{"role": "user", "content": "..."}`. A content may also be a list of parts,
`{"type": "text", "text": "..."}` and `{"type": "image", "image": Picture}`.
"""

PICTURE_COLUMNS = ("images", "image")
"""Dataset columns that hold a row's pictures, the first that a row has."""

PICTURES = 1 << 62
"""Token ids from here on are places in pictures (`covey.pytorch.models.pictures`); all others are below."""


ActionFormat = Literal["tags", "text", "turn", "call", "choice"]
"""How an agent says what it does; see `covey.environments.actions`."""

FinishReason = Literal["stop", "length"]
"""`stop`: an end-of-sequence token or a stop string; `length`: the token limit, i.e. the completion is truncated."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One prompt as the policy sees it, with the dataset row that it came from."""

    token_ids: IntArray
    """`[P]` the rendered prompt. Text is never re-tokenised after this point. Ids from `PICTURES` on are places in
    pictures."""
    content: str | list[Message]
    """What reward functions receive as the prompt: a string, or a list of chat messages."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The other dataset columns of the row (`answer`, ...), passed to reward functions by name."""
    uid: str = ""
    """Stable name of the row, e.g. its index in the dataset as text."""
    end: str = ""
    """The last characters of the rendered prompt, such as a `<think>` that the chat template opens."""

    @property
    def has_pictures(self) -> bool:
        """Whether some of its ids are places in pictures."""
        return bool((self.token_ids >= PICTURES).any())


@dataclass(frozen=True, slots=True, eq=False)
class Support:
    """The vocabulary ids that top-k/top-p/min-p left for each of T sampled tokens, ragged.

    Token t could have been any of `ids[offsets[t]:offsets[t + 1]]`.
    """

    ids: IntArray  # [K_0 + K_1 + ... + K_{T-1}]
    offsets: IntArray  # [T + 1]

    def of(self, token: int) -> IntArray:
        """The ids for one of the T tokens."""
        return self.ids[self.offsets[token] : self.offsets[token + 1]]

    def take(self, tokens: IntArray) -> Support:
        """The ids for some of the tokens."""
        parts = [self.of(int(token)) for token in tokens]
        offsets = np.cumsum([0, *(len(part) for part in parts)]).astype(np.int64)
        return Support(np.concatenate([np.zeros(0, np.int64), *parts]), offsets)


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """The result of one sampling request."""

    token_ids: IntArray
    """`[T]` sampled ids, the end-of-sequence token included where one was sampled."""
    logprobs: NDArray[np.float32]
    """`[T]` float32 natural-log probabilities under the *sampling distribution* (temperature applied; the kept support
    too where `keep_support` was on)."""
    finish_reason: FinishReason
    """See `FinishReason`."""
    policy_version: int
    """Version of the weights that produced it."""
    support: Support | None = None
    """Kept ids for each token, only with `SamplingSettings.keep_support`."""


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """A token sequence with a mask of the tokens that the policy sampled. Episodes are scored and trained on."""

    token_ids: IntArray
    """`[L]` prompt, then sampled segments, with foreign tokens between them if there are several."""
    sampled: BoolArray
    """`[L]` True where the policy sampled the token. `sampled[0]` is False."""
    logprobs: NDArray[np.float32]
    """`[L]` the sampler's log-probabilities, 0 where `sampled` is False."""
    text: str
    """Decoded answer without special tokens: what reward functions see."""
    finish_reason: FinishReason
    """Of the last segment."""
    policy_version: int
    """The oldest version among its segments."""
    support: Support | None = None
    """Kept ids for each *sampled* token in order, or None."""

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first sampled one, P."""
        return int(np.argmax(self.sampled)) if self.sampled.any() else len(self.token_ids)

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the policy sampled, T."""
        return int(self.sampled.sum())

    @classmethod
    def from_completion(cls, prompt: Prompt, completion: Completion, text: str) -> Episode:
        """A single-turn episode: the prompt followed by one completion."""
        tokens = np.concatenate([prompt.token_ids, completion.token_ids]).astype(np.int64)
        sampled = np.arange(len(tokens)) >= len(prompt.token_ids)
        logprobs = np.zeros(len(tokens), np.float32)
        logprobs[sampled] = completion.logprobs
        reason, version = completion.finish_reason, completion.policy_version
        return cls(tokens, sampled, logprobs, text, reason, version, completion.support)


@dataclass(frozen=True, slots=True)
class Turn:
    """One action of an agent."""

    observation: str
    """The observation before it, in words."""
    said: str
    """The text that the policy wrote."""
    action: str | None
    """The action in this text; None if there is none."""
    reward: float
    """Reward of this turn, including any penalty."""
    valid: bool
    """True if the world accepted the action."""
    row: int
    """Index of the trajectory's episode that holds its tokens."""
    segment: int
    """Index of its sampled segment in that episode."""
    pictures: Sequence[Any] = ()
    """Those of the observation (`covey.tasks.pictures`)."""


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """The turns of an agent in one episode of a world."""

    episodes: tuple[Episode, ...]
    """Its tokens: one growing sequence, or with `history_length` one sequence for each turn."""
    turns: tuple[Turn, ...]
    success: bool
    ended: Literal["done", "turns", "context", "failed"]
    """`done`: the world ended it; `turns` or `context`: a limit was reached; `failed`: the environment failed."""
    error: str = ""
    """The failure, "" if there was none."""

    @property
    def reward(self) -> float:
        """Sum over its turns."""
        return sum(turn.reward for turn in self.turns)


def equal_rewards(a: Any, b: Any) -> Any:
    """True where rewards, or arrays of them, are equal up to rounding. For a group, compare its extremes.

    The tolerance is 1e-12 of a reward's size, in float32 two of its last digits. 0.1 + 0.2 equals 0.3; 1e-9 and 2e-9
    differ, as do 1e6 and 1e6 + 0.5.
    """
    digits = 2.4e-7 if "float32" in str(getattr(a, "dtype", "")) else 1e-12
    apart = abs(a / 2 - b / 2)  # halves, since a difference may have no float
    return (apart <= digits * abs(a / 2)) | (apart <= digits * abs(b / 2))


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """All episodes of one prompt, scored."""

    prompt: Prompt
    """The shared prompt."""
    episodes: tuple[Episode, ...]
    """The G episodes."""
    rewards: NDArray[np.float64]
    """`[G]` float64, one for each episode (for agents: each trajectory); NaN if it could not be scored (`None`) or the
    environment failed."""
    reward_parts: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """For each reward function, its unweighted `[G]` rewards (NaN for None)."""
    trajectories: tuple[Trajectory, ...] = ()
    """The agents' trajectories, in the order of `episodes`. Empty for single answers."""
    greedy_reward: float = float("nan")
    """Reward of the prompt's greedy completion; NaN if there is none or it cannot be scored."""
    feedback: tuple[str | None, ...] = ()
    """What reward functions said of each completion in words, where a teacher reads it."""
    added: int = 0
    """How many of the last of the G were added by `sampling.max_generations`. They are trained on, but left out of
    accuracy and reward metrics, since they were only added where rewards were equal."""
    with_tools: tuple[Trajectory, ...] = ()
    """Where tools may be called: the turns of each answer, in the order of `episodes`. What is scored is the answer."""

    @property
    def shown(self) -> list[Any]:
        """What may hold pictures: the prompt, and what was seen in turns."""
        played = (*self.trajectories, *self.with_tools)
        return [self.prompt.content, *(turn.pictures for each in played for turn in each.turns)]

    @property
    def first(self) -> Group:
        """The group without the `added` completions."""
        if not self.added:
            return self
        count = len(self.rewards) - self.added
        played = self.trajectories[:count]
        return replace(
            self,
            episodes=tuple(e for each in played for e in each.episodes) if played else self.episodes[:count],
            rewards=self.rewards[:count],
            reward_parts={name: values[:count] for name, values in self.reward_parts.items()},
            trajectories=played,
            with_tools=self.with_tools[:count],
            feedback=self.feedback[:count],
            added=0,
        )

    def grown_by(self, more: Group) -> Group:
        """The group with the completions of another group of the same prompt added."""
        return replace(
            self,
            episodes=self.episodes + more.episodes,
            rewards=np.concatenate([self.rewards, more.rewards]),
            reward_parts={n: np.concatenate([v, more.reward_parts[n]]) for n, v in self.reward_parts.items()},
            trajectories=self.trajectories + more.trajectories,
            with_tools=self.with_tools + more.with_tools,
            feedback=self.feedback + more.feedback,
            added=self.added + len(more.rewards),
        )

    @property
    def is_tied(self) -> bool:
        """True if fewer than two completions are scored, or all rewards are equal."""
        scored = self.rewards[np.isfinite(self.rewards)]
        return len(scored) < 2 or bool(equal_rewards(scored.min(), scored.max()))


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """Hidden states of a network before sampled tokens: what its output head makes distributions of."""

    hidden: Any
    """`[S + 1, d]` in the host's memory, the backend's own array; the last row is 0."""
    place: IntArray
    """`[N, T]` which row is a token's; -1 where there is none."""
    whose: str
    """The name under which the learner keeps the head."""


@dataclass(frozen=True, slots=True, eq=False)
class Taught:
    """What a teacher says of the tokens of a step."""

    logprobs: NDArray[np.float32]
    """`[N, T]` log-probabilities under the teacher; NaN where there is none."""
    too_long: int = 0
    """Rows without one because what it would read is longer than the model takes."""
    seconds: float = 0.0
    """Time that it took."""
    states: States | None = None
    """For a loss over the vocabulary."""

    def of(self, rows: IntArray, width: int | None = None) -> Taught:
        """What it says of some rows of the batch, -1 = of a row without a teacher, in a batch of so many columns."""
        more = ((0, 0), (0, 0 if width is None else width - self.logprobs.shape[1]))

        def of(values: NDArray[Any], none: Any) -> Any:
            return np.pad(np.where(rows[:, None] < 0, none, values[rows]), more, constant_values=none)

        states = self.states and replace(self.states, place=of(self.states.place, -1))
        return replace(self, logprobs=of(self.logprobs, np.float32(np.nan)), states=states)


Teacher = Callable[[Sequence[Group], "Batch"], Taught]
"""Scores the rows of a batch, which are the episodes of the groups in order."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The data of one step. `[N, T]` arrays count sampled tokens (see the top of the module)."""

    episodes: tuple[Episode, ...]
    """The N episodes."""
    group: IntArray
    """`[N]` group id of each row."""
    advantages: NDArray[np.float32]
    """`[N, T]` float32."""
    mask: BoolArray
    """`[N, T]` True where the row has a sampled token that no mask excludes."""
    old_logprobs: NDArray[np.float32]
    """`[N, T]` float32, recorded by the sampler; 0 beyond the row's end."""
    excluded: Mapping[str, BoolArray] = field(default_factory=dict)
    """Reason -> `[N, T]`, True on the tokens that this mask excluded."""
    teacher: Taught | None = None
    """What a teacher says of the tokens; None without one."""
    group_relative: bool = True
    """True if advantages are differences within a group; they are then 0 if all its rewards are equal."""

    @property
    def sampled(self) -> BoolArray:
        """`[N, T]` True where the row has a sampled token, masked or not."""
        return np.asarray(np.logical_or.reduce([self.mask, *self.excluded.values()]), np.bool_)


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How tokens are sampled. `temperature=0` is greedy, with the log-probabilities at temperature 1."""

    temperature: float = 1.0
    """Divides the logits before the softmax; 0 = greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 = all."""
    top_p: float = 1.0
    """Keep the smallest set with at least this probability; 1.0 = all. Applied after `top_k`."""
    min_p: float = 0.0
    """Keep tokens with at least this fraction of the top token's probability; 0.0 = all."""
    max_tokens: int = 256
    """Limit for each completion, in tokens."""
    eos_token_ids: tuple[int, ...] = ()
    """Sampling stops after any of these; the token stays in the completion."""
    stop_strings: tuple[str, ...] = ()
    """Sampling stops when the decoded completion contains any of these."""
    keep_support: bool = False
    """Record the kept ids of each token and renormalise its log-probability over them."""

    @property
    def cut(self) -> dict[str, float]:
        """The settings that exclude tokens, under the names of server requests."""
        return {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}

    @property
    def cuts(self) -> bool:
        """True when some tokens cannot be drawn."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


Allows = Callable[[Sequence[int]], IntArray]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One completion to sample.

    Requests with equal `token_ids` share one prefill. `stream` keys the counter-based random stream of this completion,
    usually `(seed, step, prompt index, sample index)`: equal streams draw equal numbers, whatever else is in the batch.
    `choices`, if given, are the only token sequences that may be sampled; the completion's `support` records the ids
    that were possible. `allows`, if given, maps the ids sampled so far to the possible next ids, ascending; its
    `GenerationError` ends this completion alone. `forced` is what the completion will be, however likely it is: its
    log-probabilities are those at temperature 1 with nothing cut off. Only `covey.pytorch.engine.Engine` knows of it.
    """

    token_ids: IntArray
    stream: tuple[int, ...] = (0,)
    choices: tuple[tuple[int, ...], ...] | None = None
    allows: Allows | None = None
    forced: IntArray | None = None


Progress = Callable[[int, int], None]
"""Called with (finished, total) during the work."""


class Generator(Protocol):
    """Samples completions: the engine in this process, an HTTP client and vLLM have this interface."""

    def __call__(
        self,
        requests: Sequence[Request],
        settings: SamplingSettings,
        *,
        policy_version: int,
        progress: Progress | None = None,
    ) -> list[Completion]:
        """Return one completion for each request, in order.

        Raises `GenerationError`: a prompt does not fit the context, or the weights held are not of `policy_version`.
        """
