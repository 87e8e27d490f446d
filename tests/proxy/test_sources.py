"""A fleet that file, admin API and DNS change at the same time, under streaming clients; and its
engines restarted in turn.
"""

# PDPROXY_TEST_CHANGES: how many changes, 400 in `.ci/full`.

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pdproxy.app.reloading import Reloading, SettingsSource
from pdproxy.engine_model.hardware import Hardware
from pdproxy.fleet import membership, prober
from pdproxy.fleet.entries import engine_id
from pdproxy.fleet.member import MemberState
from pdproxy.settings.dns import Dns
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.health import Health, Probes
from pdproxy.settings.load import load
from pdproxy.settings.schema import Settings
from tests.fakes.admin import Admin, admin
from tests.fakes.engine import FakeEngine
from tests.fakes.followed import followed
from tests.fakes.name_server import NameServer, name_server
from tests.fakes.streams import Streams, streaming
from tests.fakes.world import World, until, world
from tests.proxy.test_membership import gone, nothing_is_left, started

CLIENTS, CHANGES = 32, int(os.environ.get("PDPROXY_TEST_CHANGES", "100"))
FACTS = {"hardware": Hardware(speed=0.5)}
"""Slow enough to leave the machine time for changes."""
ROLES = ("prefill", "decode")
KINDS = ("add", "undrain", "remove", "drain", "file less", "file more", "dns less", "dns more")
"""Of changes. Each is made three times at least."""


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "LOOK", 0.01)
    monkeypatch.setattr(prober, "MIN_GAP", 0.01)


def _settings(*servers: NameServer) -> Callable[[Settings], Settings]:
    def adjust(settings: Settings) -> Settings:
        engines = tuple(ConfiguredEngine(url=_name(role), role=role) for role in ROLES)  # type: ignore[arg-type]
        pool = msgspec.structs.replace(
            settings.pool, nodes=(*settings.pool.nodes, *(engines if servers else ()))
        )
        return msgspec.structs.replace(
            settings,
            pools=(pool,),
            dns=Dns(servers=tuple(one.address for one in servers), min_ttl=0.02, max_ttl=0.05),
            health=Health(stalled_after=0, slow_start=0.01),
            probes=Probes(interval=0.2, scrape_interval=0.4),
        )

    return adjust


def _name(role: str) -> str:
    return f"srv://_{role}._tcp.example"


class File:
    """The file of the settings, which names some engines."""

    def __init__(self, path: Path, w: World, log: Admin, engines: list[FakeEngine]) -> None:
        self.engines = list(engines)
        self._path = path
        self._write()
        self._reloading: Reloading = followed(
            w, SettingsSource(self._load(), self._load, [path]), log.log
        )

    def _load(self) -> Settings:
        return load(self._path, {})

    def _write(self) -> None:
        rows = "".join(f"  - {{url: {one.url}, role: {one.role}}}\n" for one in self.engines)
        self._path.write_text(f"pools:\n- nodes:\n{rows}")

    def can_spare(self, engine: FakeEngine) -> bool:
        """Whether it has another one of the role: a file without is refused."""
        return any(one.role == engine.role for one in self.engines if one is not engine)

    async def toggle(self, engine: FakeEngine) -> None:
        """Name one more or one less, and have it read."""
        if engine in self.engines:
            self.engines.remove(engine)
        else:
            self.engines.append(engine)
        self._write()
        await self._reloading.look(asked=True)


class Names:
    """The names of engines in DNS, one for each role."""

    def __init__(self, server: NameServer) -> None:
        self._server = server
        self.engines: list[FakeEngine] = []
        self.toggle()

    def toggle(self, *engines: FakeEngine) -> None:
        """Name these more or less."""
        for engine in engines:
            if engine in self.engines:
                self.engines.remove(engine)
            else:
                self.engines.append(engine)
        for role in ROLES:
            ports = [one.url.rpartition(":")[2] for one in self.engines if one.role == role]
            name = _name(role).removeprefix("srv://")
            self._server.records[name, "SRV"] = (0, [f"0 0 {port} 127.0.0.1." for port in ports])


