"""Engines that are as their contract says pass all that applies to it, and keep nothing of it."""

from __future__ import annotations

import pytest
from msgspec import structs

from pdproxy_lab.conformance.checks import CHECKS
from pdproxy_lab.conformance.runner import run
from tests.conformance.engines import PATIENT, rig

NEW = {"version": "0.33.0", "bidirectional_kv_xfer": True}
NO_LEASE = {"release", "lease"}
ANY_LENGTH = {"short_prompt"}
READ = {"transfer_mode": "READ"}
RESPONSES = {"response", "response_stream"}
NAMED = {*RESPONSES, "message", "message_stream"}
NO_NOTICES = {"notice_each_rank", "notice_wait", "notice_missing"}


@pytest.mark.parametrize(
    ("connector", "how", "not_applicable"),
    [
        ("nixl", {}, NO_NOTICES),
        ("nixl", {"notifier": True}, {"notice_wait"}),
        ("nixl", {"encodes": True}, NO_NOTICES),
        ("mooncake", {}, NO_NOTICES | {"lease"}),
        ("lmcache-pd", {"ranks": 2}, NAMED | NO_LEASE),
        ("lmcache-mp", {"ranks": 2}, NO_LEASE),
        ("shared", {}, NO_LEASE | NO_NOTICES),
        ("kvstore-keys", {}, NAMED | NO_LEASE | NO_NOTICES),
        ("cpu", {}, NAMED | NO_LEASE | NO_NOTICES),
        ("p2p-nccl", {}, RESPONSES | NO_LEASE | NO_NOTICES | ANY_LENGTH),
        ("moriio", {"p": READ, "d": READ}, RESPONSES | NO_LEASE | NO_NOTICES | ANY_LENGTH),
        ("moriio", {}, RESPONSES | NO_LEASE | NO_NOTICES | ANY_LENGTH),
    ],
    ids=[
        "nixl",
        "nixl with the notifier",
        "nixl with an encoder engine",
        "mooncake",
        "lmcache-pd",
        "lmcache-mp",
        "shared",
        "kvstore-keys",
        "cpu",
        "p2p-nccl",
        "moriio READ",
        "moriio WRITE",
    ],
)
async def test_all_pass_that_apply(connector, how, not_applicable):
    async with rig(connector, **how) as engines:
        results = await engines.judge(options=PATIENT, plain=True)
        assert list(results) == [check.name for check in CHECKS]
        verdicts = {name: result.verdict for name, result in results.items()}
        left = not_applicable if how.get("encodes") else not_applicable | {"picture"}
        wanted = {name: "not_applicable" if name in left else "passed" for name in results}
        assert verdicts == wanted, {name: result.says for name, result in results.items()}
        for one in (engines.p, engines.d):
            assert not one.engine.handles
            assert one.engine.stats.kv_cache_usage == 0
            assert not one.crashes


async def test_handles_in_events_are_hidden():
    """As D of vLLM 0.33.0 sends them, if it keeps KV for the next turn: nothing differs from an
    engine that sends none.
    """
    async with rig(p=NEW, d=NEW) as engines:
        results = await engines.judge(
            "completion", "completion_stream", "chat_stream", options=PATIENT, plain=True
        )
        assert {result.verdict for result in results.values()} == {"passed"}, results


async def test_without_a_plain_engine_a_shared_storage_proves_no_answer():
    """D finds the prompt's KV there even when it is asked by itself."""
    async with rig("shared") as engines:
        results = await engines.judge("completion", options=PATIENT)
        assert results["completion"].verdict == "not_judged"
        assert "--plain" in results["completion"].says


async def test_a_lease_is_not_watched_if_the_operator_wants_it_so():
    async with rig() as engines:
        results = await engines.judge("lease", options=structs.replace(PATIENT, lease_watch=0))
        assert results["lease"].verdict == "not_applicable"
        assert results["lease"].says == "--lease-watch 0"


async def test_a_wait_for_notices_may_end_in_an_error():
    async with rig("lmcache-pd", kv_ready={"on_timeout": "fail"}) as engines:
        results = await engines.judge("notice_missing", options=PATIENT)
        assert results["notice_missing"].verdict == "passed"
        assert results["notice_missing"].says.startswith("504 after")


async def test_the_connector_may_be_found_by_asking():
    async with rig() as engines:
        pool = structs.replace(engines.settings.pool, connector="auto")
        engines.settings = structs.replace(engines.settings, pools=(pool,))
        results = await engines.judge("kv_moved", options=PATIENT)
        assert results["kv_moved"].verdict == "passed"


async def test_engines_for_any_role_are_tried_in_both():
    """Each makes KV for the next one, in a proxy that knows it by one role."""
    async with rig("nixl", p={"kv_role": "kv_both"}, d={"kv_role": "kv_both"}) as engines:
        nodes = tuple(
            structs.replace(engine, role="any") for engine in engines.settings.pool.nodes[:2]
        )
        settings = structs.replace(
            engines.settings, pools=(structs.replace(engines.settings.pool, nodes=nodes),)
        )
        wanted = ("pair", "completion", "chat_stream", "release")
        report = await run(settings, PATIENT, [check for check in CHECKS if check.name in wanted])
        assert [(pair.prefill, pair.decode) for pair in report.pairs] == [
            (engines.p.url, engines.d.url),
            (engines.d.url, engines.p.url),
        ]
        verdicts = {result.verdict for pair in report.pairs for result in pair.results}
        assert verdicts == {"passed"}, report
        assert all(len(pair.results) == len(wanted) for pair in report.pairs)
