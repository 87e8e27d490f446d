#!/usr/bin/env python3
"""The engines that the tests share: one plain, two prefill and two decode engines, started
together.

With PDPROXY_ENGINES_KEEP=1 they keep running after the test run, and the next run reuses them
(`run/fleet.json` in the build's folder lists their processes). `python tests/engines/fleet.py
start|stop|show` does the same by hand.
"""

import argparse
import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

if __package__ in {None, ""}:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "engines"

from .build import EnginesUnavailable, default_dir, ensure
from .engine import MODEL, Engine, Role
from .launcher import Launcher

COMPLETIONS = "/v1/completions"
NAMES: dict[str, Role] = {
    "plain": "plain",
    "p0": "prefill",
    "p1": "prefill",
    "d0": "decode",
    "d1": "decode",
}


class EnginesBusy(Exception):  # noqa: N818 - reads as what it reports
    """Another run uses the engines, and two runs would disturb each other; the message names the
    folder.
    """


@dataclass
class Fleet:
    """The engines by name. The only owner of their processes."""

    launcher: Launcher
    engines: dict[str, Engine] = field(default_factory=dict)
    state: Path | None = None  # file that lists the processes
    left: list[Engine] = field(default_factory=list)  # listed there and not reused
    claim: TextIO | None = None  # locked file; open while nobody else may use the engines
    flags: str = ""  # additional flags for `vllm serve`
    starts: dict[str, Callable[[int], Engine]] = field(
        default_factory=dict
    )  # of `connected.pair`: by name, start on a port

    @property
    def plain(self) -> Engine:
        """The engine that every answer is compared with."""
        return next(engine for engine in self.engines.values() if engine.role == "plain")

    @property
    def prefills(self) -> list[Engine]:
        """All prefill engines, in order."""
        return [engine for engine in self.engines.values() if engine.role == "prefill"]

    @property
    def decodes(self) -> list[Engine]:
        """All decode engines, in order."""
        return [engine for engine in self.engines.values() if engine.role == "decode"]

    @classmethod
    def start(cls) -> "Fleet":
        """Build if necessary, attach to engines that an earlier run kept, start the others, wait
        for all of them.

        Raises EnginesBusy while another run uses the engines.
        """
        claim = _claim()
        fleet = cls.attach()
        fleet.claim = claim
        for engine in fleet.stale():
            engine.stop()  # broken, or frozen by a test that was killed: nobody else would end it
        try:
            fleet.launch({name: role for name, role in NAMES.items() if name not in fleet.engines})
        except BaseException:
            fleet.stop()
            raise
        return fleet

    @classmethod
    def attach(cls) -> "Fleet":
        """Return the engines that an earlier run left running; change nothing."""
        built = ensure()
        state = _run_folder() / "fleet.json"
        kept = json.loads(state.read_text()) if state.exists() else {}
        engines = [Engine(**kept[name]) for name in NAMES if name in kept]
        alive = {engine.name: engine for engine in engines if engine.pids() and engine.healthy()}
        return cls(
            Launcher(built),
            alive,
            state,
            [engine for engine in engines if engine.name not in alive],
        )

    def stale(self) -> list[Engine]:
        """Return engines of an earlier run that run but don't answer."""
        return [engine for engine in self.left if engine.pids()]

    def launch(
        self, names: dict[str, Role], ports: dict[str, int] | None = None, meet: bool = True
    ) -> None:
        """Start engines together and wait until all of them are healthy and warm.

        `meet`: each new pair exchanges one prompt. Before D's first pull from a P, its refusal of a
        request may not reach P, and P then holds the request's blocks until the lease ends.
        """
        for name, role in names.items():
            self.engines[name] = Engine.start(
                self.launcher, name, role, (ports or {}).get(name, 0), self.flags
            )
        self._save()
        for name in names:
            self.engines[name].wait()
        self._warm_up(names)
        for prefill in self.prefills if meet else ():
            for decode in self.decodes:
                if {prefill.name, decode.name} & set(names):
                    exchange(prefill, decode)

    def restart(self, *names: str, meet: bool = True) -> None:
        """Restart engines on the same ports, as a supervisor would. `meet`: as in `launch`."""
        old = [self.engines[name] for name in names]
        for engine in old:
            engine.stop()
        self.launch(
            {engine.name: engine.role for engine in old},
            {engine.name: engine.port for engine in old},
            meet,
        )

    def start_again(self, *engines: Engine) -> None:
        """End engines of `connected.pair`, and start them with the same options on the same ports.
        Wait until they serve.
        """
        for engine in engines:
            engine.kill()
            engine.stop()
        for engine in engines:
            self.engines[engine.name] = self.starts[engine.name](engine.port)
        for engine in engines:
            self.engines[engine.name].wait()

    def _warm_up(self, names: Iterable[str]) -> None:
        """Request logprobs from each engine once: the first time takes 20 s and more, which should
        not count for a deadline.
        """
        body = {"model": MODEL, "prompt": "warm up", "max_tokens": 2, "logprobs": 1}
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda name: self.engines[name].post(COMPLETIONS, body), names))

    def heal(self) -> None:
        """Restart the engines that a test killed."""
        self.restart(*(name for name, engine in self.engines.items() if not engine.healthy()))

    def _save(self) -> None:
        if self.state:
            self.state.write_text(
                json.dumps({name: engine.dump() for name, engine in self.engines.items()}, indent=1)
            )

    def end(self) -> None:
        """End only the engines; the launcher can still start others."""
        for engine in self.engines.values():
            engine.terminate()
        for engine in self.engines.values():
            engine.stop()

    def stop(self) -> None:
        """End all engines together, and the fork server."""
        self.launcher.close()
        self.end()
        if self.state:
            self.state.unlink(missing_ok=True)
        if self.claim:
            self.claim.close()


def _run_folder() -> Path:
    folder = default_dir() / "run"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _claim() -> TextIO:
    """Lock the engines until the file is closed; raises EnginesBusy if another process holds the
    lock.
    """
    lock = (_run_folder() / "fleet.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise EnginesBusy(f"another run uses the engines of {default_dir()}") from None
    return lock


def exchange(prefill: Engine, decode: Engine) -> None:
    """Send one prompt through a pair without a proxy."""
    body = {"model": MODEL, "prompt": f"{decode.pid} meets {prefill.pid} " * 20, "temperature": 0}
    params: dict[str, object] = {"do_remote_decode": True, "do_remote_prefill": False}
    params |= dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    answer = prefill.post(COMPLETIONS, body | {"max_tokens": 1, "kv_transfer_params": params})
    decode.post(
        COMPLETIONS, body | {"max_tokens": 2, "kv_transfer_params": answer["kv_transfer_params"]}
    )


def keep() -> bool:
    """Return whether engines keep running after this run."""
    return os.environ.get("PDPROXY_ENGINES_KEEP") == "1"


def main() -> int:
    """The command line, for development."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=["start", "stop", "show"])
    action = parser.parse_args().action
    try:
        claim = _claim() if action == "stop" else None
        fleet = Fleet.start() if action == "start" else Fleet.attach()
        if claim:
            fleet.engines |= {engine.name: engine for engine in fleet.stale()}
            fleet.stop()
    except EnginesUnavailable as error:
        print(f"engines unavailable: {error}", file=sys.stderr)
        return 3
    except EnginesBusy as error:
        print(error, file=sys.stderr)
        return 1
    for engine in fleet.engines.values():
        print(f"{engine.name:6} {engine.role:8} {engine.url}  pid {engine.pid}  {engine.log}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
