"""Custody of KV: every handle that a prefill engine gave us ends loaded or given back, never forgotten.

Owns all live handles and the background work of ending them: giving back (`max_tokens: 0` to a decode engine), and waiting
for a prefill's answer after its client has left. That work outlives the request; shutdown waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from pdproxy.kit.errors import EngineError, EngineTimeoutError, EngineUnreachableError, OverloadedError, Wait
from pdproxy.kit.ids import mint
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.events import DeadlinePassed, HandleEnded, KvNoticed, KvTransferred, Observers
from pdproxy.scheduling.ledger import Ledger
from pdproxy.serving.ready import Expected
from pdproxy.serving.slots import Slots
from pdproxy.settings.schema import Deadlines
from pdproxy.transfer.contract import Contract, Handle
from pdproxy.upstream.client import Answer, EngineClient, Pending
from pdproxy.wire.engine import PrefillAnswer, prefill_answer
from pdproxy.wire.notices import Event as NoticeEvent
from pdproxy.wire.notices import Notice

logger = logging.getLogger("pdproxy.kv")

RELEASE_PATH = "/v1/completions"
_RELEASE_TRIES = 3
FIRST_CONTACT = 1.0
"""Seconds. A decode engine that has never pulled from a prefill engine begins a handshake when it is to free KV there, and
tells it only in a later step of its own; an idle one has none. So it is told again, once the handshake must be over."""


GIVEN_UP = 1024
"""Prefill legs that were given up and are remembered, in case their engine tells of KV after all."""


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
    slots: Slots | None = None

    def nothing_kept(self) -> None:
        """No custody comes of it: end what it was handed."""
        if self.expected is not None:
            self.expected.close()
        if self.slots is not None:
            self.slots.give_back()


class State(Enum):
    """Where a live handle is."""

    HELD = "held"  # the prefill engine keeps the KV, nobody has been told
    ASKED = "asked"  # a decode engine was told, and has shown nothing yet
    RELEASING = "releasing"  # being given back


class End(Enum):
    """How a handle ended."""

    LOADED = "loaded"  # the decode engine produced data from it
    RELEASED = "released"  # we gave it back
    REFUSED = "refused"  # the decode engine refused the request and gave it back
    ABORTED = "aborted"  # the decode engine owned it when its request was closed: it frees it
    LOST = "lost"  # nobody could be told: the prefill engine's lease frees it
    EXPIRED = "expired"  # the prefill engine told that its lease is over


_BY_DECODE = frozenset({End.REFUSED, End.ABORTED})


class Custody:
    """One live handle. Ended once; ending again changes nothing. The engine's words are kept until then, the counts for good.

    Where nothing is kept for us it only carries the handle: it is in no state, and giving it back does nothing.
    """

    __slots__ = (
        "_custodian",
        "_over",
        "authorization",
        "decode",
        "expected",
        "freed",
        "handle",
        "how",
        "model",
        "on_expired",
        "prefill",
        "since",
        "state",
    )

    def __init__(self, custodian: Custodian, handle: Handle, leg: PrefillLeg) -> None:
        self._custodian = custodian
        self.handle = handle
        self.prefill = leg.prefill
        self.decode = leg.receiver
        self.expected = leg.expected
        """The wait for notices of its push. It ends with the custody: what is still being pushed can't be given back."""
        self.model = leg.model
        self.authorization = leg.authorization
        self.state: State | None = State.HELD if custodian.holds else None
        self.how: End | None = None
        self.since = custodian.now()
        self.on_expired: Callable[[], None] | None = None
        """What is to be done if the lease ends while a decode engine may still read: it would read another prompt's KV."""
        self._over: list[Callable[[], None]] = []
        self.freed = 0
        """Ranks of the prefill engine that told that they hold it no longer."""

    def __repr__(self) -> str:
        return f"<Custody {self.handle.remote_request_id} {self.state and self.state.value} of {self.prefill}>"

    def when_over(self, then: Callable[[], None]) -> None:
        """Have `then` called once this is over; at once if it is."""
        if self.state is None:
            then()
        else:
            self._over.append(then)

    def asked(self, decode: str) -> None:
        """The handle went out to a decode engine."""
        self.decode = decode
        if self.state is not None:
            self.state = State.ASKED

    def end(self, how: End) -> None:
        """The handle is over, unless the decode engine is to give it back and can't be relied on: then we do, too."""
        if self.state is None and self.how is None:
            self.how = how  # nothing is kept for us, so nothing is to be given back
        if self.state is None or (self.state is State.RELEASING and how in _BY_DECODE):
            return
        if how in _BY_DECODE and not self._custodian.relies_on(self.prefill, self.decode):
            self.release()
            return
        self.state, self.how, self.on_expired = None, how, None
        for then in self._over:
            then()
        self._over.clear()
        if self.expected is not None:
            self.expected.close()
        self._custodian.ended(self, how)
        self.handle = Handle(b"", None, self.handle.prompt_tokens, self.handle.remote_request_id)

    async def given_back(self) -> None:
        """Give the handle back, and wait until that is over."""
        over = asyncio.Event()
        self.when_over(over.set)
        self.release()
        await over.wait()

    def release(self) -> None:
        """Give the handle back in the background."""
        if self.state is not None and self.state is not State.RELEASING:
            self.state = State.RELEASING
            self._custodian.give_back(self)


