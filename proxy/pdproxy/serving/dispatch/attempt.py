"""The engines that are leased for one attempt, what the scheduler is asked for them, and what is
taken for them.

Owns the leases, a name for the prefill leg, space, notices and custody, until a leg, a custody or
the custodian takes them over. Each attempt is closed once, whatever its outcome.
"""

from __future__ import annotations

import msgspec
from msgspec import structs

from pdproxy.kit.errors import EngineTimeoutError, Wait
from pdproxy.kit.ids import mint
from pdproxy.scheduling.leases import Assignment, Lease, Verdict
from pdproxy.scheduling.policy import Ask
from pdproxy.serving.dispatch.prefixes import reporting
from pdproxy.serving.dispatch.prompt_request import PromptRequest
from pdproxy.serving.dispatch.recovery import CannotSplit, Failed
from pdproxy.serving.dispatch.resources import ExchangeResources
from pdproxy.serving.dispatch.whole_prompts import known_tokens, spares_decode
from pdproxy.serving.kv.custody import Custody, End
from pdproxy.serving.kv.orphans import PrefillRecord
from pdproxy.serving.kv.ready import ExpectedNotices
from pdproxy.transfer.contract import NO_DISPATCH, Contract, Dispatch, minted_id
from pdproxy.transfer.encoders import PARAMS
from pdproxy.wire.cache_salt import session_within
from pdproxy.wire.engine import Usage
from pdproxy.wire.fields import is_absent
from pdproxy.wire.request import Parsed, limit_of
from pdproxy.wire.route_form import Alone


