"""A client of the admin API for commands: where it is, with which key, and one request at a time
with a deadline.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import ssl
import sys
import time
from collections.abc import Callable, Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any

import msgspec

from pdproxy.cli.reading import seconds
from pdproxy.kit.addresses import reachable
from pdproxy.settings.errors import SettingsError, quote
from pdproxy.settings.files import spell_file
from pdproxy.settings.listen import AdminAddress, AdminPlace, place_of
from pdproxy.settings.load import load
from pdproxy.settings.schema import Settings
from pdproxy.settings.tls import EngineTls, engine_context

BASE = "/admin/v1"
HTTPS = "https://"
MAX_ANSWER = 64 << 20
"""Bytes of an answer: four thousand engines take 5 MB."""
_PIECE = 1 << 16


class AdminFailed(Exception):  # noqa: N818 - a finding, not a fault of this program
    """It was refused, or there is no answer. `str()` says why, in one line. `status`: the answer's,
    None without one.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def add_admin_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which proxy is meant."""
    group = parser.add_argument_group(
        "the proxy", "By default the one of the settings: its listen.admin, and its keys."
    )
    group.add_argument(
        "--admin",
        metavar="ADDRESS",
        help="where the admin API is: unix:PATH, HOST:PORT, or https://HOST:PORT (default: "
        "listen.admin of the settings)",
    )
    group.add_argument(
        "--admin-key-file",
        metavar="FILE",
        help="file whose first key is sent; lines are key or name:key (default: the first one of "
        "auth.admin_keys or "
        "auth.admin_keys_file)",
    )
    group.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        help="settings file (default: the file that PDPROXY_CONFIG names, or none)",
    )
    group.add_argument(
        "--ca",
        metavar="FILE",
        help="authorities of the certificate of the admin API, PEM, for https (default: the "
        "system's)",
    )
    group.add_argument(
        "--timeout",
        metavar="S",
        type=seconds(minimum=0.1),
        default=10.0,
        help="seconds until an answer must be there (default: 10)",
    )


class AdminClient:
    """Asks the admin API of one proxy."""

    def __init__(
        self, place: AdminPlace, context: ssl.SSLContext | None, key: str | None, timeout: float
    ) -> None:
        self.place = place
        self._context = context
        self._key = key
        self._timeout = timeout

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> AdminClient:
        """Return the client that a command line means.

        Raises:
            SettingsError: no proxy is named, or a file can't be used.
        """
        key = (
            _first_of("--admin-key-file", arguments.admin_key_file)
            if arguments.admin_key_file
            else None
        )
        if arguments.admin is not None:
            key = (
                key or os.environ.get("PDPROXY_AUTH__ADMIN_KEYS", "").split(",")[0].strip() or None
            )
            return cls(*_of_option(arguments.admin, arguments.ca), key, arguments.timeout)
        settings = load(arguments.config, os.environ, need_engines=False)
        return cls.of_settings(settings, arguments.timeout, key)

    @classmethod
    def of_settings(cls, settings: Settings, timeout: float, key: str | None = None) -> AdminClient:
        """Return the client for the proxy with these settings. `key`: the one to send (default: the
        first one of the settings).

        Raises:
            SettingsError: the proxy has no admin API, or a file can't be used.
        """
        address = settings.listen.admin
        if address is None:
            raise SettingsError(
                "no admin API is named: give --admin, or listen.admin in the settings (off by "
                "default)"
            )
        place = place_of(address)
        place = place if place.host is None else place._replace(host=reachable(place.host))
        return cls(place, _own_context(settings, place), key or _first_key(settings), timeout)

    def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        base: str = BASE,
    ) -> Any:
        """Send a request; return the JSON of its answer. `base`: before the path.

        Raises:
            AdminFailed: it was refused, or there is no such answer in time.
        """
        deadline = time.monotonic() + self._timeout
        headers = {"Connection": "close"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        content = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            content = json.dumps(body).encode()
        connection = self._connection()
        try:
            connection.request(method, f"{base}{path}", content, headers)
            answer = connection.getresponse()
            found = bytearray()
            while piece := answer.read1(_PIECE):
                found += piece
                if len(found) > MAX_ANSWER or time.monotonic() > deadline:
                    raise AdminFailed("the answer is too large, or comes too slowly")
        except TimeoutError:
            raise AdminFailed(f"no answer within {self._timeout:g} s") from None
        except ssl.SSLCertVerificationError as error:
            raise AdminFailed(f"its certificate is not trusted: {error.verify_message}") from None
        except ssl.SSLError as error:
            raise AdminFailed(
                f"TLS failed: {(error.reason or 'unknown reason').replace('_', ' ').lower()}"
            ) from None
        except HTTPException as error:
            raise AdminFailed(f"does not answer HTTP ({type(error).__name__})") from None
        except OSError as error:
            raise AdminFailed(
                f"no connection: {error.strerror or error}: does the proxy run, with listen.admin "
                f"there?"
            ) from None
        finally:
            connection.close()
        return _read(answer.status, bytes(found))

    def _connection(self) -> HTTPConnection:
        place = self.place
        if place.path is not None:
            return _UnixConnection(place.path, self._timeout)
        host = str(place.host)
        if self._context is not None:
            return HTTPSConnection(host, place.port, timeout=self._timeout, context=self._context)
        return HTTPConnection(host, place.port, timeout=self._timeout)


def run_with_client(
    run: Callable[[AdminClient, argparse.Namespace], Any], arguments: argparse.Namespace
) -> int:
    """Run a command with the client that its command line means, and return its exit code.

    With `--json`, what `run` returns is printed.
    """
    client = AdminClient.of(arguments)
    try:
        shown = run(client, arguments)
    except AdminFailed as error:
        sys.stderr.write(f"{arguments.prog}: {client.place}: {error}\n")
        return 1
    except (
        LookupError,
        TypeError,
        AttributeError,
        msgspec.ValidationError,
    ):  # JSON of something else
        sys.stderr.write(
            f"{arguments.prog}: {client.place}: its answer can't be read: is it the admin API, "
            f"of this version?\n"
        )
        return 1
    except KeyboardInterrupt:
        return 130
    if arguments.json and shown is not None:
        print(json.dumps(shown, indent=2))
    return 0


class _UnixConnection(HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket's path."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _read(status: int, body: bytes) -> Any:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise AdminFailed(f"answered {status} without JSON: is it the admin API?", status) from None
    if status < 400:
        return found
    try:
        message = str(found["error"]["message"])
    except (LookupError, TypeError):
        message = f"answered {status} without a message: is it the admin API?"
    raise AdminFailed(printable(message), status)


def printable(text: object) -> str:
    """Return a text without what could control a terminal."""
    return "".join(one if one.isprintable() else "?" for one in str(text))


def _of_option(address: str, ca: str | None) -> tuple[AdminPlace, ssl.SSLContext | None]:
    context = engine_context("--ca", EngineTls(ca=ca)) if address.startswith(HTTPS) else None
    if ca is not None and context is None:
        raise SettingsError("--ca: has no effect without https://")
    try:
        return place_of(
            msgspec.convert(address.removeprefix(HTTPS).rstrip("/"), AdminAddress)
        ), context
    except ValueError:
        text = "expected unix:PATH, HOST:PORT or https://HOST:PORT"
        raise SettingsError(f"--admin: {quote(address)}: {text}") from None


def _own_context(settings: Settings, place: AdminPlace) -> ssl.SSLContext | None:
    """Return the context for a proxy of this machine: it must have the certificate of the settings,
    whatever name that has.
    """
    certificate = settings.listen.tls.certificate
    if certificate is None or place.path is not None:
        return None
    context = engine_context("listen.tls", EngineTls(ca=certificate))
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _first_key(settings: Settings) -> str | None:
    auth = settings.auth
    if auth.admin_keys:
        return auth.admin_keys[0]
    if auth.admin_keys_file is None:
        return None
    return _first_of("auth.admin_keys_file", auth.admin_keys_file)


def _first_of(setting: str, path: str) -> str:
    """Return the first key of a file, which may be the proxy's own: lines are `key` or `name:key`.

    Raises:
        SettingsError: it can't be read, or holds no key.
    """
    from pdproxy.settings.keys import read_key_lines

    found = read_key_lines(setting, path, of_operators=True)
    if not found:
        raise SettingsError(f"{setting}: {spell_file(Path(path))}: holds no key")
    return found[0].key
