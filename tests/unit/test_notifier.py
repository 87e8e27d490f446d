"""The notifier in a vLLM of fakes: what each hook says, and that nothing of ours ever reaches the
engine's own work.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pickle
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.wire.notices import Notice, NoticeEvent, decode, request_id_of
from tests.fakes import vllm_nixl
from tests.fakes.vllm_nixl import Output, Request, Results, Stats, Status, config, modules

FOLDER = Path(__file__).parents[2] / "proxy/pdproxy/notifier"
PREFILL = "cmpl-pd-1-0-0123abcd"
DECODE = "chatcmpl-client-89abcdef"
GIVEN = {
    "do_remote_prefill": True,
    "remote_request_id": PREFILL,
    "remote_block_ids": [[1, 2], [3]],
    "remote_port": 5,
}


@pytest.fixture(scope="module")
def nixl() -> Iterator[Any]:
    """The file as vLLM loads it: by its bare name, from its own folder."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules().items():
            patch.setitem(sys.modules, name, module)
        patch.syspath_prepend(str(FOLDER))
        patch.delenv("PDPROXY_NOTIFY", raising=False)
        yield importlib.import_module("pdproxy_nixl")
        del sys.modules["pdproxy_nixl"]


class Inbox:
    """A proxy's PULL socket."""

    def __init__(self, address: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PULL)
        self.socket.bind(address)
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def raw(self, seconds: float = 10) -> bytes | None:
        return self.socket.recv() if self.socket.poll(int(seconds * 1000)) else None

    def next(self) -> Notice:
        payload = self.raw()
        assert payload is not None, "no notice came"
        notice = decode(payload)
        assert notice is not None, payload
        return notice

    def close(self) -> None:
        self.socket.close(0)
        self.context.term()


@pytest.fixture
def listen() -> Iterator[Callable[..., Inbox]]:
    """Make inboxes, which end with the test."""
    made: list[Inbox] = []

    def make(address: str = "tcp://127.0.0.1:*") -> Inbox:
        made.append(Inbox(address))
        return made[-1]

    yield make
    for inbox in made:
        inbox.close()


class Stage:
    """One engine: a scheduler, two workers, and the way of a step's output from these to that."""

    def __init__(self, nixl: Any, inbox: Inbox, kind: str = "NixlConnector", **extra: Any) -> None:
        settings = config({"pdproxy_notify": inbox.address} | extra)
        self.inbox = inbox
        self.scheduler = getattr(nixl, kind)(settings, "scheduler", kv_cache_config=None)
        self.workers = [
            getattr(nixl, kind)(settings, "worker", kv_cache_config=None) for _ in range(2)
        ]
        deadline = time.monotonic() + 30
        while True:  # connected once a first notice arrives
            self.finish(Request("cmpl-hello-0-00000000", {"do_remote_decode": True}), False, None)
            if inbox.raw(0.1) is not None:
                break
            assert time.monotonic() < deadline, "the notifier never connected"
        while inbox.raw(0.1) is not None:
            pass

    def finish(self, request: Request, held: bool, params: dict[str, Any] | None) -> None:
        self.scheduler.decision = (held, params)
        assert self.scheduler.request_finished_all_groups(request, ([1],)) == (held, params)

    def prefill(self, request_id: str = PREFILL, **params: Any) -> Notice:
        request = Request(request_id, {"do_remote_decode": True})
        self.scheduler.update_state_after_alloc(request, None, 0)
        self.finish(request, True, {"remote_block_ids": [[1]]} | params)
        return self.inbox.next()

    def decode(self, tokens: int, request_id: str = DECODE) -> Request:
        request = Request(request_id, dict(GIVEN), prefill_stats=Stats(num_local_cached_tokens=2))
        self.scheduler.update_state_after_alloc(request, None, tokens)
        for rank, worker in enumerate(self.workers):
            worker.connector_worker._recving_transfers[request_id] = [10 * rank + 1, 10 * rank + 2]
        return request

    def step(self, **finished: Any) -> list[Any]:
        """The workers' polls; the executor pickles and joins what they have to say. `finished` is
        what vLLM would count out.
        """
        metas = []
        for worker in self.workers:
            worker.get_transfer_results(set())
            if (meta := worker.build_connector_worker_meta()) is not None:
                metas.append(pickle.loads(pickle.dumps(meta)))
        joined = metas[0] if metas else None
        for meta in metas[1:]:
            joined = meta if joined is None else joined.aggregate(meta)
        self.scheduler.update_connector_output(Output(kv_connector_worker_meta=joined, **finished))
        return metas

    def silent(self) -> bool:
        """Whether nothing has been said: what is said now comes first."""
        self.finish(Request("cmpl-mark-0-00000000", {"do_remote_decode": True}), False, None)
        return self.inbox.next().request_id == "mark"

    def known(self) -> list[dict[str, Any]]:
        """What is remembered of requests, anywhere."""
        parts = [self.scheduler._scheduler, *(worker._worker for worker in self.workers)]
        return [
            held
            for part in parts
            for held in vars(part).values()
            if isinstance(held, dict) and held
        ]


