"""The audit of several workers: one compares, and expects what the requests of all have moved."""

from __future__ import annotations

from pdproxy.fleet import worker_audit
from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.worker_audit import WorkerAuditor
from pdproxy.kit.shared_table import SharedTable, key_of
from pdproxy.observe.events import KvCounted, KvShortfall, Observers
from pdproxy.scheduling.ledger import Ledger, LedgerOptions
from pdproxy.scheduling.ledger_engine import EngineSpec, Role
from pdproxy.upstream.metrics_page import Scrape
from tests.fakes.recorder import Recorder


class Worker(Recorder):
    """A worker's audit of one decode engine."""

    def __init__(self, table: SharedTable, number: int) -> None:
        super().__init__()
        ledger = Ledger([], LedgerOptions(breaker_failures=3, breaker_cooldown=10))
        self.engines = EngineRegistry(ledger)
        self.engine: Engine = self.engines.add(EngineSpec("d", Role.DECODE), None)  # type: ignore[arg-type]
        column, others = table.column(number), table.others(number)
        self.audit = WorkerAuditor(
            self.engines, ledger, Observers([self]), column=column, others=others
        )

    def moves(self, tokens: int) -> None:
        """A leg whose KV arrives."""
        self.audit.asked(self.engine, tokens)
        self.audit.over("d", tokens, loaded=True)

    def scraped(self, external: float, started: float = 1.0) -> None:
        found = Scrape(started, 16, 0.0, None, 0.0, {"external_kv_transfer": external})
        self.audit.scraped(self.engine, found)

    @property
    def missing(self) -> int:
        return sum(one.tokens for one in self.events if isinstance(one, KvShortfall))


def workers(count: int = 2) -> tuple[SharedTable, list[Worker]]:
    table = SharedTable(count, 8, worker_audit.MEASURES, worker_audit.KEPT)
    return table, [Worker(table, number) for number in range(count)]


def test_kv_of_other_workers_requests_is_expected() -> None:
    """Without it, what they have moved would be a surplus that hides a shortfall."""
    _, (leader, other) = workers()
    leader.scraped(0)
    leader.moves(100)
    other.moves(300)
    for _ in range(4):
        leader.scraped(300)  # 100 tokens of the 400 never came
    assert leader.missing == 100
    assert sum(one.moved for one in leader.events if isinstance(one, KvCounted)) == 300
    assert other.events == []


def test_no_alarm_while_everything_arrives() -> None:
    _, (leader, other) = workers()
    leader.scraped(50)
    other.audit.asked("d", 200)  # it loads: its engine may count it before it sends data
    leader.scraped(250)
    leader.scraped(250)
    other.audit.over("d", 200, loaded=True)
    for _ in range(4):
        leader.scraped(250)
    assert leader.missing == 0


def test_another_worker_goes_on_with_the_account() -> None:
    """What was missing stays so, and what the dead one has moved was moved."""
    table, (leader, other) = workers()
    leader.scraped(0)
    leader.moves(100)
    other.moves(60)
    for _ in range(4):
        leader.scraped(60)
    assert leader.missing == 100
    leader.audit.asked("d", 500)
    other.audit.follow(
        other.engine, leader.engine.audit.account, leader.audit.base("d"), blind=False
    )
    table.clear(0)
    assert other.audit.missing() == {"d": 100}
    other.moves(40)
    for _ in range(4):
        other.scraped(100)
    assert other.missing == 0
    account = other.engine.audit.account
    assert account is not None
    assert (account.expected, account.loading) == (200, 0)


def test_a_restart_begins_anew() -> None:
    _, (leader, other) = workers()
    leader.scraped(0)
    other.moves(300)
    leader.scraped(0, started=2.0)
    for _ in range(4):
        leader.scraped(0, started=2.0)
    assert leader.missing == 0


def test_a_forgotten_engine_leaves_its_place() -> None:
    _, (leader, other) = workers()
    leader.scraped(0)
    other.moves(300)
    other.audit.forget("d")
    assert leader.audit._others.sums(key_of("d")) == (0, 0)
