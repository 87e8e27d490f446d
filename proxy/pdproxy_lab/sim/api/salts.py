"""Which `cache_salt` vLLM takes: `entrypoints/generate/base/protocol.py` of 0.32.0 and 0.33.0,
whatever the schemas say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdproxy_lab.sim.api.errors import RefusedRequest

_MAX_LENGTH = 128
_FORBIDDEN = frozenset("@/\\\0")


def check_salt(data: Mapping[str, Any]) -> None:
    """Refuse a body whose salt vLLM does not take.

    Raises:
        Refused: in vLLM's words.
    """
    salt = data.get("cache_salt")
    if salt is None:
        return
    if not isinstance(salt, str) or not salt:
        raise RefusedRequest(
            "Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt"
        )
    if len(salt) > _MAX_LENGTH or not _FORBIDDEN.isdisjoint(salt):
        raise RefusedRequest(
            "Parameter 'cache_salt' must be at most 128 characters and must not contain '@', "
            "'/', '\\\\', or NUL.",
            "cache_salt",
        )
