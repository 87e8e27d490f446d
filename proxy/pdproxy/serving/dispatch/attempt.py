"""One attempt to serve a prompt: the engines that are leased for it, and what is taken for it before its first leg.

Owns the leases that no leg has taken, space in the decode engine's receive buffer, the wait for notices, and custody of the
KV. Every retry is another attempt. Each attempt is closed once, whatever its outcome.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from msgspec import structs

from pdproxy.fleet.open_legs import OpenLegs
from pdproxy.kit.errors import EngineError, EngineTimeoutError, Wait
from pdproxy.kit.ids import mint
from pdproxy.kit.one_shot_event import OneShotEvent
from pdproxy.scheduling.leases import Assignment, Lease, Verdict
from pdproxy.scheduling.nodes import PREFILL, Role
from pdproxy.scheduling.prefix.knowledge import Prediction
from pdproxy.serving.dispatch.prefixes import of_engine, reporting
from pdproxy.serving.dispatch.prompt_request import PromptRequest
from pdproxy.serving.dispatch.record import Record
from pdproxy.serving.dispatch.recovery import CannotSplit, Failed, Outcome
from pdproxy.serving.dispatch.resources import ExchangeResources
from pdproxy.serving.dispatch.retry_budget import RetrySlot
from pdproxy.serving.kv.buffers import BufferSpace
from pdproxy.serving.kv.custody import Custody, End
from pdproxy.serving.kv.orphans import PrefillRecord
from pdproxy.serving.kv.ready import Expected
from pdproxy.serving.stream.beginning import UNKNOWN
from pdproxy.serving.stream.relay import Relay
from pdproxy.transfer.contract import NO_DISPATCH, Contract, Dispatch, minted_id
from pdproxy.wire.continuable import Reason
from pdproxy.wire.engine import Usage
from pdproxy.wire.request import Alone, Parsed


class Attempt:
    """One attempt. `assignment` holds the leased engines: the last one answers the client."""

    __slots__ = (
        "_expected",
        "_expected_is_custodys",
        "_predictions",
        "_space",
        "_suspected",
        "_unused",
        "asked_url",
        "assignment",
        "custody",
        "decode_s",
        "dispatch",
        "first_s",
        "kv_made_at",
        "overlap_s",
        "prefill_over",
        "prefill_s",
        "relay",
        "request",
        "resources",
        "retry_slot",
        "shared_id",
        "whole_s",
    )

    def __init__(
        self,
        resources: ExchangeResources,
        request: PromptRequest,
        assignment: Assignment,
        space: BufferSpace | None = None,
    ) -> None:
        self.resources = resources
        self.request = request
        self.assignment = assignment
        self.dispatch = NO_DISPATCH
        self.shared_id: str | None = None
        """The id that both legs have, None if the answering leg has the client's."""
        self.asked_url: str | None = None
        """The engine that was asked to answer the client, None before."""
        self.custody: Custody | None = None
        self.retry_slot: RetrySlot | None = None
        """The place of an attempt behind the first one, until its first data."""
        self.relay: Relay | None = None
        self.prefill_s: float | None = None
        self.overlap_s: float | None = None
        self.prefill_over: OneShotEvent | None = None
        """Set once the prefill leg is over, if it runs beside the decode leg."""
        self.kv_made_at = 0.0
        """When the prefill engine has answered, if the decode engine was asked before that; monotonic seconds, else 0."""
        self.first_s: float | None = None
        self.decode_s: float | None = None
        self.whole_s: float | None = None
        self._unused = list(assignment.leases)
        self._space = space
        self._predictions: tuple[Prediction, ...] = ()
        self._suspected: tuple[OpenLegs, ...] = ()
        self._expected: Expected | None = None
        self._expected_is_custodys = False

    def __repr__(self) -> str:
        urls = " -> ".join(lease.node.url for lease in self.assignment.leases)
        return f"<Attempt {urls}, {self.relay!r}, {self._expected or 'no notices'}>"

    @property
    def answering_url(self) -> str:
        """The engine that answers the client."""
        return self.assignment.leases[-1].node.url

    @property
    def prefill_url(self) -> str | None:
        """The prefill engine, None if one engine serves alone."""
        lease = self.assignment.leases[0]
        return lease.node.url if lease.role is PREFILL else None

    def prepare(self) -> None:
        """Make what the contract needs for these engines: an id for the prefill leg, and a wait for its notices."""
        resources, ids = self.resources, self.request.ids
        contract = resources.transfer.contract
        if contract.needs_leg_id:
            dispatch = self.dispatch = self._named_dispatch(contract)
            self.shared_id = dispatch.leg_id if contract.decode_has_leg_id else None
            ranks = 1 if contract.early else contract.notices(dispatch)
            if ranks != 0 and dispatch.leg_id is not None:
                self._expected = resources.transfer.ready.expect(dispatch.leg_id, ranks)
        elif ids is not None:
            self.dispatch = Dispatch(ids=ids)

    def _named_dispatch(self, contract: Contract) -> Dispatch:
        """Return the dispatch of legs with an id of their own."""
        known = self.resources.engines.known
        decode = known[self.answering_url]
        # With the length of the client's id, which answers will show in its place: see `stream.id_sink`.
        keeps_length = contract.decode_has_leg_id and contract.leg_id is minted_id
        minted = mint(len(self.request.headers.shown_id)) if keeps_length else mint()
        dispatch = Dispatch(minted, self.request.ids, receiver=decode.receiver)
        if contract.capabilities.peers_from is not None and self.prefill_url is not None:
            prefill_peer = known[self.prefill_url].run.peers.take_turn()
            decode_peer = decode.run.peers.take_turn()
            dispatch = structs.replace(dispatch, prefill_peer=prefill_peer, decode_peer=decode_peer)
        named = contract.leg_id(minted, dispatch)
        return dispatch if named is minted else structs.replace(dispatch, leg_id=named)

    def take(self, lease: Lease) -> None:
        """Pass one of the leases to the leg that uses it. That leg closes the lease."""
        self._unused.remove(lease)

    def suspect(self) -> None:
        """Note at its engines, until its data, that the request may stop them: another one has stood still under it."""
        known = self.resources.engines.known
        self._suspected = tuple(known[lease.node.url].open_legs for lease in self.assignment.leases)
        for open_legs in self._suspected:
            open_legs.suspects += 1

    def broke(
        self,
        lease: Lease,
        error: EngineError,
        since: float | None = None,
        *,
        streamed: bool = False,
        beside: bool = False,
    ) -> None:
        """Note that a leg has failed: its engine may be lost. See `EnginesLost.broke`. `since` None: as the lease."""
        since = lease.since if since is None else since
        lost, headers = self.resources.lost, self.request.headers
        may_be_lost = lost.broke(headers, lease.node, error, since, streamed=streamed, beside=beside)
        if may_be_lost and self.retry_slot is not None:
            # The permit ends by its time, not with this attempt: the loss is judged before the next request begins.
            self.retry_slot.permit = None

    # -- what engines have in their caches

    def sent(self) -> None:
        """Note that the prompt is sent to the engines of this attempt."""
        prefixes, beginning = self.resources.prefixes, self.request.beginning
        if prefixes is not None and beginning is not None:
            self._predictions = prefixes.routed(beginning, self.assignment)

    def parsed_for(self, url: str, parsed: Parsed) -> Parsed:
        """Return the request as an engine gets it: it may be asked to report what it reuses from its cache."""
        if self._predictions and (found := of_engine(self._predictions, url)) is not None and found.refreshes:
            return reporting(parsed)
        return parsed

    def added_is_refused(self, url: str) -> bool:
        """Note a 400 of an engine. Return whether it may be due to what was added to the request for it; it is added no more."""
        found = of_engine(self._predictions, url)
        if found is None or not found.refreshes or self.resources.prefixes is None:
            return False
        self.resources.prefixes.knowledge.refreshing.refuses(url)
        return True

    def cached(self, url: str, usage: Usage | None) -> None:
        """Compare what was expected of an engine's cache with what its own answer says."""
        found = of_engine(self._predictions, url) if self._predictions else None
        if found is not None and usage is not None and usage.prompt_tokens_details is not None:
            assert self.resources.prefixes is not None
            self.resources.prefixes.answered(found, usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens)

    # -- notices

    @property
    def handle_notice(self) -> Expected | None:
        """The wait for a notice that may bring the handle before the prefill engine's answer, None if none may."""
        return self._expected if self.resources.transfer.contract.early else None

    async def kv_ready(self) -> Outcome | None:
        """Wait until each rank has reported that the KV is there.

        Return None then, and also if the decode engine may be asked without the notices.
        """
        resources, contract = self.resources, self.resources.transfer.contract
        if self._expected is None or contract.early:
            return None
        prefill_url, timeout = self.prefill_url or "", resources.deadlines.kv_ready
        if await resources.transfer.ready.wait(self._expected, timeout, prefill_url):
            return None
        self.request.kv_failed, first = True, not self.request.kv_failed
        resources.transfers.failed(prefill_url, self.answering_url, first=first)
        if not resources.transfer.recomputes:
            message = f"{prefill_url} did not report in {timeout:g} s that the KV is ready"
            return Failed(EngineTimeoutError(message, wait=Wait.KV_READY))
        if contract.holder.late_kv_may_be_read:
            return None
        # A part of what was pushed may be there, and must not be read: another decode engine computes the prompt.
        if self.custody is not None:
            self.custody.end(End.LOST)
        return CannotSplit(Alone.KV_LATE, exclude=self.answering_url)

    # -- custody

    def hand_on(self, record: PrefillRecord) -> PrefillRecord:
        """Return the record with the wait for notices and the space. The custodian ends both: P may still push."""
        handed = structs.replace(record, expected=self._expected, space=self._space)
        self._expected = self._space = None
        return handed

    def with_notices(self, record: PrefillRecord) -> PrefillRecord:
        """Return the record with the wait for notices, which ends with this attempt: one that has come may name KV."""
        return structs.replace(record, expected=self._expected)

    def keep(self, custody: Custody) -> None:
        """Keep the custody of the KV. The space that the KV takes is released when its custody ends."""
        self.custody = custody
        space, self._space = self._space, None
        if space is not None:
            custody.when_over(space.release)
        if custody.state is not None:
            custody.expected = self._expected
            self._expected_is_custodys = True

    def stream_flows(self) -> None:
        """Drop what only another attempt would need: the client's request, and the prompt's ids. Plan what is kept instead."""
        request, records = self.request, self.resources.records
        if (lost := self.resources.lost).remembers:
            request.fingerprint = lost.began(request.headers, request.parsed.fields, request.fingerprint)
        if records is not None:
            none_left = request.left < 1
            request.record = Reason.NONE_LEFT if none_left else records.planned(request.parsed, request.new_relay)
        request.drop()
        self.dispatch = NO_DISPATCH
        self._leave_slot()

    def _leave_slot(self) -> None:
        if self.retry_slot is not None:
            self.retry_slot.leave()
            self.retry_slot = None
        if self._suspected:
            for open_legs in self._suspected:
                open_legs.suspects -= 1
            self._suspected = ()

    def keep_record(self) -> None:
        """Keep what another engine needs to go on with the stream, which flows now."""
        record, records, relay = self.request.record, self.resources.records, self.relay
        if relay is None:
            return
        begun, relay.beginning = relay.beginning, UNKNOWN
        if records is None or not isinstance(record, Record):
            return
        record.is_parsed = begun.is_parsed
        self.request.record = records.keep(record, begun.prompt_ids)

    def close(self) -> None:
        """End what no leg and no custody has taken over."""
        self._leave_slot()
        for lease in self._unused:
            self.resources.close(lease, Verdict.NEUTRAL)
        if self._expected is not None and not self._expected_is_custodys:
            self._expected.close()
        if self._space is not None:
            self._space.release()
        if self.custody is not None:
            self.custody.release()  # whatever has not ended by now


Stage = Callable[[Attempt], Awaitable[Outcome | None]]
"""One step of an attempt: a leg or a wait. It returns an outcome, or None if the next stage follows."""


@dataclass(frozen=True, slots=True)
class Order:
    """Which engines an attempt takes, and the order of its legs: the stages run one after the other, until one has an outcome.

    `roles`: one engine of each role is leased; the last one answers the client. Empty: any one engine that can serve alone is
    leased.
    """

    roles: tuple[Role, ...]
    stages: tuple[Stage, ...]
