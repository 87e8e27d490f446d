"""Engines as the command line names them: a role, and a URL or only host and port."""

from __future__ import annotations

from typing import NamedTuple

from pdproxy.settings.schema import Role


class EngineFlag(NamedTuple):
    """An engine from the command line. A URL without a scheme gets `http://`."""

    role: Role
    url: str


def with_scheme(url: str) -> str:
    """Return the URL, with `http://` added to a plain `host:port`."""
    return url if "://" in url else f"http://{url}"
