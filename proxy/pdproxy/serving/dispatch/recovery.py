"""The outcomes of an attempt, and the actions that follow: another engine, one engine alone, or an
error. Pure.

A stage of an attempt ends with an outcome. `Answered` ends the exchange; for all other outcomes
`after` returns the action.
"""

from __future__ import annotations

import msgspec

from pdproxy.kit.errors import (
    AnswerTooLargeError,
    EngineError,
    EngineRefusedError,
    KvGoneError,
    OverloadedError,
    OwnBodyRefusedError,
    PdproxyError,
    RefusalReason,
    StaleConnectionError,
    StandstillError,
)
from pdproxy.serving.dispatch.failure_class import SAME_ELSEWHERE
from pdproxy.upstream.client import Answer
from pdproxy.wire.route_form import Alone

# -- outcomes


class Answered(msgspec.Struct, frozen=True):
    """The client can be answered with `answer`; or, if it is None, a stream was passed on to its
    end.
    """

    answer: Answer | None


class NoEngines(msgspec.Struct, frozen=True):
    """No engines could be leased for this attempt."""


class PrefillFailed(msgspec.Struct, frozen=True):
    """The prefill engine at `url` made no KV that can be used.

    `reason`: why one engine serves the prompt if no other pair can. `keeper`: the URL of the decode
    engine whose KV it was given and may have waited for in vain, None if there was none.
    """

    url: str
    reason: Alone
    error: EngineError
    keeper: str | None = None


class CannotSplit(msgspec.Struct, frozen=True):
    """One engine must serve this prompt alone, whichever engines are free. `exclude`: the URL of
    one that must not get it.
    """

    reason: Alone
    exclude: str


class DecodeFailed(msgspec.Struct, frozen=True):
    """The answering engine at `url` has failed. `data_sent`: a part of its answer was sent to the
    client.

    `leave_out`: which engine is left out when the prompt is tried again, this one or the prefill
    engine, where it may be that it could not load the KV; None if it failed otherwise.
    """

    url: str
    error: EngineError
    data_sent: bool
    leave_out: str | None = None

    @property
    def is_engines(self) -> bool:
        """Whether the engine has failed: not if every engine would refuse the request, or answer it
        with too much, or if its answer found no space here or no engine that parses it.
        """
        if isinstance(self.error, SAME_ELSEWHERE):
            return False
        # What one engine refuses every engine would, unless it is full.
        return (
            not isinstance(self.error, EngineRefusedError)
            or self.error.status >= 500
            or self.error.status == 429
        )

    @property
    def is_retryable(self) -> bool:
        """Whether another engine may succeed."""
        return self.is_engines and not self.data_sent


class AskAgain(msgspec.Struct, frozen=True):
    """The engine refused the request with something that the proxy had added, and which it adds no
    more.
    """


class ModelRefused(msgspec.Struct, frozen=True):
    """The engine at `url` does not know the request's model, which it or another one lists.
    `answer`: its own.
    """

    url: str
    answer: Answer


class Failed(msgspec.Struct, frozen=True):
    """The request fails, even if other engines are left."""

    error: PdproxyError


Failure = NoEngines | PrefillFailed | CannotSplit | DecodeFailed | AskAgain | ModelRefused | Failed
Outcome = Answered | Failure

# -- what is done next


class Retry(msgspec.Struct, frozen=True):
    """Try again in the same way, without the engine at `exclude` (None: with all).

    `avoid`: the URL of one that may have failed, too: it is used only if no others can serve the
    prompt in this way. `keep`: the URL of the decode engine that is to get it again, if it can be:
    this shows whether that engine was the cause.
    """

    exclude: str | None
    avoid: str | None = None
    keep: str | None = None


class ServeAlone(msgspec.Struct, frozen=True):
    """Have one engine serve the prompt alone, without the one at `exclude` (None: any). `avoid`: as
    of `Retry`.
    """

    reason: Alone
    exclude: str | None = None
    avoid: str | None = None


class Continue(msgspec.Struct, frozen=True):
    """Have another engine go on with the stream: the one at `url` has failed in it."""

    url: str


