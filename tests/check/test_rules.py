"""Rules on facts that no engine here can be made to show: each says what it is about, and only
then.
"""

from typing import Any

import pytest
from msgspec import structs

from pdproxy.check.facts import (
    Card,
    CheckFacts,
    EngineFacts,
    Generated,
    HandleExpiry,
    LoadFailurePolicy,
    MachineFacts,
    PairFacts,
    Side,
    Split,
    Trouble,
)
from pdproxy.check.metrics import EngineMetrics
from pdproxy.check.rules import judge
from pdproxy.check.rules.transfer import side_trouble
from pdproxy.settings.load import EngineFlag, load

P, D = "http://10.0.0.1:8200", "http://10.0.0.2:8300"
SAID = Generated("and so on", (1, 2, 3), details=True)


def engine(url: str, role: Any, **more: Any) -> EngineFacts:
    metrics = EngineMetrics(
        started=1.0,
        block_size=16,
        by_source={"local_compute": 9.0},
        nixl=True,
        consumer=role == "decode",
    )
    good = {
        "version": "0.32.0",
        "cards": (Card("llama", "/models/llama", None, 8192),),
        "metrics": metrics,
        "block_size": 16,
        "canary": {"llama": ((1, 2), (3, 4))},
        "completions": (SAID, SAID),
        "addresses": frozenset({url.rpartition(":")[0].removeprefix("http://")}),
    }
    return EngineFacts(url=url, role=role, **{**good, **more})


def good(
    prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, **more: Any
) -> CheckFacts:
    side = Side("engine-p", "10.0.0.1", 5600, addresses=frozenset({"10.0.0.1"}), reach="open")
    p = engine(P, "prefill", **{"side": side, "lease": HandleExpiry(5.0), **(prefill or {})})
    d = engine(D, "decode", **{"policy": LoadFailurePolicy("fail"), **(decode or {})})
    last = Split(end="answered", prompt_tokens=50, due=48, moved=50, answer=SAID, alone=SAID)
    facts = CheckFacts(
        settings=load(None, {}, (), [EngineFlag("prefill", P), EngineFlag("decode", D)]),
        engines=[p, d],
        pairs=[PairFacts(prefill=P, decode=D, tries=(last,))],
    )
    for name, value in more.items():
        setattr(facts, name, value)
    return facts


def tried(**more: Any) -> list[PairFacts]:
    last = good().pairs[0].last
    return [PairFacts(prefill=P, decode=D, tries=(structs.replace(last, **more),))]


def codes(facts: CheckFacts) -> dict[str, str]:
    return {finding.code: finding.level for finding in judge(facts)}


def test_good_facts_yield_nothing():
    assert judge(good()) == []


def test_errors_come_first():
    facts = good(
        {"clock_skew": 60.0},
        {"version": "0.31.0"},
        machine=MachineFacts(proxies={"HTTP_PROXY": "proxy:3128"}),
    )
    assert [finding.level for finding in judge(facts)] == ["error", "warning", "note"]


@pytest.mark.parametrize("role", ["decode", "any"])
def test_an_engine_that_takes_kv_and_does_not_count_it_is_named(role: str) -> None:
    """Nothing would show that it computes prompts again."""
    taker = engine(
        D,
        role,
        metrics=EngineMetrics(started=1.0, block_size=16, nixl=True, consumer=True),
        policy=LoadFailurePolicy("fail"),
    )
    (finding,) = [
        one for one in judge(good(engines=[good().engines[0], taker])) if one.code == "no_metrics"
    ]
    assert (finding.level, finding.where) == ("warning", (D,))


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        (good({"clock_skew": 7.0}), {"clock": "warning"}),
        (good({"clock_skew": -7.0}), {"clock": "warning"}),
        (good({"restarted": True}), {"engine_changed": "error"}),
        (good(decode={"cards": ()}), {"no_model": "error"}),
        (good({"metrics": EngineMetrics(vllm=False)}), {"no_metrics": "warning"}),
        (good({"block_size": None}, {"block_size": None}), {"block_size_unknown": "warning"}),
        (good(decode={"block_size": None}), {"block_size_unknown": "error"}),
        (good(decode={"version": ""}), {"versions_differ": "error"}),
        (good(decode={"cards": (Card("llama"), Card("alias"))}), {"models_differ": "error"}),
        (
            good(decode={"cards": (Card("llama"), Card("lora", parent="llama"))}),
            {"names_differ": "warning"},
        ),
        (
            good(decode={"cards": (Card("llama", "/elsewhere", None, 8192),)}),
            {"roots_differ": "note"},
        ),
        (
            good(decode={"cards": (Card("qwen"),), "canary": {"qwen": ((7,), (8,))}}),
            {"models_differ": "error"},
        ),
        (good(decode={"canary": {"llama": ((1, 2), ())}}), {"templates_differ": "error"}),
        (
            good(decode={"completions": (Generated("no", (9,), details=True), SAID)}),
            {"weights_differ": "warning"},
        ),
        (good({"lease": HandleExpiry(5.0, 2.0)}), {"lease_short": "warning"}),
        (good(machine=MachineFacts(files=1024, files_needed=3136)), {"open_files": "warning"}),
        (good(machine=MachineFacts(files=4096, files_needed=3136)), {}),
        (good(machine=MachineFacts(proxies={"http_proxy": "p"}, bypassed=frozenset({P, D}))), {}),
        (good(pairs=tried(kept=True)), {"kv_kept": "warning"}),
        (good(pairs=tried(counted=False, moved=0)), {}),
        (good(pairs=tried(moved=0)), {"kv_not_moved": "error"}),
        (good(pairs=tried(end="refused", text="answered 500")), {"split_failed": "error"}),
        (good(pairs=tried(end="silent", text="did not answer in 10 s")), {"split_silent": "error"}),
        (
            good(pairs=tried(end="untried", text="its KV block size is not known")),
            {"pair_untried": "warning"},
        ),
    ],
)
def test_one_fact_that_is_off_is_one_finding(facts, found):
    assert codes(facts) == found


