"""Prefill legs that nobody waits for any more: each is awaited for a grace, since its answer is the only way to its KV.

Owns these legs, and what is remembered of them where engines tell of their KV: a notice may come in an answer's place, or long
after the leg was given up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import EngineError, Wait
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.events import DeadlinePassed, KvNoticed, Observers
from pdproxy.serving.kv.buffers import BufferSpace
from pdproxy.serving.kv.ready import Expected
from pdproxy.settings.limits import Deadlines
from pdproxy.transfer.contract import Contract, Handle
from pdproxy.upstream.client import Pending
from pdproxy.wire.engine import PrefillAnswer, prefill_answer
from pdproxy.wire.notices import Notice

REMEMBERED = 1024
"""Legs of which a notice may still tell."""
REMEMBERED_BYTES = 4 << 20
"""Bytes of what their clients sent: a header with a key may be as long as heads are."""


@dataclass(frozen=True, slots=True)
class PrefillLeg:
    """What custody needs to know of a prefill leg: the engine, and how to ask engines in its client's name.

    `read` finds the handle in the answer. `receiver` is the decode engine that KV is pushed to, `id` the leg's own id. `expected`
    and `slots` are the wait for its notices and its room in the receiver's buffer, where custody is to end them.
    """

    prefill: str
    model: str | None
    authorization: tuple[tuple[bytes, bytes], ...]
    read: Callable[[PrefillAnswer], Handle | str]
    receiver: str | None = None
    id: str | None = None
    expected: Expected | None = None
    slots: BufferSpace | None = None

    def nothing_kept(self) -> None:
        """No custody comes of it: end what it was handed."""
        if self.expected is not None:
            self.expected.close()
        if self.slots is not None:
            self.slots.give_back()


class _Orphan:
    """A leg as it is remembered: without its request, which may be long. `taken`: its KV is in custody already."""

    __slots__ = ("leg", "size", "taken")

    def __init__(self, leg: PrefillLeg) -> None:
        self.leg = replace(leg, read=_unread, expected=None, slots=None)
        self.size = sum(len(name) + len(value) for name, value in leg.authorization) + len(leg.model or "")
        self.taken = False


class Orphans:
    """All such legs of one pool. `give_back` takes custody of a handle and gives it back at once."""

    def __init__(
        self,
        contract: Contract,
        deadlines: Deadlines,
        observers: Observers,
        tasks: TaskOwner,
        clock: Clock,
        give_back: Callable[[Handle, PrefillLeg], None],
    ) -> None:
        self._contract = contract
        self._deadlines = deadlines
        self._observers = observers
        self._tasks = tasks
        self._clock = clock
        self._give_back = give_back
        self._remembered: OrderedDict[str, _Orphan] = OrderedDict()
        self._remembered_bytes = 0
        self.count = 0

    def __repr__(self) -> str:
        return f"<Orphans {self.count} awaited, {len(self._remembered)} remembered>"

    def adopt(self, pending: Pending, leg: PrefillLeg, done: Callable[[], None]) -> None:
        """Take over a prefill leg that nobody waits for any more: await its answer for a grace, give back what it holds.

        Closing the leg instead would lose the handle if the engine was just finishing. `done` is called when the leg is over.
        """
        if not self._contract.holds:
            leg.nothing_kept()
            pending.close()
            done()
            return
        orphan = _Orphan(leg)
        if leg.id is not None and self._contract.handle_from_notice is not None:
            self._remembered[leg.id] = orphan
            self._remembered_bytes += orphan.size
            while len(self._remembered) > REMEMBERED or self._remembered_bytes > REMEMBERED_BYTES:
                self._forgotten(next(iter(self._remembered)))
            if leg.expected is not None and leg.expected.notice is not None:
                self._take(leg.expected.notice)  # it came just before
        self.count += 1
        self._tasks.spawn(self._adopted(pending, leg, orphan, done), "adopted prefill")

    def outlive(self, pending: Pending, timeout: float, done: Callable[[], None]) -> None:
        """Await a prefill's answer that tells nothing new any more, for `timeout` seconds, so that its engine is left in peace.

        `done` is called when the leg is over.
        """
        self._tasks.spawn(self._outlived(pending, timeout, done), "answer behind its notice")

    def heard(self, notice: Notice) -> bool:
        """Take a prefill engine's word that it holds KV. Return whether that was for us alone: nobody waits for this notice.

        KV of a leg that was given up before its answer came would be lost without it: its handle is in the answer alone.
        """
        known = self._take(notice)
        if self._contract.handle_from_notice is None or (not known and self._contract.early):
            return False
        self._observers.notify(KvNoticed(notice.event.value, "given_up" if known else "known"))
        return True

    def _take(self, notice: Notice) -> bool:
        orphan = self._forgotten(notice.request_id)
        told = self._contract.handle_from_notice
        if orphan is not None and told is not None and (handle := told(notice)) is not None:
            orphan.taken = True
            self._give_back(handle, orphan.leg)
        return orphan is not None

    def forget(self, leg_id: str) -> None:
        """There will be no KV: the engine has told so."""
        self._forgotten(leg_id)

    def _forgotten(self, leg_id: str) -> _Orphan | None:
        orphan = self._remembered.pop(leg_id, None)
        self._remembered_bytes -= orphan.size if orphan is not None else 0
        return orphan

    async def _outlived(self, pending: Pending, timeout: float, done: Callable[[], None]) -> None:
        try:
            async with self._clock.within(timeout):
                await pending.answered()
        except (TimeoutError, EngineError):
            return
        finally:
            pending.close()
            done()

    async def _adopted(self, pending: Pending, leg: PrefillLeg, orphan: _Orphan, done: Callable[[], None]) -> None:
        deadlines = self._deadlines
        try:
            async with self._clock.within(
                deadlines.total if self._contract.ends_whole else deadlines.abandoned_prefill
            ):
                answer = await pending.answered()
        except TimeoutError:
            self._observers.notify(DeadlinePassed(Wait.ABANDONED_PREFILL.value, leg.prefill))
            leg.nothing_kept()
            return  # remembered: its engine may be at work for long
        except EngineError:
            self.forget(leg.id or "")
            leg.nothing_kept()
            return
        finally:
            self.count -= 1
            pending.close()
            done()
        self.forget(leg.id or "")
        read = prefill_answer(answer.body) if answer.status == 200 and not orphan.taken else None
        handle = leg.read(read) if read is not None else None
        if isinstance(handle, Handle):
            self._give_back(handle, leg)
        else:
            leg.nothing_kept()


def _unread(_: PrefillAnswer) -> Handle | str:
    return "the request is not kept"
