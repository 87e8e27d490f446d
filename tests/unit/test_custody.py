"""The custodian's table of live handles, with the names that engines give them."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from pdproxy.app.drain import longest_drain
from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import KvGoneError
from pdproxy.observe.events import Observers
from pdproxy.scheduling.ledger import Ledger, LedgerOptions
from pdproxy.serving.kv.custodian import Custodian
from pdproxy.serving.kv.custody import End
from pdproxy.serving.kv.orphans import PrefillRecord, _Orphan
from pdproxy.serving.kv.ready import ReadyWaits
from pdproxy.serving.kv.release import OngoingRelease
from pdproxy.settings.limits import Deadlines
from pdproxy.transfer.contract import Contract, Handle
from pdproxy.transfer.lmcache_pd import lmcache_pd
from pdproxy.transfer.nixl import NIXL, NixlOptions, nixl
from pdproxy.transfer.nixl_push import CONTRACT as PUSH
from pdproxy.wire.notices import Notice, NoticeEvent
from pdproxy.workers.custody_records import adopt, recorded
from pdproxy.workers.records import SharedRecords
from tests.fakes.registry import USUAL_HOSTS
from tests.sim.raw import turns

LEG = PrefillRecord("http://p", None, (), lambda _: "nothing")


def custodian(contract: Contract, **engines: Any) -> Custodian:
    """A custodian whose ledger has no engines."""
    ledger = Ledger([], LedgerOptions(breaker_failures=3, breaker_cooldown=5))
    return Custodian(
        contract, ledger, engines, Deadlines(), Observers([]), lambda: 0.0, Clock(), USUAL_HOSTS
    )


class Shared(Custodian):
    """The custodian of a worker."""

    def __init__(self, contract: Contract, records: SharedRecords, number: int = 0) -> None:
        self.live = recorded(contract, records.area(number), 0)
        ledger = Ledger([], LedgerOptions(breaker_failures=3, breaker_cooldown=5))
        super().__init__(
            contract,
            ledger,
            {},
            Deadlines(),
            Observers([]),
            lambda: 0.0,
            Clock(),
            USUAL_HOSTS,
            self.live,
        )

    def adopt(self, left: list[bytes]) -> None:
        adopt(self, self.live, {}, left, 0)


def handle(name: str) -> Handle:
    """A handle with this name."""
    return Handle(b"{}", None, 16, name)


def test_handles_of_one_name_are_two() -> None:
    """An engine may use a name twice: each is counted, and each ends by itself."""
    kept = custodian(NIXL)
    first, second = (kept.take(handle("r1"), LEG) for _ in range(2))
    assert kept.snapshot()["held"][0] == 2
    first.end(End.LOADED)
    first.end(End.LOST)
    assert kept.snapshot()["held"][0] == 1
    assert (first.how, second.how) == (End.LOADED, None)


@pytest.mark.parametrize(("kv_host", "host"), [(None, "127.0.0.1"), ("10.0.0.9", "10.0.0.9")])
def test_a_handle_names_the_host_that_the_settings_say(kv_host: str | None, host: str) -> None:
    kept = custodian(NIXL, **{LEG.prefill: SimpleNamespace(kv_host=kv_host)})
    given = Handle(b'{"remote_host":"127.0.0.1"}', None, 16, "r1")
    assert json.loads(kept.placed(given, LEG.prefill).params)["remote_host"] == host


@pytest.mark.parametrize("contract", [NIXL, PUSH, lmcache_pd()], ids=lambda one: one.name)
def test_the_end_of_the_process_waits_for_a_prefill_and_a_release(contract: Contract) -> None:
    """And for no longer than the parent of workers waits for theirs."""
    times = Deadlines()
    prefill = times.prefill if contract is PUSH else times.abandoned_prefill
    waits = custodian(contract).drain_timeout
    assert prefill + times.release <= waits <= longest_drain(times)


def test_notices_end_handles_of_engines_with_the_notifier() -> None:
    """A notice ends the handle that it names, once. Without the notifier no notice counts."""
    loaded = Notice(event=NoticeEvent.LOADED, request_id="leg", remote_request_id="r1")
    kept = custodian(nixl(NixlOptions(notifier=True)))
    custody = kept.take(handle("r1"), LEG)
    kept.receive(loaded)
    kept.receive(loaded)
    assert custody.how is End.LOADED
    without = custodian(NIXL)
    custody = without.take(handle("r1"), LEG)
    without.receive(loaded)
    assert custody.how is None


async def test_an_aborted_push_is_read_unless_it_was_probably_read_before() -> None:
    """A stream shows when it has begun. An unstreamed answer does not, and a second read may take
    another prompt's KV.
    """
    kept = custodian(lmcache_pd())
    silent, streamed = (kept.take(handle(name), LEG) for name in ("silent", "streamed"))
    silent.end(End.ABORTED, in_silence=True)
    streamed.end(End.ABORTED)
    assert (silent.how, streamed.how) == (End.ABORTED, None)
    assert kept.snapshot()["releasing"][0] == 1
    await kept.settle(0)


async def test_a_handle_is_given_away_once() -> None:
    """A second leg with it would be a defect; one whose KV is gone, or is being released, gets
    none.
    """
    kept = custodian(NIXL)
    custody = kept.take(handle("r1"), LEG)
    assert custody.spend(7) == handle("r1")
    assert (custody.decode_run, kept.snapshot()["asked"][0]) == (7, 1)
    with pytest.raises(RuntimeError, match="given away before"):
        custody.spend(7)
    custody.end(End.LOADED)
    released, expired = (kept.take(handle(name), LEG) for name in ("r2", "r3"))
    released.release()
    expired.end(End.EXPIRED)
    for gone in (released, expired):
        with pytest.raises(KvGoneError, match="the KV at http://p is gone"):
            gone.spend(7)
        assert not gone.was_asked
    await kept.settle(0)


async def test_a_release_sends_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notice may end the handle while its release goes on, or before that begins: then nothing is
    sent.
    """
    kept, sent = custodian(NIXL), list[bytes]()

    async def release(releasing: OngoingRelease) -> bool:
        await asyncio.sleep(0)
        sent.append(releasing.handle.params)
        return True

    assert kept._release is not None
    monkeypatch.setattr(kept._release, "release", release)
    at_once, later = (kept.take(handle(name), LEG) for name in ("r1", "r2"))
    at_once.release()
    at_once.end(End.LOADED)
    later.release()
    await asyncio.sleep(0)
    later.end(End.LOADED)
    await kept.settle(1)
    assert sent == [b"{}"]
    assert at_once.how is later.how is End.LOADED


