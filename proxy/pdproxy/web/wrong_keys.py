"""Wrong keys, by the addresses that send them. Owns how many an address may send before it is told
to wait.

A right key is served whatever else comes from its address: many clients may share one, behind a
balancer. So this does not keep anybody from guessing a key that is short: it shows senders and
operators that something is wrong. What wrong keys cost others is limited elsewhere: log lines
(`observe.few_lines`), and connections (`web.connections`). Each worker counts by itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from pdproxy.kit.errors import LimitError, PdproxyError, RefusalReason, UnauthorizedError
from pdproxy.observe.description import Label, counter
from pdproxy.observe.events import Observers

AT_ONCE = 20
"""Wrong keys that an address may send at once."""
PER_SECOND = 0.2
"""Wrong keys that it may send on average."""
CLIENTS, ADMIN = "clients", "admin"
"""The listeners."""
MAX_ADDRESSES = 4096
"""Addresses that are remembered. Beyond them, the one whose last wrong key is the oldest is
forgotten.
"""
WRONG_KEYS = counter(
    "pdproxy_wrong_keys_total",
    "requests",
    "Requests with a wrong key, of clients and of operators",
    Label("listener", (("clients", "where clients reach the proxy"), ("admin", "listen.admin"))),
    Label(
        "answer",
        (("refused", "with 401"), ("throttled", "with 429: its address had sent too many before")),
    ),
)


class WrongKeys:
    """The wrong keys that have come to one process. `now`: monotonic seconds."""

    def __init__(self, now: Callable[[], float], observers: Observers) -> None:
        self._now = now
        self._observers = observers
        self._known: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """What each address has left, and since when."""

    def __repr__(self) -> str:
        return f"<WrongKeys of {len(self._known)} addresses>"

    def answer(
        self, error: UnauthorizedError, address: str, listener: str = CLIENTS
    ) -> PdproxyError:
        """Return the error for a request without a valid key: `error`, or that its address has sent
        too many wrong keys.
        """
        if error.code is None:
            return error  # there was no key
        now = self._now()
        left, since = self._known.pop(address, (float(AT_ONCE), now))
        left = min(left + (now - since) * PER_SECOND, float(AT_ONCE))
        is_over = left < 1
        self._known[address] = (left, now) if is_over else (left - 1, now)
        if len(self._known) > MAX_ADDRESSES:
            self._known.popitem(last=False)
        self._observers.count(WRONG_KEYS, listener, "throttled" if is_over else "refused")
        if not is_over:
            return error
        text = "Incorrect API keys come from this address too often."
        return LimitError(text, RefusalReason.WRONG_KEYS, retry_after=(1 - left) / PER_SECOND)
