"""`pdproxy health` against the real proxy: plain, with TLS, with client certificates, and against
servers that misbehave.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from pdproxy.cli.main import main
from tests.fakes.forked import piped
from tests.fakes.ports import free_port
from tests.fakes.tls import Side, front
from tests.fakes.world import world


class Ended(NamedTuple):
    code: int
    out: str
    err: str


async def health(*options: object, env: dict[str, str] | None = None) -> Ended:
    """Run the command in a process of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PDPROXY_")}
    # No HTTP proxy of the environment may be asked.
    kept |= {
        "http_proxy": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
        "no_proxy": "",
    } | (env or {})
    process = await piped("health", *map(str, options), env=kept)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
async def test_a_proxy_that_answers(host: str) -> None:
    """The address of the settings, or the loopback where the settings name all addresses."""
    asked = "127.0.0.1" if host == "0.0.0.0" else host
    async with world() as w:
        for options, env in (
            (["--host", host, "--port", w.port], {}),
            ([], {"PDPROXY_LISTEN__HOST": host, "PDPROXY_LISTEN__PORT": str(w.port)}),
        ):
            ok = Ended(0, f"ok: http://{asked}:{w.port}/health\n", "")
            assert await health(*options, "--timeout", "30", env=env) == ok


async def test_a_url_needs_no_settings_of_that_proxy() -> None:
    async with world() as w:
        for url in (f"http://127.0.0.1:{w.port}", f"http://localhost:{w.port}/"):
            assert (await health("--url", url, "--timeout", "30")).code == 0
            assert (await health(url, "--timeout", "30")).code == 0


async def test_readiness_is_another_question() -> None:
    """Without a decode engine the process answers and can serve nothing; the line has the reason of
    /ready.
    """
    async with world(decode=0) as w:
        assert (await health("--port", w.port, "--timeout", "30")).code == 0
        found = await health("--port", w.port, "--ready", "--timeout", "30")
        assert (found.code, found.out) == (1, "")
        reason = (await w.get("/ready")).json["reason"]
        assert (
            found.err
            == f'pdproxy health: http://127.0.0.1:{w.port}/ready: answered 503: "{reason}"\n'
        )
    async with world() as w:
        assert (await health("--port", w.port, "--ready", "--timeout", "30")).code == 0


async def test_nobody_listens() -> None:
    port = free_port()
    for options, url in (
        (["--port", port], f"http://127.0.0.1:{port}"),
        (["--host", "::", "--port", port], f"http://[::1]:{port}"),
    ):
        found = await health(*options)
        assert (found.code, found.out) == (1, "")
        assert found.err.startswith(f"pdproxy health: {url}/health: no connection: ")
        assert found.err.count("\n") == 1


@asynccontextmanager
async def server(*pieces: bytes, pause: float = 0.0) -> AsyncIterator[int]:
    """A server that sends the same to everybody, piece by piece, and then closes; yields its
    port.
    """

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause)
        except OSError:
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        yield listener.sockets[0].getsockname()[1]


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([b"HTTP/1.1 500 Oops\r\ncontent-length: 0\r\n\r\n"], "answered 500"),
        ([b"HTTP/1.1 503 No\r\n\r\n[[[{\x1b"], "answered 503"),
        ([b'HTTP/1.1 503 No\r\n\r\n{"reason": "a\\nb\\u001b"}'], 'answered 503: "a\\nb\\u001b"'),
        ([b"SSH-2.0-x\r\n"], "does not answer HTTP (BadStatusLine)"),
        (
            [],
            (
                "closed the connection without an answer: does it expect TLS? Give its certificate "
                "or its https URL"
            ),
        ),
        ([b"HTTP/1.1 200 OK\r\n", *[b"x: y\r\n"] * 1000], "no answer within 1 s"),
    ],
    ids=["500", "no-json", "escapes", "ssh", "closed", "endless"],
)
async def test_what_is_not_healthy_is_one_line(pieces: list[bytes], why: str) -> None:
    """Whatever answers there: exit code 1 and one line that can be printed, within the timeout."""
    async with server(*pieces, pause=0.05) as port:
        found = await health("--port", port, "--timeout", "1")
    assert (found.code, found.out) == (1, "")
    assert found.err == f"pdproxy health: http://127.0.0.1:{port}/health: {why}\n"


# -- TLS


async def test_with_tls_the_certificate_of_the_settings_is_expected(
    ours: Side, theirs: Side
) -> None:
    """Its name and its authority don't matter, since it is compared itself; any other certificate
    is refused.
    """
    ours.sign("llm.example.com")
    async with world(adjust=front(ours), client_tls=ours.trusting()) as w:
        mine = ["--port", w.port, "--timeout", "30", "--ssl-certfile"]
        assert await health(*mine, ours.certificate, "--ssl-keyfile", ours.key) == Ended(
            0, f"ok: https://127.0.0.1:{w.port}/health\n", ""
        )
        assert (await health(*mine, ours.certificate, "--ready")).code == 0
        other = await health(*mine, theirs.certificate)
        assert other.code == 1
        assert "its certificate is not the one of listen.tls.certificate" in other.err
        plain = await health("--port", w.port, "--timeout", "30")
        assert plain.code == 1
    async with world() as w:
        found = await health(
            "--port", w.port, "--timeout", "30", "--ssl-certfile", ours.certificate
        )
        assert (found.code, found.err.count("\n")) == (1, 1)
        assert "it answers plain HTTP, not TLS" in found.err


