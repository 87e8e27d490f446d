"""Processes that tell each other something, without processes: messages in order."""

from __future__ import annotations

from collections.abc import Callable

from pdproxy.kit.leading import ALWAYS, NEVER, Lead


class Bus:
    """What so many processes share. The first one leads. `sent`: how many messages there were."""

    def __init__(self, count: int) -> None:
        self.leads: list[Lead] = [ALWAYS, *[NEVER] * (count - 1)]
        self.receivers: list[Callable[[bytes], None] | None] = [None] * count
        self.sent = 0
        self._messages: list[tuple[int, bytes]] = []

    def tell(self, number: int) -> Callable[[bytes], None]:
        """What a process tells the others with."""
        return lambda body: self._messages.append((number, body))

    def pass_on(self) -> None:
        """Deliver all messages, and those that they cause."""
        while self._messages:
            sender, body = self._messages.pop(0)
            self.sent += 1
            for number, received in enumerate(self.receivers):
                if number != sender and received is not None:
                    received(body)
