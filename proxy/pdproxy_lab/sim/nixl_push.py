"""NIXL (push) from the engine's side, without sockets: P writes its KV into blocks that D has
registered. Pure.

D registers the blocks of a scheduled request at P and waits. P writes a finished prompt's KV into
the blocks of a registration whose request id is the same but for the random digits, and is free
when the write is done. Nothing else ends the wait of a registered D: its watchdog
(`push_registration_timeout`) only logs, an abort keeps the blocks until the push comes, a failed
write is not repeated. The rules are those of vLLM 0.32.0 (`nixl/push_scheduler.py`,
`push_worker.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from pdproxy_lab.sim.active import ActiveRequest
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.memory import BlockPool
from pdproxy_lab.sim.nixl import (
    Greeting,
    Handshake,
    Nixl,
    PeerNotice,
    SideChannelPeer,
    _Held,
    peer_of,
)
from pdproxy_lab.sim.request import EngineDeadError
from pdproxy_lab.sim.stats import Stats

_KEYS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size")
_SUFFIX = re.compile(r"-[0-9a-f]{8}$", re.IGNORECASE)
_Found = TypeVar("_Found")


class PushRegistration(msgspec.Struct, frozen=True):
    """What D sends to P: the blocks that wait for a prompt's KV, and where they are."""

    request_id: str
    """D's internal id."""
    host: str
    port: int
    engine_id: str
    tp_size: int
    """D's ranks."""
    blocks: tuple[int, ...]


class Register(msgspec.Struct, frozen=True):
    """Send a registration to P. There is no answer."""

    request_id: str
    peer: SideChannelPeer
    registration: PushRegistration
    agent: str = ""
    """The run of the peer that was met."""
    reached: int = 0
    """How many of its workers get it: those that were met."""


class Push(msgspec.Struct, frozen=True):
    """Write blocks into those of a peer, which is then told the id of its request. The result goes
    to `NixlPush.pushed`.
    """

    request_id: str
    """P's own."""
    peer: SideChannelPeer
    blocks: tuple[int, ...]
    remote_request_id: str
    remote_blocks: tuple[int, ...]
    agent: str = ""


class ExpectedPush(msgspec.Struct, frozen=True):
    """A request of D that waits for a push."""

    request_id: str
    tokens: int
    since: float
    stages: int
    """How many of P's stages must report: the request's own `pp_size`, which no stage of a single
    one fulfils.
    """


class _Met(msgspec.Struct, frozen=True):
    peer: SideChannelPeer
    agent: str
    workers: int


def base_id(request_id: str) -> str:
    """Return an internal request id without vLLM's 8 random hex digits."""
    return _SUFFIX.sub("", request_id)


def _taken(request_id: str, among: dict[str, _Found]) -> tuple[str, _Found] | None:
    """Remove and return the entry of a request: of the same id, else the oldest whose id differs
    only in the random digits.
    """
    if request_id in among:
        return request_id, among.pop(request_id)
    base = base_id(request_id)
    name = next((one for one in among if base_id(one) == base), None)
    return None if name is None else (name, among.pop(name))


