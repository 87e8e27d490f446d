"""A small name server for tests: it answers over UDP and TCP what a test has put into it."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import cast

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

Key = tuple[str, str]


class NameServer(asyncio.DatagramProtocol):
    """`records`: by name and type, the time to live with the texts of records. A name without any
    does not exist.

    `fault`, for all questions or by type: servfail, refused, nxdomain, silent, garbage, short (half
    a message), other (the answer to another question), truncated (only TCP has the answer).
    """

    def __init__(self) -> None:
        self.records: dict[Key, tuple[int, Sequence[str]]] = {}
        self.fault: str | dict[str, str] = ""
        self.asked: list[Key] = []
        self.over_tcp = 0
        self.port = 0
        self._transport: asyncio.DatagramTransport | None = None
        self._tcp: asyncio.Server | None = None

    @property
    def address(self) -> str:
        """As `dns.servers` takes it."""
        return f"127.0.0.1:{self.port}"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)  # uvloop's is no subclass

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        answer = self._answer(data, tcp=False)
        if answer is not None and self._transport is not None:
            self._transport.sendto(answer, addr)

    async def _over_tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (size,) = struct.unpack("!H", await reader.readexactly(2))
        answer = self._answer(await reader.readexactly(size), tcp=True)
        if answer is not None:
            self.over_tcp += 1
            writer.write(struct.pack("!H", len(answer)) + answer)
        writer.close()

    def _answer(self, data: bytes, *, tcp: bool) -> bytes | None:
        query = dns.message.from_wire(data)
        (question,) = query.question
        name, kind = (
            question.name.to_text(omit_final_dot=True),
            dns.rdatatype.to_text(question.rdtype),
        )
        self.asked.append((name, kind))
        fault = self.fault if isinstance(self.fault, str) else self.fault.get(kind, "")
        answer = dns.message.make_response(query, recursion_available=True)
        if fault == "silent":
            return None
        if fault == "garbage":
            return b"\xff" * 40
        if fault == "other":
            answer.id ^= 1
        if fault == "truncated" and not tcp:
            answer.flags |= dns.flags.TC
            return answer.to_wire()
        if fault in ("servfail", "refused", "nxdomain"):
            answer.set_rcode(
                {"servfail": dns.rcode.SERVFAIL, "refused": dns.rcode.REFUSED}.get(
                    fault, dns.rcode.NXDOMAIN
                )
            )
            return answer.to_wire()
        if not any(known == name for known, _ in self.records):
            answer.set_rcode(dns.rcode.NXDOMAIN)
            return answer.to_wire()
        ttl, texts = self.records.get((name, kind), (0, ()))
        if texts:
            answer.answer.append(
                dns.rrset.from_text_list(question.name, ttl, "IN", kind, list(texts))
            )
        wire = answer.to_wire(max_size=65_535)
        return wire[: len(wire) // 2] if fault == "short" else wire

    async def listen(self) -> None:
        """Begin."""
        loop = asyncio.get_running_loop()
        while True:
            self._tcp = await asyncio.start_server(self._over_tcp, "127.0.0.1", 0)
            self.port = self._tcp.sockets[0].getsockname()[1]
            try:
                await loop.create_datagram_endpoint(
                    lambda: self, local_addr=("127.0.0.1", self.port)
                )
            except OSError:  # the port is taken for UDP
                self._tcp.close()
                continue
            return

    def close(self) -> None:
        """End."""
        if self._transport is not None:
            self._transport.close()
        if self._tcp is not None:
            self._tcp.close()


@asynccontextmanager
async def name_server() -> AsyncIterator[NameServer]:
    """Run one."""
    server = NameServer()
    await server.listen()
    try:
        yield server
    finally:
        server.close()
