"""The vocabulary of faults: which kinds there are, what they take, and the moments at which they can happen. Data only.

A moment is an instant in one request's life. A fault whose moment does not come for a request does not fire, and stays armed.

| moment | the instant |
|---|---|
| accept | a connection has been accepted, nothing was read of it (no request yet: filters don't apply) |
| queued | the request is read whole, the engine knows nothing of it |
| prefilling | the engine's queue has it, nothing was made for it (a stream's head is out) |
| handed_over | prefill: an unstreamed answer with a handle is made, nothing of it is out; decode: the pull of the KV begins |
| head | the answer's status and headers are out, nothing else |
| before_first_token | streams: the first event with output is due; a chat's role event is out |
| mid_stream | streams: `events` (2) events with output are out, another one is due |
| last_chunk | streams: the event with the finish reason is due; whole answers: made, nothing is out |
| before_done | streams: `[DONE]` is due, all else is out |
| after | the answer is out, whole |
| notice | a notice to the proxy is due (no answer: of the filters `rank` alone applies, and `next` counts notices) |

From `head` on, and for the `last_chunk` of whole answers, only answers with status 200 have moments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import msgspec

Moment = Literal[
    "accept",
    "queued",
    "prefilling",
    "handed_over",
    "head",
    "before_first_token",
    "mid_stream",
    "last_chunk",
    "before_done",
    "after",
    "notice",
]
MOMENTS: tuple[Moment, ...] = get_args(Moment)
_NOTICE: tuple[Moment, ...] = ("notice",)
_ANSWER = tuple(one for one in MOMENTS if one not in _NOTICE)
_REQUEST = _ANSWER[1:]
_STREAM: tuple[Moment, ...] = ("before_first_token", "mid_stream", "last_chunk", "before_done")
_BEFORE_HEAD: tuple[Moment, ...] = ("queued", "prefilling", "handed_over", "last_chunk")

Argument = str | int | float | bool


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of fault: its name's meaning."""

    words: str
    """What happens, for people."""
    moments: Sequence[Moment]
    """When it can happen; the first is the default."""
    args: Mapping[str, Argument] = {}
    """Its own arguments and their defaults. Seconds, where they are times."""
    streams: bool = False
    """It can only befall a streamed answer."""
    replaces: bool = False
    """It can only happen while nothing of the answer is out."""


def _first(moment: Moment, among: Sequence[Moment]) -> tuple[Moment, ...]:
    return (moment, *(one for one in among if one != moment))


KINDS: Mapping[str, Kind] = {
    "refuse": Kind(
        words="the listener is closed while the fault is armed; idle connections are dropped",
        moments=("accept",),
        args={"seconds": 0.0},
    ),
    "reset": Kind(words="the connection is reset (RST)", moments=_first("queued", _ANSWER)),
    "eof": Kind(words="the connection is closed in good order (FIN)", moments=_first("mid_stream", _ANSWER)),
    "stall": Kind(words="not a byte more, the connection open; the engine goes on", moments=_first("queued", _ANSWER)),
    "slow": Kind(
        words="`delay` seconds before every write from then on; at queued also before the engine gets the request",
        moments=("queued", "accept", "prefilling", "handed_over", "head", *_STREAM),
        args={"delay": 0.05},
    ),
    "split": Kind(
        words="every write from then on is cut at `cuts` places (0: everywhere), `delay` seconds in between",
        moments=("queued", "prefilling", "handed_over", "head", *_STREAM),
        args={"cuts": 3, "delay": 0.0},
    ),
    "join": Kind(
        words="from then on `count` HTTP chunks (0: all the rest) go out in one write",
        moments=("head", "queued", "prefilling", "handed_over", *_STREAM),
        args={"count": 3},
        streams=True,
    ),
    "half_chunk": Kind(
        words="half of what is due (an HTTP chunk, a whole body), then the connection is closed",
        moments=("mid_stream", "head", "before_first_token", "last_chunk", "before_done"),
    ),
    "garbage": Kind(
        words="bytes that are no HTTP (what=http; close=true: and the end) or no JSON (what=json)",
        moments=_first("queued", _ANSWER),
        args={"what": "http", "close": False},
    ),
    "status": Kind(
        words="another status, `body` (empty: vLLM's error of that status)",
        moments=_BEFORE_HEAD,
        args={"status": 500, "body": "", "location": "/elsewhere"},
        replaces=True,
    ),
    "error_event": Kind(
        words="an error event, `[DONE]` if `done`, the stream's proper end",
        moments=("before_first_token", "queued", "prefilling", "handed_over", "head", *_STREAM[1:]),
        args={"done": True, "code": 500, "message": "Internal server error"},
        streams=True,
    ),
    "empty_body": Kind(words="200 and a body of no bytes", moments=_BEFORE_HEAD, replaces=True),
    "empty_stream": Kind(
        words="200 and a stream without an event (`done`: with `[DONE]` alone)",
        moments=("queued", "prefilling", "handed_over", "head"),
        args={"done": False},
        streams=True,
    ),
    "no_done": Kind(
        words="the proper end of the chunked body, before what is due",
        moments=_first("before_done", _STREAM),
        streams=True,
    ),
    "abort_finish": Kind(
        words='finish_reason "abort" and `[DONE]` or the whole body: what a terminated vLLM may say',
        moments=("mid_stream", "before_first_token", "last_chunk"),
    ),
    "dead_core": Kind(words="the engine core dies, the API server lives", moments=_REQUEST),
    "lease_expiry": Kind(
        words="the lease of every handle given out ends now",
        moments=("handed_over", "queued", "prefilling", "after"),
    ),
    "load_failure": Kind(words="the next pull of KV fails", moments=("handed_over", "queued")),
    "restart": Kind(
        words="killed, and started anew after `down` seconds: new engine id, empty memory",
        moments=_REQUEST,
        args={"down": 0.0},
    ),
    "kill": Kind(words="killed (SIGKILL): all sockets closed by the kernel, the port refuses", moments=_REQUEST),
    "freeze": Kind(
        words="stopped (SIGSTOP) for `seconds` (0: until thawed): sockets open, nothing answers",
        moments=_REQUEST,
        args={"seconds": 0.0},
    ),
    "no_fin": Kind(
        words="terminated (SIGTERM): the listener is gone, open answers fall silent without a FIN", moments=_REQUEST
    ),
    "lost_notice": Kind(
        words="a notice is not sent (`rank`: that worker's alone, empty: any); with rate=1 never one",
        moments=_NOTICE,
        args={"rank": ""},
    ),
    "late_notice": Kind(
        words="a notice is sent `delay` seconds late", moments=_NOTICE, args={"rank": "", "delay": 1.0}
    ),
    "double_notice": Kind(words="a notice is sent twice", moments=_NOTICE, args={"rank": ""}),
    "garbage_notice": Kind(
        words="messages that are no notices go before a notice, or in its place (`instead`)",
        moments=_NOTICE,
        args={"rank": "", "instead": True},
    ),
}
