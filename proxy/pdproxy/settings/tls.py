"""TLS contexts from the settings: one for clients, one per engine.

Owns the errors of certificates that can't be used: one line that names the setting and the file.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from pdproxy.settings.errors import SettingsError
from pdproxy.settings.files import read_file, read_password
from pdproxy.settings.listen import ListenTls
from pdproxy.settings.schema import EngineTls
from pdproxy.settings.yaml_file import spell_file


def listen_context(tls: ListenTls) -> ssl.SSLContext:
    """Return the context for connections of clients: TLS 1.2 or newer, as is Python's default.

    Raises:
        SettingsError: a file can't be read, or is not what it should be.
    """
    assert tls.certificate is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    password = (
        read_password("listen.tls.key_password_file", tls.key_password_file)
        if tls.key_password_file is not None
        else ""
    )
    _load_own(context, "listen.tls", tls.certificate, tls.key, password)
    if tls.client_ca is not None:
        _load_authorities(context, "listen.tls.client_ca", tls.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
        # With a ticket a client could connect again after its authority has been removed.
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
    return context


def end_of_certificate(path: str) -> datetime | None:
    """Return when the first certificate of a file (PEM) expires, the server's own; None if that can't be read from it.

    Raises:
        SettingsError: the file can't be read.
    """
    # Imported here: it takes a while to load, and only a proxy with TLS needs it.
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(read_file("listen.tls.certificate", path))[0].not_valid_after_utc
    except ValueError as error:
        if isinstance(error, SettingsError):
            raise
        return None  # OpenSSL takes some certificates that break the standard


def following(newest: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    """Return a context for a listener that uses the newest context for each handshake; open connections keep theirs.

    Loading a renewed certificate into a context that is in use can't remove an authority, and changes half of the context if
    the key does not match.
    """

    def pick(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, first: ssl.SSLContext) -> None:
        connection.context = newest()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    started = newest()
    context.set_alpn_protocols(["http/1.1"])
    # A connection has these before `pick` is called; authorities and certificates are those of the newest context.
    context.verify_mode, context.num_tickets, context.options = (
        started.verify_mode,
        started.num_tickets,
        started.options,
    )
    context.sni_callback = pick
    return context


def engine_context(setting: str, tls: EngineTls) -> ssl.SSLContext:
    """Return the context for connections to an engine. `setting` is the name of `tls` in the settings.

    Raises:
        SettingsError: a file can't be read, or is not what it should be.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["http/1.1"])
    if tls.verify is False:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif tls.ca is not None:
        _load_authorities(context, f"{setting}.ca", tls.ca)
    else:
        context.load_default_certs()
    if tls.certificate is not None:
        _load_own(context, setting, tls.certificate, tls.key, "")
    return context


def merged(pool: EngineTls, node: EngineTls) -> EngineTls:
    """Return the settings for an engine: each its own or the pool's, but certificate and key come from the same place."""
    own = node if node.certificate is not None else pool
    return EngineTls(
        ca=node.ca if node.ca is not None else pool.ca,
        certificate=own.certificate,
        key=own.key,
        verify=node.verify if node.verify is not None else pool.verify,
    )


def _load_own(context: ssl.SSLContext, setting: str, certificate: str, key: str | None, password: str) -> None:
    held = read_file(f"{setting}.certificate", certificate)  # so that the error names the file that is missing
    if key is not None:
        held = read_file(f"{setting}.key", key)
    try:
        # Never without a password: OpenSSL would ask for one on the terminal.
        context.load_cert_chain(certificate, key, password=lambda: password)
    except (OSError, ValueError) as error:
        files = " with ".join(spell_file(Path(path)) for path in (certificate, key) if path is not None)
        raise SettingsError(f"{setting}: {files}: {_reason_of(error, locked=b'ENCRYPTED' in held)}") from None


def _load_authorities(context: ssl.SSLContext, setting: str, path: str) -> None:
    read_file(setting, path)
    try:
        context.load_verify_locations(path)
    except (OSError, ValueError) as error:
        raise SettingsError(f"{setting}: {spell_file(Path(path))}: {_reason_of(error)}") from None


def _reason_of(error: Exception, *, locked: bool = False) -> str:
    match getattr(error, "reason", None):
        case "KEY_VALUES_MISMATCH":
            return "the key is not the certificate's"
        case _ if locked:
            return "the key is encrypted, and its password is wrong or missing"
        case str(reason):
            return f"holds no certificate or key in PEM that can be used ({reason.replace('_', ' ').lower()})"
        case _:
            return "holds no certificate or key in PEM that can be used"
