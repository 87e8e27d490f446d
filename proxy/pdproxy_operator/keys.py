"""The operator's keys to the metrics of proxies: one for each PDProxy, derived from one secret. The
settings of the proxies hold its digest alone.
"""

from __future__ import annotations

import hashlib
import hmac


def key_of(secret: str, uid: str) -> str:
    """Return the key for the PDProxy of this uid: 64 hexadecimal digits."""
    return hmac.new(secret.encode(), uid.encode(), hashlib.sha256).hexdigest()


def digest_of(key: str) -> str:
    """Return what the settings hold: see `auth.reader_key_digests`."""
    return hashlib.sha256(key.encode()).hexdigest()
