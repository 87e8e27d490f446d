"""TLS on both sides: clients in front, engines behind, certificates that change, and what is told of untrusted ones."""

import asyncio
import datetime
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from pdproxy.cli.main import main
from pdproxy.kit.errors import EngineTlsError, Wait
from pdproxy.observe.events import RequestEnded
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.schema import EngineTls, ListenTls, Settings
from pdproxy.settings.tls import engine_context, listen_context, merged
from pdproxy.upstream.client import EngineClient
from tests.fakes import answers, scripts
from tests.fakes.client import Client, request
from tests.fakes.engine import Reply
from tests.fakes.world import CHAT, CHAT_TEXT, COMPLETIONS, TEXT, World, chat, completion, until, world

BIG = answers.piece(False, "x" * 30_000)


@dataclass
class Side:
    """One authority and what it has signed for this machine, in files and as a server's context."""

    ca: trustme.CA
    folder: Path

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.ca.cert_pem.write_to_path(self.authority)
        self.sign()

    def sign(self, *names: str, **more: Any) -> None:
        """Write a new certificate and key over those before."""
        one = self.ca.issue_cert(*(names or ("127.0.0.1", "localhost")), **more)
        one.private_key_pem.write_to_path(self.key)
        with Path(self.certificate).open("wb") as file:
            file.writelines(part.bytes() for part in one.cert_chain_pems)

    @property
    def authority(self) -> str:
        return str(self.folder / "ca.pem")

    @property
    def certificate(self) -> str:
        return str(self.folder / "cert.pem")

    @property
    def key(self) -> str:
        return str(self.folder / "key.pem")

    def server(self) -> ssl.SSLContext:
        """The context of a server with this certificate."""
        return listen_context(ListenTls(certificate=self.certificate, key=self.key))

    def trusting(self, own: "Side | None" = None) -> ssl.SSLContext:
        """The context of a client that trusts this authority, with a certificate of `own`."""
        context = ssl.create_default_context(cafile=self.authority)
        if own is not None:
            context.load_cert_chain(own.certificate, own.key)
        return context


@pytest.fixture(scope="module")
def authorities() -> tuple[trustme.CA, trustme.CA]:
    return trustme.CA(), trustme.CA()


@pytest.fixture
def ours(authorities: tuple[trustme.CA, trustme.CA], tmp_path: Path) -> Side:
    return Side(authorities[0], tmp_path / "ours")


@pytest.fixture
def theirs(authorities: tuple[trustme.CA, trustme.CA], tmp_path: Path) -> Side:
    return Side(authorities[1], tmp_path / "theirs")


def front(side: Side, **more: Any) -> Callable[[Settings], Settings]:
    """Settings with TLS for clients."""

    def adjust(settings: Settings) -> Settings:
        tls = ListenTls(certificate=side.certificate, key=side.key, **more)
        return msgspec.structs.replace(settings, listen=msgspec.structs.replace(settings.listen, tls=tls))

    return adjust


def behind(**tls: Any) -> Callable[[Settings], Settings]:
    """Settings with TLS for engines, as the pool says it."""

    def adjust(settings: Settings) -> Settings:
        pools = tuple(msgspec.structs.replace(pool, tls=EngineTls(**tls)) for pool in settings.pools)
        return msgspec.structs.replace(settings, pools=pools)

    return adjust


def fronted(ours: Side, **more: Any) -> AbstractAsyncContextManager[World]:
    return world(adjust=front(ours), client_tls=ours.trusting(), **more)


def connections(w: World) -> list[Any]:
    """The proxy's connections with clients."""
    assert w.server is not None
    return list(w.server.server_state.connections)


