"""Releasing KV that no decode leg will read. The holder of the KV decides how:

- `ReleaseByRefusal`: the prefill engine holds it. Any compatible decode engine refuses a request
  with the handle, and reports to the prefill engine that the KV may be freed. If that fails, a
  lease at the prefill engine frees it.
- `ReleaseByPush`: the prefill engine writes it into blocks of a decode engine. It is released by a
  refusal, too, where the contract has one, and else by its lease.
- `ReleaseByReading`: one decode engine holds it. That engine is made to read or drop it by a
  completion of one token. If that fails, the KV stays in its buffer.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from pdproxy.fleet.contacts import FIRST_CONTACT, Contacts
from pdproxy.fleet.engine import Engine
from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import (
    EngineError,
    EngineTimeoutError,
    EngineUnreachableError,
    OverloadedError,
    Wait,
)
from pdproxy.kit.frames import drop_traceback
from pdproxy.kit.ids import mint
from pdproxy.observe.events import DeadlinePassed, Observers
from pdproxy.scheduling.engine_states import EngineStates
from pdproxy.serving.kv.ready import ExpectedNotices
from pdproxy.settings.limits import Deadlines
from pdproxy.transfer.contract import (
    Handle,
    HeldByDecode,
    HeldByPrefill,
    Holder,
    LegRequest,
    PushedToDecode,
)
from pdproxy.wire.route import Route

_MAX_TRIES = 3


class OngoingRelease(msgspec.Struct, frozen=True, eq=False):
    """A handle that is being released, as it was when that was decided: its custody may end while
    the release goes on.

    `prefill`, `decode`: URLs; `prefill_run`: the number of the prefill engine's run when it was
    asked, None if that is not known. `model`, `authorization`: of the client, for requests in its
    name. `expected`: the wait for the notices of a push. `was_asked`: a decode engine was sent the
    handle, and may have read the KV.
    """

    handle: Handle
    prefill: str
    prefill_run: int | None
    decode: str | None
    model: str | None
    authorization: tuple[tuple[bytes, bytes], ...]
    expected: ExpectedNotices | None
    was_asked: bool


@dataclass(frozen=True, slots=True)
class ReleaseResources:
    """What releasing works with."""

    states: EngineStates
    engines: Mapping[str, Engine]
    deadlines: Deadlines
    observers: Observers
    now: Callable[[], float]
    clock: Clock
    contacts: Contacts


class Release(ABC):
    """One way of releasing KV."""

    def __init__(self, resources: ReleaseResources) -> None:
        self._resources = resources

    @property
    @abstractmethod
    def abandoned_timeout(self) -> float:
        """Seconds that the answer of a prefill leg is awaited after its client has left."""

    @property
    @abstractmethod
    def drain_timeout(self) -> float:
        """Seconds that the end of the process waits for prefill legs and for KV that is being
        released.
        """

    @abstractmethod
    def decode_releases(
        self, prefill_run: int | None, decode_run: int | None, *, in_silence: bool
    ) -> bool:
        """Return whether a decode engine that refuses or aborts a request releases its KV itself.

        `in_silence`: it sends nothing before its whole answer, so it may have read the KV without
        showing it.
        """

    @abstractmethod
    async def release(self, kept: OngoingRelease) -> bool:
        """Have KV released. Return whether it was."""

    @abstractmethod
    def lost(self, kept: OngoingRelease) -> str:
        """Return what happens to KV that could not be released, for a log line."""

    async def _ask(
        self, kept: OngoingRelease, decode: str, leg: LegRequest, timeout: float
    ) -> int | None:
        """Send a decode engine the request that releases KV. Return the answer's status, 0 for
        none, None if it was late.
        """
        if (engine := self._resources.engines.get(decode)) is None:
            return 0  # it was removed
        client = engine.client
        named = leg.headers or ((b"x-request-id", b"release-" + mint().encode()),)
        message = client.request(leg.route.path, (*named, *kept.authorization), leg.body)
        try:
            answer = await client.whole(message, timeout, Wait.RELEASE)
        except (EngineError, OverloadedError) as error:
            if (
                isinstance(error, EngineTimeoutError | EngineUnreachableError)
                and error.wait is not None
            ):
                self._resources.observers.notify(DeadlinePassed(error.wait.value, decode))
            drop_traceback(error)  # its frames refer to the request, which refers to it
            return None if isinstance(error, EngineTimeoutError) else 0
        return answer.status

    async def _before_try(self, number: int) -> None:
        """Wait before every try but the first."""
        if number:
            await asyncio.sleep(self._resources.deadlines.release / _MAX_TRIES)


class ReleaseByRefusal(Release):
    """The prefill engine holds the KV: any compatible decode engine can release it by refusing a
    request.
    """

    def __init__(self, resources: ReleaseResources, holder: HeldByPrefill | PushedToDecode) -> None:
        super().__init__(resources)
        self._body = holder.release_body
        self._handshakes = holder.handshakes

    @property
    def abandoned_timeout(self) -> float:
        """Seconds that the answer of a prefill leg is awaited after its client has left."""
        return self._resources.deadlines.abandoned_prefill

    @property
    def drain_timeout(self) -> float:
        """Seconds for such an answer, and for a release."""
        return self._resources.deadlines.abandoned_prefill + self._resources.deadlines.release

    def decode_releases(
        self, prefill_run: int | None, decode_run: int | None, *, in_silence: bool
    ) -> bool:
        """Return whether the decode engine has had contact with the prefill engine: before that,
        its report may not come.
        """
        return self._met(prefill_run, decode_run)

    def _met(self, prefill_run: int | None, decode_run: int | None) -> bool:
        return not self._handshakes or self._resources.contacts.met(prefill_run, decode_run)

    async def release(self, kept: OngoingRelease) -> bool:
        """Have decode engines refuse a request with the handle, until one has. Return whether one
        has.
        """
        body = None if self._body is None else self._body(kept.model, kept.handle)
        if body is None:
            return False
        leg = LegRequest(Route.COMPLETIONS, body)
        # 401 and 404 come from before the handler that releases KV
        resources, refused = self._resources, 400
        timeout = resources.deadlines.release
        for number in range(_MAX_TRIES):
            await self._before_try(number)
            engine = resources.states.releasing.through(
                kept.prefill, kept.model, resources.now(), prefer_not=kept.decode
            )
            if engine is None:
                continue
            run = engine.run_number
            if await self._ask(kept, engine.url, leg, timeout) != refused:
                continue
            if not self._met(kept.prefill_run, run):
                await asyncio.sleep(FIRST_CONTACT)
                await self._ask(kept, engine.url, leg, timeout)
            return True
        return False

    def lost(self, kept: OngoingRelease) -> str:
        """Return what happens to KV that could not be released."""
        return f"{kept.prefill} frees it when its lease ends"


class ReleaseByReading(Release):
    """One decode engine holds the KV in its buffer: only that engine can release it, by reading
    it.
    """

    def __init__(self, resources: ReleaseResources, holder: HeldByDecode) -> None:
        super().__init__(resources)
        self._holder = holder

    @property
    def abandoned_timeout(self) -> float:
        """Seconds that the answer of a prefill leg is awaited after its client has left: such a leg
        is not closed early.
        """
        return self._resources.deadlines.total

    @property
    def drain_timeout(self) -> float:
        """Seconds for a prefill, its notices and a completion: closing the prefill leg earlier may
        crash its engine.
        """
        deadlines = self._resources.deadlines
        return deadlines.prefill + deadlines.kv_ready + deadlines.first_token

    def decode_releases(
        self, prefill_run: int | None, decode_run: int | None, *, in_silence: bool
    ) -> bool:
        """Return whether the engine has probably read the KV. Most engines that were aborted before
        that still hold it.
        """
        return in_silence or self._holder.drops_aborted

    async def release(self, kept: OngoingRelease) -> bool:
        """Have the decode engine read the KV, once all of it is there. Return whether it has."""
        leg, done = self._holder.release_leg(kept.model, kept.handle), 200
        deadlines = self._resources.deadlines
        timeout = deadlines.release if self._holder.read_waits else deadlines.total
        if not await self._all_written(kept):
            return False
        for number in range(_MAX_TRIES):
            await self._before_try(number)
            if kept.decode is None:
                continue
            # The engine reads the KV when the request's turn comes. A request that is closed
            # earlier leaves the KV there.
            status = await self._ask(kept, kept.decode, leg, timeout)
            if status == done:
                return True
            if status is None:
                # It may have read it after all. A second read would take another prompt's KV, or
                # wait for ever.
                return kept.was_asked and self._holder.read_waits
        return False

    async def _all_written(self, kept: OngoingRelease) -> bool:
        """Wait until all of the KV is written: a part that came later would stay, and a missing
        part must not be read.
        """
        if kept.expected is None:
            return True
        resources = self._resources
        try:
            with resources.clock.within(resources.deadlines.kv_ready):
                await asyncio.shield(kept.expected.done)
        except TimeoutError:
            resources.observers.notify(DeadlinePassed(Wait.KV_READY.value, kept.prefill))
            return False
        return True

    def lost(self, kept: OngoingRelease) -> str:
        """Return what happens to KV that could not be released."""
        return f"it stays in the buffer of {kept.decode}"


class ReleaseByPush(ReleaseByRefusal):
    """The prefill engine writes the KV into blocks of the decode engine that was asked for the
    answer. That frees both sides.
    """

    @property
    def abandoned_timeout(self) -> float:
        """Seconds that the answer of a prefill leg is awaited after its client has left: a decode
        engine may wait for its KV.
        """
        return self._resources.deadlines.prefill

    @property
    def drain_timeout(self) -> float:
        """Seconds for such an answer, and for a release."""
        return self._resources.deadlines.prefill + self._resources.deadlines.release

    def decode_releases(
        self, prefill_run: int | None, decode_run: int | None, *, in_silence: bool
    ) -> bool:
        """Return whether a decode engine that aborts a request has the KV written, which frees it:
        always.
        """
        return True


def release_for(holder: Holder, resources: ReleaseResources) -> Release | None:
    """Return the way of releasing KV for a holder, None if nothing is held."""
    match holder:
        case HeldByPrefill():
            return ReleaseByRefusal(resources, holder)
        case PushedToDecode():
            return ReleaseByPush(resources, holder)
        case HeldByDecode():
            return ReleaseByReading(resources, holder)
        case _:
            return None
