"""What every exchange works with: the engines, the ledger, the custodian and others; and reports
that all exchanges make.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from pdproxy.fleet.audit import Auditor
from pdproxy.fleet.down_watch import DownWatch
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.handle_hosts import HandleHosts
from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import EngineError, EngineRefusedError, OverloadedError, RefusalReason, Wait
from pdproxy.kit.ids import mint
from pdproxy.observe.events import DeadlinePassed, LegFailed, Observers
from pdproxy.observe.prompt_shares import PromptShares
from pdproxy.scheduling.engine_states import EngineStates
from pdproxy.scheduling.leases import GOOD, Lease, Verdict
from pdproxy.scheduling.ledger_engine import PREFILL
from pdproxy.scheduling.losses import (
    Fingerprint,
    KnownSuspects,
    Losses,
    LostUnder,
    RequestAtRisk,
    Slot,
)
from pdproxy.scheduling.scheduler import Scheduler
from pdproxy.serving.dispatch.derendering import Derendering
from pdproxy.serving.dispatch.detokenizing import Detokenizing
from pdproxy.serving.dispatch.doubtful_failures import DoubtfulFailures, FailedTransfer
from pdproxy.serving.dispatch.failure_class import error_text
from pdproxy.serving.dispatch.fingerprint import MakeFingerprint
from pdproxy.serving.dispatch.hints import NO_HINTS, Hints
from pdproxy.serving.dispatch.prefixes import PrefixQuestions
from pdproxy.serving.dispatch.record import ContinuationRecords
from pdproxy.serving.dispatch.tokenizing import TakeBeginning, Tokenizing
from pdproxy.serving.kv.custodian import Custodian
from pdproxy.serving.kv.custody import Custody
from pdproxy.serving.kv.open_turns import OpenTurns
from pdproxy.serving.kv.ready import ReadyWaits
from pdproxy.serving.stream.named_events import NamedTemplates
from pdproxy.serving.stream.relay import Relay
from pdproxy.settings.limits import Deadlines, Limits
from pdproxy.tokens.ids import TokenIds
from pdproxy.transfer.contract import Contract
from pdproxy.transfer.encoders import EncoderContract
from pdproxy.upstream.answer_budget import AnswerBudget
from pdproxy.wire.cache_salt import TenantSalt
from pdproxy.wire.engine_words import engine_words
from pdproxy.wire.event_template import EventTemplates
from pdproxy.wire.fields import Fields, body_request_id
from pdproxy.wire.request import Parsed
from pdproxy.wire.route_form import Prompt

_MAX_ERROR = 65_536
"""Bytes of an engine's error that is read for its words."""
_MIN_EVENTS = 8
"""Of a stream, so that the time between them says something."""


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """How KV gets from one engine to another: the contract, and what it needs besides the legs.

    `recomputes`: a decode engine is asked even if no notice came in time, and computes the KV that
    did not arrive. `hosts`: which hosts handles may name.
    """

    contract: Contract
    ready: ReadyWaits
    recomputes: bool
    hosts: HandleHosts


