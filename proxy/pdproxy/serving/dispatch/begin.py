"""The beginning of an attempt: the engines that are leased for it, one or a pair, or as the pool's placement chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdproxy.kit.errors import TooLateError
from pdproxy.observe.description import Label, counter
from pdproxy.observe.events import Decided
from pdproxy.scheduling.leases import Assignment, Verdict
from pdproxy.scheduling.nodes import Role
from pdproxy.scheduling.policy import Ask
from pdproxy.serving.dispatch.attempt import Attempt
from pdproxy.serving.dispatch.decisions import LATE, REFUSED, SPLIT, WHOLE, Decision
from pdproxy.serving.dispatch.prompt_request import PromptRequest
from pdproxy.serving.dispatch.resources import ExchangeResources
from pdproxy.serving.dispatch.whole_prompts import known_tokens, spares_decode
from pdproxy.serving.kv.buffers import BufferSpace
from pdproxy.wire.cache_salt import session_within
from pdproxy.wire.fields import is_absent
from pdproxy.wire.request import Alone

PAIR = (Role.PREFILL, Role.DECODE)
"""The roles that a split prompt needs an engine of. The last one answers the client."""
MAX_USER = 256
"""Bytes of a body's `user` that name a session. What follows makes no other session."""
CHOICES = (
    ("whole", "one engine serves the request"),
    ("split", "a prefill and a decode engine share the work"),
    ("refused", "503: no engine can serve it in time (policy.refuse_late)"),
)
MAX_REASONS = 32
"""How many reasons are labels. Further ones are counted as "other": a placement has a few."""
DECISIONS = counter(
    "pdproxy_decisions_total",
    "decisions",
    "Decisions of the pool's placement (policy.placement); a request has one for each attempt",
    Label("choice", CHOICES),
    Label("reason", text="the placement's reason, one of a few words of its own; or late", most=MAX_REASONS),
    of=Decided,
)


def begin(
    resources: ExchangeResources,
    request: PromptRequest,
    why_alone: Alone | None,
    without: Sequence[str],
    avoid: Sequence[str],
) -> Attempt | None:
    """Lease a pair of engines; or one, if `why_alone` says why it must serve the prompt alone.

    `without` are URLs of engines that must not get the prompt: one that serves alone is taken from them only if there are no
    others. Those of `avoid` are used if no others can serve the prompt in this way. Return None if there are no engines for it.
    """
    if why_alone is not None:
        return _alone(resources, request, why_alone, without, avoid)
    if avoid:
        assignment = _assigned(resources, request, without, avoid)
    else:
        assignment = resources.ledger.assign(PAIR, _ask(resources, request), without=without)
    return None if assignment is None else Attempt(resources, request, assignment)


async def begin_with_space(
    resources: ExchangeResources,
    request: PromptRequest,
    without: Sequence[str],
    avoid: Sequence[str],
) -> Attempt | None:
    """As `begin` for a pair, where receive buffers are bounded: wait until the decode engine has space for the prompt's KV.

    Raises:
        OverloadedError: no decode engine had space in time.
    """

    def choose(excluded: Sequence[str]) -> Assignment | None:
        return _assigned(resources, request, excluded, avoid)

    return await _with_space(resources, request, choose, without)


async def begin_placed(
    resources: ExchangeResources,
    request: PromptRequest,
    must_be_whole: Alone | None,
    without: Sequence[str],
    avoid: Sequence[str],
) -> Attempt | None:
    """Lease the engines that the pool's placement chooses, those of `without` only if there are no others.

    `must_be_whole`: why the request can't be split, None if it can. Where receive buffers are bounded, a prompt that is split
    waits as for `begin_with_space`.

    Raises:
        TooLateError: no engine can serve it in time, and such requests are refused.
        OverloadedError: no decode engine had space in time.
    """
    split = must_be_whole is None

    def choose(excluded: Sequence[str]) -> Assignment | None:
        ask, ledger = (
            _ask(resources, request, spares=spares_decode(resources, request, must_be_whole)),
            resources.ledger,
        )
        placed = ledger.place(ask, split=split, without=excluded, avoid=avoid)
        if placed is None and ledger.is_placeable(ask, split=split, without=excluded):
            _decided(resources, Decision(ask.now, _id(request), REFUSED, LATE, tokens=ask.tokens))
            raise TooLateError("no engine can serve this request in time now")
        return placed

    placed = choose(without)
    if placed is not None and len(placed.leases) > 1 and resources.transfer.buffers.bounded:
        # It waits behind other prompts, and is placed when its turn comes. What one engine serves whole does not wait for them.
        _give_up(resources, placed)
        attempt = await _with_space(resources, request, choose, without)
    else:
        attempt = None if placed is None else Attempt(resources, request, placed)
    if attempt is not None:
        leases, assignment = attempt.assignment.leases, attempt.assignment
        decision = Decision(
            resources.now(),
            _id(request),
            WHOLE if len(leases) == 1 else SPLIT,
            assignment.reason,
            tuple([lease.node.url for lease in leases]),
            None if must_be_whole is None else must_be_whole.value,
            known_tokens(request),
            assignment.values,
        )
        _decided(resources, decision)
    return attempt


