"""Settings that are read again: what is used at once, what needs a restart, and files that can't be
used.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdproxy.app.reloading import REFUSED, RELOADED, Reloading, SettingsSource
from pdproxy.app.signals import Hangups
from pdproxy.cli.options import files_of
from pdproxy.fleet.member import MembershipError
from pdproxy.kit.reloading_file import stamp
from pdproxy.observe.description import Description
from pdproxy.observe.events import Observers
from pdproxy.observe.logs import configure, set_level
from pdproxy.observe.metrics import Metrics
from pdproxy.settings.changes import SettingsChanges, changes
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.load import load
from pdproxy.settings.pools import Pool, PoolPolicy, PoolSlo
from pdproxy.settings.schema import Settings

FILE = """
pools:
- nodes:
  - {url: http://p:8000, role: prefill}
  - {url: http://d:8000, role: decode}
"""
MORE = FILE + "  - {url: http://e:8000, role: decode}\n"


class Live:
    """Takes settings that are to be used."""

    def __init__(self) -> None:
        self.sets: list[list[str]] = []
        self.levels: list[str] = []
        self.error: Exception | None = None

    def use(self, old: Settings, new: Settings) -> None:
        if self.error is not None:
            raise self.error
        if new.pool.nodes != old.pool.nodes:
            self.sets.append([engine.url for engine in new.pool.nodes])
        if new.observe != old.observe:
            self.levels.append(new.observe.log_level)


class File:
    """A file of settings that is followed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        self.reads = 0
        self.write(FILE)
        self.members = Live()
        source = SettingsSource(load(path, {}), self.read, [path])
        self.reloading = Reloading(source, self.members)

    def read(self) -> Settings:
        self.reads += 1
        return load(self.path, {})

    def write(self, text: str) -> None:
        """Write it, with a time of its own."""
        self.count += 1
        self.path.write_text(text)
        os.utime(self.path, (self.count, self.count))

    async def looked(self) -> None:
        """Look twice: a file is read once it stays as it is."""
        await self.reloading.look()
        await self.reloading.look()

    def results(self) -> dict[str, float]:
        return {labels[0]: value for labels, value in self.shown(RELOADED).items()}

    @property
    def refused(self) -> float:
        return self.shown(REFUSED)[()]

    def shown(self, metric: Description) -> Mapping[tuple[str, ...], float]:
        metrics = Metrics()
        self.reloading.show(Observers([metrics]))
        return metrics.snapshot().values[metric.name]


async def test_a_process_that_takes_the_place_of_another_begins_with_the_files_as_they_are(
    tmp_path: Path,
) -> None:
    """Once, and only where they have changed since they were read."""
    one = File(tmp_path / "pdproxy.yaml")
    await one.reloading.catch_up()
    assert (one.reads, one.members.sets) == (0, [])
    one.write(MORE)
    await one.reloading.catch_up()
    await one.looked()
    assert (one.reads, one.members.sets) == (
        1,
        [["http://p:8000", "http://d:8000", "http://e:8000"]],
    )


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path / "pdproxy.yaml")


async def test_engines_follow_the_file(file: File) -> None:
    """Each version once."""
    await file.looked()
    assert file.reads == 0
    file.write(MORE)
    await file.looked()
    await file.looked()
    file.write(FILE)
    await file.looked()
    two = ["http://p:8000", "http://d:8000"]
    assert file.members.sets == [[*two, "http://e:8000"], two]
    assert (file.reads, file.results()) == (2, {"applied": 2, "unchanged": 0, "refused": 0})
    assert file.reloading.shortcomings() == []


async def test_a_file_that_is_being_written_is_not_read(file: File) -> None:
    """It is read once it was the same at two looks."""
    for _ in range(3):
        file.write(MORE)
        await file.reloading.look()
    assert file.reads == 0
    await file.reloading.look()
    assert file.reads == 1


async def test_asked_for_it_is_read_at_once(file: File) -> None:
    """Also if it is the same: files that it names may have changed."""
    await file.reloading.look(asked=True)
    assert (file.reads, file.results()["unchanged"]) == (1, 1)
    assert file.members.sets == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("pools: [", "not YAML"),
        ("pools:\n- nodes: []\n", "pools"),
        (FILE + "limits: {max_inflight: none}\nlisten: {prot: 1}\n", "max_inflight"),
        ("", "pools"),
    ],
    ids=["no YAML", "no engine", "two mistakes", "empty"],
)
async def test_a_file_that_cannot_be_used_changes_nothing(file: File, text: str, why: str) -> None:
    """It is shown until it is good again, with no more than three lines."""
    assert file.refused == 0
    file.write(text)
    await file.looked()
    assert file.members.sets == []
    assert file.refused == 1
    (shown,) = file.reloading.shortcomings()
    assert shown.startswith("the settings can't be read again: ")
    assert why in shown
    assert "\n" not in shown
    await file.looked()
    assert file.reads == 1, "not each second"
    file.write(FILE)
    await file.looked()
    assert file.reloading.shortcomings() == []
    assert file.refused == 0
    assert file.results() == {"applied": 0, "unchanged": 1, "refused": 1}


