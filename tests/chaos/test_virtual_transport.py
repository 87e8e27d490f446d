"""Connections in memory behave as asyncio's on sockets: order, water marks, pauses, half close,
reset, links that lose all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context

import msgspec
import pytest

from pdproxy_lab.sim.connector import ProxyNotice
from tests.chaos.virtual.loop import StuckError
from tests.chaos.virtual.network import HOST, LATENCY, VirtualNetwork
from tests.chaos.virtual.notices import VirtualNotices
from tests.chaos.virtual.transport import MAX_READ
from tests.fakes.virtual import Recorder, pair, run


def test_bytes_arrive_once_and_in_order_after_the_latency_of_the_link() -> None:
    async def main(network: VirtualNetwork) -> None:
        client, server = await pair(network)
        network.link("10.0.0.2", "10.0.0.1").latency = 0.5
        begun = asyncio.get_running_loop().time()
        for number in range(100):
            client.transport.write(b"%03d" % number)
        await asyncio.sleep(0.49)
        assert server.data == b""
        network.link("10.0.0.2", "10.0.0.1").latency = 0.0  # what is sent later overtakes nothing
        client.transport.writelines([b"the", b"end"])
        await asyncio.sleep(0.02)
        assert server.data == b"".join(b"%03d" % number for number in range(100)) + b"theend"
        assert asyncio.get_running_loop().time() == pytest.approx(begun + 0.51)

    run(main)


def test_a_writer_is_paused_while_the_other_side_does_not_read() -> None:
    async def main(network: VirtualNetwork) -> None:
        client, server = await pair(network)
        server.transport.pause_reading()
        client.transport.set_write_buffer_limits(high=1000)
        client.transport.write(bytes(65536))
        assert client.transport.get_write_buffer_size() == 0, "the window holds it"
        client.transport.write(bytes(1000))
        assert "pause" not in client.calls
        client.transport.write(bytes(MAX_READ))
        assert client.calls[-1] == "pause"
        await asyncio.sleep(1)
        assert server.data == b""
        assert client.transport.get_write_buffer_size() == 1000 + MAX_READ
        server.transport.resume_reading()
        await asyncio.sleep(1)
        assert len(server.data) == 65536 + 1000 + MAX_READ
        assert client.calls[-1] == "resume"
        assert client.transport.get_write_buffer_size() == 0

    run(main)


def test_a_pause_within_a_read_holds_for_the_next_one() -> None:
    class Reader(Recorder):
        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self.transport.pause_reading()

    async def main(network: VirtualNetwork) -> None:
        server = Reader()
        network.listen("10.0.0.1", 80).accept(lambda: server)
        transport = await network.connect("10.0.0.1", 80)
        transport.attach(Recorder())
        transport.write(b"one")
        await asyncio.sleep(1)
        transport.write(b"two")
        await asyncio.sleep(1)
        assert server.data == b"one"
        server.transport.resume_reading()
        await asyncio.sleep(1)
        assert server.data == b"onetwo"

    run(main)


def test_close_sends_what_waits_then_the_end() -> None:
    async def main(network: VirtualNetwork) -> None:
        client, server = await pair(network)
        client.transport.write(bytes(200_000))
        client.transport.close()
        assert client.transport.is_closing()
        await asyncio.sleep(1)
        assert len(server.data) == 200_000
        assert server.calls == ["made", "data", "eof", "lost"]
        assert client.calls[-1] == "lost"
        assert client.error is None
        assert server.error is None
        assert not network.open

    run(main)


def test_abort_drops_what_waits() -> None:
    async def main(network: VirtualNetwork) -> None:
        client, server = await pair(network)
        client.transport.write(bytes(200_000))
        client.transport.abort()
        await asyncio.sleep(1)
        assert len(server.data) == 65536, "what fitted into the window had left"
        assert server.calls[-2:] == ["eof", "lost"]
        assert client.calls.count("lost") == 1

    run(main)


def test_half_close_lets_the_other_side_go_on() -> None:
    async def main(network: VirtualNetwork) -> None:
        client, server = await pair(network, keeps=True)
        client.transport.write(b"question")
        client.transport.write_eof()
        with pytest.raises(RuntimeError):
            client.transport.write(b"more")
        await asyncio.sleep(1)
        assert server.calls == ["made", "data", "eof"]
        server.transport.write(b"answer")
        server.transport.close()
        await asyncio.sleep(1)
        assert client.data == b"answer"
        assert client.calls[-1] == "eof", "it decides itself when it closes"
        client.transport.close()
        await asyncio.sleep(1)
        assert (client.error, server.error) == (None, None)
        assert not network.open

    run(main)


def test_a_reset_is_an_error_at_the_other_side() -> None:
    async def main(network: VirtualNetwork) -> None:
        client, server = await pair(network)
        client.transport.write(b"some")
        client.transport.reset()
        await asyncio.sleep(1)
        assert server.calls == ["made", "data", "lost"]
        assert isinstance(server.error, ConnectionResetError)
        assert client.error is None

    run(main)


def test_bytes_to_a_closed_socket_and_bytes_that_nobody_read_cause_a_reset() -> None:
    async def main(network: VirtualNetwork) -> None:
        client, server = await pair(network, keeps=True)
        server.transport.close()
        await asyncio.sleep(1)
        client.transport.write(b"too late")
        await asyncio.sleep(1)
        assert isinstance(client.error, ConnectionResetError)
        network.unlisten("10.0.0.1", 80)
        client, server = await pair(network, keeps=True)
        server.transport.pause_reading()
        client.transport.write(b"unread")
        await asyncio.sleep(1)
        server.transport.close()
        await asyncio.sleep(1)
        assert isinstance(client.error, ConnectionResetError)

    run(main)


def test_a_side_that_does_not_read_learns_of_a_reset_when_it_writes() -> None:
    async def main(network: VirtualNetwork) -> None:
        client, server = await pair(network)
        client.transport.pause_reading()
        server.transport.reset()
        await asyncio.sleep(1)
        assert client.calls == ["made"]
        client.transport.write(b"x")
        await asyncio.sleep(1)
        assert isinstance(client.error, ConnectionResetError)

    run(main)


def test_a_link_that_is_cut_holds_everything_until_it_is_up() -> None:
    async def main(network: VirtualNetwork) -> None:
        client, server = await pair(network)
        there = network.link("10.0.0.2", "10.0.0.1")
        there.cut()
        client.transport.write(b"lost")
        server.transport.write(b"back")
        connecting = asyncio.create_task(network.connect("10.0.0.1", 80, source="10.0.0.2"))
        await asyncio.sleep(100)
        assert server.data == b""
        assert client.data == b"back", "the other direction works"
        assert not connecting.done()
        there.up(asyncio.get_running_loop())
        await asyncio.sleep(1)
        assert server.data == b"lost"
        assert connecting.done()
        connecting.result().abort()

    run(main)


def test_connections_are_refused_where_nobody_listens_and_wait_where_nobody_accepts() -> None:
    async def main(network: VirtualNetwork) -> None:
        with pytest.raises(ConnectionRefusedError):
            await network.connect("10.0.0.1", 80)
        listening = network.listen("10.0.0.1", 80)
        with pytest.raises(OSError, match="in use"):
            network.listen("10.0.0.1", 80)
        transport = await network.connect("10.0.0.1", 80)
        client, server = Recorder(), Recorder()
        transport.attach(client)
        transport.write(b"early")
        await asyncio.sleep(1)
        listening.accept(lambda: server)
        await asyncio.sleep(1)
        assert server.data == b"early"
        listening.stop_accepting()
        waiting = Recorder()
        (await network.connect("10.0.0.1", 80)).attach(waiting)
        network.unlisten("10.0.0.1", 80)
        await asyncio.sleep(1)
        assert isinstance(waiting.error, ConnectionResetError)
        assert server.calls[-1] == "data", "a connection that was accepted stays"

    run(main)


def test_a_connect_that_is_cancelled_leaves_nothing() -> None:
    async def main(network: VirtualNetwork) -> None:
        server = Recorder()
        network.listen("10.0.0.1", 80).accept(lambda: server)
        for seconds in (0.5 * LATENCY, 1.5 * LATENCY, 2 * LATENCY):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(seconds):
                    await network.connect("10.0.0.1", 80)
            await asyncio.sleep(1)
            assert not network.open

    run(main)


def test_an_exception_in_a_protocol_ends_its_connection() -> None:
    class Broken(Recorder):
        def data_received(self, data: bytes) -> None:
            raise ValueError("broken")

    async def main(network: VirtualNetwork) -> None:
        told: list[object] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: told.append(context["exception"])
        )
        server = Broken()
        network.listen("10.0.0.1", 80).accept(lambda: server)
        client = Recorder()
        transport = await network.connect("10.0.0.1", 80)
        transport.attach(client)
        transport.write(b"x")
        await asyncio.sleep(1)
        assert [type(one) for one in told] == [ValueError]
        assert server.calls[-1] == "lost"
        assert client.calls[-1] == "lost"

    run(main)


def test_code_runs_in_the_context_of_its_host() -> None:
    async def main(network: VirtualNetwork) -> None:
        seen: list[str] = []

        async def listen() -> None:
            HOST.set("10.0.0.9")

            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                seen.append(HOST.get())
                seen.append(writer.get_extra_info("peername")[0])
                writer.close()

            await asyncio.start_server(serve, "10.0.0.9", 80)

        await asyncio.create_task(listen())
        HOST.set("10.0.0.7")
        reader, writer = await asyncio.open_connection("10.0.0.9", 80)
        assert await reader.read() == b""
        writer.close()
        assert seen == ["10.0.0.9", "10.0.0.7"]

    run(main)


def test_waiting_for_ever_is_an_error() -> None:
    async def main(network: VirtualNetwork) -> None:
        await asyncio.get_running_loop().create_future()

    network = VirtualNetwork()
    from tests.chaos.virtual.loop import VirtualLoop

    loop = VirtualLoop(network)
    with pytest.raises(StuckError):
        loop.run_until_complete(main(network))
    loop.close()


def test_a_connect_may_be_slow() -> None:
    async def main(network: VirtualNetwork) -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        network.listen("10.0.0.1", 80).accept(Recorder)
        took = []
        for network.connects in ({"10.0.0.1": 0.4}, {}):
            begun = loop.time()
            (await network.connect("10.0.0.1", 80, source="10.0.0.2")).abort()
            took.append(loop.time() - begun)
        return took[0], took[1]

    slow, usual = run(main)
    assert slow == pytest.approx(usual + 0.4, abs=0.001)


def test_notices_wait_where_the_link_is_down_and_none_is_lost() -> None:
    async def main(network: VirtualNetwork) -> list[list[int]]:
        link, came = network.link("10.0.0.1", "10.0.0.2"), list[bytes]()
        changes: list[Callable[[], None]] = [
            lambda: None,
            link.cut,
            lambda: link.up(asyncio.get_running_loop()),
        ]
        sender = VirtualNotices(link, came.append, copy_context())
        sender.open(1)
        seen = []
        for number, change in enumerate(changes):
            change()
            sender.send(ProxyNotice({"n": number}))
            assert not any(msgspec.msgpack.decode(one) == {"n": number} for one in came), (
                "it takes the link's time"
            )
            await asyncio.sleep(0.1)
            seen.append([msgspec.msgpack.decode(one)["n"] for one in came])
        await sender.close()
        return seen

    assert run(main) == [[0], [0], [0, 1, 2]]
