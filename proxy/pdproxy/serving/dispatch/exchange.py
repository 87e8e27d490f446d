"""One prompt's exchange with the engines: prefill, hand over the KV, decode, and another engine where one fails.

Owns the leases, the legs and the custody of one prompt from the choice of engines to the last byte. Every way out, a
cancelled task (the client left) included, closes the leases once and leaves no KV behind:

    before the prefill's answer    the leg is adopted by the custodian, which awaits it and gives the KV back
    before the decode is asked     the handle is given back
    before the decode has shown that it took the request, its leg gets a moment to do so; then it is closed, and the KV
                                   is given back if the engine may not have seen the handle
    later                          the decode leg is closed, the decode engine frees both sides
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from pdproxy.kit.errors import (
    AnswerBudgetError,
    EngineError,
    EngineRefusedError,
    EngineTimeoutError,
    EngineUnreachableError,
    OverloadedError,
    StaleConnectionError,
    Wait,
)
from pdproxy.kit.frames import drop_traceback
from pdproxy.observe.events import DeadlinePassed, LegTimes, ServedAlone
from pdproxy.scheduling.ledger import Lease, Verdict
from pdproxy.scheduling.split import why_alone
from pdproxy.serving.dispatch.attempt import Handover, PrefillFailedError, begin, why_not
from pdproxy.serving.dispatch.decode_start import accepted, first_data
from pdproxy.serving.dispatch.failure_class import error_kind, is_clients_fault, refused, verdict_of
from pdproxy.serving.dispatch.prefill_leg import Prefilled, prefill
from pdproxy.serving.dispatch.resources import ExchangeResources, LegHeaders
from pdproxy.serving.kv.custody import Custody, End
from pdproxy.serving.stream.relay import Relay
from pdproxy.serving.stream.response_writer import ResponseWriter
from pdproxy.serving.stream.splice_sink import SpliceSink, answer_finished
from pdproxy.tokens.ids import TokenIds
from pdproxy.transfer.bodies import alone_body
from pdproxy.transfer.contract import Contract
from pdproxy.transfer.splice import Splice
from pdproxy.upstream.client import Answer, EngineClient
from pdproxy.upstream.connection import Leg, Message, Sink
from pdproxy.wire import sse
from pdproxy.wire.request import Alone, Parsed, Prompt, Route

FINISH_GRACE = 1.0
"""Seconds that an engine may take from its end mark to the end of its HTTP answer before the connection is dropped."""


class Exchange:
    """One prompt (or, with `prompt` None, a whole request for one engine alone). Run once.

    A stream that flows needs nothing of its request any more, since no other engine can take over: it is let go of then.
    """

    __slots__ = (
        "_attempts",
        "_decode_url",
        "_engines",
        "_handover",
        "_heading",
        "_ids",
        "_kv_s",
        "_new_relay",
        "_parsed",
        "_prefill_lost",
        "_prefill_s",
        "_prefill_url",
        "_prompt",
        "_why_alone",
        "_without",
        "relay",
    )

    def __init__(
        self,
        engines: ExchangeResources,
        parsed: Parsed,
        prompt: Prompt | None,
        heading: LegHeaders,
        new_relay: Callable[[], Relay],
    ) -> None:
        self._engines = engines
        self._parsed = parsed
        self._prompt = prompt
        self._heading = heading
        self._new_relay = new_relay
        self._without: tuple[str, ...] = ()
        self._attempts = 0
        self._prefill_lost: Alone | None = None
        self._prefill_url: str | None = None
        self._decode_url: str | None = None
        self._why_alone: Alone | None = None
        self._prefill_s: float | None = None
        self._kv_s: float | None = None
        self._ids: TokenIds | None = None
        self._handover: Handover | None = None
        self.relay: Relay | None = None

    def __repr__(self) -> str:
        return f"<Exchange {self._heading.request_id} {self._prefill_url} -> {self._decode_url}, {self.relay!r}>"

    def times(self) -> LegTimes:
        """Return what happened so far."""
        return LegTimes(
            prefill=self._prefill_url,
            decode=self._decode_url,
            why_alone=self._why_alone.value if self._why_alone else None,
            prefill_s=self._prefill_s,
            kv_s=self._kv_s,
            attempts=max(1, self._attempts),
        )

    async def run(self, stream_to: Callable[[Relay], ResponseWriter]) -> Answer | None:
        """Serve the prompt. Return a whole answer; or None once a stream has been passed on to `stream_to(relay)`.

        Raises:
            PdproxyError: before any data came, or in the stream.
        """
        why = self._rule()
        if why is None and self._engines.tokenizing is not None:
            why = await self._tokenize()
        while True:
            self._attempts += 1
            try:
                if why is None:
                    return await self._split(stream_to)
                return await self._alone(why, stream_to)
            except PrefillFailedError as failed:
                # Only the prefill is lost: another one, else one engine alone.
                drop_traceback(failed)
                if self._attempts >= self._engines.attempts or not failed.another:
                    why = failed.alone
            except _BeforeDataError as failed:
                last = self._attempts >= self._engines.attempts
                self._engines.tell(self._heading, failed.node, "decode", failed.error, will_retry=not last)
                if last:
                    raise failed.error from None
                drop_traceback(failed)

    def _rule(self) -> Alone | None:
        parsed, ledger = self._parsed, self._engines.ledger
        if self._prompt is None:
            return parsed.alone or Alone.UNUSUAL
        return why_alone(parsed, self._prompt, block_size=ledger.block_size(), template_tokens=ledger.template_tokens())

    @property
    def _contract(self) -> Contract:
        return self._engines.transfer.contract

    async def _tokenize(self) -> Alone | None:
        """Learn the prompt's token ids. Return why one engine must serve it, after all."""
        assert self._prompt is not None
        self._ids = await self._engines.ids(self._parsed, self._prompt, self._heading)
        return why_not(self._engines, self._parsed, self._ids) if self._contract.needs_ids else None

    # -- one engine alone

    async def _alone(self, why: Alone, stream_to: Callable[[Relay], ResponseWriter]) -> Answer | None:
        engines = self._engines
        lease = engines.ledger.alone(
            self._parsed.model, self._parsed.body_bytes, engines.now(), without=self._without
        ) or engines.ledger.alone(self._parsed.model, self._parsed.body_bytes, engines.now())
        if lease is None:
            raise OverloadedError("no engine can serve this request: see /ready")
        if self._why_alone is not why:
            self._why_alone = why
            engines.observers.notify(ServedAlone(why.value))
        self._prefill_url, self._prefill_s = None, None
        return await self._decode(lease, None, None, stream_to)

    # -- prefill and decode

    async def _split(self, stream_to: Callable[[Relay], ResponseWriter]) -> Answer | None:
        engines, prompt = self._engines, self._prompt
        assert prompt is not None
        handover = self._handover = await begin(engines, self._parsed, prompt, self._ids, self._without)
        if handover is None:
            raise PrefillFailedError(self._prefill_lost or Alone.NO_PAIR, another=False)
        pair = handover.pair
        custody: Custody | None = None
        try:
            self._prefill_url, self._decode_url, self._why_alone = pair.prefill.node.url, None, None
            started = engines.now()
            got = await prefill(engines, handover, self._parsed, prompt, self._heading)
            self._prefill_s = engines.now() - started
            if isinstance(got, Answer):
                if got.status != 400:
                    return got
                # The prefill leg is not the client's request: which of its faults comes first, and whether it is one, only
                # an engine that reads it as it came can say.
                raise PrefillFailedError(Alone.PREFILL_REFUSED, another=False)
            custody = got.custody
            handover.in_custody(custody)
            if (alone := custody.handle.alone) is not None:
                # Before an engine that holds it could take a part of it.
                freed = await custody.given_back(engines.deadlines.first_token)
                raise PrefillFailedError(alone, another=False, shun=None if freed else pair.decode.node.url)
            if got.body:
                return await self._finished(got, stream_to)
            del got, prompt  # see `_let_go`
            await handover.kv_ready()
            return await self._decode(pair.decode, pair.prefill.node.url, custody, stream_to)
        except PrefillFailedError as failed:
            self._without += (failed.shun or pair.prefill.node.url,)
            self._prefill_lost = failed.alone
            if failed.alone is Alone.KV_LATE and custody is not None:
                custody.end(End.LOST)  # whether anything was pushed, nobody knows
            raise
        finally:
            # Both are no-ops where the decode leg has ended them already.
            handover.close()
            if custody is not None:
                custody.release()

    async def _finished(self, got: Prefilled, stream_to: Callable[[Relay], ResponseWriter]) -> Answer | None:
        """Answer with the prefill engine's token, which is the last one: no decode engine is asked."""
        relay = self._relay(None)
        splice = Splice(self._parsed, got.custody.handle, self._heading.request_id)
        answer_finished(relay, splice, got.body, stream=self._parsed.stream)
        first = await relay.first
        if isinstance(first, Answer):
            return first
        relay.flow(stream_to(relay), None)
        await relay.watch(self._engines.clock, self._engines.deadlines.between_tokens, self._passed)
        return None

    # -- decode

    def _request(self, client: EngineClient, custody: Custody | None) -> Message:
        """Return the decode leg's request. Made anew where it is sent anew, which is rare: to keep one is a body more."""
        if custody is None:
            return client.request(self._heading.path, self._heading.headers, alone_body(self._parsed, self._prompt))
        assert self._prompt is not None
        assert self._handover is not None
        leg = self._contract.decode(self._parsed, self._prompt, custody.handle, self._handover.dispatch)
        return client.request(leg.route.value, self._heading.headers, leg.body)

    def _sink(self, relay: Relay, custody: Custody | None) -> Sink:
        if custody is None or custody.handle.first is None:
            return relay
        return SpliceSink(relay, Splice(self._parsed, custody.handle, self._heading.request_id))

    async def _decode(
        self,
        lease: Lease,
        prefill_url: str | None,
        custody: Custody | None,
        stream_to: Callable[[Relay], ResponseWriter],
    ) -> Answer | None:
        """Have an engine decode, with the KV in `custody` or alone. The lease and the custody end here."""
        engines = self._engines
        url = self._decode_url = lease.node.url
        client = engines.clients[url]
        started = engines.now()
        verdict = Verdict.NEUTRAL
        leg: Leg | None = None
        relay = self._relay(custody)
        proven = whole = False
        request = partial(self._request, client, custody)
        try:
            if custody is not None:
                custody.asked(url)
                custody.on_expired = self._expired
                engines.auditor.asked(url, custody.handle.prompt_tokens)
            timeout = engines.deadlines.total if self._parsed.starts_in_silence else engines.deadlines.first_token
            try:
                async with engines.clock.within(timeout):
                    leg = await client.send(request, self._sink(relay, custody))
                    try:
                        first = await first_data(engines, relay, lease.node, in_silence=self._parsed.starts_in_silence)
                    except StaleConnectionError as stale:
                        drop_traceback(stale)
                        relay = self._relay(custody)
                        leg = await client.send(request, self._sink(relay, custody), fresh=True)
                        first = await first_data(engines, relay, lease.node, in_silence=self._parsed.starts_in_silence)
            except TimeoutError:
                raise EngineTimeoutError(f"{url} sent no data in {timeout:g} s", wait=Wait.FIRST_TOKEN) from None
            proven = True
            self._kv_s = engines.now() - started
            if isinstance(first, Answer):
                whole = True
                self._judge(url, first, custody)
                verdict = Verdict.GOOD
                self._compare(prefill_url, url, custody, relay)
                return first
            direct = custody is None or custody.handle.first is None
            if custody is not None:
                custody.end(End.LOADED)
            self._let_go()
            del request
            relay.flow(stream_to(relay), leg, direct=direct)
            deadlines = engines.deadlines
            await relay.watch(engines.clock, deadlines.between_tokens, self._passed)
            whole = True
            verdict = Verdict.GOOD
            self._compare(prefill_url, url, custody, relay)
            return None
        except asyncio.CancelledError:
            asked = leg is not None and custody is not None and custody.state is not None and not proven
            if asked and custody is not None and await accepted(engines, self._parsed, relay, started):
                custody.end(End.ABORTED, in_silence=self._parsed.starts_in_silence)
            raise  # a handle that has not ended is given back below, once the leg is closed
        except EngineError as error:
            verdict = verdict_of(error, with_kv=custody is not None)
            if isinstance(error, EngineTimeoutError) and relay.status == 200 and custody is not None:
                # It took the request and may be loading: closing the leg makes it free both sides.
                custody.end(End.ABORTED)
            if isinstance(error, EngineTimeoutError | EngineUnreachableError) and error.wait is not None and not proven:
                engines.observers.notify(DeadlinePassed(error.wait.value, url))
            if proven and not whole:
                raise  # data has gone out: another engine can't take over
            if isinstance(error, EngineRefusedError) and error.status < 500 and error.status != 429:
                raise
            if isinstance(error, AnswerBudgetError):
                raise  # another engine's answer would find none either
            self._without += (url,)
            raise _BeforeDataError(url, error) from error
        finally:
            if leg is not None:
                if whole:
                    leg.let_finish(FINISH_GRACE)
                else:
                    leg.close()
            if custody is not None:
                engines.auditor.over(url, custody.handle.prompt_tokens, loaded=custody.how is End.LOADED)
                custody.release()  # whatever has not ended by now
            engines.close(lease, verdict)

    def _let_go(self) -> None:
        """Forget the request. Whatever else refers to it, a local of a function that waits too, would keep it whole."""
        self._parsed, self._prompt, self._new_relay, self._ids = _LET_GO, None, _no_relay, None
        if self._handover is not None:
            self._handover.loaded()
            self._handover = None

    def _passed(self, wait: Wait) -> None:
        self._engines.observers.notify(DeadlinePassed(wait.value, self._decode_url))

    def _relay(self, custody: Custody | None) -> Relay:
        relay = self.relay = self._new_relay()
        if custody is not None:
            relay.filter.cached_tokens = custody.handle.cached_tokens
            relay.filter.created_cache_tokens = custody.handle.created_cache_tokens
        return relay

    def _expired(self) -> None:
        """The lease on the KV ended before the decode engine showed data: what it reads may be another prompt's."""
        if self.relay is not None and not self.relay.first.done():
            self.relay.failed(EngineError(f"the lease on the KV at {self._prefill_url} ended before it was loaded"))

    def _judge(self, url: str, answer: Answer, custody: Custody | None) -> None:
        """Decide what a whole answer says about the KV. Raise for one that another engine may do better."""
        if answer.status == 200:
            if sse.is_aborted(answer.body):
                raise EngineError(f"{url} gave the answer up half-way")
            if self.relay is not None and self.relay.usage is None:
                raise EngineError(f"{url} answered 200 with something that is no completion")
            if custody is not None:
                custody.end(End.LOADED)
            return
        if is_clients_fault(answer):
            if custody is not None and custody.handle.first is not None:
                # It was asked something else than the client asked: only one that is asked the same can say what is wrong.
                raise PrefillFailedError(Alone.PREFILL_REFUSED, another=False)
            # 401 and 404 come from before the handler that gives KV back.
            if custody is not None and answer.status == 400:
                error_type, param = error_kind(answer.body)
                if self._contract.refusal_released(error_type, param):
                    custody.end(End.REFUSED)
            return
        raise refused(url, answer)

    def _compare(self, prefill: str | None, decode: str, custody: Custody | None, relay: Relay) -> None:
        if prefill is not None and custody is not None and relay.usage is not None:
            self._engines.auditor.compared(prefill, decode, custody.handle.prompt_tokens, relay.usage.prompt_tokens)


_LET_GO = Parsed(Route.COMPLETIONS, {}, None, True, False, False, (), None, 0)
"""Stands for the request of a stream that flows."""


def _no_relay() -> Relay:
    raise RuntimeError("a stream that flows is not asked for again")


class _BeforeDataError(Exception):
    """A decode leg failed before its first data: the client has seen nothing yet."""

    def __init__(self, node: str, error: EngineError) -> None:
        super().__init__(str(error))
        self.node = node
        self.error = error
