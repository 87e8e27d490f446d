"""What a dead worker leaves is handed to one that serves, and on if that dies as well."""

from __future__ import annotations

from pdproxy.workers import heirs
from pdproxy.workers.heirs import ADOPT, ADOPTED, Heirs, decode
from pdproxy.workers.links import Message
from pdproxy.workers.records import SharedRecords
from pdproxy.workers.supervisor import WorkerProcess


class Parent:
    """A supervisor without processes."""

    def __init__(self, count: int) -> None:
        self.workers = [
            WorkerProcess(number, pid=100 + number, ready=True) for number in range(count)
        ]
        self.sent: list[tuple[int, int, list[bytes]]] = []
        self.records = SharedRecords(count, 64)
        self.heirs = Heirs(self, self.records)  # type: ignore[arg-type]

    def send(self, worker: WorkerProcess, message: Message) -> None:
        assert message.kind == ADOPT
        self.sent.append((worker.number, message.number, decode(message.body)))

    def died(self, number: int) -> None:
        self.workers[number].ready = False
        self.heirs.died(number)

    def adopted(self, number: int, batch: int) -> None:
        self.heirs.adopted(self.workers[number], Message(ADOPTED, batch))


def test_records_go_to_one_that_serves() -> None:
    parent = Parent(3)
    for record in (b"a", b"b"):
        parent.records.area(1).put(record)
        parent.died(1)
        assert parent.sent.pop()[2] == [record]
    parent.died(1)
    assert not parent.sent


def test_without_a_worker_they_wait() -> None:
    parent = Parent(2)
    parent.died(1)
    parent.records.area(0).put(b"a")
    parent.died(0)
    assert not parent.sent
    parent.workers[1].ready = True
    parent.heirs.hand_on()
    assert parent.sent == [(1, 1, [b"a"])]
    parent.adopted(1, 1)
    parent.heirs.hand_on()
    assert len(parent.sent) == 1
    assert repr(parent.heirs) == "<Heirs: 0 records left>"


def test_the_process_that_works_for_all_is_no_heir() -> None:
    parent = Parent(3)
    parent.workers[0].is_for_all = True
    parent.records.area(1).put(b"a")
    parent.died(1)
    assert parent.sent == [(2, 1, [b"a"])]


def test_an_heir_that_dies_leaves_them_once() -> None:
    """Whether or not it had taken them: what it had taken is also among its own."""
    parent = Parent(3)
    parent.records.area(0).put(b"a")
    parent.died(0)
    (heir, batch, _) = parent.sent.pop()
    parent.records.area(heir).put(b"a")
    parent.died(heir)
    assert [records for _, _, records in parent.sent] == [[b"a"]]
    parent.adopted(heir, batch)  # too late
    (last, batch, _) = parent.sent.pop()
    parent.adopted(last, batch)
    parent.died(last)
    assert not parent.sent


def test_what_an_heir_had_not_taken_is_handed_on() -> None:
    """It died before it had read what it was sent: nothing of that is among its own."""
    parent = Parent(3)
    parent.records.area(0).put(b"a")
    parent.died(0)
    (heir, _, _) = parent.sent.pop()
    parent.died(heir)
    assert [(number != heir, records) for number, _, records in parent.sent] == [(True, [b"a"])]


def test_many_records_are_sent_in_parts() -> None:
    parent = Parent(2)
    area = parent.records.area(0)
    for number in range(8):
        area.put(bytes([number]) * 2000)
    before, heirs.BATCH = heirs.BATCH, 4000
    try:
        parent.died(0)
    finally:
        heirs.BATCH = before
    assert [len(records) for _, _, records in parent.sent] == [2, 2, 2, 2]
    assert sorted(record[0] for _, _, records in parent.sent for record in records) == list(
        range(8)
    )
