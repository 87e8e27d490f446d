"""What goes wrong in a soak: answers break, and engines fail and come back. `soak.py` runs it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
import urllib.request
from collections import Counter

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


def is_dead(port: int) -> bool:
    """Return whether an engine runs without its core."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/state", timeout=10) as answer:
        state = json.load(answer)
    return bool(state["dead"]) and state["life"] == "up"


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
