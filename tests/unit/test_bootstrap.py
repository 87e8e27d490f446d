"""Bootstrap servers: what their answers may be, and which engines get pairs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.fleet.bootstrap import MAX_GIVEN_UP, NOT_ASKED, Bootstraps
from pdproxy.fleet.engine import Engine
from pdproxy.kit.errors import EngineError, EngineTimeoutError, OverloadedError, RefusalReason, Wait
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.events import (
    BootstrapAsked,
    DeadlinePassed,
    HandleEnded,
    NodeChanged,
    Observers,
)
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, Role
from pdproxy.settings.health import Probes
from pdproxy.transfer.mooncake import MOONCAKE
from pdproxy.wire.bootstrap import MAX_ENGINE_ID, MAX_RANKS, BootstrapAnswerError, Ranks, read_ranks
from tests.fakes.recorder import Recorder
from tests.fakes.registry import registry, unused_client
from tests.fakes.world import until

P, D = "http://p:1", "http://d:1"
ADDRESS = "http://p:8998"


def one(engine_id: str = "e", tp: int = 1, pp: int = 1, host: str = "a") -> dict[str, Any]:
    """A rank with all its workers."""
    workers = {str(t): {str(p): f"tcp://{host}:{10 * t + p}" for p in range(pp)} for t in range(tp)}
    return {"engine_id": engine_id, "worker_addr": workers}


def answer(*ranks: dict[str, Any]) -> bytes:
    """An answer with these ranks."""
    return json.dumps({str(number): rank for number, rank in enumerate(ranks)}).encode()


# -- what an answer may be


def test_the_recorded_answer_is_read() -> None:
    found = read_ranks(
        b'{"0":{"engine_id":"mc-p","worker_addr":{"0":{"0":"tcp://127.0.0.1:34327"}}}}'
    )
    assert (found[0].engine_id, found[0].tp_size, found[0].pp_size, found[0].missing(1)) == (
        "mc-p",
        1,
        1,
        None,
    )


@pytest.mark.parametrize(
    ("workers", "tp_size", "missing"),
    [
        ({}, None, 0),
        ({}, 2, 0),
        ({"0": {}}, None, 0),
        ({"0": {"0": "a"}}, 2, 1),
        ({"1": {"0": "a"}}, None, 0),
        ({"0": {"0": "a"}, "2": {"0": "a"}}, None, 1),
        ({"0": {"0": "a", "1": "b"}, "1": {"0": "c"}}, None, 1),
        ({"0": {"1": "b"}}, None, 0),
        ({"0": {"0": "a"}, "1": {"0": "b"}}, None, None),
        ({"0": {"0": "a"}, "1": {"0": "b"}}, 2, None),
    ],
)
def test_workers_that_have_not_registered_yet(
    workers: Any, tp_size: int | None, missing: int | None
) -> None:
    rank = read_ranks(json.dumps({"0": {"engine_id": "e", "worker_addr": workers}}).encode())[0]
    assert rank.missing(tp_size) == (
        None if missing is None else f"not all workers of tensor-parallel rank {missing}"
    )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"\xff",
        b'{"x":{"engine_id":"e","worker_addr":{}}}',
        b'{"0":{"worker_addr":{}}}',
        b'{"0":{"engine_id":5,"worker_addr":{}}}',
        b'{"0":{"engine_id":"e","worker_addr":[]}}',
        b'{"0":{"engine_id":"e","worker_addr":{"0":"tcp"}}}',
        b'{"0":' * 100_000,
        answer(one("")),
        answer(one("e" * (MAX_ENGINE_ID + 1))),
        answer(one("a\nb")),
        answer(one(host="h" * 600)),
        answer({"engine_id": "e", "worker_addr": {"0": {"0": ""}}}),
        answer(*[one()] * (MAX_RANKS + 1)),
    ],
    ids=lambda body: repr(body[:40]),
)
def test_what_no_bootstrap_server_answers(body: bytes) -> None:
    with pytest.raises(BootstrapAnswerError) as caught:
        read_ranks(body)
    assert len(str(caught.value)) < 2000
    assert "\n" not in str(caught.value)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
@settings(max_examples=200, deadline=None)
def test_any_json_is_read_or_refused(value: Any) -> None:
    try:
        found = read_ranks(json.dumps(value).encode())
    except BootstrapAnswerError:
        return
    assert all(isinstance(rank, int) and one.engine_id for rank, one in found.items())


# -- which engines get pairs


class _Idle(TaskOwner):
    """Runs nothing: a test asks."""

    def keep(self, run: Any, name: str) -> asyncio.Task[None]:
        async def nothing() -> None:
            pass

        return asyncio.get_running_loop().create_task(nothing())


class Stand(Recorder):
    """A prefill and a decode engine that are up, and a server that answers what the test says."""

    def __init__(
        self,
        ranks: int = 1,
        tp_size: int | None = None,
        tasks: TaskOwner | None = None,
        share: Callable[[Stand], None] = lambda _: None,
    ) -> None:
        self.engines, self.ledger = registry(EngineSpec(D, Role.DECODE))
        super().__init__()
        self.said: bytes | Exception = answer(one())
        self.asked: list[str] = []
        observers = Observers([self])
        self.tasks = _Idle("test") if tasks is None else tasks
        self.time = 1000.0
        self.bootstraps = Bootstraps(
            self.engines,
            self.ledger,
            self._query,
            observers,
            self.tasks,
            Probes(),
            lambda: self.time,
            MOONCAKE,
        )
        share(self)
        observers.add(self.bootstraps)
        self.engines.add(
            EngineSpec(P, Role.PREFILL),
            unused_client(P),
            ranks=ranks,
            tp_size=tp_size,
            bootstrap=ADDRESS,
        )
        self.observers = observers
        self.up(P, 1.0)
        self.up(D, 1.0)

    async def _query(self, address: str) -> Ranks:
        self.asked.append(address)
        if isinstance(self.said, Exception):
            raise self.said
        try:
            return read_ranks(self.said)
        except BootstrapAnswerError as error:
            raise EngineError(str(error)) from None

    def up(self, url: str, started: float) -> None:
        """An engine has started."""
        evidence = Evidence(frozenset({"m"}), "0.32.0", 16, (), 0, started)
        self.ledger.mark_up(url, evidence)
        self.observers.notify(NodeChanged(url, "prefill", up=True, reason=""))

    async def ask(self, said: bytes | Exception | None = None) -> str | None:
        """Have the server asked. Return why the engine gets no pair."""
        if said is not None:
            self.said = said
        await self.bootstraps.ask(self.p)
        return self.p.in_ledger.kv_not_ready

    @property
    def p(self) -> Engine:
        return self.engines[P]

    @property
    def results(self) -> list[str]:
        return [event.result for event in self.events if isinstance(event, BootstrapAsked)]


async def test_an_engine_gets_no_pair_before_its_server_has_named_it() -> None:
    stand = Stand()
    assert stand.p.in_ledger.kv_not_ready == NOT_ASKED
    assert stand.engines[D].in_ledger.kv_not_ready is None
    assert await stand.ask() is None
    peer = stand.p.run.peers.get(0)
    assert (peer.engine_id, peer.address, peer.tp_size, peer.pp_size, peer.headers) == (
        "e",
        ADDRESS,
        1,
        1,
        (),
    )
    assert stand.asked == [ADDRESS]
    assert stand.results == ["complete"]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"{}", "does not know data-parallel rank 0 yet"),
        (answer(one()), "does not know data-parallel rank 1 yet"),
        (
            answer(one(tp=2), one(tp=1)),
            "does not know not all workers of tensor-parallel rank 1 yet",
        ),
        (
            answer(one(tp=2), one("f", tp=2), one("g", tp=2)),
            "has a data-parallel rank 2, but facts.data_parallel_size is 2",
        ),
    ],
)
async def test_an_incomplete_answer_is_a_reason(said: bytes, words: str) -> None:
    stand = Stand(ranks=2, tp_size=2)
    if said == answer(one()):
        said = answer(one(tp=2))
    assert words in (await stand.ask(said) or "")
    assert stand.p.run.peers.missing == (0, 1)
    assert stand.results == ["incomplete"]
    assert await stand.ask(answer(one("e", tp=2), one("f", tp=2))) is None
    assert [stand.p.run.peers.get(rank).engine_id for rank in range(2)] == ["e", "f"]
    assert stand.p.run.peers.get(1).headers == ((b"x-data-parallel-rank", b"1"),)


async def test_a_server_that_fails_is_a_reason_and_shown() -> None:
    stand = Stand()
    why = await stand.ask(EngineError("no connection: refused"))
    assert why == f"has a bootstrap server at {ADDRESS} that can't be used: no connection: refused"
    assert stand.bootstraps.shortcomings() == [
        f"the bootstrap server of {P} ({ADDRESS}): no connection: refused"
    ]
    assert stand.results == ["failed"]
    assert await stand.ask(answer(one())) is None
    assert stand.bootstraps.shortcomings() == []


async def test_a_late_server_is_counted_as_a_late_probe() -> None:
    stand = Stand()
    await stand.ask(EngineTimeoutError("/query did not answer in 2 s", wait=Wait.PROBE))
    assert DeadlinePassed("probe", P) in stand.events


async def test_our_own_shortage_shows_nothing_of_the_server() -> None:
    stand = Stand()
    assert await stand.ask(OverloadedError("no files left", RefusalReason.OPEN_FILES)) == NOT_ASKED
    assert stand.results == []


async def test_a_server_that_fails_later_changes_nothing() -> None:
    stand = Stand()
    await stand.ask()
    assert await stand.ask(EngineError("gone")) is None
    assert stand.p.run.peers.get(0).engine_id == "e"
    assert len(stand.bootstraps.shortcomings()) == 1, "but it is shown"


async def test_after_a_restart_nothing_is_known() -> None:
    """At once, in the same step of the loop: no leg may name the run before."""
    stand = Stand()
    await stand.ask()
    stand.up(P, 2.0)
    assert stand.p.in_ledger.kv_not_ready == NOT_ASKED
    assert stand.p.run.peers.missing == (0,)
    assert await stand.ask(answer(one("other", host="b"))) is None
    assert stand.p.run.peers.get(0).engine_id == "other"


async def test_an_answer_of_the_run_before_is_dropped() -> None:
    stand = Stand()
    original, began, go = stand._query, asyncio.Event(), asyncio.Event()

    async def slow(address: str) -> Ranks:
        began.set()
        await go.wait()
        return await original(address)

    stand.bootstraps._query = slow
    asked = asyncio.ensure_future(stand.bootstraps.ask(stand.p))
    await began.wait()
    stand.up(P, 2.0)
    go.set()
    await asked
    assert stand.p.in_ledger.kv_not_ready == NOT_ASKED
    assert stand.p.run.peers.missing == (0,)


async def test_ids_that_change_between_two_probes_are_learned() -> None:
    stand = Stand()
    await stand.ask()
    assert await stand.ask(b"{}") is not None
    assert stand.p.run.peers.missing == (0,)
    assert await stand.ask(answer(one("new"))) is None
    assert stand.p.run.peers.get(0).engine_id == "new"


async def test_a_fixed_engine_id_with_new_addresses_needs_new_decode_engines() -> None:
    """Decode engines keep an id's addresses for ever, and would wait there for minutes."""
    stand = Stand()
    await stand.ask(answer(one("fixed", host="before")))
    stand.up(P, 2.0)
    why = await stand.ask(answer(one("fixed", host="after"))) or ""
    assert why.endswith(f"restart {D}, and leave engine_id out of its --kv-transfer-config")
    assert stand.p.run.peers.missing == (0,)
    assert await stand.ask() == why, "asking again does not help"
    stand.up(D, 2.0)
    assert await stand.ask() is None
    assert stand.p.run.peers.get(0).engine_id == "fixed"


