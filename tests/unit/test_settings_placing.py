"""The settings of who serves a request: roles, policies, placements, objectives, profiles and the
labels that pair engines.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import pytest

from pdproxy.app.engines import Profiles
from pdproxy.app.ledger import build_ledger
from pdproxy.scheduling import placements, policies
from pdproxy.scheduling.auto.auto import Auto
from pdproxy.settings.crosscheck import checked_node
from pdproxy.settings.dump import dump
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.load import EngineFlag, Flag, load
from pdproxy.settings.pools import Pool, PoolPolicy, PoolSlo
from pdproxy.settings.schema import Settings
from pdproxy.settings.transfer import bootstrap_address, pairs_to_try
from pdproxy.transfer.registry import ENTRIES
from tests.fakes.placement import Scripted

NODES = "nodes: [{url: 'http://p:1', role: prefill}, {url: 'http://d:1', role: decode}]"
SHORT = (*placements.names(), *policies.names())
Read = Callable[[str], Settings]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Settings of a YAML text."""

    def load_text(text: str) -> Settings:
        path = tmp_path / "x.yaml"
        path.write_text(text)
        return load(path, {}, (), ())

    return load_text


@pytest.fixture
def wrong(read: Read, tmp_path: Path) -> Callable[[str], str]:
    """What is wrong with a YAML text: one line, without the file's name."""

    def why(text: str) -> str:
        with pytest.raises(SettingsError) as caught:
            read(text)
        (line,) = caught.value.mistakes
        return line.replace(f" (file {tmp_path / 'x.yaml'})", "")

    return why


# -- roles

BOTH = ["nixl", "nixl-push", "mooncake", "lmcache-mp", "shared"]


def test_which_connectors_have_engines_for_any_role() -> None:
    assert [entry.name for entry in ENTRIES if entry.capabilities.any_role] == BOTH


@pytest.mark.parametrize("connector", [entry.name for entry in ENTRIES])
def test_any_only_where_one_engine_can_do_both(
    connector: str, read: Read, wrong: Callable[[str], str]
) -> None:
    nodes = (
        "nodes: [{url: 'http://a:1', role: any, facts: {bootstrap: 'http://a:2'}}, {url: "
        "'http://b:1', role: any}]"
    )
    text = f"pools: [{{connector: {connector}, {nodes}}}]"
    if connector in BOTH:
        assert [node.role for node in read(text).pool.nodes] == ["any", "any"]
        return
    text = f"pools: [{{connector: {connector}, nodes: [{{url: 'http://a:1', role: any}}]}}]"
    words = (
        f"an engine of connector {connector} has one role, only those of {', '.join(BOTH)} can "
        f"be any"
    )
    assert wrong(text) == f"pools[0].nodes[0].role: {words}"


def test_engines_for_any_role_by_flags() -> None:
    pool = load(None, {}, (), [EngineFlag("any", "a:1"), EngineFlag("any", "b:1")]).pool
    assert [(node.url, node.role) for node in pool.nodes] == [
        ("http://a:1", "any"),
        ("http://b:1", "any"),
    ]
    mixed = load(None, {}, (), [EngineFlag("prefill", "p:1"), EngineFlag("any", "b:1")]).pool
    assert len(mixed.nodes) == 2, "an engine for any role can decode"


def test_sources_may_be_engines_for_any_role_and_belong_to_them(
    read: Read, wrong: Callable[[str], str]
) -> None:
    text = (
        "pools: [{nodes: [{url: 'http://a:1', role: any, sources: ['http://b:1']}, {url: "
        "'http://b:1', role: any},"
        " {url: 'http://d:1', role: %s, sources: ['http://a:1']}]}]"
    )
    assert read(text % "decode").pool.nodes[2].sources == ("http://a:1",)
    assert wrong(text % "prefill") == "pools[0].nodes[2].sources: only a decode engine takes KV"


def test_an_engine_for_any_role_has_a_bootstrap_server(read: Read) -> None:
    pool = read(
        "pools: [{connector: mooncake, nodes: [{url: 'http://a:1', role: any}, {url: "
        "'http://b:1', role: any}]}]"
    ).pool
    assert [bootstrap_address(node, pool) for node in pool.nodes] == [
        "http://a:8998",
        "http://b:8998",
    ]