class NixlPush(Nixl):
    """The connector of one engine."""

    mode = "push"

    def __init__(
        self, facts: SimFacts, engine_id: str, side_channel_port: int, pool: BlockPool, stats: Stats
    ) -> None:
        super().__init__(facts, engine_id, side_channel_port, pool, stats)
        self.finished_blocks: dict[str, tuple[int, ...]] = {}
        """P: prompts without a registration, by request id; none outlives its lease."""
        self.registered: dict[str, tuple[PushRegistration, int]] = {}
        """P: registrations without a prompt, by D's request id. Nothing removes them but a
        prompt.
        """
        self.expected: dict[str, ExpectedPush] = {}
        """D: requests that wait for a push, aborted ones too."""
        self._met: dict[str, _Met] = {}
        """Where an engine was met, and in which run: by engine id alone, for good."""
        self._meeting: dict[str, list[Register | Push]] = {}
        self._sizes: dict[str, tuple[int, int]] = {}
        """The tensor and pipeline parallelism of an engine, in the words of the request that it was
        met for.
        """

    # -- P

    def ended(
        self, one: ActiveRequest, reason: str, now: float
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks of a prefill for its lease, unless it was aborted, and push them if D has
        registered.

        Raises:
            EngineDeadError: a D that never registered has a handle without the keys.
        """
        request_id, params = one.request.id, one.params or {}
        if params.get("do_remote_prefill"):
            self.dropped(request_id, params)
            return False, None
        if not params.get("do_remote_decode") or reason not in ("length", "stop"):
            return False, None
        self.held[request_id] = _Held(list(one.blocks), now + self._facts.kv_lease_duration)
        self._pool.lend(one.blocks)
        found = _taken(request_id, self.registered)
        if found is None:
            self.finished_blocks[request_id] = tuple(one.blocks)
        else:
            self._begin(request_id, tuple(one.blocks), *found[1])
        handle: dict[str, Any] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(one.blocks)],
            "remote_engine_id": self._engine_id,
            "remote_request_id": request_id,
            "remote_host": self._facts.side_channel_host,
            "remote_port": self._port,
            "tp_size": self._facts.tensor_parallel_size,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": one.computed,
            "transfer_mode": self.mode,
        }
        if len(one.generated) == 1:  # vLLM adds it to the output with the prefill's statistics
            handle["remote_prefill_cached_tokens"] = one.local + one.external
        return True, handle

    def take(self, registration: PushRegistration, reached: int) -> None:
        """Take a registration of a D, which `reached` of this engine's workers have got."""
        found = _taken(registration.request_id, self.finished_blocks)
        if found is None:
            self.registered[registration.request_id] = registration, reached
        else:
            self._begin(*found, registration, reached)

    def _begin(
        self, request_id: str, blocks: tuple[int, ...], registration: PushRegistration, reached: int
    ) -> None:
        """Push what D has not found in its own cache: the end of the prompt.

        Where not all of P's ranks know of D, and where D has more blocks than P, nothing is pushed:
        both keep their blocks.
        """
        count = len(registration.blocks)
        if reached < self._facts.tensor_parallel_size or count > len(blocks):
            return
        peer = SideChannelPeer(registration.host, registration.port, registration.engine_id)
        push = Push(request_id, peer, blocks[-count:], registration.request_id, registration.blocks)
        self._meet(peer, registration.tp_size, 1, push)

    def pushed(self, push: Push, *, whole: bool) -> None:
        """A write is over. After a failure the blocks wait for the end of the lease."""
        if not whole:
            self._stats.failed_transfers += 1
            return
        self.registered.pop(push.request_id, None)
        held = self.held.pop(push.request_id, None)
        if held is not None:  # otherwise its lease has ended meanwhile
            self._pool.release(held.blocks)

    def expire(self, now: float) -> None:
        """Free the blocks whose lease has ended; a registration that comes later finds nothing."""
        before = set(self.held)
        super().expire(now)
        for request_id in before - self.held.keys():  # vLLM evicts both under P's id
            self.registered.pop(request_id, None)
        self.finished_blocks = {
            name: one for name, one in self.finished_blocks.items() if name in self.held
        }

    def registrations(self) -> list[str]:
        """Return D's request ids for which P has nothing to push yet."""
        return list(self.registered)

    # -- D

    def wanted(self, one: ActiveRequest) -> tuple[int, bool]:
        """Return how many tokens of a prompt should come from P, beyond those computed here."""
        tokens = one.prompt - one.computed
        return (
            (tokens, True)
            if one.params and one.params.get("do_remote_prefill") and tokens > 0
            else (0, False)
        )

    def allocated(self, one: ActiveRequest, new_blocks: int, tokens: int) -> bool:
        """Register the blocks of a scheduled request; without tokens to wait for, nothing is sent
        and P is not told.

        Raises:
            EngineDeadError: keys of the handle are missing.
        """
        params = one.params
        if not params or not params.get("do_remote_prefill") or not tokens:
            return True
        peer = self._peer_in(params)
        params["do_remote_prefill"] = False  # one transfer per request
        request_id, mine = one.request.id, self._facts
        tp_size, pp_size = _number(params["tp_size"]), _number(params.get("pp_size", 1))
        self.expected[request_id] = ExpectedPush(request_id, tokens, one.started, pp_size)
        registration = PushRegistration(
            request_id=request_id,
            host=mine.side_channel_host,
            port=self._port,
            engine_id=self._engine_id,
            tp_size=mine.tensor_parallel_size,
            blocks=tuple(one.blocks[-new_blocks:]),
        )
        self._meet(peer, tp_size, pp_size, Register(request_id, peer, registration))
        return True

    def landed(self, request_id: str) -> ExpectedPush | None:
        """A push for a request is over. Return what waited for it; None: nothing, or something that
        needs more than it.
        """
        found = self.expected.get(request_id)
        if found is None:
            self._stats.late_notifications += 1
            return None
        if found.stages > 1:
            return None
        del self.expected[request_id]
        return found

    def loaded(self, load: Any) -> None:
        """P knows that its push is over."""

    def failed(self, request_id: str) -> None:
        """P can't be told of the request."""
        del self.expected[request_id]

    def dropped(self, request_id: str, params: dict[str, Any] | None) -> None:
        """A request ended before it was registered, or was refused. P is not told: its blocks wait
        for the end of the lease.

        Raises:
            EngineDeadError: keys of the handle are missing.
        """
        self.arrived(request_id)
        if params and params.get("do_remote_prefill"):
            params["do_remote_prefill"] = False
            if peer_of(params) is None:
                raise EngineDeadError

    def awaited(self, now: float) -> dict[str, float]:
        """Return the requests whose blocks only a push frees: request id to seconds since it was
        registered.
        """
        return {request_id: now - one.since for request_id, one in self.expected.items()}

    def queued(self, one: ActiveRequest) -> None:
        """Renew the lease of `remote_request_id`, in case that it is P's own id, until the KV is
        here.
        """
        params = one.params
        if (
            params
            and params.get("do_remote_prefill")
            and all(params.get(key) is not None for key in _KEYS)
        ):
            peer = self._peer_in(params)
            self._heartbeats[one.request.id] = (peer, str(params["remote_request_id"]))
            if peer.engine_id not in self._meeting:
                self._sizes[peer.engine_id] = (
                    _number(params["tp_size"]),
                    _number(params.get("pp_size", 1)),
                )

    def send_heartbeats(self, now: float) -> None:
        """Send heartbeats if they are due, or first meet the engine."""
        if not self._heartbeats or now - self._last_heartbeat < self._facts.heartbeat_interval:
            return
        self._last_heartbeat = now
        peers: dict[SideChannelPeer, list[str]] = {}
        for peer, remote_id in self._heartbeats.values():
            peers.setdefault(peer, []).append(remote_id)
        for peer, ids in peers.items():
            if peer.engine_id in self._met:
                self.outbox.append(
                    PeerNotice(self._met[peer.engine_id].peer, "heartbeat", tuple(ids))
                )
            else:
                self._meet(peer, *self._sizes[peer.engine_id])

    def _peer_in(self, params: Mapping[str, Any]) -> SideChannelPeer:
        if any(key not in params for key in _KEYS):
            raise EngineDeadError
        peer = peer_of(dict(params))
        assert peer is not None
        return peer

    # -- other engines

    def _meet(
        self,
        peer: SideChannelPeer,
        tp_size: int,
        pp_size: int,
        command: Register | Push | None = None,
    ) -> None:
        """Carry a command out, after a handshake if the engine was never met; then its address no
        longer matters.
        """
        name = peer.engine_id
        if name not in self._met and name not in self._meeting:
            self._meeting[name] = []
            self._sizes[name] = (tp_size, pp_size)
            self.outbox.append(Handshake(peer, tp_size, pp_size))
        if command is None:
            return
        if name in self._met:
            self._send(command)
        else:
            self._meeting[name].append(command)

    def _send(self, command: Register | Push) -> None:
        met = self._met[command.peer.engine_id]
        if isinstance(command, Register):
            found = msgspec.structs.replace(
                command, peer=met.peer, agent=met.agent, reached=met.workers
            )
            self.outbox.append(found)
        else:
            self.outbox.append(msgspec.structs.replace(command, peer=met.peer, agent=met.agent))

    def handshaken(self, peer: SideChannelPeer, found: Greeting | None) -> list[str]:
        """Take the answer to a handshake; None: no engine answered. Return the requests of D whose
        KV can't come.

        What P wanted to push is lost: D waits for ever, and P's blocks wait for the end of the
        lease.
        """
        waiting = self._meeting.pop(peer.engine_id, [])
        if found is None or (found.engine_id, found.mode) != (peer.engine_id, self.mode):
            self._stats.failed_transfers += 1
            return [command.request_id for command in waiting if isinstance(command, Register)]
        self._met[peer.engine_id] = _Met(peer, found.agent, self._sizes[peer.engine_id][0])
        for command in waiting:
            self._send(command)
        return []


def _number(value: object) -> int:
    """Return a number of workers; 0 for what is none: no worker is asked then, and none answers."""
    return value if isinstance(value, int) else 0
