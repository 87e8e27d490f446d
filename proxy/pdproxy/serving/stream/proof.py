"""Whether a stream is proven good, by its first real data: an engine may answer 200 and then send
only an error. Pure.
"""

from __future__ import annotations

from pdproxy.kit.errors import EngineError
from pdproxy.serving.stream.failures import failure_in, tiny_lines
from pdproxy.wire import sse


def has_real_data(batch: bytes) -> bool:
    """Return whether one of these events is real data: not the opening of a chat, a comment, an
    error or the end mark.

    Raises:
        EngineError: the stream has failed, or ends before any data.
    """
    if sse.has_tiny_lines(batch):
        raise tiny_lines()
    plain = sse.plain_size(batch)
    real = any(not sse.is_role_only(event) for event in batch[:plain].split(sse.END)[:-1])
    if real:
        batch = batch[plain:]
    spaced = sse.is_spaced(batch)
    for bare in batch.split(sse.END):
        if not bare:
            continue
        event = sse.compact(bare) if spaced else bare
        lines = sse.data_lines(event)
        # nothing, a keep-alive comment, the opening of a chat
        if not lines or sse.is_role_only(event):
            continue
        if (error := failure_in(event, lines)) is not None:
            raise error
        if sse.is_done(lines[0]):
            if not real:
                raise EngineError("the engine ended the stream without any data")
            break
        if sse.is_usage_only(event):  # no data: it also comes where no choice has got a token
            continue
        real = True
    return real
