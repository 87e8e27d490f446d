"""Custody of one handle: its states, and how it ends. `serving.kv.custodian` has all of them.

Owns the handle. A handle is given away once: `spend` gives it to the one decode leg that is being
written, `release` to the release. Both are decided in the step in which the bytes are made, so no
notice can come between. Whoever asks again needs another handle: the engine may have read this
one's KV, and its blocks may hold another prompt's KV by now.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Protocol

from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import KvGoneError
from pdproxy.serving.kv.orphans import PrefillRecord
from pdproxy.serving.kv.release import OngoingRelease
from pdproxy.transfer.contract import Counts, Handle

logger = logging.getLogger("pdproxy.kv")


class CustodyState(Enum):
    """The state of a live handle."""

    PROMISED = "promised"  # both engines were asked; the prefill engine has not answered yet
    HELD = "held"  # the KV is held for the proxy, no decode engine was asked
    ASKED = "asked"  # a decode engine was sent the handle, and has shown nothing yet
    RELEASING = "releasing"  # it is being released


class End(Enum):
    """How a handle ended."""

    LOADED = "loaded"  # the decode engine produced data from it
    RELEASED = "released"  # we released it
    REFUSED = "refused"  # the decode engine refused the request and released it
    ABORTED = "aborted"  # the decode engine had it when its request was closed: it frees it
    LOST = "lost"  # it could not be released: the prefill engine's lease frees it
    EXPIRED = "expired"  # the prefill engine reported that its lease has ended
    # the prefill failed, or was closed: there was no KV, and no decode engine waits for it
    NOT_MADE = "not_made"
    STUCK = (
        # it was not made, or not pushed: a decode engine may wait for it, and nothing else frees
        # its blocks
        "stuck"
    )

    def __init__(self, label: str) -> None:
        self.label = label  # read once per request: in Python 3.11, `value` takes two calls


_BY_DECODE = (End.REFUSED, End.ABORTED)
USABLE = 0.9
"""The part of a prefill engine's lease in which a decode engine is asked. It needs the rest to
begin its read.
"""


class Keeper(Protocol):
    """What a custody needs of the custodian."""

    clock: Clock
    now: Callable[[], float]
    decode_waits: bool
    """Whether decode engines wait for a push under the pool's contract."""
    loses_closed: Callable[[Handle], bool]
    """Returns whether a decode engine never frees its blocks if its request is closed while it
    waits.
    """

    @property
    def holds(self) -> bool:
        """Whether engines hold KV for the proxy under that contract."""

    def placed(self, handle: Handle, prefill: str) -> Handle:
        """Return a handle with the host at which the settings say that others reach its prefill
        engine.
        """

    def leases_of(self, prefill: str) -> tuple[float, float | None]:
        """Return the seconds for which a prefill engine keeps KV that nobody reads, and how many of
        its handles have expired.

        None: that is not known, or notices say it of each handle.
        """

    def decode_releases(
        self, prefill_run: int | None, decode_run: int | None, *, in_silence: bool
    ) -> bool:
        """Return whether a decode engine that refuses or aborts the request releases the handle
        itself.
        """

    def ended(self, custody: Custody, how: End) -> None:
        """Forget a handle that has ended."""

    def release(self, custody: Custody, releasing: OngoingRelease) -> None:
        """Start releasing a handle."""


