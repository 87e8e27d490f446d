"""TLS towards engines, and files of certificates that can't be used."""

import asyncio
import datetime
import logging
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from pdproxy.app.credentials import CERTIFICATE_END
from pdproxy.cli.main import main
from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import EngineTlsError, Wait
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.schema import Settings
from pdproxy.settings.tls import EngineTls, ListenTls, engine_context, listen_context, merged
from pdproxy.upstream.answer_budget import AnswerBudget
from pdproxy.upstream.client import EngineClient
from tests.fakes.client import request
from tests.fakes.tls import Side, behind, front, legs_failed
from tests.fakes.world import COMPLETIONS, TEXT, completion, world

# -- engines


@pytest.mark.parametrize("stream", [False, True])
async def test_engines_in_tls(theirs: Side, stream: bool) -> None:
    """Probes, both legs and passthrough reach engines by https; connections are kept and used
    again.
    """
    async with world(adjust=behind(ca=theirs.authority), engine_tls=theirs.server()) as w:
        assert all(engine.url.startswith("https://") for engine in w.engines)
        before = w.decode[0].sim.connections
        for _ in range(3):
            assert (await w.ask(COMPLETIONS, completion(stream=stream))).text == TEXT
        assert w.decode[0].sim.connections <= before + 1
        assert (await w.get("/v1/models")).json["data"][0]["id"] == "tiny"


def expired(side: Side) -> None:
    now = datetime.datetime.now(datetime.UTC)
    side.sign(
        not_before=now - datetime.timedelta(days=2), not_after=now - datetime.timedelta(days=1)
    )


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
        for place in (
            ready.json["reason"],
            *[str(r.fields) for r in caplog.records if hasattr(r, "fields")][:1],
        ):
            assert why in place
            assert w.decode[0].url in place
        answer = await w.ask(COMPLETIONS, completion())
        assert answer.status == 503
        for hidden in (b"certificate", b"127.0.0.1", b"internal", b"https"):
            assert hidden not in answer.body


async def test_an_engine_whose_certificate_goes_bad_while_it_serves(
    theirs: Side, caplog: pytest.LogCaptureFixture
) -> None:
    """A leg that meets an untrusted certificate ends in "an engine" for the client, and the reason
    in the log.
    """
    caplog.set_level(logging.DEBUG, "pdproxy")
    async with world(
        0, 1, adjust=behind(ca=theirs.authority), engine_tls=theirs.server(), limits={"attempts": 1}
    ) as w:
        trustme.CA().cert_pem.write_to_path(theirs.authority)
        w.look_at_files()
        answer = await w.ask(COMPLETIONS, completion())
        assert answer.status == 503
        assert answer.json["error"]["message"] == "an engine could not be reached"
        failed = legs_failed(caplog)[0]
        assert failed["node"] == w.decode[0].url
        assert "its certificate is not trusted: " in str(failed["error"])


async def test_an_engine_may_ask_for_our_certificate(ours: Side, theirs: Side) -> None:
    """With ours it serves; without, it is unreachable and says that a certificate is required."""
    wants = listen_context(
        ListenTls(certificate=theirs.certificate, key=theirs.key, client_ca=ours.authority)
    )
    mine = {"certificate": ours.certificate, "key": ours.key}
    async with world(adjust=behind(ca=theirs.authority, **mine), engine_tls=wants) as w:
        assert (await w.ask(COMPLETIONS, completion())).text == TEXT
        ends = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)
        ours.sign(not_after=ends)
        w.look_at_files()
        (line,) = (await w.get("/ready")).json["details"]
        assert line.startswith(f"pools[0].tls.certificate: {ours.certificate}: expires at ")
        shown = w.metric(CERTIFICATE_END.name, setting="pools[0].tls.certificate")
        assert shown == int(ends.timestamp())
        for worker in w.workers:
            for engine in w.engines:
                worker.credentials.forget(engine.url)
            assert not worker.credentials.shortcomings()
        assert w.metric(CERTIFICATE_END.name) == 0
    async with world(0, 1, adjust=behind(ca=theirs.authority), engine_tls=wants) as w:
        assert (
            "does it require a client certificate (tls.certificate)?"
            in (await w.get("/ready")).json["reason"]
        )


async def test_an_engine_that_says_why_it_refuses_us(theirs: Side, ours: Side) -> None:
    """With TLS 1.3 the alert comes after our side of the handshake: the leg has reached nobody, and
    says why.
    """
    wants = listen_context(
        ListenTls(certificate=theirs.certificate, key=theirs.key, client_ca=ours.authority)
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse() -> None:
            taken, _ = listener.accept()
            with pytest.raises(ssl.SSLError), taken:
                wants.wrap_socket(taken, server_side=True)

        refusing = asyncio.get_running_loop().run_in_executor(None, refuse)
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        client = EngineClient(
            url,
            connect_timeout=2,
            keepalive=4,
            clock=Clock(),
            budget=AnswerBudget(),
            tls=lambda: theirs.trusting(),
        )
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
            f"{engine.url}: tls.verify is false: anybody in between can read prompts and keys"
            for engine in w.engines
        ]
    async with world(0, 1, probed=False) as w:
        assert w.proxy.credentials.warnings() == []