@pytest.mark.timeout(400)  # clients stream all the time
async def test_a_fleet_that_three_sources_change(tmp_path: Path) -> None:
    """Engines of 4P4D and eight more come and go at random: no request fails, no stream is cut,
    nothing is left of who went.
    """
    async with (
        name_server() as server,
        world(prefill=4, decode=4, facts=FACTS, adjust=_settings(server)) as w,
        admin(w) as api,
    ):
        chance, members = random.Random(31), w.proxy.membership
        by_name = [await started(w, role, **FACTS) for role in ROLES * 2]
        by_hand = [await started(w, role, **FACTS) for role in ROLES * 2]
        originals = w.engines[:8]
        file, names, done = (
            File(tmp_path / "x.yaml", w, api, originals),
            Names(server),
            Counter[str](),
        )
        w.proxy.sources.start()

        def spared(engine: FakeEngine) -> bool:
            """Whether enough others of its role serve."""
            others = [
                one
                for one in w.proxy.ledger.engines
                if one.role.value == engine.role and one.available
            ]
            return len([one for one in others if one.url != engine.url]) > 2

        async def by_admin(engine: FakeEngine) -> str:
            member, path = members.members.get(engine.url), f"/engines/{engine_id(engine.url)}"
            body = {"url": engine.url, "role": engine.role}
            if member is None or (member.leaves and engine in by_hand):
                answer, what = await api.post("/engines", body), "add"
            elif member.drain is not None and not member.leaves:
                answer, what = await api.post(f"{path}/undrain"), "undrain"
            elif not spared(engine):
                return "none"
            elif engine in by_hand and chance.random() < 0.7:
                at_once = chance.random() < 0.4
                answer, what = await api.delete(f"{path}?at_once={str(at_once).lower()}"), "remove"
            else:
                answer, what = await api.post(f"{path}/drain"), "drain"
            # What DNS or the file has changed meanwhile may make a conflict, or the engine may just
            # have gone.
            assert answer.status < 300 or answer.status in (404, 409), answer.body
            return what if answer.status < 300 else "refused"

        async with streaming(w, CLIENTS) as streams:
            changes = 0
            while changes < CHANGES or min(done[what] for what in KINDS) < 3:
                await asyncio.sleep(chance.random() * 0.02)
                streams.look()
                how = chance.choice(["file", "dns", "admin"])
                if how == "admin":
                    engine = chance.choice([*by_hand, *by_hand, *originals, *by_name])
                    what = await by_admin(engine)
                    if what in ("none", "refused"):
                        continue
                    done[what] += 1
                else:
                    engine = chance.choice(originals if how == "file" else by_name)
                    named = file.engines if how == "file" else names.engines
                    if engine in named and not (spared(engine) and file.can_spare(engine)):
                        continue
                    done[f"{how} {'less' if engine in named else 'more'}"] += 1
                    if how == "file":
                        await file.toggle(engine)
                    else:
                        names.toggle(engine)
                changes += 1
            assert streams.served > CLIENTS

        names.toggle(*names.engines)
        for engine in [*by_name, *by_hand]:
            if (member := members.members.get(engine.url)) is not None and "admin" in (
                member.source,
                *member.heirs,
            ):
                members.remove(engine.url, "admin")
        for engine in [*by_name, *by_hand]:
            await gone(w, engine.url)
        gone_now = [engine.url.removeprefix("http://") for engine in [*by_name, *by_hand]]
        await nothing_is_left(w, gone_now, w._recorder, file, names)
        page = w.page().decode()
        assert not [name for name in gone_now if name in page]
        assert {member.source for member in members.members.values()} <= {"settings", "admin"}


async def test_every_engine_is_restarted_in_turn() -> None:
    """Drained, restarted, and used again: clients see nothing of it, and each engine serves behind
    its restart.
    """
    async with world(prefill=2, decode=2, facts=FACTS, adjust=_settings()) as w, admin(w) as api:
        async with streaming(w, 16) as streams:
            for engine in w.engines:
                await streams.more(8)
                await _restart(w, api, engine, streams)
        assert streams.served > 60
        assert {member.drain for member in w.proxy.membership.members.values()} == {None}


async def _restart(w: World, api: Admin, engine: FakeEngine, streams: Streams) -> None:
    """As docs/guide/operate.md says it."""
    path, ledger_engine = f"/engines/{engine_id(engine.url)}", w.proxy.engines[engine.url].in_ledger
    assert (await api.post(f"{path}/drain")).status == 202
    await until(lambda: w.proxy.membership.state(engine.url) is MemberState.DRAINED)
    await streams.more(8)
    run, asked = ledger_engine.run_number, len(engine.requests)
    await engine.sim.restart()
    engine._watch()
    _met(w)
    await until(lambda: ledger_engine.up and ledger_engine.run_number != run)
    assert (await api.post(f"{path}/undrain")).status == 200
    await until(lambda: len(engine.requests) != asked)


def _met(w: World) -> None:
    """Have the engines of the present runs exchanged KV before."""
    for prefill in w.prefill:
        for decode in w.decode:
            decode.meet(prefill)
