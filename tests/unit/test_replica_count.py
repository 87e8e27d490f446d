"""How many replicas there are, by the addresses of a name: which answers count."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from pdproxy.cli.main import main
from pdproxy.fleet.replicas import ReplicaCount
from pdproxy.observe.events import DeadlinePassed, Observers
from pdproxy.settings.dns import Dns, DnsName
from pdproxy.upstream.resolver import DnsRecords, LookupFailedError
from tests.fakes.recorder import Recorder

NAME = DnsName("dns", "replicas.example", 1)
Found = Mapping[str, DnsRecords | LookupFailedError]


class World(Recorder):
    """A count whose name has what a test says."""

    def __init__(self) -> None:
        self.time = 0.0
        self.found: Found = {}
        self.used: list[int] = []
        super().__init__()
        self.count = ReplicaCount(
            NAME,
            self.look_up,
            self.used.append,
            Observers([self]),
            Dns(min_ttl=5, max_ttl=60),
            lambda: self.time,
            lambda: 0.5,
        )

    async def look_up(self, name: DnsName) -> Found:
        assert name == NAME
        return self.found

    async def has(
        self, four: int | LookupFailedError, six: int | LookupFailedError = 0, ttl: float = 20
    ) -> float:
        """Have the name have so many addresses of each family, and have it asked. Return until when
        that holds.
        """
        self.found = {
            kind: DnsRecords(tuple((f"{kind}{at}", None) for at in range(count)), ttl)
            if isinstance(count, int)
            else count
            for kind, count in (("A", four), ("AAAA", six))
        }
        return await self.count.look()


@pytest.fixture
def w() -> World:
    return World()


async def test_more_count_at_once_and_fewer_the_second_time(w: World) -> None:
    assert await w.has(3) == 20
    assert w.used == [3]
    await w.has(1)
    assert w.used == [3]
    await w.has(2)
    assert w.used == [3, 2], "of two answers with fewer, the one with more"
    await w.has(2)
    await w.has(1)
    await w.has(2)
    await w.has(1)
    assert w.used == [3, 2], "only in a row"
    await w.has(1)
    assert w.used == [3, 2, 1]


@pytest.mark.parametrize(("ttl", "until"), [(0, 5), (20, 20), (1e9, 60)])
async def test_times_to_live_are_bounded(w: World, ttl: float, until: float) -> None:
    assert await w.has(2, ttl=ttl) == until


async def test_a_replica_has_an_address_of_each_family(w: World) -> None:
    await w.has(3, 3)
    assert w.used == [3]
    assert w.count.shortcomings() == []


async def test_a_server_that_does_not_know_one_family_is_no_failure(w: World) -> None:
    await w.has(3, LookupFailedError("the servers refuse"))
    assert (w.used, w.count.shortcomings()) == ([3], [])


async def test_what_can_not_be_answered_changes_nothing(w: World) -> None:
    assert w.count.shortcomings() == [
        "replicas.name replicas.example: has not been answered yet, for 0 s: taken to be 1"
    ]
    await w.has(3)
    failed = LookupFailedError("no answer in 5 s", late=True)
    assert [await w.has(failed, failed) for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]
    w.time = 90.0
    assert w.count.shortcomings() == [
        "replicas.name replicas.example: no answer in 5 s, for 90 s: taken to be 3"
    ]
    assert w.events[0] == DeadlinePassed("dns")
    await w.has(0)
    assert w.count.shortcomings() == [
        "replicas.name replicas.example: has no address, for 0 s: taken to be 3"
    ]
    assert w.used == [3]
    await w.has(3)
    assert w.count.shortcomings() == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{count: auto}", "replicas.count = auto needs replicas.name"),
        (
            "{count: 2, name: replicas.example}",
            "replicas.name has no effect without replicas.count = auto",
        ),
        ("{count: auto, name: 'a b'}", "no name in DNS can be so"),
        ("{count: auto, name: 10.0.0.1}", "no name in DNS can be so"),
        ("{count: 0}", "replicas.count"),
        ("{count: 257}", "replicas.count"),
        ("{count: many}", "replicas.count"),
    ],
)
def test_settings_that_can_not_be_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    file = tmp_path / "pdproxy.yaml"
    file.write_text(
        f"replicas: {text}\npools: [{{nodes: [{{url: 'http://d:8000', role: aggregated}}]}}]\n"
    )
    assert main(["config", "validate", "--config", str(file)]) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert len(shown.strip().splitlines()) == 1
