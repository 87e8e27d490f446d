"""vLLM's NIXL connector, which reports the KV transfer of each request to pdproxy. For vLLM 0.32.0.

It stays one file: it is copied into the engine's environment, and imports only vllm, zmq and
msgspec.

    PYTHONPATH=<this file's folder> vllm serve ... --kv-transfer-config '{"kv_connector":
    "NixlConnector",
        "kv_connector_module_path": "pdproxy_nixl", "kv_role": "kv_producer",
        "kv_connector_extra_config": {"pdproxy_notify": "tcp://proxy:7500"}}'

The same on decode engines with `kv_consumer`; `NixlPushConnector` is here, too. `pdproxy_notify` is
an address or a list of them, each of which gets all notices. Without it the variable PDPROXY_NOTIFY
is used (commas between addresses); without both nothing is sent. Engines with and without this file
work together. An error in this file does not stop transfers: a notice that can't be sent at once is
counted and dropped, an exception is logged once.

A notice is a msgpack map, PUSHed to the proxy's PULL socket; fields without a value are left out:

    type "PdproxyKV", v 1, event, req_id, internal_id, remote_req_id, engine_id, role, t, wall
    tokens, cached, created, blocks, bytes, seconds, params, prompt_ids, reason, dropped

    ready     P  the request ended and its blocks wait for a reader: `params` and `prompt_ids` as in
              P's answer, JSON in bytes
    failed    P  the request ended and no blocks wait; `reason` is its status
    loaded    D  all workers have the KV: `tokens` of it pulled, `cached` found here
    failed    D  a worker could not pull
    released  P  all readers of all workers have finished
    expired   P  workers stopped waiting for a reader; `reason` has their number
    kept      D  the blocks wait to be read for the next turn (`bidirectional_kv_xfer`); later
              notices of them have role D, too

`req_id` is the X-Request-Id of P's leg and `remote_req_id` P's internal id, on both sides;
`internal_id` is the sender's own. `t` is time.monotonic(), `wall` time.time(). Every notice comes
from the scheduler and is for all workers: what only they know (bytes, durations, expiry) reaches it
as vLLM's worker metadata, with the step's output.
"""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector as _Pull
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPushConnector as _Push
from vllm.logger import init_logger

LONGEST = 256 * 1024
"""Maximum bytes of a notice. A longer one is sent without the prompt's ids, then without the
handle: P's answer has both.
"""
WAITING = 1000
"""The number of notices that may wait for a connected proxy that doesn't read. None waits for a
proxy that isn't connected.
"""
REMEMBERED = 10_000
"""The number of requests with records. There are never more at once; the limit is for records that
are never removed.
"""

_INTERNAL = re.compile(
    r"(?:cmpl-(.+)-[0-9]+|chatcmpl-(.+)|generate-tokens-(.+)|(.+)_0)-[0-9a-f]{8}", re.DOTALL
)
_log = init_logger("vllm.pdproxy_nixl")  # a name below vLLM's own, whose handlers it shares


def external(internal_id: str) -> str:
    """Return the leg's id in one of vLLM's internal ids, the id itself if it has another form."""
    found = _INTERNAL.fullmatch(internal_id)
    return found[found.lastindex or 0] if found else internal_id


def addresses(configured: object, variable: str) -> list[str]:
    """Return the proxies' addresses from the extra config, else from the environment's variable."""
    if configured is None:
        configured = variable.split(",")
    if isinstance(configured, str):
        configured = [configured]
    if not isinstance(configured, list) or not all(isinstance(one, str) for one in configured):
        raise TypeError(
            f"pdproxy_notify must be an address or a list of addresses, not {configured!r}"
        )
    return list(dict.fromkeys(stripped for one in configured if (stripped := one.strip())))


class Bounded(dict[str, Any]):
    """A dict that drops its oldest entry above a limit."""

    def __setitem__(self, key: str, value: Any) -> None:
        """Set an entry."""
        super().__setitem__(key, value)
        while len(self) > REMEMBERED:
            del self[next(iter(self))]


