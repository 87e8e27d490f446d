"""NIXL (pull) from the engine's side, without sockets: handles and leases of P; handshakes, pulls
and notices of D. Pure.

Owns the handles and what is known of other engines. What is to be sent is in `outbox` as commands;
the driver carries them out and reports the results. The rules, and the cases in which the real
connector kills its core or reports nothing, are those of vLLM 0.32.0.

With `bidirectional_kv_xfer`, D keeps a finished request's blocks, too, and P pulls them for the
conversation's next turn. P compares no tokens, and D no readers: what the blocks hold when they are
read is what P computes with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from pdproxy_lab.sim import since
from pdproxy_lab.sim.active import ActiveRequest
from pdproxy_lab.sim.connector import Connector
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.memory import BlockPool
from pdproxy_lab.sim.notifier import Notifier
from pdproxy_lab.sim.request import EngineDeadError
from pdproxy_lab.sim.stats import Stats

EXPIRY_MARGIN = 5.0
"""P pulls no blocks of D that are freed in so many seconds (`_KV_BLOCKS_EXPIRY_SAFETY_MARGIN`)."""
_KEYS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


class SideChannelPeer(msgspec.Struct, frozen=True):
    """Another engine's side channel."""

    host: str
    port: int
    engine_id: str


class Greeting(msgspec.Struct, frozen=True):
    """The answer to a handshake."""

    engine_id: str
    agent: str = ""
    """Another one in each run of an engine, also where `engine_id` is fixed: what is known of a run
    is of no use for the next.
    """
    mode: str = "pull"
    """Part of vLLM's compatibility hash: engines that pull and engines that push refuse each
    other.
    """


class Handshake(msgspec.Struct, frozen=True):
    """Ask which engine listens there. The answer goes to `Core.handshaken`."""

    peer: SideChannelPeer
    tp_size: int = 1
    pp_size: int = 1
    """How many workers the peer has, in its own words or in the request's: one that does not exist
    kills the peer's listener.
    """


class Pull(msgspec.Struct, frozen=True):
    """Read pages of a peer's memory. The result goes to `Core.loaded`, which releases them at P, or
    `Core.load_failed`.
    """

    request_id: str
    peer: SideChannelPeer
    remote_request_id: str
    blocks: tuple[int, ...]
    tokens: int
    expires: float | None = None
    """When the peer frees them, if its handle states it. The peer's clock is this engine's: both
    are on one machine.
    """


class PeerNotice(msgspec.Struct, frozen=True):
    """Tell a peer that requests' KV is no longer needed (`release`) or still needed
    (`heartbeat`).
    """

    peer: SideChannelPeer
    kind: str
    request_ids: tuple[str, ...]


Command = Handshake | Pull | PeerNotice


class _Held(msgspec.Struct):
    blocks: list[int]
    expires: float
    by_decode: bool = False


def _lacks_keys(params: dict[str, Any]) -> bool:
    return not all(key in params for key in _KEYS)


def peer_of(params: dict[str, Any]) -> SideChannelPeer | None:
    """Return where a handle's KV is; None if keys are missing."""
    if _lacks_keys(params):
        return None
    return SideChannelPeer(
        str(params["remote_host"]), int(params["remote_port"] or 0), str(params["remote_engine_id"])
    )


