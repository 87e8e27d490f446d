"""Engines that are wrong in one way each: the check of simulated engines names it, and what to
do.
"""

import asyncio
import socket
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from msgspec import structs

from pdproxy.observe.events import Observers
from pdproxy.serving.access.clients import Clients
from pdproxy.serving.access.keys import Keys
from pdproxy.settings.listen import Cors
from pdproxy.settings.load import EngineFlag, load
from pdproxy.web.app import AnswerMakers, create_app
from pdproxy.web.body_budget import BodyBudget
from pdproxy.web.client_identifier import ClientIdentifier
from pdproxy.web.operation import Operation, OperationState, Readiness
from pdproxy.web.passthrough_asgi import PassthroughAsgi
from pdproxy_lab.sim.memory import EMPTY
from tests.check.engines import QUICK, Bench, Checked, listening


async def pair(
    bench: Bench, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None
) -> Checked:
    await bench.start("prefill", **(prefill or {}))
    await bench.start("decode", **(decode or {}))
    return await bench.check()


async def test_a_good_pair_yields_nothing_and_leaves_nothing_behind(bench):
    checked = await pair(bench)
    assert checked.findings == []
    (tried,) = checked.learned.pairs
    assert tried.last.kv_moved
    assert tried.last.moved == tried.last.prompt_tokens >= 3 * 16
    assert not tried.last.differs
    assert bench.held == 0
    assert all(one.engine.stats.kv_cache_usage == 0 for one in bench.running)
    assert bench.running[0].engine.stats.kv_expired == 0


async def test_engines_for_any_role_are_proven_in_both(bench):
    """Each makes KV for the next one, which is enough to know them all; mixed with others, in all
    pairs with those.
    """
    for _ in range(3):
        await bench.start("any")
    checked = await bench.check()
    assert checked.findings == []
    urls = [one.url for one in bench.running]
    ring = set(zip(urls, [*urls[1:], urls[0]], strict=True))
    assert {(tried.prefill, tried.decode) for tried in checked.learned.pairs} == ring
    assert all(tried.last.kv_moved for tried in checked.learned.pairs)
    assert bench.held == 0
    await bench.start("decode")
    await bench.start("aggregated")
    checked = await bench.check()
    assert checked.findings == []
    assert len(checked.learned.pairs) == 6


async def test_one_engine_for_any_role_with_other_weights_is_named_once(bench):
    for weights in (0, 0, 1):
        await bench.start("any", weights=weights)
    checked = await bench.check()
    assert checked["weights_differ"].where[0] == bench.running[2].url
    assert len([one for one in checked.findings if one.code == "weights_differ"]) == 1


async def test_all_pairs_of_a_good_fleet_are_proven(bench):
    for role in ("prefill", "prefill", "decode", "decode", "aggregated"):
        await bench.start(role)
    checked = await bench.check()
    assert checked.findings == []
    assert len(checked.learned.pairs) == 4
    assert all(tried.last.kv_moved for tried in checked.learned.pairs)
    assert bench.held == 0


async def test_engines_that_are_no_pair_are_not_tried_as_one(bench):
    for role in ("prefill", "prefill", "decode", "decode"):
        await bench.start(role)
    settings = bench.settings()
    p0, p1, d0, d1 = settings.pool.nodes
    engines = p0, p1, structs.replace(d0, sources=(p1.url,)), d1
    checked = await bench.check(
        structs.replace(settings, pools=(structs.replace(settings.pool, nodes=engines),))
    )
    assert checked.findings == []
    tried = {(one.prefill, one.decode) for one in checked.learned.pairs}
    assert tried == {(p1.url, d0.url), (p0.url, d1.url), (p1.url, d1.url)}


async def test_a_check_can_be_repeated(bench):
    assert not (await pair(bench)).findings
    assert not (await bench.check()).findings


async def test_aggregated_engines_alone_are_fine(bench):
    await bench.start("aggregated", connector="none")
    assert (await bench.check()).findings == []


async def test_swapped_roles(bench):
    await bench.start("decode")
    await bench.start("prefill")
    one, other = (one.url for one in bench.running)
    checked = await bench.check(
        load(None, {}, (), [EngineFlag("prefill", one), EngineFlag("decode", other)])
    )
    found = checked["roles_swapped"]
    assert found.level == "error"
    assert set(found.where) == {one, other}
    assert "swap their URLs" in found.remedy


# -- one fact of a pair that is wrong

SHORT = {"kv_lease_duration": 0.3}
BOTH = {"kv_role": "kv_both"}
ALL_THAT_IS_SAID = {"prefill_is_consumer", "policy_recompute", "prompt_details_off"}
ALL_BUT_NOTES = {"weights_differ", "templates_differ", "tokenizers_differ", "block_sizes_differ"}
UNTRIED = {"versions_differ", "block_sizes_differ"}
"""No prompt is sent through such a pair: another block size would kill the decode engine."""
NOTHING_HELD = {"weights_differ", "policy_recompute"}


