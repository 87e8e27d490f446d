"""The inputs and outputs of the engine's core, for one prompt and one choice.

The API server makes one `EngineRequest` for each prompt and each of its n choices; the core knows
no HTTP, no text and no stop strings. Pure values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]
"""As in vLLM; `error`: the KV could not be loaded (`kv_load_failure_policy: fail`)."""


class Grammar(Protocol):
    """A structured output: which tokens may come next. `binds_thoughts`: also while the model
    thinks.
    """

    binds_thoughts: bool

    def allowed(self, generated: Sequence[int]) -> Sequence[int] | None:
        """Return the ids that may follow; None: any. The end token is among them where the output
        may end.
        """


class SamplingParams(msgspec.Struct, kw_only=True):
    """How tokens are chosen and when to stop. Validated by the API server."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    seed: int | None = None
    """None: another draw each time. At temperature 0 nothing is drawn."""
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    """How many of the likeliest tokens to report beside the chosen one; None: no probabilities."""
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] = {}
    bad_words: tuple[tuple[int, ...], ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    grammar: Grammar | None = None
    thinking_token_budget: int | None = None
    """Tokens of thoughts after which a model that thinks must end them."""


class Picture(msgspec.Struct, frozen=True):
    """A picture as the API server's processor has left it."""

    identifier: str
    """vLLM's `mm_hash`: of its content, or the request's `uuid`."""
    length: int
    """Tokens of the prompt that it takes."""
    content: int | None
    """What the encoder makes something of; None: the request has only said how large it is."""
    grid: tuple[int, ...] = ()
    """What a request says in place of it, `image_grid_thw`: 4 patches for each token."""


class Medium(msgspec.Struct, frozen=True):
    """A picture in a prompt; `offset`: its first token."""

    offset: int
    picture: Picture

    def places(self, start: int, end: int) -> range:
        """Return which of its tokens are between `start` and `end`, as positions in the prompt."""
        return range(max(self.offset, start), min(self.offset + self.picture.length, end))


class EngineRequest(msgspec.Struct, kw_only=True):
    """One prompt, one choice."""

    id: str
    """vLLM's internal id, such as `cmpl-899d00b0959a2d34-0-9cc849e2`: unique for each engine
    run.
    """
    prompt: tuple[int, ...]
    media: tuple[Medium, ...] = ()
    """The pictures in the prompt, in their order."""
    sampling: SamplingParams
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    cache_salt: str | None = None
    kv_cache_report_mode: str = "incremental"
    """`full`: blocks of the prefix cache that it begins with are announced again (of
    `vllm_xargs`).
    """
    priority: int = 0
    data_parallel_rank: int | None = None
    """The rank that must run it; None: any."""

    @property
    def handed_over(self) -> bool:
        """Whether another engine has computed its prompt."""
        return bool((self.kv_transfer_params or {}).get("do_remote_prefill"))


class Candidate(msgspec.Struct, frozen=True):
    """A token with its log probability and its rank, 1 being the likeliest."""

    token: int
    logprob: float
    rank: int


class Token(msgspec.Struct, frozen=True):
    """A generated token. `top` is filled when log probabilities were asked for, likeliest first."""

    id: int
    logprob: float = 0.0
    rank: int = 1
    top: tuple[Candidate, ...] = ()


class EngineOutput(msgspec.Struct, kw_only=True):
    """The output of one step for one request."""

    request_id: str
    tokens: tuple[Token, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """The stop token's id if one of `stop_token_ids` ended it; None for EOS."""
    kv_transfer_params: dict[str, Any] | None = None
    """P's handle, with the last output."""
    ec_transfer_params: dict[str, Any] | None = None
    """What an EC producer says of the prompt's pictures, with the last output."""
    num_cached_tokens: int = 0
    """Prompt tokens found in this engine's prefix cache (with a handle: in P's, if the handle has
    it).
    """
    num_cache_creation_tokens: int = 0
    """Prompt tokens that were computed here and are now in this engine's prefix cache."""
    prompt_logprobs: tuple[tuple[Candidate, ...] | None, ...] | None = None
    """With the first output if asked for: one entry per prompt token, None for the first, its own
    token first in each.
    """


class EngineDeadError(Exception):
    """The core has died: every request on it fails, and no new one is accepted."""

    def __init__(self) -> None:
        super().__init__(
            "EngineCore encountered an issue. See stack trace (above) for the root cause."
        )
