"""The `CPUConnector` of vLLM's pull request 18332 (contract `cpu`): P pushes into D's memory on the
host. Pure.

Owns what P has sent and D's buffer. The rules are those of its `cpu_connector.py` and
`nixl_cpu_utils.py`:

- P pushes the KV of each step of each request to the one address in its own configuration, whatever
  the request says. Its answer is `{prefill_request_id}`. P keeps no blocks; if its buffer is full,
  or D never listened, its whole engine waits.
- D takes pushes only in its steps: not while it has no request at all. Parts are placed in the
  order in which they came.
- D loads whole blocks, once as many tokens are here as the prompt has. It finds its own request by
  P's id: both must have the same id. An id that never comes, or comes twice, is awaited for ever.
- What D loads is freed. Anything else stays until D ends: KV of a request that never came, of a
  prompt under a block or found in D's prefix cache, of a prefill that was aborted or made more than
  one token.
- A part that is larger than the whole buffer kills D.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from pdproxy_lab.sim.active import ActiveRequest
from pdproxy_lab.sim.connector import Connector
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.memory import EMPTY, BlockPool, Page
from pdproxy_lab.sim.request import EngineDeadError

_SUFFIX = re.compile(r"-[0-9a-f]{8}\Z")


def base_id(request_id: str) -> str:
    """Return the id that a request had in the vLLM of the pull request: without the random suffix
    of later versions.
    """
    return _SUFFIX.sub("", request_id)


class KvPart(msgspec.Struct, frozen=True):
    """KV of the tokens `start` to `stop` of a prompt that has `total` tokens. `size` is in
    bytes.
    """

    request: str
    start: int
    stop: int
    total: int
    pages: tuple[Page, ...]
    size: int


class FindReceiver(msgspec.Struct, frozen=True):
    """Ask for the engine's id at the configured address, until one listens. The answer goes to
    `CpuConnector.found`.
    """


class SendPart(msgspec.Struct, frozen=True):
    """Send a part to the engine of the handshake, once D has space. The result goes to
    `CpuConnector.sent`.
    """

    engine_id: str
    part: KvPart


class Received(msgspec.Struct, frozen=True):
    """All KV of a waiting request of D is here: `Core.received` takes it."""

    request_id: str
    pages: tuple[Page, ...]
    tokens: int


class _Pushed(msgspec.Struct):
    """What D has of one prefill. `over`: it was reported to a request that had left, and will not
    be reported again.
    """

    total: int
    tokens: int = 0
    size: int = 0
    pages: dict[int, Page] = {}
    over: bool = False


class CpuConnector(Connector):
    """The connector of one engine, P or D by its role."""

    keeps_aborted_loads = False

    def __init__(self, facts: SimFacts, pool: BlockPool) -> None:
        super().__init__()
        self._facts, self._pool = facts, pool
        self._capacity = facts.cpu.bytes
        self._produces = (
            facts.kv_role or ("kv_consumer" if facts.role == "decode" else "kv_producer")
        ) != "kv_consumer"
        self._receiver: str | None = None
        self._finding: list[KvPart] = []
        self._saved: dict[str, int] = {}
        self.sending = 0
        """P: bytes that are not sent yet, or can't be sent any more."""
        self._offers: deque[tuple[KvPart, Callable[[], None]]] = deque()
        self.pushed: dict[str, _Pushed] = {}
        """D: what has come and was not loaded, by P's request id."""
        self._waiting: dict[str, tuple[str, int, int]] = {}
        self._asked: set[str] = set()

    @property
    def blocked(self) -> bool:
        """Whether P's rank waits for D to listen, or for space in its own buffer."""
        return bool(self._finding) or self.sending > self._capacity

    # -- P

    def stepped(self, one: ActiveRequest, *, first: bool, now: float) -> None:
        """Push what the step has computed; with the first one also what was in the prefix cache."""
        if not self._produces:
            return
        start, size = self._saved.get(one.request.id, 0), self._pool.block_size
        blocks = one.blocks[start // size : -(-one.computed // size)]
        part = KvPart(
            base_id(one.request.id),
            start,
            one.computed,
            one.prompt,
            tuple(self._pool.pages[block] for block in blocks),
            (one.computed - start) * self._facts.hardware.kv_bytes_per_token,
        )
        self._saved[one.request.id] = one.computed
        self.sending += part.size
        if self._receiver is not None:
            self.outbox.append(SendPart(self._receiver, part))
            return
        if not self._finding:
            self.outbox.append(FindReceiver())
        self._finding.append(part)

    def ended(
        self, one: ActiveRequest, reason: str, now: float
    ) -> tuple[bool, dict[str, Any] | None]:
        """P names the request, whatever its parameters are. No blocks are kept."""
        self._saved.pop(one.request.id, None)
        self._waiting.pop(base_id(one.request.id), None)
        return False, {"prefill_request_id": base_id(one.request.id)} if self._produces else None

    def found(self, engine_id: str) -> None:
        """D listens: send it what has waited for it."""
        self._receiver = engine_id
        self.outbox.extend(SendPart(engine_id, part) for part in self._finding)
        self._finding.clear()

    def sent(self, part: KvPart, *, whole: bool) -> None:
        """Take the result of a transfer. After a failed one nothing is freed: the task is asked for
        its state for ever.
        """
        if whole:
            self.sending -= part.size

    # -- D

    def offer(self, part: KvPart, taken: Callable[[], None]) -> None:
        """Queue a part that P wants to send. It waits for a step with space; then `taken` is
        called.
        """
        self._offers.append((part, taken))

    @property
    def held(self) -> int:
        """D: bytes of its buffer that are in use."""
        return sum(one.size for one in self.pushed.values())

    def flush(self) -> None:
        """Take the parts for which there is space, in their order.

        Raises:
            EngineDeadError: a part can never fit.
        """
        while self._offers:
            part, taken = self._offers[0]
            if part.size > self._capacity:
                raise EngineDeadError
            if self.held + part.size > self._capacity:
                return
            self._offers.popleft()
            self._place(part)
            taken()

    def _place(self, part: KvPart) -> None:
        pushed = self.pushed.setdefault(part.request, _Pushed(part.total, pages={}))
        pushed.tokens += part.stop - part.start
        pushed.size += part.size
        first = part.start // self._pool.block_size
        pushed.pages |= {first + number: page for number, page in enumerate(part.pages)}
        self._look(part.request)

    def wanted(self, one: ActiveRequest) -> tuple[int, bool]:
        """Return how many tokens in whole blocks should come: those of the id that the request
        names.
        """
        if self._produces:
            return 0, False
        size = self._pool.block_size
        extra = one.prompt // size * size - one.computed
        if extra < size or not one.params or "prefill_request_id" not in one.params:
            return 0, False
        name = base_id(one.request.id)
        if one.params["prefill_request_id"] == name:
            self._waiting[name] = (one.request.id, one.computed // size, extra // size)
            self._asked.add(name)
        return extra, True

    def allocated(self, one: ActiveRequest, new_blocks: int, tokens: int) -> bool:
        """Look whether everything is here already."""
        self._look(base_id(one.request.id))
        return True

    def dropped(self, request_id: str, params: dict[str, Any] | None) -> None:
        """A request ended before it was scheduled."""
        self._waiting.pop(base_id(request_id), None)

    def arrived(self, request_id: str) -> None:
        """A request no longer waits. If what it waits for comes later, it is reported to nobody,
        and stays.
        """
        self._waiting.pop(base_id(request_id), None)

    def _look(self, name: str) -> None:
        pushed = self.pushed.get(name)
        if pushed is None or pushed.over or pushed.tokens != pushed.total:
            return
        waiting = self._waiting.pop(name, None)
        if waiting is None:
            pushed.over = name in self._asked
            return
        request_id, first, count = waiting
        pages = tuple(pushed.pages.get(number, EMPTY) for number in range(first, first + count))
        del self.pushed[name]
        self.outbox.append(Received(request_id, pages, count * self._pool.block_size))