class Custody:
    """One live handle. It ends once; ending it again changes nothing. After the end only the
    handle's counts are kept.

    `handle` is a `Handle` until the end, `Counts` behind it.

    If no KV is held for the proxy, this object only carries the handle: it has no state, and
    releasing it does nothing.
    """

    __slots__ = (
        "_custodian",
        "_decode_waits",
        "_end_later",
        "_held_since",
        "_over",
        "_unread",
        "authorization",
        "decode",
        "decode_run",
        "expected",
        "expired_before",
        "freed",
        "handle",
        "how",
        "loses_closed",
        "model",
        "on_gone",
        "prefill",
        "prefill_run",
        "promised",
        "since",
        "state",
        "sure_until",
        "was_asked",
    )

    def __init__(
        self, custodian: Keeper, handle: Handle, leg: PrefillRecord, *, promised: bool = False
    ) -> None:
        self._custodian = custodian
        self.handle: Handle | Counts = custodian.placed(handle, leg.prefill)
        self.prefill = leg.prefill
        self.prefill_run = leg.run
        """The number of the prefill engine's run when it was asked, None if that is not known."""
        self.decode = leg.receiver
        self.decode_run: int | None = None
        """The number of the decode engine's run when it was asked, None before."""
        self.expected = leg.expected
        """The wait for the notices of its push. It ends with the custody: KV that is still being
        pushed can't be released.
        """
        self.model = leg.model
        self.authorization = leg.authorization
        self.state: CustodyState | None = CustodyState.HELD if custodian.holds else None
        self.how: End | None = None
        self.since = self._held_since = custodian.now()
        self.on_gone: Callable[[str, bool], None] | None = None
        """Called if a decode engine must not wait for the KV, or read it, any more: with the
        reason, and whether the prefill engine was lost. (Otherwise its lease has ended: the decode
        engine could read another prompt's KV.)
        """
        self.sure_until = math.inf
        """Until when the decode engine has read this KV, and no other. Behind that, the lease may
        have ended before the read, and nothing has said so: a decode engine renews the lease,
        unless it stands still, or its messages are lost.
        """
        self.expired_before = 0.0
        """How many of the prefill engine's handles had expired when this one was given away, if
        that time is bounded.
        """
        self.was_asked = False
        """Whether a decode engine was sent the handle: it may have read the KV."""
        self._over: list[Callable[[], None]] = []
        self._unread = False
        self.promised = promised
        """Whether the prefill engine has still to answer. What must be done with its KV waits for
        that.
        """
        self._end_later: End | None = None
        self._decode_waits = self.loses_closed = False
        self.freed = 0
        """How many ranks of the prefill engine have reported that they no longer hold it."""

    def __repr__(self) -> str:
        return (
            f"<Custody {self.handle.remote_request_id} {self.state and self.state.value} of "
            f"{self.prefill}>"
        )

    def when_over(self, then: Callable[[], None]) -> None:
        """Call `then` once this has ended; at once if it has."""
        if self.state is None:
            then()
        else:
            self._over.append(then)

    def is_for(self, decode: str) -> None:
        """Note which decode engine is connected to: if it takes no connection, others should
        release the KV.
        """
        self.decode = decode

    def spend(self, run: int) -> Handle:
        """Give the handle to the decode leg whose request is written in this step, once. From now
        on its engine may read the KV.

        `run`: the number of the engine's run.

        Raises:
            KvGoneError: the KV is gone, is being released, or its lease has ended: a decode engine
                would read another prompt's.
            RuntimeError: the handle was given away before, which is a defect of pdproxy.
        """
        if self.was_asked:
            raise RuntimeError(f"{self!r} was given away before")
        handle = self.handle
        if (
            not isinstance(handle, Handle)
            or self.how is not None
            or self.state is CustodyState.RELEASING
        ):
            raise KvGoneError(f"the KV at {self.prefill} is gone")
        lease, expired = self._custodian.leases_of(self.prefill)
        until = self._held_since + USABLE * lease
        if self.state is CustodyState.HELD and self._custodian.now() >= until:
            self.end(End.EXPIRED)
            raise KvGoneError(f"the lease of the KV at {self.prefill} ends")
        self.decode_run, self.was_asked = run, True
        self._decode_waits = self._custodian.decode_waits
        if expired is not None and not self._decode_waits:
            self.sure_until, self.expired_before = until, expired
        self.loses_closed = self._custodian.loses_closed(handle)
        if self.state is not None and not self.promised:
            self.state = CustodyState.ASKED
        return handle

    @property
    def decode_waits(self) -> bool:
        """Whether a decode engine may wait for KV that was promised."""
        return self._decode_waits and self.promised and self.state is not None

    @property
    def awaits_push(self) -> bool:
        """Whether a decode leg is under way whose engine may wait for KV: the engine has sent no
        data.
        """
        return self._decode_waits and self.state is not None and self.on_gone is not None

    def push_lost(self) -> None:
        """Record that the prefill engine was lost before its push: end the decode leg, which would
        wait for it.
        """
        self.source_lost(f"{self.prefill} was lost before it had pushed the KV")

    def source_lost(self, why: str) -> None:
        """End the decode leg, which would wait for the KV of a prefill engine that does not go
        on.
        """
        gone, self.on_gone = self.on_gone, None
        if gone is not None:
            gone(why, True)

    @property
    def made_tokens(self) -> int:
        """The prompt's tokens as the prefill engine has reported them, 0 if it has made no KV."""
        return 0 if self.promised or self.how is End.NOT_MADE else self.handle.prompt_tokens

    @property
    def ends_later(self) -> bool:
        """Whether its end is decided, and waits for the prefill engine's answer."""
        return self._end_later is not None

    def decode_answered(self) -> None:
        """Record that the decode engine does not wait for the KV: it has answered, or was never
        reached.
        """
        self._decode_waits = False

    def decode_was_late(self, *, accepted: bool) -> None:
        """End the handle behind a decode engine that has sent no data in time. `accepted`: it has
        sent headers.

        If it waits for a push, that may have been lost with the prefill engine. Otherwise it may be
        loading: then closing the leg makes it free both sides.
        """
        if self._decode_waits and not self.promised:
            self.end(End.STUCK)
        elif accepted or self._decode_waits:
            self.end(End.ABORTED)

    def made(self, handle: Handle) -> None:
        """Take the handle of KV that was promised: the prefill engine has answered. Do what had to
        wait for it.
        """
        if not self.promised:
            return
        self.promised = False
        self._held_since = self._custodian.now()
        handle = self._custodian.placed(handle, self.prefill)
        if self.state is None:
            self.handle = handle if self.how is None else handle.counts()
            return
        self.handle = handle
        if self.state is CustodyState.RELEASING:
            self._custodian.release(self, self._releasing(handle))
            return
        self.state = CustodyState.ASKED if self.was_asked else CustodyState.HELD
        later, self._end_later = self._end_later, None
        if later is not None:
            self.end(later)

    def not_made(self, why: str) -> None:
        """Record that KV that was promised will not come."""
        if self.promised:
            self.promised, self._end_later = False, None
            waits = self._decode_waits and self.state is not None
            if waits:
                logger.warning(
                    "%s may wait for KV that will not come from %s: %s",
                    self.decode,
                    self.prefill,
                    why,
                )
            self.end(End.STUCK if waits else End.NOT_MADE)

    def end(self, how: End, *, in_silence: bool = False) -> None:
        """End the handle. If the decode engine is expected to release it, but may not do so,
        release it here.

        `in_silence`: the decode engine sends nothing before its whole answer. It has then probably
        read what was pushed, and a second read could take another prompt's KV.
        """
        if self.state is None and self.how is None:
            self.how = how  # no KV is held for the proxy, so none has to be released
        if self.state is None or (self.state is CustodyState.RELEASING and how in _BY_DECODE):
            return
        if self.promised and how in _BY_DECODE:
            self._end_later = how
            return
        if self._unread and how is End.LOADED:
            return  # the decode engine has computed it: the KV is being released
        if how in _BY_DECODE and not self._custodian.decode_releases(
            self.prefill_run, self.decode_run, in_silence=in_silence
        ):
            self.release()
            return
        self.state, self.how, self.on_gone = None, how, None
        for then in self._over:
            then()
        self._over.clear()
        if self.expected is not None:
            self.expected.close()
        self._custodian.ended(self, how)
        if isinstance(self.handle, Handle):
            self.handle = self.handle.counts()

    async def released(self, timeout: float) -> bool:
        """Release the handle, and wait until that has ended, `timeout` seconds at most. Return
        whether it was released.
        """
        over = asyncio.Event()
        self.when_over(over.set)
        self.release()
        with suppress(TimeoutError), self._custodian.clock.within(timeout):
            await over.wait()
        return self.how is End.RELEASED

    @property
    def was_unread(self) -> bool:
        """Whether the decode engine has reported that it could not read the KV."""
        return self._unread

    def not_read(self) -> None:
        """Release KV that the decode engine could not read. That engine may compute the KV, and
        report nothing to the holder.
        """
        if self.state is not None:
            self._unread = True
            self.release()

    def release(self) -> None:
        """Release the handle in the background; KV that was promised, once the prefill engine has
        answered.
        """
        if (
            self._end_later is None
            and self.state is not None
            and self.state is not CustodyState.RELEASING
        ):
            self.state = CustodyState.RELEASING
            if not self.promised and isinstance(self.handle, Handle):
                self._custodian.release(self, self._releasing(self.handle))

    def _releasing(self, handle: Handle) -> OngoingRelease:
        return OngoingRelease(
            handle,
            self.prefill,
            self.prefill_run,
            self.decode,
            self.model,
            self.authorization,
            self.expected,
            self.was_asked,
        )
