"""What follows from an attempt that did not answer the client: the whole table, and that every course ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.kit.errors import (
    AnswerBudgetError,
    EngineError,
    EngineRefusedError,
    EngineTimeoutError,
    EngineUnreachableError,
    OverloadedError,
    Wait,
)
from pdproxy.serving.dispatch.recovery import (
    AskAgain,
    CannotSplit,
    Continue,
    DecodeFailed,
    Fail,
    Failed,
    Failure,
    NoEngines,
    PrefillFailed,
    Progress,
    Retry,
    ServeAlone,
    after,
)
from pdproxy.wire.request import Alone

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
NO_SPACE = AnswerBudgetError("no space")


@pytest.mark.parametrize(
    ("outcome", "progress", "action"),
    [
        # No engines: a pair that is missing is replaced by one engine, and that one by nothing.
        (NoEngines(), FIRST, ServeAlone(Alone.NO_PAIR)),
        (NoEngines(), Progress(2, 3, alone=False, prefill_failed=Alone.NO_HANDLE), ServeAlone(Alone.NO_HANDLE)),
        # A prefill that failed: another pair while there are attempts left, then one engine. Never an error.
        (PrefillFailed(P, Alone.PREFILL_FAILED, CLOSED), FIRST, Retry(P)),
        (PrefillFailed(P, Alone.NO_HANDLE, CLOSED), FIRST, Retry(P)),
        (PrefillFailed(P, Alone.NO_HANDLE, CLOSED), LAST, ServeAlone(Alone.NO_HANDLE, P)),
        # It may have waited for KV that a decode engine keeps: that one is avoided, too.
        (PrefillFailed(P, Alone.PREFILL_FAILED, TIMEOUT, D), FIRST, Retry(P, avoid=D)),
        (PrefillFailed(P, Alone.PREFILL_FAILED, TIMEOUT, D), LAST, ServeAlone(Alone.PREFILL_FAILED, P, avoid=D)),
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
        (DecodeFailed(D, CLOSED, data_sent=True), FIRST, Fail(CLOSED)),
        (DecodeFailed(D, BROKEN, data_sent=True), FIRST_ALONE, Fail(BROKEN)),
        # A part of a stream was sent: another engine goes on, if streams are continued, however many attempts there were.
        (DecodeFailed(D, CLOSED, data_sent=True), GOES_ON, Continue(D)),
        (DecodeFailed(D, TIMEOUT, data_sent=True), GOES_ON, Continue(D)),
        (DecodeFailed(D, BROKEN, data_sent=True), GOES_ON, Continue(D)),
        (DecodeFailed(D, REFUSED, data_sent=True), GOES_ON, Fail(REFUSED)),
        (DecodeFailed(D, NO_SPACE, data_sent=True), GOES_ON, Fail(NO_SPACE)),
        (DecodeFailed(D, CLOSED, data_sent=False), GOES_ON, Fail(CLOSED)),
        (Failed(TIMEOUT), FIRST, Fail(TIMEOUT)),
        # What the proxy had added was refused: the same again without it.
        (AskAgain(), FIRST, Retry(None)),
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


ERRORS = st.sampled_from([CLOSED, TIMEOUT, UNREACHABLE, FULL, BROKEN, REFUSED, NO_SPACE])
FAILURES = st.one_of(
    st.just(NoEngines()),
    st.builds(PrefillFailed, st.just(P), st.sampled_from([Alone.PREFILL_FAILED, Alone.NO_HANDLE]), ERRORS),
    st.builds(CannotSplit, st.sampled_from([Alone.KV_LATE, Alone.PREFILL_REFUSED, Alone.FIRST_TOKEN]), st.just(D)),
    st.builds(DecodeFailed, st.just(D), ERRORS, st.booleans()),
)


@given(st.integers(1, 8), st.lists(FAILURES, min_size=20, max_size=20))
def test_every_course_ends(limit: int, failures: list[Failure]) -> None:
    """Whatever fails: at most `limit` attempts, and one more where the last prefill failed, which is one engine alone."""
    is_alone, prefill_failed = False, None
    for number, outcome in enumerate(failures, 1):
        if is_alone and isinstance(outcome, PrefillFailed | CannotSplit):
            continue  # an engine that serves alone prefills nothing for others
        action = after(outcome, Progress(number, limit, is_alone, prefill_failed))
        if isinstance(outcome, PrefillFailed):
            prefill_failed = outcome.reason
        if isinstance(action, Fail):
            return
        assert number <= limit or not isinstance(action, Retry)
        is_alone = is_alone or isinstance(action, ServeAlone)
    assert is_alone  # the rest were outcomes that one engine alone cannot have