class Attempt:
    """One attempt. `assignment` holds the leased engines: the last one answers the client."""

    __slots__ = (
        "_compares_caches",
        "_expected",
        "_expected_is_custodys",
        "_resources",
        "_space",
        "_unused",
        "assignment",
        "custody",
        "dispatch",
        "loading_since",
        "shared_id",
        "shown_id",
        "told",
    )

    def __init__(
        self,
        resources: ExchangeResources,
        request: PromptRequest,
        assignment: Assignment,
    ) -> None:
        """Make one, with what the contract needs for its engines."""
        self._resources = resources
        self.assignment = assignment
        self.dispatch = NO_DISPATCH
        self.shared_id: str | None = None
        """The id that both legs have, None if the answering leg has the client's."""
        self.shown_id = ""
        """The id that the answer shows in its place."""
        self.custody: Custody | None = None
        self.told: bytes | None = None
        """What the engine that computes the prompt is told of its encoded media, as JSON."""
        self.loading_since = 0.0
        """When the answering engine was asked to load the KV for the client's own request, in
        seconds of the clock; 0: it was not.
        """
        self._unused = list(assignment.leases)
        self._space = assignment.space
        self._compares_caches = assignment.leases[0].expected
        self._expected: ExpectedNotices | None = None
        self._expected_is_custodys = False
        if len(self._unused) > 1:
            contract = resources.transfer.contract
            if contract.needs_leg_id:
                self._name(contract, request)
            elif request.ids is not None or request.key is not None:
                self.dispatch = Dispatch(ids=request.ids, compares_ids=request.key is not None)

    def __repr__(self) -> str:
        urls = " -> ".join(lease.engine.url for lease in self.assignment.leases)
        return f"<Attempt {urls}, {self._expected or 'no notices'}>"

    @property
    def answering_url(self) -> str:
        """The engine that answers the client."""
        return self.assignment.leases[-1].engine.url

    @property
    def prefill_url(self) -> str | None:
        """The prefill engine, None if one engine serves alone."""
        leases = self.assignment.leases
        return leases[0].engine.url if len(leases) > 1 else None

    def take(self, lease: Lease) -> None:
        """Pass one of the leases to the leg that uses it. That leg closes the lease."""
        self._unused.remove(lease)

    def loaded(self, lease: Lease, since: float) -> None:
        """The answering engine has the prompt's KV in its prefix cache: it was asked for that
        `since` then. The client's own request is next, under the same lease.
        """
        self._unused.append(lease)
        self.loading_since = since
        self._compares_caches = False  # what was expected was of the cache before

    # -- the legs' id, and notices

    def _name(self, contract: Contract, request: PromptRequest) -> None:
        """Give the prefill leg an id of its own, and begin the wait for its notices."""
        try:
            dispatch = self.dispatch = self._named_dispatch(contract, request)
            self.shared_id = dispatch.leg_id if contract.decode_has_leg_id else None
            ranks = 1 if contract.early else contract.notices(dispatch)
            if ranks != 0 and dispatch.leg_id is not None:
                self._expected = self._resources.transfer.ready.expect(dispatch.leg_id, ranks)
        except BaseException:
            self.close()
            raise

    def _named_dispatch(self, contract: Contract, request: PromptRequest) -> Dispatch:
        known = self._resources.engines.known
        decode = known[self.answering_url]
        # With the length of the client's id, which answers will show in its place: see
        # `stream.id_sink`.
        keeps_length = contract.decode_has_leg_id and contract.leg_id is minted_id
        self.shown_id = request.headers.shown_id(request.parsed)
        minted = mint(len(self.shown_id)) if keeps_length else mint()
        dispatch = Dispatch(
            minted,
            request.ids,
            receiver=decode.receiver,
            compares_ids=request.key is not None,
        )
        if contract.capabilities.peers_from is not None and self.prefill_url is not None:
            prefill_peer = known[self.prefill_url].run.peers.take_turn()
            decode_peer = decode.run.peers.take_turn()
            dispatch = structs.replace(dispatch, prefill_peer=prefill_peer, decode_peer=decode_peer)
        named = contract.leg_id(minted, dispatch)
        return dispatch if named is minted else structs.replace(dispatch, leg_id=named)

    @property
    def handle_notice(self) -> ExpectedNotices | None:
        """The wait for a notice that may bring the handle before the prefill engine's answer, None
        if none may.
        """
        return self._expected if self._resources.transfer.contract.early else None

    @property
    def awaits_notices(self) -> bool:
        """Whether each rank of the prefill engine reports that the KV is there before the decode
        engine is asked.
        """
        return self._expected is not None and not self._resources.transfer.contract.early

    async def kv_ready(self, request: PromptRequest) -> CannotSplit | Failed | None:
        """Wait for these reports. Return None then, and also if the decode engine may be asked
        without them.
        """
        resources, contract = self._resources, self._resources.transfer.contract
        assert self._expected is not None
        prefill_url, timeout = self.prefill_url or "", resources.deadlines.kv_ready
        if await resources.transfer.ready.wait(self._expected, timeout, prefill_url):
            return None
        resources.scheduler.kv_failed(
            prefill_url, self.answering_url, resources.now(), first=request.kv_failed()
        )
        if not resources.transfer.recomputes:
            message = f"{prefill_url} did not report in {timeout:g} s that the KV is ready"
            return Failed(EngineTimeoutError(message, wait=Wait.KV_READY))
        if contract.holder.late_kv_may_be_read:
            return None
        # A part of what was pushed may be there, and must not be read: another decode engine
        # computes the prompt.
        if self.custody is not None:
            self.custody.end(End.LOST)
        return CannotSplit(Alone.KV_LATE, exclude=self.answering_url)

    # -- what engines have in their caches

    def parsed_for(self, url: str, parsed: Parsed) -> Parsed:
        """Return the request as the engine gets it that computes the prompt: it may be told where
        encoded media are, and asked to report what it reuses from its cache.
        """
        if self.told is not None and url == self.assignment.leases[0].engine.url:
            fields = parsed.fields | {PARAMS: msgspec.Raw(self.told)}
            parsed = structs.replace(parsed, fields=fields)
        return reporting(parsed) if self._is_to_report(url) else parsed

    def _is_to_report(self, url: str) -> bool:
        """Return whether an engine is asked to report what it reuses from its cache."""
        computes = self.assignment.leases[0]
        return computes.reports and computes.engine.url == url and self._compares_caches

    def added_is_refused(self, url: str) -> bool:
        """Note a 400 of an engine. Return whether it may be due to what was added to the request
        for it; it is added no more.
        """
        if found := self._is_to_report(url):
            self._resources.scheduler.refuses_reports(url)
        return found

    def counted(self, lease: Lease, usage: Usage | None) -> None:
        """Tell how long the prompt is by an engine's own answer, and what it has found in its
        cache, if something was expected of that.
        """
        if usage is None:
            return
        details = usage.prompt_tokens_details if self._compares_caches else None
        cached = None if details is None else details.cached_tokens
        self._resources.scheduler.counted(lease, usage.prompt_tokens, cached)

    # -- custody

    def hand_on(self, record: PrefillRecord) -> PrefillRecord:
        """Return the record with the wait for notices and the space. The custodian ends both: P may
        still push.
        """
        handed = structs.replace(record, expected=self._expected, space=self._space)
        self._expected = self._space = None
        return handed

    def with_notices(self, record: PrefillRecord) -> PrefillRecord:
        """Return the record with the wait for notices, which ends with this attempt: one that has
        come may name KV.
        """
        return structs.replace(record, expected=self._expected)

    def keep(self, custody: Custody) -> None:
        """Keep the custody of the KV. The space that the KV takes is released when its custody
        ends.
        """
        self.custody = custody
        space, self._space = self._space, None
        if space is not None:
            custody.when_over(space.release)
        if self._expected is not None and custody.state is not None:
            custody.expected = self._expected
            self._expected_is_custodys = True

    def close(self) -> None:
        """End what no leg and no custody has taken over."""
        for lease in self._unused:
            self._resources.close(lease, Verdict.NEUTRAL)
        if self._expected is not None and not self._expected_is_custodys:
            self._expected.close()
        if self._space is not None:
            self._space.release()
        if self.custody is not None:
            self.custody.release()  # whatever has not ended by now


