"""What custody needs to know of a prefill leg."""

from __future__ import annotations

from collections.abc import Callable

from pdproxy.scheduling.nodes import Role
from pdproxy.serving.dispatch.attempt import Attempt
from pdproxy.serving.kv.orphans import PrefillRecord
from pdproxy.transfer.contract import Contract, Dispatch, Handle
from pdproxy.wire.engine import PrefillAnswer
from pdproxy.wire.request import Parsed


def record_of(attempt: Attempt, parsed: Parsed, dispatch: Dispatch) -> PrefillRecord:
    """Return what custody needs to know of an attempt's prefill leg."""
    contract, lease = attempt.resources.transfer.contract, attempt.assignment[Role.PREFILL]
    return PrefillRecord(
        lease.node.url,
        parsed.model,
        attempt.request.headers.authorization,
        _reader(contract, parsed, dispatch),
        contract.holder.pushed_to(attempt.answering_url),
        dispatch.leg_id,
        promised=attempt.custody,
    )


def _reader(contract: Contract, parsed: Parsed, dispatch: Dispatch) -> Callable[[PrefillAnswer], Handle | str]:
    """Return what finds the handle in an answer.

    It is still in use after the attempt if the client has left. So it refers to nothing else of the attempt.
    """

    def read(answer: PrefillAnswer) -> Handle | str:
        return contract.handle(parsed, answer, dispatch)

    return read