@pytest.mark.parametrize(
    ("code", "level", "prefill", "decode", "says", "remedy"),
    [
        ("decode_is_producer", "error", {}, {"kv_role": "kv_producer"}, "", "kv_consumer"),
        ("prefill_is_consumer", "note", BOTH, BOTH, "", ""),
        (
            "models_differ",
            "error",
            {"model": "llama"},
            {"model": "qwen"},
            "llama on prefill",
            "--served-model-name",
        ),
        ("weights_differ", "error", {}, {"weights": 1}, "", "--revision"),
        (
            "versions_differ",
            "error",
            {"version": "0.31.1"},
            {},
            "0.31.1 on prefill",
            "same version",
        ),
        ("templates_differ", "error", {}, {"template": "plain"}, "", "--chat-template"),
        ("tokenizers_differ", "error", {}, {"add_bos": True}, "", "--tokenizer"),
        ("block_sizes_differ", "error", {"block_size": 32}, {}, "", "--block-size"),
        (
            "max_model_len_differs",
            "warning",
            {"max_model_len": 4096},
            {},
            "4096 on prefill",
            "--max-model-len",
        ),
        (
            "decode_no_connector",
            "error",
            {},
            {"connector": "none"},
            "no KV moved",
            '"kv_role":"kv_consumer"',
        ),
        ("kv_kept", "note", {}, {"connector": "none"}, "", ""),  # nobody could give that KV back
        (
            "no_connector",
            "error",
            {"connector": "none"},
            {},
            "no KV handle",
            '"kv_role":"kv_producer"',
        ),
        ("policy_recompute", "note", {}, {"kv_load_failure_policy": "recompute"}, "", ""),
        (
            "prompt_details_off",
            "warning",
            {},
            {"enable_prompt_tokens_details": False},
            "",
            "--enable-prompt-tokens",
        ),
        ("lease_short", "warning", SHORT, {}, "", "kv_lease_duration"),
    ],
)
async def test_one_wrong_fact_is_named_with_what_to_do(
    bench, code, level, prefill, decode, says, remedy
):
    await bench.start("prefill", **prefill)
    await bench.start("decode", **decode)
    watch = 5.0 if code == "lease_short" else QUICK.lease_watch  # over as soon as the lease is
    checked = await bench.check(options=structs.replace(QUICK, lease_watch=watch))
    found = checked[code]
    assert found.level == level
    assert says in found.says
    assert remedy in found.remedy
    assert code not in ALL_THAT_IS_SAID or checked.codes == {code}
    assert code not in ALL_BUT_NOTES or checked.bad == {code}
    assert code not in UNTRIED or checked.learned.pairs[0].last.end == "untried"
    assert code not in NOTHING_HELD or bench.held == 0
    assert not any(one.engine.dead for one in bench.running)


@pytest.mark.parametrize(
    ("prefill", "decode", "watch"),
    [
        # the prompt that is tried fits
        ({"max_model_len": 64}, {"max_model_len": 64}, QUICK.lease_watch),
        (SHORT, {}, 0.0),  # the lease is not watched where that is not wanted
    ],
)
async def test_what_is_not_wrong(bench, prefill, decode, watch):
    await bench.start("prefill", **prefill)
    await bench.start("decode", **decode)
    checked = await bench.check(options=structs.replace(QUICK, lease_watch=watch))
    assert checked.findings == []
    assert checked.learned.pairs[0].last.kv_moved


# -- what shows in the fleet


async def test_one_engine_of_four_with_other_weights_is_the_one_that_is_named(bench):
    for role in ("prefill", "prefill", "decode", "decode"):
        await bench.start(role, weights=int(len(bench.running) == 2))
    checked = await bench.check()
    assert [one.where[0] for one in checked.findings if one.code == "weights_differ"] == [
        bench.running[2].url
    ]


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1"])
async def test_a_wrong_side_channel_host(bench, host, policy, monkeypatch):
    _keep_names_off_the_network(monkeypatch)
    decode = {"kv_load_failure_policy": policy, "handshake_timeout": 0.2}
    checked = await pair(bench, {"side_channel_host": host}, decode)
    found = checked["side_channel"]
    assert found.level == "error"
    assert f"{host}:" in found.says
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST" in found.remedy
    assert not bench.running[1].engine.dead


