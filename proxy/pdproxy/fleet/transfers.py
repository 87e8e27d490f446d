"""What is known of KV that does not move, of one pool: it is noted in the ledger, logged and
counted.

`scheduling.transfer_faults` finds whose fault it is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from pdproxy.observe.description import NODE, Label, MergeRule, Samples, counter, gauge
from pdproxy.observe.events import Event, KvCounted, Observers, TransferFaultSeen
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.transfer_faults import KINDS, TransferFault, TransferFaults

_FAULT = Label(
    "kind",
    (
        ("prefill", "no decode engine can load a prefill engine's KV, or it makes none"),
        ("decode", "a decode engine can load no KV, or computes it again"),
        (
            "link",
            (
                "KV does not get from one prefill engine to one decode engine, which both move KV "
                "with others"
            ),
        ),
    ),
)
TRANSFER_FAULTS = gauge(
    "pdproxy_kv_faults",
    "faults",
    "Engines and links with which no prompt is split since KV does not move; GET /ready names them",
    _FAULT,
    workers=MergeRule.MOST,
)
TRANSFER_FAULTS_FOUND = counter(
    "pdproxy_kv_faults_found_total",
    "faults",
    "How often it was found that KV does not move to or from an engine, or over a link",
    _FAULT,
    of=TransferFaultSeen,
    counts=lambda event: [] if event.over else [((event.kind,), 1)],
)
RECOMPUTED = gauge(
    "pdproxy_kv_recomputed_ratio",
    "ratio",
    "The part of the prompt tokens sent to a decode engine by KV transfer that it computed again, "
    "of about the last minute. Engines that got none in 5 minutes are not shown",
    NODE,
    workers=MergeRule.MOST,
)
LATELY = 60.0
"""Seconds in which what was counted loses 63 % of its weight."""
SHOWN = 300.0
"""Seconds for which it is shown."""


@dataclass(slots=True)
class _Lately:
    """Prompt tokens that came to a decode engine as KV, and those that it computed again, with
    their weights at the monotonic time `at`.
    """

    at: float
    moved: float = 0.0
    missing: float = 0.0

    def add(self, moved: int, missing: int, now: float) -> None:
        """Count some now."""
        weight = math.exp((self.at - now) / LATELY)
        self.at = now
        self.moved, self.missing = self.moved * weight + moved, self.missing * weight + missing


class Transfers:
    """The faults of one pool's KV transfers, in the process that chooses engines. An observer: the
    audit's counts show which decode engine computes KV again.
    """

    only = (KvCounted,)

    def __init__(self, ledger: Ledger, observers: Observers, now: Callable[[], float]) -> None:
        self._ledger = ledger
        self._observers = observers
        self._now = now
        self.known: TransferFaults = ledger.transfers
        """Read only."""
        self._lately: dict[str, _Lately] = {}

    def __repr__(self) -> str:
        return f"<Transfers with {len(self.known.faults)} faults>"

    def start(self) -> None:
        """Show and log what is found."""
        self._ledger.when_forgiven = self._forgiven
        self._observers.show(TRANSFER_FAULTS, self._shown)
        self._observers.show(
            RECOMPUTED, lambda: [((url,), part) for url, part in self.recomputed().items()]
        )
        self._observers.add(self)

    def failed(self, prefill: str, decode: str, at: float, *, first: bool = True) -> None:
        """Count a prompt whose KV did not get from one engine to the other. `at`: when the transfer
        failed.

        `first`: whether it is the first such failure of its request.
        """
        self._found(self._ledger.transfer_failed(prefill, decode, at, first=first))

    def not_made(self, prefill: str, at: float) -> None:
        """Count a prompt for which a prefill engine gave no KV that can be used, and no error."""
        self._found(self._ledger.kv_not_made(prefill, at))

    def loaded(self, prefill: str, decode: str, since: float) -> None:
        """Count a prompt whose KV was loaded. `since`: when it was sent."""
        if not self.known.suspects:
            return
        for fault in self._ledger.transfer_loaded(prefill, decode, since):
            self._seen(fault, "the KV of a prompt was loaded", over=True)

    def notify(self, event: Event) -> None:
        """Take what a decode engine's counters show."""
        if isinstance(event, KvCounted):
            now = self._now()
            if event.node not in self._lately:
                for url in [url for url in self._lately if self._ledger.get(url) is None]:
                    del self._lately[url]
                self._lately[event.node] = _Lately(now)
            self._lately[event.node].add(event.moved, event.missing, now)
            fault = self._ledger.transfers_counted(event.node, event.moved, event.missing, now)
            if fault is None or fault.key in self.known.faults:
                self._found(fault)
            else:
                self._seen(fault, "its counters show that KV comes", over=True)

    def recomputed(self) -> dict[str, float]:
        """Return which part of what decode engines got as KV lately they computed again, 0 to 1,
        by URL. Those that got none are not there.
        """
        since = self._now() - SHOWN
        return {
            url: counts.missing / total
            for url, counts in self._lately.items()
            if counts.at >= since
            and self._ledger.get(url) is not None
            and (total := counts.moved + counts.missing)
        }

    def _shown(self) -> Samples:
        counts = Counter(fault.kind for fault in self.known.faults.values())
        return [((kind,), counts[kind]) for kind in KINDS]

    def _found(self, fault: TransferFault | None) -> None:
        if fault is not None and not fault.again:
            self._seen(fault, fault.why, over=False)

    def _forgiven(self, fault: TransferFault) -> None:
        """A fault is over because its engine was removed or started again."""
        self._seen(fault, "an engine was started again or removed", over=True)

    def _seen(self, fault: TransferFault, reason: str, *, over: bool) -> None:
        event = TransferFaultSeen(
            fault.kind, fault.prefill or None, fault.decode or None, reason, over
        )
        self._observers.notify(event)
