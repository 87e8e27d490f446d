"""Changes for all workers: one order, kept for those that start, whoever ends in the middle."""

from __future__ import annotations

from typing import Any

import pytest

from pdproxy.kit.errors import BadRequestError
from pdproxy.observe.events import MemberChanged
from pdproxy.web.admin.changes import (
    Change,
    ChangeOutcome,
    decode_outcome,
    encode_change,
    encode_outcome,
    is_accepted,
)
from pdproxy.web.admin.errors import ConflictError
from pdproxy.web.admin.shapes import EngineChanged, LevelShown
from pdproxy.workers import followed_changes
from pdproxy.workers.changes import (
    CHANGE,
    CHANGED,
    GONE,
    LOST,
    MAKE,
    OUTCOME,
    UNDO,
    WAITED,
    ParentChanges,
    decode_numbers,
)
from pdproxy.workers.followed_changes import FollowedChanges
from pdproxy.workers.journal import ChangeJournal, Past
from pdproxy.workers.links import Message
from pdproxy.workers.supervisor import WorkerProcess

URL = "http://e:1"
ADD = Change.of("add", URL, {"url": URL, "role": "decode"})
DRAIN = Change.of("drain", URL, {})
LEVEL = Change.of("log_level", "", {"level": "debug"})


def _done(result: str, url: str = URL) -> ChangeOutcome:
    return ChangeOutcome(200, url, EngineChanged(result, "", None))


REFUSED = ChangeOutcome(409, URL, message="no", owner="settings")


class Parent:
    """A supervisor without processes, and what it has sent to each worker."""

    def __init__(self, count: int = 3) -> None:
        self.workers = [
            WorkerProcess(number, pid=100 + number, ready=True) for number in range(count)
        ]
        self.sent: dict[int, list[Message]] = {number: [] for number in range(count)}
        self.journal = ChangeJournal()
        self.changes = ParentChanges(self, self.journal)  # type: ignore[arg-type]

    def send(self, worker: WorkerProcess, message: Message) -> None:
        self.sent[worker.number].append(message)

    def ask(self, worker: int, change: Change, own: int = 1) -> None:
        assert self.changes.received(
            self.workers[worker], Message(CHANGE, own, body=encode_change(change))
        )

    def answer(self, worker: int, order: int, outcome: ChangeOutcome) -> None:
        self.changes.received(
            self.workers[worker], Message(CHANGED, order, body=encode_outcome(outcome))
        )

    def end(self, worker: int) -> None:
        self.workers[worker].pid, self.workers[worker].ready = None, False
        self.changes.died(worker)

    def kinds(self, worker: int) -> list[tuple[str, int]]:
        return [(message.kind, message.number) for message in self.sent[worker]]


def test_all_are_told_in_one_order_and_the_asker_hears_of_all() -> None:
    parent = Parent()
    parent.ask(1, ADD, own=7)
    parent.ask(2, DRAIN, own=4)
    assert parent.kinds(0) == [(MAKE, 1), (MAKE, 2)]
    assert parent.kinds(1) == [(WAITED, 7), (MAKE, 1), (MAKE, 2)]
    assert parent.kinds(2) == [(MAKE, 1), (WAITED, 4), (MAKE, 2)]
    assert decode_numbers(parent.sent[1][0].body) == [0, 1, 2]
    for worker in (2, 0, 1):
        parent.answer(worker, 1, _done("added"))
    assert [(one.kind, one.worker) for one in parent.sent[1][3:]] == [
        (OUTCOME, 2),
        (OUTCOME, 0),
        (OUTCOME, 1),
    ]
    assert parent.journal.past() == Past([ADD], [], [(2, DRAIN)], 2)
    parent.answer(1, 1, _done("added"))
    assert len(parent.sent[1]) == 6, "it was answered by all"


@pytest.mark.parametrize("dies", [0, 1], ids=["another", "the asker"])
def test_a_worker_that_ends_in_the_middle_is_not_waited_for(dies: int) -> None:
    """Its successor has the change by the journal, also while it is not decided."""
    parent = Parent()
    parent.ask(1, ADD)
    parent.answer(2, 1, _done("added"))
    parent.end(dies)
    assert parent.journal.past() == Past([], [], [(1, ADD)], 1), (
        "what a worker takes that starts now"
    )
    parent.workers[dies].pid = 200
    parent.answer(1 - dies, 1, _done("added"))
    assert parent.journal.past() == Past([ADD], [], [], 1)
    told = [message.kind for message in parent.sent[1]]
    assert (LOST in told, OUTCOME in told) == (dies == 0, True)
    assert told.count(OUTCOME) == (2 if dies == 0 else 1), "another process has its number"


def test_all_workers_end_without_an_answer() -> None:
    """The change is kept: one that began meanwhile may have made it."""
    parent = Parent(2)
    parent.ask(0, ADD)
    parent.end(0)
    parent.end(1)
    assert parent.journal.past() == Past([ADD], [], [], 1)
    parent.changes.died(0)


