"""What follows from an attempt that did not answer the client: the whole table, and that every
course ends.
"""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.kit.errors import (
    AnswerBudgetError,
    AnswerTooLargeError,
    EngineError,
    EngineRefusedError,
    EngineTimeoutError,
    EngineUnreachableError,
    KvGoneError,
    OverloadedError,
    OwnBodyRefusedError,
    StaleConnectionError,
    StandstillError,
    UnparsedError,
    Wait,
)
from pdproxy.serving.dispatch.recovery import (
    MOST_STALLED,
    AskAgain,
    CannotSplit,
    Continue,
    DecodeFailed,
    Fail,
    Failed,
    Failure,
    ModelRefused,
    NoEngines,
    PrefillFailed,
    Progress,
    Retry,
    ServeAlone,
    after,
)
from pdproxy.upstream.client import Answer
from pdproxy.wire.route_form import Alone

P, D = "http://p:1", "http://d:1"
FIRST, LAST = Progress(1, 3, alone=False), Progress(3, 3, alone=False)
FIRST_ALONE, LAST_ALONE = Progress(1, 3, alone=True), Progress(3, 3, alone=True)
BEYOND = Progress(4, 3, alone=True)
GOES_ON = Progress(3, 3, alone=True, continues=True)
CLOSED = EngineError("closed")
TIMEOUT = EngineTimeoutError("late", wait=Wait.FIRST_TOKEN)
UNREACHABLE = EngineUnreachableError("refused")
FULL = EngineRefusedError("full", status=429, body=b"")
BROKEN = EngineRefusedError("broken", status=500, body=b"")
REFUSED = EngineRefusedError("refused", status=400, body=b"")
TOO_LARGE = AnswerTooLargeError("too large")
NO_SPACE = AnswerBudgetError("no space")
STALE = StaleConnectionError("closed a kept connection")
GONE = KvGoneError("the KV is gone")
OWN_BODY = OwnBodyRefusedError("refused what the client has not sent")
UNPARSED = UnparsedError("no engine parses it")
STALLED = StandstillError("stands still", may_be_cause=True)
STOPPED = StandstillError("stands still", may_be_cause=False)
LAST_TRY = Progress(2, 3, alone=False, whole=True)
REFUSED_MODEL = ModelRefused(D, Answer(404, [], b""))
FOLLOWED = Progress(2, 8, alone=False, whole=True, follows=True)
SECOND = Progress(2, 8, alone=False, stalled=MOST_STALLED - 1)