@pytest.mark.parametrize("ours", [None, "another"])
async def test_a_wrong_key(bench, ours):
    await bench.start("prefill", api_key="right")
    await bench.start("decode", api_key="right")
    env = {"PDPROXY_AUTH__ENGINE_API_KEY": ours} if ours else {}
    listed = [EngineFlag(one.facts.role, one.url) for one in bench.running]
    checked = await bench.check(load(None, env, (), listed))
    found = checked["wrong_key"]
    assert found.level == "error"
    assert "auth.engine_api_key" in found.remedy
    assert "right" not in str(checked)


async def test_the_right_key(bench):
    await bench.start("prefill", api_key="right")
    await bench.start("decode", api_key="right")
    env = {"PDPROXY_AUTH__ENGINE_API_KEY": "right", "PDPROXY_AUTH__API_KEYS": "client"}
    checked = await bench.check(
        load(None, env, (), [EngineFlag(one.facts.role, one.url) for one in bench.running])
    )
    assert checked.findings == []


async def test_an_engine_that_is_down(bench):
    await bench.start("prefill")
    decode = await bench.start("decode")
    await decode.kill()
    checked = await bench.check()
    found = checked["engine_down"]
    assert found.where == (decode.url,)
    assert "start the engine" in found.remedy
    assert checked.learned.pairs[0].last.end == "untried"


async def test_https_in_the_url_of_an_engine_without_tls(bench):
    url = (await bench.start("decode")).url.replace("http:", "https:")
    found = (await bench.check(load(None, {}, (), [EngineFlag("decode", url)])))["engine_down"]
    assert "no TLS: it answers plain HTTP" in found.says
    assert "https://" in found.remedy


async def test_an_engine_that_restarts_half_way(bench, monkeypatch):
    prefill, decode = await bench.start("prefill"), await bench.start("decode")
    generate = decode.engine.generate

    def restarting(request):
        if request.kv_transfer_params:
            prefill.engine.started_at += 60
        return generate(request)

    monkeypatch.setattr(decode.engine, "generate", restarting)
    assert (await bench.check())["engine_changed"].where == (prefill.url,)


async def test_an_engine_whose_core_is_dead(bench):
    await bench.start("prefill")
    (await bench.start("decode")).engine.kill_core()
    checked = await bench.check()
    assert "503" in checked["engine_down"].says
    assert "core has died" in checked["engine_down"].remedy


async def test_a_frozen_process_takes_connections_and_never_answers(bench):
    await bench.start("prefill")
    decode = await bench.start("decode")
    await decode.freeze()
    checked = await bench.check(options=structs.replace(QUICK, timeout=4))
    assert checked["engine_down"].where == (decode.url,)
    assert "did not answer in 4 s" in checked["engine_down"].says
    assert "--timeout" in checked["engine_down"].remedy


async def test_a_frozen_core_is_healthy_and_mute(bench):
    await bench.start("prefill")
    (await bench.start("decode")).engine.freeze()
    checked = await bench.check(options=structs.replace(QUICK, timeout=5))
    found = checked["engine_mute"]
    assert found.where == (bench.running[1].url,)
    assert "healthy" in found.says
    assert "log" in found.remedy


async def test_decode_that_freezes_over_a_handle_is_asked_only_once(bench, monkeypatch):
    """D's core works for itself and hangs as soon as it gets KV: the other pairs with it are not
    tried.
    """
    first, second = [await bench.start("prefill") for _ in range(2)]
    decode = await bench.start("decode")
    generate = decode.engine.generate

    def freezing(request):
        if request.kv_transfer_params:
            decode.engine.freeze()
        return generate(request)

    monkeypatch.setattr(decode.engine, "generate", freezing)
    checked = await bench.check(options=structs.replace(QUICK, timeout=5))
    assert [tried.last.end for tried in checked.learned.pairs] == ["silent", "untried"]
    assert checked["split_silent"].where == (first.url, decode.url)
    assert checked["pair_untried"].where == (second.url, decode.url)


async def test_one_engine_in_two_roles_under_two_names(bench):
    await bench.start("prefill")
    decode = await bench.start("decode")
    again = decode.url.replace("127.0.0.1", "localhost")
    checked = await bench.check(bench.settings(more=(EngineFlag("aggregated", again),)))
    assert set(checked["same_engine"].where) == {decode.url, again}
    assert "once" in checked["same_engine"].remedy


async def test_kv_that_arrives_wrong(bench, monkeypatch):
    """P's pages come empty: the counters are content, the text is not."""
    prefill = await bench.start("prefill")
    await bench.start("decode")
    (link,) = prefill.engine._links
    read = link.read
    monkeypatch.setattr(link, "read", lambda blocks: [EMPTY for _ in read(blocks)])
    checked = await bench.check()
    found = checked["split_differs"]
    assert len(checked.learned.pairs[0].tries) == 2
    assert "--kv-cache-dtype" in found.remedy