class Sender:
    """The sockets to the proxies: one each, since a PUSH socket distributes its messages. Nothing
    here waits.
    """

    def __init__(self, to: Iterable[str]):
        # An own context: a lookup of a host name may block its thread, and vLLM's context has
        # transfers to wait for.
        self._context = zmq.Context()
        self._sockets: list[Any] = []
        self._dropped: defaultdict[Any, int] = defaultdict(int)
        for address in to:
            socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.SNDHWM, WAITING)
            socket.setsockopt(zmq.IMMEDIATE, 1)  # no notices wait for a proxy that is not connected
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
            socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)  # detects a proxy whose machine is down
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15000)
            try:
                socket.connect(address)
            except zmq.ZMQError as error:
                _log.error("pdproxy: no notices to %s: %s", address, error)
                socket.close()
            else:
                self._sockets.append(socket)

    def send(self, notice: dict[str, Any]) -> None:
        """Send to each proxy, or count the notice as dropped for it."""
        payload = _packed(notice)
        for socket in self._sockets:
            missed = self._dropped[socket]
            try:
                socket.send(
                    _packed(notice | {"dropped": missed}) if missed else payload, zmq.DONTWAIT
                )
                self._dropped[socket] = 0
            except zmq.ZMQError:
                self._dropped[socket] += 1

    def close(self) -> None:
        """Close without sending what waits. The context is not terminated, since that would wait
        for its thread.
        """
        for socket in self._sockets:
            socket.close()
        self._sockets.clear()


def _packed(notice: dict[str, Any]) -> bytes:
    notice = {key: value for key, value in notice.items() if value is not None}
    for part in ("prompt_ids", "params", None):
        payload = msgspec.msgpack.encode(notice)
        if part is None or len(payload) <= LONGEST:
            break
        notice.pop(part, None)
    return payload


@dataclass
class WorkerNews(KVConnectorWorkerMetadata):
    """What the workers report to the scheduler after a step, by the sender's internal id."""

    moved: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Bytes, and seconds of the slowest transfer."""
    expired: dict[str, int] = field(default_factory=dict)
    """How many workers' leases expired unread."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerNews:
        """Add the report of another worker."""
        if isinstance(other, WorkerNews):
            for request, moved in other.moved.items():
                self.moved[request] = _sum(self.moved.get(request), moved)
            for request, workers in other.expired.items():
                self.expired[request] = self.expired.get(request, 0) + workers
        return self


def _sum(one: tuple[int, float] | None, other: tuple[int, float]) -> tuple[int, float]:
    return other if one is None else (one[0] + other[0], max(one[1], other[1]))


class Worker:
    """The state of one worker: which transfers ended, with their telemetry, and which leases
    expired.
    """

    def __init__(self, worker: Any, quietly: Callable[..., Any]):
        self._worker = worker
        self._news = WorkerNews()
        self._moved = Bounded()
        reap = worker._reap_expired_send_leases

        # vLLM reports read and expired requests alike as "done sending": only its reaper knows
        # which expired.
        def reap_and_note(done: set[str]) -> None:
            before = set(done)
            reap(done)
            quietly(self._expired, done - before)

        worker._reap_expired_send_leases = reap_and_note

    def _expired(self, requests: set[str]) -> None:
        self._news.expired |= dict.fromkeys(requests, 1)

    def before(self) -> tuple[list[tuple[Any, str]], int]:
        """Return the current transfers, in the order in which vLLM checks them, and how many have
        been recorded.
        """
        under_way = [
            (one, request)
            for request, them in self._worker._recving_transfers.items()
            for one in them
        ]
        return under_way, len(self._worker.xfer_stats.data["bytes_transferred"])

    def after(self, before: tuple[list[tuple[Any, str]], int], results: Any) -> None:
        """Return the requests of the transfers that were recorded since.

        vLLM's record names no request, but keeps the order. If some transfers failed, there are
        fewer records than ended transfers and it is unknown which are missing: then none is
        returned.
        """
        under_way, recorded = before
        data = self._worker.xfer_stats.data
        sizes, durations = (
            data["bytes_transferred"][recorded:],
            data["transfer_duration"][recorded:],
        )
        left = {one for them in self._worker._recving_transfers.values() for one in them}
        ended = [request for one, request in under_way if one not in left]
        if len(ended) == len(sizes) == len(durations):
            for request, size, seconds in zip(ended, sizes, durations, strict=True):
                self._moved[request] = _sum(self._moved.get(request), (int(size), float(seconds)))
        for request in results.finished_recving:
            moved = self._moved.pop(request, None)
            if moved is not None:
                self._news.moved[request] = moved

    def news(self) -> WorkerNews | None:
        """Return what has happened since the last time, None for nothing."""
        news, self._news = self._news, WorkerNews()
        return news if news.moved or news.expired else None


