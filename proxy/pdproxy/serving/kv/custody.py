"""Custody of KV: every handle that a prefill engine gave us ends loaded or given back, never forgotten.

Owns all live handles and the background work of ending them: giving back (`max_tokens: 0` to a decode engine), and what
`serving.kv.orphans` does for prefills whose client has left. That work outlives the request; shutdown waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum

from pdproxy.fleet.engine import Engine
from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import EngineError, EngineTimeoutError, EngineUnreachableError, OverloadedError, Wait
from pdproxy.kit.ids import mint
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.events import DeadlinePassed, HandleEnded, KvNoticed, KvTransferred, Observers
from pdproxy.scheduling.ledger import Ledger
from pdproxy.serving.kv.orphans import Orphans, PrefillLeg
from pdproxy.settings.limits import Deadlines
from pdproxy.transfer.contract import Contract, Handle
from pdproxy.upstream.client import Answer
from pdproxy.wire.notices import Event as NoticeEvent
from pdproxy.wire.notices import Notice

logger = logging.getLogger("pdproxy.kv")

RELEASE_PATH = "/v1/completions"
_RELEASE_TRIES = 3
FIRST_CONTACT = 1.0
"""Seconds. A decode engine that has never pulled from a prefill engine begins a handshake when it is to free KV there, and
tells it only in a later step of its own; an idle one has none. So it is told again, once the handshake must be over."""


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
        "_unread",
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
        self._unread = False
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

    def end(self, how: End, *, in_silence: bool = False) -> None:
        """The handle is over, unless the decode engine is to give it back and can't be relied on: then we do, too.

        `in_silence`: it shows nothing before its whole answer. Then it has read a push more likely than not, and who reads one
        twice may take another prompt's.
        """
        if self.state is None and self.how is None:
            self.how = how  # nothing is kept for us, so nothing is to be given back
        if self.state is None or (self.state is State.RELEASING and how in _BY_DECODE):
            return
        if self._unread and how is End.LOADED:
            return  # the decode engine has computed it: it is being given back
        if how in _BY_DECODE and not self._custodian.relies_on(self.prefill, self.decode, in_silence=in_silence):
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

    async def given_back(self, timeout: float) -> bool:
        """Give the handle back, and wait until that is over, `timeout` seconds at most. Return whether it was taken back."""
        over = asyncio.Event()
        self.when_over(over.set)
        self.release()
        with suppress(TimeoutError):
            async with self._custodian.clock.within(timeout):
                await over.wait()
        return self.how is End.RELEASED

    def not_read(self) -> None:
        """The decode engine could not read the KV. It may compute it and go on, but the prefill engine was told nothing."""
        if self.state is not None:
            self._unread = True
            self.release()

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
        engines: Mapping[str, Engine],
        deadlines: Deadlines,
        observers: Observers,
        now: Callable[[], float],
        clock: Clock,
    ) -> None:
        self._contract = contract
        self._ledger = ledger
        self._engines = engines
        self._deadlines = deadlines
        self._observers = observers
        self.now = now
        self.clock = clock
        self._live: set[Custody] = set()
        self._named: dict[str, Custody] = {}  # the same by their engines' words, where engines tell of them
        self._tasks = TaskOwner("custody")
        self.orphans = Orphans(contract, deadlines, observers, self._tasks, clock, self._give_back_at_once)
        self._met: set[tuple[tuple[str, int], tuple[str, int]]] = set()

    @property
    def holds(self) -> bool:
        """Whether prefill engines keep KV for us at all."""
        return self._contract.holds

    def __repr__(self) -> str:
        return f"<Custodian {len(self._live)} live handles, {self.orphans!r}>"

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
            if self._contract.handle_from_notice is not None:
                self._named[handle.remote_request_id] = custody
        return custody

    def relies_on(self, prefill: str, decode: str | None, *, in_silence: bool) -> bool:
        """Tell whether a decode engine that refuses or is aborted gives a handle back."""
        # A push is freed by reading it, and by nothing else: an engine that was aborted before it did keeps it.
        return in_silence if self._contract.pushes else self.met(prefill, decode)

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

    def _give_back_at_once(self, handle: Handle, leg: PrefillLeg) -> None:
        custody = self.take(handle, leg)
        if leg.slots is not None:
            custody.when_over(leg.slots.give_back)
        custody.release()

    def give_back(self, custody: Custody) -> None:
        """Start giving a handle back. Called by `Custody.release` alone."""
        self._tasks.spawn(self._give_back(custody), custody.handle.remote_request_id)

    async def settle(self, timeout: float) -> int:
        """Wait up to `timeout` seconds for the background work; return how much was given up."""
        return await self._tasks.settle(timeout)

    def heard(self, notice: Notice) -> None:
        """Take an engine's word for what became of a handle."""
        custody = self._named.get(notice.remote_request_id or "")
        self._observers.notify(KvNoticed(notice.event.value, "known" if custody is not None else "over"))
        match notice.event:
            case NoticeEvent.LOADED:
                self._observers.notify(KvTransferred(notice.seconds, notice.moved_bytes))
                if custody is not None:
                    custody.end(End.LOADED)
            case NoticeEvent.FAILED if notice.role == "P":
                self.orphans.forget(notice.request_id)
            case NoticeEvent.FAILED if custody is not None:
                custody.not_read()
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

    async def _give_back(self, custody: Custody) -> None:
        body = self._contract.release_body(custody.model, custody.handle)
        how = End.LOST
        if body is not None:
            try:
                if await self._may_be_read(custody) and await self._tried(custody, body):
                    how = End.RELEASED
            finally:
                custody.end(how)
        if how is End.LOST:
            logger.warning(
                "KV of %s on %s could not be given back: %s",
                custody.handle.remote_request_id,
                custody.decode if self._contract.pushes else custody.prefill,
                "it stays there" if self._contract.pushes else "its lease frees it",
            )

    async def _may_be_read(self, custody: Custody) -> bool:
        """Wait until all of a push is there: what comes later would stay, and what was not written must not be read."""
        if custody.expected is None or not self._contract.pushes:
            return True
        try:
            async with self.clock.within(self._deadlines.kv_ready):
                await asyncio.shield(custody.expected.done)
        except TimeoutError:
            self._observers.notify(DeadlinePassed(Wait.KV_READY.value, custody.prefill))
            return False
        return True

    async def _tried(self, custody: Custody, body: bytes) -> bool:
        """Tell a decode engine, more than once if need be."""
        for attempt in range(_RELEASE_TRIES):
            if attempt:
                await asyncio.sleep(self._deadlines.release / _RELEASE_TRIES)
            url = self._releaser(custody)
            if url is None:
                continue
            told = await self._told(custody, url, body)
            if told and not self._contract.pushes and not self.met(custody.prefill, url):
                await asyncio.sleep(FIRST_CONTACT)
                await self._told(custody, url, body)
            if told:
                return True
            if told is None and self._contract.pushes:
                return False  # a second read of what the first has read after all would take another prompt's
        return False

    def _releaser(self, custody: Custody) -> str | None:
        if self._contract.pushes:
            return custody.decode
        node = self._ledger.releaser(custody.prefill, custody.model, self.now(), prefer_not=custody.decode)
        return None if node is None else node.url

    async def _told(self, custody: Custody, decode: str, body: bytes) -> bool | None:
        """Ask a decode engine to free it. Return whether it did; None if it did not answer in time."""
        if (engine := self._engines.get(decode)) is None:
            return False  # it was removed
        client = engine.client
        headers = ((b"x-request-id", b"release-" + mint().encode()), *custody.authorization)
        try:
            # A push is given back by reading it, when its turn comes: given up before, it would stay where it is.
            timeout = self._deadlines.total if self._contract.pushes else self._deadlines.release
            answer: Answer = await client.whole(client.request(RELEASE_PATH, headers, body), timeout, Wait.RELEASE)
        except (EngineError, OverloadedError) as error:
            if isinstance(error, EngineTimeoutError | EngineUnreachableError) and error.wait is not None:
                self._observers.notify(DeadlinePassed(error.wait.value, decode))
            return None if isinstance(error, EngineTimeoutError) else False
        # Only the handler's own refusal frees the blocks; 401 and 404 come from before it.
        return answer.status == self._contract.releases
