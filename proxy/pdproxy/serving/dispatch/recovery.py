"""What became of an attempt, and what is done next: another engine, one engine alone, or the error. Pure.

A stage of an attempt ends with an outcome. An answer ends the exchange; for everything else `after` says how it goes on.
"""

from __future__ import annotations

import msgspec

from pdproxy.kit.errors import AnswerBudgetError, EngineError, EngineRefusedError, OverloadedError, PdproxyError
from pdproxy.upstream.client import Answer
from pdproxy.wire.request import Alone

# -- outcomes


class Answered(msgspec.Struct, frozen=True):
    """The client can be answered: with a whole answer, or None where a stream was passed on to its end."""

    answer: Answer | None


class NoEngines(msgspec.Struct, frozen=True):
    """No engines could be leased for this attempt."""


class PrefillFailed(msgspec.Struct, frozen=True):
    """The prefill engine at `url` made no KV that can be used.

    `reason`: why one engine serves the prompt if no other pair can.
    """

    url: str
    reason: Alone
    error: EngineError


class CannotSplit(msgspec.Struct, frozen=True):
    """This prompt needs one engine alone, whichever engines are free. `exclude` is the URL of one that must not get it."""

    reason: Alone
    exclude: str


class DecodeFailed(msgspec.Struct, frozen=True):
    """The engine at `url` that was to answer has failed. `data_sent`: the client has seen a part of its answer."""

    url: str
    error: EngineError
    data_sent: bool

    @property
    def is_retryable(self) -> bool:
        """Whether another engine may do better."""
        if self.data_sent or isinstance(self.error, AnswerBudgetError):
            return False
        # Every engine would refuse what one refuses, unless it is full.
        return not isinstance(self.error, EngineRefusedError) or self.error.status >= 500 or self.error.status == 429


class Failed(msgspec.Struct, frozen=True):
    """The request fails, whatever engines are left."""

    error: PdproxyError


Failure = NoEngines | PrefillFailed | CannotSplit | DecodeFailed | Failed
Outcome = Answered | Failure

# -- what is done next


class Retry(msgspec.Struct, frozen=True):
    """Try again in the same way, without the engine at `exclude`."""

    exclude: str


class ServeAlone(msgspec.Struct, frozen=True):
    """Have one engine serve the prompt alone, without the one at `exclude` (None: any)."""

    reason: Alone
    exclude: str | None = None


class Fail(msgspec.Struct, frozen=True):
    """Answer the client with this error."""

    error: PdproxyError


Action = Retry | ServeAlone | Fail


class Progress(msgspec.Struct, frozen=True):
    """How far an exchange has come: the attempt's number (from 1), how many there may be, and whether it was one engine alone.

    `prefill_failed` is why the last prefill of an earlier attempt gave nothing, None if none failed.
    """

    number: int
    limit: int
    alone: bool
    prefill_failed: Alone | None = None


def after(outcome: Failure, progress: Progress) -> Action:
    """Return what is done after an attempt that did not answer the client."""
    match outcome:
        case NoEngines() if progress.alone:
            return Fail(OverloadedError("no engine can serve this request: see /ready"))
        case NoEngines():
            return ServeAlone(progress.prefill_failed or Alone.NO_PAIR)
        case PrefillFailed(url, reason, _):
            # A prefill that failed never fails the request: the last resort is an engine that needs none.
            return Retry(url) if progress.number < progress.limit else ServeAlone(reason, url)
        case CannotSplit(reason, exclude):
            return ServeAlone(reason, exclude)
        case DecodeFailed(url, error, _):
            return Retry(url) if outcome.is_retryable and progress.number < progress.limit else Fail(error)
        case Failed(error):
            return Fail(error)
