"""An engine is measured while `up` runs, and requests that come meanwhile are served."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pdproxy.settings.schema import Settings
from pdproxy_lab.up import measuring, taken_out
from pdproxy_lab.up.arrangement import Plan
from pdproxy_lab.up.errors import UpError
from pdproxy_lab.up.measuring import TRIES, Measuring, measured_engine
from pdproxy_lab.up.state import Folder
from pdproxy_lab.up.taken_out import give_back_left
from tests.demo.processes import alive
from tests.up.machines import machine as planned_machine
from tests.up.machines import planned
from tests.up.processes import SERVES, load, machine

pytestmark = pytest.mark.timeout(240)


async def test_requests_are_served_while_an_engine_is_measured(tmp_path: Path) -> None:
    """And the end of `up` ends that, too."""
    async with machine(tmp_path, speed="1") as box, box.up("--calibrate", "1") as up:
        await up.until(SERVES)
        folder = Folder(box.up_folder)
        await up.until("no request for 1 s: measures any-1, others serve")
        while not alive([str(folder.profile.with_suffix(".new"))]):
            await asyncio.sleep(0.1)
        assert folder.taken_out.read_text() == f"http://127.0.0.1:{box.first_port + 3}"
        async with load(box.url, 2) as clients:
            await clients.until(10)
        assert alive([str(folder.profile.with_suffix(".new"))])
        up.process.send_signal(signal.SIGTERM)
        assert await up.ended() == 0
        assert await up.errors() == ""
        assert not alive([str(folder.profile.with_suffix(".new"))])
        assert not folder.taken_out.exists()


async def test_the_next_up_gives_back_what_a_killed_one_has_taken_out(tmp_path: Path) -> None:
    async with machine(tmp_path, speed="1") as box:
        async with box.up("--calibrate", "1") as up:
            await up.until("measures any-1")
            while not alive([str(Folder(box.up_folder).profile.with_suffix(".new"))]):
                await asyncio.sleep(0.1)
            up.process.kill()
            await up.ended()
            for pid in alive([str(Folder(box.up_folder).profile.with_suffix(".new"))]):
                os.kill(pid, signal.SIGKILL)
        async with box.up() as up:
            await up.until("was taken out of use by an earlier `up`: it is used again")
            assert not Folder(box.up_folder).taken_out.exists()
            up.process.send_signal(signal.SIGTERM)
            assert await up.ended() == 0


@pytest.mark.parametrize(
    ("arrangement", "measured"),
    [
        ("any", "any-3"),
        ("2P2D", "decode-1"),
        ("3P1D", "decode-0"),
        ("1D3P", "decode-0"),
        ("4A", "aggregated-3"),
    ],
)
def test_the_engine_that_is_measured_generates(arrangement: str, measured: str) -> None:
    plan = planned(planned_machine(4), arrangement=arrangement)
    assert measured_engine(plan).name == measured


def test_the_only_engine_is_not_measured() -> None:
    with pytest.raises(UpError, match="--calibrate: needs two engines") as refused:
        measured_engine(planned(planned_machine(1)))
    assert refused.value.code == 2


class Idle:
    """A proxy whose requests end long ago."""

    def __init__(self, *seconds: float) -> None:
        self._seconds = list(seconds)

    async def idle(self) -> float:
        return self._seconds.pop(0) if self._seconds else 99.0


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A program in the place of `pdproxy` that notes what it is told, and does as it is told."""

    def made(**does: str) -> Path:
        program, noted = tmp_path / "pdproxy.sh", tmp_path / "noted"
        lines = [f'echo "$@" >>{noted}', 'case "$1 $2" in']
        lines += [f"'engines {word}'|{word}\\ *) {order};;" for word, order in does.items()]
        program.write_text("\n".join(["#!/bin/sh", *lines, "esac"]) + "\n")
        program.chmod(0o755)
        for module in (measuring, taken_out):
            monkeypatch.setattr(module, "PDPROXY", (str(program),))
        return noted

    return made


