"""Workers that tell each other something, without processes: a lead, and messages in order."""

from __future__ import annotations

from collections.abc import Callable

from pdproxy.kit import leading
from pdproxy.kit.leading import Leading
from pdproxy.kit.shared_table import SharedTable


class Bus:
    """What so many workers share. The first one leads until it `ends`. `sent`: how many messages
    there were.
    """

    def __init__(self, count: int) -> None:
        self.table = SharedTable(count, 1, leading.MEASURES)
        self.time = 10**12
        self.leads = [self._lead(number) for number in range(count)]
        self.receivers: list[Callable[[bytes], None] | None] = [None] * count
        self.sent = 0
        self._messages: list[tuple[int, bytes]] = []

    def _lead(self, number: int) -> Leading:
        return Leading(
            number, self.table.column(number), self.table.others(number), lambda: self.time
        )

    def beat(self) -> None:
        """All show that they are alive, and look who leads."""
        self.time += 10**6
        for lead in self.leads:
            lead.beat()

    def ends(self, number: int) -> None:
        """A worker ends: the others look who leads."""
        self.leads[number].leave()
        self.receivers[number] = None
        self.beat()

    def tell(self, number: int) -> Callable[[bytes], None]:
        """What a worker tells the others with."""
        return lambda body: self._messages.append((number, body))

    def pass_on(self) -> None:
        """Deliver all messages, and those that they cause."""
        while self._messages:
            sender, body = self._messages.pop(0)
            self.sent += 1
            for number, received in enumerate(self.receivers):
                if number != sender and received is not None:
                    received(body)
