"""What is known of KV that does not move, of one pool: it is noted in the ledger, logged, counted,
and told to other workers.

`scheduling.transfer_faults` finds whose fault it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from pdproxy.observe.description import Label, MergeRule, Samples, counter, gauge
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
    workers=MergeRule.MOST,  # what one finds all know
)
TRANSFER_FAULTS_FOUND = counter(
    "pdproxy_kv_faults_found_total",
    "faults",
    "How often it was found that KV does not move to or from an engine, or over a link",
    _FAULT,
    of=TransferFaultSeen,
    counts=lambda event: [] if event.over or event.elsewhere else [((event.kind,), 1)],
)


class _Told(msgspec.Struct, array_like=True):
    """A message. `over`: whether these faults are over."""

    faults: list[TransferFault]
    over: bool


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Told).decode


def _nobody(_: bytes) -> None:
    """Tell nobody: there are no other workers."""


class Transfers:
    """The faults of one pool's KV transfers. An observer: the audit's counts show which decode
    engine computes KV again.

    `tell` sends a message to all other workers.
    """

    only = (KvCounted,)

    def __init__(
        self,
        ledger: Ledger,
        observers: Observers,
        now: Callable[[], float],
        tell: Callable[[bytes], None] = _nobody,
    ) -> None:
        self._ledger = ledger
        self._observers = observers
        self._now = now
        self._tell = tell
        self.known: TransferFaults = ledger.transfers
        """Read only."""
        ledger.when_forgiven = self._forgiven
        observers.show(TRANSFER_FAULTS, self._shown)

    def __repr__(self) -> str:
        return f"<Transfers with {len(self.known.faults)} faults>"

    def failed(
        self, prefill: str, decode: str, *, first: bool = True, at: float | None = None
    ) -> None:
        """Count a prompt whose KV did not get from one engine to the other. `at`: when the transfer
        failed, None: now.

        `first`: whether it is the first such failure of its request.
        """
        now = self._now() if at is None else at
        self._found(self._ledger.transfer_failed(prefill, decode, now, first=first))

    def left_out(self, prefill: str, decode: str, failed: Sequence[tuple[str, str]]) -> str:
        """Return which of two engines is left out of a prompt's next attempt: see
        `TransferFaults.left_out`.
        """
        return self._ledger.left_out(prefill, decode, failed)

    def not_made(self, prefill: str) -> None:
        """Count a prompt for which a prefill engine gave no KV that can be used, and no error."""
        self._found(self._ledger.kv_not_made(prefill, self._now()))

    def loaded(self, prefill: str, decode: str, since: float) -> None:
        """Count a prompt whose KV was loaded. `since`: when it was sent. Called only while
        `known.suspects`.
        """
        over = self._ledger.transfer_loaded(prefill, decode, since)
        for fault in over:
            self._seen(fault, "the KV of a prompt was loaded", over=True)
        if over:
            self._tell(_encode(_Told(over, over=True)))

    def notify(self, event: Event) -> None:
        """Take what a decode engine's counters show."""
        if isinstance(event, KvCounted):
            fault = self._ledger.transfers_counted(
                event.node, event.moved, event.missing, self._now()
            )
            if fault is None or fault.key in self.known.faults:
                self._found(fault)
            else:
                self._seen(fault, "its counters show that KV comes", over=True)
                self._tell(_encode(_Told([fault], over=True)))

    def received(self, body: bytes) -> None:
        """Take what another worker has found."""
        told = _decode(body)
        for fault in told.faults:
            if self._ledger.follow_transfers(fault, over=told.over):
                self._seen(fault, fault.why, over=told.over, elsewhere=True)

    def _shown(self) -> Samples:
        counts = Counter(fault.kind for fault in self.known.faults.values())
        return [((kind,), counts[kind]) for kind in KINDS]

    def _found(self, fault: TransferFault | None) -> None:
        if fault is None:
            return
        if not fault.again:
            self._seen(fault, fault.why, over=False)
        self._tell(_encode(_Told([fault], over=False)))

    def _forgiven(self, fault: TransferFault) -> None:
        """A fault is over because its engine was removed or started again. Other workers find that
        themselves.
        """
        self._seen(fault, "an engine was started again or removed", over=True)

    def _seen(
        self, fault: TransferFault, reason: str, *, over: bool, elsewhere: bool = False
    ) -> None:
        event = TransferFaultSeen(
            fault.kind, fault.prefill or None, fault.decode or None, reason, over, elsewhere
        )
        self._observers.notify(event)
