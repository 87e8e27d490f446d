"""What a request asks of admission, and of its key's limits, before engines work for it: a place,
and tokens.

What serves a request (`serving`) knows admission by this module alone. Who has a place, and who
waits, `deciding` decides.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

MOST_TOKENS = 2**20
"""Of a prompt: images in base64 are many bytes and few tokens. Also of what a prompt has besides
its bytes (a chat template's words, a video behind a URL), and of an answer without a limit.
"""
BYTES_PER_TOKEN = 4
"""Of a text. What it is exactly is known at the end."""


class RequestDemand(msgspec.Struct, frozen=True, array_like=True):
    """What a request asks for. `prompt`: tokens of all its prompts; `answers`: how many it wants, 0
    for a route without any.

    `limit`: the most tokens of one answer, None if it has none. `priority` as vLLM reads it: the
    smallest is the most urgent. `best_of`: answers that are generated for each one that it wants.
    `longest`: the most tokens that its prompts may have.
    """

    prompt: int = 1
    answers: int = 0
    limit: int | None = None
    priority: int = 0
    best_of: int = 1
    longest: int = MOST_TOKENS

    @property
    def most(self) -> int | None:
        """The most tokens that engines may generate for it, None if it has no limit."""
        if not self.answers:
            return 0
        return None if self.limit is None else max(self.limit, 0) * self.answers * self.best_of


NO_DEMAND = RequestDemand()


class AdmittedClient(Protocol):
    """Whose a request is. `name`: shares of places are those of names; `weight`: how much more of
    the places it may have than others, while all of them wait.
    """

    @property
    def name(self) -> bytes | str:
        """See the class."""

    @property
    def weight(self) -> float:
        """See the class."""


class Place(Protocol):
    """A request's place."""

    def leave(
        self,
        seconds: float = 0.0,
        prompt: int | None = None,
        completion: int | None = None,
        *,
        late: bool = False,
        answered: bool = True,
    ) -> None:
        """Release the place: a request that waits gets it, if there is one. Called once.

        `seconds`: for how long the place was taken. `prompt`, `completion`: the tokens that the
        request had, None where no engine has reported any. `late`: whether it missed a deadline.
        `answered`: whether it got a whole answer.
        """


class Admission(Protocol):
    """Gives places to requests. What is awaited may be cancelled: then no place is taken."""

    @property
    def inflight(self) -> int:
        """Requests that have a place."""

    @property
    def waiting(self) -> int:
        """Requests that wait for a place."""

    @property
    def closed(self) -> bool:
        """Whether new requests are refused because of a shutdown."""

    def configure(self) -> None:
        """Use the settings as they are now. Requests that have a place or wait for one keep what
        they have.
        """

    async def enter(
        self,
        client: AdmittedClient,
        demand: RequestDemand = NO_DEMAND,
        deadline: float | None = None,
    ) -> Place:
        """Take a place. Each success is matched by one `Place.leave`. `deadline`: when the client
        wants its answer at the latest, in monotonic seconds.

        Raises:
            OverloadedError: shutting down, the queue is full, no place came free in time, or the
                deadline can't be met.
            LimitError: the queue is full, and the client has the most requests in it.
        """

    def over_share(self, client: AdmittedClient) -> bool:
        """Return whether a client, which reads an answer too slowly, is to lose it now: it has more
        places than its share, while others wait for one.
        """

    async def close(self) -> None:
        """Refuse new requests and those that wait, and return when no request is left."""


class Use(Protocol):
    """One request's use of its key's limits. Ended by one call of `end`."""

    async def reserve(self, prompt: int, most: int | None, answers: int = 1) -> None:
        """Reserve the tokens of a prompt, and the most that may be generated for its answers; None:
        they have no limit.

        Raises:
            LimitError: the key's minute has fewer tokens left.
        """

    def spend(self, tokens: int) -> None:
        """Charge tokens now, of a request without an end in sight.

        Raises:
            LimitError: the key's minute has none left.
        """

    def end(self, tokens: int, unseen: float = 0.0, seen: int = 0) -> None:
        """End the use. `tokens`: those that the request has used, as far as they were seen.

        `unseen`: the part of its answers that nobody has seen to the end. The most that may have
        been generated for these counts, and not the tokens that were `seen` of these.
        """

    def add(self, tokens: int) -> None:
        """Charge tokens that became known behind the end."""


class Quotas(Protocol):
    """The limits of keys."""

    async def enter(self, key: str) -> Use | None:
        """Begin a request of a key; None if the key has no limits.

        Raises:
            LimitError: it is over one of them.
        """
