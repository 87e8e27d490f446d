"""What connectors ask of the settings: receivers, buffers, and the flags that spread over decode
engines.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from msgspec import structs

from pdproxy.app.transfer import build_transfer, kv_host_of
from pdproxy.cli.options import add_settings_options, settings_from
from pdproxy.kit.clock import Clock
from pdproxy.observe.events import Observers
from pdproxy.settings.crosscheck import crosscheck
from pdproxy.settings.engines import ConfiguredEngine, Facts
from pdproxy.settings.errors import Mistakes, SettingsError
from pdproxy.settings.kv import LMCache, ReceiverSettings, Turns
from pdproxy.settings.pools import Pool
from pdproxy.settings.schema import Settings
from pdproxy.settings.transfer import bootstrap_address, receiver_host
from pdproxy.tokens.ids import TokenIds
from pdproxy.transfer.contract import Dispatch, Handle
from pdproxy.wire.request import parse
from pdproxy.wire.route import Route
from tests.fakes.registry import registry

P = ConfiguredEngine(url="http://p:8100", role="prefill")


def checked(settings: Settings, *, need_engines: bool = True) -> Settings:
    """The settings after the checks; raises for their mistakes."""
    found = Mistakes()
    settings = crosscheck(settings, found, need_engines=need_engines)
    found.raise_any()
    return settings


def decode(engine: str = "d", port: int = 7300, ranks: int = 1, **more: Any) -> ConfiguredEngine:
    """A decode engine with a receiver."""
    init = tuple(range(port, port + ranks))
    receiver = ReceiverSettings(
        init_ports=init, alloc_ports=tuple(one + 100 for one in init), **more
    )
    return ConfiguredEngine(url=f"http://{engine}:8200", role="decode", receiver=receiver)


def pool(*nodes: ConfiguredEngine, **more: Any) -> Settings:
    """Settings of an LMCache pool."""
    return Settings(pools=(Pool(connector="lmcache-pd", nodes=(P, *nodes), **more),))


def wrong(settings: Settings) -> str:
    """Why settings are refused: one line."""
    with pytest.raises(SettingsError) as caught:
        checked(settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_decode_engines_of_lmcache_need_receivers() -> None:
    """The key is named, and the flags."""
    message = wrong(pool(decode("a"), ConfiguredEngine(url="http://b:8200", role="decode")))
    assert message.startswith(
        "pools[0].nodes[2].receiver: connector lmcache-pd needs init_ports and alloc_ports of "
        "http://b:8200"
    )
    assert "--receiver-init-port" in message


def test_each_rank_has_one_port_of_both_kinds() -> None:
    """Lists of different lengths are refused."""
    node = ConfiguredEngine(
        url="http://d:1",
        role="decode",
        receiver=ReceiverSettings(init_ports=(1, 2), alloc_ports=(3,)),
    )
    assert "2 init_ports, but 1 alloc_ports" in wrong(pool(node))


def test_no_port_is_given_twice_on_one_host() -> None:
    """KV would go to the wrong engine. On another host the same ports are fine."""
    second = ConfiguredEngine(
        url="http://same:8201", role="decode", receiver=decode("same").receiver
    )
    assert "port 7300 of same is given twice" in wrong(pool(decode("same"), second))
    assert len(checked(pool(decode("a"), decode("b"))).pool.nodes) == 3


def test_only_decode_engines_of_lmcache_have_receivers() -> None:
    """A receiver that nothing would use is a mistake."""
    stray = Settings(pools=(Pool(nodes=(P, decode("a"))),))
    assert (
        wrong(stray)
        == "pools[0].nodes[1].receiver: only a decode engine of connector lmcache-pd has one"
    )


def test_a_receiver_is_where_its_engine_is() -> None:
    """Unless it says otherwise."""
    assert receiver_host(decode("d")) == "d"
    assert receiver_host(decode("d", host="10.0.0.1")) == "10.0.0.1"
    assert receiver_host(ConfiguredEngine(url="http://[::1]:8200", role="decode")) == "::1"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pd_buffer_size": 1 << 30}, "must be given together"),
        ({"kv_bytes_per_token": 1 << 10}, "must be given together"),
        (
            {"pd_buffer_size": 1000, "kv_bytes_per_token": 100, "chunk_size": 256},
            "1000 bytes are less than one chunk of 25600 bytes",
        ),
    ],
)
def test_a_buffer_that_makes_no_sense(options: dict[str, Any], words: str) -> None:
    """The section is named."""
    message = wrong(pool(decode("a"), lmcache=LMCache(**options)))
    assert message.startswith("pools[0].lmcache")
    assert words in message


def from_flags(*arguments: str) -> Settings:
    """Settings of a command line."""
    parser = argparse.ArgumentParser()
    add_settings_options(parser)
    engines = ["--prefill", "p:1", "--decode", "a:1", "b:1", "--connector", "lmcache-pd"]
    return settings_from(parser.parse_args([*engines, *arguments]))


def receivers(settings: Settings) -> list[ReceiverSettings]:
    """Those of the decode engines."""
    return [node.receiver for node in settings.pool.nodes if node.role == "decode"]


@pytest.mark.parametrize("prefix", ["--receiver", "--nixl-peer"])
def test_one_flag_for_all_decode_engines(prefix: str) -> None:
    """Also under the names of production-stack's router."""
    found = receivers(
        from_flags(f"{prefix}-init-port", "7300,7301", f"{prefix}-alloc-port", "7400,7401")
    )
    assert found == [ReceiverSettings(init_ports=(7300, 7301), alloc_ports=(7400, 7401))] * 2