async def test_a_late_decode_engine_that_waits_for_a_push_is_stuck_only_if_the_push_was_made() -> (
    None
):
    """While the prefill engine works, its push may still come: the end waits for the prefill
    engine's answer.
    """
    kept = custodian(PUSH)
    promised, made = (kept.promise(handle(name), LEG) for name in ("r1", "r2"))
    for custody in (promised, made):
        custody.spend(7)
    made.made(handle("r2"))
    for custody in (promised, made):
        custody.decode_was_late(accepted=False)
    assert (promised.how, promised.ends_later) == (None, True)
    assert (made.how, made.ends_later) == (End.STUCK, False)
    await kept.settle(0)


async def test_a_wait_for_a_release_has_a_limit() -> None:
    """The release goes on. Whoever waited gets False."""
    kept = custodian(NIXL)
    assert not await kept.take(handle("r1"), LEG).released(0.01)
    assert kept.snapshot()["releasing"][0] == 1
    await kept.settle(0)


def test_a_leg_is_remembered_without_its_request() -> None:
    """Its reader holds the request's body, which may be long."""
    orphan = _Orphan(LEG)
    assert orphan.leg.read is not LEG.read
    assert (orphan.leg.prefill, orphan.leg.expected, orphan.leg.space) == (LEG.prefill, None, None)


