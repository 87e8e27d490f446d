"""`pdproxy health`: whether the proxy answers. For health checks, which run it every few seconds:
it imports little.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import ssl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPSConnection, InvalidURL
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import msgspec

from pdproxy.cli.options import add_settings_options, settings_from
from pdproxy.cli.parser import examples
from pdproxy.cli.reading import seconds
from pdproxy.kit.addresses import reachable
from pdproxy.settings.errors import SettingsError, quote
from pdproxy.settings.files import read_file, spell_file
from pdproxy.settings.listen import UNIX
from pdproxy.settings.tls import EngineTls, engine_context

if TYPE_CHECKING:
    from pdproxy.cli.parser import Commands

_MAX_ANSWER = 65_536
"""Bytes of an answer of /ready that are read."""


class _Unhealthy(Exception):  # noqa: N818 - a finding, not a fault of this program
    """The proxy does not answer as it should. `str()` says why, in one line."""


class _Place(NamedTuple):
    """What is asked: a server, with the context for TLS (None: plain HTTP), the certificate that it
    must have (DER), if one is known, and the path of its Unix socket, if it has one in place of
    host and port.
    """

    host: str
    port: int
    context: ssl.SSLContext | None
    certificate: bytes | None = None
    uds: str | None = None

    def __str__(self) -> str:
        if self.uds is not None:
            return f"{UNIX}{self.uds}:"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self.context is None else 'https'}://{host}:{self.port}"


def add(commands: Commands, summary: str) -> None:
    """Add the command. `summary`: what it does, in the list of all commands."""
    parser = commands.add_parser(
        "health",
        help=summary,
        description="Ask the proxy that `pdproxy serve` runs on this machine with the same "
        "options, "
        "variables and file. The "
        "exit code is 0 if it answers 200 in time, 1 with the reason in one line if it does not, "
        "2 if the options or the "
        "settings are wrong. With TLS, the proxy must have the certificate that the settings name.",
        usage="pdproxy health [URL] [--ready] [--timeout S] [option ...]",
        epilog=examples(
            "pdproxy health",
            "pdproxy health --ready --config pdproxy.yaml",
            "pdproxy health https://llm.example.com --ca authorities.pem",
        ),
    )
    group = parser.add_argument_group("health")
    group.add_argument(
        "place",
        metavar="URL",
        nargs="?",
        help="the proxy to ask, http://HOST:PORT or https://HOST:PORT (default: the address of "
        "the settings; for 0.0.0.0 and :: "
        "the loopback)",
    )
    group.add_argument(
        "--url",
        metavar="URL",
        help="the proxy to ask, in place of URL (default: the address of the settings)",
    )
    group.add_argument(
        "--ready",
        action="store_true",
        help="ask /ready: whether engines can serve a request (default: /health)",
    )
    group.add_argument(
        "--timeout",
        metavar="S",
        type=seconds(minimum=0.1),
        default=2.0,
        help="seconds until the whole answer must be there (default: 2)",
    )
    group.add_argument(
        "--ca",
        metavar="FILE",
        help="with a URL: authorities of the proxy's certificate, PEM (default: the system's)",
    )
    group.add_argument(
        "--cert",
        metavar="FILE",
        help="client certificate, PEM, for a proxy that requires one (--ssl-ca-certs) (default: "
        "none)",
    )
    group.add_argument(
        "--key", metavar="FILE", help="its private key, PEM (default: in the file of --cert)"
    )
    add_settings_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Ask; return 0 if the answer is 200, else 1 with the reason on standard error."""
    if arguments.url is not None and arguments.place is not None:
        raise SettingsError("--url: has no effect with a URL as argument")
    if arguments.key is not None and arguments.cert is None:
        raise SettingsError("--key: has no effect without --cert")
    url = arguments.place if arguments.url is None else arguments.url
    if arguments.ca is not None and url is None:
        raise SettingsError(
            "--ca: has no effect without --url: the certificate of the settings is the one that "
            "is expected"
        )
    place = _of_settings(arguments) if url is None else _of_url(url, arguments)
    path = "/ready" if arguments.ready else "/health"
    try:
        with _deadline(arguments.timeout):
            _ask(place, path, arguments.timeout)
    except (_Unhealthy, TimeoutError) as error:
        why = (
            error if isinstance(error, _Unhealthy) else f"no answer within {arguments.timeout:g} s"
        )
        sys.stderr.write(f"{arguments.prog}: {place}{path}: {why}\n")
        return 1
    print(f"ok: {place}{path}")
    return 0


def _of_url(url: str, arguments: argparse.Namespace) -> _Place:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        (host or "").encode("idna")  # as a connection does
    except ValueError:
        host = port = None
    if not url.isprintable() or " " in url:
        host = None
    tls = url.startswith("https://")
    if (
        not host
        or not (tls or url.startswith("http://"))
        or parts.path not in ("", "/")
        or parts.query
        or "@" in url
    ):
        name = "URL" if arguments.url is None else "--url"
        raise SettingsError(f"{name}: {quote(url)}: expected http://HOST:PORT or https://HOST:PORT")
    if not tls:
        return _Place(host, 80 if port is None else port, None)
    return _Place(
        host, 443 if port is None else port, _context(EngineTls(ca=arguments.ca), arguments)
    )