@pytest.mark.parametrize(
    ("outcome", "progress", "action"),
    [
        # No engines: a pair that is missing is replaced by one engine, and that one by nothing.
        (NoEngines(), FIRST, ServeAlone(Alone.NO_PAIR)),
        (
            NoEngines(),
            Progress(2, 3, alone=False, prefill_failed=Alone.NO_HANDLE),
            ServeAlone(Alone.NO_HANDLE),
        ),
        # A prefill that failed: another pair while there are attempts left, then one engine. Never
        # an error.
        (PrefillFailed(P, Alone.PREFILL_FAILED, CLOSED), FIRST, Retry(P)),
        (PrefillFailed(P, Alone.NO_HANDLE, CLOSED), FIRST, Retry(P)),
        (PrefillFailed(P, Alone.NO_HANDLE, CLOSED), LAST, ServeAlone(Alone.NO_HANDLE, P)),
        # It may have waited for KV that a decode engine keeps: that one is avoided, too.
        (PrefillFailed(P, Alone.PREFILL_FAILED, TIMEOUT, D), FIRST, Retry(P, avoid=D)),
        (
            PrefillFailed(P, Alone.PREFILL_FAILED, TIMEOUT, D),
            LAST,
            ServeAlone(Alone.PREFILL_FAILED, P, avoid=D),
        ),
        # A prompt that can't be split: one engine at once, however many attempts are left.
        (CannotSplit(Alone.KV_LATE, D), FIRST, ServeAlone(Alone.KV_LATE, D)),
        (CannotSplit(Alone.PREFILL_REFUSED, P), LAST, ServeAlone(Alone.PREFILL_REFUSED, P)),
        # The engine that answers failed before its data: another one in the same way.
        (DecodeFailed(D, CLOSED, data_sent=False), FIRST, Retry(D)),
        (DecodeFailed(D, TIMEOUT, data_sent=False), FIRST_ALONE, Retry(D)),
        (DecodeFailed(D, UNREACHABLE, data_sent=False), FIRST, Retry(D)),
        (DecodeFailed(D, FULL, data_sent=False), FIRST, Retry(D)),
        (DecodeFailed(D, BROKEN, data_sent=False), FIRST, Retry(D)),
        (DecodeFailed(D, CLOSED, data_sent=False), LAST, Fail(CLOSED)),
        (DecodeFailed(D, FULL, data_sent=False), LAST_ALONE, Fail(FULL)),
        (DecodeFailed(D, CLOSED, data_sent=False), BEYOND, Fail(CLOSED)),
        # What no other engine would do better.
        (DecodeFailed(D, REFUSED, data_sent=False), FIRST, Fail(REFUSED)),
        (DecodeFailed(D, NO_SPACE, data_sent=False), FIRST, Fail(NO_SPACE)),
        (DecodeFailed(D, TOO_LARGE, data_sent=False), FIRST, Fail(TOO_LARGE)),
        (DecodeFailed(D, TOO_LARGE, data_sent=True), GOES_ON, Fail(TOO_LARGE)),
        (
            PrefillFailed(P, Alone.PREFILL_FAILED, TOO_LARGE),
            FIRST,
            ServeAlone(Alone.PREFILL_FAILED, P),
        ),
        # A failure that has followed the request to a second engine: no third one. What is at fault
        # for KV needs no KV.
        (DecodeFailed(D, BROKEN, data_sent=False), FOLLOWED, Fail(BROKEN)),
        (
            DecodeFailed(D, BROKEN, data_sent=False, leave_out=P),
            FOLLOWED,
            ServeAlone(Alone.KV_FAILED, avoid=D),
        ),
        (
            PrefillFailed(P, Alone.PREFILL_FAILED, BROKEN),
            FOLLOWED,
            ServeAlone(Alone.PREFILL_FAILED, P),
        ),
        (DecodeFailed(D, CLOSED, data_sent=True), FIRST, Fail(CLOSED)),
        (DecodeFailed(D, BROKEN, data_sent=True), FIRST_ALONE, Fail(BROKEN)),
        # A part of a stream was sent: another engine goes on, if streams are continued, however
        # many attempts there were.
        (DecodeFailed(D, CLOSED, data_sent=True), GOES_ON, Continue(D)),
        (DecodeFailed(D, TIMEOUT, data_sent=True), GOES_ON, Continue(D)),
        (DecodeFailed(D, BROKEN, data_sent=True), GOES_ON, Continue(D)),
        (DecodeFailed(D, REFUSED, data_sent=True), GOES_ON, Fail(REFUSED)),
        (DecodeFailed(D, NO_SPACE, data_sent=True), GOES_ON, Fail(NO_SPACE)),
        (DecodeFailed(D, CLOSED, data_sent=False), GOES_ON, Fail(CLOSED)),
        (Failed(TIMEOUT), FIRST, Fail(TIMEOUT)),
        # What the proxy had added was refused: the same again without it, however many attempts
        # there were.
        (AskAgain(), FIRST, Retry(None)),
        (AskAgain(), LAST_ALONE, Retry(None)),
        # A connection that was closed while it was idle, KV that is gone: nothing against the
        # engine.
        (PrefillFailed(P, Alone.PREFILL_FAILED, STALE, D), FIRST, Retry(None, avoid=P)),
        (DecodeFailed(D, STALE, data_sent=False), FIRST, Retry(None, avoid=D)),
        (DecodeFailed(D, GONE, data_sent=False), FIRST, Retry(None)),
        (PrefillFailed(P, Alone.PREFILL_FAILED, OWN_BODY), FIRST, Retry(None)),
        (DecodeFailed(D, GONE, data_sent=False), LAST_TRY, ServeAlone(Alone.KV_FAILED)),
        (DecodeFailed(D, GONE, data_sent=False), LAST, Fail(GONE)),
        # No engine parses what is streamed: another one would not, either.
        (DecodeFailed(D, UNPARSED, data_sent=False), FIRST, Fail(UNPARSED)),
        # An engine that stood still may have done so because of the request: a second one, and no
        # third.
        (PrefillFailed(P, Alone.PREFILL_FAILED, STALLED), FIRST, Retry(P)),
        (DecodeFailed(D, STALLED, data_sent=False), FIRST, Retry(D)),
        (PrefillFailed(P, Alone.PREFILL_FAILED, STALLED), SECOND, Fail(STALLED)),
        (DecodeFailed(D, STALLED, data_sent=False), SECOND, Fail(STALLED)),
        (DecodeFailed(D, STOPPED, data_sent=False), SECOND, Retry(D)),
        (DecodeFailed(D, CLOSED, data_sent=False), SECOND, Retry(D)),
        # KV that may not have been loaded: another try shows whose fault it is, and the last one
        # needs no KV.
        (DecodeFailed(D, BROKEN, data_sent=False, leave_out=D), FIRST, Retry(D)),
        (DecodeFailed(D, BROKEN, data_sent=False, leave_out=P), FIRST, Retry(P, keep=D)),
        (
            DecodeFailed(D, BROKEN, data_sent=False, leave_out=P),
            LAST_TRY,
            ServeAlone(Alone.KV_FAILED, avoid=D),
        ),
        (DecodeFailed(D, BROKEN, data_sent=False, leave_out=P), LAST, Fail(BROKEN)),
        # An engine that does not know the model, although it or another one lists it: however many
        # attempts there were.
        (REFUSED_MODEL, LAST_ALONE, Retry(D)),
    ],
)
def test_what_follows(outcome: Failure, progress: Progress, action: object) -> None:
    assert after(outcome, progress) == action