@pytest.fixture
def stage(nixl: Any, listen: Callable[..., Inbox]) -> Stage:
    """An engine whose notices arrive."""
    return Stage(nixl, listen())


def test_ready(stage: Stage) -> None:
    """P's handle is told as its answer will have it, with the prompt; vLLM's own dict is left as it
    was.
    """
    request = Request(PREFILL, {"do_remote_decode": True}, prefill_stats=Stats(num_cached_tokens=2))
    stage.scheduler.update_state_after_alloc(request, None, 0)
    # vLLM takes them off the request before it ends
    stats, request.prefill_stats = request.prefill_stats, None
    assert stats is not None
    stats.num_cache_creation_tokens = 1
    before = time.monotonic()
    params = {"remote_block_ids": ([1, 2], [3]), "remote_request_id": PREFILL}
    stage.finish(request, True, params)
    assert params == {"remote_block_ids": ([1, 2], [3]), "remote_request_id": PREFILL}
    notice = stage.inbox.next()
    assert notice.params is not None
    assert json.loads(notice.params) == {
        "remote_block_ids": [[1, 2], [3]],
        "remote_request_id": PREFILL,
        "remote_prefill_cached_tokens": 2,
    }
    assert notice.at is not None
    assert before <= notice.at <= time.monotonic()
    assert (notice.event, notice.request_id, notice.remote_request_id) == (
        NoticeEvent.READY,
        "pd-1",
        PREFILL,
    )
    assert (notice.role, notice.engine_id, notice.rank) == ("P", "engine", None)
    assert (notice.tokens, notice.cached_tokens, notice.created_cache_tokens, notice.blocks) == (
        3,
        2,
        1,
        3,
    )
    assert notice.token_ids == b"[5,6,7]"


def test_ready_without_the_allocator_of_groups(stage: Stage) -> None:
    """The older hook says the same."""
    stage.scheduler.decision = (True, {"remote_block_ids": [[1]]})
    assert (
        stage.scheduler.request_finished(Request(PREFILL, {"do_remote_decode": True}), [1])
        == stage.scheduler.decision
    )
    notice = stage.inbox.next()
    assert (notice.event, notice.request_id) == (NoticeEvent.READY, "pd-1")
    assert stage.scheduler.calls[-1] == "request_finished"


@pytest.mark.parametrize("gone", ["truncated", "embeddings"])
def test_ready_without_the_whole_prompt(stage: Stage, gone: str) -> None:
    """Ids that aren't all of the prompt's are not told."""
    request = Request(PREFILL, {"do_remote_decode": True})
    if gone == "truncated":
        request.kv_transfer_params = {"do_remote_decode": True, "_p_side_truncated": True}
    else:
        request.prompt_token_ids = None
    stage.finish(request, True, {"remote_block_ids": [[1]]})
    notice = stage.inbox.next()
    assert (notice.event, notice.token_ids, notice.tokens) == (NoticeEvent.READY, None, None)
    assert notice.params == b'{"remote_block_ids":[[1]]}'


