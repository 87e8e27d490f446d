"""The prefill engine's API restarts when P has pulled the KV of the turn before from D, and before
it has answered.
"""

# D has freed that KV by then (`bidirectional_kv_xfer`), and other prompts take its blocks. A handle
# that were sent again would have P read their KV: the text is wrong. PDPROXY_TEST_TURN_RESTARTS
# (default 20) is the number of restarts.

import asyncio
import os
import secrets
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.ports import free_port

from .client import Answer, ask
from .counters import Counters
from .engine import MODEL, Engine
from .launcher import Launcher
from .long_restarts import SETTINGS, Pair, compared, notifying, take_blocks
from .long_turns import EXPIRED, TTL, USAGE
from .prompts import ids
from .proxy import Proxy
from .relay import Notices, Relay
from .shapes import CHAT, COMPLETIONS, Body, question
from .test_load import _until

RESTARTS = int(os.environ.get("PDPROXY_TEST_TURN_RESTARTS", "20"))
pytestmark = [pytest.mark.engines, pytest.mark.timeout(300 + 10 * RESTARTS, func_only=True)]

BLOCKS, KEPT = 41, 12
"""D's blocks, and how many of them it keeps for next turns at most."""
FIRST, NEXT = 40, 12
"""Tokens of a conversation's two answers."""
LEASE = 5


@pytest.fixture(scope="module")
def pair(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The engines: KV moves both ways, and D has few blocks."""
    extra = {
        "bidirectional_kv_xfer": True,
        "decoder_kv_blocks_ttl": TTL,
        "kv_lease_duration": LEASE,
    }
    folder = tmp_path_factory.mktemp("notifier")
    with notifying(launcher, folder, "turn-restarts", {"decode": BLOCKS}, extra) as pair:
        yield pair


class Conversation:
    """Two turns with D alone: what a client sends, and what it should get."""

    def __init__(self, engine: Engine, number: int) -> None:
        self._engine, self._nonce = engine, secrets.token_hex(6)
        self._common: Body = {"model": MODEL, "temperature": 0, "stream": number // 2 % 2 == 1}
        self.path = CHAT if number % 2 else COMPLETIONS
        self._asked: list[Any] = question(self._nonce) if number % 2 else ids(self._nonce, 150)

    async def first(self) -> tuple[Body, Answer]:
        """The first turn: the body, and its right answer."""
        body = self._body(FIRST)
        whole = await self._alone(body | {"stream": False, "return_token_ids": True})
        if self.path == CHAT:
            going_on = {"role": "user", "content": "Go on."}
            self._asked = [*self._asked, {"role": "assistant", "content": whole.text}, going_on]
        else:
            self._asked = [
                *self._asked,
                *whole.json["choices"][0]["token_ids"],
                *ids(f"{self._nonce}+", 24),
            ]
        return body, whole

    async def second(self) -> tuple[Body, Answer]:
        """The turn behind it."""
        body = self._body(NEXT)
        return body, await self._alone(body)

    def _body(self, tokens: int) -> Body:
        field = "messages" if self.path == CHAT else "prompt"
        return {**self._common, "max_tokens": tokens, field: self._asked}

    async def _alone(self, body: Body) -> Answer:
        answer = await ask(self._engine.url, self.path, body)
        assert answer.status == 200, answer.body
        return answer


async def test_prefill_restarts_behind_its_pull(
    pair: Pair, launcher: Launcher, tmp_path: Path
) -> None:
    """All texts are right, no turn's handle is sent a second time, no handle is lost, and no engine
    holds KV in the end.
    """
    port, got = free_port(), Counter[str]()
    first = pair.decode.counters().sum(USAGE)  # D keeps what the engines exchanged before
    turns = {"bidirectional": True, "decoder_kv_blocks_ttl": TTL, "max_blocks": KEPT}
    settings = SETTINGS | {
        "pools": [{"tokenizer": str(launcher.built.model), "turns": turns}],
        "kv_ready": {"notifier": True, "port": port},
    }
    async with (
        Notices.at(pair.address, f"tcp://127.0.0.1:{port}") as notices,
        Relay(
            pair.prefill.port, notices, lambda: take_blocks(pair.decode, BLOCKS)
        ).listening() as relay,
    ):
        prefill = replace(pair.prefill, port=relay.port)
        proxy = await asyncio.to_thread(
            Proxy.start, [prefill], [pair.decode], tmp_path, settings=settings
        )
        try:
            # Not every second turn is one with a handle: a chat's answer may have other ids in the
            # next prompt.
            for number in range(3 * RESTARTS + 30):
                if len(relay.restarts) == RESTARTS:
                    break
                talk, restarts = Conversation(pair.decode, number), len(relay.restarts)
                body, expected = await talk.first()
                before = compared(expected, await ask(proxy.url, talk.path, body))
                body, expected = await talk.second()
                relay.next, relay.late = (
                    ("reset" if number // 4 % 2 else "fin"),
                    number // 8 % 2 == 1,
                )
                went = compared(expected, await ask(proxy.url, talk.path, body))
                relay.next = None
                got[went] += len(relay.restarts) > restarts or went != "right"
                got[f"{before} before"] += before != "right"
            held = "pdproxy_kv_handles"
            await _until(
                lambda: not any(proxy.counters().by(held, "state").values()), 60, "handles are held"
            )
            shown = proxy.counters()
        finally:
            await asyncio.to_thread(proxy.stop)
    ended = shown.by("pdproxy_kv_handles_ended_total", "end")
    print(f"\n{relay.summary()}\nanswers {dict(+got)}; handles ended {ended}, {_turns(shown)}")
    assert len(relay.restarts) == RESTARTS
    assert +got == {"right": RESTARTS}
    assert relay.sent_twice == 0
    assert "lost" not in ended
    # D keeps what the engines exchanged before for the same time: nobody else's may have waited so
    # long.
    assert pair.decode.counters().sum(EXPIRED) <= 1
    await _until(lambda: not pair.prefill.counters().sum(USAGE), 60, "P's KV is still held")
    await _until(lambda: pair.decode.counters().sum(USAGE) <= first, 60, "D's KV is still held")


def _turns(shown: Counters) -> str:
    reused, kept = (shown.sum(f"pdproxy_turns_{what}_total") for what in ("reused", "kept"))
    return (
        f"turns kept {kept:.0f}, reused {reused:.0f}, dropped "
        f"{shown.by('pdproxy_turns_dropped_total', 'reason')}"
    )
