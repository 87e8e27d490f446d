"""What custody needs to know of a prefill leg."""

from __future__ import annotations

from pdproxy.serving.dispatch.attempt import Attempt
from pdproxy.serving.kv.orphans import PrefillRecord
from pdproxy.transfer.contract import Dispatch
from pdproxy.wire.request import Parsed


def record_of(attempt: Attempt, parsed: Parsed, dispatch: Dispatch) -> PrefillRecord:
    """Return what custody needs to know of an attempt's prefill leg."""
    contract = attempt.resources.transfer.contract
    return PrefillRecord(
        attempt.assignment.leases[0].node.url,
        parsed.model,
        attempt.request.headers.authorization,
        # Still in use after the attempt if the client has left: it refers to nothing else of the attempt.
        lambda answer: contract.handle(parsed, answer, dispatch),
        contract.holder.pushed_to(attempt.answering_url),
        dispatch.leg_id,
        promised=attempt.custody,
    )
