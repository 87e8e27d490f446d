"""Errors by fault, so that every failure has one meaning everywhere.

Owns the kinds of failure: whose fault it was (`Fault`), what the proxy waited for (`Wait`), why it
can't serve a request now (`RefusalReason`), and the exceptions with these. What a client gets of
each is decided in one place, `pdproxy.wire.errors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from pdproxy.kit.text import truncate

MAX_MESSAGE = 1000
"""Characters of an engine error's message. It may quote the engine, and is kept with the engine's
state, logged and shown.
"""


class Fault(Enum):
    """Who has to act for the failure to go away."""

    CLIENT = "client"  # the request is wrong
    ENGINE = "engine"  # an engine failed, hung or answered with invalid data
    CAPACITY = "capacity"  # too much work at once
    OURS = "ours"  # a defect in pdproxy
    CLIENT_LEFT = "client_left"  # the client does not read the answer


class Wait(Enum):
    """Every wait with a deadline. The value is the label of `pdproxy_deadline_total{wait}`, and
    mostly a key of `deadlines`.
    """

    CLIENT_HEAD = "client_head"
    CLIENT_BODY = "client_body"
    READ_BODY = "read_body"
    QUEUE = "queue"
    TOKENIZE = "tokenize"
    CONNECT = "connect"
    ENCODE = "encode"
    PREFILL = "prefill"
    KV_READY = "kv_ready"
    KV_REPLAY = "kv_replay"
    FIRST_TOKEN = "first_token"  # noqa: S105 - a token of text
    BETWEEN_TOKENS = "between_tokens"
    CONTINUATION = "continuation"
    CLIENT_WRITE = "client_write"
    ABANDONED_PREFILL = "abandoned_prefill"
    RELEASE = "release"
    RETRY = "retry"
    DRAIN = "drain"
    ENGINE_DRAIN = "engine_drain"
    TOTAL = "total"
    DETECT = "detect"
    PROBE = "probe"
    STALLED = "stalled"  # health.stalled_after
    ENGINE = "engine"  # deadlines.queue
    CANARY = "canary"  # health.canary_timeout
    DNS = "dns"  # dns.timeout
    KUBERNETES = "kubernetes"  # kubernetes.timeout
    WATCH = "watch"  # kubernetes.silence
    WEBSOCKET_IDLE = "websocket_idle"
    PONG = "pong"  # a WebSocket's client that does not answer a ping


class RefusalReason(Enum):
    """Why a request is refused now and may be served later. The value is the label of
    `pdproxy_refusals_total{reason}`, and the `reason` in the error's body.
    """

    KEY_REQUESTS = "key_requests"
    KEY_TOKENS = "key_tokens"
    KEY_INFLIGHT = "key_inflight"
    WRONG_KEYS = "wrong_keys"
    SHARE = "share"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    DEADLINE = "deadline"
    CAPACITY = "capacity"
    RETRY_BUDGET = "retry_budget"
    OBJECTIVE = "objective"
    NO_ENGINE = "no_engine"
    ALONE = "alone"
    ENGINES_LOST = "engines_lost"
    DRAINING = "draining"
    BODIES = "bodies"
    READERS = "readers"
    ANSWERS = "answers"
    SLOW_READER = "slow_reader"
    CONNECTIONS = "connections"
    OPEN_FILES = "open_files"


class PdproxyError(Exception):
    """A failure with a fault. `status` is its HTTP status if nothing was sent yet."""

    fault: Fault = Fault.OURS
    status = 500
    type = "InternalServerError"
    public: str | None = None
    """What a client gets in place of a message that it may not read; None: the message."""
    reason: RefusalReason | None = None
    """Why the request is refused for now; None for all other failures."""
    retry_after: float | None = None
    """In how many seconds the same request may succeed, None if that is not known."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    @property
    def code(self) -> int | str | None:
        """The `code` of the body: vLLM repeats the status."""
        return self.status

    @property
    def logged(self) -> str:
        """The text for the log."""
        return self.message


class BadRequestError(PdproxyError):
    """The client sent something that no engine could serve."""

    fault = Fault.CLIENT
    status = 400
    type = "BadRequestError"


class ForbiddenError(BadRequestError):
    """Who sends the request may not do that."""

    status = 403
    type = "ForbiddenError"


class UnreadableError(BadRequestError):
    """The body can't be read. The type is vLLM's for what fails its schema; the message quotes what
    the client sent.
    """

    type = "Bad Request"

    @property
    def logged(self) -> str:
        """Without what the client sent."""
        return f"the request is not readable{f' at {self.param}' if self.param else ''}"


class UnparsableError(BadRequestError):
    """The body is not text, or JSON beyond a parser's limits. FastAPI has its own body for this
    error.
    """

    def __init__(self) -> None:
        super().__init__("There was an error parsing the body", param="body")


class HeadTooLargeError(BadRequestError):
    """The request's line and headers are over `limits.max_header_bytes`."""

    status = 431


class PathTooLongError(BadRequestError):
    """The request's path is longer than that of every route."""

    status = 414


class HeadTimeoutError(BadRequestError):
    """A request's line and headers did not come in `deadlines.client_head`."""

    status = 408
    type = "RequestTimeout"


class NotStoredError(BadRequestError):
    """The client asked for something that is not stored. The type is vLLM's."""

    status = 404
    type = "invalid_request_error"


class NotServedError(BadRequestError):
    """The client asked for a route that engines may have, and that is not passed on."""

    status = 404
    type = "NotFoundError"


class ModelNotFoundError(BadRequestError):
    """No pool has the model. Type and text are vLLM's."""

    status = 404
    type = "NotFoundError"

    def __init__(self, model: str, names: Sequence[str]) -> None:
        known = f" Valid aliases: {', '.join(names)}." if names else ""
        super().__init__(f"The model `{model}` does not exist.{known}", param="model")
        self.model = model
        self.names = names