class Nixl(Connector):
    """The connector of one engine."""

    mode = "pull"
    """vLLM's `transfer_mode`."""

    def __init__(
        self, facts: SimFacts, engine_id: str, side_channel_port: int, pool: BlockPool, stats: Stats
    ) -> None:
        super().__init__()
        self._facts, self._pool, self._stats = facts, pool, stats
        self._engine_id, self._port = engine_id, side_channel_port
        self.pulls_in_step = self.mode == "pull"
        self.held: dict[str, _Held] = {}
        """Handles by request id, with their blocks and when the lease ends. D's have no heartbeat
        that renews them.
        """
        self._known: set[SideChannelPeer] = set()
        self._handshakes: dict[SideChannelPeer, list[Pull | PeerNotice]] = {}
        self._after_handshake: deque[Command] = deque()
        self._heartbeats: dict[str, tuple[SideChannelPeer, str]] = {}
        self._last_heartbeat = 0.0
        self._deaf = False
        self._hands_back = facts.bidirectional_kv_xfer and self.mode == "pull"
        self._notifier = Notifier(facts, engine_id, self.outbox)

    @property
    def contacted(self) -> frozenset[str] | None:
        """See `Connector`. Where prefill engines push, they make the handshakes."""
        return frozenset(peer.engine_id for peer in self._known) if self.mode == "pull" else None

    # -- requests that end with blocks that wait for another engine

    def ended(
        self, one: ActiveRequest, reason: str, now: float
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks of a prefill for D, and, if transfers go both ways, those of a finished
        answer for P.
        """
        if not one.params:
            return False, None
        of_decode = not one.params.get("do_remote_decode")
        if of_decode and not self._hands_back:
            return False, None
        if reason not in ("length", "stop"):
            if not of_decode:
                self._notifier.prefill_failed(one, reason)
            return False, None
        # The KV of the token just generated was not computed: it is not part of the handle.
        if of_decode:
            handle = self._keep_for_prefill(one, now)
            self._notifier.kept(one, handle, now)
            return True, handle
        handle = self.finished(one.request.id, one.blocks, one.computed, now)
        if len(one.generated) == 1:  # vLLM adds it to the output with the prefill's statistics
            handle["remote_prefill_cached_tokens"] = one.local + one.external
        self._notifier.ready(one, handle, now)
        return True, handle

    def finished(
        self, request_id: str, blocks: Sequence[int], length: int, now: float
    ) -> dict[str, Any]:
        """Keep a prefilled request's blocks for its lease and return its handle."""
        self.held[request_id] = _Held(list(blocks), now + self._facts.kv_lease_duration)
        self._pool.lend(blocks)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(blocks)],
            "remote_engine_id": self._engine_id,
            "remote_request_id": request_id,
            "remote_host": self._facts.side_channel_host,
            "remote_port": self._port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": length,
            "remote_blocks_expiry_time": None,
            **since.registration(self._facts.version),
            "transfer_mode": self.mode,
        }

    def _keep_for_prefill(self, one: ActiveRequest, now: float) -> dict[str, Any]:
        expires = now + self._facts.decoder_kv_blocks_ttl
        handle = self.finished(one.request.id, one.blocks, one.computed, now)
        self.held[one.request.id] = _Held(list(one.blocks), expires, by_decode=True)
        directions = {"do_remote_prefill": False, "do_remote_decode": True}
        return handle | directions | {"remote_blocks_expiry_time": expires}

    def greet(self, agent: str, tp_size: int, pp_size: int) -> Greeting | None:
        """Answer a handshake with all workers of this engine; None: nobody answers.

        vLLM's listener dies of a worker that does not exist (KeyError in its thread), and then
        answers nobody any more. Without workers, vLLM fails before it asks.
        """
        if min(tp_size, pp_size) < 1:
            return Greeting("")
        self._deaf |= tp_size > self._facts.tensor_parallel_size or pp_size > 1
        return None if self._deaf else Greeting(self._engine_id, agent, self.mode)

    def notified(self, kind: str, request_ids: Iterable[str], now: float) -> None:
        """Handle a notice of another engine."""
        for request_id in request_ids:
            held = self.held.get(request_id)
            if held is None:
                self._stats.late_notifications += kind == "release"
            elif kind == "release":
                self._pool.release(held.blocks)
                del self.held[request_id]
                self._notifier.ended("released", request_id, now, by_decode=held.by_decode)
            else:  # vLLM's `_lease_extension`
                held.expires = max(held.expires, now + self._facts.kv_lease_duration * 2 / 3)

    def expire(self, now: float) -> None:
        """Free the blocks whose lease has ended."""
        for request_id in [name for name, held in self.held.items() if held.expires <= now]:
            held = self.held.pop(request_id)
            self._pool.release(held.blocks)
            self._stats.kv_expired += 1
            self._notifier.ended("expired", request_id, now, by_decode=held.by_decode)

    def next_expiry(self) -> float | None:
        """Return when the next lease ends."""
        return min((held.expires for held in self.held.values()), default=None)

    # -- requests whose KV comes from another engine

    def wanted(self, one: ActiveRequest) -> tuple[int, bool]:
        """Return how many tokens of a prompt should come from another engine, beyond those computed
        here.

        P counts a handle of D whether or not it is set up to pull, as vLLM does.
        """
        params = one.params or {}
        if params.get("do_remote_prefill") and (tokens := max(one.prompt - one.computed, 0)):
            return tokens, True
        of_decode = params.get("do_remote_decode") and self.mode == "pull"
        if not of_decode or not params.get("remote_block_ids") or _lacks_keys(params):
            return 0, False
        tokens = min(params.get("remote_num_tokens") or 0, one.prompt) - one.computed
        return (
            (tokens, True)
            if tokens > 0 and tokens >= self._facts.kv_recompute_threshold
            else (0, False)
        )

    def allocated(self, one: ActiveRequest, new_blocks: int, tokens: int) -> bool:
        """Ask for a scheduled request's KV. Return whether it can come.

        If not, the request waits forever: keys of P's handle are missing, or P is given one of D
        and is not set up for it.

        Raises:
            EngineDeadError: more blocks are needed than the handle has.
        """
        request_id, params = one.request.id, one.params
        if not params:
            return True
        of_decode = not params.get("do_remote_prefill")
        if of_decode and (not params.get("do_remote_decode") or not self._hands_back):
            return not tokens
        params["do_remote_prefill"] = False  # one transfer per request
        groups = params.get("remote_block_ids")
        if not groups:
            if tokens:
                raise EngineDeadError
            return True
        peer = peer_of(params)
        if peer is None:
            return not tokens
        remote = [int(block) for block in groups[0]]
        if new_blocks > len(remote):
            raise EngineDeadError
        if not of_decode:
            self._notifier.pulling(one, params, tokens)
        if tokens:
            # blocks are paired from the end, whatever they hold
            blocks = tuple(remote[len(remote) - new_blocks :])
            expires = params.get("remote_blocks_expiry_time")
            self._contact(
                peer,
                Pull(request_id, peer, str(params["remote_request_id"]), blocks, tokens, expires),
            )
        else:  # all of it is here, or too little is there: the other engine can free it at once
            self._contact(peer, PeerNotice(peer, "release", (str(params["remote_request_id"]),)))
        return True

    def declines(self, pull: Pull, now: float) -> bool:
        """Return whether the pages are too close to their end, or past it, to be read."""
        late = pull.expires is not None and now + EXPIRY_MARGIN >= pull.expires
        self._stats.kv_expired += late
        return late

    def queued(self, one: ActiveRequest) -> None:
        """Renew P's lease as long as D's scheduler has the request and no KV."""
        request_id, params = one.request.id, one.params
        if not params or not params.get("do_remote_prefill"):
            return
        peer = peer_of(params)
        if peer is not None and all(params.get(key) is not None for key in (*_KEYS, "tp_size")):
            self._heartbeats[request_id] = (peer, str(params["remote_request_id"]))

    def arrived(self, request_id: str) -> None:
        """Stop the heartbeat: the KV is here, or is no longer needed."""
        self._heartbeats.pop(request_id, None)

    def dropped(self, request_id: str, params: dict[str, Any] | None) -> None:
        """Release P's blocks: a request ended before it was scheduled, or was refused.

        Raises:
            EngineDeadError: keys of the handle are missing.
        """
        self.arrived(request_id)
        if not params or not params.get("do_remote_prefill"):
            return
        params["do_remote_prefill"] = False
        peer = peer_of(params)
        if peer is None or "remote_block_ids" not in params:
            raise EngineDeadError
        self._contact(peer, PeerNotice(peer, "release", (str(params["remote_request_id"]),)))

    def send_heartbeats(self, now: float) -> None:
        """Send heartbeats if they are due."""
        if not self._heartbeats or now - self._last_heartbeat < self._facts.heartbeat_interval:
            return
        self._last_heartbeat = now
        peers: dict[SideChannelPeer, list[str]] = {}
        for peer, remote_id in self._heartbeats.values():
            if peer in self._known:
                peers.setdefault(peer, []).append(remote_id)
        self.outbox.extend(PeerNotice(peer, "heartbeat", tuple(ids)) for peer, ids in peers.items())

    def next_heartbeat(self) -> float | None:
        """Return when the next heartbeat is due; None: no request waits for KV."""
        return self._last_heartbeat + self._facts.heartbeat_interval if self._heartbeats else None

    def loaded(self, pull: Pull) -> None:
        """The pages are here: P may free them."""
        self.outbox.append(PeerNotice(pull.peer, "release", (pull.remote_request_id,)))
        self._notifier.pulled("loaded", pull.request_id)

    def failed(self, request_id: str) -> None:
        """The pages can't come."""
        self._notifier.pulled("failed", request_id)

    def tick(self, now: float) -> None:
        """Free what has expired, and renew the leases that are still needed."""
        self.expire(now)
        self.send_heartbeats(now)

    def next_timer(self) -> float | None:
        """Return when a lease ends or a heartbeat is due."""
        times = [time for time in (self.next_expiry(), self.next_heartbeat()) if time is not None]
        return min(times, default=None)

    def leases(self, now: float) -> dict[str, float]:
        """Return P's handles that have not ended: request id to seconds left of the lease."""
        return {request_id: one.expires - now for request_id, one in self.held.items()}

    def end_leases(self, now: float) -> int:
        """End the lease of every handle now; return how many there were.

        No real engine does so before the time, so no proxy can know of it: the blocks keep their
        content.
        """
        count = len(self.held)
        for one in self.held.values():
            self._pool.unlend(one.blocks)
            one.expires = now
        self.expire(now)
        return count

    def flush(self) -> None:
        """Send what has waited for a handshake: vLLM does so in a step, and an idle engine has no
        steps.
        """
        self.outbox.extend(self._after_handshake)
        self._after_handshake.clear()

    def handshaken(self, peer: SideChannelPeer, found: Greeting | None) -> list[str]:
        """Take the answer to a handshake; None: no engine answered. Return the requests whose KV
        can't come.
        """
        waiting = self._handshakes.pop(peer, [])
        if found is not None and (found.engine_id, found.mode) == (peer.engine_id, self.mode):
            self._known.add(peer)
            self._after_handshake.extend(waiting)
            return []
        self._stats.failed_transfers += 1  # once, whatever waits for it
        self._stats.failed_notifications += sum(
            isinstance(command, PeerNotice) for command in waiting
        )
        return [command.request_id for command in waiting if isinstance(command, Pull)]

    @property
    def waits_for_step(self) -> bool:
        """Whether something would be sent by a step."""
        return bool(self._after_handshake)

    def _contact(self, peer: SideChannelPeer, command: Pull | PeerNotice) -> None:
        if peer in self._known:
            self.outbox.append(command)
        elif peer in self._handshakes:
            self._handshakes[peer].append(command)
        else:
            self._handshakes[peer] = [command]
            self.outbox.append(Handshake(peer))