@dataclass(frozen=True, slots=True)
class ExchangeResources:
    """What an exchange works with. One for the whole process."""

    transfer: KvTransfer
    encoders: EncoderContract
    scheduler: Scheduler
    states: EngineStates
    engines: EngineRegistry
    custodian: Custodian
    deadlines: Deadlines
    limits: Limits
    observers: Observers
    auditor: Auditor
    now: Callable[[], float]
    clock: Clock
    answer_budget: AnswerBudget
    slot: Callable[[RequestAtRisk], Awaitable[Slot | None]]
    """Waits for a place for one more attempt behind one that has failed. None if none came free in
    time.
    """
    engines_change: Callable[[str | None, float], Awaitable[bool]]
    """Waits until engines have changed that may serve a model, up to a time. Returns False if that
    is no use, or if too many wait.
    """
    lost: Losses
    suspects: KnownSuspects
    """The requests and clients that ask `lost` before they begin, and tell it of their answers."""
    fingerprint: MakeFingerprint
    down_watch: DownWatch
    works: Callable[[str, str], Awaitable[bool]]
    """Returns whether the engine of a URL is seen to work although a leg is silent; the second
    argument names the wait.
    """
    is_push_lost: Callable[[Custody], Awaitable[bool]]
    """Returns whether the push that a decode leg may wait for is lost, though its prefill engine
    has answered.
    """
    lease_may_have_ended: Callable[[Custody], Awaitable[bool]]
    """Returns whether a handle's lease may have ended before its KV was read, though the decode
    engine has answered.
    """
    is_alive: Callable[[str], Awaitable[bool]]
    """Asks the engine of a URL whether it is healthy."""
    shares: PromptShares
    tokenizing: Tokenizing | None = None
    turns: OpenTurns | None = None
    """None where no decode engine keeps KV for the next turn."""
    templates: EventTemplates = field(default_factory=EventTemplates)
    named_templates: NamedTemplates = field(default_factory=NamedTemplates)
    prefixes: PrefixQuestions | None = None
    """None where nothing asks what engines have in their caches."""
    records: ContinuationRecords | None = None
    """None where no engine goes on with another one's stream."""
    detokenizing: Detokenizing | None = None
    """Makes the text of token ids. None where no engine goes on with another one's stream."""
    derendering: Derendering | None = None
    """Has an engine parse the rest of a chat. None where no engine goes on with another one's
    stream, or not with such a chat.
    """

    def with_ids_of_calls(self, parsed: Parsed) -> Parsed:
        """Return a chat with tools as one whose ids engines are asked for, where they are of
        use.
        """
        derendering = self.derendering
        if (
            derendering is None
            or not self.limits.continuations
            or not derendering.possible(parsed.model)
        ):
            return parsed
        return msgspec.structs.replace(parsed, derenders=True)

    async def ids(
        self,
        parsed: Parsed,
        prompt: Prompt,
        headers: LegHeaders,
        take: TakeBeginning | None = None,
    ) -> TokenIds | None:
        """Return a prompt's token ids, None where they are not wanted or can't be made, or where
        `take` has taken those of the beginning.
        """
        if self.tokenizing is None or prompt.media:
            return None
        if not parsed.route.form.takes_ids and prompt.tokens is None:
            return None
        own = next((value for _, value in headers.authorization), None)
        return await self.tokenizing.ids(parsed, prompt, own, take)

    def ids_to_send(self, url: str, parsed: Parsed, ids: TokenIds | None) -> TokenIds | None:
        """Return the ids that a prefill engine is sent, None where it makes them itself."""
        return ids if self.tokenizing is None else self.tokenizing.check.sent(url, parsed, ids)

    def close(
        self, lease: Lease, verdict: Verdict, relay: Relay | None = None, beside: int = 0
    ) -> None:
        """End a lease. `relay`: that of the answer, if the engine has answered; `beside`: how many
        streams it made at the same time.
        """
        now, tokens = self.now(), None
        pace = self._pace(lease, relay, now) if verdict is GOOD else None
        if relay is not None:
            tokens = _made_tokens(relay)
        self.scheduler.close(lease, verdict, now, pace=pace, tokens=tokens, beside=beside)

    def _pace(self, lease: Lease, relay: Relay | None, now: float) -> float | None:
        """Return the seconds that an engine took for a prompt byte, or for an event; None where
        they can't be compared.

        A placement loads engines unevenly: it may keep one for prefill, and send it answers that
        will be late anyway. And where requests go by what engines have in their caches, one gets
        the cached prompts and another one the new ones.
        """
        if self.states.has_placement:
            return None
        if lease.role is PREFILL:
            comparable = lease.prompt_bytes and not self.states.needs_details
            return (now - lease.since) / lease.prompt_bytes if comparable else None
        if relay is None or relay.fast_path.events < _MIN_EVENTS:
            return None
        return relay.fast_path.total / (relay.fast_path.events - 1)

    def kv_took(self, prefill: str, decode: str, seconds: float) -> None:
        """Count the time of a stream's KV phase, where engines may be compared by it: not where
        requests go by what engines have in their caches.
        """
        if self.states.has_placement or not self.states.needs_details:
            self.scheduler.kv_took(prefill, decode, self.now(), seconds)

    def count(self, failed: Iterable[Lease], transfers: Iterable[FailedTransfer]) -> None:
        """Count failures of legs that are over: only now it is known that they are the engines'."""
        now = self.now()
        for one in transfers:
            self.scheduler.kv_failed(one.prefill, one.decode, one.at, first=one.first)
        for lease in failed:
            self.scheduler.failed(lease, now)

    def unanswered(self, doubtful: DoubtfulFailures) -> None:
        """Count such failures of a request that has ended with the last of them; or note that they
        followed it.
        """
        self.count(*doubtful.unanswered())
        if len(doubtful.engines) > 1:
            now = self.now()
            for url in doubtful.engines:
                if (engine := self.engines.get(url)) is not None:
                    engine.open_legs.doubted = now

    def doubted(self) -> tuple[str, ...]:
        """Return the engines that have failed like others with a request, and have shown no sign
        since.

        A request that has failed elsewhere goes to them last: two that are broken would fail each
        request that they get first.
        """
        return tuple(
            [
                url
                for url, engine in self.engines.items()
                if engine.open_legs.doubted > engine.open_legs.last_sign
            ]
        )

    def suspected(self) -> tuple[str, ...]:
        """Return the engines that have a request under which another one has stood still, perhaps
        because of it.
        """
        return tuple([url for url, engine in self.engines.items() if engine.open_legs.suspects])

    async def retry_slot(self, headers: LegHeaders) -> Slot | None:
        """Wait for a place for one more attempt behind one that has failed. None if none came free
        in time.
        """
        slot = await self.slot(headers)
        if slot is None:
            self.observers.notify(DeadlinePassed(Wait.RETRY.value))
        return slot

    def fingerprint_of(
        self, headers: LegHeaders, fields: Fields, known: Fingerprint | None
    ) -> Fingerprint | None:
        """Return a request's fingerprint, None where its fields were dropped before anything had
        asked for it. `known`: its fingerprint, if it was computed before.
        """
        return known or (self.fingerprint(headers.path, fields) if fields else None)

    def cleared(self, headers: LegHeaders, fingerprint: Fingerprint | None, *, whole: bool) -> None:
        """Note an answer, which may be to a known suspect. `whole`: as of `Losses.answered`."""
        if self.suspects.know(fingerprint, headers.client):
            self.lost.answered(headers.client, fingerprint, whole=whole)

    def not_retried(self) -> OverloadedError:
        """Return the error of a request whose engine has failed and that found no such place."""
        text = "an engine failed, and too many requests are being tried again"
        return OverloadedError(text, RefusalReason.RETRY_BUDGET, retry_after=self.deadlines.retry)

    def report_failure(
        self, headers: LegHeaders, engine: str, phase: str, error: EngineError, *, will_retry: bool
    ) -> None:
        """Report a leg that failed, with the engine's own words as far as they may be shown."""
        status, text = None, error.message
        if isinstance(error, EngineRefusedError):
            status = error.status
            said = error_text(error.body) if len(error.body) <= _MAX_ERROR else ""
            if words := engine_words(said):
                text += f": {words}"
        self.observers.notify(
            LegFailed(headers.request_id, engine, phase, text, will_retry, status)
        )


