"""What goes wrong and what changes in a soak: answers break, engines fail and come back, leave the
settings and join again, and workers are killed. `soak.py` runs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import random
import signal
import time
import urllib.request
from collections import Counter

from soak_stage import Stage, load_adapters
from tests.chaos.schedule import ANSWERS

Admin = tuple[tuple[str, int], ...]
"""The ports by which simulated engines are told to fail, each with the first letter of its engine's
role.
"""
EACH = 0.002
"""The share of requests to which each fault of answers happens."""
BETWEEN = (5.0, 15.0)
"""Seconds between two engines that fail."""
DEAD = 5.0
"""Seconds that an engine is without its core until its supervisor has started it again."""
LOOK = 1.0
"""Seconds between two looks of the supervisor."""
CHANGES = (10.0, 30.0)
"""Seconds between two changes of the settings, and for which an engine is not in them."""
KILLS = (60.0, 180.0)
"""Seconds between two workers that are killed, and between two faults of real engines."""


def post(port: int, path: str, content: bytes = b"") -> None:
    """Have an engine's admin port do something. It is always there."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", content, method="POST")
    request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request, timeout=10) as answer:
        answer.read()


def arm(admin: Admin) -> None:
    """Let answers break at random."""
    for role, port in admin:
        for spec in ANSWERS[role]:
            kind, _, moment = spec.partition("@")
            post(port, "faults", json.dumps({"kind": kind, "at": moment, "rate": EACH}).encode())


async def misfortunes(
    admin: Admin, end: float, chance: random.Random, faults: Counter[str]
) -> None:
    """Let one engine fail after the other, and come back."""
    while time.monotonic() < end:
        await asyncio.sleep(chance.uniform(*BETWEEN))
        role, port = chance.choice(admin)
        what = chance.choice(("restart", "freeze", "freeze_core", "kill_core", "terminate", "kill"))
        faults[f"{what} {role}"] += 1
        with contextlib.suppress(OSError):
            await asyncio.to_thread(post, port, what)
            await asyncio.sleep(chance.uniform(0.1, 6.0))
            if (
                back := {"freeze": "thaw", "freeze_core": "thaw_core"}.get(what, "restart")
            ) != what:
                await asyncio.to_thread(post, port, back)


async def changes(at: Stage, end: float, chance: random.Random, done: Counter[str]) -> None:
    """Take engines out of the settings and put them back, with other keys each time: never all of a
    role.
    """
    while time.monotonic() < end:
        await asyncio.sleep(chance.uniform(*CHANGES))
        number = chance.randrange(len(at.ports))
        done["an engine leaves the settings"] += 1
        await asyncio.to_thread(at.reload, (at.ports[number],))
        await asyncio.sleep(chance.uniform(*CHANGES))
        await asyncio.to_thread(at.reload)
    at.reload()


async def workers_killed(at: Stage, end: float, chance: random.Random, done: Counter[str]) -> None:
    """Kill the youngest worker from time to time: the others live on, and are measured."""
    while time.monotonic() < end - KILLS[0]:
        await asyncio.sleep(chance.uniform(*KILLS))
        if len(workers := at.workers()) > 1:
            done["a worker is killed"] += 1
            at.killed_at = time.monotonic()
            with contextlib.suppress(ProcessLookupError):
                os.kill(workers[-1], signal.SIGKILL)


async def real_engines(at: Stage, end: float, chance: random.Random, done: Counter[str]) -> None:
    """Let a real engine fail from time to time, and come back."""
    if (pair := at.real) is None:
        return
    while time.monotonic() < end - KILLS[1]:
        await asyncio.sleep(chance.uniform(*KILLS))
        role, what = chance.choice(("prefill", "decode")), chance.choice(("kill", "end", "freeze"))
        done[f"a real {role} engine: {what}"] += 1
        engine = pair.engines[role]
        engine.signal(
            {"kill": signal.SIGKILL, "end": signal.SIGTERM, "freeze": signal.SIGSTOP}[what]
        )
        await asyncio.sleep(chance.uniform(0.5, 8.0))
        if what == "freeze":
            engine.signal(signal.SIGCONT)
        else:
            await asyncio.to_thread(pair.start, role)


def is_dead(port: int) -> bool:
    """Return whether an engine runs without its core."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/state", timeout=10) as answer:
        state = json.load(answer)
    return bool(state["dead"]) and state["life"] == "up"


async def adapters_loaded(at: Stage, end: float) -> None:
    """Load the adapters again that engines have lost by a start."""
    while at.size.adapters and time.monotonic() < end:
        for port in at.ports:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if await asyncio.to_thread(load_adapters, port, 1):
                    await asyncio.to_thread(load_adapters, port, at.size.adapters)
        await asyncio.sleep(LOOK)


async def supervised(admin: Admin, end: float, faults: Counter[str]) -> None:
    """Start engines again that have no core."""
    since: dict[int, float] = {}
    while (now := time.monotonic()) < end:
        for role, port in admin:
            with contextlib.suppress(OSError):
                if not await asyncio.to_thread(is_dead, port):
                    since.pop(port, None)
                elif now - since.setdefault(port, now) >= DEAD:
                    faults[f"dead_core {role}"] += 1
                    await asyncio.to_thread(post, port, "restart")
        await asyncio.sleep(LOOK)
