"""Mooncake from the engine's side, without sockets: P's blocks under transfer ids, and what D asks
for. Pure.

Owns P's transfers and D's addresses of prefill workers. What is to be asked is in `outbox` as
commands; the driver carries them out and reports the results. The rules are those of vLLM 0.32.0
(`mooncake/mooncake_connector.py`):

- P keeps blocks only of a request that ended by length, under its `transfer_id`, until D has asked
  for them, or for `abort_request_timeout`. Without a `transfer_id` it keeps nothing. Its answers
  carry no `kv_transfer_params`.
- D may ask before P has the request: P's rank then waits, for `abort_request_timeout`. A request of
  P that ends otherwise is removed with its transfer: who waits for it goes on waiting, also if the
  same id is prefilled again.
- D needs all of `remote_engine_id`, `remote_bootstrap_addr` and `transfer_id`. Without one of them
  it moves nothing, and the request waits for ever; its blocks are never freed.
- A D request that is refused, or aborted before it was scheduled, asks for no blocks, which frees
  P's. If the first two keys are missing then, the core dies.
- A producer with `do_remote_prefill` and a consumer with `do_remote_decode` die.
- P handles twice `num_workers` questions at once, and one that waits for its prompt counts. All
  others queue behind them.
- P never compares tokens. With fewer blocks than D asks for the load fails; with more, D gets the
  last ones.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from pdproxy_lab.sim.active import ActiveRequest
from pdproxy_lab.sim.connector import Connector
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.memory import BlockPool, Page
from pdproxy_lab.sim.request import EngineDeadError
from pdproxy_lab.sim.stats import Stats

LONGER_THAN_PREFILL = 60.0
"""Seconds that D waits longer than P lets it wait."""


class Receive(msgspec.Struct, frozen=True):
    """Ask P for a transfer's last `blocks` blocks; 0: only free them. Answered by `Core.loaded` or
    `Core.load_failed`.
    """

    request_id: str
    transfer_id: str
    engine_id: str
    bootstrap: str
    blocks: int
    tokens: int


class Transfer(msgspec.Struct):
    """P's blocks for one `transfer_id`. `request_id` is empty until P's request has ended by
    length.
    """

    request_id: str = ""
    blocks: list[int] = []
    ready: bool = False
    expires: float = float("inf")
    sending: int = 0


Given = Callable[[tuple[Page, ...] | None], None]
"""Gets the pages that D asked for, None if they don't come."""


class _Ask(msgspec.Struct):
    """A D that waits for a transfer."""

    transfer_id: str
    transfer: Transfer
    blocks: int
    until: float
    given: Given


