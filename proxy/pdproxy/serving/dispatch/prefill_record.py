"""What custody needs to know of a prefill leg, and how long its answer may be."""

from __future__ import annotations

from pdproxy.serving.dispatch.attempt import Attempt
from pdproxy.serving.kv.orphans import PrefillRecord
from pdproxy.transfer.contract import Dispatch
from pdproxy.wire.request import Parsed

_MAX_ANSWER = 256 << 10
_MAX_ANSWER_PER_BYTE = 16
"""Bytes of a prefill's answer: a constant, and a number per byte of the request. A token id has up to 8 bytes and is made of one
byte of the prompt or more; block ids of eight groups take half of that. A larger answer is not about this prompt."""


def largest_answer(parsed: Parsed) -> int:
    """Return how many bytes the answer to a prefill may have."""
    return _MAX_ANSWER + _MAX_ANSWER_PER_BYTE * parsed.body_bytes


def record_of(attempt: Attempt, parsed: Parsed, dispatch: Dispatch, run: int | None) -> PrefillRecord:
    """Return what custody needs to know of an attempt's prefill leg. `run`: the number of the run that was asked."""
    contract, url = attempt.resources.transfer.contract, attempt.assignment.leases[0].node.url
    return PrefillRecord(
        url,
        parsed.model,
        attempt.request.headers.authorization,
        # Still in use after the attempt if the client has left: it refers to nothing else of the attempt.
        lambda answer: contract.handle(parsed, answer, dispatch),
        contract.holder.pushed_to(attempt.answering_url),
        dispatch.leg_id,
        run,
        promised=attempt.custody,
    )
