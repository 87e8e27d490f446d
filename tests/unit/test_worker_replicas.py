"""Several workers of one of several replicas: what they estimate together is what one process
would.
"""

from __future__ import annotations

import random

import pytest

from pdproxy.kit.shared_table import SharedTable
from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.ledger import LedgerOptions
from pdproxy.scheduling.ledger_engine import Role
from pdproxy.scheduling.policies import POLICIES
from pdproxy.scheduling.policy import Ask
from pdproxy.scheduling.replicas import ReplicaLedger
from pdproxy.scheduling.worker_ledger import MEASURES, LedgerShare
from pdproxy.scheduling.worker_replicas import WorkerReplicaLedger
from tests.unit.test_ledger import evidence
from tests.unit.test_replicas import made, one, plain
from tests.unit.test_worker_breakers import shared
from tests.unit.test_worker_ledger import breakers_of

SPECS = plain(3)


def _workers(table: SharedTable, count: int, replicas: int) -> list[WorkerReplicaLedger]:
    found = []
    for number in range(count):
        of = WorkerReplicaLedger(
            SPECS,
            LedgerOptions(
                breaker_failures=2,
                breaker_cooldown=10,
                policies=dict.fromkeys((Role.PREFILL, Role.DECODE), POLICIES["least_load"]),
                chance=random.Random(number).random,
            ),
            LedgerShare(*table.of(number), shared(breakers_of(table), number)),
            replicas=replicas,
            max_age=lambda: 15.0,
        )
        for spec in SPECS:
            of.mark_up(spec.url, evidence())
        found.append(of)
    return found


def _loads(of: ReplicaLedger) -> dict[str, int]:
    return {engine.url: engine.requests for engine in of.engines}


@pytest.mark.parametrize("replicas", [1, 2, 5])
def test_workers_estimate_what_one_process_would(replicas: int) -> None:
    """Random leases, ends, reports, drains and other numbers of replicas: each worker has the loads
    that a single process has.
    """
    chance = random.Random(replicas)
    table = SharedTable(3, 16, MEASURES)
    workers, single = _workers(table, 3, replicas), made(replicas=replicas, specs=SPECS)
    leases: list[tuple[int, Lease, Lease]] = []
    now = 0.0
    for _ in range(2000):
        now += 0.01
        step, url = chance.random(), chance.choice(SPECS).url
        others = {spec.url for spec in SPECS} - {url}
        worker = chance.randrange(3)
        if step < 0.4:
            pair = [
                of.assign_alone(Ask("m", 10, now), without=others)
                for of in (workers[worker], single)
            ]
            assert (pair[0] is None) == (pair[1] is None)
            if pair[0] is not None and pair[1] is not None:
                leases.append((worker, pair[0], pair[1]))
        elif step < 0.75 and leases:
            number, shared, alone = leases.pop(chance.randrange(len(leases)))
            workers[number].close(shared, Verdict.GOOD, now)
            single.close(alone, Verdict.GOOD, now)
        elif step < 0.9:
            count = chance.choice([None, 0.0, 5.0, 40.0])
            for of in (*workers, single):
                if isinstance(of, WorkerReplicaLedger):
                    of.refresh(all_of_it=True)
                of.reported(url, count, now)
        elif step < 0.95:
            why = chance.choice([None, "is being drained"])
            for of in (*workers, single):
                of.mark_draining(url, why)
        else:
            number = chance.randint(1, 8)
            for of in (*workers, single):
                of.use_replicas(number)
        for of in workers:
            of.refresh(all_of_it=True)
            assert _loads(of) == _loads(single)
            for engine in of.engines:
                assert engine.known_load[0] == sum(
                    lease.engine.url == engine.url for _, lease, _ in leases
                )
    assert len({tuple(_loads(of).values()) for of in workers}) == 1


def test_what_is_left_of_an_engine_that_is_removed_is_this_workers_own() -> None:
    table = SharedTable(2, 16, MEASURES)
    first, second = _workers(table, 2, 4)
    one(first)
    lease = one(second)
    second.refresh()
    first.refresh()
    engine, url = lease.engine, lease.engine.url
    assert engine.requests >= 4
    second.remove(url)
    assert (engine.requests, engine.elsewhere, engine.of_workers) == (1, (0, 0), (0, 0))
    second.close(lease, Verdict.GOOD, 1.0)
    assert (engine.requests, engine.prompt_bytes) == (0, 0)


def test_a_killed_worker_has_nothing_any_more() -> None:
    """And what replicas were taken to have because of it is not there either."""
    table = SharedTable(2, 16, MEASURES)
    first, second = _workers(table, 2, 4)
    for _ in range(6):
        one(second)
    first.refresh()
    assert sum(_loads(first).values()) == 24
    table.clear(1)
    first.refresh(all_of_it=True)
    assert set(_loads(first).values()) == {0}
    assert {engine.prompt_bytes for engine in first.engines} == {0}
