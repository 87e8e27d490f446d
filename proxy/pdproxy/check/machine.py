"""The machine that the check runs on: proxies in the environment, and how many files may be
open.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]  # documented, but not in typeshed

from pdproxy.app.server import files_needed
from pdproxy.check.facts import MachineFacts
from pdproxy.settings.schema import Settings

_PROXIES = ("http_proxy", "all_proxy")


def machine_facts(settings: Settings, env: Mapping[str, str]) -> MachineFacts:
    """Return the facts of this machine and of `env` that matter to a proxy with these settings."""
    # the server raises its soft limit by itself
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    bypass = {
        "no": next(
            (value for name, value in env.items() if name.lower() == "no_proxy" and value), ""
        )
    }
    return MachineFacts(
        proxies={
            name: _without_password(value)
            for name, value in env.items()
            if name.lower() in _PROXIES and value
        },
        bypassed=frozenset(
            _bypassed((engine.url for pool in settings.pools for engine in pool.nodes), bypass)
        ),
        files=None if hard == resource.RLIM_INFINITY else hard,
        files_needed=files_needed(settings),
    )


def _bypassed(urls: Iterable[str], proxies: dict[str, str]) -> Iterable[str]:
    # With `proxies`, the standard library applies its rules for no_proxy to it and not to
    # os.environ.
    return (
        url
        for url in urls
        if proxies["no"] and proxy_bypass_environment(urlsplit(url).netloc, proxies)
    )


def _without_password(value: str) -> str:
    return value.rpartition("@")[2] if "@" in value else value