class Fail(msgspec.Struct, frozen=True):
    """Answer the client with this error."""

    error: PdproxyError


Action = Retry | ServeAlone | Continue | Fail


class Progress(msgspec.Struct, frozen=True):
    """The progress of an exchange: the attempt's number (from 1), the limit of attempts, and
    whether one engine served it alone.

    `prefill_failed`: why the last failed prefill of an earlier attempt failed, None if none failed.
    `continues`: whether streams are continued at all. `stalled`: engines that stood still, perhaps
    because of the request, before this attempt. `whole`: whether one engine may serve it alone.
    `follows`: whether its failure, a 5xx, has followed the request to a second engine.
    """

    number: int
    limit: int
    alone: bool
    prefill_failed: Alone | None = None
    continues: bool = False
    stalled: int = 0
    whole: bool = False
    follows: bool = False


MOST_STALLED = 2
"""Engines that may stand still under one request: the request may be the cause, and would stop a
third engine, too.
"""


def has_stalled(error: EngineError, before: int) -> bool:
    """Return whether engines have stood still that often, perhaps because of the request. `before`:
    how many until now.
    """
    return isinstance(error, StandstillError) and error.may_be_cause and before + 1 >= MOST_STALLED


def after(outcome: Failure, progress: Progress) -> Action:
    """Return what is done after an attempt that did not answer the client."""
    match outcome:
        case PrefillFailed(error=error) | DecodeFailed(error=error) if has_stalled(
            error, progress.stalled
        ):
            return Fail(error)
        case NoEngines() if progress.alone:
            return Fail(
                OverloadedError(
                    "no engine can serve this request: see /ready", RefusalReason.NO_ENGINE
                )
            )
        case NoEngines():
            return ServeAlone(progress.prefill_failed or Alone.NO_PAIR)
        case PrefillFailed(url, reason, AnswerTooLargeError()):
            return ServeAlone(reason, url)
        case PrefillFailed(url, reason, error, keeper):
            # A failed prefill alone never fails the request: in the end one engine serves it
            # without a prefill leg.
            is_over = progress.follows or progress.number >= progress.limit
            return ServeAlone(reason, url, keeper) if is_over else _again(url, error, keeper)
        case CannotSplit(reason, exclude):
            return ServeAlone(reason, exclude)
        case DecodeFailed(url, _, True) if outcome.is_engines and progress.continues:
            return Continue(url)
        case DecodeFailed(url, _, _, leave_out) if leave_out is not None and _is_last_try(progress):
            # Whoever is the cause, KV that does not move never fails the request.
            return ServeAlone(Alone.KV_FAILED, avoid=url)
        case DecodeFailed(error=KvGoneError()) if _is_last_try(progress):
            return ServeAlone(Alone.KV_FAILED)
        case DecodeFailed(url, _, _, leave_out) if (
            leave_out is not None and progress.number < progress.limit
        ):
            return Retry(leave_out, keep=url if leave_out != url else None)
        case DecodeFailed(error=error) if progress.follows:
            return Fail(error)
        case DecodeFailed(url, error, _):
            return (
                _again(url, error)
                if outcome.is_retryable and progress.number < progress.limit
                else Fail(error)
            )
        case AskAgain():
            return Retry(None)
        case ModelRefused(url):
            return Retry(url)
        case Failed(error):
            return Fail(error)


def _is_last_try(progress: Progress) -> bool:
    """Return whether the next attempt is the last one, and one engine may serve it alone."""
    is_last = progress.number + 1 == progress.limit
    return progress.whole and (is_last or (progress.follows and progress.number < progress.limit))


def _again(url: str, error: EngineError, avoid: str | None = None) -> Retry:
    """Return the retry behind a leg that has failed: all is made anew, and nothing is sent again
    that an engine may have read.
    """
    match error:
        case StaleConnectionError():
            return Retry(None, url)  # it may be stopping, or have closed an idle connection
        case KvGoneError() | OwnBodyRefusedError():
            return Retry(None)
    return Retry(url, avoid)
