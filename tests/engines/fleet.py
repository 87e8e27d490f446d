#!/usr/bin/env python3
"""The engines that the tests share: one plain, two that prefill, two that decode, started at once.

With PDPROXY_ENGINES_KEEP=1 they outlive the test run and the next run takes them over (`run/fleet.json` in the build's
folder says which processes they are). `python tests/engines/fleet.py start|stop|show` does the same by hand.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

if __package__ in {None, ""}:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "engines"

from .build import EnginesUnavailable, ensure
from .engine import MODEL, Engine, Role
from .launcher import Launcher

NAMES: dict[str, Role] = {"plain": "plain", "p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}


@dataclass
class Fleet:
    """The engines by name, and how to replace one. The only owner of their processes."""

    launcher: Launcher
    engines: dict[str, Engine] = field(default_factory=dict)
    state: Path | None = None  # where it is written down which processes these are

    @property
    def plain(self) -> Engine:
        """The reference that every answer is compared with."""
        return self.engines["plain"]

    @property
    def prefills(self) -> list[Engine]:
        """All engines that prefill, first one first."""
        return [engine for engine in self.engines.values() if engine.role == "prefill"]

    @property
    def decodes(self) -> list[Engine]:
        """All engines that decode, first one first."""
        return [engine for engine in self.engines.values() if engine.role == "decode"]

    @classmethod
    def start(cls) -> "Fleet":
        """Build if need be, attach to engines that an earlier run kept, start the others, wait for all of them."""
        fleet = cls.attach()
        try:
            fleet.launch({name: role for name, role in NAMES.items() if name not in fleet.engines})
        except BaseException:
            fleet.stop()
            raise
        return fleet

    @classmethod
    def attach(cls) -> "Fleet":
        """Take over what an earlier run left running, if anything."""
        built = ensure()
        state = built.root / "run" / "fleet.json"
        kept = json.loads(state.read_text()) if state.exists() else {}
        engines = {name: Engine(**kept[name]) for name in NAMES if name in kept}
        # Another process may have got the id since: ask the port, too.
        alive = {name: engine for name, engine in engines.items() if engine.pids() and engine.healthy()}
        return cls(Launcher(built), alive, state)

    def launch(self, names: dict[str, Role], ports: dict[str, int] | None = None) -> None:
        """Start engines at once and wait until all of them are healthy and warm."""
        for name, role in names.items():
            self.engines[name] = Engine.start(self.launcher, name, role, (ports or {}).get(name, 0))
        self._save()
        for name in names:
            self.engines[name].wait()
        self._warm_up(names)

    def restart(self, *names: str) -> None:
        """Bring engines back on the ports they had, as a supervisor would."""
        old = [self.engines[name] for name in names]
        for engine in old:
            engine.stop()
        self.launch({engine.name: engine.role for engine in old}, {engine.name: engine.port for engine in old})

    def _warm_up(self, names: Iterable[str]) -> None:
        """Ask each engine for logprobs once: the first time takes it 20 s and more, which no deadline should see."""
        body = {"model": MODEL, "prompt": "warm up", "max_tokens": 2, "logprobs": 1}
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda name: self.engines[name].post("/v1/completions", body), names))

    def heal(self) -> None:
        """Restart what a test killed."""
        self.restart(*(name for name, engine in self.engines.items() if not engine.healthy()))

    def _save(self) -> None:
        if self.state:
            self.state.parent.mkdir(parents=True, exist_ok=True)
            self.state.write_text(json.dumps({name: engine.dump() for name, engine in self.engines.items()}, indent=1))

    def stop(self) -> None:
        """End them all, all at once."""
        self.launcher.close()
        for engine in self.engines.values():
            engine.terminate()
        for engine in self.engines.values():
            engine.stop()
        if self.state:
            self.state.unlink(missing_ok=True)


def keep() -> bool:
    """Whether engines outlive this run."""
    return os.environ.get("PDPROXY_ENGINES_KEEP") == "1"


def main() -> int:
    """The command line, for development."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=["start", "stop", "show"])
    action = parser.parse_args().action
    try:
        fleet = Fleet.start() if action == "start" else Fleet.attach()
    except EnginesUnavailable as error:
        print(f"engines unavailable: {error}", file=sys.stderr)
        return 3
    if action == "stop":
        fleet.stop()
    for engine in fleet.engines.values():
        print(f"{engine.name:6} {engine.role:8} {engine.url}  pid {engine.pid}  {engine.log}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
