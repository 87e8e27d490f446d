"""The moments at which faults can happen. Data only.

A moment is an instant in one request's life. A fault whose moment does not come for a request does
not fire, and stays armed.

| moment | the instant |
|---|---|
| accept | a connection has been accepted, nothing was read from it (there is no request yet: filters don't apply) |
| queued | the request has been read whole, the engine has not received it |
| prefilling | the request is in the engine's queue, nothing was generated for it (a stream's head has been sent) |
| handed_over | prefill: an unstreamed answer with a handle is ready, nothing of it was sent; decode: the pull of the KV begins |
| head | the answer's status and headers have been sent, nothing else |
| before_first_token | streams: the first event with output is due; a chat's role event has been sent |
| mid_stream | streams: `events` (2) events with output have been sent, another one is due |
| last_chunk | streams: the event with the finish reason is due (Responses: the last event); whole answers: ready, nothing was sent |
| before_done | streams: `[DONE]` or `message_stop` is due, everything else has been sent |
| after | the whole answer has been sent |
| notice | a notice to the proxy is due (no answer: the only filter is `rank`, and `next` counts notices) |
| kv_events | a message with KV events is due (as for a notice; `rank` is the data-parallel one) |
| kv_replay | somebody has asked for KV events again (as for a notice) |

From `head` on, and for the `last_chunk` of whole answers, only answers with status 200 have
moments.
"""  # noqa: E501, W505

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

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
    "kv_events",
    "kv_replay",
]
MOMENTS: tuple[Moment, ...] = get_args(Moment)
NOTICE: tuple[Moment, ...] = ("notice",)
KV_EVENTS: tuple[Moment, ...] = ("kv_events",)
KV_REPLAY: tuple[Moment, ...] = ("kv_replay",)
SPELLED: dict[Moment, str] = {
    "notice": "a notice",
    "kv_events": "a message with KV events",
    "kv_replay": "a replay",
}
MESSAGES: tuple[Moment, ...] = tuple(SPELLED)
"""Those at which a message is due that is no answer."""
ANSWER: tuple[Moment, ...] = tuple(one for one in MOMENTS if one not in MESSAGES)
REQUEST = ANSWER[1:]
STREAM: tuple[Moment, ...] = ("before_first_token", "mid_stream", "last_chunk", "before_done")
BEFORE_HEAD: tuple[Moment, ...] = ("queued", "prefilling", "handed_over", "last_chunk")


def default_first(moment: Moment, among: Sequence[Moment]) -> tuple[Moment, ...]:
    """Return the moments with `moment`, the default, in front."""
    return (moment, *(one for one in among if one != moment))
