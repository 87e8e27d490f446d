"""Rates that no arrangement can exceed for long, from the work of a request alone. Pure.

Left out is all that would lower them: weights that are read again for each step, chunks that are
not full, waiting, and what an engine's own cache does not find. So an arrangement whose bound is
below another one's capacity needs no simulation.
"""

from __future__ import annotations

import math

import msgspec

from pdproxy.engine_model.hardware import attended
from pdproxy_lab.plan.arrangement import Arrangement
from pdproxy_lab.plan.question import SAMPLE, Question
from pdproxy_lab.simulate.cluster import Call

_MOST = 50_000.0
"""Requests per second: the bound where a request costs nothing."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """A mean request, in seconds of an engine and tokens."""

    uncached: float
    """Prompt tokens that no cache has, were it large enough and common to all engines."""
    per_chunk_s: float
    """What a step with a part of a prompt takes before its first token."""
    tokens_s: float
    """All prompt tokens, without what each step adds."""
    decode_s: float
    pull_s: float
    """What a decode engine's steps take longer because KV comes."""
    transfer_s: float
    """How long its KV occupies the way into a decode engine; 0 if transfers don't wait for each
    other.
    """
    output: float
    """Tokens of the answer."""

    def prefill_s(self, chunk: int) -> float:
        """Return the least time that its prompt takes with a chunk size."""
        return self.tokens_s + self.per_chunk_s * self.uncached / chunk


def work_of(question: Question) -> Work:
    """Return what a request of the load is on average."""
    hardware, shape = question.hardware, question.shape
    calls = question.sample(SAMPLE)
    seen: set[int] = set()
    uncached = tokens_s = decode_s = transfer_s = output = 0.0
    for call in calls:
        known = _known(call, seen, shape.unit_tokens) if shape.enable_prefix_caching else 0
        new = call.prompt - known
        uncached += new
        output += call.output
        tokens_s += (
            new / hardware.prefill_tokens_per_s + attended(new, known) * hardware.attention_s
        )
        tokens_s += hardware.prompt_begin_s
        context = call.prompt + call.output / 2
        decode_s += (call.output - 1) * (
            hardware.decode_step_per_seq_s + context * hardware.context_token_s
        )
        if hardware.transfers_in_line:
            transfer_s += hardware.transfer_s(new) * hardware.speed
    count, speed = len(calls), hardware.speed
    return Work(
        uncached=uncached / count,
        per_chunk_s=hardware.chunk_base_s / speed,
        tokens_s=tokens_s / count / speed,
        decode_s=decode_s / count / speed,
        pull_s=(
            min(hardware.pull_s, hardware.further_pull_s) + uncached / count * hardware.pull_token_s
        )
        / speed,
        transfer_s=transfer_s / count / speed,
        output=output / count,
    )


def _known(call: Call, seen: set[int], unit: int) -> int:
    found = 0
    for key in call.keys[: (call.prompt - 1) // unit]:
        if key not in seen:
            break
        found += 1
    seen.update(call.keys)
    return found * unit


def bound(one: Arrangement, work: Work) -> float:
    """Return the requests per second above which the engines of a role can't keep up."""
    if not one.prefill:
        return _rate(one.aggregated + one.any, work.prefill_s(one.chunk) + work.decode_s)
    prefill = _rate(one.prefill, work.prefill_s(one.prefill_chunk))
    return min(prefill, _rate(one.decode, max(work.decode_s + work.pull_s, work.transfer_s)))


def _rate(engines: int, seconds: float) -> float:
    return min(engines / seconds, _MOST) if seconds > 0 and math.isfinite(seconds) else _MOST
