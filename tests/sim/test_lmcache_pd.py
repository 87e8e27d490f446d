"""What LMCache's PD backend does on P and on D, each case of it, in virtual time."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.engine_model.hardware import Hardware
from pdproxy_lab.sim.connector import ProxyNotice
from pdproxy_lab.sim.facts import LMCacheFacts, SimFacts
from pdproxy_lab.sim.request import EngineDeadError
from tests.sim.engines import OTHER, PROMPT, Engines, plain

NOTIFY = "tcp://127.0.0.1:7500"
CHUNK = 32
LONG = tuple(range(300, 600))


def facts(role, *, lmcache=None, **more):
    """An engine's facts; chunks are of two blocks, and D does not look for P's first token."""
    config = {"chunk_size": CHUNK, "skip_last_n_tokens": int(role == "decode")} | (lmcache or {})
    notify = {"notify": NOTIFY} if role == "prefill" else {}
    usual = {"role": role, "connector": "lmcache-pd", "enable_prefix_caching": False} | notify
    return SimFacts(**(usual | more), lmcache=LMCacheFacts(**config))


def spec(req_id="r-1", ranks=1, **more):
    ports = {
        "receiver_init_port": [7300 + r for r in range(ranks)],
        "receiver_alloc_port": [7400 + r for r in range(ranks)],
    }
    return {"req_id": req_id, "receiver_host": "127.0.0.1"} | ports | more


def params(*args, **more):
    return {"ret_first_tok": True, "disagg_spec": spec(*args, **more)}


class Pair(Engines):
    """P and D."""

    def __init__(self, p=None, d=None, *, lmcache=None, **more):
        super().__init__()
        self.p = self._add("prefill", lmcache, more, dict(p or {}))
        self.d = self._add("decode", lmcache, more, dict(d or {}))

    def _add(self, role, lmcache, more, own):
        return self.add(
            facts(role, lmcache={**(lmcache or {}), **own.pop("lmcache", {})}, **{**more, **own})
        )

    @property
    def notices(self):
        return [(tell.rank, tell.message) for _, tell in self.p.notices]

    @property
    def left(self):
        """Chunks in D's first buffer."""
        return len(self.d.core.connector.buffers[0].held)

    @property
    def external(self):
        return self.d.stats.prompt_tokens_by_source["external_kv_transfer"]

    def prefill(self, prompt=PROMPT, req_id="r-1", **more):
        run = self.answer(self.p, prompt, 1, params(req_id, self.p.facts.pd_ranks, **more))
        assert run.over == "length"
        assert run.handle == {"first_tok": run.tokens[0]}
        return run.tokens[0]

    def decode(self, first, prompt=PROMPT, tokens=7):
        return [first, *self.answer(self.d, (*prompt, first), tokens).tokens]

    def split(self, prompt=PROMPT, req_id="r-1"):
        return self.decode(self.prefill(prompt, req_id), prompt)


@pytest.fixture
def pair():
    return Pair()


# -- as it should be


@given(
    st.integers(1, 140),
    st.sampled_from([32, 64, 256]),
    st.sampled_from(["async", "sync"]),
    st.sampled_from([1, 3]),
)
@settings(max_examples=60, deadline=None)
def test_split_says_what_one_engine_says(length, chunk, mode, ranks):
    prompt = tuple(range(300, 300 + length))
    pair = Pair(lmcache={"chunk_size": chunk, "pd_backend_mode": mode}, tensor_parallel_size=ranks)
    assert pair.split(prompt) == plain(prompt)
    assert pair.external == length
    assert sorted(pair.notices) == [
        (rank, {"type": "ProxyNotif", "req_id": "r-1"}) for rank in range(ranks)
    ]
    assert not any(buffer.held for buffer in pair.d.core.connector.buffers)
    assert pair.p.core.pool.usage == pair.d.core.pool.usage == 0


def test_the_notice_is_the_recorded_one(pair):
    pair.prefill(req_id="rq-77")
    ((_, message),) = pair.notices
    assert (
        msgspec.msgpack.encode(message).hex()
        == "82a474797065aa50726f78794e6f746966a67265715f6964a572712d3737"
    )


@pytest.mark.parametrize("kind", ["ProxyNotif", "NixlProxyNotif", "untagged"])
def test_older_notices(kind):
    pair = Pair(lmcache={"notice_type": kind})
    pair.prefill()
    tag = {} if kind == "untagged" else {"type": kind}
    assert pair.notices == [(0, tag | {"req_id": "r-1"})]


def test_with_mla_the_first_rank_alone_pushes_and_tells():
    pair = Pair(lmcache={"save_only_first_rank": True}, tensor_parallel_size=4)
    assert pair.split() == plain()
    assert [rank for rank, _ in pair.notices] == [0]


def test_what_was_pushed_before_is_told_of_again(pair):
    pair.prefill()
    pair.prefill(req_id="r-2")
    assert [message["req_id"] for _, message in pair.notices] == ["r-1", "r-2"]


