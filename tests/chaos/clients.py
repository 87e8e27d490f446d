"""The clients of a run: what each does with its connection, and how each of its requests ended."""

from __future__ import annotations

import asyncio

import msgspec

from tests.chaos.access import Credentials, Refusals
from tests.chaos.answers import Answer, MalformedError, read_answer
from tests.chaos.oracle import Body, judge
from tests.chaos.schedule import Call
from tests.chaos.virtual.network import VirtualNetwork
from tests.chaos.virtual.transport import WINDOW, VirtualTransport

_NARROW = 512
"""Bytes on the way to a client that reads slowly, and of each of its reads."""
_TOO_SLOW: Refusals = frozenset({(408, "")})
_PIECES = 3
"""In so many pieces a client that sends slowly sends its request."""


class Outcome(msgspec.Struct, frozen=True):
    """How one request ended for its client.

    `how`: right, error (a well-formed one), wrong, cut (the connection ended within the answer),
    refused (there was no connection), silent (nothing came in time), or left (it left itself).
    `sent`: whether the request was sent whole.
    """

    ident: str
    item: int
    how: str
    detail: str
    began: float
    ended: float
    sent: bool = True
    slow: bool = False
    """Whether the client itself was so slow that it may have been dropped."""
    sender: Credentials = Credentials()
    ready: float | None = None
    """When the request was sent whole and it was its turn, None if that is not known."""

    @property
    def reason(self) -> str:
        """The reason of a refusal, empty if there is none."""
        return (
            self.detail.partition(" ")[2]
            if self.how == "error" and not self.detail.startswith("event")
            else ""
        )


class Visitors:
    """Runs calls. `patience`: seconds after which a client that got no whole answer gives up."""

    def __init__(
        self, network: VirtualNetwork, address: tuple[str, int], asked: list[Body], patience: float
    ) -> None:
        self._network = network
        self._address = address
        self._bodies = asked
        self._patience = patience
        self.outcomes: list[Outcome] = []
        self.asked: dict[str, Body] = {}
        """What was asked, by request."""

    async def visit(self, call: Call, name: str, source: str) -> None:
        """Do what a call says; `name` begins its requests' ids, `source` is the client's
        address.
        """
        loop = asyncio.get_running_loop()
        idents = [f"{name}-{place}" for place in range(len(call.bodies))]
        self.asked |= {
            ident: self._bodies[number] for ident, number in zip(idents, call.bodies, strict=True)
        }
        began = loop.time()
        try:
            async with asyncio.timeout(self._patience):
                window = _NARROW if call.client == "reads_slowly" else WINDOW
                transport = await self._network.connect(
                    *self._address, source=source, window=window
                )
        except (OSError, TimeoutError) as error:
            self._end(idents[0], call, "refused", type(error).__name__, began, sent=False)
            return
        # What is kept for a reader that does not read is little, so that the other side feels it.
        reader = asyncio.StreamReader(limit=_NARROW if call.client == "reads_slowly" else 1 << 20)
        transport.attach(asyncio.StreamReaderProtocol(reader))
        try:
            if call.client == "pipelines":
                for place, ident in enumerate(idents):
                    body = self._bodies[call.bodies[place]]
                    keep = place < len(idents) - 1
                    transport.write(body.request(ident, keep=keep, headers=call.sender.headers))
            for place, ident in enumerate(idents):
                if not await self._ask(call, place, ident, transport, reader):
                    # these were sent; the connection ends with the failure before them
                    if call.client == "pipelines":
                        now = loop.time()
                        for later in idents[place + 1 :]:
                            self._end(later, call, "left", "behind a failure", now, sent=True)
                    break
        finally:
            if call.client == "resets":
                transport.reset()
            transport.abort()

    async def _ask(
        self,
        call: Call,
        place: int,
        ident: str,
        transport: VirtualTransport,
        reader: asyncio.StreamReader,
    ) -> bool:
        """Send one request, unless it was, and read its answer. Return whether the connection can
        be used again.
        """
        body = self._bodies[call.bodies[place]]
        last = place == len(call.bodies) - 1
        began = asyncio.get_running_loop().time()
        answer, sent, ready = (
            Answer(),
            True,
            None if call.client == "pipelines" and place else began,
        )
        how, detail = "cut", ""
        # Nothing counts here what a client has taken, so one that reads while more comes may be
        # found slow, as on a system without TCP_INFO.
        slow = call.client == "reads_slowly" or (call.client == "sends_slowly" and call.amount >= 1)
        try:
            async with asyncio.timeout(self._patience):
                if call.client == "sends_slowly":
                    sent, ready = False, None
                    request = body.request(ident, keep=False, headers=call.sender.headers)
                    await _send_slowly(request, transport, call.amount)
                    sent, ready = True, asyncio.get_running_loop().time()
                elif call.client != "pipelines":
                    transport.write(body.request(ident, keep=not last, headers=call.sender.headers))
                if call.client in ("leaves", "resets"):
                    how, detail = await _leave(reader, answer, call.amount)
                else:
                    pace = call.amount if call.client == "reads_slowly" else 0.0
                    await read_answer(reader, answer, pace, _NARROW if pace else 1 << 16)
                    how, detail = judge(
                        answer, body, call.sender.refusals | (_TOO_SLOW if slow else frozenset())
                    )
        except TimeoutError:
            how, detail = (
                "silent",
                f"{len(answer.body)} bytes of an answer with status {answer.status}",
            )
        except MalformedError as error:
            how, detail = "wrong", str(error)
        except (OSError, EOFError) as error:
            how, detail = (
                "cut",
                f"{type(error).__name__} after {len(answer.body)} bytes, status {answer.status}",
            )
        self._end(ident, call, how, detail, began, sent=sent, slow=slow, ready=ready)
        return how == "right" and not answer.closes

    def _end(
        self,
        ident: str,
        call: Call,
        how: str,
        detail: str,
        began: float,
        *,
        sent: bool,
        slow: bool = False,
        ready: float | None = None,
    ) -> None:
        now = asyncio.get_running_loop().time()
        self.outcomes.append(
            Outcome(ident, call.number, how, detail, began, now, sent, slow, call.sender, ready)
        )


async def _send_slowly(request: bytes, transport: VirtualTransport, pace: float) -> None:
    size = len(request) // _PIECES + 1
    for at in range(0, len(request), size):
        if transport.is_closing():
            raise ConnectionResetError
        transport.write(request[at : at + size])
        await asyncio.sleep(pace)


async def _leave(reader: asyncio.StreamReader, answer: Answer, after: float) -> tuple[str, str]:
    """Read until so many bytes of the body have come, or for so many seconds if it is less than
    one: half a second with 0.
    """
    reading = asyncio.ensure_future(read_answer(reader, answer))
    try:
        if after < 1:
            await asyncio.wait([reading], timeout=after or 0.5)
        while after >= 1 and not reading.done() and len(answer.body) < after:
            await asyncio.wait([reading], timeout=0.01)
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    return "left", f"after {len(answer.body)} bytes"
