"""From the user's options to what is started: the machine is looked at, the engines are planned,
and the proxy's settings are checked.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pdproxy.kit.addresses import reachable
from pdproxy.settings.load import POOL, Flag, load
from pdproxy.settings.schema import Settings
from pdproxy_lab.up.arrangement import Plan, PlannedEngine, arrange, most_engines, refuse_wrong
from pdproxy_lab.up.command import EngineCommand, command
from pdproxy_lab.up.errors import CANT_START, UpError
from pdproxy_lab.up.load_plan import choose
from pdproxy_lab.up.machine import Ports, port_taken, read_machine
from pdproxy_lab.up.model import describe, read_model
from pdproxy_lab.up.options import UpOptions, value_of
from pdproxy_lab.up.settings_file import settings_text, settings_tree
from pdproxy_lab.up.tiny import TINY, tiny_model

TINY_DEADLINE = 300.0
"""Seconds to make the tiny model, which imports torch."""


@dataclass(frozen=True, slots=True)
class Before:
    """What runs already by an earlier start: its engines, and their port for KV events."""

    engines: Sequence[PlannedEngine] = ()
    events_port: int | None = None
    proxy_port: int | None = None

    @property
    def ports(self) -> set[int]:
        """All that these listen on."""
        found = {one.port for one in self.engines} | {one.replay_port for one in self.engines}
        found |= {one.side_port for one in self.engines if one.side_port is not None}
        return found | {one for one in (self.events_port, self.proxy_port) if one is not None}

    @property
    def gpus(self) -> set[int]:
        """All that these use."""
        return {index for one in self.engines for index in one.gpus}


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is started: `commands` by the engines' names, `settings` as the text of their file and
    as they are in force.
    """

    plan: Plan
    commands: Mapping[str, EngineCommand]
    text: str
    settings: Settings


async def prepare(
    options: UpOptions,
    vllm: str,
    flags: Sequence[Flag],
    env: Mapping[str, str],
    *,
    admin: str | None = None,
    before: Before | None = None,
    listens: bool = True,
) -> Prepared:
    """Return what these options start on this machine. `vllm`: its program. `flags`: settings of
    the proxy. `admin`: the address of the admin API if `flags` name none. `listens`: whether the
    proxy is to be started here.

    Raises:
        UpError: it can't be started; one sentence.
        SettingsError: a setting is wrong.
    """
    refuse_wrong(options)
    before = before or Before()
    machine = await read_machine(vllm, env)
    if options.model == TINY:
        model = await tiny_model(machine.vllm.python, env, TINY_DEADLINE)
    else:
        model = read_model(options.model, env)
        revision = value_of(options.flags, "--revision")
        model = await describe(model, machine.vllm.python, revision, env)
    chosen = None
    if options.load is not None:
        engines = most_engines(machine, model, options, before.gpus)
        if engines > 1:
            chosen = await choose(options, engines)
    plan = arrange(
        machine,
        model,
        options,
        Ports(before.ports, options.first_port),
        chosen=chosen,
        ours=before.gpus,
        before=before.engines,
        events_before=before.events_port,
    )
    commands = {
        engine.name: command(engine, plan, machine.vllm, options.flags, env)
        for engine in plan.engines
    }
    named = any(flag.key == "listen.admin" for flag in flags)
    tree = dict(settings_tree(plan, options, None if named else admin))
    settings = _checked(settings_text(tree), flags, env)
    for flag in flags:
        _put(tree, flag.key, settings)
    if listens:
        _refuse_taken(settings, plan, before.ports)
    return Prepared(plan, commands, settings_text(tree), settings)


def _refuse_taken(settings: Settings, plan: Plan, ours: set[int]) -> None:
    """Refuse a port of the proxy on which others listen, or are going to."""
    listen = settings.listen
    if listen.port in {port for one in plan.engines for port in (one.port, one.side_port)}:
        raise UpError(f"--port: {listen.port} is an engine's port here", CANT_START)
    why = None if listen.port in ours else port_taken(listen.port, listen.host)
    if why is not None:
        raise UpError(
            f"the proxy can't listen on {reachable(listen.host)}:{listen.port}: {why}; choose with "
            f"--host and --port",
            CANT_START,
        )


def _checked(text: str, flags: Sequence[Flag], env: Mapping[str, str]) -> Settings:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        return load(Path(file.name), env, flags)


def _put(tree: dict[str, Any], key: str, settings: Settings) -> None:
    """Put the value of a flag into the file, as it is in force."""
    value: Any = settings
    place = tree
    if key.startswith(POOL):
        value, place = settings.pools[0], tree["pools"][0]
    *around, last = key.removeprefix(POOL).split(".")
    for name in around:
        value = getattr(value, name)
        place = place.setdefault(name, {})
    place[last] = msgspec.to_builtins(getattr(value, last))
