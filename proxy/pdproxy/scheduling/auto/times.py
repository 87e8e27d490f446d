"""How long work takes at one engine: `engine_model.Hardware` with a chunk size, as few numbers as a
decision needs. Pure.
"""

from __future__ import annotations

from pdproxy.engine_model.hardware import Hardware

_LEAST_CHUNK = 16
"""Tokens of prompts in a step, however many sequences decode."""
_COLLIDES = 0.3
"""How likely a pull is to begin in the same step as another one."""


class WorkTimes:
    """Seconds of an engine's work. `chunk`: the most tokens of a step (`--max-num-batched-tokens`).

    `prefill_factor` and `step_factor` are what measurements make of the model's numbers; 1 as long
    as there are none.
    """

    __slots__ = (
        "_attention",
        "_begin",
        "_chunk_base",
        "_context",
        "_once",
        "_per_seq",
        "_token",
        "_weights",
        "before_s",
        "between_s",
        "chunk",
        "hardware",
        "prefill_factor",
        "pull_base_s",
        "pull_token_s",
        "step_factor",
        "to_client_s",
        "transfer_base_s",
        "transfer_token_s",
    )

    def __init__(self, hardware: Hardware, chunk: int) -> None:
        speed = hardware.speed or 1.0
        self.hardware, self.chunk = hardware, chunk
        self._token = 1 / hardware.prefill_tokens_per_s / speed
        self._chunk_base = hardware.chunk_base_s / speed
        self._begin = hardware.prompt_begin_s / speed
        self._weights = hardware.weights_s / speed
        self._per_seq = hardware.decode_step_per_seq_s / speed
        self._context = hardware.context_token_s / speed
        self._attention = hardware.attention_s / speed
        self._once = hardware.weights_read_once
        self.before_s, self.between_s = hardware.before_engine_s, hardware.between_engines_s
        self.to_client_s = hardware.to_client_s
        self.transfer_base_s = hardware.transfer_s(0)
        self.transfer_token_s = hardware.transfer_s(1) - self.transfer_base_s
        more = hardware.further_pull_s - hardware.pull_s
        self.pull_base_s = (hardware.pull_s + (_COLLIDES * more if more > 0.0 else 0.0)) / speed
        """How long a pull stops a decode engine's sequences, on average, before its first token."""
        self.pull_token_s = hardware.pull_token_s / speed
        """How much longer with each token that it moves."""
        self.prefill_factor = 1.0
        self.step_factor = 1.0

    def pull_s(self, tokens: float) -> float:
        """Return how long a pull of so many tokens stops a decode engine's sequences, on
        average.
        """
        return self.pull_base_s + tokens * self.pull_token_s

    def step_s(self, decoding: float, context: float) -> float:
        """Return how long a step takes that only decodes."""
        return (
            self._weights + decoding * self._per_seq + context * self._context
        ) * self.step_factor

    def per_sequence_s(self, context: float) -> float:
        """Return what one more sequence with so many tokens adds to a step."""
        return (self._per_seq + context * self._context) * self.step_factor

    def full_step_s(
        self, prompt: float, decoding: float, context: float, begun: float = 1.0
    ) -> float:
        """Return how long a step takes that is as full as a prompt of so many tokens makes it.

        `begun`: how many prompts begin in it; on average a part of one, where a prompt takes
        several steps.
        """
        tokens = self.chunk - decoding
        if tokens < _LEAST_CHUNK:
            tokens = float(_LEAST_CHUNK)
        if tokens > prompt:
            tokens = prompt
        seconds = (
            self._chunk_base
            + tokens * self._token
            + self._attention * tokens * (prompt - 0.5 * tokens)
        )
        seconds += begun * self._begin
        if decoding and not self._once:
            seconds += self._weights
        return (seconds + decoding * self._per_seq + context * self._context) * self.prefill_factor

    def prefill_s(
        self, tokens: int, cached: int, decoding: float, context: float, queued: bool
    ) -> tuple[float, float, float]:
        """Return how long prefill takes, how much longer the sequences that decode wait for it, and
        in how many steps it is done.

        `tokens`: those to compute; `cached`: those before them. `decoding` and `context`: sequences
        at the engine, and their tokens. `queued`: other prompts fill the rest of the last chunk.
        """
        room = self.chunk - decoding
        if room < _LEAST_CHUNK:
            room = _LEAST_CHUNK
        steps = tokens / room
        rest = 0.0
        if not queued:
            full = int(steps)
            rest = steps - full
            if rest:
                steps = full + 1.0
        seconds = steps * self._chunk_base + tokens * self._token
        weights = steps * self._weights
        once = self._once
        if once:
            if rest:  # the last step may be shorter than the reading of the weights
                short = self._weights - self._chunk_base - rest * room * self._token
                if short > 0.0:
                    seconds += short
            if seconds < weights:
                seconds = weights
        seconds += self._attention * tokens * (cached + 0.5 * tokens) + self._begin
        factor = self.prefill_factor
        if not decoding:
            seconds *= factor
            return seconds, seconds, steps
        longer = seconds - weights if once else seconds
        if not once:
            seconds += weights
        seconds += steps * (decoding * self._per_seq + context * self._context)
        return seconds * factor, longer * factor, steps

    def queued_s(self, tokens: float, pairs: float) -> tuple[float, float]:
        """Return the same for a mean prompt among others, at an engine that does nothing else.
        `pairs`: `attended` tokens.
        """
        steps = tokens / self.chunk
        seconds = max(
            steps * self._chunk_base + tokens * self._token,
            steps * self._weights if self._once else 0.0,
        )
        seconds += pairs * self._attention + self._begin
        longer = seconds - steps * self._weights if self._once else seconds
        return seconds * self.prefill_factor, max(longer, 0.0) * self.prefill_factor