def test_a_prompt_in_several_steps_is_told_of_once():
    pair = Pair(max_num_batched_tokens=80)
    assert pair.split(LONG) == plain(LONG)
    assert len(pair.notices) == 1
    assert pair.external == len(LONG)


def test_first_tok_is_answered_wherever_it_is_asked_for(pair):
    run = pair.answer(pair.d, PROMPT, 3, {"ret_first_tok": False})
    assert run.handle == {"first_tok": run.tokens[0]}
    assert pair.answer(pair.d, PROMPT, 3, {}).outputs[-1].kv_transfer_params is None


def test_the_end_token_as_the_first_is_told_like_any_other(pair):
    run = pair.answer(pair.p, PROMPT, 1, params(), stop_token_ids=frozenset(range(100_000)))
    assert run.over == "stop"
    assert run.handle == {"first_tok": run.tokens[0]}
    assert len(pair.notices) == 1


# -- the buffer


def test_without_skip_last_n_tokens_an_unfilled_chunk_is_not_found_and_stays_for_ever():
    pair = Pair(d={"lmcache": {"skip_last_n_tokens": 0}})
    assert pair.split() == plain()
    assert pair.external == 96
    assert pair.left == 1


def test_what_decode_never_reads_stays(pair):
    pair.prefill()
    assert pair.left == 4
    pair.prefill(req_id="r-2")
    pair.decode(plain()[0])
    assert pair.left == 4
    pair.decode(plain()[0])
    assert pair.left == 0


def test_what_decode_has_in_its_own_cache_stays_in_the_buffer():
    pair = Pair(d={"enable_prefix_caching": True})
    assert pair.split() == plain()
    assert pair.left == 0
    assert pair.split(req_id="r-2") == plain()
    assert pair.external == 100 + 4
    assert pair.left == 3


def test_another_prompt_finds_the_chunks_that_begin_it(pair):
    pair.prefill()
    prompt = PROMPT[:70] + OTHER
    assert pair.answer(pair.d, prompt).tokens == plain(prompt)
    assert pair.external == 64


def buffer_of(chunks, **more):
    size = chunks * CHUNK * Hardware().kv_bytes_per_token
    return {"pd_buffer_size": size, **more}


def test_async_a_full_buffer_delays_the_notice_not_the_answer():
    pair = Pair(lmcache=buffer_of(5))
    first = pair.prefill()
    pair.prefill(OTHER, "r-2")
    assert [message["req_id"] for _, message in pair.notices] == ["r-1"]
    assert pair.decode(first) == plain()
    assert [message["req_id"] for _, message in pair.notices] == ["r-1", "r-2"]


def test_sync_a_full_buffer_stops_the_whole_engine():
    pair = Pair(lmcache=buffer_of(5, pd_backend_mode="sync"))
    first = pair.prefill()
    stuck = pair.answer(pair.p, OTHER, 1, params("r-2"))
    other = pair.answer(pair.p, LONG[:10], 1, {"disagg_spec": spec("r-3")})
    assert stuck.over is None
    assert other.over is None
    pair.decode(first)
    assert stuck.over == "length"
    assert other.over == "length"
    assert {message["req_id"] for _, message in pair.notices} == {"r-1", "r-2", "r-3"}


def test_async_what_can_never_fit_is_refused_and_never_told_of():
    pair = Pair(lmcache=buffer_of(3))
    pair.prefill()
    assert pair.notices == []
    assert pair.left == pair.d.core.connector.buffers[0].waiting == 0
    pair.prefill(PROMPT[:40], "r-2")
    assert [message["req_id"] for _, message in pair.notices] == ["r-2"]


def test_async_who_waits_too_long_is_refused():
    pair = Pair(lmcache=buffer_of(5, pd_allocation_timeout_sec=3.0))
    first = pair.prefill()
    pair.prefill(OTHER, "r-2")
    pair.run(pair.now + 3)
    pair.decode(first)
    assert [message["req_id"] for _, message in pair.notices] == ["r-1"]
    assert pair.left == 0


def test_a_rank_that_has_nothing_makes_decode_compute():
    pair = Pair(tensor_parallel_size=2)
    first = pair.prefill()
    pair.d.core.connector.buffers[1].held.clear()
    assert pair.decode(first) == plain()
    assert pair.external == 0


# -- answers that are wrong without an error


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_decode_before_all_is_written_reads_what_is_there(mode):
    slow = Hardware(link_bytes_per_s=1e6)
    pair = Pair(p={"hardware": slow}, lmcache={"pd_backend_mode": mode})
    first = pair.prefill()
    assert pair.notices == []
    assert pair.left == 4
    assert pair.decode(first) != plain()
    assert pair.external == 100