def _made_tokens(relay: Relay) -> int | None:
    """Return how many tokens an engine has made for the client, None where its answer does not show
    it.
    """
    if relay.usage is not None and relay.usage.completion_tokens is not None:
        return relay.usage.completion_tokens
    return relay.fast_path.tokens or relay.fast_path.events or None


class LegHeaders(msgspec.Struct, frozen=True):
    """What every leg of one request carries: its id, its path and the headers that are forwarded.
    `hints` are for the proxy.

    `salt`: of its tenant's caches, None where tenants share them. `client`: the name of its client;
    `lost`: the engines that were lost under it (`scheduling.losses.RequestAtRisk`).
    """

    request_id: str
    path: str
    headers: tuple[tuple[bytes, bytes], ...]
    authorization: tuple[tuple[bytes, bytes], ...]
    hints: Hints = NO_HINTS
    salt: TenantSalt | None = None
    client: bytes | str = ""
    lost: list[LostUnder] = []

    def shown_id(self, parsed: Parsed) -> str:
        """Return the id that a plain engine's answer shows: the client's, or one that is made."""
        if (prefix := parsed.route.form.body_id_prefix) is not None:
            return body_request_id(parsed.fields) or f"{prefix}{mint()}"
        return next(
            (value.decode("ascii") for name, value in self.headers if name == b"x-request-id"),
            self.request_id,
        )

    def named(self, leg_id: str) -> tuple[tuple[bytes, bytes], ...]:
        """Return the headers for a leg with an id of its own."""
        return tuple(
            (name, leg_id.encode() if name == b"x-request-id" else value)
            for name, value in self.headers
        )