class BodyTooLargeError(BadRequestError):
    """The body is over `limits.max_body_bytes`."""

    status = 413


class BodyTimeoutError(BadRequestError):
    """The body did not come in `deadlines.client_body`."""

    status = 408
    type = "RequestTimeout"


class UnauthorizedError(PdproxyError):
    """Proxy keys are set and the client sent none of them. The body is OpenAI's: vLLM has none for
    it.
    """

    fault = Fault.CLIENT
    status = 401
    type = "invalid_request_error"

    def __init__(self, message: str, *, code: str | None) -> None:
        super().__init__(message)
        self._code = code

    @property
    def code(self) -> str | None:
        """OpenAI's own code, None if it has none."""
        return self._code


class RevokedError(UnauthorizedError):
    """What let the client in is not valid any more: its key or its certificate was taken away, or
    has reached its end.
    """

    def __init__(self, what: str, how: str) -> None:
        """`what`: "key" or "certificate"; `how`: "revoked" or "expired"."""
        self.what = what
        done = "has expired" if how == "expired" else "was revoked"
        super().__init__(f"The {what} of this request {done}.", code=f"{what}_{how}")


class OverloadedError(PdproxyError):
    """No place, no engine, or shutting down: the same request may succeed later."""

    fault = Fault.CAPACITY
    status = 503
    type = "ServiceUnavailableError"

    def __init__(
        self, message: str, reason: RefusalReason, *, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after = retry_after


class LimitError(OverloadedError):
    """The client is over its own limit or share: others may be served meanwhile."""

    status = 429
    type = "RateLimitError"


class TooLateError(OverloadedError):
    """No engine can serve the request within its objective, and the settings want such requests
    refused.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, RefusalReason.OBJECTIVE)


class EnginesLostError(OverloadedError):
    """Engines disappeared under the request, which may be the cause: no other one is risked."""

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message, RefusalReason.ENGINES_LOST, retry_after=retry_after)


class TooManyConnectionsError(OverloadedError):
    """`limits.max_connections` are open: a connection is refused, or one that idles is closed for
    another client.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, RefusalReason.CONNECTIONS)


def no_more_files(error: OSError) -> OverloadedError:
    """Return the failure to open a connection because the process may open no more files."""
    return OverloadedError(
        f"pdproxy can open no more connections: {error.strerror}", RefusalReason.OPEN_FILES
    )


class EngineError(PdproxyError):
    """An engine failed: it sent invalid data, or closed the connection before its answer was
    whole.
    """

    fault = Fault.ENGINE
    status = 502
    type = "BadGatewayError"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(truncate(message, MAX_MESSAGE), param=param)


class AnswerBudgetError(EngineError):
    """Other answers use up `limits.max_buffered_answer_bytes`. Not a fault of the engine. `held`:
    bytes of this answer so far.
    """

    held = 0
    reason = RefusalReason.ANSWERS
    fault = Fault.CAPACITY
    status = 503
    type = "ServiceUnavailableError"


class AnswerTooLargeError(EngineError):
    """An answer, or an event of a stream, is over its limit. Its request has asked for so much: not
    a fault of the engine.
    """


class UnparsedError(EngineError):
    """No engine has parsed the token ids that another one made. Not a fault of the one that made
    them.
    """


class EngineUnreachableError(EngineError):
    """An engine did not accept the connection. It has received nothing of the request."""

    status = 503
    type = "ServiceUnavailableError"

    def __init__(self, message: str, *, wait: Wait | None = None) -> None:
        super().__init__(message)
        self.wait = wait


class EngineTlsError(EngineUnreachableError):
    """No TLS with an engine: its certificate is not trusted, or it refused ours. The message names
    hosts.
    """

    public = "an engine could not be reached"


class ConnectionLostError(EngineError):
    """The connection to an engine closed before its answer was whole. The engine may be there all
    the same.
    """


class StaleConnectionError(ConnectionLostError):
    """A kept connection closed just behind a request, before the first byte of an answer.

    Mostly the engine had closed it while it was idle. But it may have read the request, and worked
    on it: nothing shows which.
    """


class OwnBodyRefusedError(EngineError):
    """An engine refused a body for something that the client has not sent: a defect of pdproxy, not
    of the engine.
    """

    fault = Fault.OURS
    status = 500
    type = "InternalServerError"


class KvGoneError(EngineError):
    """The KV that a request was about to use is gone, or is not needed any more. The engine was not
    asked.
    """


class EngineTimeoutError(EngineError):
    """A deadline on an engine passed. `wait` names it."""

    status = 504
    type = "GatewayTimeoutError"

    def __init__(self, message: str, *, wait: Wait) -> None:
        super().__init__(message)
        self.wait = wait


class StandstillError(EngineTimeoutError):
    """An engine stands still. `may_be_cause`: whether the request may have brought that about."""

    def __init__(self, message: str, *, may_be_cause: bool) -> None:
        super().__init__(message, wait=Wait.STALLED)
        self.may_be_cause = may_be_cause


class EngineRefusedError(EngineError):
    """An engine answered with an error instead of data. The client gets the engine's own status and
    body.
    """

    def __init__(self, message: str, *, status: int, body: bytes) -> None:
        super().__init__(message)
        self.status = status
        self.body = body
        if 400 <= status < 500 and status != 429:
            self.fault = Fault.CLIENT


class ClientLeftError(PdproxyError):
    """The client closed its connection or stopped reading."""

    fault = Fault.CLIENT_LEFT
    status = 499
    type = "ClientClosedRequest"
