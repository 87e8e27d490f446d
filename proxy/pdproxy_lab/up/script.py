"""What `--print` prints: a shell script that starts the same engines and the same proxy. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from pdproxy_lab.up.arrangement import Plan
from pdproxy_lab.up.command import EngineCommand
from pdproxy_lab.up.machine import LOOPBACK

SETTINGS = "pdproxy.yaml"
_END = "END_OF_SETTINGS"


def script(plan: Plan, commands: Mapping[str, EngineCommand], settings: str) -> str:
    """Return the script. `commands`: by the engines' names; `settings`: as YAML."""
    lines = ["#!/bin/sh", *(f"# {reason}" for reason in plan.reasons)]
    for engine in plan.engines:
        on = "GPU " + ", ".join(map(str, engine.gpus)) if engine.gpus else "the CPU"
        line = commands[engine.name]
        lines += ["", f"# {engine.name}, on {on}"]
        given = [f"{name}={shlex.quote(value)}" for name, value in line.environment.items()]
        lines.append(" \\\n    ".join([*given, *_parts(line.arguments)]) + " &")
    lines += ["", f"cat >{SETTINGS} <<'{_END}'", settings.rstrip("\n"), _END, ""]
    lines += [
        f"until curl -sf -o /dev/null http://{LOOPBACK}:{engine.port}/health; do sleep 1; done"
        for engine in plan.engines
    ]
    lines += [
        f"pdproxy check --config {SETTINGS} || exit",
        f"exec pdproxy serve --config {SETTINGS}",
    ]
    return "\n".join(lines) + "\n"


def _parts(arguments: Sequence[str]) -> Sequence[str]:
    """Return the lines of a command: each option with its value."""
    lines: list[str] = []
    for word in arguments:
        if not lines or (word.startswith("--") and word != "--"):
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return lines
