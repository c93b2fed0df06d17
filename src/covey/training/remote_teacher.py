"""A teacher behind a server: views go there as token ids, and log-probabilities come back.

covey serve    /v1/score          at the temperature of sampling
vLLM           /v1/completions    `prompt_logprobs`, which are those at temperature 1 whatever is asked for
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covey.config.whole import GRPOConfig
from covey.errors import ConfigError, ServingError
from covey.rollout.learning import FloatNT
from covey.serving.client import MAX_COMPLETIONS, MOST_SCORED, InferenceClient
from covey.types import Batch

_SETTING, _IDS, _AT_ONCE = "algorithm.teacher.weights", 16_384, 4
"""The setting with the address; token ids of a request, unless one view has more; requests at a time."""
_MOST_NEGATIVE, _ROUNDING = -1e6, 1e-3
"""Between these a log-probability lies, but for -inf, which cannot teach."""
_PROBE = "A teacher reads 3.14159 + 2 = 5.14, once more:\n\tfür x in naïve_Ω: 你好, мир! 🙂"

View = tuple[tuple[int, ...], int]
"""Token ids, and the place of the first one that is scored."""


class TeacherServer:
    """A server whose `scores` are those of a teacher; it takes views of up to `context_length` tokens.

    Raises `ConfigError`: it has no such model or another tokenizer, or cannot score as the run samples; `ServingError`:
    it does not answer.
    """

    def __init__(self, address: str, config: GRPOConfig, tokenizer: Any) -> None:
        url, _, name = address.partition("#")
        limits: dict[str, Any] = {
            "timeout": config.server.server_timeout,
            "retry_seconds": config.server.server_retry_seconds,
        }
        self._client = InferenceClient(url, variable="COVEY_TEACHER_TOKEN", setting=_SETTING, **limits)
        known = self._client.ask("GET", "/v1/models").get("data") or ()
        own: dict[str, Any] = next((model for model in known if name in ("", model.get("id"))), {})
        self._is_covey, self._named = own.get("owned_by") == "covey", {"model": own.get("id")}
        lengths = [int(model["max_model_len"]) for model in known if model.get("max_model_len")]
        self.context_length = min(
            [*lengths, MOST_SCORED] if self._is_covey else [n - 1 for n in lengths], default=1 << 40
        )

        def require(holds: object, otherwise: str) -> None:
            if not holds:
                raise ConfigError(f"{_SETTING}={address!r}: {otherwise}")

        temperatures = {config.sampling.temperature, *(phase.temperature for phase in config.schedule.phases)}
        warm = "it scores at temperature 1 only; set sampling.temperature to 1, or let `covey serve` serve the teacher"
        require(own, f"its models are {known!r:.300}; write one after a #")
        require(not config.algorithm.keep_sampling_mask, "it scores over all tokens; set keep_sampling_mask to false")
        require(self._is_covey or temperatures <= {1.0, None}, warm)
        asked = self._named | {"prompt": _PROBE, "max_tokens": 1, "return_token_ids": True}
        asked |= {} if self._is_covey else {"prompt_logprobs": 0}
        choice: dict[str, Any] = (self._client.post("/v1/completions", asked).get("choices") or [{}])[0]
        speaks = self._is_covey or choice.get("prompt_logprobs")
        require(speaks, "it gives no prompt_logprobs; `covey serve` and vLLM can teach")
        ours, theirs = list(tokenizer(_PROBE)["input_ids"]), choice.get("prompt_token_ids")
        other = f"it reads {_PROBE!r} as {theirs}, and the policy as {ours}; a teacher needs the policy's tokenizer"
        require(theirs in (None, ours), other)
        if self._is_covey:
            self._named["policy_version"] = own["policy_version"]

    def scores(self, batch: Batch, rows: NDArray[np.int64], *, temperature: float, **how: Any) -> tuple[FloatNT, None]:
        """`[N, T]` log-probabilities of the rows' sampled tokens, 0 elsewhere; views that are equal are sent once.

        Raises `ServingError`: the server does not answer, or does not say how likely a token is.
        """
        found, alike = np.zeros(batch.mask.shape, np.float32), dict[View, list[int]]()
        for row in rows.tolist():
            view = batch.episodes[row]
            ids = view.token_ids[: int(np.flatnonzero(view.sampled)[-1]) + 1]
            alike.setdefault((tuple(ids.tolist()), view.prompt_length), []).append(row)
        parts, size = list[dict[View, list[int]]](), _IDS
        for key, own in alike.items():
            more = max(len(key[0]), _IDS // MAX_COMPLETIONS)
            if size + more > _IDS:
                parts, size = [*parts, {}], 0
            parts[-1][key], size = own, size + more
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for part, said in zip(parts, pool.map(partial(self._ask, temperature), parts), strict=True):
                for (_, start), alike_rows, values in zip(part, part.values(), said, strict=True):
                    for row in alike_rows:
                        view = batch.episodes[row]
                        found[row, : view.num_sampled] = values[view.sampled[start : start + len(values)]]
        return found, None

    def _ask(self, temperature: float, part: Mapping[View, list[int]]) -> list[NDArray[np.float64]]:
        """Of each view the log-probabilities of its tokens from the first that is scored on."""
        ids, starts = (list(column) for column in zip(*part, strict=True))
        try:
            if self._is_covey:
                asked = self._named | {"token_ids": ids, "start": starts, "temperature": temperature}
                said = [score["logprobs"] for score in self._client.post("/v1/score", asked)["scores"]]
            else:
                asked = self._named | {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0}
                choices = sorted(self._client.post("/v1/completions", asked)["choices"], key=lambda one: one["index"])
                entries = [zip(one["prompt_logprobs"], own, strict=True) for one, own in zip(choices, ids, strict=True)]
                each = [
                    [((entry or {}).get(str(token)) or {}).get("logprob") for entry, token in row] for row in entries
                ]
                said = [values[start:] for values, start in zip(each, starts, strict=True)]
            if any(type(value) not in (float, int, type(None)) for values in said for value in values):
                raise TypeError("a log-probability that is no number")
            found = [np.array(values, np.float64) for values in said]
            for (own, start), rows, values in zip(part, part.values(), found, strict=True):
                at = start + int(np.argmin([*(values > _MOST_NEGATIVE) & (values < _ROUNDING), False]))
                if at != len(own):
                    raise ServingError(f"no log-probability of token {own[at]}, position {at} of row {rows[0]}")
            return found
        except (ServingError, LookupError, TypeError, ValueError, AttributeError) as error:
            why = str(error) if isinstance(error, ServingError) else f"its answer cannot be read ({error!r:.200})"
            raise ServingError(
                f"the teacher {self._client.url}, asked for {len(ids)} views of {sum(map(len, ids))} tokens: {why}. "
                "The step was not taken and nothing is lost: put the server right, then run `covey resume`"
            ) from error
