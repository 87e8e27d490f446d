"""Scripts: what happens to the requests of one engine, step by step. Seeded: a number is always the
same script.

Steps (`do`), each with its time `now` in seconds: `new` (id, prompt: its tokens, params),
`schedule` (id, computed: tokens in the prefix cache, blocks: ids, as many as needed are taken),
`received` (id), `finish` (id, reason, computed), `wait`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

BLOCK = 16
Step = dict[str, Any]
Script = list[Step]
Params = dict[str, Any] | None


def script(
    number: int,
    params_of: Callable[[random.Random], Params],
    name_of: Callable[[random.Random], str] = lambda _: "",
) -> Script:
    """Return a random script; `params_of` draws the `kv_transfer_params` of a request, `name_of` a
    part of its id.
    """
    chance = random.Random(number)
    now, used = 1000.0, 1
    steps: Script = []
    waiting: dict[str, int] = {}
    scheduled: dict[str, int] = {}
    for place in range(chance.randint(4, 20)):
        now += chance.choice([0.0, 0.01, 1.0, 4.0, 6.0])
        what = chance.choice(
            ["new", "new", "schedule", "schedule", "received", "finish", "abort", "again", "wait"]
        )
        if what == "new":
            name = f"cmpl-{number}-{place}{name_of(chance)}-0-{chance.getrandbits(32):08x}"
            waiting[name] = chance.choice([1, 15, 16, 17, 63, 64, 100, 300])
            steps.append(
                {
                    "do": "new",
                    "now": now,
                    "id": name,
                    "prompt": waiting[name],
                    "params": params_of(chance),
                }
            )
        elif what == "schedule" and waiting:
            name = chance.choice(sorted(waiting))
            length = scheduled[name] = waiting.pop(name)
            cached = chance.choice(
                [0, 0, 0, (length - 1) // BLOCK, chance.randint(0, (length - 1) // BLOCK)]
            )
            blocks = list(range(used, used + -(-length // BLOCK)))
            used += len(blocks)
            steps.append(
                {
                    "do": "schedule",
                    "now": now,
                    "id": name,
                    "computed": cached * BLOCK,
                    "blocks": blocks,
                }
            )
        elif what == "received" and scheduled:
            steps.append({"do": "received", "now": now, "id": chance.choice(sorted(scheduled))})
        elif what == "finish" and scheduled:
            name = chance.choice(sorted(scheduled))
            reason = chance.choice(["length", "length", "stop", "abort", "error"])
            computed = scheduled.pop(name)
            steps.append(
                {"do": "finish", "now": now, "id": name, "reason": reason, "computed": computed}
            )
        elif what == "abort" and waiting:
            name = chance.choice(sorted(waiting))
            del waiting[name]
            steps.append({"do": "finish", "now": now, "id": name, "reason": "abort", "computed": 0})
        elif what == "wait":
            steps.append({"do": "wait", "now": now})
    return steps


def spoiled(chance: random.Random, params: dict[str, Any], often: float = 0.3) -> dict[str, Any]:
    """Return parameters, sometimes without one of their keys or with None under one."""
    if chance.random() < often:
        key = chance.choice(sorted(params))
        if chance.random() < 0.5:
            return {name: value for name, value in params.items() if name != key}
        return params | {key: None}
    return params
