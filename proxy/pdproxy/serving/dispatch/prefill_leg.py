"""The prefill leg: a prompt becomes KV in our custody.

Owns the leg and the prefill engine's lease. If the client leaves before the answer, both go to the
custodian. If the answer is late, the leg goes to the custodian, and the lease ends. The request is
sent once: the engine may have read the KV of the turn before, and the KV that it has made has the
leg's id. Only for a decode engine that waits for KV under that very id is the request sent a second
time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import msgspec

from pdproxy.kit.errors import (
    EngineError,
    EngineRefusedError,
    EngineTimeoutError,
    EngineUnreachableError,
    KvGoneError,
    Wait,
)
from pdproxy.kit.frames import drop_traceback
from pdproxy.kit.one_shot_event import OneShotEvent
from pdproxy.observe.events import DeadlinePassed
from pdproxy.scheduling.leases import FAILED, GOOD, NEUTRAL
from pdproxy.serving.dispatch.attempt import Attempt
from pdproxy.serving.dispatch.failure_class import (
    is_clients_fault,
    is_doubtful,
    is_unknown_model,
    refused,
    verdict_of,
)
from pdproxy.serving.dispatch.prompt_request import PromptRequest
from pdproxy.serving.dispatch.recovery import (
    Answered,
    AskAgain,
    CannotSplit,
    ModelRefused,
    PrefillFailed,
)
from pdproxy.serving.dispatch.turn import TurnBefore, turn_before, with_turn
from pdproxy.serving.kv.custody import Custody
from pdproxy.serving.kv.orphans import PrefillRecord
from pdproxy.serving.kv.ready import ExpectedNotices
from pdproxy.tokens.ids import TokenIds
from pdproxy.transfer.contract import Contract, Dispatch, Handle
from pdproxy.upstream.client import Answer, EngineClient, Pending
from pdproxy.upstream.connection import Message
from pdproxy.wire.request import Parsed
from pdproxy.wire.route_form import Alone

_MAX_ANSWER = 256 << 10
_MAX_ANSWER_PER_BYTE = 16
"""Bytes of a prefill's answer: a constant, and a number per byte of the request. A token id has up
to 8 bytes and is made of one byte of the prompt or more; block ids of eight groups take half of
that. A larger answer is not about this prompt.
"""


class Prefilled(msgspec.Struct, frozen=True):
    """A prompt's KV is in our custody. `body`: the engine's whole answer, if its token is already
    the last one; else empty.

    `handle`: to be looked at. Only `Custody.spend` gives it to an engine.
    """

    custody: Custody
    handle: Handle
    body: bytes = b""


class PrefillLeg:
    """One prefill leg of an attempt. Run once. The watch over engines that stand still sees it as a
    `fleet.open_legs.OpenLeg`.

    Where both legs run at once, the attempt has a custody before: the KV was promised. The leg may
    outlive the attempt then.
    """

    __slots__ = (
        "_adopted",
        "_asked_again",
        "_attempt",
        "_client",
        "_lease",
        "_open_legs",
        "_parsed",
        "_peers",
        "_pending",
        "_prompt",
        "_request",
        "_resources",
        "_run",
        "_sent_ids",
        "_turn",
        "_url",
        "_verdict",
        "dispatch",
        "handed_on",
        "promised",
        "prompt_bytes",
        "sent",
        "since",
        "stalled_before",
    )
    phase = "prefill"
    in_silence = False
    """A late answer has a deadline, and the engine is asked then whether it works."""
    is_counted = must_progress = True
    waits_for = None

    def __init__(self, request: PromptRequest, attempt: Attempt) -> None:
        resources = self._resources = request.resources
        contract, dispatch = resources.transfer.contract, attempt.dispatch
        self._request = request
        self._attempt = attempt
        self._parsed, self._prompt = request.parsed, request.prompt
        self.promised: Custody | None = None
        """The custody of KV that was promised to a decode engine."""
        self._lease = lease = attempt.assignment.leases[0]
        self._url = lease.engine.url
        self._run: int | None = None
        """The number of the engine's run when the request was written, None before."""
        engine = resources.engines.known[self._url]
        self._client: EngineClient = engine.client
        self._open_legs = engine.open_legs
        self.since = 0.0
        """When the leg began, in seconds of the clock."""
        self.prompt_bytes = lease.prompt_bytes
        self.stalled_before = request.stalled
        """How many engines have stood still under its request before."""
        # Of the run that is asked: an answer of an earlier run must not be taken for one of the
        # next.
        self._peers = engine.run.peers if contract.peer_in is not None else None
        self._pending: Pending | None = None
        self._verdict = NEUTRAL
        self._adopted = False
        self.handed_on = False
        """Whether the custodian awaits its answer."""
        self._asked_again = False
        self.sent: OneShotEvent | None = None
        """Set once the request was sent, if somebody waits for that."""
        self.dispatch = dispatch
        self._sent_ids: TokenIds | None = dispatch.ids
        if dispatch.ids is not None and not contract.needs_ids:
            self._sent_ids = resources.ids_to_send(self._url, request.parsed, dispatch.ids)
            if self._sent_ids is None:
                self.dispatch = msgspec.structs.replace(dispatch, prefill_takes_ids=False)
        self._turn: TurnBefore | None = None

    def __repr__(self) -> str:
        return f"<PrefillLeg {self._url}, {self._verdict.value}>"

    async def run(
        self,
    ) -> Prefilled | Answered | AskAgain | CannotSplit | ModelRefused | PrefillFailed:
        """Have the prompt prefilled. Return custody of its KV, or why there is none.

        If a notice may bring the handle, the first of notice and answer is used. After a notice,
        the answer is awaited in the background.
        """
        resources = self._resources
        seconds = resources.deadlines.prefill
        self._attempt.take(self._lease)
        self.since = resources.now()
        self._open_legs.add(self)
        try:
            if resources.turns is not None:
                self._turn = turn_before(self._request, self._attempt, self._lease, self._sent_ids)
            while True:
                try:
                    answer = await self._in_time(seconds)
                    return (
                        self._noticed(answer) if isinstance(answer, Handle) else self._read(answer)
                    )
                except EngineError as error:
                    self._request.broke(self._lease, error)
                    if not self._may_ask_again(error):
                        raise
                    self._ask_again(error)
        except asyncio.CancelledError:
            self.abandon()
            raise
        except TimeoutError:
            self._verdict = FAILED
            keeper = None if self._turn is None else self._turn.hung()
            self._adopt(lambda: None)  # it may be about to finish, and only its answer names its KV
            self._adopted = False  # the lease ends now
            self._pending = None
            late = EngineTimeoutError(
                f"{self._url} did not prefill in {seconds:g} s", wait=Wait.PREFILL
            )
            return self._failed(late, keeper=keeper)
        except EngineError as error:
            self._verdict = verdict_of(error)
            if is_doubtful(error):
                self._request.in_doubt().prefill_failed(self._lease)
            if self._pending is not None and not isinstance(error, EngineRefusedError):
                resources.custodian.orphans.remember(self._attempt.with_notices(self.record()))
            return self._failed(error)
        finally:
            self._open_legs.remove(
                self, ended_well=resources.now() if self._verdict is GOOD else None
            )
            if self._turn is not None:
                self._turn.over(asked=self._pending is not None)
            if not self._adopted:
                if self._pending is not None:
                    self._pending.close()
                resources.close(self._lease, self._verdict)

    def _may_ask_again(self, error: EngineError) -> bool:
        """Return whether the same engine is asked once more: only KV under the same id frees a
        decode engine that waits.
        """
        waits = self.promised is not None and self.promised.decode_waits
        if (
            not waits
            or self._asked_again
            or isinstance(error, EngineUnreachableError | EngineTimeoutError)
        ):
            return False
        holder = self._resources.transfer.contract.holder
        return holder.prefill_again(error.status if isinstance(error, EngineRefusedError) else None)

    def _ask_again(self, error: EngineError) -> None:
        self._asked_again = True
        if self._pending is not None:
            self._pending.close()
            self._pending = None
        self._resources.report_failure(
            self._request.headers, self._url, "prefill", error, will_retry=True
        )
        drop_traceback(error)

    def abandon(self) -> None:
        """Leave the leg to the custodian, which awaits its answer: nobody else waits for it any
        more.
        """
        if not self._adopted:
            self._adopt(partial(self._resources.close, self._lease, self._verdict))

    def drop(self) -> None:
        """Close the leg before its answer: the engine then keeps nothing, and no decode engine
        waits for its KV.
        """
        if self._pending is not None and not self._adopted:
            self._pending.close()
            self._pending = None

    def forget_peers(self) -> None:
        """Forget where the run that was asked is reached, if its answers show that: it may have
        been started again since.
        """
        if self._peers is not None:
            self._peers.forget()

    # -- as an open leg of its engine

    def last_sign(self) -> float:
        """Return that none has come: it shows nothing before its whole answer."""
        return 0.0

    def source_lost(self, why: str) -> None:
        """It waits for no KV that its end depends on."""

    def fail(self, error: EngineError) -> None:
        """End it: its engine stands still."""
        if self._pending is not None:
            self._pending.fail(error)

    # -- asking

    def _message(self) -> Message:
        """Return the leg's request, which is written in the same step: here the engine is given the
        KV of the turn before.

        Raises:
            KvGoneError: its KV is not needed any more. The engine may have taken seconds to be
                connected to.
        """
        promised = self.promised
        if promised is not None and (
            promised.how is not None or (self._asked_again and not promised.decode_waits)
        ):
            raise KvGoneError(f"the KV of {self._url} is not needed any more")
        self._run = self._lease.engine.run_number
        if self._turn is not None:
            self.dispatch = with_turn(self.dispatch, self._turn.spend())
        dispatch, headers = self.dispatch, self._request.headers
        assert self._prompt is not None
        parsed, own = self._attempt.parsed_for(self._url, self._parsed), headers.headers
        if dispatch.leg_id is not None:
            parsed, own = parsed.named(dispatch.leg_id), headers.named(dispatch.leg_id)
        leg = self._resources.transfer.contract.prefill(parsed, self._prompt, dispatch)
        return self._client.request(leg.route.path, own + leg.headers, leg.content)

    async def _in_time(self, seconds: float) -> Answer | Handle:
        """Send the request. Return the answer, or the handle if a notice has brought that first.

        Raises:
            TimeoutError: neither came in time, and the engine is not seen to work.
        """
        resources = self._resources
        most = _MAX_ANSWER + _MAX_ANSWER_PER_BYTE * self._parsed.body_bytes
        try:
            with resources.clock.within(seconds):
                self._pending = await self._client.ask(self._message, max_bytes=most)
                if self.sent is not None:
                    self.sent.set()
                return await self._answer_or_handle()
        except TimeoutError:
            while self._pending is not None and await resources.works(
                self._url, Wait.PREFILL.value
            ):
                with suppress(TimeoutError), resources.clock.within(seconds):
                    return await self._answer_or_handle()
            raise

    def _answer_or_handle(self) -> Awaitable[Answer | Handle]:
        """Wait for the answer, or for the handle if a notice brings that first."""
        assert self._pending is not None
        notice = self._attempt.handle_notice
        return (
            self._pending.answered()
            if notice is None
            else self._answer_or_notice(self._pending, notice)
        )

    async def _answer_or_notice(self, pending: Pending, notice: ExpectedNotices) -> Answer | Handle:
        answer = await pending.answered_or(notice.done)
        if answer is not None:
            return answer
        return self._handle_in(notice) or await pending.answered()

    def _handle_in(self, notice: ExpectedNotices) -> Handle | None:
        transfer = self._resources.transfer
        if notice.notice is None or transfer.contract.handle_from_notice is None:
            return None
        found = transfer.contract.handle_from_notice(notice.notice)
        named = None if found is None else transfer.hosts.checked(found, self._url)
        return named if isinstance(named, Handle) else None

    # -- what came of it

    def _noticed(self, handle: Handle) -> Prefilled:
        """Take custody of a handle that a notice brought. The engine may finish its answer, which
        is not needed any more.
        """
        resources = self._resources
        assert self._pending is not None
        self._verdict = GOOD
        end = partial(resources.close, self._lease, self._verdict)
        resources.custodian.orphans.outlive(self._pending, resources.deadlines.prefill, end)
        self._adopted = True
        return Prefilled(self._take(handle), handle)

    def _read(
        self, answer: Answer
    ) -> Prefilled | Answered | AskAgain | CannotSplit | ModelRefused | PrefillFailed:
        url, request = self._url, self._request
        if self._turn is not None and self._turn.has_failed(answer.status):
            return AskAgain()
        if answer.status != 200:
            if not is_clients_fault(answer):
                raise refused(url, answer)
            self._verdict = GOOD
            if is_unknown_model(answer):
                return ModelRefused(url, answer)
            if answer.status != 400:
                return Answered(answer)
            if self._attempt.added_is_refused(url):
                return AskAgain()
            # The prefill leg is not the client's own request: only an engine that gets that can say
            # whether it is wrong, and which error comes first.
            return CannotSplit(Alone.PREFILL_REFUSED, exclude=url)
        read = self._parsed.route.form.prefill_answer(answer.body)
        if read is None:
            raise EngineError(f"{url} answered a prefill with something that is not a completion")
        if "abort" in [choice.finish_reason for choice in read.choices]:
            raise EngineError(f"{url} gave the prefill up")
        if self._may_keep_nothing and any(
            choice.finish_reason != "length" for choice in read.choices
        ):
            self._verdict = GOOD
            return CannotSplit(Alone.FIRST_TOKEN, exclude=url)
        transfer = self._resources.transfer
        contract, hosts = transfer.contract, transfer.hosts
        handle = hosts.checked(contract.handle(self._parsed, read, self.dispatch), url)
        if (
            contract.peer_in is not None
            and (peer := contract.peer_in(read, self.dispatch)) is not None
        ):
            assert self._peers is not None
            if peer.host is None or (why := hosts.why_not(peer.host, url)) is None:
                self._peers.learn(peer)
            else:
                handle = why
        if isinstance(handle, str):  # the engine works, and gave nothing to decode from
            if request.kv_failed():
                self._resources.scheduler.kv_not_made(url, self._resources.now())
            return self._failed(
                EngineError(f"{url} gave no usable KV handle: {handle}"), Alone.NO_HANDLE
            )
        self._verdict = GOOD
        self._attempt.counted(self._lease, read.usage)
        finished = handle.first is not None and handle.first.finish_reason is not None
        return Prefilled(self._take(handle), handle, answer.body if finished else b"")

    def _failed(
        self, error: EngineError, reason: Alone = Alone.PREFILL_FAILED, *, keeper: str | None = None
    ) -> PrefillFailed:
        if isinstance(wait := getattr(error, "wait", None), Wait):
            self._resources.observers.notify(DeadlinePassed(wait.value, self._url))
        return PrefillFailed(self._url, reason, error, keeper)

    # -- custody

    def _take(self, handle: Handle) -> Custody:
        resources = self._resources
        if self._turn is not None:
            self._turn.prefilled(handle)
        if resources.tokenizing is not None:
            resources.tokenizing.check.served(
                self._url, self._parsed, self.dispatch.ids, self._sent_ids, handle.token_ids
            )
        self._request.prefilled = handle.prompt_tokens or self._request.prefilled
        if self.promised is not None:
            self.promised.made(handle)
            return self.promised
        return resources.custodian.take(handle, self.record())

    def record(self) -> PrefillRecord:
        """Return what custody needs to know of the leg."""
        return _record(self._request, self._attempt, self._parsed, self.dispatch, self._run)

    def promise(self) -> Custody | None:
        """Begin the custody of KV that the contract promises before the engine is asked. None if it
        can promise none.
        """
        contract, handle = self._resources.transfer.contract, None
        if contract.promise is not None and not self._may_keep_nothing:
            handle = contract.promise(self._parsed, self.dispatch)
        if handle is None:
            return None
        record = _record(
            self._request, self._attempt, self._parsed, self.dispatch, self._lease.engine.run_number
        )
        self.promised = self._resources.custodian.promise(handle, record)
        self._attempt.dispatch = self.dispatch  # both engines must work on the same prompt
        self._attempt.keep(self.promised)
        return self.promised

    @property
    def _may_keep_nothing(self) -> bool:
        """Whether the first token decides whether the engine keeps KV, or may free it at once."""
        needs_length = self._resources.transfer.contract.capabilities.needs_length
        return needs_length and not self._parsed.route.form.has_min_tokens

    def _adopt(self, end: Callable[[], None]) -> None:
        """Hand the leg to the custodian, which awaits its answer and releases what it holds."""
        if self._pending is not None:
            record = self._attempt.hand_on(self.record())
            self._resources.custodian.orphans.adopt(self._pending, record, end)
            self._adopted = self.handed_on = True


def _handle_in(
    contract: Contract, parsed: Parsed, dispatch: Dispatch, body: bytes
) -> Handle | str | None:
    """Return the handle in an answer's body; why there is none; None if it is no answer."""
    answer = parsed.route.form.prefill_answer(body)
    return None if answer is None else contract.handle(parsed, answer, dispatch)


def _record(
    request: PromptRequest, attempt: Attempt, parsed: Parsed, dispatch: Dispatch, run: int | None
) -> PrefillRecord:
    contract, leases = request.resources.transfer.contract, attempt.assignment.leases
    return PrefillRecord(
        leases[0].engine.url,
        parsed.model,
        request.headers.authorization,
        # Still in use after the attempt if the client has left: it refers to nothing else of the
        # attempt.
        partial(_handle_in, contract, parsed, dispatch),
        contract.holder.pushed_to(leases[-1].engine.url),
        dispatch.leg_id,
        run,
        promised=attempt.custody,
    )
