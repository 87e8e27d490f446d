"""Prefill legs whose client has left: their answers are still awaited for a time, because only an
answer names the KV.

Owns these legs. Where engines send notices, it also remembers legs whose wait has ended: a notice
with the handle may come in place of an answer, or long after that wait.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

import msgspec

from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import EngineError, Wait
from pdproxy.kit.frames import drop_traceback
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.events import DeadlinePassed, KvNoticed, Observers
from pdproxy.scheduling.leases import Space
from pdproxy.serving.kv.ready import ExpectedNotices
from pdproxy.transfer.contract import Contract, Handle
from pdproxy.upstream.client import Pending
from pdproxy.wire.notices import Notice

MAX_REMEMBERED = 1024
"""Legs for which a notice may still come."""
REMEMBERED = 60.0
"""Seconds for which a leg is remembered whose answer nobody awaits any more: the engine has
finished by then, or given it up. Meanwhile its engine stays known, also if it is removed.
"""
MAX_REMEMBERED_BYTES = 4 << 20
"""Bytes of client headers that are remembered with them: a header with a key may be as long as a
request's head.
"""


class Promised(Protocol):
    """KV that a prefill engine was asked for, and a decode engine at the same time."""

    def made(self, handle: Handle) -> None:
        """The prefill engine has answered."""

    def not_made(self, why: str) -> None:
        """There will be no KV. `why`: for a log line."""

    def release(self) -> None:
        """Release it, unless its end is decided."""


class PrefillRecord(msgspec.Struct, frozen=True, eq=False):
    """What custody needs to know of a prefill leg: the engine, and how to ask engines in its
    client's name.

    `read` finds the handle in an answer's body, or says why there is none. `receiver` is the decode
    engine that KV is pushed to, None if it is not pushed. `id` is the leg's own id, `run` the
    number of the engine's run when it was asked, None if that is not known. `expected` and `space`
    are the wait for its notices and its space in the receiver's buffer, if the custodian must end
    them. `promised` is the custody of its KV, if that has begun before the answer.
    """

    prefill: str
    model: str | None
    authorization: tuple[tuple[bytes, bytes], ...]
    read: Callable[[bytes], Handle | str | None]
    receiver: str | None = None
    id: str | None = None
    run: int | None = None
    expected: ExpectedNotices | None = None
    space: Space | None = None
    promised: Promised | None = None

    def nothing_kept(self, why: str) -> None:
        """End the wait and release the space: the leg left no KV. `why`: for a log line."""
        if self.expected is not None:
            self.expected.close()
        if self.space is not None:
            self.space.release()
        if self.promised is not None:
            self.promised.not_made(why)


class _Orphan:
    """What is remembered of a leg: everything except its request, which may be long. `taken`: its
    KV is already in custody.

    `until`: the clock's time at which a notice can't come any more.
    """

    __slots__ = ("leg", "size", "taken", "until")

    def __init__(self, leg: PrefillRecord, until: float = math.inf) -> None:
        self.until = until
        self.leg = msgspec.structs.replace(
            leg, read=_unread, expected=None, space=None, promised=None
        )
        self.size = sum(len(name) + len(value) for name, value in leg.authorization) + len(
            leg.model or ""
        )
        self.taken = False


class Orphans:
    """All such legs of one pool.

    `timeout` returns the seconds that an answer is awaited. None: engines hold no KV for the proxy,
    so legs are closed at once. `release` takes custody of a handle and releases it at once.
    """

    def __init__(
        self,
        contract: Contract,
        timeout: Callable[[], float] | None,
        observers: Observers,
        tasks: TaskOwner,
        clock: Clock,
        release: Callable[[Handle, PrefillRecord], None],
    ) -> None:
        self._handle_from_notice = contract.handle_from_notice
        self._early = contract.early
        self._timeout = timeout
        self._observers = observers
        self._tasks = tasks
        self._clock = clock
        self._release = release
        self._remembered: OrderedDict[str, _Orphan] = OrderedDict()
        self._remembered_bytes = 0
        self.count = 0

    def __repr__(self) -> str:
        return f"<Orphans {self.count} awaited, {len(self._remembered)} remembered>"

    def named(self) -> list[tuple[str, str | None]]:
        """Return prefill engine and receiver of the legs that a notice may still come for."""
        now = self._clock.now()
        for name in [name for name, orphan in self._remembered.items() if orphan.until <= now]:
            self._forgotten(name)
        return [(orphan.leg.prefill, orphan.leg.receiver) for orphan in self._remembered.values()]

    def adopt(self, pending: Pending, leg: PrefillRecord, done: Callable[[], None]) -> None:
        """Adopt a prefill leg whose client has left: await its answer for a time, and release the
        KV that it names.

        Closing the leg instead would lose the handle if the engine was just finishing. `done` is
        called when the leg has ended.
        """
        timeout = None if self._timeout is None else self._timeout()
        if timeout is None:
            leg.nothing_kept("nothing is held")
            pending.close()
            done()
            return
        orphan = self._remember(leg, math.inf)
        self.count += 1
        self._tasks.spawn(self._adopted(pending, leg, orphan, timeout, done), "adopted prefill")

    def remember(self, leg: PrefillRecord) -> None:
        """Remember a leg whose connection was lost, for a while: a notice that names its KV has
        that KV released.
        """
        self._remember(leg, self._clock.now() + REMEMBERED)

    def _remember(self, leg: PrefillRecord, until: float) -> _Orphan:
        orphan = _Orphan(leg, until)
        if leg.id is not None and self._handle_from_notice is not None:
            self._remembered[leg.id] = orphan
            self._remembered_bytes += orphan.size
            while (
                len(self._remembered) > MAX_REMEMBERED
                or self._remembered_bytes > MAX_REMEMBERED_BYTES
            ):
                self._forgotten(next(iter(self._remembered)))
            if leg.expected is not None and leg.expected.notice is not None:
                self._take(leg.expected.notice)  # it came just before
        return orphan

    def outlive(self, pending: Pending, timeout: float, done: Callable[[], None]) -> None:
        """Await a prefill's answer that is no longer needed, for `timeout` seconds, so that the
        engine can finish it.

        `done` is called when the leg has ended.
        """
        self._tasks.spawn(self._outlived(pending, timeout, done), "answer behind its notice")

    def receive(self, notice: Notice) -> bool:
        """Process a notice that a prefill engine holds KV. Return whether that is all: no request
        waits for it.

        It may name KV of a leg whose wait for the answer has ended. Without the notice that KV
        would be lost.
        """
        known = self._take(notice)
        if self._handle_from_notice is None or (not known and self._early):
            return False
        self._observers.notify(KvNoticed(notice.event.value, "given_up" if known else "known"))
        return True

    def _take(self, notice: Notice) -> bool:
        orphan = self._forgotten(notice.request_id)
        handle_from = self._handle_from_notice
        if (
            orphan is not None
            and handle_from is not None
            and (handle := handle_from(notice)) is not None
        ):
            orphan.taken = True
            self._release(handle, orphan.leg)
        return orphan is not None

    def forget(self, leg_id: str) -> None:
        """Forget a leg: its engine has reported that there will be no KV."""
        self._forgotten(leg_id)

    def _forgotten(self, leg_id: str) -> _Orphan | None:
        orphan = self._remembered.pop(leg_id, None)
        self._remembered_bytes -= orphan.size if orphan is not None else 0
        return orphan

    async def _outlived(self, pending: Pending, timeout: float, done: Callable[[], None]) -> None:
        try:
            with self._clock.within(timeout):
                await pending.answered()
        except TimeoutError:
            return
        except EngineError as error:
            drop_traceback(error)  # its frames refer to `pending`, which refers to it
            return
        finally:
            pending.close()
            done()

    async def _adopted(
        self,
        pending: Pending,
        leg: PrefillRecord,
        orphan: _Orphan,
        timeout: float,
        done: Callable[[], None],
    ) -> None:
        try:
            with self._clock.within(timeout):
                answer = await pending.answered()
        except TimeoutError:
            self._observers.notify(DeadlinePassed(Wait.ABANDONED_PREFILL.value, leg.prefill))
            leg.nothing_kept(f"it has not answered in {timeout:g} s")
            orphan.until = self._clock.now() + REMEMBERED  # its engine may still work on it
            return
        except EngineError as error:
            self.forget(leg.id or "")
            leg.nothing_kept(error.message)
            drop_traceback(error)
            return
        finally:
            self.count -= 1
            pending.close()
            done()
        self.forget(leg.id or "")
        handle = leg.read(answer.body) if answer.status == 200 and not orphan.taken else None
        if isinstance(handle, Handle):
            self._release(handle, leg)
        else:
            leg.nothing_kept(handle or f"it answered {answer.status}")


def _unread(_: bytes) -> Handle | str | None:
    return "the request is not kept"