def test_one_refusal_undoes_an_engine_in_all() -> None:
    """Also in one that has started meanwhile, and in one that is being started."""
    parent = Parent()
    parent.workers[2].ready = False
    parent.ask(0, ADD)
    assert decode_numbers(parent.sent[0][0].body) == [0, 1]
    assert parent.kinds(2) == [(MAKE, 1)]
    parent.answer(2, 1, _done("added"))
    parent.answer(0, 1, _done("added"))
    parent.answer(1, 1, REFUSED)
    assert [parent.kinds(worker)[-1] for worker in range(3)] == [(UNDO, 1)] * 3
    assert parent.journal.past() == Past([], [], [], 1)


def test_what_is_accepted() -> None:
    """All must add an engine; what some do not have any more is changed in the others."""
    assert is_accepted("add", [_done("added"), _done("wanted")])
    assert not is_accepted("add", [_done("added"), REFUSED])
    assert is_accepted("remove", [_done("removing"), ChangeOutcome(404)])
    assert not is_accepted("undrain", [ChangeOutcome(404), REFUSED])
    assert not is_accepted(
        "log_level", [ChangeOutcome(200, level=LevelShown("info", "admin")), ChangeOutcome(400)]
    )


def _made(*changes: tuple[Change, str]) -> ChangeJournal:
    journal = ChangeJournal()
    for number, (change, result) in enumerate(changes, 1):
        journal.begin(number, change)
        journal.accept(number, URL, {result})
    return journal


REMOVE, UNDRAIN = Change("remove", URL), Change("undrain", URL)
LEAVES = Change.of("drain", URL, {"keep": False})


@pytest.mark.parametrize(
    ("changes", "engines", "others"),
    [
        ([(ADD, "added"), (DRAIN, "draining")], [ADD], [DRAIN]),
        ([(ADD, "added"), (DRAIN, "draining"), (UNDRAIN, "undrained")], [ADD], []),
        ([(ADD, "added"), (DRAIN, "draining"), (REMOVE, "removing")], [], []),
        ([(ADD, "added"), (DRAIN, "draining"), (LEAVES, "removing")], [], []),
        ([(ADD, "wanted"), (DRAIN, "draining"), (REMOVE, "not_wanted")], [], [DRAIN]),
        ([(DRAIN, "draining"), (ADD, "wanted")], [ADD], [DRAIN]),
        ([(DRAIN, "draining"), (ADD, "serving_again")], [ADD], []),
        ([(LEVEL, ""), (ADD, "added"), (LEVEL, "")], [ADD], [LEVEL]),
    ],
)
def test_the_journal_keeps_what_is_in_force(
    changes: list[tuple[Change, str]], engines: list[Change], others: list[Change]
) -> None:
    assert _made(*changes).past()[:2] == (engines, others)


def test_a_drain_ends_with_its_engine() -> None:
    """Not one that was asked for since: a late worker tells of an engine that went before."""
    parent = Parent()
    for order, change in enumerate((ADD, DRAIN), 1):
        parent.ask(0, change)
        for worker in range(3):
            parent.answer(worker, order, _done("added" if change is ADD else "draining"))
    parent.changes.received(parent.workers[0], Message(GONE, 1, body=URL.encode()))
    assert parent.journal.past().others == [DRAIN]
    parent.changes.received(parent.workers[0], Message(GONE, 2, body=URL.encode()))
    assert parent.journal.past().others == []


class Service:
    """What a worker's engines are: those that were added, and why others can't be."""

    def __init__(self) -> None:
        self.urls: set[str] = set()
        self.done: list[tuple[str, str]] = []
        self.missing: set[str] = set()
        self.fails = False
        self.drained: set[str] = set()

    def is_drained(self, url: str) -> bool:
        return url in self.drained

    def named(self, change: Change) -> Change:
        return change

    def added(self) -> set[str]:
        return set(self.urls)

    def do(self, change: Change) -> tuple[int, EngineChanged | LevelShown]:
        if self.fails:
            raise ZeroDivisionError("secret")
        if change.kind == "log_level":
            return 200, LevelShown("debug", "admin")
        if change.engine in self.missing:
            raise ConflictError("not here", "dns")
        source = change.fields.get("source")
        if source is not None and source not in self.urls:
            raise BadRequestError(f"{source} is no prefill engine")
        self.done.append((change.kind, change.engine))
        if change.kind == "add":
            result = "wanted" if change.engine in self.urls else "added"
            self.urls.add(change.engine)
            return 201, EngineChanged(result, "", None)
        self.urls.discard(change.engine)
        return 200, EngineChanged("removed", "", None)


def _add(url: str, **more: str) -> Change:
    return Change.of("add", url, more)


def _make(number: int, change: Change) -> Message:
    return Message(MAKE, number, body=encode_change(change))