def test_a_flag_for_each_decode_engine() -> None:
    """In their order; hosts may also stand in one list; an address to bind stands for the URL's
    host.
    """
    ports = ["--receiver-init-port", "1", "--receiver-init-port", "2", "--receiver-alloc-port", "3"]
    found = receivers(from_flags(*ports, "--receiver-host", "x,0.0.0.0"))
    assert found == [
        ReceiverSettings(host="x", init_ports=(1,), alloc_ports=(3,)),
        ReceiverSettings(init_ports=(2,), alloc_ports=(3,)),
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--receiver-init-port", "1", "--receiver-init-port", "2", "--receiver-init-port", "3"],
            "given for 3 decode engines",
        ),
        (["--receiver-init-port", "x"], "--receiver-init-port"),
        (["--nixl-peer-alloc-port", "70000"], "--receiver-alloc-port"),
    ],
)
def test_flags_that_are_wrong(arguments: Sequence[str], words: str) -> None:
    """One line that names the flag."""
    with pytest.raises(SettingsError, match=words):
        from_flags(*arguments)


@pytest.mark.parametrize(
    ("host", "port"),
    [("--kv-ready-host", "--kv-ready-port"), ("--nixl-proxy-host", "--nixl-proxy-port")],
)
def test_where_notices_are_awaited(host: str, port: str) -> None:
    """Also under the names of production-stack's router."""
    ports = ["--receiver-init-port", "1", "--receiver-alloc-port", "2"]
    found = from_flags(*ports, host, "0.0.0.0", port, "7600").kv_ready
    assert (found.host, found.port) == ("0.0.0.0", 7600)


@pytest.mark.parametrize("connector", ["lmcache-pd", "kvstore-keys"])
def test_connectors_that_need_ids_need_them_made(connector: Any) -> None:
    """`tokenize: off` would have every prompt served by one engine, silently."""
    engine = (
        decode("a")
        if connector == "lmcache-pd"
        else ConfiguredEngine(url="http://a:1", role="decode")
    )
    settings = Settings(pools=(Pool(connector=connector, nodes=(P, engine), tokenize="off"),))
    message = wrong(settings)
    assert (
        message
        == f"pools[0].tokenize: connector {connector} needs prompts' token ids: expected auto or "
        f"always, got off"
    )


@pytest.mark.parametrize("connector", ["shared", "lmcache-mp"])
def test_connectors_that_take_no_ids_have_none_made(connector: Any) -> None:
    """Their legs are the same with ids and without: `tokenize: always` would be work for
    nothing.
    """
    nodes = (P, ConfiguredEngine(url="http://d:8200", role="decode"))
    always = Settings(pools=(Pool(connector=connector, nodes=nodes, tokenize="always"),))
    assert (
        wrong(always)
        == f"pools[0].tokenize: connector {connector} takes no token ids: expected off or auto, "
        f"got always"
    )
    settings = checked(Settings(pools=(Pool(connector=connector, nodes=nodes),)))
    assert _legs(settings, TokenIds(b"[1,2]", 2)) == _legs(settings, None)


def test_what_may_always_be_tokenized() -> None:
    """Where ids are needed anyway, and where they change a leg."""
    checked(pool(decode("a"), tokenize="always"))
    nodes = (P, ConfiguredEngine(url="http://d:8200", role="decode"))
    checked(Settings(pools=(Pool(connector="kvstore-keys", nodes=nodes, tokenize="always"),)))
    settings = checked(Settings(pools=(Pool(connector="nixl", nodes=nodes, tokenize="always"),)))
    assert _legs(settings, TokenIds(b"[1,2]", 2)) != _legs(settings, None)


