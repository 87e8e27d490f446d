"""Engines that encode pictures for others and engines that load them, and how they are asked."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from pdproxy_lab.sim.facts import (
    ECConnectorName,
    ECExtraConfig,
    ECRole,
    ECTransferConfig,
    SimFacts,
)
from pdproxy_lab.sim.server import SimServer
from tests.fakes.pictures import part, png
from tests.sim.moments import FAST
from tests.sim.raw import Answer, ask, chat

A, B, LARGE = png("a"), png("b"), png("a", 300, 300)
"""Their tokens: 4, 4 and 64."""
STORY = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
SEES = replace(FAST, vision=True, handshake_timeout=20.0)


def with_ec(
    ec_connector: ECConnectorName,
    ec_role: ECRole,
    extra: dict[str, Any],
    *,
    config: dict[str, Any] | None = None,
    **more: Any,
) -> SimFacts:
    """An engine with an EC connector: an encoder alone, or one with the other facts, too."""
    if ec_role == "ec_producer":
        more |= {"role": "encode", "connector": "none"}
    made = ECTransferConfig(
        ec_connector=ec_connector,
        ec_role=ec_role,
        ec_connector_extra_config=ECExtraConfig(**extra),
        **{"ec_port": 0, **(config or {})},
    )
    return replace(SEES, ec_transfer_config=made, **more)


async def said(sim: SimServer, *content: Any, **more: Any) -> Answer:
    """The answer to a message of texts, pictures and whole parts."""
    parts = [one if isinstance(one, dict) else part(one) for one in content]
    message = {"role": "user", "content": parts}
    return (await ask(sim.port, chat(messages=[message], **more))).answer


async def encoded(sim: SimServer, *content: Any, **more: Any) -> dict[str, Any]:
    """What an encoder says of pictures."""
    found = await said(sim, *content, **more)
    assert found.status == 200, found.body
    return dict(found.json["ec_transfer_params"])


def text(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    return str(answer.json["choices"][0]["message"]["content"])


def counts(sim: SimServer) -> tuple[int, int, int]:
    """Encoder inputs computed, outputs loaded, outputs stored."""
    stats = sim.engine.stats
    return stats.encoder_inputs, stats.encoder_outputs_loaded, stats.encoder_outputs_stored


def sized(items: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts that stand for pictures, in the order in which they were encoded."""
    placed = {index: name for name, item in items.items() for index in item["item_indices"]}
    return [
        {"type": "image_embeds", "image_embeds": items[name]["metadata"], "uuid": name}
        for _, name in sorted(placed.items())
    ]