def legs_failed(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """What the log says of legs that failed."""
    return [r.fields for r in caplog.records if r.getMessage() == "leg failed"]  # type: ignore[attr-defined]


# -- clients


@pytest.mark.parametrize("stream", [False, True])
async def test_the_data_path_and_fastapi_speak_tls(ours: Side, stream: bool) -> None:
    """Both halves of the server answer through TLS as they do without it."""
    async with fronted(ours) as w:
        answer = await w.ask(COMPLETIONS, completion(stream=stream))
        assert (answer.status, answer.text, answer.ended) == (200, TEXT, True)
        assert (await w.get("/ready")).json["ready"] is True


async def test_both_sides_at_once(ours: Side, theirs: Side) -> None:
    """Clients and engines in TLS by different authorities."""

    def adjust(settings: Settings) -> Settings:
        return behind(ca=theirs.authority)(front(ours)(settings))

    async with world(adjust=adjust, client_tls=ours.trusting(), engine_tls=theirs.server()) as w:
        assert (await w.ask(CHAT, chat(stream=True))).text == CHAT_TEXT


async def test_plain_http_to_a_tls_port_is_no_request(ours: Side) -> None:
    """A client without TLS gets no answer, and the next one with it does."""
    async with fronted(ours) as w:
        plain = await Client.connect(w.port)
        plain.send(request("GET", "/health", b""))
        assert await plain.closed()
        assert (await w.get("/health")).status == 200


async def test_http_1_0_ends_with_the_connection(ours: Side) -> None:
    """A stream to HTTP/1.0 has no chunks: TLS's own end is the body's end."""
    async with fronted(ours) as w:
        client = await w.client()
        client.post(COMPLETIONS, completion(stream=True), version="1.0")
        answer = await client.answer()
        assert answer.header("transfer-encoding") is None
        assert answer.text == TEXT
        assert answer.body.endswith(b"data: [DONE]\n\n")


async def test_requests_in_the_pipeline(ours: Side) -> None:
    """Requests sent at once are answered in their order."""
    async with fronted(ours) as w:
        client = await w.client()
        one = request("POST", COMPLETIONS, completion())
        client.send(one + request("POST", CHAT, chat(stream=True)) + request("GET", "/health", b"") + one)
        answers = [await client.answer() for _ in range(4)]
        assert [answer.status for answer in answers] == [200] * 4
        assert [answers[0].text, answers[1].text, answers[3].text] == [TEXT, CHAT_TEXT, TEXT]


async def test_a_prompt_of_64_kib(ours: Side) -> None:
    """A body of several TLS records arrives whole, in pieces of any size."""
    async with fronted(ours, facts={"max_model_len": 65_536}) as w:
        ids = [5] * (32 * 1024)
        client = await w.client()
        data = request("POST", COMPLETIONS, completion(prompt=ids, max_tokens=1))
        assert len(data) > 64 * 1024
        for start in range(0, len(data), 10_007):
            client.send(data[start : start + 10_007])
            await asyncio.sleep(0)
        answer = await client.answer()
        assert answer.status == 200, answer.body
        assert answer.json["usage"]["prompt_tokens"] == len(ids)


async def test_a_refused_body_is_no_next_request(ours: Side) -> None:
    """TLS's own goodbye takes a while: a good request that comes behind a refused one is not served in between."""

    def adjust(settings: Settings) -> Settings:
        auth = msgspec.structs.replace(settings.auth, api_keys=("one",))
        return msgspec.structs.replace(front(ours)(settings), auth=auth)

    async with world(adjust=adjust, client_tls=ours.trusting()) as w:
        good = request("POST", COMPLETIONS, completion(), [("authorization", "Bearer one")])
        client = await w.client()
        head = request("POST", COMPLETIONS, b"", [("authorization", "Bearer two")])
        client.send(head.replace(b"content-length: 0", b"content-length: 4"))
        assert (await client.answer()).status == 401
        client.send(b"body" + good)
        assert await client.closed()
        await until(lambda: w.server is not None and not w.server.server_state.tasks)
        assert len(w.events(RequestEnded)) == 1
        assert not [r for engine in w.engines for r in engine.requests]


@pytest.mark.parametrize("leave", ["close", "reset", "half"])
async def test_a_client_that_leaves_mid_stream_ends_its_request(ours: Side, leave: str) -> None:
    """A close with and without TLS's goodbye, and a half-close, cancel: the engine sees its client leave."""
    async with fronted(ours, leaves=True) as w:
        w.decode[0].script(scripts.streams(scripts.WORD, then="stall"))
        client = await w.client()
        client.post(COMPLETIONS, completion(stream=True))
        assert (await client.head()).status == 200
        await client.piece()
        if leave == "half":
            client.writer.close()  # says goodbye, and waits for the proxy's
        else:
            getattr(client, leave)()
        ended = await w.ended()
        assert (ended.outcome, ended.status) == ("client_left", 200)
        await w.quiet()


async def test_a_client_that_stops_reading_is_dropped(ours: Side) -> None:
    """Write pressure works below TLS: D is paused, and the deadline of `client_write` ends it."""

    async def flood(reply: Reply) -> None:
        await reply.start()
        while True:
            await reply.piece(BIG)

    async with fronted(ours, deadlines={"client_write": 0.3, "between_tokens": 3}) as w:
        w.decode[0].script(flood)
        client = await w.client(receive_buffer=16384)
        client.post(COMPLETIONS, completion(stream=True))
        await client.head()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.wait_for(w.decode[0].requests[0].left.wait(), 3)
        assert w.metric("pdproxy_deadline_total", wait="client_write") == 1
        assert w.metric("pdproxy_deadline_total", wait="between_tokens") == 0
        assert (await w.ended()).outcome == "client_left"


async def test_a_client_that_reads_on_gets_all_of_a_large_stream(ours: Side) -> None:
    """A pause of the client loses nothing and ends nothing."""
    async with fronted(ours) as w:
        w.decode[0].script(scripts.streams(*[BIG] * 400, answers.DONE))
        client = await w.client(receive_buffer=16384)
        client.post(COMPLETIONS, completion(stream=True))
        head = await client.head()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: any(one.flow.write_paused for one in connections(w)))
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        answer = await client.rest(head)
        assert answer.ended
        assert answer.body.count(b"x") >= 400 * 30_000