async def test_a_file_that_is_gone_changes_nothing(file: File) -> None:
    """It may be put in place again."""
    file.path.unlink()
    await file.looked()
    assert "can't be read" in file.reloading.shortcomings()[0]
    file.write(MORE)
    await file.looked()
    assert len(file.members.sets) == 1


async def test_a_file_that_cannot_be_looked_at(tmp_path: Path) -> None:
    """Reading it says why, and the task goes on."""
    path, members = tmp_path / "pdproxy.yaml", Live()
    path.write_text(FILE)
    long = tmp_path / ("x" * 300)
    reloading = Reloading(SettingsSource(load(path, {}), lambda: load(long, {}), [long]), members)
    await reloading.look(asked=True)
    assert reloading.shortcomings() == [
        f"the settings can't be read again: {long}: can't be read: File name too long"
    ]


async def test_a_file_that_is_a_link(tmp_path: Path) -> None:
    """Kubernetes replaces a link to a folder: name, size and time of the file may be the same."""
    for name, text in (("1", FILE), ("2", MORE)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pdproxy.yaml").write_text(text.ljust(300, "\n"))
        os.utime(tmp_path / name / "pdproxy.yaml", (1, 1))
    (tmp_path / "data").symlink_to("1")
    (tmp_path / "pdproxy.yaml").symlink_to("data/pdproxy.yaml")
    path, members = tmp_path / "pdproxy.yaml", Live()
    source = SettingsSource(load(path, {}), lambda: load(path, {}), [path])
    reloading = Reloading(source, members)
    (tmp_path / "new").symlink_to("2")
    (tmp_path / "new").replace(tmp_path / "data")
    await reloading.look()
    await reloading.look()
    assert [len(one) for one in members.sets] == [3]


async def test_a_pipe_in_place_of_the_file(file: File) -> None:
    """A thread that waits for its writer would never end."""
    file.path.unlink()
    os.mkfifo(file.path)
    async with asyncio.timeout(20):
        await file.reloading.look(asked=True)
    assert file.reloading.shortcomings() == [
        f"the settings can't be read again: {file.path}: is a FIFO, not a regular file"
    ]


async def test_a_file_that_changes_while_the_proxy_starts(tmp_path: Path) -> None:
    """Asking the engines for their connector may take minutes: nothing is missed."""
    path, members = tmp_path / "pdproxy.yaml", Live()
    path.write_text(FILE)
    stamps = [stamp(str(path))]
    first = load(path, {})
    path.write_text(MORE)
    source = SettingsSource(first, lambda: load(path, {}), [path], stamps)
    reloading = Reloading(source, members)
    await reloading.look()
    await reloading.look()
    assert [len(one) for one in members.sets] == [3]


async def test_who_starts_later_begins_with_the_files_as_they_are(file: File) -> None:
    """Where they have not changed nothing is read; what can't be used changes nothing."""
    await file.reloading.catch_up()
    assert file.reads == 0
    file.write(MORE)
    await file.reloading.catch_up()
    assert [len(one) for one in file.members.sets] == [3]
    file.write("pools: 1\n")
    await file.reloading.catch_up()
    assert re.search(r"can't be read again: .*pools", "".join(file.reloading.shortcomings()))
    file.path.unlink()
    os.mkfifo(file.path)
    async with asyncio.timeout(20):
        await file.reloading.catch_up()
    assert "is a FIFO" in "".join(file.reloading.shortcomings())
    assert len(file.members.sets) == 1


async def test_a_proxy_that_ends_reads_nothing(file: File) -> None:
    """Its engines stay as they are until the last stream has ended."""
    file.reloading._ends = lambda: True
    file.write(MORE)
    await file.looked()
    await file.reloading.look(asked=True)
    assert file.reads == 0


async def test_engines_that_cannot_be_added(file: File) -> None:
    """Another source may have added one with other settings."""
    file.members.error = MembershipError("http://e:8000 was added by admin, with other settings")
    file.write(MORE)
    await file.looked()
    assert "was added by admin" in file.reloading.shortcomings()[0]
    file.members.error = None
    file.write(MORE + "\n")
    await file.looked()
    assert file.members.sets == [["http://p:8000", "http://d:8000", "http://e:8000"]]
    assert file.reloading.shortcomings() == []


async def test_what_needs_a_restart_is_named(file: File, caplog: pytest.LogCaptureFixture) -> None:
    """What does not is used. It is named no more once it is taken back."""
    file.write(MORE + "listen: {port: 9000}\nobserve: {log_level: warning}\n")
    await file.looked()
    assert (len(file.members.sets), file.members.levels) == (1, ["warning"])
    assert file.reloading.shortcomings() == [
        "these settings have changed, and need a restart: listen.port"
    ]
    assert "need a restart: listen.port" in caplog.text
    caplog.clear()
    file.write(MORE)
    await file.looked()
    assert file.reloading.shortcomings() == []
    assert file.members.levels == ["warning", "info"]
    assert "restart" not in caplog.text


def test_pools_that_come_and_go_need_a_restart() -> None:
    """So does another order: each pool keeps what it has."""
    one, other = (
        Pool(name="a", nodes=(ConfiguredEngine(url="http://a:1", role="decode"),)),
        Pool(name="b"),
    )
    both = Settings(pools=(one, other))
    for pools in ((one,), (other, one), (one, other, Pool(name="c"))):
        found = changes(both, Settings(pools=pools))
        assert (found.at_once, found.restart) == ((), ("pools",))
        assert found.used == both
    renamed = msgspec.structs.replace(one, name="z", nodes=())
    found = changes(Settings(pools=(one,)), Settings(pools=(renamed,)))
    assert (found.at_once, found.restart) == (("pools[0].nodes",), ("pools[0].name",))
    assert found.used.pool == msgspec.structs.replace(one, nodes=())


def test_an_engine_of_role_any_asks_for_another_placement() -> None:
    """It is added all the same. Until a restart the placement is the one that runs, also for what
    changes next.
    """
    engines = (
        ConfiguredEngine(url="http://p:1", role="prefill"),
        ConfiguredEngine(url="http://d:1", role="decode"),
    )
    more = (*engines, ConfiguredEngine(url="http://a:1", role="any"))

    def of(engines: tuple[ConfiguredEngine, ...], **fields: Any) -> Settings:
        return Settings(pools=(Pool(nodes=engines, **fields),))

    first = changes(of(engines), of(more))
    assert (first.at_once, first.restart) == (("pools[0].nodes",), ("pools[0].policy.placement",))
    assert (first.used.pool.nodes, first.used.pool.placement) == (more, "split")
    objective = changes(first.used, of(more, slo=PoolSlo(ttft=1.0)))
    assert objective.restart == ("pools[0].slo.ttft", "pools[0].policy.placement"), (
        "nothing would use it"
    )
    assert objective.used == first.used
    assert changes(first.used, of(more)) == SettingsChanges(
        first.used, (), ("pools[0].policy.placement",)
    )
    back = changes(first.used, of(engines))
    assert (back.used, back.restart) == (of(engines), ())
    away = changes(of(more), of(engines, policy=PoolPolicy(prefill="round_robin")))
    assert away.restart == ("pools[0].policy.prefill", "pools[0].policy.placement")
    assert (away.used.pool.nodes, away.used.pool.placement) == (engines, "auto")


def test_an_engine_of_role_any_asks_for_another_order() -> None:
    """With a connector whose decode engines hold blocks while they wait: two of them could wait for
    each other.
    """
    engines = (
        ConfiguredEngine(url="http://p:1", role="prefill"),
        ConfiguredEngine(url="http://d:1", role="decode"),
    )
    more = (*engines, ConfiguredEngine(url="http://a:1", role="any"))

    def of(
        engines: tuple[ConfiguredEngine, ...], connector: str = "mooncake", **fields: Any
    ) -> Settings:
        return Settings(
            pools=(
                Pool(
                    nodes=engines,
                    connector=connector,
                    policy=PoolPolicy(placement="split"),
                    **fields,
                ),
            )
        )

    found = changes(of(engines), of(more))
    assert (found.restart, found.used) == (("pools[0].dispatch",), of(more, dispatch="concurrent"))
    assert changes(found.used, of(more)).restart == ("pools[0].dispatch",)
    assert changes(found.used, of(engines)) == SettingsChanges(of(engines), ("pools[0].nodes",), ())
    for old, new in (
        (of(engines, dispatch="sequential"), of(more)),
        (of(engines, "nixl"), of(more, "nixl")),
        (of(engines, "auto"), of(more, "auto")),
    ):
        assert changes(old, new).restart == ()


@pytest.mark.parametrize(
    ("section", "old", "new", "at_once"),
    [
        ("auth", {"api_keys": ("a",)}, {"api_keys": ("b",)}, True),
        ("auth", {"api_keys": ("a",)}, {"api_keys_file": "keys"}, True),
        ("auth", {"api_keys": ("a",)}, {}, False),
        ("auth", {}, {"api_keys_file": "keys"}, False),
        ("health", {"stalled_after": 3.0}, {"stalled_after": 5.0}, True),
        ("health", {"stalled_after": 3.0}, {"stalled_after": 0}, False),
        ("outliers", {"interval": 0}, {"interval": 5.0}, False),
        ("limits", {"engine_requests": "auto"}, {"engine_requests": 4}, True),
        ("limits", {"engine_requests": 4}, {}, False),
        ("limits", {"continuations": 1}, {"continuations": 2}, True),
    ],
)
def test_what_turns_something_on_or_off_needs_a_restart(
    section: str, old: dict[str, Any], new: dict[str, Any], at_once: bool
) -> None:
    """Its other values are used at once. An open proxy, or one that closes, is never made by a
    change of the file alone.
    """
    kind = type(getattr(Settings(), section))
    before = Settings(**{section: kind(**old)}, pools=(Pool(),))
    after = Settings(**{section: kind(**new)}, pools=(Pool(),))
    found = changes(before, after)
    assert bool(found.at_once) is at_once
    assert bool(found.restart) is not at_once
    assert found.used == (after if at_once else before)


@pytest.mark.parametrize(
    ("old", "new", "at_once"),
    [
        (
            {"prefill": "random", "decode": "session"},
            {"prefill": "round_robin", "decode": "power_of_two"},
            True,
        ),
        ({"prefill": "prefix"}, {"prefill": "prefix", "decode": "prefix"}, True),
        ({"prefill": "prefix"}, {"prefill": "random"}, False),
        ({"placement": "auto"}, {"placement": "auto", "refuse_late": True}, True),
        ({"placement": "auto"}, {"placement": "split"}, False),
    ],
)
def test_a_policy_that_needs_other_parts_needs_a_restart(
    old: dict[str, Any], new: dict[str, Any], at_once: bool
) -> None:
    """An index of prefixes, or a placement."""
    before, after = (Settings(pools=(Pool(policy=PoolPolicy(**policy)),)) for policy in (old, new))
    found = changes(before, after)
    assert bool(found.at_once) is at_once
    assert bool(found.restart) is not at_once


def test_the_log_level(capsys: pytest.CaptureFixture[str]) -> None:
    """Access lines follow it."""
    names = ("pdproxy", "uvicorn", None)
    before = [
        (logging.getLogger(name), logging.getLogger(name).handlers, logging.getLogger(name).level)
        for name in names
    ]
    propagates = [logging.getLogger(name).propagate for name in names]
    log = configure("warning", "text")
    try:
        assert not log.shows_requests
        set_level(log, "debug")
        assert log.shows_requests
        assert logging.getLogger("pdproxy").level == logging.DEBUG
        assert logging.getLogger("uvicorn").level == logging.INFO
    finally:
        log.close()
        for (logger, handlers, level), propagate in zip(before, propagates, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)


def test_a_hangup_has_the_settings_read(caplog: pytest.LogCaptureFixture) -> None:
    """And is not said to be ignored."""
    hangups, calls = Hangups(), list[int]()
    hangups.then = lambda: calls.append(1)
    hangups.signalled()
    assert calls == [1]
    assert not caplog.records


@pytest.mark.parametrize(
    ("config", "variable", "stages", "files"),
    [
        (None, None, None, []),
        ("a.yaml", "b.yaml", "c.yaml", ["a.yaml", "c.yaml"]),
        (None, "b.yaml", None, ["b.yaml"]),
        (None, "", None, []),
    ],
)
def test_the_files_of_a_command_line(
    config: str | None,
    variable: str | None,
    stages: str | None,
    files: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that the settings are read from: the option goes before the variable."""
    monkeypatch.delenv("PDPROXY_CONFIG", raising=False)
    if variable is not None:
        monkeypatch.setenv("PDPROXY_CONFIG", variable)
    given = Namespace(config=config and Path(config), stage_config=stages and Path(stages))
    assert [str(path) for path in files_of(given)] == files
