"""Rules about the machine that the check runs on, which should be the proxy's. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from pdproxy.check.facts import CheckFacts
from pdproxy.check.findings import Finding


def proxies(facts: CheckFacts) -> Iterator[Finding]:
    """HTTP proxies in the environment."""
    caught = [engine.url for engine in facts.engines if engine.url not in facts.machine.bypassed]
    if facts.machine.proxies and caught:
        named = ", ".join(f"{name}={value}" for name, value in facts.machine.proxies.items())
        yield Finding(
            level="note",
            code="http_proxy",
            where=tuple(caught),
            says=f"{named} is set: other programs' requests to these engines use it, pdproxy's do "
            f"not",
            remedy="put the engines' hosts and pdproxy's into no_proxy, for curl, clients and "
            "benchmarks on this machine",
        )


def files(facts: CheckFacts) -> Iterator[Finding]:
    """Too few open files for `limits.max_connections` and `limits.max_inflight`."""
    limit, need = facts.machine.files, facts.machine.files_needed
    if limit is not None and limit < need:
        limits = facts.settings.limits
        wanted = (
            f"limits.max_connections = {limits.max_connections} and limits.max_inflight = "
            f"{limits.max_inflight}"
        )
        yield Finding(
            level="warning",
            code="open_files",
            says=f"this machine allows a process {limit} open files, and {wanted} need {need}: "
            f"pdproxy will serve fewer",
            remedy="raise the hard limit (ulimit -Hn, LimitNOFILE= in systemd, --ulimit in "
            "Docker), "
            "or lower both",
        )


RULES = (proxies, files)