async def test_the_handshake_is_inside_the_connect_deadline(
    theirs: Side, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that accepts TCP and says nothing of TLS is given up after `deadlines.connect`."""
    async with world(
        0,
        1,
        adjust=behind(ca=theirs.authority),
        engine_tls=theirs.server(),
        deadlines={"connect": 0.2},
    ) as w:
        w.decode[0].sim._listener.stop_accepting()  # the kernel still takes connections
        answer = await w.ask(COMPLETIONS, completion())
        assert answer.status == 503
        assert legs_failed(caplog)[0]["error"] == f"{w.decode[0].url} took no connection in 0.2 s"
        assert w.metric("pdproxy_deadline_total", wait="connect") >= 1


async def test_plain_http_behind_an_https_url(theirs: Side) -> None:
    """An engine without TLS where the settings say https is unreachable, for a reason that names
    TLS.
    """

    def adjust(settings: Settings) -> Settings:
        (pool,) = settings.pools
        engines = tuple(
            msgspec.structs.replace(n, url=n.url.replace("http:", "https:")) for n in pool.nodes
        )
        return msgspec.structs.replace(
            settings, pools=(msgspec.structs.replace(pool, nodes=engines),)
        )

    async with world(0, 1, adjust=adjust) as w:
        assert "no TLS: it answers plain HTTP" in (await w.get("/ready")).json["reason"]


async def test_plain_http_to_an_engine_with_tls(theirs: Side) -> None:
    """An engine with TLS where the settings say http closes the connection: the reason asks for
    https.
    """

    def adjust(settings: Settings) -> Settings:
        (pool,) = settings.pools
        engines = tuple(
            msgspec.structs.replace(n, url=n.url.replace("https:", "http:")) for n in pool.nodes
        )
        return msgspec.structs.replace(
            settings, pools=(msgspec.structs.replace(pool, nodes=engines),)
        )

    async with world(0, 1, adjust=adjust, engine_tls=theirs.server()) as w:
        assert "does it expect TLS (https)?" in (await w.get("/ready")).json["reason"]


def test_a_nodes_tls_is_stronger_than_the_pools() -> None:
    """One by one, but for certificate and key, which belong together."""
    pool = EngineTls(ca="a", certificate="c", key="k")
    assert merged(pool, EngineTls()) == msgspec.structs.replace(pool, verify=None)
    assert merged(pool, EngineTls(verify=False, ca="b")) == EngineTls(
        ca="b", certificate="c", key="k", verify=False
    )
    assert merged(pool, EngineTls(certificate="both")) == EngineTls(ca="a", certificate="both")


# -- files that can't be used


def spoiled(side: Side, other: Side) -> list[tuple[ListenTls, str]]:
    locked = str(side.folder / "locked.pem")
    key_object = load_pem_private_key(Path(side.key).read_bytes(), None)
    Path(locked).write_bytes(
        key_object.private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"right")
        )
    )
    (side.folder / "wrong").write_text("wrong\n")
    (side.folder / "empty").write_text("")
    cert, key = side.certificate, side.key
    return [
        (
            ListenTls(certificate="/none"),
            "listen.tls.certificate: /none: can't be read: No such file or directory",
        ),
        (
            ListenTls(certificate=cert, key="/none"),
            "listen.tls.key: /none: can't be read: No such file or directory",
        ),
        (
            ListenTls(certificate=cert, key=other.key),
            f"{cert} with {other.key}: the key is not the certificate's",
        ),
        (
            ListenTls(certificate=cert),
            f"listen.tls: {cert}: holds no certificate or key in PEM that can be used",
        ),
        (
            ListenTls(certificate=cert, key=key, client_ca=key),
            f"listen.tls.client_ca: {key}: holds no certificate",
        ),
        (
            ListenTls(certificate=cert, key=locked),
            "the key is encrypted, and its password is wrong or missing",
        ),
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
    """Each mistake is one line with the setting, the file and the reason; none asks on the
    terminal.
    """
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
    tls = ListenTls(
        certificate=ours.certificate,
        key=str(ours.folder / "locked.pem"),
        key_password_file=str(password),
    )
    assert listen_context(tls).verify_mode is ssl.CERT_NONE


def test_config_validate_reads_certificates(
    ours: Side, theirs: Side, capsys: pytest.CaptureFixture[str]
) -> None:
    """The flags are vLLM's, and what `serve` could not use is told by `config validate`."""
    line = [
        "config",
        "validate",
        "--decode",
        "https://a:1",
        "--ssl-certfile",
        ours.certificate,
        "--ssl-keyfile",
    ]
    assert main([*line, ours.key, "--ssl-ca-certs", theirs.authority]) == 0
    assert main([*line, theirs.key]) == 2
    assert "the key is not the certificate's" in capsys.readouterr().err


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_an_old_session_does_not_outlive_its_authority(
    ours: Side, theirs: Side, version: ssl.TLSVersion
) -> None:
    """A client can't get in by a session that it has kept from before its authority was taken
    out.
    """

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
        w.look_at_files()
        with pytest.raises(OSError):  # noqa: PT011 - an alert, or a connection that just closes
            await asyncio.to_thread(visit, w.port, session)


def test_a_simulated_engine_refuses_files_that_it_cannot_use(
    ours: Side, capsys: pytest.CaptureFixture[str]
) -> None:
    """`pdproxy sim` takes vLLM's flags for TLS too, and exits with 2 where they make no sense."""
    for line, why in (
        (
            ["--ssl-certfile", "/none"],
            "--ssl-certfile /none: can't be used: No such file or directory",
        ),
        (["--ssl-keyfile", ours.key], "--ssl-keyfile needs --ssl-certfile"),
    ):
        assert main(["sim", *line]) == 2
        assert why in capsys.readouterr().err
