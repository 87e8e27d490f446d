"""TLS: the sections `listen.tls` and `pools[].tls`, and their contexts: one for clients, one per
engine.

Owns the errors of certificates that can't be used: one line that names the setting and the file.
"""

from __future__ import annotations

import hashlib
import re
import ssl
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Annotated

from pdproxy.settings.errors import KeyPath, Mistakes, SettingsError, spell_key
from pdproxy.settings.files import read_file, read_password, spell_file
from pdproxy.settings.section import File, Option, Section

_CERTIFICATE = re.compile("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


class ListenTls(Section, frozen=True):
    """TLS for clients.

    Files are PEM. They are checked once per second and read again when they have changed: new
    connections get the new certificate, open ones stay. If the new files can't be used, the old
    ones stay in force, and the log and /ready report it. With TLS, health checks must use https,
    too: `pdproxy health` does.
    """

    certificate: Annotated[
        File | None,
        Option(
            "the server's certificate with its chain, PEM; turns on TLS (default: no TLS)",
            "FILE",
            "--ssl-certfile",
        ),
    ] = None
    """The server's certificate with its chain (--ssl-certfile, as for vLLM). null: plain HTTP."""

    key: Annotated[
        File | None,
        Option(
            "the certificate's private key, PEM (default: in the certificate's file)",
            "FILE",
            "--ssl-keyfile",
        ),
    ] = None
    """Its private key (--ssl-keyfile). null: the certificate's file also holds the key."""

    key_password_file: File | None = None
    """The key's password, in the first line of a file. null: the key is not encrypted."""

    client_ca: Annotated[
        File | None,
        Option(
            "authorities, PEM: clients must have a certificate from one of them (default: "
            "clients need none)",
            "FILE",
            "--ssl-ca-certs",
        ),
    ] = None
    """Authorities of client certificates (--ssl-ca-certs). If set, a client without a certificate
    from them gets no connection, also not to /health and /metrics (vLLM needs --ssl-cert-reqs 2 for
    this). When one is taken out of the file, or a certificate expires, the connections of its
    clients are closed.
    """


class EngineTls(Section, frozen=True):
    """TLS towards engines with an `https://` URL. Files are PEM, and are read again when they
    change.
    """

    ca: File | None = None
    """Authorities that must have signed the engines' certificates. null: those of the system."""

    certificate: File | None = None
    """The proxy's own certificate, for engines that require one. null: none."""

    key: File | None = None
    """Its private key, not encrypted. null: the certificate's file also holds the key."""

    verify: bool | None = None
    """false trusts any certificate of any host: somebody in between can read prompts and keys.
    null: true.
    """


def refuse_stray_files(
    tls: ListenTls | EngineTls, path: KeyPath, names: Iterable[str], found: Mistakes
) -> None:
    """Refuse files, by the names of their settings, that only have an effect with a certificate."""
    for name in names:
        if tls.certificate is None and getattr(tls, name) is not None:
            key, needed, where = (
                (*path, name),
                spell_key((*path, "certificate")),
                found.source((*path, name)),
            )
            found.add(key, f"{spell_key(key)}: has no effect without {needed}{where}")


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
        # A ticket is good for hours, and OpenSSL resumes it without a look at the certificate's
        # end. Without tickets, TLS 1.2 still resumes sessions by their ids:
        # `web.client_certificates` knows what was shown in them.
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
    return context


def end_of_certificate(setting: str, path: str) -> datetime | None:
    """Return when the first certificate of a file (PEM) expires, its owner's; None if that can't be
    read from it. `setting` names the file in errors.

    Raises:
        SettingsError: the file can't be read.
    """
    # Imported here: it takes a while to load, and only a proxy with TLS needs it.
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(read_file(setting, path))[0].not_valid_after_utc
    except ValueError as error:
        if isinstance(error, SettingsError):
            raise
        return None  # OpenSSL takes some certificates that break the standard


def authorities_of(context: ssl.SSLContext, path: str | None) -> frozenset[bytes]:
    """Return the SHA-256 digests of the certificates that may vouch for clients. `path`: the file
    that `context` has them from.

    Raises:
        SettingsError: the file can't be read.
    """
    if path is None:
        return frozenset()
    # OpenSSL also trusts a certificate of the file that is no authority's, and does not list it.
    text = read_file("listen.tls.client_ca", path).decode("ascii", "replace")
    ones = [ssl.PEM_cert_to_DER_cert(one) for one in _CERTIFICATE.findall(text)]
    return frozenset(
        hashlib.sha256(one).digest() for one in (*ones, *context.get_ca_certs(binary_form=True))
    )


def engine_context(setting: str, tls: EngineTls) -> ssl.SSLContext:
    """Return the context for connections to an engine. `setting` is the name of `tls` in the
    settings.

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
    """Return the settings for an engine: each its own or the pool's, but certificate and key come
    from the same place.
    """
    own = node if node.certificate is not None else pool
    return EngineTls(
        ca=node.ca if node.ca is not None else pool.ca,
        certificate=own.certificate,
        key=own.key,
        verify=node.verify if node.verify is not None else pool.verify,
    )


def _load_own(
    context: ssl.SSLContext, setting: str, certificate: str, key: str | None, password: str
) -> None:
    # so that the error names the file that is missing
    held = read_file(f"{setting}.certificate", certificate)
    if key is not None:
        held = read_file(f"{setting}.key", key)
    try:
        # Never without a password: OpenSSL would ask for one on the terminal.
        context.load_cert_chain(certificate, key, password=lambda: password)
    except (OSError, ValueError) as error:
        files = " with ".join(
            spell_file(Path(path)) for path in (certificate, key) if path is not None
        )
        raise SettingsError(
            f"{setting}: {files}: {_reason_of(error, locked=b'ENCRYPTED' in held)}"
        ) from None


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
            return (
                f"holds no certificate or key in PEM that can be used "
                f"({reason.replace('_', ' ').lower()})"
            )
        case _:
            return "holds no certificate or key in PEM that can be used"
