"""The registry of contracts: one more entry is all that a new contract takes."""

from __future__ import annotations

import argparse
import ast
import dataclasses
from operator import attrgetter
from pathlib import Path

import msgspec
import pytest

import pdproxy
from pdproxy.app.transfer import build_transfer
from pdproxy.cli.options import add_settings_options, settings_from
from pdproxy.kit.clock import Clock
from pdproxy.observe.events import Observers
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.load import load
from pdproxy.settings.pools import Pool
from pdproxy.settings.schema import Settings
from pdproxy.transfer import registry
from pdproxy.transfer.contract import Capabilities, Channel, Contract
from pdproxy.transfer.entry import Entry
from pdproxy.transfer.shared import SHARED, decode, handle, prefill
from pdproxy.wire.request import parse
from pdproxy.wire.route import Route
from tests.fakes.registry import registry as engine_registry

PACKAGES = Path(pdproxy.__file__).parents[1]
ENGINES = ["--prefill", "p:1", "--decode", "d:1"]
REQUEST = parse(Route.COMPLETIONS, b'{"prompt":"hello"}')


class Options(msgspec.Struct, frozen=True):
    """What a made-up contract reads of the settings."""

    chunk_size: int


def made_up(options: Options) -> Contract:
    """A contract that shows its options."""
    return Contract(
        name="teleport",
        prefill=prefill,
        handle=handle,
        decode=decode,
        capabilities=CAPABILITIES,
        min_tokens=lambda _: options.chunk_size,
    )


CAPABILITIES = Capabilities(needs_ids=True, takes_ids=True)
ENTRY = Entry(
    name="teleport",
    build=made_up,
    options=Options,
    section="pool.lmcache",
    capabilities=CAPABILITIES,
    kv_connectors=("TeleportConnector",),
)