class Mooncake(Connector):
    """The connector of one engine."""

    lost_loads_kill = False

    def __init__(self, facts: SimFacts, pool: BlockPool, stats: Stats) -> None:
        super().__init__()
        self._facts, self._pool, self._stats = facts, pool, stats
        self.transfers: dict[str, Transfer] = {}
        """P's, by transfer id: those that D has asked for and P has not are here, too."""
        self._asks: dict[int, _Ask] = {}
        self._behind: deque[_Ask] = deque()
        """Questions for which no worker is free yet."""
        self._busy = 0
        self._numbers = itertools.count()
        self.workers: dict[str, str] = {}
        """D: the address of a prefill engine's worker by its engine id, once a bootstrap server has
        named it. Never forgotten.
        """

    # -- P

    def asked(self, transfer_id: str, blocks: int, now: float, given: Given) -> None:
        """A D asks for a transfer's last blocks (0: for none, which frees them). It is given them
        once they are there.
        """
        self._behind.append(_Ask(transfer_id, Transfer(), blocks, now, given))
        self._begin(now)

    def _begin(self, now: float) -> None:
        """Process the questions for which workers are free. One that waits for its prompt keeps its
        worker.
        """
        while self._behind and self._busy < 2 * self._facts.mooncake.num_workers:
            ask = self._behind.popleft()
            self._busy += 1
            ask.transfer = self.transfers.setdefault(ask.transfer_id, Transfer())
            ask.until = now + self._facts.mooncake.abort_request_timeout
            if ask.transfer.ready:
                self._give(ask, now)
            else:
                self._asks[next(self._numbers)] = ask

    def _refuse(self, ask: _Ask, now: float) -> None:
        self._busy -= 1
        ask.given(None)
        self._begin(now)

    def _give(self, ask: _Ask, now: float) -> None:
        found = ask.transfer.blocks
        if len(found) < ask.blocks:
            # "P num blocks less than D": they stay, until the lease ends or another D asks
            self._refuse(ask, now)
            return
        ask.transfer.sending += 1
        ask.given(tuple(self._pool.pages[block] for block in found[len(found) - ask.blocks :]))

    def sent(self, transfer_id: str, now: float, *, whole: bool) -> None:
        """A D has what it was given; `whole` False: it has not, the blocks stay."""
        self._busy -= 1
        self._end(transfer_id, whole=whole)
        self._begin(now)

    def _end(self, transfer_id: str, *, whole: bool) -> None:
        transfer = self.transfers.get(transfer_id)
        if transfer is None:
            return
        transfer.sending -= 1
        if whole:
            del self.transfers[transfer_id]
            self._pool.release(transfer.blocks)
        else:
            self._stats.failed_transfers += 1

    def ended(
        self, one: ActiveRequest, reason: str, now: float
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks of a prefill that ended by length; forget the transfer of one that ended
        otherwise.

        Raises:
            EngineDeadError: this engine is a consumer.
        """
        params = one.params
        if not params or not params.get("transfer_id") or params.get("do_remote_prefill"):
            return False, None
        if not params.get("do_remote_decode"):
            return False, None
        if self._facts.mooncake_role == "kv_consumer":
            raise EngineDeadError
        transfer_id = str(params["transfer_id"])
        if reason != "length":
            self.transfers.pop(transfer_id, None)
            return False, None
        # Only those that hold computed tokens: not the generated one's.
        blocks = one.blocks[: -(-one.computed // self._facts.block_size)]
        if not blocks:
            return False, None
        self._pool.release(one.blocks[len(blocks) :])
        self._pool.lend(blocks)
        transfer = self.transfers.get(transfer_id)
        # another request with this id has ended: vLLM's rank fails here, and the blocks are lost
        if transfer is None:
            return True, None
        transfer.request_id, transfer.blocks, transfer.ready = one.request.id, list(blocks), True
        transfer.expires = now + self._facts.mooncake.abort_request_timeout
        for number in [number for number, ask in self._asks.items() if ask.transfer is transfer]:
            self._give(self._asks.pop(number), now)
        return True, None

    # -- D

    def wanted(self, one: ActiveRequest) -> tuple[int, bool]:
        """Return how many tokens of a prompt should come from P, beyond those computed here.

        Raises:
            EngineDeadError: this engine is a producer.
        """
        if not one.params or not one.params.get("do_remote_prefill"):
            return 0, False
        if self._facts.mooncake_role == "kv_producer":
            raise EngineDeadError
        tokens = max(one.prompt - one.computed, 0)
        return tokens, tokens > 0

    def allocated(self, one: ActiveRequest, new_blocks: int, tokens: int) -> bool:
        """P: expect the transfer. D: ask for a scheduled request's KV. Return whether it can come
        at all.

        Raises:
            EngineDeadError: the engine's role is the other one.
        """
        params = one.params
        if not params:
            return True
        if params.get("do_remote_prefill"):
            if self._facts.mooncake_role == "kv_producer":
                raise EngineDeadError
            params["do_remote_prefill"] = False  # one transfer per request
            if not all(
                key in params
                for key in ("remote_engine_id", "remote_bootstrap_addr", "transfer_id")
            ):
                return False
            self.outbox.append(
                _receive(one.request.id, params, new_blocks if tokens else 0, tokens)
            )
        elif params.get("do_remote_decode"):
            if self._facts.mooncake_role == "kv_consumer":
                raise EngineDeadError
            if params.get("transfer_id"):
                self.transfers.setdefault(str(params["transfer_id"]), Transfer())
        return True

    def dropped(self, request_id: str, params: dict[str, Any] | None) -> None:
        """A request ended before it was scheduled, or was refused: ask P for no blocks, so that it
        frees them.

        Raises:
            EngineDeadError: this engine is a producer, or the params do not say where P is.
        """
        if not params or not params.get("transfer_id") or not params.get("do_remote_prefill"):
            return
        if self._facts.mooncake_role == "kv_producer":
            raise EngineDeadError
        if "remote_engine_id" not in params or "remote_bootstrap_addr" not in params:
            raise EngineDeadError
        params["do_remote_prefill"] = False
        self.outbox.append(_receive(request_id, params, 0, 0))

    def bootstrapped(self, engines: Mapping[str, str]) -> None:
        """A bootstrap server has answered with the addresses of workers by engine id."""
        self.workers |= engines

    # -- time

    def tick(self, now: float) -> None:
        """Free blocks for which no D has asked in time, and refuse those who have waited too
        long.
        """
        expired = [
            name for name, one in self.transfers.items() if one.expires <= now and not one.sending
        ]
        for name in expired:
            self._pool.release(self.transfers.pop(name).blocks)
            self._stats.kv_expired += 1
        for number in [number for number, ask in self._asks.items() if ask.until <= now]:
            self._refuse(self._asks.pop(number), now)

    def next_timer(self) -> float | None:
        """Return when a lease ends or a D has waited too long."""
        times = [one.expires for one in self.transfers.values() if one.ready and not one.sending]
        times += [ask.until for ask in self._asks.values()]
        return min(times, default=None)

    # -- for an operator

    def leases(self, now: float) -> dict[str, float]:
        """Return P's transfers whose blocks are there: transfer id to seconds left."""
        return {name: one.expires - now for name, one in self.transfers.items() if one.ready}

    def end_leases(self, now: float) -> int:
        """End the lease of every transfer now, also of those that D waits for; return how many
        there were.
        """
        ready = [one for one in self.transfers.values() if one.ready]
        for one in ready:
            self._pool.unlend(one.blocks)  # as `Nixl.end_leases`
            one.expires = now
        for ask in self._asks.values():
            ask.until = now
        self.tick(now)
        return len(ready)

    @property
    def waiting(self) -> int:
        """How many times a D waits for a transfer that is not ready, or for a free worker."""
        return len(self._asks) + len(self._behind)


def _receive(request_id: str, params: dict[str, Any], blocks: int, tokens: int) -> Receive:
    return Receive(
        request_id,
        str(params["transfer_id"]),
        str(params["remote_engine_id"]),
        str(params["remote_bootstrap_addr"]),
        blocks,
        tokens,
    )
