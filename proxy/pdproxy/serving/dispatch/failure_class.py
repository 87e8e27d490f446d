"""What an engine's failure or refusal means: for its breaker, for the client, for the KV that it
was given. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from pdproxy.kit.errors import (
    AnswerBudgetError,
    AnswerTooLargeError,
    EngineError,
    EngineRefusedError,
    EngineTimeoutError,
    EngineUnreachableError,
    KvGoneError,
    OwnBodyRefusedError,
    PdproxyError,
    StaleConnectionError,
    UnparsedError,
    UnreadableError,
    Wait,
)
from pdproxy.scheduling.leases import Verdict
from pdproxy.upstream.client import Answer
from pdproxy.wire.engine import error_of

_DEAD = (
    "EngineCore encountered an issue",
    "The server had an error while processing your request.",
)
"""The beginnings of the message of vLLM's `EngineDeadError`: up to 0.32.0, and since 0.33.0."""
NO_ENGINES_FAULT = (StaleConnectionError, KvGoneError, OwnBodyRefusedError)
"""What says nothing against the engine that was asked, or about to be."""
SAME_ELSEWHERE = (AnswerBudgetError, AnswerTooLargeError, UnparsedError)
"""What no other engine would do better, and which says nothing against the one that was asked."""


def verdict_of(error: EngineError, *, streamed: bool = False) -> Verdict:
    """Return what a failed leg shows about its engine. It is no failure of an engine that it is
    full, or refuses a bad request.

    `streamed`: it has failed behind its first data. Before that, the request may be the cause of a
    5xx: such a failure shows something only once another engine has answered the request
    (`dispatch.doubtful_failures`).
    """
    if isinstance(error, EngineUnreachableError):
        return Verdict.UNREACHABLE
    if isinstance(error, (*SAME_ELSEWHERE, *NO_ENGINES_FAULT)):
        return Verdict.NEUTRAL
    if isinstance(error, EngineRefusedError):
        if _core_is_dead(error):
            return Verdict.DEAD
        if not (streamed and is_doubtful(error)):
            return Verdict.NEUTRAL
    return Verdict.FAILED


def is_doubtful(error: PdproxyError) -> bool:
    """Return whether an engine has answered 5xx, of itself or because of the request: it is not
    full, and no dead core.
    """
    if not isinstance(error, EngineRefusedError) or error.status < 500 or error.status == _FULL:
        return False
    return not _core_is_dead(error)


def is_of_kv(error: EngineError, *, awaits_push: bool) -> bool:
    """Return whether a decode engine that was given a handle may have failed since it could not
    load the KV.

    `awaits_push`: it waited for KV that the prefill engine was to write. An engine that is silent
    and has all it needs is slow.
    """
    if isinstance(error, EngineTimeoutError):
        return awaits_push and error.wait is Wait.FIRST_TOKEN
    return is_doubtful(error)


_FULL = 503
"""The status of an engine that is full, or not there: with KV it has nothing to do."""


def _core_is_dead(error: EngineRefusedError) -> bool:
    """Return whether an engine answered, or ended a stream, with vLLM's error for a core that has
    died.

    Its API server takes seconds to notice that itself.
    """
    detail = error_of(error.body) if error.status >= 500 else None
    return detail is not None and detail.message.startswith(_DEAD)


def is_clients_fault(answer: Answer) -> bool:
    """Return whether an engine refused a request that every engine would refuse."""
    return 400 <= answer.status < 500 and answer.status != 429


_INVALID_JSON = "body."
"""The beginning of the parameter of vLLM's error for a body that is no JSON. The position
follows.
"""


def is_about_ours(answer: Answer, ours: Collection[str]) -> bool:
    """Return whether a 400 is about what pdproxy has made: the JSON itself, or a field of `ours`,
    which the client has not sent.

    A body is made anew for each engine, from what was read of the client's.
    """
    error_type, param = error_kind(answer.body)
    name = (param or "").removeprefix(_INVALID_JSON)
    return (error_type == UnreadableError.type and name.isdecimal()) or name.split(".")[0] in ours


def is_unknown_model(answer: Answer) -> bool:
    """Return whether an engine refused a request because it does not have the model."""
    if answer.status != 404:
        return False
    detail = error_of(answer.body)
    return detail is not None and _UNKNOWN_MODEL.match(detail.message) is not None


_UNKNOWN_MODEL = re.compile(r"The model .{1,4096} does not exist", re.DOTALL)
"""The message of vLLM's error for a model that it does not have. A response or a path that is not
there has another one.
"""


def is_schema_refusal(answer: Answer) -> bool:
    """Return whether an engine refused a body by its schema, before its handler: vLLM has a type of
    errors for that.
    """
    return answer.status == 400 and error_kind(answer.body)[0] == UnreadableError.type


def refused(url: str, answer: Answer) -> EngineError:
    """Return the error for an answer that is neither data nor the client's fault."""
    if answer.status == 429 or 500 <= answer.status <= 599:
        return EngineRefusedError(
            f"{url} answered {answer.status}", status=answer.status, body=answer.body
        )
    return EngineError(f"{url} answered {answer.status}, which no engine should")


def error_text(body: bytes) -> str:
    """Return the message of the error in a body, "" if it describes none."""
    detail = error_of(body)
    return detail.message if detail is not None else ""


def error_kind(body: bytes) -> tuple[str, str | None]:
    """Return the type and the parameter of the error in a body, ("", None) if it describes none."""
    detail = error_of(body)
    return (detail.type, detail.param) if detail is not None else ("", None)