@dataclass
class Pulling:
    """A request of D whose KV comes from P."""

    remote: str
    tokens: int
    cached: int | None
    blocks: int | None


class Scheduler:
    """The state of the scheduler, which sends one notice for all workers."""

    def __init__(self, sender: Sender, engine_id: str):
        self._sender = sender
        self._engine_id = engine_id
        # vLLM's statistics of the prefill, which it updates until the prefill ends
        self._prefilling = Bounded()
        self._pulling = Bounded()
        self._remotes = Bounded()
        self._held = Bounded()
        self._moved = Bounded()
        self._expired = Bounded()

    def allocated(self, request: Any, params: dict[str, Any], tokens: int) -> None:
        """Blocks were allocated for a request; `tokens` tokens come from P. `params` are as they
        were before.
        """
        if params.get("do_remote_decode"):
            self._prefilling[request.request_id] = request.prefill_stats
            return
        remote = params.get("remote_request_id")
        if not params.get("do_remote_prefill") or not isinstance(remote, str):
            return
        cached = getattr(request.prefill_stats, "num_local_cached_tokens", None)
        pulling = Pulling(remote, tokens, cached, _count(params.get("remote_block_ids")))
        self._remotes[request.request_id] = remote
        if tokens:
            self._pulling[request.request_id] = pulling
        else:  # all KV is here: vLLM has no event for it
            self._pulled("loaded", request.request_id, pulling)

    def finished(self, request: Any, held: bool, params: dict[str, Any] | None) -> None:
        """A request ended; `held`: whether its blocks wait for a reader, which needs `params`."""
        requested = request.kv_transfer_params or {}
        internal = request.request_id
        stats = self._prefilling.pop(internal, None)
        remote = self._remotes.pop(internal, None)
        if not requested.get("do_remote_decode"):
            if held and params:
                self._held[internal] = ("D", remote or internal, time.monotonic())
                self._send_notice(
                    "kept", "D", internal, remote or internal, params=msgspec.json.encode(params)
                )
            return
        if not held or not params:
            self._send_notice(
                "failed",
                "P",
                internal,
                internal,
                reason=getattr(request.status, "name", str(request.status)),
            )
            return
        self._held[internal] = ("P", internal, time.monotonic())
        if stats is not None:  # vLLM adds it after this returns
            params = params | {"remote_prefill_cached_tokens": stats.num_cached_tokens}
        # Models with a recurrent state are prefilled without their last tokens: the rest is not the
        # whole prompt.
        ids = None if requested.get("_p_side_truncated") else request.prompt_token_ids
        self._send_notice(
            "ready",
            "P",
            internal,
            internal,
            tokens=None if ids is None else len(ids),
            cached=getattr(stats, "num_cached_tokens", None),
            created=getattr(stats, "num_cache_creation_tokens", None),
            blocks=_count(params.get("remote_block_ids")),
            params=msgspec.json.encode(params),
            prompt_ids=None if ids is None else msgspec.json.encode(ids),
        )

    def stepped(self, output: Any) -> None:
        """Handle the output of a step from all workers."""
        news = output.kv_connector_worker_meta
        if isinstance(news, WorkerNews):
            for request, moved in news.moved.items():
                self._moved[request] = _sum(self._moved.get(request), moved)
            for request, workers in news.expired.items():
                self._expired[request] = self._expired.get(request, 0) + workers
        for request in output.finished_recving or ():
            moved = self._moved.pop(request, None)
            pulling = self._pulling.pop(request, None)
            if pulling is None:
                continue
            if request in output.failed_recving:
                self._pulled("failed", request, pulling)
            else:
                self._pulled("loaded", request, pulling, *(moved or ()))
        for request in output.finished_sending or ():
            workers = self._expired.pop(request, 0)
            role, remote, since = self._held.pop(request, (None, request, None))
            self._send_notice(
                "expired" if workers else "released",
                role,
                request,
                remote,
                seconds=None if since is None else time.monotonic() - since,
                reason=f"{workers} worker(s)" if workers else None,
            )

    def _pulled(
        self,
        event: str,
        internal: str,
        pulling: Pulling,
        size: int | None = None,
        seconds: float | None = None,
    ) -> None:
        self._send_notice(
            event,
            "D",
            internal,
            pulling.remote,
            tokens=pulling.tokens,
            cached=pulling.cached,
            blocks=pulling.blocks,
            bytes=size,
            seconds=seconds,
        )

    def _send_notice(
        self, event: str, role: str | None, internal: str, remote: str, **more: Any
    ) -> None:
        notice = {
            "type": "PdproxyKV",
            "v": 1,
            "event": event,
            "req_id": external(remote),
            "internal_id": internal,
            "remote_req_id": remote,
            "engine_id": self._engine_id,
            "role": role,
            "t": time.monotonic(),
            "wall": time.time(),
        }
        self._sender.send(notice | more)