MAX_LIMIT = 1 << 31
"""Tokens of an answer: a limit beyond them is none."""
MAX_USER = 256
"""Bytes of a body's `user` that name a session. What follows makes no other session."""
# -- what the scheduler is asked


def ask_of(resources: ExchangeResources, request: PromptRequest, why_alone: Alone | None) -> Ask:
    """Return what the scheduler is asked for one attempt. `why_alone`: why the prompt can't be
    split, None if it can.
    """
    parsed, prompt, states = request.parsed, request.prompt, resources.states
    is_alone, spares = why_alone is not None, False
    if states.has_placement or is_alone:
        spares = spares_decode(resources, request, why_alone)
    # as prefill load: a placement compares texts; what one engine serves anyway is a whole body
    size = parsed.body_bytes
    if prompt is not None and (states.has_placement or not is_alone):
        size = prompt.text_bytes or size
    tokens = None if request.ids is None else request.ids.count
    ask = Ask(parsed.model, size, resources.now(), tokens, spares)
    return _detailed(ask, request) if states.needs_details else ask


def _detailed(ask: Ask, request: PromptRequest) -> Ask:
    """Return an ask with what only some policies and placements need."""
    hints, parsed = request.headers.hints, request.parsed
    session = hints.session
    if session is None and not is_absent(fields := parsed.fields, "user"):
        session = bytes(memoryview(fields["user"])[:MAX_USER]).decode("latin-1")
    return Ask(
        ask.model,
        ask.prompt_bytes,
        ask.now,
        _about(request),
        ask.spares_decode,
        session=session_within(request.headers.salt, session),
        slo=hints.slo,
        beginning=request.beginning,
        limit=None if (limit := limit_of(parsed)) is None else min(limit, MAX_LIMIT),
        is_silent=parsed.starts_in_silence,
    )


def _about(request: PromptRequest) -> int | None:
    """Return how many tokens a prompt has, by an estimate as long as its first ids alone are
    known.
    """
    beginning = request.beginning
    if request.ids is None and beginning is not None and not beginning.of_text:
        return beginning.tokens
    return known_tokens(request)


def why_not_split(resources: ExchangeResources, request: PromptRequest) -> Alone | None:
    """Return why a prompt can't be split, as far as its token ids show; None if nothing is against
    it.
    """
    ids, transfer = request.ids, resources.transfer
    if ids is None:
        return Alone.NO_TOKENS
    if ids.count < transfer.contract.min_tokens(request.parsed):
        return Alone.SHORT_PROMPT
    return None if resources.scheduler.fits(ids.count) else Alone.KV_BUFFER
