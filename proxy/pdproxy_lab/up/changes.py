"""Changes of what runs, engine by engine (`--apply`): what can be changed, in which order, and how
another `up` hands its wishes to the one that runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from pdproxy_lab.up.arrangement import PlannedEngine
from pdproxy_lab.up.errors import CANT_START, UpError
from pdproxy_lab.up.state import MAX_STATE, Folder, State

DEADLINE = 10.0
"""Seconds for a whole order to come, and for the running `up` to take it."""
MAX_LINE = 1 << 16
_OK, _FAILED, _SAYS = "ok", "failed", "says"


class Reply(msgspec.Struct, frozen=True):
    """A line of the running `up`: what it says, or how the change has ended."""

    kind: str
    text: str = ""


def refuse_other(old: State, new: State) -> None:
    """Refuse what can't be changed while it runs.

    Raises:
        UpError: one sentence.
    """
    what = None
    if old.model != new.model:
        what = f"the model ({old.model} runs)"
    elif old.port != new.port:
        what = f"the proxy's port ({old.port})"
    elif old.engines != new.engines or old.events_port != new.events_port:
        names = ", ".join(engine.name for engine in old.engines)
        what = f"the engines, their GPUs and ports ({names} run)"
    if what is not None:
        raise UpError(
            f"--apply can't change {what}: end the `pdproxy up` that runs, and start it anew",
            CANT_START,
        )


def in_order(engines: Sequence[PlannedEngine]) -> list[str]:
    """Return the names of the engines in the order in which they are started again: one of each
    role, then the next one of each.

    Engines may share KV only with those that were started with the same flags: so there are two of
    them soon, and two of the others as long as possible.
    """
    counts: dict[str, int] = {}
    places = []
    for engine in engines:
        counts[engine.role] = counts.get(engine.role, -1) + 1
        places.append((counts[engine.role], engine.name))
    return [name for _, name in sorted(places, key=lambda one: one[0])]


async def submit(folder: Folder, wanted: State, say: Callable[[str], None]) -> None:
    """Have the running `up` make a change, and pass on what it says.

    Raises:
        UpError: it does not serve yet, or refuses, or fails.
    """
    try:
        async with asyncio.timeout(DEADLINE):
            reader, writer = await asyncio.open_unix_connection(str(folder.orders), limit=MAX_LINE)
            writer.write(msgspec.json.encode(wanted) + b"\n")
            await writer.drain()
    except (OSError, TimeoutError):
        raise UpError(
            f"the `pdproxy up` of {folder.path} takes no changes: it does not serve yet, or ends"
        ) from None
    try:
        # a change takes as long as answers and starts do: the other side bounds each of them
        while line := await reader.readline():
            reply = msgspec.json.decode(line, type=Reply)
            if reply.kind == _SAYS:
                say(reply.text)
            elif reply.kind == _FAILED:
                raise UpError(reply.text)
            else:
                return
    except (OSError, ValueError) as error:
        raise UpError(f"the `pdproxy up` that runs answers something else: {error}") from None
    finally:
        writer.close()
    raise UpError("the `pdproxy up` that runs has ended before the change was made")


class Orders:
    """Takes changes, one at a time. `make` makes one, and says what it does.

    Only the user that owns the folder reaches the socket.
    """

    def __init__(
        self, folder: Folder, make: Callable[[State, Callable[[str], None]], Awaitable[None]]
    ) -> None:
        self._folder = folder
        self._make = make
        self._server: asyncio.Server | None = None
        self._busy = False

    async def start(self) -> None:
        """Listen."""
        self._folder.orders.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(
            self._take, str(self._folder.orders), limit=MAX_STATE
        )

    def close(self) -> None:
        """Take no more."""
        if self._server is not None:
            self._server.close()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def reply(kind: str, text: str = "") -> None:
            if not writer.is_closing():
                writer.write(msgspec.json.encode(Reply(kind, text[: MAX_LINE // 8])) + b"\n")

        try:
            async with asyncio.timeout(DEADLINE):
                line = await reader.readline()
            wanted = msgspec.json.decode(line, type=State)
            if self._busy:
                raise UpError("another change is being made")
            self._busy = True
            try:
                await self._make(wanted, lambda text: reply(_SAYS, text))
            finally:
                self._busy = False
            reply(_OK)
        except UpError as error:
            reply(_FAILED, str(error))
        except (OSError, TimeoutError, ValueError):
            reply(_FAILED, "the change can't be read: is it of this version of pdproxy?")
        finally:
            writer.close()
