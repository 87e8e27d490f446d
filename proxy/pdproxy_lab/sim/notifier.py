"""The notices that `pdproxy_nixl.py`, the notifier inside vLLM, sends to the proxy about NIXL's KV,
as commands. Pure.

Owns the messages' fields: their names are the notifier's, their values what a real engine's
scheduler knows. The sender adds the clocks (`t`, `wall`). Engines without `notify` send nothing.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec

from pdproxy_lab.sim.active import ActiveRequest
from pdproxy_lab.sim.connector import ProxyNotice
from pdproxy_lab.sim.facts import SimFacts

TYPE = "PdproxyKV"
_INTERNAL = re.compile(
    r"(?:cmpl-(?P<completion>.+)-[0-9]+|chatcmpl-(?P<chat>.+))-[0-9a-f]{8}", re.DOTALL
)
_STATUS = {"abort": "FINISHED_ABORTED", "error": "FINISHED_ERROR"}


def external(internal_id: str) -> str:
    """Return the X-Request-Id in one of vLLM's internal ids; an id of another form is returned as
    it is.
    """
    found = _INTERNAL.fullmatch(internal_id)
    return (found["completion"] or found["chat"]) if found else internal_id


@dataclass(slots=True)
class _Pulling:
    remote: str
    tokens: int
    cached: int
    blocks: int


class Notifier:
    """The notices of one engine."""

    def __init__(self, facts: SimFacts, engine_id: str, outbox: deque[Any]) -> None:
        self._facts, self._engine_id, self._outbox = facts, engine_id, outbox
        self._pulling: dict[str, _Pulling] = {}
        self._since: dict[str, float] = {}
        self._remotes: dict[str, str] = {}

    def ready(self, one: ActiveRequest, handle: dict[str, Any], now: float) -> None:
        """P: a prefill ended, and its blocks wait to be read."""
        internal = one.request.id
        self._since[internal] = now
        in_cache = min(one.remembered * self._facts.block_size, one.prompt)
        cached = one.local + one.external
        self._send(
            "ready",
            "P",
            internal,
            internal,
            tokens=one.prompt,
            cached=cached,
            created=max(in_cache - cached, 0),
            blocks=sum(map(len, handle["remote_block_ids"])),
            params=msgspec.json.encode(handle),
            prompt_ids=msgspec.json.encode(one.request.prompt),
        )

    def prefill_failed(self, one: ActiveRequest, reason: str) -> None:
        """P: a prefill ended, and no blocks wait."""
        self._send(
            "failed", "P", one.request.id, one.request.id, reason=_STATUS.get(reason, reason)
        )

    def kept(self, one: ActiveRequest, handle: dict[str, Any], now: float) -> None:
        """D: an answer ended, and its blocks wait for the conversation's next turn."""
        internal = one.request.id
        remote = str((one.params or {}).get("remote_request_id") or internal)
        self._since[internal] = now
        self._remotes[internal] = remote
        self._send("kept", "D", internal, remote, params=msgspec.json.encode(handle))

    def ended(self, event: str, internal: str, now: float, *, by_decode: bool = False) -> None:
        """Blocks are free (`released`), or free without having been read (`expired`)."""
        seconds = now - self._since.pop(internal, now)
        workers = self._facts.tensor_parallel_size
        reason = f"{workers} worker(s)" if event == "expired" else None
        remote = self._remotes.pop(internal, internal)
        self._send(
            event, "D" if by_decode else "P", internal, remote, seconds=seconds, reason=reason
        )

    def pulling(self, one: ActiveRequest, params: dict[str, Any], tokens: int) -> None:
        """D: blocks were allocated for a request. Its KV will be pulled unless all of it is here
        already.
        """
        blocks = sum(map(len, params["remote_block_ids"]))
        self._pulling[one.request.id] = _Pulling(
            str(params["remote_request_id"]), tokens, one.local, blocks
        )
        if not tokens:
            self.pulled("loaded", one.request.id)

    def pulled(self, event: str, internal: str) -> None:
        """D: the KV is here (`loaded`), or can't come (`failed`)."""
        pull = self._pulling.pop(internal, None)
        if pull is None:
            return
        fields: dict[str, Any] = {
            "tokens": pull.tokens,
            "cached": pull.cached,
            "blocks": pull.blocks,
        }
        if event == "loaded" and pull.tokens:
            hardware = self._facts.hardware
            fields |= {
                "bytes": pull.tokens * hardware.kv_bytes_per_token,
                "seconds": hardware.transfer_s(pull.tokens),
            }
        self._send(event, "D", internal, pull.remote, **fields)

    def _send(self, event: str, role: str, internal: str, remote: str, **more: Any) -> None:
        if self._facts.notify is None:
            return
        message = {
            "type": TYPE,
            "v": 1,
            "event": event,
            "req_id": external(remote),
            "internal_id": internal,
            "remote_req_id": remote,
            "engine_id": self._engine_id,
            "role": role,
        }
        message |= {key: value for key, value in more.items() if value is not None}
        self._outbox.append(ProxyNotice(message))