def test_serves_whole(read: Read, wrong: Callable[[str], str]) -> None:
    text = (
        "pools: [{connector: %s, nodes: [{url: 'http://p:1', role: prefill%s}, {url: "
        "'http://d:1', role: decode%s}]}]"
    )
    assert read(text % ("nixl", ", serves_whole: true", "")).pool.nodes[0].serves_whole
    assert wrong(text % ("nixl", "", ", serves_whole: true")) == (
        "pools[0].nodes[1].serves_whole: only a prefill engine has this setting, other roles say "
        "whether an engine serves"
        " requests whole"
    )
    assert wrong(text % ("p2p-nccl", ", serves_whole: true", "")) == (
        "pools[0].nodes[0].serves_whole: a prefill engine of connector p2p-nccl can't serve a "
        "request whole"
    )


def test_pairs_of_engines_for_any_role_are_tried_in_a_ring() -> None:
    """Each once in both roles; all pairs with engines of one role."""
    roles = {
        "http://a:1": "any",
        "http://b:1": "any",
        "http://c:1": "any",
        "http://p:1": "prefill",
        "http://d:1": "decode",
    }
    pool = Pool(nodes=tuple(ConfiguredEngine(url=url, role=role) for url, role in roles.items()))  # type: ignore[arg-type]
    pairs = [f"{prefill.url[7]}{decode.url[7]}" for prefill, decode in pairs_to_try(pool)]
    assert sorted(pairs) == ["ab", "ad", "bc", "bd", "ca", "cd", "pa", "pb", "pc", "pd"]
    alone = Pool(nodes=pool.nodes[:1])
    assert pairs_to_try(alone) == []


def test_pairs_of_engines_for_any_role_are_tried_within_their_label() -> None:
    """Neighbours in the settings are in different racks: a ring of all engines would have no
    pair.
    """
    nodes = tuple(
        ConfiguredEngine(url=f"http://{name}:1", role="any", labels={"rack": name[0]})
        for name in ("a1", "b1", "a2", "b2")
    )
    pairs = [
        (p.url[7:9], d.url[7:9]) for p, d in pairs_to_try(Pool(nodes=nodes, pair_within=("rack",)))
    ]
    assert sorted(pairs) == [("a1", "a2"), ("a2", "a1"), ("b1", "b2"), ("b2", "b1")]


def test_each_engine_for_any_role_is_tried_with_its_sources() -> None:
    """Each takes KV of one other only, and none of its neighbour's in the settings."""
    sources = {"a": "c", "b": "d", "c": "a", "d": "b"}
    nodes = tuple(
        ConfiguredEngine(url=f"http://{name}:1", role="any", sources=(f"http://{source}:1",))
        for name, source in sources.items()
    )
    pairs = {(p.url[7], d.url[7]) for p, d in pairs_to_try(Pool(nodes=nodes))}
    assert pairs == {("c", "a"), ("d", "b"), ("a", "c"), ("b", "d")}
    one = tuple(
        ConfiguredEngine(url=f"http://{n}:1", role="any", sources=("http://0:1",) if n else ())
        for n in range(4)
    )
    tried = {(p.url[7], d.url[7]) for p, d in pairs_to_try(Pool(nodes=one))}
    assert {d for _, d in tried} == set("0123"), (
        "each one as decode engine, all but one with the only source"
    )


# -- labels


def test_labels_that_pair(read: Read, wrong: Callable[[str], str]) -> None:
    text = (
        "pools: [{pair_within: [rack], nodes: [{url: 'http://p:1', role: prefill, labels: {rack: "
        "a}},"
        " {url: 'http://d:1', role: decode%s}]}]"
    )
    pool = read(text % ", labels: {rack: a, host: x}").pool
    assert pool.pair_within == ("rack",)
    assert (
        wrong(text % ", labels: {rak: a}")
        == 'pools[0].pair_within[0]: "rack": http://d:1 has no such label'
    )
    aggregated = f"{text % ', labels: {rack: a}'}".replace(
        "}]}]", "}, {url: 'http://x:1', role: aggregated}]}]"
    )
    assert len(read(aggregated).pool.nodes) == 3, "an aggregated engine has no partner"
    node = ConfiguredEngine(url="http://e:1", role="decode")
    with pytest.raises(
        SettingsError, match=r"can't be added: .*rack.*http://e:1 has no such label"
    ):
        checked_node(node, pool, pool.nodes)


