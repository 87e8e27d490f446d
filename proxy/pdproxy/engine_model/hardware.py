"""How long an engine's work takes: its steps, its KV transfers, and what surrounds them. Pure.

Owns the formula and its numbers. Times are in seconds, sizes in bytes or tokens. The same object
drives the simulated engine behind HTTP, the engines in virtual time and the fast engines of
`simulate`. docs/internals/engine-model.md explains the formula.
"""

from __future__ import annotations

import math

import msgspec

_ABOVE_0 = ("prefill_tokens_per_s", "link_bytes_per_s")
MOST = 1e15
"""No number is larger, and no rate or speed smaller than `LEAST`, so that sums of times stay
finite.
"""
LEAST = 1e-6


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long things take. The defaults are an 8B model on one H200 with NVLink, from public
    measurements.

    The terms whose default is 0 (or no) come from measurements of a whole engine: profiles have
    them (`engine_model.profile`).
    """

    speed: float = 1.0
    """How many times faster than real; 0: nothing takes time."""
    prefill_tokens_per_s: float = 40_000.0
    chunk_base_s: float = 0.0
    """What a step with prefill takes before its first token."""
    decode_step_s: float = 0.005
    """A step that decodes one sequence: mostly reading the weights."""
    decode_step_per_seq_s: float = 0.000_03
    """What each further sequence adds to a step."""
    weights_read_once: bool = False
    """Whether prefill and decode share the reading of the weights: a step then takes the longer of
    both, not their sum.
    """
    context_token_s: float = 0.0
    """What each token adds to a step that its decoding sequences have before the step: reading
    their KV.
    """
    attention_s: float = 0.0
    """What each pair of tokens adds that prefill compares: a chunk's tokens with those before
    them.
    """
    prompt_begin_s: float = 0.0
    """What each prompt adds to the first step that computes a part of it: the engine takes it into
    its batch.
    """
    pull_s: float = 0.0
    """What the first KV transfer that begins in a step adds to the step."""
    further_pull_s: float = 0.0
    """What each further one adds."""
    pull_token_s: float = 0.0
    """What each token adds whose KV is pulled by a transfer that begins in the step."""
    kv_bytes_per_token: int = 131_072
    link_bytes_per_s: float = 50e9
    transfer_latency_s: float = 0.001
    transfers_in_line: bool = False
    """Whether an engine receives the KV of one request after the other; else all transfers have the
    whole link.
    """
    request_overhead_s: float = 0.0
    """Between the client and the first engine's queue: HTTP, tokenizing."""
    handoff_overhead_s: float = 0.0
    """Between a prefill engine's answer and the decode engine's queue."""
    response_overhead_s: float = 0.0
    """Between the end of a step and the client's sight of its token."""

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            # An integer is finite, and may be too large for a float.
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} must be finite, got {value}")
            if name in _ABOVE_0 and value <= 0:
                raise ValueError(f"{name} must be above 0, got {value}")
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
            if value > MOST:
                raise ValueError(f"{name} must be at most {MOST:g}")
            if name in (*_ABOVE_0, "speed") and 0 < value < LEAST:
                raise ValueError(f"{name} must be at least {LEAST:g}, got {value:g}")

    @property
    def weights_s(self) -> float:
        """Seconds of a decode step without what its sequences add."""
        return max(self.decode_step_s - self.decode_step_per_seq_s, 0.0)

    def step_s(
        self,
        prefill_tokens: int,
        decoding: int,
        context_tokens: int = 0,
        attention: float = 0.0,
        pulls: int = 0,
        begun: int = 0,
        pulled_tokens: int = 0,
    ) -> float:
        """Return how long one step of the engine takes: prefill in the step delays the next token
        of all its sequences.

        Args:
            prefill_tokens: prompt tokens that the step computes.
            decoding: sequences that get their next token, beside those whose prompt is computed.
            context_tokens: the sum of the tokens that the decoding sequences have before the step.
            attention: the sum over the prompts' chunks of `attended(tokens, before)`.
            pulls: KV transfers to this engine that begin in the step.
            begun: prompts of which no step has computed a part before.
            pulled_tokens: those of all `pulls` together.
        """
        if not self.speed:
            return 0.0
        chunk = (
            self.chunk_base_s + prefill_tokens / self.prefill_tokens_per_s
            if prefill_tokens
            else 0.0
        )
        if self.weights_read_once:
            taken = max(chunk, self.weights_s) if prefill_tokens or decoding else 0.0
            taken += decoding * self.decode_step_per_seq_s
        else:
            taken = chunk
            if decoding:
                taken += self.decode_step_s + (decoding - 1) * self.decode_step_per_seq_s
        taken += context_tokens * self.context_token_s + attention * self.attention_s
        taken += begun * self.prompt_begin_s
        if pulls:
            taken += (
                self.pull_s + (pulls - 1) * self.further_pull_s + pulled_tokens * self.pull_token_s
            )
        return taken / self.speed

    def transfer_s(self, tokens: int) -> float:
        """Return how long the transfer of the KV of so many tokens takes, once it has begun."""
        if not self.speed:
            return 0.0
        return (
            self.transfer_latency_s + tokens * self.kv_bytes_per_token / self.link_bytes_per_s
        ) / self.speed

    @property
    def before_engine_s(self) -> float:
        """Seconds from the client to the first engine's queue, at this speed."""
        return self._scaled(self.request_overhead_s)

    @property
    def between_engines_s(self) -> float:
        """Seconds from a prefill engine's answer to the decode engine's queue, at this speed."""
        return self._scaled(self.handoff_overhead_s)

    @property
    def to_client_s(self) -> float:
        """Seconds from the end of a step to the client, at this speed."""
        return self._scaled(self.response_overhead_s)

    def _scaled(self, seconds: float) -> float:
        return seconds / self.speed if self.speed else 0.0


def attended(tokens: int, before: int) -> float:
    """Return the pairs of tokens that a chunk compares: each of its `tokens` with the `before` ones
    and half of its own.
    """
    return tokens * (before + tokens / 2)