async def test_a_url_with_tls_is_verified(ours: Side, theirs: Side) -> None:
    """By authority and name, as any client does."""
    async with world(adjust=front(ours), client_tls=ours.trusting()) as w:
        url = ["--url", f"https://127.0.0.1:{w.port}", "--timeout", "30"]
        assert (await health(*url, "--ca", ours.authority)).code == 0
        for options in ([], ["--ca", theirs.authority]):
            found = await health(*url, *options)
            assert (found.code, found.err.count("\n")) == (1, 1)
            assert "its certificate is not trusted: " in found.err


async def test_a_proxy_that_requires_client_certificates(ours: Side, theirs: Side) -> None:
    """--cert and --key are the client's; without them the line says that they are needed."""
    adjust = front(ours, client_ca=theirs.authority)
    async with world(adjust=adjust, client_tls=ours.trusting(theirs)) as w:
        line = ["--port", w.port, "--timeout", "30", "--ssl-certfile", ours.certificate]
        known = [*line, "--ssl-ca-certs", theirs.authority]
        assert (await health(*known, "--cert", theirs.certificate, "--key", theirs.key)).code == 0
        without = await health(*known)
        assert without.code == 2
        assert without.err == (
            "pdproxy health: listen.tls.client_ca is set, so the proxy answers no client without "
            "a certificate: give --cert\n"
        )
        for options in ([], ["--cert", ours.certificate, "--key", ours.key]):
            found = await health(*line, *options)
            assert (found.code, found.err.count("\n")) == (1, 1)
            assert "does it require a client certificate (--cert)?" in found.err


def test_wrong_options_are_exit_2(
    tmp_path: Path, ours: Side, theirs: Side, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line each, which names the option or the setting."""
    none, text = tmp_path / "none.pem", tmp_path / "text.pem"
    text.write_text("-----BEGIN CERTIFICATE-----\nnothing")
    for options, error in (
        (["--key", "x"], "--key: has no effect without --cert"),
        (["--ca", "x"], "--ca: has no effect without --url"),
        (
            ["--url", "localhost:1"],
            '--url: "localhost:1": expected http://HOST:PORT or https://HOST:PORT',
        ),
        (["localhost:1"], 'URL: "localhost:1": expected http://HOST:PORT or https://HOST:PORT'),
        (["--url", "http://a", "http://a"], "--url: has no effect with a URL as argument"),
        (["--url", "http://a/health"], '--url: "http://a/health": expected http'),
        (["--url", "http://[::1"], '--url: "http://[::1": expected http'),
        (["--url", "http://a:x"], '--url: "http://a:x": expected http'),
        (["--url", "http://a..b:1"], '--url: "http://a..b:1": expected http'),
        (["--url", "http://.:1"], '--url: "http://.:1": expected http'),
        (["--url", f"http://{'x' * 64}:1"], '--url: "http://xxx'),
        (["--url", "http://a b:1"], '--url: "http://a b:1": expected http'),
        (["--url", "http://a\tb:1"], '--url: "http://a\\tb:1": expected http'),
        (["--url", "http://a\x7f:1"], '--url: "http://a\\u007f:1": expected http'),
        (["--url", "http://\udcff:1"], '--url: "http://\\udcff:1": expected http'),
        (["--url", "https://a", "--ca", none], f"--ca: {none}: can't be read"),
        (["--url", "https://a", "--cert", none], f"--cert: {none}: can't be read"),
        (
            ["--url", "https://a", "--cert", ours.certificate, "--key", none],
            f"--key: {none}: can't be read",
        ),
        (
            ["--url", "https://a", "--cert", ours.certificate, "--key", theirs.key],
            f"--cert: {ours.certificate} with ",
        ),
        (["--ssl-certfile", none], f"listen.tls.certificate: {none}: can't be read"),
        (["--ssl-certfile", text], f"listen.tls.certificate: {text}: holds no certificate in PEM"),
        (["--port", "0"], "listen.port: expected a whole number"),
        (
            ["--timeout", "0"],
            "--timeout: expected 0.1 to 600 seconds, got '0'\nSee `pdproxy health --help`.",
        ),
    ):
        assert main(["health", *map(str, options)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"pdproxy health: {error}")


@pytest.mark.parametrize("host", ["a..b", "x" * 64, "a\x7f"])
def test_a_host_that_cannot_exist_is_not_healthy(
    host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The settings take any text as a host: one line, no traceback."""
    assert main(["health", "--host", host, "--port", "9"]) == 1
    assert (
        capsys.readouterr().err
        == f"pdproxy health: http://{host}:9/health: no connection: no host has such a name\n"
    )


def test_a_health_check_imports_little() -> None:
    """It runs every few seconds beside the proxy."""
    heavy = (
        "asyncio aiohttp fastapi uvicorn pydantic transformers jinja2 rich shtab zmq "
        "pdproxy_lab.sim pdproxy.app pdproxy.web"
    )
    code = (
        "import sys; from pdproxy.cli.main import main; main(['health', '--port', '1'])\n"
        f"print([m for m in {heavy.split()} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "[]\n"
    assert done.stderr.count("\n") == 1