@pytest.mark.parametrize(
    ("setting", "pairs"),
    [
        ("", ["p1 d1", "p0 d0"]),
        ("pair_within: null, ", ["p1 d1", "p0 d0"]),
        ("pair_within: [], ", ["p1 d1", "p1 d2", "p1 d0", "p0 d1", "p0 d2", "p0 d0"]),
    ],
)
def test_engines_pair_within_their_revision_unless_told_otherwise(
    read: Read, wrong: Callable[[str], str], setting: str, pairs: list[str]
) -> None:
    """None needs to have one, unless the settings name the label."""
    nodes = [
        f"{{url: 'http://{name}:1', role: {'prefill' if name[0] == 'p' else 'decode'}"
        + (f", labels: {{revision: v{name[1]}}}}}" if name[1] != "0" else "}")
        for name in ("p1", "p0", "d1", "d2", "d0")
    ]
    text = f"pools: [{{{setting}nodes: [{', '.join(nodes)}]}}]"
    tried = pairs_to_try(read(text).pool)
    assert [f"{p.url[7:9]} {d.url[7:9]}" for p, d in tried] == pairs
    named = (
        text.replace(setting, "pair_within: [revision], ")
        if setting
        else text.replace("nodes:", "pair_within: [revision], nodes:", 1)
    )
    assert "http://p0:1 and 1 more has no such label" in wrong(named)


def test_parallel_sizes_count_only_within_a_label(read: Read) -> None:
    """Engines that are never paired may differ in anything."""
    sized = "{url: 'http://%s:1', role: %s, labels: {rack: %s}, facts: {tensor_parallel_size: %s}}"
    nodes = [
        sized % one
        for one in (("p", "prefill", "a", 2), ("d", "decode", "a", 2), ("e", "decode", "b", 3))
    ]
    assert read(
        f"pools: [{{pair_within: [rack], nodes: [{', '.join(nodes)}, "
        f"{sized % ('q', 'prefill', 'b', 3)}]}}]"
    )


# -- policies and placements


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("session", PoolPolicy(placement="split", prefill="session", decode="session")),
        ("split", PoolPolicy(placement="split")),
        ("scripted", PoolPolicy(placement="scripted")),
        ("{decode: prefix}", PoolPolicy(decode="prefix")),
        (
            "{placement: scripted, decode: random}",
            PoolPolicy(placement="scripted", decode="random"),
        ),
        ("{session_header: X-My.Own}", PoolPolicy(session_header="X-My.Own")),
        ("{}", PoolPolicy()),
        ("", PoolPolicy()),
    ],
)
def test_a_policy_by_its_name_alone(
    text: str, wanted: PoolPolicy, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is printed can be read again."""
    monkeypatch.setattr(placements, "PLACEMENTS", MappingProxyType({"scripted": Scripted}))
    settings = read(f"pools: [{{policy: {text}, {NODES}}}]")
    assert settings.pool.policy == wanted
    assert read(dump(settings)) == settings
    made = build_ledger(settings, Profiles(None)).placement
    assert isinstance(made, Scripted) is (wanted.placement == "scripted")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (NODES, "split"),
        (f"slo: {{ttft: 0.5}}, {NODES}", "auto"),
        (f"profile: h200-8b, {NODES}", "auto"),
        (NODES.replace("role: decode", "role: any"), "auto"),
        (f"policy: round_robin, {NODES.replace('role: decode', 'role: any')}", "split"),
        (f"policy: least_load, {NODES.replace('role: decode', 'role: any')}", "split"),
        (f"policy: {{decode: random}}, {NODES.replace('role: decode', 'role: any')}", "split"),
        (f"policy: auto, {NODES}", "auto"),
    ],
)
def test_the_placement_is_auto_where_it_has_something_to_decide_by(
    text: str, wanted: str, read: Read
) -> None:
    settings = read(f"pools: [{{{text}}}]")
    assert settings.pool.placement == wanted
    assert isinstance(build_ledger(settings, Profiles(None)).placement, Auto) is (wanted == "auto")


@pytest.mark.parametrize("useless", ["slo: {ttft: 0.5}", "profile: h200-8b"])
@pytest.mark.parametrize("policy", ["split", "session", "{prefill: prefix}"])
def test_what_only_predictions_use_needs_a_placement(
    useless: str, policy: str, wrong: Callable[[str], str]
) -> None:
    assert wrong(f"pools: [{{policy: {policy}, {useless}, {NODES}}}]") == (
        f"pools[0].{useless.split(':')[0]}: has no effect with placement split, which predicts "
        f"no times"
    )


def test_what_a_long_prompt_counts_needs_to_know_what_is_long(wrong: Callable[[str], str]) -> None:
    assert wrong(f"pools: [{{slo: {{ttft: 0.5, long_weight: 2}}, {NODES}}}]") == (
        "pools[0].slo.long_weight: has no effect without long_prompt, the tokens from which on a "
        "prompt is long"
    )


def test_a_policy_by_its_flag() -> None:
    """In place of the file's section."""
    engines = [EngineFlag("prefill", "p:1"), EngineFlag("decode", "d:1")]
    pool = load(None, {}, [Flag("--policy", "pool.policy", "power_of_two")], engines).pool
    assert pool.policy == PoolPolicy(
        placement="split", prefill="power_of_two", decode="power_of_two"
    )
    with pytest.raises(SettingsError, match=r'got "fast" \(--policy\)$'):
        load(None, {}, [Flag("--policy", "pool.policy", "fast")], engines)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "sesion",
            (
                f'pools[0].policy: expected {" or ".join(SHORT)}, or a mapping, got "sesion" (did '
                f"you mean session?)"
            ),
        ),
        (
            "{placement: fast}",
            (
                f"pools[0].policy.placement: expected {' or '.join(placements.names())} or null, "
                f"got "
                f'"fast"'
            ),
        ),
        ("3", None),
        (
            "{session_header: 'a b'}",
            'pools[0].policy.session_header: expected a header\'s name, got "a b"',
        ),
        (
            "{session_header: ''}",
            'pools[0].policy.session_header: expected a header\'s name, got ""',
        ),
        (
            "{refuse_late: true}",
            (
                "pools[0].policy.refuse_late: has no effect with placement split, which predicts "
                "no "
                "times"
            ),
        ),
        (
            "{refuse_late: maybe}",
            'pools[0].policy.refuse_late: expected true or false, got "maybe"',
        ),
    ],
)
def test_a_wrong_policy_is_one_line(
    text: str, words: str | None, wrong: Callable[[str], str]
) -> None:
    line = wrong(f"pools: [{{policy: {text}, {NODES}}}]")
    assert line.startswith("pools[0].policy") if words is None else line == words