def test_no_engine_at_all_is_an_overload() -> None:
    """The last resort is missing: 503, so that the client comes again."""
    for progress in (FIRST_ALONE, BEYOND):
        action = after(NoEngines(), progress)
        assert isinstance(action, Fail)
        assert isinstance(action.error, OverloadedError)


ERRORS = [
    CLOSED,
    TIMEOUT,
    UNREACHABLE,
    FULL,
    BROKEN,
    REFUSED,
    NO_SPACE,
    TOO_LARGE,
    STALE,
    GONE,
    OWN_BODY,
    UNPARSED,
    STALLED,
    STOPPED,
]
FAILED_LEGS = st.sampled_from(ERRORS)
FAILURES = st.one_of(
    st.just(NoEngines()),
    st.builds(
        PrefillFailed,
        st.just(P),
        st.sampled_from([Alone.PREFILL_FAILED, Alone.NO_HANDLE]),
        FAILED_LEGS,
    ),
    st.builds(
        CannotSplit,
        st.sampled_from([Alone.KV_LATE, Alone.PREFILL_REFUSED, Alone.FIRST_TOKEN]),
        st.just(D),
    ),
    st.builds(DecodeFailed, st.just(D), FAILED_LEGS, st.booleans(), st.sampled_from([None, P, D])),
    st.sampled_from([AskAgain(), REFUSED_MODEL]),
    st.builds(Failed, FAILED_LEGS),
)


def test_every_course_has_every_outcome_in_it() -> None:
    """A new outcome belongs into the courses."""
    made = {NoEngines, PrefillFailed, CannotSplit, DecodeFailed, AskAgain, ModelRefused, Failed}
    assert made == set(get_args(Failure))


@given(
    st.integers(1, 8), st.booleans(), st.booleans(), st.lists(FAILURES, min_size=20, max_size=20)
)
def test_every_course_ends(
    limit: int, continues: bool, whole: bool, failures: list[Failure]
) -> None:
    """Whatever fails: at most `limit` attempts, and one more where the last prefill failed, which
    is one engine alone.

    Each time that an engine refused what the proxy had added, or did not know the model, there is
    one more.
    """
    is_alone, prefill_failed, stalled = False, None, 0
    for number, outcome in enumerate(failures, 1):
        if is_alone and isinstance(outcome, PrefillFailed | CannotSplit):
            continue  # an engine that serves alone prefills nothing for others
        action = after(
            outcome, Progress(number, limit, is_alone, prefill_failed, continues, stalled, whole)
        )
        if isinstance(outcome, PrefillFailed | DecodeFailed) and isinstance(
            outcome.error, StandstillError
        ):
            stalled += outcome.error.may_be_cause
        if isinstance(outcome, PrefillFailed):
            prefill_failed = outcome.reason
        if isinstance(action, Fail | Continue):
            sent = isinstance(outcome, DecodeFailed) and outcome.data_sent
            assert isinstance(action, Fail) or (sent and continues), (
                "only a stream that was begun goes on"
            )
            return
        assert stalled < MOST_STALLED
        assert (
            number <= limit
            or not isinstance(action, Retry)
            or isinstance(outcome, AskAgain | ModelRefused)
        )
        is_alone = is_alone or isinstance(action, ServeAlone)
    # The rest were outcomes that one engine alone cannot have, or requests that are sent without
    # what was added.
    assert is_alone or all(isinstance(outcome, AskAgain | ModelRefused) for outcome in failures)