def test_one_greedy_answer_of_two_that_differs_is_a_warning_two_are_an_error():
    other = Generated("but no", (7, 8, 9))
    first, second = (structs.replace(good().pairs[0].last, answer=said) for said in (other, SAID))
    assert codes(good(pairs=[PairFacts(prefill=P, decode=D, tries=(first, second))])) == {
        "split_wavers": "warning"
    }
    assert codes(good(pairs=[PairFacts(prefill=P, decode=D, tries=(first, first))])) == {
        "split_differs": "error"
    }


def test_a_push_connector_is_named_as_such():
    side = Side("engine-p", "10.0.0.1", 5600, "push")
    pairs = [
        PairFacts(prefill=P, decode=D, tries=(Split(end="no_handle", text="transfer_mode=push"),))
    ]
    facts = good({"side": side, "no_handle": "its handle says transfer_mode=push"}, pairs=pairs)
    (found,) = judge(facts)
    assert found.code == "push_connector"
    assert "NixlConnector" in found.remedy


def test_old_engines_that_show_no_consumers_are_not_accused():
    silent = {
        "version": "0.30.0",
        "metrics": EngineMetrics(nixl=True, by_source={"local_compute": 1.0}, block_size=16),
    }
    assert codes(good(silent, silent)) == {}


@pytest.mark.parametrize(
    ("side", "same_machine", "words"),
    [
        (
            Side("e", "0.0.0.0", 5600, addresses=frozenset({"0.0.0.0"})),
            False,
            "not one to connect to",
        ),
        (
            Side("e", "127.0.0.1", 5600, addresses=frozenset({"127.0.0.1"})),
            False,
            "D's machine itself",
        ),
        (Side("e", "127.0.0.1", 5600, addresses=frozenset({"127.0.0.1"})), True, ""),
        (Side("e", "gone", 5600, reach="unresolvable"), True, "has no address"),
        (
            Side("e", "10.0.0.1", 5600, addresses=frozenset({"10.0.0.1"}), reach="closed"),
            False,
            "nothing listens",
        ),
        (Side("e", "10.0.0.1", 5600, addresses=frozenset({"10.0.0.1"}), reach="open"), False, ""),
        (None, False, ""),
    ],
)
def test_what_is_wrong_with_a_side_channels_address(side, same_machine, words):
    decode = engine(D, "decode", **({"addresses": frozenset({"10.0.0.1"})} if same_machine else {}))
    found = side_trouble(engine(P, "prefill", side=side), decode)
    assert words in found
    assert bool(words) == bool(found)


def test_a_wrong_address_that_works_all_the_same_is_no_finding():
    """Engines in one network namespace reach 0.0.0.0: the proof that KV moved counts for more."""
    assert codes(good({"side": Side("e", "0.0.0.0", 5600)})) == {}


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("unreachable", "--host 0.0.0.0"),
        ("tls", "https://"),
        ("unhealthy", "log"),
        ("broken", "vLLM server"),
    ],
)
def test_each_trouble_has_its_remedy(kind, word):
    pairs = [PairFacts(prefill=P, decode=D, tries=(Split(end="untried", text="x"),))]
    (found,) = judge(good(decode={"trouble": Trouble(kind, "it is bad")}, pairs=pairs))
    assert found.code == "engine_down"
    assert word in found.remedy


def test_a_proxy_in_the_environment_is_named_where_an_engine_cannot_be_reached():
    facts = good(
        {"trouble": Trouble("unreachable", "x")},
        machine=MachineFacts(proxies={"http_proxy": "p:1"}),
    )
    facts.pairs = []
    assert "no HTTP proxy" in judge(facts)[0].remedy


def test_a_key_for_engines_without_keys_for_clients_is_noted():
    env = {"PDPROXY_AUTH__ENGINE_API_KEY": "secret"}
    facts = good(settings=load(None, env, (), [EngineFlag("prefill", P), EngineFlag("decode", D)]))
    (found,) = judge(facts)
    assert found.code == "clients_need_key"
    assert "secret" not in repr(found)