def _legs(settings: Settings, ids: TokenIds | None) -> list[bytes]:
    contract = build_transfer(settings, registry()[0], Clock(), Observers([])).contract
    parsed = parse(Route.COMPLETIONS, b'{"prompt":"hello"}')
    (prompt,) = parsed.prompts
    dispatch = Dispatch(ids=ids)
    handle = Handle(b"{}", None, 2, "")
    return [
        leg.body
        for leg in (
            contract.prefill(parsed, prompt, dispatch),
            contract.decode(parsed, prompt, handle, dispatch),
        )
    ]


def test_an_order_that_the_connector_can_not_run_is_refused() -> None:
    """The key is named, and what the connector can do."""
    nodes = (P, ConfiguredEngine(url="http://d:8200", role="decode"))
    both = Settings(pools=(Pool(connector="nixl", nodes=nodes, dispatch="concurrent"),))
    assert (
        wrong(both)
        == "pools[0].dispatch: connector nixl can't: expected sequential, got concurrent"
    )
    checked(Settings(pools=(Pool(connector="nixl", nodes=nodes, dispatch="sequential"),)))


def one_pool(*nodes: ConfiguredEngine, **more: Any) -> Settings:
    """Settings with these engines alone."""
    return Settings(pools=(Pool(nodes=nodes, **more),))


def sizes(prefill: int | None, decode: int | None, **more: Any) -> Settings:
    """A pair with these tensor-parallel sizes."""
    return one_pool(
        ConfiguredEngine(
            url="http://prefill:1", role="prefill", facts=Facts(tensor_parallel_size=prefill)
        ),
        ConfiguredEngine(
            url="http://decode:1", role="decode", facts=Facts(tensor_parallel_size=decode)
        ),
        **more,
    )


@pytest.mark.parametrize(
    ("connector", "given", "words"),
    [
        ("nixl", (2, 4), None),
        ("nixl", (4, 2), None),
        ("nixl", (4, 6), "6, but http://prefill:1 has 4: one must be a multiple of the other"),
        ("nixl-push", (3, 2), "one must be a multiple of the other"),
        ("shared", (2, 4), "4, but http://prefill:1 has 2: shared needs the same"),
        ("shared", (2, 2), None),
        ("shared", (2, None), None),
        ("auto", (4, 6), None),
    ],
)
def test_tensor_parallel_sizes_of_a_pair(
    connector: str, given: tuple[int, int | None], words: str | None
) -> None:
    settings = sizes(*given, connector=connector)
    if words is None:
        checked(settings)
    else:
        assert words in wrong(settings)
        assert wrong(settings).startswith("pools[0].nodes[1].facts.tensor_parallel_size: ")


def test_sizes_of_engines_that_do_not_work_together() -> None:
    prefills = [
        ConfiguredEngine(
            url=f"http://p{size}:1", role="prefill", facts=Facts(tensor_parallel_size=size)
        )
        for size in (4, 6)
    ]
    decodes = [
        ConfiguredEngine(
            url=f"http://d{size}:1",
            role="decode",
            sources=(f"http://p{size}:1/",),
            facts=Facts(tensor_parallel_size=size),
        )
        for size in (4, 6)
    ]
    checked(one_pool(*prefills, *decodes, connector="shared"))


def test_a_first_rank_that_holds_all() -> None:
    checked(sizes(1, 4, connector="lmcache-mp", lmcache=LMCache(first_rank_only=True)))


def test_hosts_of_handles() -> None:
    nodes = [
        ConfiguredEngine(url="http://p:1", role="prefill", facts=Facts(remote_host="nat")),
        ConfiguredEngine(url="http://d:1", role="decode"),
    ]
    assert wrong(one_pool(*nodes, connector="shared")).startswith(
        "pools[0].nodes[0].facts.remote_host: the KV handles of connector shared name no host"
    )
    nodes[0] = ConfiguredEngine(url="http://p:1", role="prefill")
    assert "pools[0].remote_host: the KV handles" in wrong(
        one_pool(*nodes, connector="shared", remote_host="url")
    )
    for connector in ("nixl", "nixl-push", "auto"):
        checked(one_pool(*nodes, connector=connector, remote_host="url"))


@pytest.mark.parametrize(
    ("facts", "way", "host"),
    [
        (Facts(), "engine", None),
        (Facts(), "url", "10.0.0.1"),
        (Facts(remote_host="nat"), "engine", "nat"),
        (Facts(remote_host="nat"), "url", "nat"),
    ],
)
def test_the_host_that_decode_engines_are_sent(facts: Facts, way: Any, host: str | None) -> None:
    node = ConfiguredEngine(url="http://10.0.0.1:8000", role="prefill", facts=facts)
    assert kv_host_of(node, Pool(remote_host=way)) == host
    assert (
        kv_host_of(msgspec.structs.replace(node, role="decode"), Pool(remote_host=way)) == host
    ), "for turns"