def measures(folder: Folder, said: list[str], plan: Plan | None = None, **auth: str) -> Measuring:
    settings = msgspec.convert({"auth": auth}, Settings)
    plan = plan or planned(planned_machine(2), None, "--max-num-seqs", "64")
    return Measuring(plan, settings, folder, 0.01, asyncio.Lock(), said.append)


WRITES = 'echo "{}" >"$4"'


async def test_an_engine_is_given_back_whether_it_was_measured_or_not(
    tmp_path: Path, commands: Callable[..., Path]
) -> None:
    noted, said = commands(calibrate="echo too few >&2; exit 1"), list[str]()
    folder = Folder(tmp_path / "f")
    await measures(folder, said).run(Idle(0.0))  # type: ignore[arg-type]
    done = [line.split()[:2] for line in noted.read_text().splitlines()]
    url = "http://127.0.0.1:8201"
    once = [["engines", "drain"], ["calibrate", url], ["engines", "undrain"]]
    assert done == once * TRIES
    assert (
        said[1::2]
        == ["any-1 was not measured: pdproxy calibrate failed with exit code 1: too few"] * TRIES
    )
    assert not folder.taken_out.exists()
    assert not folder.profile.exists()


async def test_what_is_known_of_the_engine_is_told(
    tmp_path: Path, commands: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, said = commands(calibrate=f"{WRITES}"), list[str]()
    folder = Folder(tmp_path / "f")
    await measures(folder, said, engine_api_key_file="/keys/engine").run(
        Idle()  # type: ignore[arg-type]
    )
    line = noted.read_text().splitlines()[1].split()[2:]
    assert dict(zip(line[::2], line[1::2], strict=True)) == {
        "--out": str(folder.profile.with_suffix(".new")),
        "--model": "org/model",
        "--name": "profile",
        "--max-seconds": "300",
        "--max-num-batched-tokens": "2048",
        "--max-num-seqs": "64",
        "--api-key-file": "/keys/engine",
    }
    assert folder.profile.read_text() == "{}\n"
    assert said[-1].startswith(f"any-1 was measured: {folder.profile}.")
    noted.unlink()
    await measures(folder, said, engine_api_key="secret").run(Idle())  # type: ignore[arg-type]
    line = noted.read_text().splitlines()[1].split()
    assert "secret" not in line
    assert not Path(line[line.index("--api-key-file") + 1]).exists()


async def test_an_engine_that_can_not_be_taken_out_is_used_on(
    tmp_path: Path, commands: Callable[..., Path]
) -> None:
    noted, said = commands(drain="echo no such engine >&2; exit 1"), list[str]()
    folder = Folder(tmp_path / "f")
    await measures(folder, said).run(Idle())  # type: ignore[arg-type]
    done = [line.split()[:2] for line in noted.read_text().splitlines()]
    # it may be on its way out, though it did not end its requests in time
    assert done == [["engines", "drain"], ["engines", "undrain"]] * TRIES
    assert not folder.taken_out.exists()
    assert said[1].endswith("can't be drained: no such engine")
    assert await give_back_left(folder) is None
    folder.taken_out.write_text("http://127.0.0.1:8201")
    assert await give_back_left(folder) == "http://127.0.0.1:8201"
    assert not folder.taken_out.exists()


async def test_it_waits_for_a_minute_without_requests_and_for_changes(
    tmp_path: Path, commands: Callable[..., Path]
) -> None:
    commands(calibrate=WRITES)
    said: list[str] = []
    one, proxy = measures(Folder(tmp_path / "f"), said), Idle(0.0, 0.005)
    async with one._changing:
        running = asyncio.create_task(one.run(proxy))  # type: ignore[arg-type]
        while proxy._seconds:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        assert said == []
    async with asyncio.timeout(60):
        await running
    assert len(said) == 2
