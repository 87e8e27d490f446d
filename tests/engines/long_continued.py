"""Streams on real engines whose engines are killed, terminated or stopped at random moments: they
go on, word for word.
"""

# Each cell (signal, role, kind) runs `PDPROXY_TEST_CONTINUED_TIMES` times (3).
# `PDPROXY_TEST_CONTINUED_OUT` names a file: what it lists is done already, and each other time of a
# cell is added to it. So a run can be resumed. Chats with reasoning have engines of their own, with
# a parser and `--enable-scale-out`: all of what random weights say is reasoning, which never ends.

import asyncio
import json
import os
import random
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .client import Answer, ask
from .engine import MODEL, Engine, Role
from .fleet import Fleet
from .proxy import Proxy
from .shapes import CHAT, COMPLETIONS, USAGE, question, story

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800, func_only=True)]

TIMES = int(os.environ.get("PDPROXY_TEST_CONTINUED_TIMES", "3"))
OUT = os.environ.get("PDPROXY_TEST_CONTINUED_OUT")
STREAMS, TOKENS, SOON = 8, 200, 0.6
"""Streams at once, their tokens, and the part of their time on one engine in which the fault comes:
two engines need less.
"""
SPECIAL = ("0", "1", "2", "3", "4", "4094")
"""Ids of the tiny model's special tokens and of `<think>`."""
BETWEEN_TOKENS = 3.0
COUNTS = ("prompt_tokens", "completion_tokens")
SETTINGS = {
    "deadlines": {
        "connect": 2,
        "prefill": 15,
        "first_token": 15,
        "between_tokens": BETWEEN_TOKENS,
        "drain": 5,
    },
    "limits": {"continuations": 2},
}
THINKERS: dict[str, Role] = {
    "thinker": "plain",
    **dict.fromkeys(("thinker-p0", "thinker-p1"), "prefill"),
    **dict.fromkeys(("thinker-d0", "thinker-d1"), "decode"),
}


@pytest.fixture(scope="module")
def thinkers(fleet: Fleet) -> Iterator[Fleet]:
    """Engines as those of `fleet`, with a reasoning parser, that derender."""
    thinkers = Fleet(fleet.launcher, flags="--reasoning-parser deepseek_r1 --enable-scale-out")
    try:
        thinkers.launch(THINKERS)
        yield thinkers
    finally:
        thinkers.end()


def _said(answer: Answer) -> str:
    """Return all text of a stream, and where its reasoning ends."""
    deltas = [choice.get("delta", choice) for chunk in answer.chunks for choice in chunk["choices"]]
    reasoning = "".join(delta.get("reasoning") or "" for delta in deltas)
    return f"{reasoning}|{answer.text}"


def _body(kind: str, nonce: str) -> dict[str, Any]:
    common: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": TOKENS, **USAGE}
    if kind == "reasoning":
        # Special tokens in the middle: derender shows them, a stream does not. And vLLM's parser
        # drops the mark where reasoning begins from an event that has nothing else, and shows it in
        # one that has.
        common["logit_bias"] = dict.fromkeys(SPECIAL, -100)
    else:
        common["ignore_eos"] = True
    return common | ({"prompt": story(nonce)} if kind == "text" else {"messages": question(nonce)})


def _difference(plain: Answer, seen: Answer) -> str:
    """Return how a stream differs from the uninterrupted one for its client; empty if it does
    not.
    """
    if not seen.events or seen.events[-1] != "[DONE]":
        return f"no end: {seen.events[-1:]}"
    if len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in seen.chunks}) != 1:
        return "several ids"
    wanted, found = _said(plain), _said(seen)
    if wanted != found:
        pairs = zip(wanted, found, strict=False)
        same = next(
            (at for at, (one, two) in enumerate(pairs) if one != two), min(len(wanted), len(found))
        )
        about = slice(max(same - 20, 0), same + 20)
        return (
            f"other text from character {same} of {len(wanted)} on: {wanted[about]!r}, "
            f"{found[about]!r}"
        )
    counts = [[answer.chunks[-1]["usage"][name] for name in COUNTS] for answer in (plain, seen)]
    return "" if counts[0] == counts[1] else f"other usage: {counts}"


def _done(cell: str) -> int:
    """Return how many times of a cell an earlier run has done."""
    if OUT is None or not Path(OUT).exists():
        return 0
    return sum(json.loads(line)["cell"] == cell for line in Path(OUT).read_text().splitlines())


@pytest.mark.parametrize("kind", ["text", "chat", "reasoning"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "SIGSTOP"])
async def test_streams_go_on(
    fleet: Fleet, request: pytest.FixtureRequest, tmp_path: Path, how: str, role: str, kind: str
) -> None:
    """Two prefill and two decode engines; one of them is gone or silent from a random moment on.
    All streams are complete.
    """
    if kind == "reasoning":
        fleet = request.getfixturevalue("thinkers")
    cell, path = f"{how} {role} {kind}", COMPLETIONS if kind == "text" else CHAT
    failed: list[dict[str, Any]] = []
    for time_ in range(_done(cell), TIMES):
        await asyncio.to_thread(fleet.heal)
        chance = random.Random(f"{cell} {time_}")
        bodies = [_body(kind, secrets.token_hex(6)) for _ in range(STREAMS)]
        begun = time.monotonic()
        plain = await asyncio.gather(*(ask(fleet.plain.url, path, body) for body in bodies))
        took = time.monotonic() - begun
        moment = chance.uniform(0.0, SOON * took)
        proxy = Proxy.start(fleet.prefills, fleet.decodes, tmp_path, settings=SETTINGS)
        engine: Engine = chance.choice(fleet.prefills if role == "prefill" else fleet.decodes)
        try:
            asked = [asyncio.create_task(ask(proxy.url, path, body)) for body in bodies]
            await asyncio.sleep(moment)
            if how == "SIGTERM":
                engine.terminate()
            else:
                engine.signal(signal.Signals[how])
            seen = await asyncio.gather(*asked)
            counters, name = proxy.counters(), "pdproxy_continuations_total"
            went, why = (
                {label: n for label, n in counters.by(name, one).items() if n}
                for one in ("result", "reason")
            )
        finally:
            if how == "SIGSTOP":
                engine.signal(signal.SIGCONT)
            proxy.stop()
        wrong = [
            text for one, two in zip(plain, seen, strict=True) if (text := _difference(one, two))
        ]
        result = {
            "cell": cell,
            "time": time_,
            "right": STREAMS - len(wrong),
            "of": STREAMS,
            "wrong": wrong,
        }
        result |= {
            "results": went,
            "reasons": why,
            "after": round(moment, 2),
            "of_seconds": round(took, 2),
        }
        print(f"\n{json.dumps(result)}")
        if OUT is not None:
            with Path(OUT).open("a") as out:
                out.write(json.dumps(result) + "\n")
        failed += [result] * bool(wrong)
    assert not failed