def _of_settings(arguments: argparse.Namespace) -> _Place:
    listen = settings_from(arguments, need_engines=False).listen
    host = reachable(listen.host)
    if listen.tls.certificate is None:
        return _Place(host, listen.port, None, uds=listen.uds)
    if listen.tls.client_ca is not None and arguments.cert is None:
        raise SettingsError(
            "listen.tls.client_ca is set, so the proxy answers no client without a certificate: "
            "give --cert"
        )
    # The certificate is made for the name that clients use, not for the loopback, and this machine
    # need not know its authority. So neither is checked: the proxy must have exactly this
    # certificate, and its private key.
    context = _context(EngineTls(verify=False), arguments)
    return _Place(
        host, listen.port, context, _first_certificate(listen.tls.certificate), listen.uds
    )


def _first_certificate(path: str) -> bytes:
    """Return the server's own certificate, which is the first one of its file."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    text = read_file("listen.tls.certificate", path).decode("latin-1")
    inner, found, _ = text.partition(begin)[2].partition(end)
    try:
        if not found:
            raise ValueError("no certificate")
        return ssl.PEM_cert_to_DER_cert(f"{begin}{inner}{end}")
    except ValueError:
        raise SettingsError(
            f"listen.tls.certificate: {spell_file(Path(path))}: holds no certificate in PEM"
        ) from None


def _context(tls: EngineTls, arguments: argparse.Namespace) -> ssl.SSLContext:
    """Return the context of a client, with the certificate of the options."""
    try:
        return engine_context(
            "tls", msgspec.structs.replace(tls, certificate=arguments.cert, key=arguments.key)
        )
    except SettingsError as error:  # it names settings; here they are options
        names = {"tls.ca": "--ca", "tls.certificate": "--cert", "tls.key": "--key", "tls": "--cert"}
        name, _, why = str(error).partition(": ")
        raise SettingsError(f"{names.get(name, name)}: {why}") from None


@contextmanager
def _deadline(limit: float) -> Iterator[None]:
    """Raise TimeoutError after `limit` seconds. A socket's own timeout starts again with each byte
    that comes.
    """

    def late(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _ask(place: _Place, path: str, limit: float) -> None:
    """Send one request.

    Raises:
        _Unhealthy: the answer is not 200, or there is none in time.
    """
    connection: HTTPConnection | None = None
    try:
        if place.context is None:
            connection = HTTPConnection(place.host, place.port, timeout=limit)
        else:
            connection = HTTPSConnection(
                place.host, place.port, timeout=limit, context=place.context
            )
        if place.uds is not None:
            connection.sock = _connected(place.uds, place.context, limit)
        else:
            connection.connect()
        if place.certificate is not None and _certificate(connection.sock) != place.certificate:
            raise _Unhealthy(
                "its certificate is not the one of listen.tls.certificate: it does not use the "
                "new file yet, or another program "
                "listens there"
            )
        connection.request("GET", path, headers={"Connection": "close"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise _Unhealthy(f"answered {answer.status}{_reason(answer.read(_MAX_ANSWER))}")
    except ssl.SSLCertVerificationError as error:
        raise _Unhealthy(f"its certificate is not trusted: {error.verify_message}") from None
    except ssl.SSLError as error:
        # what OpenSSL calls bytes that are no TLS
        if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
            raise _Unhealthy("it answers plain HTTP, not TLS") from None
        raise _Unhealthy(
            f"TLS failed: {(error.reason or 'unknown reason').replace('_', ' ').lower()}"
        ) from None
    except (UnicodeError, InvalidURL):
        raise _Unhealthy("no connection: no host has such a name") from None
    except ConnectionResetError:  # http.client's RemoteDisconnected is one
        hint = "does it require a client certificate (--cert)?"
        if place.context is None:
            hint = "does it expect TLS? Give its certificate or its https URL"
        raise _Unhealthy(f"closed the connection without an answer: {hint}") from None
    except HTTPException as error:
        raise _Unhealthy(f"does not answer HTTP ({type(error).__name__})") from None
    except TimeoutError:
        raise
    except OSError as error:
        raise _Unhealthy(f"no connection: {error.strerror or error}") from None
    finally:
        if connection is not None:
            connection.close()


def _connected(path: str, context: ssl.SSLContext | None, limit: float) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.settimeout(limit)
        connected.connect(path)
        return connected if context is None else context.wrap_socket(connected)
    except OSError:
        connected.close()
        raise


def _certificate(connected: object) -> bytes | None:
    return connected.getpeercert(binary_form=True) if isinstance(connected, ssl.SSLSocket) else None


def _reason(body: bytes) -> str:
    """Return the reason that /ready gives, as the end of an error."""
    try:
        reason = json.loads(body)["reason"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return ""
    return f": {quote(reason)}" if isinstance(reason, str) else ""
