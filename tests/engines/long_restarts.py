"""The decode engine's API restarts between D's read of the KV and D's first byte: no handle is used
twice.
"""

# Meanwhile other prompts take the blocks that P has freed. A handle that were sent again would have
# D read their KV: status 200 and wrong text. PDPROXY_TEST_RESTARTS (default 40) is the number of
# restarts, without pdproxy's notifier and as many with it. `relay.py` restarts the API: for pdproxy
# only, since a real one needs a minute.

import asyncio
import contextlib
import os
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from pdproxy.cli.main import main
from tests.fakes.ports import free_port

from .client import Answer, ask
from .engine import BLOCK, MODEL, Engine, Role
from .fleet import exchange
from .launcher import Launcher
from .prompts import ids
from .proxy import Proxy
from .relay import Notices, Relay
from .shapes import CHAT, COMPLETIONS, question, story
from .test_load import EXPIRED, USED, _until

RESTARTS = int(os.environ.get("PDPROXY_TEST_RESTARTS", "40"))
pytestmark = [pytest.mark.engines, pytest.mark.timeout(300 + 10 * RESTARTS, func_only=True)]

CONTEXT, BLOCKS = 320, 25
"""Tokens of a sequence, and P's blocks: two sequences have them all."""
ROLES: tuple[Role, ...] = ("prefill", "decode")
FLAGS = f"--max-model-len {CONTEXT} --no-enable-prefix-caching"
"""An engine that has restarted has nothing in its own cache, and reads all of a prompt's KV."""
SETTINGS = {"limits": {"breaker_failures": 1000}, "probes": {"interval": 20}}
"""A real engine does not restart every second; and on a busy machine an engine is slow, not
down.
"""


@dataclass(frozen=True)
class Pair:
    """P, D, and where they send their notices."""

    prefill: Engine
    decode: Engine
    address: str


@contextlib.contextmanager
def notifying(
    launcher: Launcher,
    folder: Path,
    name: str,
    blocks: Mapping[Role, int],
    extra: Mapping[str, Any],
) -> Iterator[Pair]:
    """Start P and D with the file that `pdproxy notifier` writes: the test, too, learns from
    notices when KV is read and freed.

    `blocks`: the KV blocks of those that have few. `extra`: more of the connector's options.
    """
    assert main(["notifier", "--out", str(folder)]) == 0
    address, env = f"tcp://127.0.0.1:{free_port()}", {"PYTHONPATH": str(folder)}
    kv = {
        "kv_connector_module_path": "pdproxy_nixl",
        "kv_connector_extra_config": {"pdproxy_notify": address, **extra},
    }
    engines: list[Engine] = []
    try:
        for role in ROLES:
            flags = FLAGS + (f" --num-gpu-blocks-override {blocks[role]}" if role in blocks else "")
            engines.append(
                Engine.start(launcher, f"{name}-{role[0]}", role, flags=flags, kv=kv, env=env)
            )
        for engine in engines:
            engine.wait()
        exchange(*engines)
        yield Pair(engines[0], engines[1], address)
    finally:
        for engine in engines:
            engine.stop()


@pytest.fixture(scope="module")
def pair(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The engines of the tests here: P has few blocks."""
    with notifying(
        launcher, tmp_path_factory.mktemp("notifier"), "restarts", {"prefill": BLOCKS}, {}
    ) as pair:
        yield pair


def request(number: int) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of one: by turns completions and chats, whole and streamed."""
    nonce, chat = secrets.token_hex(6), number % 2 == 1
    body = {"model": MODEL, "temperature": 0, "max_tokens": 12, "stream": number // 2 % 2 == 1}
    return (
        (CHAT, body | {"messages": question(nonce)})
        if chat
        else (COMPLETIONS, body | {"prompt": story(nonce)})
    )


async def take_blocks(engine: Engine, blocks: int) -> None:
    """Have other prompts, each nearly as long as a sequence may be, go through all of an engine's
    `blocks`.
    """
    body = {"model": MODEL, "max_tokens": 1}
    prompts = [ids(secrets.token_hex(6), CONTEXT - 2) for _ in range(blocks * BLOCK // CONTEXT + 1)]
    for answer in await asyncio.gather(
        *(ask(engine.url, COMPLETIONS, body | {"prompt": one}) for one in prompts)
    ):
        assert answer.status == 200, answer.body


def compared(expected: Answer, got: Answer) -> str:
    """Return in a word what a client got."""
    if got.status != 200:
        return f"status {got.status}"
    if got.broken or (got.streamed and got.events[-1] != "[DONE]"):
        return "incomplete"
    return "right" if got.text == expected.text else "wrong text"


@pytest.mark.parametrize("notifier", [False, True], ids=["without notices", "with the notifier"])
async def test_decode_restarts_behind_its_read(pair: Pair, tmp_path: Path, notifier: bool) -> None:
    """All texts are right, no handle is sent a second time, none is lost, and P's blocks are free
    in the end.

    Every second restart is over before the notices of its handle come to pdproxy.
    """
    port, expired = free_port(), pair.prefill.counters().sum(EXPIRED)
    settings = SETTINGS | ({"kv_ready": {"port": port, "notifier": True}} if notifier else {})
    got: Counter[str] = Counter()
    async with (
        Notices.at(pair.address, f"tcp://127.0.0.1:{port}" if notifier else None) as notices,
        Relay(
            pair.decode.port, notices, lambda: take_blocks(pair.prefill, BLOCKS)
        ).listening() as relay,
    ):
        decode = replace(pair.decode, port=relay.port)
        proxy = await asyncio.to_thread(
            Proxy.start, [pair.prefill], [decode], tmp_path, settings=settings
        )

        async def one(number: int) -> str:
            path, body = request(number)
            expected = await ask(pair.decode.url, path, body)
            assert expected.status == 200, expected.body
            return compared(expected, await ask(proxy.url, path, body))

        try:
            for number in range(2 * RESTARTS + 20):
                if len(relay.restarts) == RESTARTS:
                    break
                # it leaves a kept connection
                before, restarts = await one(number), len(relay.restarts)
                relay.next, relay.late = (
                    ("reset" if number // 4 % 2 else "fin"),
                    number // 8 % 2 == 1,
                )
                went = await one(number)
                relay.next = None
                got[went] += len(relay.restarts) > restarts or went != "right"
                got[f"{before} before"] += before != "right"
            held = "pdproxy_kv_handles"
            await _until(
                lambda: not any(proxy.counters().by(held, "state").values()), 60, "handles are held"
            )
            await _until(lambda: not pair.prefill.counters().sum(USED), 60, "P's KV is still held")
            ended = proxy.counters().by("pdproxy_kv_handles_ended_total", "end")
        finally:
            await asyncio.to_thread(proxy.stop)
    print(
        f"\n{relay.summary()}\nanswers {dict(+got)}; handles ended {ended}, "
        f"leases expired {pair.prefill.counters().sum(EXPIRED) - expired:.0f}"
    )
    assert len(relay.restarts) == RESTARTS
    assert +got == {"right": RESTARTS}
    assert relay.sent_twice == 0
    assert set(ended) <= {"loaded", "released", "refused", "aborted"}
    assert pair.prefill.counters().sum(EXPIRED) == expired
