"""What the scheduler process and workers say to each other about the legs of one pool: the topic of
these messages, and their bodies.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


def topic(pool: int) -> str:
    """Return the topic of the pool with this number."""
    return f"legs {pool}"


class Ask(msgspec.Struct, array_like=True, tag=0):
    """Asks a worker to tell what its legs have shown. `number`: of the question."""

    number: int


class EngineLegs(msgspec.Struct, array_like=True):
    """What a worker's legs have shown of one engine.

    Since it was told last, in prompt tokens: by how much those have changed whose KV is `loading`,
    and how many have `arrived`.
    """

    url: str
    loading: int = 0
    arrived: int = 0


class Told(msgspec.Struct, array_like=True, tag=0):
    """The answer to a question; number 0 comes without one, from a worker that is asked from now
    on. Of engines that it does not name nothing has changed.
    """

    number: int
    engines: Sequence[EngineLegs] = ()


FromScheduler = Ask
FromWorker = Told

encode = msgspec.msgpack.Encoder().encode
decode_of_worker = msgspec.msgpack.Decoder(FromWorker).decode
"""Returns what a worker has said. Raises msgspec.MsgspecError."""
decode_of_scheduler = msgspec.msgpack.Decoder(FromScheduler).decode
"""Returns what the scheduler process has said. Raises msgspec.MsgspecError."""
