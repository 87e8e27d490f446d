"""Five minutes of long prompts on slow engines: none is taken for one that stands still."""

from __future__ import annotations

import asyncio
import random

import pytest

from pdproxy.engine_model.hardware import Hardware
from pdproxy.observe.events import NodeChanged
from pdproxy.settings.limits import Limits
from tests.chaos.load import loaded, stream
from tests.chaos.options import Options
from tests.chaos.virtual.network import VirtualNetwork
from tests.fakes.virtual import run

SECONDS = 300.0
CHUNK = 2048
"""Tokens of a step."""
_WORDS = ("river", "mountain", "harbour", "ledger", "copper", "window")


@pytest.mark.parametrize(
    ("step", "most"),
    [
        pytest.param(3.0, 0, id="steps of 3 s"),
        pytest.param(7.0, 0, id="7 s"),
        pytest.param(12.0, 1, id="12 s"),
    ],
)
def test_slow_engines_are_no_stalled_ones(
    step: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step shows a sign. Where one takes longer than `health.stalled_after`, the first may be
    taken for a standstill.
    """

    async def course(network: VirtualNetwork) -> None:
        loop, chance = asyncio.get_running_loop(), random.Random(1)
        hardware = Hardware(
            prefill_tokens_per_s=CHUNK / step, decode_step_s=0.2, link_bytes_per_s=1e12
        )
        long = dict.fromkeys(("first_token", "prefill", "retry"), 300.0)
        options = Options(prefill=2, decode=1)
        bodies = [
            stream(" ".join(chance.choices(_WORDS, k=size)), 3) for size in (20, 300, 900, 1200)
        ]
        facts = {"max_num_batched_tokens": CHUNK}
        async with loaded(network, monkeypatch, options, hardware, Limits(), long, **facts) as load:
            await load.learn(*bodies)
            begun, wrong, served = loop.time(), [], 0

            async def client(number: int) -> None:
                nonlocal served
                own = random.Random(number)
                while loop.time() < begun + SECONDS:
                    await asyncio.sleep(own.expovariate(1 / (4 * step)))
                    wrong.append(await load.ask(own.choice(bodies), f"c{number}-{served}"))
                    served += 1

            await asyncio.gather(*(client(number) for number in range(4)))
            stalls = {url: count for (url,), count in load.world.proxy.stalls.stalls()}
            lost = [
                event.reason
                for event in load.trace.events
                if isinstance(event, NodeChanged) and not event.up
            ]
            assert [one for one in wrong if one] == []
            assert served > 20
            assert max(stalls.values()) <= most, lost
            assert sum(stalls.values()) == len(lost), lost
            asked = sum(
                count
                for (_, result), count in load.world.proxy.stalls.canaries()
                if result == "answered"
            )
            assert asked > 0 or step < 4, "they were suspected, and cleared"

    run(course)