def test_turns_need_a_connector_that_hands_back_and_token_ids() -> None:
    """Each mistake is one line with its key."""
    nixl = Pool(connector="nixl", nodes=(P, ConfiguredEngine(url="http://d:8200", role="decode")))
    able = Turns(bidirectional=True)
    checked(Settings(pools=(structs.replace(nixl, turns=able),)))
    shared = structs.replace(nixl, connector="shared", turns=able)
    expected = (
        "pools[0].turns.bidirectional: connector shared can't hand KV back to prefill engines, "
        "only nixl can"
    )
    assert wrong(Settings(pools=(shared,))) == expected
    off = structs.replace(nixl, turns=able, tokenize="off")
    expected = (
        "pools[0].tokenize: turns.bidirectional needs prompts' token ids: expected auto or "
        "always, got off"
    )
    assert wrong(Settings(pools=(off,))) == expected
    checked(Settings(pools=(structs.replace(nixl, turns=able, remote_host="url"),)))
    late = structs.replace(nixl, turns=Turns(decoder_kv_blocks_ttl=10, margin=10))
    assert (
        wrong(Settings(pools=(late,)))
        == "pools[0].turns.margin: 10 s leave nothing of decoder_kv_blocks_ttl = 10 s"
    )


# -- bootstrap servers


def bootstraps(*nodes: ConfiguredEngine, **more: Any) -> Settings:
    """Settings of a Mooncake pool."""
    return Settings(
        pools=(
            Pool(
                connector="mooncake",
                nodes=(*nodes, ConfiguredEngine(url="http://d:1", role="decode")),
                **more,
            ),
        )
    )


def prefill(url: str, bootstrap: str | None = None) -> ConfiguredEngine:
    """A prefill engine."""
    return ConfiguredEngine(url=url, role="prefill", facts=Facts(bootstrap=bootstrap))


@pytest.mark.parametrize(
    ("node", "port", "address"),
    [
        (prefill("http://p:8100"), 8998, "http://p:8998"),
        (prefill("http://p:8100"), 25201, "http://p:25201"),
        (prefill("https://p:8100"), 8998, "http://p:8998"),
        (prefill("http://[::1]:8100"), 8998, "http://[::1]:8998"),
        (prefill("http://p:8100", "http://other:7/"), 8998, "http://other:7"),
        (
            ConfiguredEngine(
                url="http://d:1", role="decode", facts=Facts(bootstrap="http://other:7")
            ),
            8998,
            None,
        ),
    ],
)
def test_where_an_engines_bootstrap_server_is(
    node: ConfiguredEngine, port: int, address: str | None
) -> None:
    """By its facts, else at its host and the pool's port. It speaks plain HTTP, whatever the engine
    does.
    """
    assert bootstrap_address(node, Pool(connector="mooncake", bootstrap_port=port)) == address
    assert bootstrap_address(node, Pool(connector="nixl", bootstrap_port=port)) is None


def test_two_prefill_engines_need_two_bootstrap_servers() -> None:
    """They would be taken for one another."""
    message = wrong(bootstraps(prefill("http://p:1"), prefill("http://p:2")))
    assert message.startswith(
        "pools[0].nodes[1].facts.bootstrap: http://p:8998 would be the bootstrap server of "
        "http://p:1, too"
    )
    checked(bootstraps(prefill("http://p:1"), prefill("http://p:2", "http://p:8999")))
    checked(bootstraps(prefill("http://p:1"), prefill("http://q:1")))
    both = bootstraps(prefill("http://p:1"), prefill("http://p:2")).pool
    checked(Settings(pools=(msgspec.structs.replace(both, connector="nixl"),)))


@pytest.mark.parametrize(
    "address",
    [
        "p:8998",
        "https://p:8998",
        "http://p",
        "http://p:0",
        "http://p:x",
        "http://:1",
        "http://p:1/query",
        "http://a@p:1",
        "x\n",
    ],
)
def test_a_bootstrap_server_is_a_host_and_a_port(address: str) -> None:
    message = wrong(bootstraps(prefill("http://p:1", address)))
    assert message.startswith("pools[0].nodes[0].facts.bootstrap: ")
    assert message.endswith("expected http://host:port")


def test_dispatch_of_mooncake() -> None:
    for order in ("concurrent", "sequential"):
        checked(bootstraps(prefill("http://p:1"), dispatch=order))
