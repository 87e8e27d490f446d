"""What LMCache does with a server of its own, in virtual time."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy_lab.sim.facts import LMCacheFacts, SimFacts
from tests.sim.engines import OTHER, PROMPT, Engines, plain

URL = "http://127.0.0.1:5768/api/v1/telemetry"


class Pair(Engines):
    """P, which reports, and D, which does not."""

    def __init__(self, chunk=32, degraded=False, **facts):
        super().__init__()
        lmcache = LMCacheFacts(chunk_size=chunk, degraded=degraded)
        usual: dict[str, Any] = {"connector": "lmcache-mp", "lmcache": lmcache} | facts
        self.p = self.add(SimFacts(role="prefill", notify=URL, **usual))
        self.d = self.add(SimFacts(role="decode", enable_prefix_caching=False, **usual))

    @property
    def reports(self):
        return [tell.message for _, tell in self.p.notices]

    @property
    def external(self):
        return self.d.stats.prompt_tokens_by_source["external_kv_transfer"]


@given(st.integers(1, 140), st.sampled_from([16, 32, 256]), st.sampled_from([40, 2048]))
@settings(max_examples=40, deadline=None)
def test_split_says_what_one_engine_says(length, chunk, budget):
    prompt = tuple(range(300, 300 + length))
    pair = Pair(chunk, max_num_batched_tokens=budget)
    pair.answer(pair.p, prompt, 1)
    assert pair.answer(pair.d, prompt).tokens == plain(prompt)
    found = length // chunk * chunk
    assert pair.external == found - (found == length)


def test_the_report_names_the_internal_id_and_comes_after_the_answer():
    pair = Pair()
    run = pair.answer(pair.p, PROMPT, 1, id="cmpl-1-0-abcdef01")
    told = {
        "event": "request_store_finished",
        "request_ids_set": ["cmpl-1-0-abcdef01"],
        "model_name": "sim",
        "world_size": 1,
        "kv_rank": 0,
    }
    assert pair.reports == [told]
    assert run.times[-1] <= pair.p.notices[0][0]
    assert run.outputs[-1].kv_transfer_params is None


def test_each_rank_reports():
    pair = Pair(tensor_parallel_size=3)
    pair.answer(pair.p, PROMPT, 1)
    assert [(one["kv_rank"], one["world_size"]) for one in pair.reports] == [(0, 3), (1, 3), (2, 3)]


def test_requests_that_end_in_one_step_come_in_one_report():
    pair = Pair()
    for name in ("first", "a", "b"):  # the others wait for the first one's step
        pair.ask(pair.p, OTHER, 1, id=name)
    pair.run(1)
    assert [one["request_ids_set"] for one in pair.reports] == [["first"], ["a", "b"]]


@pytest.mark.parametrize("length", [1, 31])
def test_a_prompt_of_which_nothing_is_stored_is_reported(length):
    pair = Pair()
    pair.answer(pair.p, PROMPT[:length], 1, id="x")
    assert [one["request_ids_set"] for one in pair.reports] == [["x"]]


def test_an_aborted_request_is_reported():
    pair = Pair()
    pair.ask(pair.p, PROMPT, 8, id="x")
    pair.abort(pair.p, "x")
    pair.run(1)
    assert [one["request_ids_set"] for one in pair.reports] == [["x"]]


def test_without_its_server_nothing_is_stored_and_nobody_is_told():
    pair = Pair(degraded=True)
    pair.answer(pair.p, PROMPT, 1)
    assert pair.answer(pair.d).tokens == plain()
    assert (pair.reports, pair.external) == ([], 0)


def test_a_prompt_that_begins_with_known_chunks_finds_them():
    pair = Pair()
    pair.answer(pair.p, PROMPT, 1)
    prompt = PROMPT[:70] + OTHER
    assert pair.answer(pair.d, prompt).tokens == plain(prompt)
    assert pair.external == 64


def test_what_is_generated_is_not_stored():
    pair = Pair()
    said = pair.answer(pair.p, PROMPT, 60).tokens
    pair.answer(pair.d, (*PROMPT, *said))
    assert pair.external == 96


def test_salts_keep_prompts_apart():
    pair = Pair()
    pair.answer(pair.p, PROMPT, 1, cache_salt="a")
    pair.answer(pair.d, PROMPT, cache_salt="b")
    assert pair.external == 0


def test_statistics_are_answered_if_asked_for():
    pair = Pair()
    pair.answer(pair.p, PROMPT, 1)
    run = pair.answer(pair.d, PROMPT, 8, {"cached_token_stats": True})
    stats = {
        "num_vllm_cached_tokens": 0,
        "num_lmcache_cached_tokens": 96,
        "num_lmcache_extra_cached_tokens": 96,
    }
    assert run.handle == {"cached_token_stats": stats}