def test_an_objective(read: Read, wrong: Callable[[str], str]) -> None:
    assert read(f"pools: [{{slo: {{ttft: 0.5, tpot: 0.015}}, {NODES}}}]").pool.slo == PoolSlo(
        ttft=0.5, tpot=0.015
    )
    assert wrong(f"pools: [{{slo: {{gap: 0}}, {NODES}}}]") == (
        "pools[0].slo.gap: expected a number > 0 and <= 604800 or null, got 0"
    )


# -- profiles


def test_profiles_are_read_once_and_by_engine(read: Read, tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    shipped = Path("proxy/pdproxy/engine_model/profiles/h200-8b.json").read_text()
    own.write_text(
        shipped.replace('"max_num_batched_tokens": 8192', '"max_num_batched_tokens": 512')
    )
    nodes = NODES.replace("role: decode", f"role: decode, facts: {{profile: '{own}'}}")
    pool = read(f"pools: [{{profile: h200-8b, {nodes}}}]").pool
    profiles = Profiles(pool.profile)
    for node in pool.nodes:
        profiles.set(node)
    assert [profiles.chunk(f"http://{name}:1") for name in ("p", "d", "later")] == [8192, 512, 8192]
    assert profiles.hardware("http://d:1") == profiles.hardware("http://p:1") is not None
    profiles.set(ConfiguredEngine(url="http://d:1", role="decode"))
    assert profiles.chunk("http://d:1") == 8192, "it was added again, without its own"
    none = Profiles(None)
    assert (none.chunk("http://p:1"), none.hardware("http://p:1")) == (None, None)


def test_a_profile_that_cannot_be_used_is_one_line(
    wrong: Callable[[str], str], tmp_path: Path
) -> None:
    assert wrong(f"pools: [{{profile: h100, {NODES}}}]") == (
        "pools[0].profile: h100: neither a file nor one of h200-8b"
    )
    broken = tmp_path / "broken.json"
    broken.write_text('{"name": \n 3}')
    nodes = NODES.replace("role: decode", f"role: decode, facts: {{profile: '{broken}'}}")
    line = wrong(f"pools: [{{{nodes}}}]")
    assert line.startswith(f"pools[0].nodes[1].facts.profile: {broken}: ")
    assert "\n" not in line


def test_a_profile_that_vanished_since_is_one_line_too(read: Read, tmp_path: Path) -> None:
    gone = tmp_path / "gone.json"
    gone.write_text(Path("proxy/pdproxy/engine_model/profiles/h200-8b.json").read_text())
    pool = read(f"pools: [{{profile: '{gone}', {NODES}}}]").pool
    gone.unlink()
    with pytest.raises(SettingsError, match="neither a file nor"):
        Profiles(pool.profile)
