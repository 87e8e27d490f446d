"""The prefill leg: a prompt becomes KV in our custody.

Owns the leg and the prefill engine's lease. A client that leaves while it is under way hands both to the custodian; a leg
that is late goes to the custodian alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from pdproxy.kit.errors import EngineError, EngineTimeoutError, StaleConnectionError, Wait
from pdproxy.kit.frames import drop_traceback
from pdproxy.observe.events import DeadlinePassed
from pdproxy.scheduling.ledger import Verdict
from pdproxy.serving.dispatch.attempt import Handover, PrefillFailedError
from pdproxy.serving.dispatch.failure_class import is_clients_fault, refused, verdict_of
from pdproxy.serving.dispatch.resources import ExchangeResources, LegHeaders
from pdproxy.serving.kv.custody import Custody
from pdproxy.serving.kv.orphans import PrefillLeg
from pdproxy.serving.kv.ready import Expected
from pdproxy.transfer.contract import Contract, Handle
from pdproxy.upstream.client import Answer, Pending
from pdproxy.upstream.connection import Message
from pdproxy.wire.engine import PrefillAnswer, prefill_answer
from pdproxy.wire.request import Alone, Parsed, Prompt

_ROOM = 256 << 10
_ROOM_PER_BYTE = 16
"""Bytes of a prefill's answer, and for each byte of the request. A token id has up to 8 bytes and stands for a byte of the prompt
at least; block ids of eight groups take half of that. A larger answer is not about this prompt."""


class Prefilled(msgspec.Struct, frozen=True):
    """A prompt's KV is in our custody. `body` is the engine's whole answer, where its token is the client's last."""

    custody: Custody
    body: bytes = b""


async def prefill(
    engines: ExchangeResources, handover: Handover, parsed: Parsed, prompt: Prompt, heading: LegHeaders
) -> Prefilled | Answer:
    """Have a prompt prefilled by the leased engine. Return custody of its KV, or an answer that is the client's own fault.

    Where a notice may bring the handle, whatever comes first counts; the answer is then awaited in the background.

    Raises:
        PrefillFailedError: the engine failed, was late, or gave no handle that may be used. It has been told.
    """
    lease, dispatch, told = handover.pair.prefill, handover.dispatch, handover.told
    node = lease.node
    client = engines.engines.known[node.url].client
    contract = engines.transfer.contract
    verdict = Verdict.NEUTRAL
    adopted = False
    pending: Pending | None = None
    sent = dispatch.ids if contract.needs_ids else engines.ids_to_send(node.url, parsed, dispatch.ids)
    if sent is None and dispatch.ids is not None:
        dispatch = msgspec.structs.replace(dispatch, prefill_takes_ids=False)

    def request() -> Message:  # made anew where it is sent anew, which is rare: to keep one is a body more
        asked = contract.prefill(parsed, prompt, dispatch)
        headers = heading.headers if dispatch.leg_id is None else heading.named(dispatch.leg_id)
        return client.request(asked.route.value, headers, asked.body)

    def read(answer: PrefillAnswer) -> Handle | str:
        return contract.handle(parsed, answer, dispatch)

    most = _ROOM + _ROOM_PER_BYTE * parsed.body_bytes
    receiver = handover.pair.decode.node.url if contract.pushes else None
    leg = PrefillLeg(node.url, parsed.model, heading.authorization, read, receiver, dispatch.leg_id)

    def end() -> None:
        engines.close(lease, verdict)

    def failed(error: EngineError) -> PrefillFailedError:
        if isinstance(wait := getattr(error, "wait", None), Wait):
            engines.observers.notify(DeadlinePassed(wait.value, node.url))
        engines.tell(heading, node.url, "prefill", error, will_retry=True)
        return PrefillFailedError(
            Alone.NO_HANDLE if isinstance(error, _NoHandleError) else Alone.PREFILL_FAILED, another=True
        )

    try:
        async with engines.clock.within(engines.deadlines.prefill):
            pending = await client.ask(request, most=most)
            try:
                answer = await _first(pending, told)
            except StaleConnectionError as stale:
                drop_traceback(stale)
                pending = await client.ask(request, fresh=True, most=most)
                answer = await _first(pending, told)
            if answer is None and (handle := _handle_told(contract, told)) is not None:
                verdict = Verdict.GOOD
                engines.custodian.orphans.outlive(pending, engines.deadlines.prefill, end)
                adopted = True
                custody = engines.custodian.take(handle, leg)
                engines.ids_served(node.url, parsed, dispatch.ids, sent, handle.token_ids)
                return Prefilled(custody)
            if answer is None:
                answer = await pending.answered()
        got = _read(read, node.url, answer)
        verdict = Verdict.GOOD
        if isinstance(got, Answer):
            return got
        engines.ids_served(node.url, parsed, dispatch.ids, sent, got.token_ids)
        custody = engines.custodian.take(got, leg)
        finished = got.first is not None and got.first.finish_reason is not None
        return Prefilled(custody, answer.body if finished else b"")
    except asyncio.CancelledError:
        if pending is not None:
            engines.custodian.orphans.adopt(pending, handover.hand_on(leg), end)
            adopted = True
        raise
    except TimeoutError:
        verdict = Verdict.FAILED
        if pending is not None:  # it may be just finishing: its answer is the only way to its KV
            engines.custodian.orphans.adopt(pending, handover.hand_on(leg), lambda: None)
            pending = None
        message = f"{node.url} did not prefill in {engines.deadlines.prefill:g} s"
        raise failed(EngineTimeoutError(message, wait=Wait.PREFILL)) from None
    except _NoHandleError as error:
        raise failed(error) from None
    except EngineError as error:
        verdict = verdict_of(error)
        raise failed(error) from None
    finally:
        if not adopted:
            if pending is not None:
                pending.close()
            end()


async def _first(pending: Pending, told: Expected | None) -> Answer | None:
    """Return the answer, None if a notice came first."""
    return await pending.answered() if told is None else await pending.answered_or(told.done)


def _handle_told(contract: Contract, told: Expected | None) -> Handle | None:
    if told is None or told.notice is None or contract.handle_from_notice is None:
        return None
    return contract.handle_from_notice(told.notice)


class _NoHandleError(EngineError):
    """The engine works, and gave nothing to decode from."""


def _read(handle_in: Callable[[PrefillAnswer], Handle | str], url: str, answer: Answer) -> Handle | Answer:
    if answer.status != 200:
        if is_clients_fault(answer):
            return answer
        raise refused(url, answer)
    read = prefill_answer(answer.body)
    if read is None:
        raise EngineError(f"{url} answered a prefill with something that is not a completion")
    if "abort" in [choice.finish_reason for choice in read.choices]:
        raise EngineError(f"{url} gave the prefill up")
    handle = handle_in(read)
    if isinstance(handle, str):
        raise _NoHandleError(f"{url} gave no usable KV handle: {handle}")
    return handle
