"""What is read of engines' answers and of this machine."""

from pathlib import Path

import pytest

from pdproxy.check import metrics, prompts
from pdproxy.check.facts import Generated
from pdproxy.check.handles import with_other_engine
from pdproxy.check.http_client import Reply, _ahead
from pdproxy.check.machine import machine_facts
from pdproxy.settings.load import EngineFlag, load
from pdproxy.transfer.contract import Handle

DATA = Path(__file__).parent.parent / "data"
DATE = "Sat, 21 Nov 2026 00:00:00 GMT"
AT = 1_795_219_200.0


def test_a_real_engines_metrics():
    page = (DATA / "metrics_decode.txt").read_text().partition("\n\n")[2].partition("\n\n")[2]
    found = metrics.read(page)
    assert found is not None
    assert found.vllm
    assert found.nixl
    assert found.consumer
    assert not found.pdproxy
    assert found.block_size == 32
    assert found.external == found.by_source["external_kv_transfer"] > 0
    assert not found.busy


@pytest.mark.parametrize("page", ["vllm:kv_cache_usage_perc{", "vllm:kv_cache_usage_perc many"])
def test_metrics_that_are_none(page):
    assert metrics.read(page) is None


def test_a_page_without_vllm():
    found = metrics.read("nginx_up 1\n")
    assert found is not None
    assert not found.vllm


@pytest.mark.parametrize(
    ("ahead", "least", "most"),
    [(0.0, 0.0, 0.0), (-1.5, 0.0, 0.0), (0.9, 0.7, 0.9), (60.0, 58.0, 60.0), (-60.0, -60.0, -57.0)],
)
def test_a_clock_is_off_only_if_a_header_in_whole_seconds_proves_it(ahead, least, most):
    ours = AT - ahead
    assert least <= _ahead(DATE, ours, ours + 0.1) <= most
    assert _ahead(None, ours, ours) == _ahead("nonsense", ours, ours) == 0.0


def test_an_answer_in_words_is_one_short_line():
    assert (
        Reply(500, b'{"error":\n  "\x1b[31m' + b"x" * 500)
        .summary()
        .startswith('500: {"error": "?[31mxxx')
    )
    assert len(Reply(500, b"x" * 500).summary()) < 220
    assert Reply(404, b"").summary() == "404"


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"choices":[]}', b"\xff", b'{"choices":[{"text":3}]}']
)
def test_what_is_no_completion(body):
    assert prompts.generated(body) is None


def test_ids_decide_where_both_have_them():
    assert Generated("a", (1, 2)).same(Generated("b", (1, 2)))
    assert not Generated("a", (1, 2)).same(Generated("a", (1, 3)))
    assert Generated("a", ()).same(Generated("a", (1, 3)))


@pytest.mark.parametrize("block", [1, 16, 128, 1024])
def test_a_prompt_fills_blocks_and_begins_with_its_mark(block):
    text = prompts.counting("mark", block, None)
    assert text.startswith("mark: ")
    assert len(text.split()) >= prompts.BLOCKS * block // 2
    assert len(prompts.counting("mark", block, 100)) <= 100 - prompts.LENGTH


def test_a_handle_of_another_engine_is_complete():
    given = Handle(
        b'{"remote_engine_id":"a","remote_block_ids":[[1, 2]],"x":1.50}', b"[1]", 20, "id"
    )
    made = with_other_engine(given, "b")
    assert made.params == b'{"remote_engine_id":"b","remote_block_ids":[[1, 2]],"x":1.50}'
    assert (made.token_ids, made.prompt_tokens, made.remote_request_id) == (b"[1]", 20, "id")


def test_the_machine():
    settings = load(
        None,
        {},
        (),
        [EngineFlag("prefill", "10.0.0.1:1"), EngineFlag("decode", "engine.internal:2")],
    )
    env = {"HTTPS_PROXY": "x", "http_proxy": "http://me:word@proxy:3128", "NO_PROXY": ".internal"}
    found = machine_facts(settings, env)
    assert dict(found.proxies) == {"http_proxy": "proxy:3128"}
    assert found.bypassed == {"http://engine.internal:2"}
    assert found.files_needed > settings.limits.max_inflight
    assert not machine_facts(settings, {}).proxies
