"""Sends a shape to a plain engine and to the proxy, compares the answers, and checks by counters
how the KV moved.
"""

import asyncio
import secrets
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from .client import Answer, ask
from .compare import differs
from .counters import Counters
from .engine import BLOCK
from .fleet import Fleet
from .prompts import ALONE_N
from .proxy import Proxy
from .shapes import Shape

SOURCE = "vllm:prompt_tokens_by_source_total"
USED = "vllm:kv_cache_usage_perc"
SETTLED = 30.0  # seconds until counters are up to date and P has freed its blocks
STRICT_TRIES = 12  # an engine that lags joins two tokens into one chunk
RACES = {"error-one-of-a-list-too-long"}
"""Shapes in which other prompts of a list may move before the refused one is read."""

Increases = dict[str, float]
"""Increases of counters by name: see `Moved.since`."""


def in_full(increases: Increases) -> bool:
    """Return whether every token of the prompt came by KV transfer, as with NIXL."""
    return increases["computed"] == 0 < increases["pulled"] == increases["prompt"]


def loaded_once(answers: int) -> Callable[[Increases], bool]:
    """Return whether the prompt of so many answers came by KV transfer once: a plain engine counts
    it for each of them, and D computes no more than its last block for each.
    """
    return lambda increases: (
        0 < increases["pulled"] * answers == increases["prompt"]
        and increases["computed"] <= answers * BLOCK
    )


@dataclass
class Moved:
    """Counters before a request, and their increases since. Only of the engines that the proxy
    uses.
    """

    fleet: Fleet
    proxy: Proxy
    pairs: int
    plain: Counters
    decodes: list[Counters]
    front: Counters
    held: list[float]

    @classmethod
    def now(cls, fleet: Fleet, proxy: Proxy, pairs: int) -> "Moved":
        """Read all counters."""
        decodes = [engine.counters() for engine in fleet.decodes[:pairs]]
        held = [engine.counters().sum(USED) for engine in fleet.prefills[:pairs]]
        return cls(fleet, proxy, pairs, fleet.plain.counters(), decodes, proxy.counters(), held)

    @property
    def released(self) -> bool:
        """Whether no prefill engine holds more KV than before."""
        return all(
            engine.counters().sum(USED) <= held
            for engine, held in zip(self.fleet.prefills[: self.pairs], self.held, strict=True)
        )

    def since(self, alone: str) -> Increases:
        """Return the increases: prompt tokens of the plain engine, D's tokens by source, requests
        that one engine served.
        """
        decodes = [engine.counters() for engine in self.fleet.decodes[: self.pairs]]
        plain, proxy = self.fleet.plain.counters(), self.proxy.counters()

        def decoded(source: str) -> float:
            pairs = zip(decodes, self.decodes, strict=True)
            return sum(
                new.sum(SOURCE, source=source) - old.sum(SOURCE, source=source)
                for new, old in pairs
            )

        def front(**labels: str) -> float:
            return proxy.sum("pdproxy_alone_total", **labels) - self.front.sum(
                "pdproxy_alone_total", **labels
            )

        name = "vllm:prompt_tokens_total"
        return {
            "prompt": plain.sum(name) - self.plain.sum(name),
            "pulled": decoded("external_kv_transfer"),
            "computed": decoded("local_compute"),
            "alone": front(),
            "expected_reason": front(reason=alone) if alone else 0,
        }

    async def settled(self, right: Callable[[Increases], bool]) -> None:
        """Wait until the increases are right, and P holds no more than before."""
        deadline = time.monotonic() + SETTLED
        while not (right(increases := self.since("")) and self.released):
            assert time.monotonic() < deadline, f"{increases}, P's KV was {self.held}"
            await asyncio.sleep(0.1)


async def _both(shape: Shape, fleet: Fleet, proxy: Proxy) -> tuple[Answer, Answer]:
    nonce = secrets.token_hex(6)
    headers = {"X-Request-Id": nonce} if shape.header_id else None
    body = shape.make(nonce)
    plain, other = await asyncio.gather(
        *(ask(one.url, shape.path, body, headers) for one in (fleet.plain, proxy))
    )
    return plain, other


async def equal(
    fleet: Fleet,
    proxy: Proxy,
    shape: Shape,
    pairs: int = 1,
    *,
    moved: Callable[[Increases], bool] = in_full,
    ignored: AbstractSet[str] = frozenset(),
    at_once: bool = False,
    several: bool = True,
) -> None:
    """Fail unless status, body and events equal the plain engine's, the KV moved as the shape says,
    and P holds nothing.

    `pairs`: number of prefill and decode engines of the proxy. `moved`: checks the counters for how
    the connector moves a prompt's KV. `ignored`: keys that are not compared, as in `differs`.
    `at_once`: both engines are asked at once, so that one prompt of a list may have moved before
    another one is refused. `several`: several answers to a prompt are split.
    """
    if shape.answers > 1 and shape.status == 200 and not several:
        shape = replace(shape, alone=ALONE_N)
    for attempt in range(STRICT_TRIES):
        before = Moved.now(fleet, proxy, pairs)
        plain, other = await _both(shape, fleet, proxy)
        assert plain.status == shape.status, plain.body[:500]
        why = differs(plain, other, strict=False, ignored=ignored)
        # A late engine joins two tokens in one event: half a character at the end of the reasoning
        # then stays, and a call that is cut behind its name has arguments. It may compute the
        # choices of a request in different steps: the later ones then find the prompt in its cache.
        # Any other difference fails at once.
        late = "\ufffd" in why or (".function: " in why and why.endswith("['arguments']"))
        several = shape.answers > 1 or shape.alone == ALONE_N
        late = late or (several and ".prompt_tokens_details." in why)
        if late and attempt + 1 < STRICT_TRIES:
            continue
        assert not why, f"{why}\nplain: {plain.body!r}\nproxy: {other.body!r}"
        await _settle(shape, before, moved, at_once=at_once)
        if not (why := differs(plain, other, ignored=ignored)):
            break
        assert attempt + 1 < STRICT_TRIES, f"split into other chunks {STRICT_TRIES} times: {why}"
    if shape.pinned_id:
        first = plain.chunks[0] if plain.streamed else plain.json
        assert (other.chunks[0] if other.streamed else other.json)["id"] == first["id"]


async def _settle(
    shape: Shape, before: Moved, moved: Callable[[Increases], bool], *, at_once: bool
) -> None:
    """Wait until the counters show how the answer was made, and P holds no more than before."""
    wanted: dict[str, float]
    if shape.alone:
        wanted = {"alone": float(shape.times), "expected_reason": float(shape.times)} | (
            {} if shape.partly else {"pulled": 0.0}
        )
    elif shape.status == 200:
        wanted = {"alone": 0}
    else:
        wanted = {} if at_once or shape.name in RACES else {"pulled": 0}
    deadline = time.monotonic() + SETTLED
    while True:
        increases = before.since(shape.alone)
        if shape.status != 200 or (shape.alone and not shape.partly):
            right = True
        elif shape.answers > 1:
            right = loaded_once(shape.answers)(increases)
        elif shape.partly:
            right = 0 < increases["pulled"] == increases["prompt"] - increases["computed"]
        else:
            right = moved(increases)
        if right and increases | wanted == increases and before.released:
            return
        assert time.monotonic() < deadline, (
            f"wanted {wanted}, counters increased by {increases}, P's KV was {before.held}"
        )
        await asyncio.sleep(0.1)