def _count(groups: Any) -> int | None:
    return None if groups is None else sum(map(len, groups))


_Connector: Any = object


class _Notifying(_Connector):
    """Mixed into a NIXL connector: each hook calls the connector's own and reads its arguments and
    results.

    What a hook of the connector's raises or returns is none of our business; what we do around it
    goes through `_quietly`.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        self._sender: Sender | None = None
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        self._complaints: set[str] = set()
        super().__init__(vllm_config, role, kv_cache_config)
        self._quietly(self._start, vllm_config.kv_transfer_config)

    def _start(self, config: Any) -> None:
        to = addresses(
            config.get_from_extra_config("pdproxy_notify", None),
            os.environ.get("PDPROXY_NOTIFY", ""),
        )
        if not to:
            return
        if self.connector_worker is not None:
            self._worker = Worker(self.connector_worker, self._quietly)
        if self.connector_scheduler is not None:
            self._sender = Sender(to)
            self._scheduler = Scheduler(self._sender, config.engine_id)
            _log.info("pdproxy: notices of KV go to %s", ", ".join(to))

    def _quietly(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call code of this file. Its exceptions are logged the first time and not passed on."""
        try:
            return call(*arguments)
        except Exception:
            name = getattr(call, "__qualname__", repr(call))
            if name not in self._complaints:
                self._complaints.add(name)
                _log.exception(
                    "pdproxy: %s failed; if it does again, there will be no word of it", name
                )
            return None

    # In the scheduler's process.

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Read the request's params before the connector marks them as used."""
        params = dict(request.kv_transfer_params or {}) if self._scheduler is not None else {}
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if self._scheduler is not None and params:
            self._quietly(self._scheduler.allocated, request, params, num_external_tokens)

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        """Report whether the connector keeps the blocks for a reader."""
        held, params = super().request_finished_all_groups(request, block_ids)
        if self._scheduler is not None:
            self._quietly(self._scheduler.finished, request, held, params)
        return held, params

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """The same, from a scheduler without the hybrid memory allocator (or a connector of
        several).
        """
        held, params = super().request_finished(request, block_ids)
        if self._scheduler is not None:
            self._quietly(self._scheduler.finished, request, held, params)
        return held, params

    def update_connector_output(self, connector_output: Any) -> None:
        """Report the requests whose transfers have ended on all workers."""
        super().update_connector_output(connector_output)
        if self._scheduler is not None:
            self._quietly(self._scheduler.stepped, connector_output)

    # In each worker's process.

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Compare the transfers before and after the connector checks them."""
        before = self._quietly(self._worker.before) if self._worker is not None else None
        results = super().get_transfer_results(finished_req_ids)
        if self._worker is not None and before is not None:
            self._quietly(self._worker.after, before, results)
        return results

    def build_connector_worker_meta(self) -> Any:
        """Add this file's report to the step's output, unless the connector itself uses this
        field.
        """
        theirs = super().build_connector_worker_meta()
        if theirs is None and self._worker is not None:
            return self._quietly(self._worker.news)
        return theirs

    def shutdown(self) -> None:
        """Shut down the connector first."""
        super().shutdown()
        if self._sender is not None:
            self._quietly(self._sender.close)


class NixlPullConnector(_Notifying, _Pull):
    """D reads from P."""


class NixlPushConnector(_Notifying, _Push):
    """P writes to D. Notices have no size and duration of transfers: only P's writer thread knows
    them.
    """


NixlConnector = NixlPullConnector
"""As in vLLM. The name is required: vLLM has special cases for connectors with it."""