@pytest.fixture
def teleport(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry with one contract more."""
    monkeypatch.setattr(registry, "ENTRIES", (*registry.ENTRIES, ENTRY))


def parser() -> argparse.ArgumentParser:
    """One with all options that are settings."""
    made = argparse.ArgumentParser(prog="x")
    add_settings_options(made)
    return made


def from_flags(*arguments: str) -> Settings:
    """Settings of a command line."""
    return settings_from(parser().parse_args([*ENGINES, *arguments]))


def yaml(folder: Path, connector: str, **more: object) -> Path:
    """A file with a pool of this connector."""
    nodes = [{"url": "http://p:1", "role": "prefill"}, {"url": "http://d:1", "role": "decode"}]
    file = folder / "settings.yaml"
    file.write_bytes(
        msgspec.yaml.encode({"pools": [{"connector": connector, "nodes": nodes, **more}]})
    )
    return file


def contract(settings: Settings) -> Contract:
    """What a proxy with these settings would run."""
    engines, _ = engine_registry()
    return build_transfer(settings, engines, Clock(), Observers([])).contract


@pytest.mark.usefixtures("teleport")
def test_a_flag_chooses_a_new_contract() -> None:
    """And it is built, with the default of its option."""
    found = contract(from_flags("--connector", "teleport"))
    assert (found.name, found.needs_ids, found.min_tokens(REQUEST)) == ("teleport", True, 256)


@pytest.mark.usefixtures("teleport")
def test_a_file_chooses_a_new_contract(tmp_path: Path) -> None:
    """And it is built, with the option that the file gives."""
    found = contract(load(yaml(tmp_path, "teleport", lmcache={"chunk_size": 7}), {}))
    assert found.min_tokens(REQUEST) == 7


@pytest.mark.usefixtures("teleport")
def test_settings_are_checked_against_what_a_new_contract_needs() -> None:
    """Its capabilities are those of its entry."""
    with pytest.raises(
        SettingsError, match="tokenize: connector teleport needs prompts' token ids"
    ):
        from_flags("--connector", "teleport", "--tokenize", "off")


@pytest.mark.usefixtures("teleport")
def test_help_lists_a_new_contract() -> None:
    """With all the others."""
    listed = f"{', '.join(registry.names())}; auto: ask the engines (default: nixl)"
    assert listed in " ".join(parser().format_help().split())


def test_a_name_that_is_not_registered_is_refused(tmp_path: Path) -> None:
    """By the key, the source, and the names that are."""
    expected = f"expected {' or '.join(registry.choices())}, got"
    with pytest.raises(SettingsError) as caught:
        from_flags("--connector", "teleport")
    assert str(caught.value) == f'pools[0].connector: {expected} "teleport" (--connector)'
    with pytest.raises(SettingsError) as caught:
        load(yaml(tmp_path, "teleport"), {})
    assert str(caught.value).startswith(f'pools[0].connector: {expected} "teleport" (file ')
    assert "teleport" not in parser().format_help()


@pytest.mark.usefixtures("teleport")
def test_stages_find_a_new_contract_by_its_kv_connector() -> None:
    assert registry.serving("TeleportConnector") == ("teleport",)
    assert registry.serving("NobodysConnector") == ()


def test_where_several_contracts_serve_a_kv_connector_the_usual_one_is_first() -> None:
    assert registry.serving("LMCacheConnectorV1") == ("lmcache-pd", "shared")
    assert registry.serving("LMCacheMPConnector") == ("lmcache-mp", "shared")
    assert registry.serving("MooncakeStoreConnector") == ("shared", "kvstore-keys")


# -- the entries themselves


@pytest.mark.parametrize("entry", registry.ENTRIES, ids=lambda entry: entry.name)
def test_an_entry_and_its_contract_agree(entry: Entry) -> None:
    """Each is built from the default settings, whose options are the contract's own defaults."""
    settings = Settings(pools=(Pool(connector=entry.name),))
    built = contract(settings)
    assert (built.name, built.capabilities) == (entry.name, entry.capabilities)
    assert built.capabilities.takes_ids or not built.needs_ids
    for field in msgspec.structs.fields(entry.options):
        assert getattr(attrgetter(entry.section)(settings), field.name) == field.default


def test_the_usual_order_is_the_first_that_a_contract_can() -> None:
    able = dataclasses.replace(
        SHARED, capabilities=Capabilities(orders=("concurrent", "sequential")), order=""
    )
    assert able.order == "concurrent"
    assert dataclasses.replace(able, order="sequential").order == "sequential"
    assert SHARED.order == "sequential"


def test_every_name_is_used_once() -> None:
    assert len(set(registry.names())) == len(registry.ENTRIES)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(KeyError, match="teleport"):
        registry.entry_of("teleport")


@pytest.mark.parametrize(
    ("connector", "notifier", "channel"),
    [
        ("nixl", False, None),
        ("nixl", True, Channel.ZMQ),
        ("lmcache-pd", False, Channel.ZMQ),
        ("lmcache-mp", False, Channel.HTTP),
        ("shared", True, None),
        ("kvstore-keys", True, None),
    ],
)
def test_which_way_notices_come(connector: str, notifier: bool, channel: Channel | None) -> None:
    """NIXL's engines send none without the notifier."""
    settings = Settings(pools=(Pool(connector=connector),))
    ready = msgspec.structs.replace(settings.kv_ready, notifier=notifier)
    built = contract(msgspec.structs.replace(settings, kv_ready=ready))
    assert [way for way in Channel if built.has_notices_over(way)] == ([channel] if channel else [])


# -- the seam


def test_no_other_code_names_a_contract() -> None:
    """A contract's name is in its own module. Elsewhere only simulated engines, the default of
    `pools[]`, and what starts engines have one.
    """
    own = [
        PACKAGES / name
        for name in (
            "pdproxy/transfer",
            "pdproxy/notifier",
            "pdproxy_lab/sim",
            "pdproxy_lab/cli/sim.py",
            # how engines are started is known of a few contracts
            "pdproxy_operator/engine_pod.py",
            "pdproxy_operator/resources.py",
            "pdproxy_operator/transfer_config.py",
        )
    ]
    allowed = {
        ("pdproxy/settings/pools.py", "nixl"),  # the default of `pools[].connector`
        ("pdproxy/settings/keys.py", "shared"),  # what caches of tenants may be
        ("pdproxy_lab/up/arrangement.py", "nixl"),  # what `pdproxy up` starts engines with
        ("pdproxy_lab/up/settings_file.py", "nixl"),
        ("pdproxy_lab/up/scripts/look.py", "nixl"),  # Python packages
        ("pdproxy_lab/up/scripts/look.py", "mooncake"),
        ("pdproxy_lab/up/scripts/look.py", "cpu"),  # a device
        ("pdproxy_lab/up/command.py", "cpu"),
    }
    found = {
        (path.relative_to(PACKAGES).as_posix(), text)
        for path in PACKAGES.rglob("*.py")
        if not any(path.is_relative_to(folder) for folder in own)
        for text in _strings(ast.parse(path.read_text()))
        if text in registry.names() or any(name in text for name in registry.names() if "-" in name)
    }
    assert found == allowed


def _strings(tree: ast.AST) -> list[str]:
    """All string literals that are no docstrings."""
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in documents
    ]


def test_the_seam_s_test_sees_names() -> None:
    """A name in code is found, one in a docstring is not."""
    code = '"""nixl"""\nchosen = {"lmcache-pd": f"by lmcache-mp {1}"}'
    assert _strings(ast.parse(code)) == ["lmcache-pd", "by lmcache-mp "]
    assert SHARED.name in registry.names()
