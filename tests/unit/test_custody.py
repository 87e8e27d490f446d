"""The books of live handles, whatever engines call them."""

from __future__ import annotations

from pdproxy.kit.clock import Clock
from pdproxy.observe.events import Observers
from pdproxy.scheduling.ledger import Ledger
from pdproxy.serving.kv.custody import Custodian, End
from pdproxy.serving.kv.orphans import PrefillLeg, _Orphan
from pdproxy.settings.limits import Deadlines
from pdproxy.transfer.contract import Contract, Handle
from pdproxy.transfer.lmcache_pd import lmcache_pd
from pdproxy.transfer.nixl import NIXL, Options, nixl
from pdproxy.wire.notices import Event, Notice

LEG = PrefillLeg("http://p", None, (), lambda _: "nothing")


def custodian(contract: Contract) -> Custodian:
    """One without engines."""
    ledger = Ledger([], breaker_failures=3, breaker_cooldown=5)
    return Custodian(contract, ledger, {}, Deadlines(), Observers([]), lambda: 0.0, Clock())


def handle(name: str) -> Handle:
    """A handle of an engine's naming."""
    return Handle(b"{}", None, 16, name)


def test_handles_of_one_name_are_two() -> None:
    """An engine may use a name twice: each is counted, and each ends by itself."""
    books = custodian(NIXL)
    first, second = (books.take(handle("r1"), LEG) for _ in range(2))
    assert books.snapshot()["held"][0] == 2
    first.end(End.LOADED)
    first.end(End.LOST)
    assert books.snapshot()["held"][0] == 1
    assert (first.how, second.how) == (End.LOADED, None)


def test_engines_words_are_heard_where_they_carry_the_notifier() -> None:
    """A notice ends the handle that it names, once; without the notifier's contract nobody's word counts."""
    said = Notice(event=Event.LOADED, request_id="leg", remote_request_id="r1")
    books = custodian(nixl(Options(notifier=True)))
    custody = books.take(handle("r1"), LEG)
    books.heard(said)
    books.heard(said)
    assert custody.how is End.LOADED
    deaf = custodian(NIXL)
    custody = deaf.take(handle("r1"), LEG)
    deaf.heard(said)
    assert custody.how is None


async def test_an_aborted_push_is_read_unless_it_was_more_likely_than_not() -> None:
    """A stream shows when it has begun; an unstreamed answer doesn't, and a second read may take another prompt's."""
    books = custodian(lmcache_pd())
    silent, streamed = (books.take(handle(name), LEG) for name in ("silent", "streamed"))
    silent.end(End.ABORTED, in_silence=True)
    streamed.end(End.ABORTED)
    assert (silent.how, streamed.how) == (End.ABORTED, None)
    assert books.snapshot()["releasing"][0] == 1
    await books.settle(0)


async def test_a_handle_that_is_not_taken_back_in_time_holds_nobody_up() -> None:
    """It is still being given back; whoever waited is told that it isn't."""
    books = custodian(NIXL)
    assert not await books.take(handle("r1"), LEG).given_back(0.01)
    assert books.snapshot()["releasing"][0] == 1
    await books.settle(0)


def test_a_leg_is_remembered_without_its_request() -> None:
    """Its reader holds the request's body, which may be long."""
    orphan = _Orphan(LEG)
    assert orphan.leg.read is not LEG.read
    assert (orphan.leg.prefill, orphan.leg.expected, orphan.leg.slots) == (LEG.prefill, None, None)
