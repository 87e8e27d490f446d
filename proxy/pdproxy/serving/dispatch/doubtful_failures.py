"""Failures of engines that the request itself may have caused: whose doing they are. Pure.

An engine that answers 5xx may be broken, or do so to this request alone, as every engine would. A
client must not take engines out of use by requests that no engine can serve. So such failures are
kept with their request, and do not count yet:

    another engine has answered the request well    each counts: against its engine, or for the
                                                    transfer of KV
    the same failure at a second engine             the request is the cause. No third engine is
                                                    asked, and none of them counts
    there was no other engine to ask                they count: an only engine that is broken must
                                                    be found, too
    nothing shows it (the client has left)          none counts

A whole answer of status 200, or the first data of a stream, is an answer.
"""

from __future__ import annotations

import msgspec

from pdproxy.scheduling.leases import Lease


class FailedTransfer(msgspec.Struct, frozen=True):
    """KV that did not get from one engine to another, by their URLs. `at`: when that was, in
    monotonic seconds.

    `first`: whether it is the first such failure of its request.
    """

    prefill: str
    decode: str
    at: float
    first: bool


class DoubtfulFailures:
    """Those of one request. Made with the first of them, and dropped once they were counted, or
    shown to be the request's.
    """

    __slots__ = (
        "_answering",
        "_counted",
        "_encoding",
        "_prefilling",
        "_transfers",
        "_without_kv",
        "kv_failed",
    )

    def __init__(self) -> None:
        self.kv_failed = False
        """Whether the request's KV was not made, or not moved, at least once."""
        self._counted: list[Lease] = []
        self._transfers: list[FailedTransfer] = []
        self._encoding: set[str] = set()
        """The encoder engines that have failed with its media."""
        self._prefilling: set[str] = set()
        """The engines that have failed with the request's prefill."""
        self._answering: set[str] = set()
        """Those that have failed with its answer."""
        self._without_kv = False
        """Whether any of those was given no KV, so that KV was not the cause."""

    def __repr__(self) -> str:
        return (
            f"<DoubtfulFailures {len(self._counted)} of engines, {len(self._transfers)} of "
            f"transfers>"
        )

    @property
    def transfers(self) -> list[tuple[str, str]]:
        """The prefill and decode engines between which the request's KV did not move, in the order
        of its attempts.
        """
        return [(one.prefill, one.decode) for one in self._transfers]

    @property
    def engines(self) -> set[str]:
        """The URLs of all engines that have failed."""
        return self._encoding | self._prefilling | self._answering

    def encode_failed(self, lease: Lease) -> None:
        """Note an encoder engine that has answered 5xx."""
        self._encoding.add(lease.engine.url)
        self._counted.append(lease)

    def prefill_failed(self, lease: Lease) -> None:
        """Note a prefill engine that has answered 5xx."""
        self._prefilling.add(lease.engine.url)
        self._counted.append(lease)

    def answer_failed(self, lease: Lease, *, with_kv: bool = False) -> None:
        """Note an answering engine that has answered 5xx. `with_kv`: it was given KV, so that this
        is no failure of its own.
        """
        self._answering.add(lease.engine.url)
        if not with_kv:
            self._without_kv = True
            self._counted.append(lease)

    def transfer_failed(self, failed: FailedTransfer) -> None:
        """Note KV that did not move."""
        self._transfers.append(failed)

    def follow(self, *, prefill: bool) -> bool:
        """Return whether two engines have failed in the same way: with the prefill, or with the
        answer.
        """
        return len(self._prefilling if prefill else self._answering) > 1

    def answered(self) -> tuple[list[Lease], list[FailedTransfer]]:
        """An engine has answered the request well. Return what counts: all of it."""
        return self._counted, self._transfers

    def unanswered(self) -> tuple[list[Lease], list[FailedTransfer]]:
        """The request has ended with such a failure. Return what counts: nothing where several
        engines have failed.

        Nor does KV count that may have moved: an engine that was given none has failed in the same
        way.
        """
        failed = self._counted if len(self.engines) == 1 else []
        decodes = {one.decode for one in self._transfers}
        return failed, self._transfers if len(decodes) == 1 and not self._without_kv else []
