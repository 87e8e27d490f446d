"""The last decisions as the admin API shows them: what made the difference to the next best choice,
and what has become of the request.

Both are worked out here, when somebody looks: outcomes are those of the last requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pdproxy.observe.recent import RUNNING, RecentFailure, RecentRequest
from pdproxy.observe.weighed import TERMS, Option, Weighed, tpot_of
from pdproxy.scheduling.decisions import Decision, KeptDecisions, choice_of
from pdproxy.web.admin.shapes import Silent

RETRIED = "retried"
"""The state of an attempt that failed, where another one followed."""
_Numbers = Annotated[
    dict[str, float | None],
    Meta(
        description="ttft and tpot in seconds, as predicted; cost, in requests that miss the SLO, "
        "or in seconds without one; cached, the prompt's tokens in the cache of the engine that "
        "computes it. null: infinite. Without tpot that was not computed: the cost is this much at "
        "least"
    ),
]
_Parts = Annotated[
    dict[str, float | None],
    Meta(description="of the cost: " + "; ".join(f"{name}, {text}" for name, text in TERMS[:-1])),
]


class OtherChoice(msgspec.Struct, frozen=True):
    """The next best choice for a request."""

    choice: Annotated[str, Meta(description="whole or split")]
    engines: Annotated[tuple[str, ...], Meta(description="the one that answers last")]
    values: _Numbers
    parts: _Parts


class DecisionOutcome(msgspec.Struct, frozen=True):
    """What has become of a request. Times in seconds, null where unknown, as those of answers that
    are not streamed.
    """

    state: Annotated[
        str,
        Meta(
            description="running; retried: this attempt failed, and another one followed; else how "
            "the request ended: ok, client_left, or whose fault ended it"
        ),
    ]
    status: Annotated[int, Meta(description="0 while it is not known")] = 0
    error: str | None = None
    ttft_s: Annotated[
        float | None, Meta(description="from the request's begin to its first data")
    ] = None
    tpot_s: Annotated[float | None, Meta(description="the mean per token behind the first")] = None
    completion_tokens: int | None = None
    good: Annotated[
        bool | None,
        Meta(
            description="whether TTFT and TPOT have kept the request's SLO; gaps are not compared. "
            "null: there is no SLO, or that is not known"
        ),
    ] = None


class ShownDecision(msgspec.Struct, frozen=True):
    """A decision for one attempt of a request."""

    age_s: float
    request_id: str
    choice: Annotated[str, Meta(description="whole, split or refused")]
    reason: Annotated[str, Meta(description="the placement's")]
    engines: Annotated[tuple[str, ...], Meta(description="the one that answers last")]
    must_be_whole: Annotated[str | None, Meta(description="why it could not be split")]
    tokens: Annotated[int | None, Meta(description="of the prompt, null where unknown")]
    values: _Numbers | None
    parts: _Parts | None
    term: Annotated[
        str | None,
        Meta(
            description="what made the difference to the next best choice: one of the parts of "
            f"the cost, or cached, {dict(TERMS)['cached']}"
        ),
    ]
    other: Annotated[
        OtherChoice | None,
        Meta(description="the next best choice, null: nothing else could be chosen"),
    ]
    outcome: Annotated[
        DecisionOutcome | None,
        Meta(description="null: the request is none of the last ones that are kept"),
    ]


class DecisionList(msgspec.Struct, frozen=True):
    """The last 256 decisions of each pool's placement, the newest first."""

    placement: Annotated[str | None, Meta(description="null: no pool has one")]
    decisions: list[ShownDecision]
    silent_workers: Silent = []


def decisions_of(
    kept: KeptDecisions, requests: Sequence[RecentRequest], silent: list[int]
) -> DecisionList:
    """Return decisions with what has become of their requests: of those that are `requests`.
    `silent`: see `DecisionList`.
    """
    by_id = {one.id: one for one in reversed(requests)}
    failures = {one.id: list(one.failures) for one in requests if one.failures}
    shown = [_shown(kept.now, one, _outcome(one, by_id, failures)) for one in kept.decisions]
    return DecisionList(kept.placement, shown[::-1], silent)


def _shown(now: float, one: Decision, outcome: DecisionOutcome | None) -> ShownDecision:
    weighed, other = one.weighed, None
    if weighed is not None and weighed.other is not None:
        values, parts = _numbers(weighed, weighed.other)
        other = OtherChoice(choice_of(weighed.engines), weighed.engines, values, parts)
    values, parts = (None, None) if weighed is None else _numbers(weighed, weighed.chosen)
    return ShownDecision(
        round(now - one.at, 3),
        one.request_id,
        one.choice,
        one.reason,
        one.engines,
        one.must_be_whole,
        one.tokens,
        values,
        parts,
        None if weighed is None else weighed.term(),
        other,
        outcome,
    )


def _outcome(
    one: Decision,
    requests: Mapping[str, RecentRequest],
    failures: Mapping[str, list[RecentFailure]],
) -> DecisionOutcome | None:
    """Return what has become of a decision. `failures`: of each request, those that belong to no
    older decision.
    """
    request = requests.get(one.request_id)
    if request is None:
        return None
    of_others = failures.get(one.request_id, [])
    for at, failure in enumerate(of_others):
        if failure.retried and failure.engine in one.engines:
            del of_others[: at + 1]
            return DecisionOutcome(RETRIED, error=failure.error)
    tpot = good = None
    if request.outcome != RUNNING:
        tpot = tpot_of(request.first_s, request.total_s, request.completion_tokens)
        if one.weighed is not None:
            good = one.weighed.good(request.outcome, request.first_s, tpot)
    return DecisionOutcome(
        request.outcome,
        request.status,
        request.error,
        request.first_s,
        None if tpot is None else round(tpot, 5),
        request.completion_tokens,
        good,
    )


def _numbers(weighed: Weighed, option: Option) -> tuple[Any, Any]:
    return option.values(), weighed.parts(option)  # JSON has null for what is infinite
