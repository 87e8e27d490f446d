"""One prompt as its legs see it: what engines are asked, where the answer goes, and what is known
of it so far.

`dispatch.exchange` takes the prompt through its attempts. Each leg reads here what it needs, and
notes here what came of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pdproxy.fleet.open_legs import OpenLegs
from pdproxy.kit.errors import EngineError
from pdproxy.observe.events import LegTimes
from pdproxy.scheduling.leases import Assignment, Lease
from pdproxy.scheduling.losses import SOON, Fingerprint, Slot, Turn
from pdproxy.scheduling.prefix.prompts import PromptBeginning
from pdproxy.serving.dispatch.broken_legs import broke
from pdproxy.serving.dispatch.doubtful_failures import DoubtfulFailures
from pdproxy.serving.dispatch.record import Record
from pdproxy.serving.dispatch.resources import ExchangeResources, LegHeaders
from pdproxy.serving.kv.custody import Custody
from pdproxy.serving.stream.beginning import UNKNOWN
from pdproxy.serving.stream.relay import Relay
from pdproxy.serving.stream.response_writer import ResponseWriter
from pdproxy.tokens.ids import TokenIds
from pdproxy.transfer.bodies import loading
from pdproxy.transfer.encoders import EncodedMedia
from pdproxy.wire.continuable import NotContinued
from pdproxy.wire.request import Parsed
from pdproxy.wire.route import Route
from pdproxy.wire.route_form import Prompt


def _no_relay() -> Relay:
    raise RuntimeError("the request was dropped")


def _no_writer(_: Relay) -> ResponseWriter:
    raise RuntimeError("the request was dropped")


class PromptRequest:
    """One prompt; or, with `prompt` None, a whole request for one engine alone.

    Once a stream flows, no engine needs the client's body any more, and it is dropped. So nothing
    else may refer to its parts.
    """

    __slots__ = (
        "_own",
        "_suspects",
        "assignment",
        "beginning",
        "doubtful",
        "encoded",
        "fingerprint",
        "headers",
        "ids",
        "key",
        "later",
        "left",
        "loads",
        "may_be_answered",
        "new_relay",
        "parsed",
        "permit",
        "prefilled",
        "prompt",
        "record",
        "relay",
        "resources",
        "slot",
        "stalled",
        "stream_to",
        "tried",
    )

    def __init__(
        self,
        resources: ExchangeResources,
        parsed: Parsed,
        prompt: Prompt | None,
        headers: LegHeaders,
        new_relay: Callable[[], Relay],
        left: int,
    ) -> None:
        self.resources = resources
        self.parsed = parsed
        self.prompt = prompt
        self.headers = headers
        self.new_relay = new_relay
        self.stream_to: Callable[[Relay], ResponseWriter] = _no_writer
        """Returns the writer for a relay's stream."""
        self.loads = False
        """Whether the legs only load the prompt's KV: see `begin_loading`."""
        self._own: tuple[Parsed, Callable[[], Relay]] | None = None
        """The request and its relays, while the legs only load."""
        self.ids: TokenIds | None = None
        """The prompt's token ids, None while they are not known."""
        self.key: bytes | None = None
        """What finds the turn that the prompt continues (`dispatch.turn`), None if that is not
        known or not wanted.
        """
        self.beginning: PromptBeginning | None = None
        """What indexes of engines' caches know the prompt by, None if nothing asks them."""
        self.encoded: EncodedMedia | None = None
        """What encoder engines have made of its media, None before they were asked."""
        self.left = left
        """How often other engines may still go on with the stream."""
        self.record: Record | NotContinued | None = None
        """What others need to go on with the stream, or why they can't; None before the stream
        flows, or if that is off.
        """
        self.stalled = 0
        """How many engines have stood still under the prompt so far, perhaps because of it."""
        self.doubtful: DoubtfulFailures | None = None
        """Failures of engines that it may have caused, until it is answered; None while there are
        none.
        """
        self.fingerprint: Fingerprint | None = None
        """None while nothing asks for it (`scheduling.losses`)."""
        self.permit: Turn | None = None
        """While requests of its client, or like it, take turns: its own turn."""
        self.slot: Slot | None = None
        """The place of an attempt behind the first one, until its first data."""
        self._suspects: tuple[OpenLegs, ...] = ()
        # -- what came of it
        self.assignment: Assignment | None = None
        """The engines of the last attempt; the last of them answers the client."""
        self.tried = LegTimes()
        """The legs of the last attempt so far."""
        self.relay: Relay | None = None
        """The relay of the last attempt's answer, None before an engine was asked for it."""
        self.prefilled = 0
        """Tokens of the prompt, as the last prefill engine that has made its KV reported them; 0:
        none has.
        """
        self.later: Custody | None = None
        """KV that the prefill engine still computes behind the end of the exchange, None if it
        computes none.
        """
        self.may_be_answered = False
        """Whether an engine may have begun with the answer, in the last attempt: it was asked, and
        its KV was made.
        """

    @property
    def is_dropped(self) -> bool:
        """Whether no further leg may be made from it."""
        return self.parsed is _DROPPED

    @property
    def is_of_use(self) -> bool:
        """Whether the record is still of use while another engine goes on: what that engine makes
        is parsed with it.
        """
        return isinstance(self.record, Record) and self.record.chat != b""

    def drop(self) -> None:
        """Drop everything but the headers and the record. No further leg may be made from it."""
        self.parsed, self.prompt, self.new_relay, self.stream_to, self.ids = (
            _DROPPED,
            None,
            _no_relay,
            _no_writer,
            None,
        )
        self.key = self.beginning = self.encoded = None

    # -- the attempt under way

    def begin_loading(self) -> None:
        """Have the legs load the prompt's KV alone, until `end_loading`: nothing of their answers
        is for the client.
        """
        resources = self.resources
        self._own = self.parsed, self.new_relay
        self.parsed, self.loads = loading(self.parsed), True
        self.new_relay = partial(
            Relay,
            wants_usage=False,
            budget=resources.answer_budget,
            templates=resources.templates,
            now=resources.now,
        )

    def end_loading(self) -> None:
        """Have the legs serve the client's own request again."""
        assert self._own is not None
        (self.parsed, self.new_relay), self._own, self.loads = self._own, None, False

    def suspect(self, assignment: Assignment) -> None:
        """Note at engines, until their data, that the prompt may stop them: another one has stood
        still under it.
        """
        known = self.resources.engines.known
        self._suspects = tuple(known[lease.engine.url].open_legs for lease in assignment.leases)
        for open_legs in self._suspects:
            open_legs.suspects += 1

    def leave_slot(self) -> None:
        """The attempt has its first data, or is over: others may be tried again."""
        if self.slot is not None:
            self.slot.leave()
            self.slot = None
        if self._suspects:
            for open_legs in self._suspects:
                open_legs.suspects -= 1
            self._suspects = ()

    def sent(self) -> None:
        """The engine that answers is asked: its turn ends a moment later."""
        if self.permit is not None:
            self.permit.leave_in(SOON)

    def broke(
        self,
        lease: Lease,
        error: EngineError,
        since: float | None = None,
        *,
        streamed: bool = False,
        beside: bool = False,
    ) -> None:
        """Note that a leg has failed: its engine may be lost. See `broken_legs.broke`.
        `since` None: as the lease.
        """
        since = lease.since if since is None else since
        lost, sender = self.resources.lost, self.headers
        may_be_lost = broke(
            lost, sender, lease.engine, error, since, streamed=streamed, beside=beside
        )
        if may_be_lost and self.slot is not None:
            self.slot.lost()
        if may_be_lost and self.permit is not None:
            self.permit.leave_in(SOON, harmless=False)  # unless it is tried again before

    def note_fingerprint(self) -> None:
        """Make the fingerprint, unless that was done, or what it is made of was dropped."""
        self.fingerprint = self.resources.fingerprint_of(
            self.headers, self.parsed.fields, self.fingerprint
        )

    def in_doubt(self) -> DoubtfulFailures:
        """Return the failures that it may have caused, to note another one."""
        if self.doubtful is None:
            self.doubtful = DoubtfulFailures()
        return self.doubtful

    def kv_failed(self) -> bool:
        """Note that its KV was not made, or not moved. Return whether it is the first time, which
        alone counts.
        """
        doubtful = self.in_doubt()
        first, doubtful.kv_failed = not doubtful.kv_failed, True
        return first

    def answered_well(self) -> None:
        """Count what has failed before: another engine has answered it, so that it was not the
        cause.
        """
        doubtful, self.doubtful = self.doubtful, None
        if doubtful is not None:
            self.resources.count(*doubtful.answered())

    # -- while the stream flows

    def stream_flows(self) -> None:
        """Drop what only another attempt would need. Plan what is kept instead."""
        resources = self.resources
        records = resources.records
        if resources.suspects.remembers:
            self.note_fingerprint()  # what it is made of is dropped now
            resources.cleared(self.headers, self.fingerprint, whole=False)
        if records is not None:
            self.record = (
                NotContinued.NONE_LEFT
                if self.left < 1
                else records.planned(self.parsed, self.new_relay)
            )
        self.drop()
        self.leave_slot()

    def keep_record(self) -> None:
        """Keep what another engine needs to go on with the stream, which flows now."""
        record, records, relay = self.record, self.resources.records, self.relay
        if relay is None:
            return
        begun, relay.beginning = relay.beginning, UNKNOWN
        if records is None or not isinstance(record, Record):
            return
        record.is_parsed = begun.is_parsed
        self.record = records.keep(record, begun.prompt_ids)

    def drop_record(self) -> None:
        """Keep that no more."""
        record, self.record = self.record, None
        if isinstance(record, Record) and (records := self.resources.records) is not None:
            records.drop(record)


_DROPPED = Parsed(Route.COMPLETIONS, {}, None, True, False, False, (), None, 0)