async def test_an_engine_that_starts_with_a_new_id_needs_no_new_decode_engines() -> None:
    stand = Stand()
    await stand.ask(answer(one("a", host="before")))
    stand.up(P, 2.0)
    assert await stand.ask(answer(one("b", host="after"))) is None


async def test_an_engine_that_gave_many_prompts_up_is_left_alone_for_a_while() -> None:
    """Each keeps one of its workers busy, until the decode engine that waits gives up, too."""
    stand = Stand()
    await stand.ask()

    def give_up(count: int, end: str = "stuck", url: str = P) -> None:
        for _ in range(count):
            stand.observers.notify(HandleEnded(end, url, 1.0))

    give_up(MAX_GIVEN_UP - 1)
    give_up(100, end="lost")
    give_up(100, url="http://somebody:1")
    assert stand.p.in_ledger.kv_not_ready is None
    stand.time += 100
    give_up(1)
    assert f"has given up {MAX_GIVEN_UP} prompts or more" in (stand.p.in_ledger.kv_not_ready or "")
    assert await stand.ask() is not None
    stand.time += 380
    assert await stand.ask() is None, "the first ones are over"
    give_up(MAX_GIVEN_UP)
    assert await stand.ask() is not None
    stand.up(P, 2.0)
    assert await stand.ask(answer(one("new"))) is None, "a new run has new workers"


async def test_it_asks_on_its_own_and_at_once_after_a_restart() -> None:
    stand = Stand(tasks=TaskOwner("test"))
    await until(lambda: stand.p.in_ledger.kv_not_ready is None)
    stand.said = answer(one("second"))
    stand.up(P, 2.0)
    await until(lambda: stand.p.in_ledger.kv_not_ready is None)
    assert stand.p.run.peers.get(0).engine_id == "second"
    stand.engines.remove(P)
    asked = len(stand.asked)
    await asyncio.sleep(0.05)
    assert len(stand.asked) == asked
    assert len(stand.tasks) == 0
    await stand.tasks.settle(0)


async def test_an_engine_that_comes_later_is_asked_for() -> None:
    stand = Stand(tasks=TaskOwner("test"))
    url = "http://q:1"
    stand.engines.add(EngineSpec(url, Role.PREFILL), unused_client(url), bootstrap="http://q:8998")
    assert stand.engines[url].in_ledger.kv_not_ready == NOT_ASKED
    stand.up(url, 1.0)
    await until(lambda: "http://q:8998" in stand.asked)
    await stand.tasks.settle(0)