def test_ready_of_a_long_prompt(stage: Stage, nixl: Any) -> None:
    """The longest part goes first; that the KV is ready is told in any case."""
    request = Request(PREFILL, {"do_remote_decode": True}, prompt_token_ids=[100_000] * 50_000)
    stage.finish(request, True, {"remote_block_ids": [[1]]})
    notice = stage.inbox.next()
    assert (notice.token_ids, notice.tokens) == (None, 50_000)
    assert notice.params is not None
    stage.finish(request, True, {"remote_block_ids": [[100_000] * 50_000]})
    payload = stage.inbox.raw()
    assert payload is not None
    assert len(payload) < nixl.LONGEST
    long = decode(payload)
    assert long is not None
    assert (long.event, long.token_ids, long.params, long.blocks) == (
        NoticeEvent.READY,
        None,
        None,
        50_000,
    )


def test_prefill_ends_with_nothing(stage: Stage) -> None:
    """An aborted prefill holds nothing, nor does one whose connector found no blocks."""
    stage.finish(
        Request(PREFILL, {"do_remote_decode": True}, status=Status("FINISHED_ABORTED")), False, None
    )
    notice = stage.inbox.next()
    assert (notice.event, notice.role, notice.reason) == (
        NoticeEvent.FAILED,
        "P",
        "FINISHED_ABORTED",
    )
    assert (notice.request_id, notice.remote_request_id) == ("pd-1", PREFILL)
    stage.finish(Request(PREFILL, {"do_remote_decode": True}), False, {"remote_block_ids": [[]]})
    assert stage.inbox.next().event is NoticeEvent.FAILED


@pytest.mark.parametrize(
    "params",
    [None, {}, {"do_remote_prefill": True}, {"do_remote_prefill": True, "remote_request_id": 3}],
)
def test_requests_without_a_transfer(stage: Stage, params: dict[str, Any] | None) -> None:
    """What is no transfer isn't told."""
    request = Request(DECODE, params)
    stage.scheduler.update_state_after_alloc(request, None, 0)
    stage.finish(request, False, None)
    stage.step(finished_recving={DECODE})
    assert stage.silent()


def test_loaded(stage: Stage) -> None:
    """All workers' bytes together and the slowest transfer, under the prefill's id, once vLLM
    counts them all in.
    """
    stage.decode(3)
    one, two = (worker.connector_worker for worker in stage.workers)
    one.ends |= {1: (100, 0.1), 2: (100, 0.3)}
    two.ends |= {11: (50, 0.7)}
    stage.step()  # one worker is done: vLLM waits for the other
    assert stage.silent()
    two.ends |= {12: (1, 0.2)}
    stage.step(finished_recving={DECODE})
    notice = stage.inbox.next()
    assert (notice.event, notice.role) == (NoticeEvent.LOADED, "D")
    assert (notice.request_id, notice.remote_request_id) == ("pd-1", PREFILL)
    assert (notice.tokens, notice.cached_tokens, notice.blocks) == (3, 2, 3)
    assert (notice.moved_bytes, notice.seconds) == (251, 0.7)
    assert stage.step() == []
    assert stage.silent()


def test_loads_that_end_together(stage: Stage) -> None:
    """Each request gets its own transfer's figures, though vLLM's record has no names."""
    other = "cmpl-other-0-00000001"
    stage.decode(3)
    stage.decode(3, other)
    for worker in stage.workers:
        worker.connector_worker._recving_transfers = {DECODE: [1], other: [2]}
        worker.connector_worker.ends |= {1: (100, 0.1), 2: (7, 0.2)}
    stage.step(finished_recving={DECODE})
    assert stage.inbox.next().moved_bytes == 200
    stage.step(finished_recving={other})
    assert stage.inbox.next().moved_bytes == 14