async def _with_space(
    resources: ExchangeResources,
    request: PromptRequest,
    choose: Callable[[Sequence[str]], Assignment | None],
    without: Sequence[str],
) -> Attempt | None:
    buffers, ids = resources.transfer.buffers, request.ids
    count = 0 if ids is None else buffers.chunks(ids.count)
    space: BufferSpace | None = None

    def choose_with_space(full: tuple[str, ...]) -> Assignment | None:
        nonlocal space
        chosen = choose((*without, *full))
        if chosen is not None and len(chosen.leases) > 1:
            url = chosen.leases[-1].node.url
            if url in full:  # a placement falls back to engines that are excluded
                _give_up(resources, chosen)
                return None
            space = buffers.take(url, count)
        return chosen

    def possible() -> bool:
        chosen = choose(without)
        if chosen is not None:
            _give_up(resources, chosen)
        return chosen is not None

    assignment = await buffers.wait_for_space(count, choose_with_space, possible)
    return None if assignment is None else Attempt(resources, request, assignment, space)


def _assigned(
    resources: ExchangeResources, request: PromptRequest, without: Sequence[str], avoid: Sequence[str]
) -> Assignment | None:
    ask, ledger = _ask(resources, request), resources.ledger
    assignment = ledger.assign(PAIR, ask, without=(*without, *avoid)) if avoid else None
    return assignment or ledger.assign(PAIR, ask, without=without)


def _give_up(resources: ExchangeResources, assignment: Assignment) -> None:
    for lease in assignment.leases:
        resources.close(lease, Verdict.NEUTRAL)


def _alone(
    resources: ExchangeResources, request: PromptRequest, why: Alone, without: Sequence[str], avoid: Sequence[str]
) -> Attempt | None:
    parsed, ledger = request.parsed, resources.ledger
    spares = spares_decode(resources, request, why)
    ask = Ask(parsed.model, parsed.body_bytes, resources.now(), request.ids, parsed, spares_decode=spares)
    if ledger.needs_details:
        ask = _detailed(ask, request)
    lease = ledger.assign_alone(ask, without=(*without, *avoid)) if avoid else None
    # An engine that failed is better than no answer.
    lease = lease or ledger.assign_alone(ask, without=without) or ledger.assign_alone(ask)
    return None if lease is None else Attempt(resources, request, Assignment((lease,)))


# -- what the scheduler is asked


def _ask(resources: ExchangeResources, request: PromptRequest, *, spares: bool = False) -> Ask:
    parsed, prompt = request.parsed, request.prompt
    size = parsed.body_bytes if prompt is None else prompt.text_bytes or parsed.body_bytes
    ask = Ask(parsed.model, size, resources.now(), request.ids, parsed, spares_decode=spares)
    return _detailed(ask, request) if resources.ledger.needs_details else ask


def _detailed(ask: Ask, request: PromptRequest) -> Ask:
    """Return an ask with what only some policies and placements need."""
    hints = request.headers.hints
    session = hints.session
    if session is None and not is_absent(fields := request.parsed.fields, "user"):
        session = bytes(memoryview(fields["user"])[:MAX_USER]).decode("latin-1")
    return Ask(
        ask.model,
        ask.prompt_bytes,
        ask.now,
        ask.ids,
        ask.parsed,
        known_tokens(request),
        session=session_within(request.headers.salt, session),
        slo=hints.slo,
        beginning=request.beginning,
        spares_decode=ask.spares_decode,
    )


def _id(request: PromptRequest) -> str:
    return request.headers.request_id


def _decided(resources: ExchangeResources, decision: Decision) -> None:
    resources.observers.notify(Decided(decision.choice, decision.reason))
    if resources.decisions is not None:
        resources.decisions.add(decision)


def why_not_split(resources: ExchangeResources, request: PromptRequest) -> Alone | None:
    """Return why a prompt can't be split, as far as its token ids show; None if nothing is against it."""
    ids, transfer = request.ids, resources.transfer
    if ids is None:
        return Alone.NO_TOKENS
    if ids.count < transfer.contract.min_tokens(request.parsed):
        return Alone.SHORT_PROMPT
    return Alone.KV_BUFFER if transfer.buffers.bounded and not transfer.buffers.fits(ids.count) else None
