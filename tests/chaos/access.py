"""What clients send beside their bodies: keys, priorities, tenants, deadlines; and which refusals
these may lead to. Pure.
"""

from __future__ import annotations

import random

import msgspec

from pdproxy.settings.keys import KeyLimits

KEYS: dict[str, KeyLimits] = {
    "open": KeyLimits(),
    "few": KeyLimits(inflight=2, weight=3.0, priority=(0, 10)),
    "seldom": KeyLimits(rpm=12),
    "small": KeyLimits(tpm=3000),
}
"""The names of valid keys, with their limits. Each key is `chaos-` and its name."""
LINES = """open:chaos-open
few:chaos-few inflight=2 weight=3 priority=0..10
seldom:chaos-seldom rpm=12
small:chaos-small tpm=3000
"""
"""The file of keys."""
TENANT_HEADER = "X-Chaos-Tenant"
WEIGHTS = {"people": 3.0, "batch": 1.0}
STRANGER, NOBODY = "stranger", ""
"""A key that is not valid, and none."""
UNREADABLE = "soon"
"""A deadline that is no number: the proxy serves the request as if it had none."""
TOO_SHORT = 0.1
"""Seconds: a request with less until its deadline is always refused."""
_NAMES = {"open": 62, "few": 12, "seldom": 10, "small": 8, STRANGER: 3, NOBODY: 2}
_TIMEOUTS = {"": 76, "0.05": 3, "0.4": 5, "1.5": 6, "6": 8, UNREADABLE: 2}
_LIMITED = {"few": "key_inflight", "seldom": "key_requests", "small": "key_tokens"}
_SHARE = (429, "share")

Refusals = frozenset[tuple[int, str]]
"""Statuses with the `reason` in the error, empty if there is none."""


class Credentials(msgspec.Struct, frozen=True):
    """What one client sends with each request. `key`: the name of a key; `timeout`: of
    `X-Request-Timeout`, empty: none.
    """

    key: str = "open"
    timeout: str = ""
    priority: int | None = None
    tenant: str = ""

    @property
    def headers(self) -> list[bytes]:
        """The header lines."""
        lines = []
        if self.key != NOBODY:
            lines.append(f"authorization: Bearer chaos-{self.key}")
        if self.timeout:
            lines.append(f"x-request-timeout: {self.timeout}")
        if self.priority is not None:
            lines.append(f"x-vllm-priority: {self.priority}")
        if self.tenant:
            lines.append(f"{TENANT_HEADER.lower()}: {self.tenant}")
        return [line.encode() for line in lines]

    @property
    def seconds(self) -> float | None:
        """The seconds within which it wants its answer, None if it does not say so."""
        return float(self.timeout) if self.timeout not in ("", UNREADABLE) else None

    @property
    def must_fail(self) -> tuple[int, str] | None:
        """The status and reason with which the proxy must refuse it, None if it is to be served."""
        if self.key in (STRANGER, NOBODY):
            return 401, ""
        if self.seconds is not None and self.seconds < TOO_SHORT:
            return 503, "deadline"
        return None

    @property
    def refusals(self) -> Refusals:
        """The refusals that this may lead to, beside those that any request may have."""
        found = {_SHARE}
        if self.must_fail is not None:
            found.add(self.must_fail)
        if self.key in _LIMITED:
            found.add((429, _LIMITED[self.key]))
        if self.seconds is not None:
            found.add((503, "deadline"))
        return frozenset(found)

    def words(self) -> str:
        """Return what differs from a usual client, in words."""
        found = [] if self.key == "open" else [f"key {self.key}" if self.key else "no key"]
        if self.timeout:
            found.append(f"timeout {self.timeout}")
        if self.priority is not None:
            found.append(f"priority {self.priority}")
        if self.tenant:
            found.append(f"tenant {self.tenant}")
        return ", ".join(found)


def drawn(chance: random.Random) -> Credentials:
    """Return what a client sends, by chance."""
    (key,) = chance.choices(list(_NAMES), list(_NAMES.values()))
    (timeout,) = chance.choices(list(_TIMEOUTS), list(_TIMEOUTS.values()))
    priority = chance.choice((-5, 0, 3, 99)) if chance.random() < 0.2 else None
    tenant = chance.choice(("people", "batch", "x" * 200)) if chance.random() < 0.2 else ""
    return Credentials(key, timeout, priority, tenant)