async def test_what_may_not_be_read_yet_is_left_to_nobody() -> None:
    """Another worker does not know which notices have come: a handle is in the records once all of
    them have.
    """
    records, clock = SharedRecords(2, 64), Clock()
    ready, kept = ReadyWaits(clock, Observers([]), clock.now), Shared(lmcache_pd(), records)
    custody = kept.take(handle("r1"), LEG)
    custody.expected = ready.expect("r1", 2)
    await turns(3)
    notice = Notice(event=NoticeEvent.READY, request_id="r1")
    ready.receive(notice)
    await turns(3)
    assert records.taken(0) == []
    ready.receive(notice)
    await turns(3)
    (record,) = records.taken(0)
    heir = Shared(lmcache_pd(), records, 1)
    heir.adopt([record])
    assert heir.snapshot()["releasing"][0] == 1
    assert len(records.taken(1)) == 1, "it leaves it again, if it is killed"
    await heir.settle(0)
    custody.end(End.LOADED)


@pytest.mark.parametrize("how", ["none is sent", "all came before"])
async def test_what_may_be_read_is_left_at_once(how: str) -> None:
    records, clock = SharedRecords(1, 64), Clock()
    ready, kept = ReadyWaits(clock, Observers([]), clock.now), Shared(lmcache_pd(), records)
    custody = kept.take(handle("r1"), LEG)
    if how == "all came before":
        ready.receive(Notice(event=NoticeEvent.READY, request_id="r1"))
        custody.expected = ready.expect("r1", 1)
    await turns(3)
    custody.end(End.LOADED)
    assert records.taken(0) == []
    again = kept.take(handle("r2"), LEG)
    await turns(3)
    assert len(records.taken(0)) == 1
    again.end(End.LOADED)


async def test_what_has_ended_before_its_last_notice_is_left_to_nobody() -> None:
    records, clock = SharedRecords(1, 64), Clock()
    ready, kept = ReadyWaits(clock, Observers([]), clock.now), Shared(lmcache_pd(), records)
    custody = kept.take(handle("r1"), LEG)
    expected = custody.expected = ready.expect("r1", 1)
    await turns(3)
    custody.end(End.LOST)
    expected.receive(Notice(event=NoticeEvent.READY, request_id="r1"))
    await turns(3)
    assert records.taken(0) == []


def noticed(event: NoticeEvent, role: str = "P") -> Notice:
    return Notice(event=event, request_id="leg", remote_request_id="r1", role=role)


async def test_kv_that_could_not_be_read_is_released_whatever_the_decode_engine_answers() -> None:
    """That engine has computed the prompt, so its answer is whole, and nothing has told the
    holder.
    """
    kept = custodian(nixl(NixlOptions(notifier=True)))
    custody = kept.take(handle("r1"), LEG)
    custody.spend(7)
    kept.receive(noticed(NoticeEvent.FAILED, "D"))
    custody.end(End.LOADED)
    assert (custody.how, kept.snapshot()["releasing"][0]) == (None, 1)
    kept.receive(noticed(NoticeEvent.RELEASED))
    assert custody.how is End.RELEASED
    await kept.settle(0)


@pytest.mark.parametrize("asked", [True, False])
def test_kv_that_was_promised_is_asked_for_once_it_is_made(asked: bool) -> None:
    """The decode engine has its handle already, if its request was written."""
    kept = custodian(NIXL)
    custody = kept.promise(handle("r1"), LEG)
    if asked:
        custody.spend(7)
    assert kept.snapshot()["promised"][0] == 1
    custody.made(handle("r1"))
    assert {name for name, (count, *_) in kept.snapshot().items() if count} == {
        "asked" if asked else "held"
    }


@pytest.mark.parametrize("released", [True, False])
async def test_an_expiry_ends_only_a_leg_that_may_read_the_kv(released: bool) -> None:
    """A leg whose KV is being released does not read it."""
    kept, told = custodian(nixl(NixlOptions(notifier=True))), list[tuple[str, bool]]()
    custody = kept.take(handle("r1"), LEG)
    custody.spend(7)
    custody.on_gone = lambda why, lost: told.append((why, lost))
    if released:
        custody.release()
    kept.receive(noticed(NoticeEvent.EXPIRED))
    assert custody.how is End.EXPIRED
    assert told == (
        [] if released else [("the lease on the KV at http://p ended before it was loaded", False)]
    )
    await kept.settle(0)
