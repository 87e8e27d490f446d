"""What a request asks of the scheduler, and what it tells the scheduler: all of it.

What serves a request (`serving`) knows engines' states, and moves bytes. Which engines a request
gets, and what its legs show of engines, is the scheduler's (`deciding`). The two know each other by
this module alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from pdproxy.scheduling.leases import Assignment, Lease, Verdict
from pdproxy.scheduling.policy import Ask


class Constraints(msgspec.Struct, frozen=True, array_like=True):
    """What the engines of one attempt must be.

    `must_be_whole`: why one engine must serve the request; None: a prefill and a decode engine may
    share it. `without`: URLs of engines that must not get it; one that serves it whole is taken
    from them only if there are no others. `avoid`: URLs of engines that are used only if no others
    can serve it. `kv_tokens`: tokens whose KV must fit into the decode engine's receive buffer.
    """

    must_be_whole: str | None = None
    without: Sequence[str] = ()
    avoid: Sequence[str] = ()
    kv_tokens: int = 0


ANY = Constraints()
"""Those of most prompts."""


class Scheduler(Protocol):
    """Chooses engines. Each `Lease` that it gives is ended by one `close`.

    Whatever is awaited may take a while, and may be cancelled: then nothing stays leased. The other
    methods return at once. Times are in monotonic seconds.
    """

    async def choose(
        self,
        request_id: str,
        ask: Ask,
        constraints: Constraints = ANY,
        turn: bytes | None = None,
    ) -> Assignment | None:
        """Lease the engines for one attempt with a prompt: a prefill and a decode engine, or one
        that serves the request whole. None: there are none for it.

        `turn`: the prompt's scope and token ids, by which the turn before is found; None where no
        turns are kept.

        Raises:
            TooLateError: no engine can serve it in time, and such requests are refused.
            OverloadedError: no decode engine had space for its KV in time.
        """

    async def choose_one(
        self, ask: Ask, without: Sequence[str] = (), avoid: Sequence[str] = ()
    ) -> Lease | None:
        """Lease an engine for a request that is never split. None: there is none. `without` and
        `avoid`: as `Constraints` has them.
        """

    async def choose_encoders(
        self, asks: Sequence[Ask], without: Sequence[str], *, proven: bool
    ) -> Sequence[Lease]:
        """Lease an encoder engine for each of some media. The result is shorter than `asks` if
        there are none for the rest.

        `proven`: only engines that are known to work.
        """

    def fits(self, tokens: int) -> bool:
        """Return whether the KV of so many tokens fits into any decode engine's receive buffer,
        once that is empty.
        """

    def began(self, lease: Lease, at: float) -> None:
        """Note that the engine that answers has made its first token."""

    def close(
        self,
        lease: Lease,
        verdict: Verdict,
        at: float,
        *,
        pace: float | None = None,
        tokens: int | None = None,
        beside: int = 0,
    ) -> None:
        """End a lease.

        `pace`: the seconds that its engine took for a byte of a prompt, or for an event; None where
        that can't be compared. `tokens`: how many the client got from it, None where unknown.
        `beside`: how many streams it made at the same time.
        """

    def failed(self, lease: Lease, at: float) -> None:
        """Count a leg as failed whose lease is closed: only now it is known that its engine was the
        cause.
        """

    def kv_took(self, prefill: str, decode: str, at: float, seconds: float) -> None:
        """Note how long a stream waited for its KV, once both engines had what they need."""

    def kv_failed(self, prefill: str, decode: str, at: float, *, first: bool = True) -> None:
        """Count a prompt whose KV did not get from one engine to the other. `at`: when the transfer
        failed.

        `first`: whether it is the first such failure of its request.
        """

    def kv_not_made(self, prefill: str, at: float) -> None:
        """Count a prompt for which a prefill engine gave no KV that can be used, and no error."""

    def kv_loaded(self, prefill: str, decode: str, since: float) -> None:
        """Count a prompt whose KV was loaded. `since`: when it was sent."""

    def left_out(self, prefill: str, decode: str, failed: Sequence[tuple[str, str]]) -> str:
        """Return which of two engines is left out of a prompt's next attempt: see
        `TransferFaults.left_out`.
        """

    def counted(self, lease: Lease, prompt: int, cached: int | None) -> None:
        """Note how many tokens an engine says that the prompt has, before its lease is closed.
        `cached`: those that it has found in its cache, None where that is not compared.
        """

    def prefilled(self, lease: Lease, tokens: int, seconds: float) -> None:
        """Note how long a prefill engine took for so many tokens, without KV of the turn before.
        Where turns are kept, each such leg is told.
        """

    def refuses_reports(self, url: str) -> None:
        """Note that an engine refuses a request that asks it to report what it has found."""

    def lost_model(self, url: str, model: str) -> None:
        """Note that an engine has refused a model that it does not have."""

    def found_gone(self, url: str, why: str, at: float) -> None:
        """Note that an engine is not there any more."""