def test_kv_that_one_rank_lacks_is_not_kv():
    pair = Pair(tensor_parallel_size=2)
    first = pair.prefill()
    for held in pair.d.core.connector.buffers[1].held.values():
        held.pages = None
    assert pair.decode(first) != plain()


# -- notices that never come


def test_short_prompts_are_told_of_since_pd_saves_unfilled_chunks(pair):
    pair.prefill(PROMPT[:1])
    assert len(pair.notices) == 1


@pytest.mark.parametrize(
    ("mode", "length", "told"),
    [
        ("async", 20, 0),
        ("async", 96, 1),
        ("async", 100, 0),
        ("sync", 20, 0),
        ("sync", 96, 1),
        ("sync", 100, 1),
    ],
)
def test_without_unfilled_chunks(mode, length, told):
    pair = Pair(p={"lmcache": {"discard_partial_chunks": True}}, lmcache={"pd_backend_mode": mode})
    pair.prefill(PROMPT[:length])
    assert len(pair.notices) == told


def test_async_several_workers_and_several_steps_break_the_count():
    """The workers' copy of the request forgets what was pushed: they push it again, and D
    refuses.
    """
    pair = Pair(max_num_batched_tokens=160, tensor_parallel_size=2)
    pair.prefill(LONG)
    assert pair.notices == []
    assert pair.left == 0


def test_a_degraded_engine_answers_and_that_is_all():
    pair = Pair(lmcache={"degraded": True})
    assert pair.split() == plain()
    assert pair.notices == []
    assert pair.external == 0


def test_prefill_stops_for_a_receiver_that_is_not_there(pair):
    stuck = pair.answer(pair.p, PROMPT, 1, params(receiver_init_port=[9]))
    other = pair.answer(pair.p, OTHER, 1, params())
    assert stuck.over is None
    assert other.over is None
    assert not pair.p.dead


# -- what kills an engine


def kills(pair, kv, **more):
    run = pair.answer(pair.p, PROMPT, 1, kv, **more)
    return pair.p.dead and run.over == "error"


@pytest.mark.parametrize(
    "key", ["req_id", "receiver_host", "receiver_init_port", "receiver_alloc_port"]
)
def test_a_missing_key_kills_prefill(pair, key):
    kv = params()
    del kv["disagg_spec"][key]
    assert kills(pair, kv)


@pytest.mark.parametrize("wrong", [None, "spec", 7, []])
def test_a_spec_that_is_no_object_kills_prefill(pair, wrong):
    assert kills(pair, {"disagg_spec": wrong})


@pytest.mark.parametrize("ports", [7300, [], None, ["x"]])
@pytest.mark.parametrize("key", ["receiver_init_port", "receiver_alloc_port"])
def test_wrong_ports_kill_prefill(pair, key, ports):
    assert kills(pair, params(**{key: ports}))


def test_fewer_ports_than_workers_kill_prefill():
    assert kills(Pair(tensor_parallel_size=2), params())


def test_async_a_request_without_a_receiver_kills_prefill(pair):
    assert kills(pair, {"ret_first_tok": True})
    assert kills(Pair(), None)


def test_sync_a_request_without_a_receiver_is_answered():
    """Recorded: 200, `{"first_tok": 3868}`, no notice."""
    pair = Pair(lmcache={"pd_backend_mode": "sync"})
    run = pair.answer(pair.p, PROMPT, 1, {"ret_first_tok": True})
    assert run.handle == {"first_tok": run.tokens[0]}
    assert pair.notices == []


def test_a_request_that_is_not_to_be_saved_needs_no_receiver(pair):
    run = pair.answer(pair.p, PROMPT, 3, {"lmcache.skip_save": True})
    assert run.tokens == plain()[:3]


def test_an_abort_before_the_first_token_kills_prefill_that_owes_it(pair):
    pair.ask(pair.p, PROMPT, 1, params(), id="x")
    pair.abort(pair.p, "x")
    assert pair.p.dead
    with pytest.raises(EngineDeadError):
        pair.ask(pair.p)


def test_an_abort_of_a_prefill_that_owes_no_token_is_harmless(pair):
    pair.ask(pair.p, PROMPT, 1, {"disagg_spec": spec()}, id="x")
    pair.abort(pair.p, "x")
    pair.run(pair.now + 1)
    assert not pair.p.dead


# -- facts


def test_prefill_does_not_start_without_a_proxy():
    with pytest.raises(ValueError, match="notify must be given"):
        facts("prefill", notify=None)


def test_facts_that_make_no_sense():
    for wrong in (
        {"role": "aggregated"},
        {"notify": "http://x"},
        {"lmcache": {"chunk_size": 40}},
        {"lmcache": {"pd_buffer_size": 100}},
    ):
        with pytest.raises(ValueError, match="must"):
            facts("prefill", **wrong) if "role" not in wrong else facts("aggregated")


def test_tells_are_values():
    assert ProxyNotice({"a": 1}) == ProxyNotice({"a": 1}, 0)