async def test_a_client_needs_a_certificate_where_an_authority_is_set(ours: Side, theirs: Side) -> None:
    """None or another authority's is no connection; the right one is."""
    async with world(adjust=front(ours, client_ca=theirs.authority)) as w:
        for own in (None, ours):
            w.tls = ours.trusting(own)
            with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
                await w.get("/health")
        w.tls = ours.trusting(theirs)
        assert (await w.get("/health")).status == 200
        assert (await w.ask(COMPLETIONS, completion())).text == TEXT


# -- certificates that change


def serial(client: Client) -> str:
    """Which certificate the proxy has shown."""
    shown: dict[str, Any] = client.writer.get_extra_info("ssl_object").getpeercert()
    return str(shown["serialNumber"])


async def test_a_renewed_certificate_is_shown_to_new_connections_and_drops_none(ours: Side) -> None:
    """A stream that was open goes on over its old certificate; the next connection sees the new one."""
    async with fronted(ours) as w:
        old = await w.client()
        old.post(COMPLETIONS, completion())
        assert (await old.answer()).status == 200
        ours.sign()
        w.proxy.credentials.look()
        new = await w.client()
        assert serial(new) != serial(old)
        for client in (old, new):
            client.post(COMPLETIONS, completion())
            assert (await client.answer()).text == TEXT


