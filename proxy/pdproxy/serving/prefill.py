"""The prefill leg: a prompt becomes KV in our custody.

Owns the leg and the prefill engine's lease. A client that leaves while it is under way hands both to the custodian; a leg
that is late goes to the custodian alone.
"""

from __future__ import annotations

import asyncio

from pdproxy.kit.errors import EngineError, EngineTimeoutError, StaleConnectionError, Wait
from pdproxy.kit.frames import let_go
from pdproxy.observe.events import DeadlinePassed
from pdproxy.scheduling.ledger import Lease, Verdict
from pdproxy.serving.custody import Custody
from pdproxy.serving.engines import Engines, Heading
from pdproxy.serving.verdicts import is_clients_fault, refused, verdict_of
from pdproxy.tokens.ids import TokenIds
from pdproxy.transfer.contract import Handle
from pdproxy.upstream.client import Answer, Pending
from pdproxy.wire.engine import prefill_answer
from pdproxy.wire.request import Alone, Parsed, Prompt


class PrefillFailedError(Exception):
    """The leg gave no KV. `alone` is the reason if one engine must now do it; `another`: a pair may be left to try."""

    def __init__(self, alone: Alone, *, another: bool) -> None:
        super().__init__(alone.value)
        self.alone = alone
        self.another = another


async def prefill(
    engines: Engines, lease: Lease, parsed: Parsed, prompt: Prompt, heading: Heading, ids: TokenIds | None = None
) -> Custody | Answer:
    """Have a prompt prefilled by the leased engine. Return custody of its KV, or an answer that is the client's own fault.

    `ids` are the prompt's, None if the engine has to make them.

    Raises:
        PrefillFailedError: the engine failed, was late, or gave no handle that may be used. It has been told.
    """
    node = lease.node
    client = engines.clients[node.url]
    verdict = Verdict.NEUTRAL
    adopted = False
    pending: Pending | None = None
    sent = engines.ids_to_send(node.url, parsed, ids)

    def request() -> bytes:  # made anew where it is sent anew, which is rare: to keep one is a body more
        return client.request(heading.path, heading.headers, engines.contract.prefill_body(parsed, prompt, sent))

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
            pending = await client.ask(request)
            try:
                answer = await pending.answered()
            except StaleConnectionError as stale:
                let_go(stale)
                pending = await client.ask(request, fresh=True)
                answer = await pending.answered()
        got = _read(engines, node.url, answer)
        verdict = Verdict.GOOD
        if isinstance(got, Answer):
            return got
        engines.ids_served(node.url, parsed, ids, sent, got.token_ids)
        return engines.custodian.take(got, node.url, parsed.model, heading.authorization)
    except asyncio.CancelledError:
        if pending is not None:
            engines.custodian.adopt(pending, node.url, parsed.model, heading.authorization, end)
            adopted = True
        raise
    except TimeoutError:
        verdict = Verdict.FAILED
        if pending is not None:  # it may be just finishing: its answer is the only way to its KV
            engines.custodian.adopt(pending, node.url, parsed.model, heading.authorization, lambda: None)
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


class _NoHandleError(EngineError):
    """The engine works, and gave nothing to decode from."""


def _read(engines: Engines, url: str, answer: Answer) -> Handle | Answer:
    if answer.status != 200:
        if is_clients_fault(answer):
            return answer
        raise refused(url, answer)
    read = prefill_answer(answer.body)
    if read is None:
        raise EngineError(f"{url} answered a prefill with something that is not a completion")
    if "abort" in [choice.finish_reason for choice in read.choices]:
        raise EngineError(f"{url} gave the prefill up")
    handle = engines.contract.handle(read)
    if isinstance(handle, str):
        raise _NoHandleError(f"{url} gave no usable KV handle: {handle}")
    return handle