async def test_an_aggregated_engine_with_another_template_is_a_warning(bench):
    await bench.start("prefill")
    await bench.start("decode")
    await bench.start("aggregated", template="plain", weights=3)
    checked = await bench.check()
    assert checked["templates_differ"].level == "warning"
    assert not any(one.level == "error" for one in checked.findings)


async def test_a_url_that_is_pdproxy_itself(bench):
    async def models(*_: object) -> bytes:
        return b'{"object":"list","data":[]}'

    async def never(*_: object) -> None:
        raise AssertionError

    await bench.start("prefill")
    clients, observers = Clients(), Observers([])
    passthrough = PassthroughAsgi(
        never,
        ClientIdentifier(clients, Keys()),
        clients,
        BodyBudget(1, observers),
        frozenset(),
        max_body=1,
    )

    async def ready() -> Readiness:
        return Readiness(OperationState.OK, None, [])

    async def metrics() -> bytes:
        return b"pdproxy_requests_total 1.0\n"

    async def load() -> int:
        return 0

    app = create_app(
        AnswerMakers(
            Operation(load, ready, metrics),
            models,
            passthrough,
            Cors(),
        )
    )
    async with listening(app) as url:
        checked = await bench.check(bench.settings(more=(EngineFlag("decode", url),)))
    assert checked.bad == {"not_an_engine"}
    assert "vLLM server itself" in checked["not_an_engine"].remedy
    assert checked.learned.pairs[0].last.end == "untried"


async def test_requests_of_others_are_noted(bench):
    prefill = await bench.start("prefill")
    await bench.start("decode")
    prefill.engine.stats.running = 3
    assert "3 other requests" in (await bench.check())["busy"].says


async def test_engines_that_never_answer_are_asked_at_once(bench):
    """So their deadlines do not add up."""
    asked, most = Counter[int](), 0

    def silent(number):
        async def serve(reader, writer):
            nonlocal most
            asked[number] += 1
            most = max(most, len(+asked))
            with suppress(ConnectionError):
                await reader.read()  # until the client gives up
            asked[number] -= 1
            writer.close()

        return serve

    servers = [await asyncio.start_server(silent(number), "127.0.0.1", 0) for number in range(6)]
    urls = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    first, *others = urls
    more = (EngineFlag("prefill", first), *(EngineFlag("decode", url) for url in others))
    settings = bench.settings(more=more)
    checked = await bench.check(settings, structs.replace(QUICK, timeout=2.0))
    assert [one.code for one in checked.findings] == ["engine_down"] * 6
    assert most == 6
    for server in servers:
        server.close()


def _keep_names_off_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names resolve as they would without a network, and at once; addresses reserved for
    documentation take no connection.
    """
    resolve, connect = asyncio.BaseEventLoop.getaddrinfo, asyncio.open_connection

    async def getaddrinfo(loop, host, *arguments, **more):
        if str(host).endswith(".invalid"):
            raise socket.gaierror(socket.EAI_NONAME, "no such host")
        return await resolve(loop, host, *arguments, **more)

    async def open_connection(host=None, *arguments, **more):
        if str(host).startswith("192.0.2."):
            raise ConnectionRefusedError("not on this network")
        return await connect(host, *arguments, **more)

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(asyncio, "open_connection", open_connection)


BACK = {"bidirectional_kv_xfer": True}


def _bidirectional(bench: Bench) -> Any:
    settings = bench.settings()
    turns = structs.replace(settings.pool.turns, bidirectional=True)
    return structs.replace(settings, pools=(structs.replace(settings.pool, turns=turns),))


@pytest.mark.parametrize(
    ("prefill", "decode", "wanted", "found"),
    [
        (BACK, BACK, True, None),
        ({}, {}, False, None),
        ({}, BACK, True, ("turns_not_read", "error")),
        (BACK, {}, True, ("turns_not_kept", "error")),
        (BACK, BACK, False, ("turns_unused", "warning")),
    ],
)
async def test_kv_that_goes_back(bench, prefill, decode, wanted, found):
    """Whatever is found, nothing is held afterwards, and P without the option is never left
    waiting.
    """
    await bench.start("prefill", **prefill)
    await bench.start("decode", **decode, kv_load_failure_policy="recompute")
    checked = await bench.check(_bidirectional(bench) if wanted else bench.settings())
    expected = {"policy_recompute": "note"} | ({} if found is None else dict([found]))
    assert {one.code: one.level for one in checked.findings} == expected
    async with asyncio.timeout(30):
        while bench.held:
            await asyncio.sleep(0.01)
    assert all(one.engine.stats.kv_cache_usage == 0 for one in bench.running)
    assert bench.running[1].engine.stats.kv_expired == 0