class Custodian:
    """All live handles of one pool."""

    def __init__(
        self,
        contract: Contract,
        ledger: Ledger,
        clients: dict[str, EngineClient],
        deadlines: Deadlines,
        observers: Observers,
        now: Callable[[], float],
    ) -> None:
        self._contract = contract
        self._ledger = ledger
        self._clients = clients
        self._deadlines = deadlines
        self._observers = observers
        self.now = now
        self._live: set[Custody] = set()
        self._named: dict[str, Custody] = {}  # the same by their engines' words, where engines tell of them
        self._given_up: OrderedDict[str, PrefillLeg] = OrderedDict()
        self._tasks = TaskOwner("custody")
        self._orphans = 0
        self._met: set[tuple[tuple[str, float], tuple[str, float]]] = set()

    @property
    def holds(self) -> bool:
        """Whether prefill engines keep KV for us at all."""
        return self._contract.holds

    def __repr__(self) -> str:
        return f"<Custodian {len(self._live)} live handles, {self._orphans} prefills that nobody waits for>"

    def snapshot(self) -> dict[str, tuple[int, float]]:
        """Return for each state how many handles are in it and the age of the oldest in seconds."""
        now = self.now()
        found = {state.value: (0, 0.0) for state in State}
        for custody in self._live:
            if custody.state is not None:
                count, oldest = found[custody.state.value]
                found[custody.state.value] = (count + 1, max(oldest, now - custody.since))
        return found

    def take(self, handle: Handle, leg: PrefillLeg) -> Custody:
        """Become responsible for a handle."""
        custody = Custody(self, handle, leg)
        if custody.state is not None:
            self._live.add(custody)
            if self._contract.told is not None:
                self._named[handle.remote_request_id] = custody
        return custody

    def relies_on(self, prefill: str, decode: str | None) -> bool:
        """Tell whether a decode engine that refuses or is aborted gives a handle back."""
        return self._contract.pushes or self.met(prefill, decode)

    def met(self, prefill: str, decode: str | None) -> bool:
        """Tell whether KV has moved between two engines since both of them started."""
        return decode is not None and (self._ledger.life(prefill), self._ledger.life(decode)) in self._met

    def ended(self, custody: Custody, how: End) -> None:
        """Forget a handle that is over. Called by `Custody.end` alone."""
        if how is End.LOADED and custody.decode is not None and not self.met(custody.prefill, custody.decode):
            self._met.add((self._ledger.life(custody.prefill), self._ledger.life(custody.decode)))
        self._live.discard(custody)
        self._named.pop(custody.handle.remote_request_id, None)
        self._observers.notify(HandleEnded(how.value, custody.prefill, self.now() - custody.since))

    def give_back(self, custody: Custody) -> None:
        """Start giving a handle back. Called by `Custody.release` alone."""
        self._tasks.spawn(self._give_back(custody), custody.handle.remote_request_id)

    def adopt(self, pending: Pending, leg: PrefillLeg, done: Callable[[], None]) -> None:
        """Take over a prefill leg that nobody waits for any more: await its answer for a grace, give back what it holds.

        Closing the leg instead would lose the handle if the engine was just finishing. `done` is called when the leg is over.
        """
        if not self.holds:
            leg.nothing_kept()
            pending.close()
            done()
            return
        self._orphans += 1
        self._tasks.spawn(self._adopted(pending, leg, done), "adopted prefill")

    def outlive(self, pending: Pending, timeout: float, done: Callable[[], None]) -> None:
        """Await a prefill's answer that tells nothing new any more, for `timeout` seconds, so that its engine is left in peace.

        `done` is called when the leg is over.
        """
        self._tasks.spawn(self._outlived(pending, timeout, done), "answer behind its notice")

    async def _outlived(self, pending: Pending, timeout: float, done: Callable[[], None]) -> None:
        try:
            async with asyncio.timeout(timeout):
                await pending.answered()
        except (TimeoutError, EngineError):
            return
        finally:
            pending.close()
            done()

    async def settle(self, timeout: float) -> int:
        """Wait up to `timeout` seconds for the background work; return how much was given up."""
        return await self._tasks.settle(timeout)

    def heard_ready(self, notice: Notice) -> bool:
        """Take a prefill engine's word that it holds KV. Return whether that was for us alone: nobody waits for this notice.

        KV of a leg that was given up before its answer came would be lost without it: its handle is in the answer alone.
        """
        told = self._contract.told
        leg = self._given_up.pop(notice.request_id, None)
        if told is None or (leg is None and self._contract.early):
            return False
        if leg is not None and (handle := told(notice)) is not None:
            self.take(handle, leg).release()
        self._observers.notify(KvNoticed(notice.event.value, "known" if leg is None else "given_up"))
        return True

    def heard(self, notice: Notice) -> None:
        """Take an engine's word for what became of a handle."""
        custody = self._named.get(notice.remote_request_id or "")
        self._observers.notify(KvNoticed(notice.event.value, "known" if custody is not None else "over"))
        match notice.event:
            case NoticeEvent.LOADED:
                self._observers.notify(KvTransferred(notice.seconds, notice.moved_bytes))
                if custody is not None:
                    custody.end(End.LOADED)
            case NoticeEvent.RELEASED if custody is not None and notice.role != "D":
                custody.freed += 1
                if custody.freed >= (notice.world or 1):
                    # Without a give-back of ours it is the decode engine that has read all of it.
                    custody.end(End.LOADED if custody.state is State.ASKED else End.RELEASED)
            case NoticeEvent.EXPIRED if custody is not None:
                expired, custody.on_expired = custody.on_expired, None
                asked = custody.state is State.ASKED
                custody.end(End.EXPIRED)
                logger.warning("the lease on %s at %s is over", notice.remote_request_id, custody.prefill)
                if asked and expired is not None:
                    expired()

    async def _adopted(self, pending: Pending, leg: PrefillLeg, done: Callable[[], None]) -> None:
        deadlines = self._deadlines
        try:
            async with asyncio.timeout(deadlines.total if self._contract.ends_whole else deadlines.abandoned_prefill):
                answer = await pending.answered()
        except TimeoutError:
            self._observers.notify(DeadlinePassed(Wait.ABANDONED_PREFILL.value, leg.prefill))
            leg.nothing_kept()
            if leg.id is not None and self._contract.told is not None:
                self._given_up[leg.id] = leg
                if len(self._given_up) > GIVEN_UP:
                    self._given_up.popitem(last=False)
            return
        except EngineError:
            leg.nothing_kept()
            return
        finally:
            self._orphans -= 1
            pending.close()
            done()
        read = prefill_answer(answer.body) if answer.status == 200 else None
        handle = leg.read(read) if read is not None else None
        if not isinstance(handle, Handle):
            leg.nothing_kept()
            return
        custody = self.take(handle, leg)
        if leg.slots is not None:
            custody.when_over(leg.slots.give_back)
        custody.release()

    async def _give_back(self, custody: Custody) -> None:
        body = self._contract.release_body(custody.model, custody.handle)
        how = End.LOST
        if body is not None:
            try:
                if custody.expected is not None and self._contract.pushes:
                    await self._pushed(custody.expected, custody.prefill)
                for attempt in range(_RELEASE_TRIES):
                    url = self._releaser(custody)
                    if url is not None and await self._told(custody, url, body):
                        how = End.RELEASED
                        if not self.relies_on(custody.prefill, url):
                            await asyncio.sleep(FIRST_CONTACT)
                            await self._told(custody, url, body)
                        break
                    if attempt + 1 < _RELEASE_TRIES:
                        await asyncio.sleep(self._deadlines.release / _RELEASE_TRIES)
            finally:
                custody.end(how)
        if how is End.LOST:
            logger.warning(
                "KV of %s on %s could not be given back: its lease frees it",
                custody.handle.remote_request_id,
                custody.prefill,
            )

    async def _pushed(self, expected: Expected, prefill: str) -> None:
        """Wait until all is pushed: what comes later would stay."""
        try:
            async with asyncio.timeout(self._deadlines.kv_ready):
                await asyncio.shield(expected.done)
        except TimeoutError:
            self._observers.notify(DeadlinePassed(Wait.KV_READY.value, prefill))

    def _releaser(self, custody: Custody) -> str | None:
        if self._contract.pushes:
            return custody.decode
        node = self._ledger.releaser(custody.prefill, custody.model, self.now(), prefer_not=custody.decode)
        return None if node is None else node.url

    async def _told(self, custody: Custody, decode: str, body: bytes) -> bool:
        client = self._clients[decode]
        headers = ((b"x-request-id", b"release-" + mint().encode()), *custody.authorization)
        try:
            # A push is given back by reading it, which may mean computing it.
            timeout = self._deadlines.first_token if self._contract.pushes else self._deadlines.release
            answer: Answer = await client.whole(client.request(RELEASE_PATH, headers, body), timeout, Wait.RELEASE)
        except (EngineError, OverloadedError) as error:
            if isinstance(error, EngineTimeoutError | EngineUnreachableError) and error.wait is not None:
                self._observers.notify(DeadlinePassed(error.wait.value, decode))
            return False
        # Only the handler's own refusal frees the blocks; 401 and 404 come from before it.
        return answer.status == self._contract.releases
