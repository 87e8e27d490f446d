"""What a worker leaves to the others: the parent hands its records to one of them, until one has
taken them.

Owns the records that nobody has taken yet. A worker that takes records and is killed before it has
said so leaves them again, and perhaps twice: then they are handed on once.
"""

from __future__ import annotations

import msgspec

from pdproxy.workers.links import Message
from pdproxy.workers.records import SharedRecords
from pdproxy.workers.supervisor import Supervisor, WorkerProcess

ADOPT, ADOPTED = "adopt", "adopted"
"""What the parent sends: records (`number`: of the batch, `body`: all of them), and what a worker
answers once it has them.
"""
BATCH = 8 << 20
"""Bytes of records in a message."""

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(list[bytes]).decode


class Heirs:
    """Hands the records of dead workers to others. `records`: where they leave them."""

    def __init__(self, supervisor: Supervisor, *records: SharedRecords) -> None:
        self._supervisor = supervisor
        self._records = records
        self._left: list[bytes] = []
        self._given: dict[int, tuple[int, list[bytes]]] = {}
        """By the batch's number: the worker that has it, and the records."""
        self._last = 0

    def __repr__(self) -> str:
        return f"<Heirs: {len(self._left)} records left>"

    def died(self, number: int) -> None:
        """Take what a worker has left, and hand it on."""
        left = [record for records in self._records for record in records.taken(number)]
        for batch, (worker, records) in list(self._given.items()):
            if worker == number:
                left += records
                del self._given[batch]
        self._left += dict.fromkeys(left)
        self.hand_on()

    def hand_on(self) -> None:
        """Give what is left to a worker that serves. Without one it waits for this to be called
        again.
        """
        while self._left:
            heir = min(
                (one for one in self._supervisor.workers if one.ready and not one.is_for_all),
                key=self._has,
                default=None,
            )
            if heir is None:
                return
            batch, size = list[bytes](), 0
            while self._left and size < BATCH:
                batch.append(self._left.pop())
                size += len(batch[-1])
            self._last += 1
            self._given[self._last] = heir.number, batch
            self._supervisor.send(heir, Message(ADOPT, self._last, body=encode(batch)))

    def _has(self, worker: WorkerProcess) -> int:
        return sum(
            len(records) for number, records in self._given.values() if number == worker.number
        )

    def adopted(self, worker: WorkerProcess, message: Message) -> None:
        """A worker has taken a batch."""
        given = self._given.get(message.number)
        if given is not None and given[0] == worker.number:
            del self._given[message.number]
