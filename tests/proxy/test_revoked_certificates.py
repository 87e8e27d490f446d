"""Certificates of clients that are not valid any more, sessions of TLS that are resumed, and
handshakes that never end.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import socket
import ssl
from pathlib import Path

import pytest
import trustme

from pdproxy.web import tls_listener
from pdproxy.web.client_certificates import ClientCertificates
from tests.fakes import scripts
from tests.fakes.client import Answer, Client, request
from tests.fakes.clock import ManualClock
from tests.fakes.tls import Side, front, fronted
from tests.fakes.world import COMPLETIONS, LONG, TEXT, World, completion, until, world

STREAM = completion(stream=True)
HEALTH = request("GET", "/health", b"")
REFUSED = (ssl.SSLError, ConnectionError, asyncio.IncompleteReadError, EOFError)


@pytest.fixture
def another(tmp_path: Path) -> Side:
    """One more authority of clients."""
    return Side(trustme.CA(), tmp_path / "another")


@pytest.fixture
def both(theirs: Side, another: Side, tmp_path: Path) -> Path:
    """A file with both authorities of clients."""
    path = tmp_path / "both.pem"
    path.write_bytes(theirs.ca.cert_pem.bytes() + another.ca.cert_pem.bytes())
    return path


def take_away(w: World, both: Path, left: Side) -> None:
    """Leave one authority in the file, and have the proxy notice."""
    left.ca.cert_pem.write_to_path(str(both))
    w.look_at_files()


def at(w: World, moment: datetime.datetime) -> None:
    """Have the proxy take a moment for now, and look."""
    for worker in w.workers:
        for call in worker.credentials.then:
            if isinstance(owner := getattr(call, "__self__", None), ClientCertificates):
                owner._now = moment.timestamp
                owner.look()


async def streams(w: World, tls: ssl.SSLContext) -> Client:
    """A client whose stream has begun."""
    w.tls = tls
    client = await w.client()
    client.post(COMPLETIONS, STREAM)
    assert (await client.head()).status == 200
    await client.piece()
    return client


async def ends(client: Client) -> bytes:
    """The rest of a stream, whose body must come to its proper end."""
    answer = await client.rest(Answer(200, [("transfer-encoding", "chunked")]))
    assert answer.ended
    return answer.body


async def code(client: Client) -> str:
    """The code of the error with which a stream ends."""
    last = (await ends(client)).split(b"data: ")[-1]
    return str(json.loads(last)["error"]["code"])


async def test_an_authority_that_is_taken_away_closes_its_connections(
    ours: Side, theirs: Side, another: Side, both: Path
) -> None:
    """Its stream ends with an error, its engine is told, idle connections close; those of the other
    authority go on.
    """
    async with world(adjust=front(ours, client_ca=str(both))) as w:
        go = asyncio.Event()
        w.decode[0].script(*[scripts.after_word(go, scripts.one_more_word)] * 2)
        stream, other = (
            await streams(w, ours.trusting(theirs)),
            await streams(w, ours.trusting(another)),
        )
        w.tls = ours.trusting(theirs)
        idle = await w.client()
        idle.send(HEALTH)
        assert (await idle.answer()).status == 200
        take_away(w, both, another)
        assert await code(stream) == "certificate_revoked"
        assert await stream.closed()
        assert await idle.closed()
        await asyncio.wait_for(w.decode[0].requests[0].left.wait(), LONG)
        go.set()
        assert (await ends(other)).endswith(b"data: [DONE]\n\n")
        other.send(HEALTH)
        assert (await other.answer()).status == 200


async def test_a_renewed_certificate_of_the_server_ends_nothing(
    ours: Side, theirs: Side, both: Path
) -> None:
    """Neither does a new authority beside the old ones."""
    async with world(adjust=front(ours, client_ca=theirs.authority)) as w:
        go = asyncio.Event()
        w.decode[0].script(scripts.after_word(go, scripts.one_more_word))
        stream = await streams(w, ours.trusting(theirs))
        ours.sign()
        Path(theirs.authority).write_bytes(both.read_bytes())
        w.look_at_files()
        go.set()
        assert (await ends(stream)).endswith(b"data: [DONE]\n\n")


async def test_a_certificate_that_expires_closes_its_connections(ours: Side, theirs: Side) -> None:
    """At its end, and not before; its next handshake is refused by OpenSSL itself."""
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    theirs.sign(not_after=end)
    async with world(adjust=front(ours, client_ca=theirs.authority)) as w:
        w.decode[0].script(scripts.after_word(asyncio.Event(), scripts.one_more_word))
        stream = await streams(w, ours.trusting(theirs))
        idle = await w.client()
        idle.send(HEALTH)
        assert (await idle.answer()).status == 200
        at(w, end - datetime.timedelta(seconds=2))
        idle.send(HEALTH)
        assert (await idle.answer()).status == 200
        at(w, end + datetime.timedelta(seconds=1))
        assert await code(stream) == "certificate_expired"
        assert await idle.closed()
        with pytest.raises(REFUSED):
            await w.get("/health")


# -- sessions that are resumed


def ask(
    port: int, context: ssl.SSLContext, own: ssl.SSLSession | None = None
) -> tuple[ssl.SSLSession, bool]:
    """Ask for /health on a new connection; return its session, and whether that was resumed.

    OpenSSL keeps a session only if both sides have said goodbye. Raises EOFError without an answer.
    """
    with (
        socket.create_connection(("127.0.0.1", port), LONG) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1", session=own) as one,
    ):
        one.sendall(request("GET", "/health", b"", [("connection", "close")]))
        if not one.recv(65536).startswith(b"HTTP/1.1 200"):
            raise EOFError
        while one.recv(65536):
            pass
        session, resumed = one.session, bool(one.session_reused)
        assert session is not None
        one.unwrap()
        return session, resumed


@pytest.mark.parametrize("tickets", [True, False], ids=["tickets", "ids"])
@pytest.mark.parametrize(
    "version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["1.2", "1.3"]
)
async def test_a_session_does_not_outlive_its_authority(
    ours: Side, theirs: Side, another: Side, both: Path, version: ssl.TLSVersion, tickets: bool
) -> None:
    """A session of each kind that TLS has, from before the change, lets nobody in after it."""
    context = ours.trusting(theirs)
    context.minimum_version = context.maximum_version = version
    if not tickets:
        context.options |= ssl.OP_NO_TICKET
    async with world(adjust=front(ours, client_ca=str(both))) as w:
        session, _ = await asyncio.to_thread(ask, w.port, context)
        await asyncio.to_thread(ask, w.port, context, session)
        take_away(w, both, another)
        with pytest.raises(REFUSED):
            await asyncio.to_thread(ask, w.port, context, session)
        context.load_cert_chain(another.certificate, another.key)
        await asyncio.to_thread(ask, w.port, context)


async def test_a_session_does_not_outlive_its_certificate(ours: Side, theirs: Side) -> None:
    """OpenSSL looks at no date when it resumes a session of TLS 1.2. Until the end of the
    certificate that works.
    """
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    theirs.sign(not_after=end)
    context = ours.trusting(theirs)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    async with world(adjust=front(ours, client_ca=theirs.authority)) as w:
        session, _ = await asyncio.to_thread(ask, w.port, context)
        resumed = await asyncio.to_thread(ask, w.port, context, session)
        if len(w.workers) == 1:
            assert resumed[1]
        at(w, end + datetime.timedelta(seconds=1))
        with pytest.raises(REFUSED):
            await asyncio.to_thread(ask, w.port, context, session)


async def test_without_client_certificates_sessions_are_resumed(ours: Side) -> None:
    """They let in nobody who had to show anything: a handshake is saved."""
    async with fronted(ours) as w:
        context = ours.trusting()
        session, _ = await asyncio.to_thread(ask, w.port, context)
        _, resumed = await asyncio.to_thread(ask, w.port, context, session)
        assert resumed or len(w.workers) > 1


# -- handshakes that never end


async def silent(w: World, count: int, address: str = "127.0.0.2") -> list[asyncio.StreamReader]:
    """Connections that send nothing."""
    found = []
    for _ in range(count):
        plain = await Client.connect(w.port, address=address)
        w._clients.append(plain)
        found.append(plain.reader)
    return found


async def test_a_handshake_that_never_ends_counts_and_ends(ours: Side) -> None:
    """It is a connection from the moment at which it is accepted, and is closed after
    deadlines.client_head.
    """
    clock = ManualClock()
    async with fronted(ours, clock=clock, deadlines={"client_head": 10}) as w:
        (reader,) = await silent(w, 1)
        await until(lambda: w.open_connections == 1)
        await clock.advance(9)
        assert not reader.at_eof()
        await clock.advance(2)
        assert await asyncio.wait_for(reader.read(), LONG) == b""
        await until(lambda: w.open_connections == 0)
        assert w.metric("pdproxy_deadline_total", wait="client_head") == 1


async def test_connections_without_a_handshake_take_nobody_elses_place(ours: Side) -> None:
    """At limits.max_connections the client that has the most of them loses one, whether it has
    begun to speak or not.
    """
    async with fronted(ours, limits={"max_connections": 4}) as w:
        await silent(w, 12 * len(w.workers))
        await until(
            lambda: w.metric("pdproxy_evicted_total", what="connection") >= 8 * len(w.workers)
        )
        await until(lambda: w.open_connections <= 4 * len(w.workers))
        assert (await w.ask(COMPLETIONS, completion())).text == TEXT


async def test_handshakes_have_a_limit_of_their_own(
    ours: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the limit on connections: the client with the most handshakes loses the oldest one."""
    monkeypatch.setattr(tls_listener, "MIN_HANDSHAKES", 2)
    async with fronted(ours, limits={"max_connections": 16}) as w:
        readers = await silent(w, 7 * len(w.workers))
        await until(lambda: any(reader.at_eof() for reader in readers))
        await until(lambda: w.open_connections <= 4 * len(w.workers))
        assert (await w.ask(COMPLETIONS, completion())).text == TEXT
