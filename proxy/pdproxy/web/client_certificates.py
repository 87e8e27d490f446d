"""Certificates that clients have shown on a listener, and the end of connections whose certificate
is not valid any more.

Owns when that is: once an authority that has vouched for it is taken away, or once one certificate
of its chain expires. Then its requests end, and its connection closes. `look` is called once per
second, and nothing is done for a request.
"""

from __future__ import annotations

import hashlib
import logging
import math
import ssl
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from pdproxy.kit.errors import RevokedError
from pdproxy.web.connections import Connections
from pdproxy.web.revocable import ShownCertificate

logger = logging.getLogger("pdproxy.files")

_DER = 2
"""What OpenSSL's module of Python calls this form of a certificate (`_ssl.ENCODING_DER`)."""
MAX_KEPT = 32_768
"""Certificates that are remembered for TLS sessions that are resumed: OpenSSL keeps 20,480
sessions.
"""


class ListenerTls(NamedTuple):
    """What connections of a listener begin with. `authorities`: the SHA-256 digests of those that
    may vouch for clients.
    """

    context: ssl.SSLContext
    authorities: frozenset[bytes]


class ClientCertificates:
    """Those of one listener. `newest` returns what its next connection begins with."""

    def __init__(
        self,
        newest: Callable[[], ListenerTls],
        connections: Connections,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._newest = newest
        self._connections = connections
        self._now = now
        self._used = newest()
        self._known: OrderedDict[bytes, ShownCertificate] = OrderedDict()
        """Those that were verified with `_used`: OpenSSL resumes a session without its chain."""
        self._next_end = math.inf

    def __repr__(self) -> str:
        return f"<ClientCertificates, {len(self._known)} known>"

    def begin(self) -> ListenerTls:
        """Return what a new connection begins with. Sessions of a former context are not resumed in
        it.
        """
        newest = self._newest()
        if newest is not self._used:
            self._used = newest
            self._known.clear()
        return newest

    def shown(self, connection: ssl.SSLObject, began: ListenerTls) -> ShownCertificate | None:
        """Return what a client has shown, None where it needs nothing to show. `began`: what its
        handshake began with.

        Raises:
            RevokedError: it is not valid any more.
        """
        if began.context.verify_mode is ssl.CERT_NONE:
            return None
        own = connection.getpeercert(binary_form=True)
        assert own is not None
        name, is_newest = hashlib.sha256(own).digest(), began is self._used
        if not connection.session_reused:
            found = _verified(connection, began.authorities)
        elif not is_newest or (known := self._known.get(name)) is None:
            raise RevokedError("certificate", "revoked")
        else:
            found = known
        # they have changed since the handshake began
        if not found.authorities <= self._used.authorities:
            raise RevokedError("certificate", "revoked")
        if found.ends <= self._now():
            raise RevokedError("certificate", "expired")
        if is_newest:
            self._known[name] = found
            self._known.move_to_end(name)
            if len(self._known) > MAX_KEPT:
                self._known.popitem(last=False)
        self._next_end = min(self._next_end, found.ends)
        return found

    def look(self) -> None:
        """Close the connections whose certificate is not valid any more."""
        before, now = self._used, self._now()
        self.begin()
        taken = before.authorities - self._used.authorities
        if not taken and now < self._next_end:
            return
        revoked = expired = 0
        self._next_end = math.inf
        for connection in self._connections:
            if (shown := connection.certificate) is None:
                continue
            if shown.authorities & taken:
                revoked += 1
                connection.shut_out(lambda: RevokedError("certificate", "revoked"))
            elif shown.ends <= now:
                expired += 1
                connection.shut_out(lambda: RevokedError("certificate", "expired"))
            else:
                self._next_end = min(self._next_end, shown.ends)
        if revoked or expired:
            logger.info(
                "closed %d connections whose authority was taken away, and %d whose certificate "
                "has expired",
                revoked,
                expired,
            )


def _verified(connection: ssl.SSLObject, authorities: frozenset[bytes]) -> ShownCertificate:
    chain = _chain(connection)
    shown = connection.getpeercert()
    assert shown is not None
    own = ssl.cert_time_to_seconds(str(shown["notAfter"]))
    vouching = authorities.intersection(hashlib.sha256(one).digest() for one in chain)
    return ShownCertificate(vouching, min(own, *map(_end_of, chain)))


def _chain(connection: ssl.SSLObject) -> Iterable[bytes]:
    """Return the chain that OpenSSL has verified, from the client's certificate to the authority
    that is trusted.
    """
    if sys.version_info >= (3, 13):
        return connection.get_verified_chain()
    return [one.public_bytes(_DER) for one in connection._sslobj.get_verified_chain()]  # type: ignore[attr-defined]  # noqa: SLF001


def _end_of(certificate: bytes) -> float:
    # Imported here: it takes a while to load, and only a proxy with client certificates needs it.
    from cryptography import x509

    try:
        return x509.load_der_x509_certificate(certificate).not_valid_after_utc.timestamp()
    except ValueError:
        return math.inf  # OpenSSL takes some certificates that break the standard
