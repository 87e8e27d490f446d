"""What the supervisor keeps of the scheduler process, so that its successor begins with it, and a
worker that is started again: texts with bytes, of which the supervisor knows nothing.

The supervisor's part is a dict, of which a process that is forked has a copy. The scheduler process
sends what has changed within one turn of its event loop, and is told when that is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

import msgspec

from pdproxy.workers.links import Message

KEEP, KEPT = "keep", "kept"
"""What the scheduler process sends: by keys what is to be kept, or None for what is not any more
(`number`: its own of the message). What the supervisor answers once that is so (`number`: the
same).
"""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, bytes | None]).decode


def keep(kept: dict[str, bytes], message: Message) -> Message:
    """Keep what a message says, in the supervisor. Return the answer."""
    for key, body in _decode(message.body).items():
        if body is None:
            kept.pop(key, None)
        else:
            kept[key] = body
    return Message(KEPT, message.number)


class Keeper:
    """The scheduler process's part. `send` sends the supervisor a message. `kept`: what was kept
    when this process began.
    """

    def __init__(self, send: Callable[[Message], None], kept: Mapping[str, bytes]) -> None:
        self._send = send
        self._kept = kept
        self._due: dict[str, bytes | None] = {}
        self._sent = self._answered = 0
        self._was_answered = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Keeper: {len(self._due)} to be kept>"

    def kept_of(self, topic: str) -> list[bytes]:
        """Return what was kept when this process began, by keys that begin with this word."""
        return [body for key, body in self._kept.items() if key.partition(" ")[0] == topic]

    def keep(self, key: str, body: bytes | None) -> None:
        """Have something kept, None: not any more. Needs a running event loop."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._flush)
        self._due.pop(key, None)
        self._due[key] = body

    def _flush(self) -> None:
        if self._due:
            due, self._due = self._due, {}
            self._sent += 1
            self._send(Message(KEEP, self._sent, body=_encode(due)))

    def received(self, message: Message) -> None:
        """Process an answer of the supervisor."""
        self._answered = message.number
        self._was_answered.set()

    async def all_kept(self, seconds: float) -> bool:
        """Wait until all is kept that was to be until now, for so many seconds at most. Return
        whether it is.
        """
        self._flush()
        number = self._sent
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._answered < number:
                    self._was_answered.clear()
                    await self._was_answered.wait()
        return self._answered >= number