def test_figures_in_doubt_are_none(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """Of two transfers that ended one failed, and vLLM recorded the other: nobody can tell which,
    so neither gets a size.
    """
    other = "cmpl-other-0-00000001"
    stage.decode(3)
    stage.decode(3, other)
    for worker in stage.workers:
        worker.connector_worker._recving_transfers = {DECODE: [1], other: [2]}
        worker.connector_worker.ends |= {1: None, 2: (7, 0.2)}
    stage.step(finished_recving={other})
    notice = stage.inbox.next()
    assert (notice.event, notice.moved_bytes, notice.seconds) == (NoticeEvent.LOADED, None, None)
    assert not caplog.records


def test_failed(stage: Stage) -> None:
    """One worker could not: the pull has failed, however much the others moved, and it is told
    once.
    """
    stage.decode(3)
    one, two = (worker.connector_worker for worker in stage.workers)
    one.ends |= {1: (100, 0.1), 2: (100, 0.1)}
    two.ends |= {11: None, 12: None}
    stage.step(finished_recving={DECODE}, failed_recving={DECODE})
    notice = stage.inbox.next()
    assert (notice.event, notice.role, notice.request_id, notice.tokens) == (
        NoticeEvent.FAILED,
        "D",
        "pd-1",
        3,
    )
    assert notice.moved_bytes is None
    assert stage.silent()


def test_found_here(stage: Stage) -> None:
    """D has all of it in its cache: vLLM reports no transfer, so it is told when the blocks are
    found.
    """
    stage.decode(0)
    notice = stage.inbox.next()
    assert (notice.event, notice.tokens, notice.cached_tokens) == (NoticeEvent.LOADED, 0, 2)
    assert stage.silent()


def test_it_is_told_once(stage: Stage) -> None:
    """Blocks are found anew when the KV has come, and after a preemption: these are no
    transfers.
    """
    request = stage.decode(3)
    stage.step(finished_recving={DECODE})
    assert stage.inbox.next().event is NoticeEvent.LOADED
    for _ in range(2):
        stage.scheduler.update_state_after_alloc(request, None, 0)
    assert stage.known()
    stage.finish(request, False, None)
    assert stage.silent()
    assert stage.known() == []


def test_decode_given_up_while_it_pulls(stage: Stage) -> None:
    """The pull goes on without its request, and its end is told."""
    stage.finish(stage.decode(3), False, None)
    assert stage.silent()
    stage.step(finished_recving={DECODE})
    assert stage.inbox.next().event is NoticeEvent.LOADED


def test_released_and_expired(stage: Stage) -> None:
    """vLLM has one word for both; one worker that gave up makes it an expiry, whenever it said
    so.
    """
    for request_id in (PREFILL, "cmpl-pd-2-0-0123abcd"):
        assert stage.prefill(request_id).event is NoticeEvent.READY
    one, two = (worker.connector_worker for worker in stage.workers)
    one.heard, two.heard = {PREFILL}, {PREFILL}
    stage.step(finished_sending={PREFILL})
    notice = stage.inbox.next()
    assert (notice.event, notice.role, notice.request_id, notice.reason) == (
        NoticeEvent.RELEASED,
        "P",
        "pd-1",
        None,
    )
    assert notice.seconds is not None
    assert 0 <= notice.seconds < 60
    one.lapsed = {"cmpl-pd-2-0-0123abcd"}
    stage.step()
    assert stage.silent()
    two.heard = {"cmpl-pd-2-0-0123abcd"}
    stage.step(finished_sending={"cmpl-pd-2-0-0123abcd"})
    notice = stage.inbox.next()
    assert (notice.event, notice.request_id, notice.reason) == (
        NoticeEvent.EXPIRED,
        "pd-2",
        "1 worker(s)",
    )
    assert stage.silent()
    assert stage.known() == []


def test_an_expiry_of_all_workers(stage: Stage) -> None:
    """The workers' news are added up; the step after has none."""
    stage.prefill()
    for worker in stage.workers:
        worker.connector_worker.lapsed = {PREFILL}
    assert len(stage.step(finished_sending={PREFILL})) == 2
    notice = stage.inbox.next()
    assert (notice.event, notice.reason) == (NoticeEvent.EXPIRED, "2 worker(s)")
    assert stage.step() == []


def test_kept_for_the_next_turn(stage: Stage) -> None:
    """D's handle is told under the prefill's id; what becomes of it, with D's role."""
    request = stage.decode(3)
    stage.step(finished_recving={DECODE})
    assert stage.inbox.next().event is NoticeEvent.LOADED
    stage.finish(request, True, {"do_remote_decode": True, "remote_request_id": DECODE})
    notice = stage.inbox.next()
    assert (notice.event, notice.role, notice.request_id) == (NoticeEvent.KEPT, "D", "pd-1")
    assert notice.params == b'{"do_remote_decode":true,"remote_request_id":"%b"}' % DECODE.encode()
    stage.step(finished_sending={DECODE})
    notice = stage.inbox.next()
    assert (notice.event, notice.role, notice.request_id) == (NoticeEvent.RELEASED, "D", "pd-1")
    assert stage.known() == []


def test_push(nixl: Any, listen: Callable[..., Inbox]) -> None:
    """The push connector's ends are told, too; it has no handles to look at."""
    stage = Stage(nixl, listen(), "NixlPushConnector")
    assert isinstance(
        stage.scheduler,
        sys.modules[
            "vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector"
        ].NixlPushConnector,
    )
    stage.prefill(transfer_mode="push")
    stage.step(finished_sending={PREFILL})
    assert stage.inbox.next().event is NoticeEvent.RELEASED
    request = Request(DECODE, {"do_remote_prefill": True, "remote_request_id": PREFILL})
    stage.scheduler.update_state_after_alloc(request, None, 3)
    stage.step(finished_recving={DECODE})
    notice = stage.inbox.next()
    assert (notice.event, notice.blocks, notice.moved_bytes) == (NoticeEvent.LOADED, None, None)


def _polled(stage: Stage) -> None:
    assert isinstance(stage.workers[0].get_transfer_results(set()), Results)


def _released(stage: Stage) -> None:
    stage.scheduler.update_connector_output(Output(finished_sending={"a"}))


def _ended(stage: Stage) -> None:
    stage.finish(Request(PREFILL, {"do_remote_decode": True}), True, {"x": 1})


def _met(stage: Stage) -> None:
    assert stage.workers[0].build_connector_worker_meta() is None


HOOKS: list[tuple[str, str, Callable[[Stage], Any], list[str]]] = [
    ("Scheduler", "allocated", lambda stage: stage.decode(0), ["update_state_after_alloc"]),
    ("Scheduler", "finished", _ended, ["request_finished_all_groups"]),
    ("Scheduler", "stepped", _released, ["update_connector_output"]),
    ("Sender", "send", _ended, ["request_finished_all_groups"]),
    ("Sender", "close", lambda stage: stage.scheduler.shutdown(), ["shutdown"]),
    ("Worker", "before", _polled, []),
    ("Worker", "after", _polled, []),
    ("Worker", "_expired", _polled, []),
    ("Worker", "news", _met, []),
]


@pytest.mark.parametrize(
    ("owner", "method", "use", "calls"), HOOKS, ids=[f"{hook[0]}.{hook[1]}" for hook in HOOKS]
)
def test_what_fails_in_us_ends_in_us(
    stage: Stage,
    nixl: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: str,
    method: str,
    use: Callable[[Stage], Any],
    calls: list[str],
) -> None:
    """The connector's own call is made and its answer returned; the log has one traceback, however
    often it fails.
    """
    tries = []

    def fail(*_: Any) -> None:
        tries.append(1)
        raise KeyError("ours")

    monkeypatch.setattr(getattr(nixl, owner), method, fail)
    before = len(stage.scheduler.calls)
    for _ in range(2):
        use(stage)
    assert stage.scheduler.calls[before:] == calls * 2
    assert len(tries) == 2
    assert len([record for record in caplog.records if record.exc_info]) == 1


def test_what_fails_in_the_connector_is_the_engines(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception of vLLM's own is not ours to hide, and what didn't happen isn't told."""
    base = type(stage.scheduler).__mro__[2]

    def fail(*_: Any) -> None:
        raise RuntimeError("theirs")

    with monkeypatch.context() as broken:
        broken.setattr(base, "update_state_after_alloc", fail, raising=False)
        broken.setattr(base, "update_connector_output", fail, raising=False)
        with pytest.raises(RuntimeError, match="theirs"):
            stage.decode(0)
        with pytest.raises(RuntimeError, match="theirs"):
            _released(stage)
    assert stage.silent()


def test_a_connector_that_has_changed(
    nixl: Any, listen: Callable[..., Inbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the places that the worker's part looks at, there are no figures and no expiries; all
    else is told.
    """
    worker = vllm_nixl.NixlWorker
    monkeypatch.delattr(worker, "_reap_expired_send_leases")
    monkeypatch.setattr(worker, "get_transfer_results", lambda _: Results())
    stage = Stage(nixl, listen())
    stage.decode(3)
    stage.step(finished_recving={DECODE})
    notice = stage.inbox.next()
    assert (notice.event, notice.moved_bytes) == (NoticeEvent.LOADED, None)


def test_metadata_of_the_connectors_own(stage: Stage) -> None:
    """A later vLLM may use the way itself: its metadata goes first, and what arrives of another
    kind is left alone.
    """
    worker = stage.workers[0]
    worker.connector_worker.lapsed = {PREFILL}
    worker.get_transfer_results(set())
    worker.meta = object()
    assert worker.build_connector_worker_meta() is worker.meta
    stage.prefill()
    stage.scheduler.update_connector_output(
        Output(finished_sending={PREFILL}, kv_connector_worker_meta=worker.meta)
    )
    assert stage.inbox.next().event is NoticeEvent.RELEASED


@pytest.mark.parametrize("extra", [{}, {"pdproxy_notify": []}, {"pdproxy_notify": ""}])
def test_without_an_address(nixl: Any, extra: dict[str, Any]) -> None:
    """Nothing is opened, wrapped or sent."""
    scheduler, worker = (
        nixl.NixlConnector(config(extra), role, kv_cache_config=None)
        for role in ("scheduler", "worker")
    )
    assert scheduler._sender is None
    assert "_reap_expired_send_leases" not in vars(worker.connector_worker)
    assert worker.get_transfer_results(set()) == Results()
    assert worker.build_connector_worker_meta() is None
    request = Request(DECODE, dict(GIVEN))
    scheduler.update_state_after_alloc(request, None, 0)
    assert request.kv_transfer_params is not None
    assert request.kv_transfer_params["do_remote_prefill"] is False
    scheduler.decision = (True, {"x": 1})
    assert scheduler.request_finished_all_groups(request, ()) == (True, {"x": 1})
    scheduler.update_connector_output(Output(finished_recving={DECODE}))
    scheduler.shutdown()


@pytest.mark.parametrize("wrong", [7, [7], {"a": 1}, ["tcp://127.0.0.1:9", None]])
def test_addresses_of_a_wrong_type(nixl: Any, caplog: pytest.LogCaptureFixture, wrong: Any) -> None:
    """The engine starts all the same, and the log says what is wrong."""
    scheduler = nixl.NixlConnector(
        config({"pdproxy_notify": wrong}), "scheduler", kv_cache_config=None
    )
    assert "pdproxy_notify must be an address" in caplog.text
    assert scheduler.request_finished_all_groups(
        Request(PREFILL, {"do_remote_decode": True}), ()
    ) == (False, None)


def test_every_proxy_gets_everything(
    nixl: Any, listen: Callable[..., Inbox], caplog: pytest.LogCaptureFixture
) -> None:
    """Notices aren't dealt out among the proxies, and an address that can't be used is logged and
    left out.
    """
    one, two = listen(), listen()
    stage = Stage(nixl, one, pdproxy_notify=[one.address, "nonsense", two.address, one.address])
    assert "no notices to nonsense" in caplog.text
    while two.raw(0.1) is None:  # until connected
        assert stage.silent()
    ids = [f"cmpl-pd-{number}-0-0123abcd" for number in range(4)]
    assert [stage.prefill(one).request_id for one in ids] == ["pd-0", "pd-1", "pd-2", "pd-3"]
    seen = [notice for _ in ids if (notice := two.next()).event is NoticeEvent.READY]
    while len(seen) < len(ids):
        seen += [notice for notice in [two.next()] if notice.event is NoticeEvent.READY]
    assert [notice.remote_request_id for notice in seen] == ids


def test_the_environments_address(
    nixl: Any, listen: Callable[..., Inbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable counts where the config says nothing."""
    inbox, other = listen(), listen()
    monkeypatch.setenv("PDPROXY_NOTIFY", f" {inbox.address}, ,{other.address}")
    assert nixl.addresses(None, f" {inbox.address}, ,{other.address}") == [
        inbox.address,
        other.address,
    ]
    stage = Stage(nixl, inbox, pdproxy_notify=None)
    stage.prefill()
    assert nixl.addresses("tcp://x:1", "tcp://y:1") == ["tcp://x:1"]


def test_a_proxy_that_is_not_there(nixl: Any, listen: Callable[..., Inbox]) -> None:
    """Nothing waits and nothing piles up; the first notice that can be sent says how many
    couldn't.
    """
    inbox = listen()
    address = inbox.address
    inbox.close()
    sender = nixl.Sender([address])
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    for _ in range(10_000):
        sender.send({"n": 1})
    # a thread that waits lets others run
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before < 1000
    inbox = listen(address)
    deadline = time.monotonic() + 30
    sent = 10_000
    while (payload := inbox.raw(0.05)) is None:
        assert time.monotonic() < deadline, "the notifier never connected"
        sender.send({"n": 1})
        sent += 1
    message = nixl.msgspec.msgpack.decode(payload)
    assert 10_000 <= message["dropped"] < sent
    sender.close()


def test_a_proxy_that_does_not_read(nixl: Any, listen: Callable[..., Inbox]) -> None:
    """What waits for it is bounded; then notices are dropped, counted, and the count is told and
    begun anew.
    """
    inbox = listen()
    sender = nixl.Sender([inbox.address])
    big, sent, deadline = {"x": b"x" * 100_000}, 0, time.monotonic() + 60
    while inbox.socket.poll(50) == 0:  # until connected
        sender.send({"x": b""})
    sender._dropped.clear()
    while not sum(sender._dropped.values()):
        assert time.monotonic() < deadline, "nothing is ever dropped"
        sender.send(big)
        sent += 1
    assert sent < 3 * nixl.WAITING + 100
    while inbox.raw(0.5) is not None:
        pass
    sender.send({"x": b""})
    sender.send({"x": b""})
    first, second = inbox.raw(), inbox.raw()
    assert first is not None
    assert second is not None
    assert nixl.msgspec.msgpack.decode(first)["dropped"] == 1
    assert "dropped" not in nixl.msgspec.msgpack.decode(second)
    sender.close()


def test_memory_is_bounded(nixl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What never ends is forgotten, the oldest first."""
    monkeypatch.setattr(nixl, "REMEMBERED", 3)
    known = nixl.Bounded()
    for number in range(5):
        known[str(number)] = number
    assert known == {"2": 2, "3": 3, "4": 4}


def test_what_vllm_asks_of_an_external_connector(nixl: Any) -> None:
    """Its factory wants the third argument by this name, and classes by vLLM's names."""
    for name in ("NixlConnector", "NixlPullConnector", "NixlPushConnector"):
        assert "kv_cache_config" in inspect.signature(getattr(nixl, name)).parameters
    assert issubclass(nixl.NixlConnector, vllm_nixl.NixlPullConnector)


@given(
    st.text(),
    st.sampled_from(
        [
            "cmpl-{}-0-0123abcd",
            "chatcmpl-{}-0123abcd",
            "generate-tokens-{}-0123abcd",
            "{}_0-0123abcd",
            "{}",
            "cmpl-{}",
            "chatcmpl-{}-0123ABCD",
        ]
    ),
)
def test_ids_are_read_as_the_proxy_reads_them(nixl: Any, text: str, form: str) -> None:
    """The notifier can't import the proxy's function, so it has its own: they agree on every id."""
    assert nixl.external(form.format(text)) == request_id_of(form.format(text))