def _followed(journal: ChangeJournal | None = None) -> tuple[FollowedChanges, list[Message], Any]:
    sent: list[Message] = []
    return FollowedChanges(sent.append, journal or ChangeJournal()), sent, Service()


def test_a_worker_that_starts_makes_each_change_once() -> None:
    """Those of the journal, those that are not decided, and those that have come meanwhile, in this
    order.
    """
    journal = ChangeJournal()
    for number, url in enumerate("abc", 1):
        journal.begin(number, _add(url))
    journal.accept(1, "a", {"added"})
    followed, sent, service = _followed(journal)
    journal.accept(2, "b", {"added"})  # in the parent, after the fork
    followed.received(_make(4, _add("d")))
    followed.received(Message(UNDO, 3))
    assert service.done == []
    followed.start(service, [], "info")
    assert service.done == [("add", "a"), ("add", "b"), ("add", "c"), ("add", "d"), ("remove", "c")]
    assert [(one.kind, one.number) for one in sent] == [(CHANGED, 4)]
    assert followed.shortcomings() == []


def test_engines_that_name_others_come_behind_them() -> None:
    """And one that can't come is named until it does."""
    journal = ChangeJournal()
    for number, change in enumerate((_add("d", source="p"), _add("p"), _add("x")), 1):
        journal.begin(number, change)
        journal.accept(number, change.engine, {"added"})
    followed, _, service = _followed(journal)
    service.missing = {"x"}
    followed.start(service, [], "info")
    assert service.done == [("add", "p"), ("add", "d")]
    assert followed.shortcomings() == ["x, which the admin API has added, can't be used: not here"]
    service.missing = set()
    followed.received(_make(4, _add("x")))
    assert followed.shortcomings() == []


@pytest.mark.parametrize(("level", "count"), [("info", 1), ("warning", 0)])
def test_a_log_level_of_the_settings_that_came_later_stays(level: str, count: int) -> None:
    journal = ChangeJournal()
    journal.begin(1, Change("log_level", "", LEVEL.body, instead_of="info"))
    journal.accept(1, "", {""})
    followed, _, service = _followed(journal)
    levels: list[Change] = []
    do = service.do
    service.do = lambda change: (levels.append(change), do(change))[1]  # type: ignore[func-returns-value]
    followed.start(service, [], level)
    assert len(levels) == count


def test_only_what_a_change_has_done_is_undone() -> None:
    """An engine that was there before stays, and so does one that was added again since."""
    followed, sent, service = _followed()
    followed.start(service, [], "info")
    for number, change in enumerate(
        (_add("a"), _add("a"), _add("b"), Change("remove", "b"), _add("b")), 1
    ):
        followed.received(_make(number, change))
    followed.received(Message(UNDO, 2))
    followed.received(Message(UNDO, 3))
    assert service.urls == {"a", "b"}
    followed.received(Message(UNDO, 5))
    assert service.urls == {"a"}
    assert len(sent) == 5
    followed.received(Message(UNDO, 99))


def test_an_engine_that_another_source_uses_again_is_not_drained() -> None:
    """The parent is told, with the last change that was made here. What an operator uses again is
    known by that change.
    """
    followed, sent, service = _followed()
    followed.start(service, [], "info")
    followed.received(_make(7, _add("a")))
    del sent[:]
    followed.notify(MemberChanged("a", "decode", "undrained", "admin"))
    followed.notify(MemberChanged("a", "decode", "added", "settings"))
    assert sent == []
    followed.notify(MemberChanged("a", "decode", "undrained", "settings"))
    service.drained.add("b")  # it has other settings, and is still drained
    followed.notify(MemberChanged("b", "decode", "replaced", "settings"))
    followed.notify(MemberChanged("c", "decode", "replaced", "settings"))
    assert [(one.kind, one.number, one.body) for one in sent] == [(GONE, 7, b"a"), (GONE, 7, b"c")]


def test_a_change_that_fails_is_answered() -> None:
    """With nothing of the cause: the others may have made it."""
    followed, sent, service = _followed()
    followed.start(service, [], "info")
    service.fails = True
    followed.received(_make(1, _add("a")))
    outcome = decode_outcome(sent[0].body)
    assert (outcome.status, outcome.message) == (500, "ZeroDivisionError")


async def test_a_parent_that_stands_still_is_waited_for_for_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(followed_changes, "PATIENCE", 0.05)
    followed, sent, _ = _followed()
    asked = await followed.ask(ADD)
    assert (asked.outcomes, asked.silent) == ({}, [])
    followed.received(Message(OUTCOME, 1, 0, encode_outcome(REFUSED)))
    assert [message.kind for message in sent] == [CHANGE]


def test_what_is_undone_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed_changes, "MAX_UNDO", 3)
    followed, _, service = _followed()
    followed.start(service, [], "info")
    for number in range(1, 10):
        followed.received(_make(number, _add(str(number))))
    assert len(followed._undo) == 3
    followed.received(Message(UNDO, 9))
    assert "9" not in service.urls