async def test_the_running_proxy_looks_by_itself(ours: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has to tell it that a certificate was renewed."""
    monkeypatch.setattr("pdproxy.app.credentials.LOOK_EVERY", 0.01)
    async with fronted(ours) as w:
        before = serial(await w.client())
        ours.sign()

        async def changed() -> bool:
            return serial(await w.client()) != before

        async with asyncio.timeout(4):
            while not await changed():
                await asyncio.sleep(0.01)


async def test_half_of_a_renewal_changes_nothing(ours: Side, caplog: pytest.LogCaptureFixture) -> None:
    """A key without its certificate is told once, in /ready too, and the pair before stays in force until both are there."""
    async with fronted(ours) as w:
        before = serial(await w.client())
        old = Path(ours.certificate).read_bytes()
        ours.sign()
        new = Path(ours.certificate).read_bytes()
        Path(ours.certificate).write_bytes(old)
        for _ in range(3):
            w.proxy.credentials.look()
        assert serial(await w.client()) == before
        (told,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR and r.name == "pdproxy.files"]
        assert "the key is not the certificate's" in told
        assert any("the key is not the certificate's" in line for line in (await w.get("/ready")).json["details"])
        Path(ours.certificate).write_bytes(new)
        w.proxy.credentials.look()
        assert serial(await w.client()) != before
        assert (await w.get("/ready")).json["details"] == []


async def test_an_authority_that_is_taken_out_lets_nobody_in_any_more(ours: Side, theirs: Side) -> None:
    """Clients of the old authority are refused after the change, also those that were here before."""
    async with world(adjust=front(ours, client_ca=theirs.authority)) as w:
        w.tls = ours.trusting(theirs)
        assert (await w.get("/health")).status == 200
        trustme.CA().cert_pem.write_to_path(theirs.authority)
        w.proxy.credentials.look()
        with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
            await w.get("/health")
        theirs.ca.cert_pem.write_to_path(theirs.authority)
        w.proxy.credentials.look()
        assert (await w.get("/health")).status == 200


# -- engines


@pytest.mark.parametrize("stream", [False, True])
async def test_engines_in_tls(theirs: Side, stream: bool) -> None:
    """Probes, both legs and passthrough reach engines by https; connections are kept and used again."""
    async with world(adjust=behind(ca=theirs.authority), engine_tls=theirs.server()) as w:
        assert all(engine.url.startswith("https://") for engine in w.engines)
        before = w.decode[0].sim.connections
        for _ in range(3):
            assert (await w.ask(COMPLETIONS, completion(stream=stream))).text == TEXT
        assert w.decode[0].sim.connections <= before + 1
        assert (await w.get("/v1/models")).json["data"][0]["id"] == "tiny"


def expired(side: Side) -> None:
    now = datetime.datetime.now(datetime.UTC)
    side.sign(not_before=now - datetime.timedelta(days=2), not_after=now - datetime.timedelta(days=1))


def of_another_host(side: Side) -> None:
    side.sign("engine-7.internal")


@pytest.mark.parametrize(
    ("spoil", "trusted", "why"),
    [
        (None, False, "unable to get local issuer certificate"),
        (expired, True, "certificate has expired"),
        (of_another_host, True, "certificate is not valid for '127.0.0.1'"),
    ],
)
async def test_an_engine_that_is_not_trusted_is_unreachable(
    ours: Side,
    theirs: Side,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Side], None] | None,
    trusted: bool,
    why: str,
) -> None:
    """Log and /ready say which and why; a client reads neither a host nor a reason."""
    if spoil is not None:
        spoil(theirs)
    authority = theirs.authority if trusted else ours.authority
    async with world(0, 1, adjust=behind(ca=authority), engine_tls=theirs.server()) as w:
        ready = await w.get("/ready")
        assert ready.status == 503
        for place in (ready.json["reason"], *[str(r.fields) for r in caplog.records if hasattr(r, "fields")][:1]):
            assert why in place
            assert w.decode[0].url in place
        answer = await w.ask(COMPLETIONS, completion())
        assert answer.status == 503
        for hidden in (b"certificate", b"127.0.0.1", b"internal", b"https"):
            assert hidden not in answer.body


async def test_an_engine_whose_certificate_goes_bad_while_it_serves(
    theirs: Side, caplog: pytest.LogCaptureFixture
) -> None:
    """A leg that meets an untrusted certificate ends in "an engine" for the client, and the reason in the log."""
    caplog.set_level(logging.DEBUG, "pdproxy")
    async with world(0, 1, adjust=behind(ca=theirs.authority), engine_tls=theirs.server(), limits={"attempts": 1}) as w:
        trustme.CA().cert_pem.write_to_path(theirs.authority)
        w.proxy.credentials.look()
        answer = await w.ask(COMPLETIONS, completion())
        assert answer.status == 503
        assert answer.json["error"]["message"] == "an engine could not be reached"
        failed = legs_failed(caplog)[0]
        assert failed["node"] == w.decode[0].url
        assert "its certificate is not trusted: " in str(failed["error"])


async def test_an_engine_may_ask_for_our_certificate(ours: Side, theirs: Side) -> None:
    """With ours it serves; without, it is unreachable and says that a certificate is required."""
    wants = listen_context(ListenTls(certificate=theirs.certificate, key=theirs.key, client_ca=ours.authority))
    mine = {"certificate": ours.certificate, "key": ours.key}
    async with world(adjust=behind(ca=theirs.authority, **mine), engine_tls=wants) as w:
        assert (await w.ask(COMPLETIONS, completion())).text == TEXT
    async with world(0, 1, adjust=behind(ca=theirs.authority), engine_tls=wants) as w:
        assert "does it want a certificate of ours (tls.certificate)?" in (await w.get("/ready")).json["reason"]


async def test_an_engine_that_says_why_it_refuses_us(theirs: Side, ours: Side) -> None:
    """With TLS 1.3 the alert comes after our side of the handshake: the leg has reached nobody, and says why."""
    wants = listen_context(ListenTls(certificate=theirs.certificate, key=theirs.key, client_ca=ours.authority))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse() -> None:
            taken, _ = listener.accept()
            with pytest.raises(ssl.SSLError), taken:
                wants.wrap_socket(taken, server_side=True)

        refusing = asyncio.get_running_loop().run_in_executor(None, refuse)
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        client = EngineClient(url, connect_timeout=2, keepalive=4, tls=lambda: theirs.trusting())
        with pytest.raises(EngineTlsError, match="certificate required"):
            await client.whole(client.request("/v1/completions", (), b"{}"), 4, Wait.PREFILL)
        client.close()
        await refusing


async def test_verify_false_trusts_anyone_and_warns(theirs: Side) -> None:
    """The operator is told at the start of each engine that is not verified."""
    of_another_host(theirs)
    async with world(adjust=behind(verify=False), engine_tls=theirs.server()) as w:
        assert (await w.ask(COMPLETIONS, completion())).text == TEXT
        assert w.proxy.credentials.warnings() == [
            f"{engine.url}: tls.verify is false: anybody in between can read prompts and keys" for engine in w.engines
        ]
    async with world(0, 1, probed=False) as w:
        assert w.proxy.credentials.warnings() == []


async def test_the_handshake_is_inside_the_connect_deadline(theirs: Side, caplog: pytest.LogCaptureFixture) -> None:
    """An engine that accepts TCP and says nothing of TLS is given up after `deadlines.connect`."""
    async with world(
        0, 1, adjust=behind(ca=theirs.authority), engine_tls=theirs.server(), deadlines={"connect": 0.2}
    ) as w:
        w.decode[0].sim._listener.leave()  # the kernel still takes connections
        answer = await w.ask(COMPLETIONS, completion())
        assert answer.status == 503
        assert legs_failed(caplog)[0]["error"] == f"{w.decode[0].url} took no connection in 0.2 s"
        assert w.metric("pdproxy_deadline_total", wait="connect") >= 1


async def test_plain_http_behind_an_https_url(theirs: Side) -> None:
    """An engine without TLS where the settings say https is unreachable, for a reason that names TLS."""

    def adjust(settings: Settings) -> Settings:
        (pool,) = settings.pools
        nodes = tuple(msgspec.structs.replace(n, url=n.url.replace("http:", "https:")) for n in pool.nodes)
        return msgspec.structs.replace(settings, pools=(msgspec.structs.replace(pool, nodes=nodes),))

    async with world(0, 1, adjust=adjust) as w:
        assert "no TLS" in (await w.get("/ready")).json["reason"]


def test_a_nodes_tls_is_stronger_than_the_pools() -> None:
    """One by one, but for certificate and key, which belong together."""
    pool = EngineTls(ca="a", certificate="c", key="k")
    assert merged(pool, EngineTls()) == msgspec.structs.replace(pool, verify=None)
    assert merged(pool, EngineTls(verify=False, ca="b")) == EngineTls(ca="b", certificate="c", key="k", verify=False)
    assert merged(pool, EngineTls(certificate="both")) == EngineTls(ca="a", certificate="both")


# -- files that can't be used


def spoiled(side: Side, other: Side) -> list[tuple[ListenTls, str]]:
    locked = str(side.folder / "locked.pem")
    key_object = load_pem_private_key(Path(side.key).read_bytes(), None)
    Path(locked).write_bytes(
        key_object.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"right"))
    )
    (side.folder / "wrong").write_text("wrong\n")
    (side.folder / "empty").write_text("")
    cert, key = side.certificate, side.key
    return [
        (ListenTls(certificate="/none"), "listen.tls.certificate: /none: can't be read: No such file or directory"),
        (ListenTls(certificate=cert, key="/none"), "listen.tls.key: /none: can't be read: No such file or directory"),
        (ListenTls(certificate=cert, key=other.key), f"{cert} with {other.key}: the key is not the certificate's"),
        (ListenTls(certificate=cert), f"listen.tls: {cert}: holds no certificate or key in PEM that can be used"),
        (ListenTls(certificate=cert, key=key, client_ca=key), f"listen.tls.client_ca: {key}: holds no certificate"),
        (ListenTls(certificate=cert, key=locked), "the key is encrypted, and its password is wrong or missing"),
        (
            ListenTls(certificate=cert, key=locked, key_password_file=str(side.folder / "wrong")),
            "the key is encrypted, and its password is wrong or missing",
        ),
        (
            ListenTls(certificate=cert, key=locked, key_password_file=str(side.folder / "empty")),
            "listen.tls.key_password_file: ",
        ),
    ]


def test_files_that_cannot_be_used_are_named(ours: Side, theirs: Side) -> None:
    """Each mistake is one line with the setting, the file and the reason; none asks on the terminal."""
    for tls, why in spoiled(ours, theirs):
        with pytest.raises(SettingsError) as caught:
            listen_context(tls)
        assert why in str(caught.value), (str(caught.value), why)
        assert str(caught.value).isprintable()
    with pytest.raises(SettingsError, match=r"pools\[0\]\.tls\.ca: /none: can't be read"):
        engine_context("pools[0].tls", EngineTls(ca="/none"))


def test_an_encrypted_key_opens_with_its_password(ours: Side, theirs: Side) -> None:
    """The password's file is read, its line end is not part of it."""
    spoiled(ours, theirs)
    password = ours.folder / "right"
    password.write_text("right\n")
    tls = ListenTls(certificate=ours.certificate, key=str(ours.folder / "locked.pem"), key_password_file=str(password))
    assert listen_context(tls).verify_mode is ssl.CERT_NONE


def test_config_validate_reads_certificates(ours: Side, theirs: Side, capsys: pytest.CaptureFixture[str]) -> None:
    """The flags are vLLM's, and what `serve` could not use is told by `config validate`."""
    line = ["config", "validate", "--decode", "https://a:1", "--ssl-certfile", ours.certificate, "--ssl-keyfile"]
    assert main([*line, ours.key, "--ssl-ca-certs", theirs.authority]) == 0
    assert main([*line, theirs.key]) == 2
    assert "the key is not the certificate's" in capsys.readouterr().err


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_an_old_session_does_not_outlive_its_authority(ours: Side, theirs: Side, version: ssl.TLSVersion) -> None:
    """A client can't get in by a session that it has kept from before its authority was taken out."""

    context = ours.trusting(theirs)
    context.maximum_version = version

    def visit(port: int, session: ssl.SSLSession | None) -> tuple[bytes, ssl.SSLSession | None]:
        with (
            socket.create_connection(("127.0.0.1", port), 5) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as secure,
        ):
            secure.sendall(request("GET", "/health", b""))
            said = secure.recv(65_536)
            if not said:
                raise ConnectionResetError
            return said, secure.session

    async with world(adjust=front(ours, client_ca=theirs.authority)) as w:
        said, session = await asyncio.to_thread(visit, w.port, None)
        assert said.startswith(b"HTTP/1.1 200")
        trustme.CA().cert_pem.write_to_path(theirs.authority)
        w.proxy.credentials.look()
        with pytest.raises(OSError):  # noqa: PT011 - an alert, or a connection that just closes
            await asyncio.to_thread(visit, w.port, session)


def test_a_simulated_engine_refuses_files_that_it_cannot_use(ours: Side, capsys: pytest.CaptureFixture[str]) -> None:
    """`pdproxy sim` takes vLLM's flags for TLS too, and exits with 2 where they make no sense."""
    for line, why in (
        (["--ssl-certfile", "/none"], "--ssl-certfile /none: can't be used: No such file or directory"),
        (["--ssl-keyfile", ours.key], "--ssl-keyfile is of no use without --ssl-certfile"),
    ):
        assert main(["sim", *line]) == 2
        assert why in capsys.readouterr().err
