"""One script of requests and faults, for real and for simulated engines: a client gets the same
from both.
"""

# All other tests rely on the simulator. Here it is compared with real engines directly, without a
# proxy.

import asyncio
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Protocol

import pytest

from pdproxy.engine_model.hardware import Hardware
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.server import SimServer

from .build import wanted_vllm
from .client import Answer, Progress, ask
from .counters import Counters
from .engine import BLOCK, CONTEXT, MODEL
from .fleet import Fleet
from .shapes import CHAT, COMPLETIONS, SHAPES, Shape, story
from .shapes_refused import REFUSED_IN_THE_STREAM
from .skeleton import structure_difference, view

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600, func_only=True)]

PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# Answers that depend on the model, the tokenizer or the grammar library, and what the simulator
# leaves out.
NOT_COMPARED = {
    "chat-image": "the text depends on the model's modalities",
    "error-schema": "xgrammar's own text",
    "error-regex": "xgrammar's own text",
    "grammar": "xgrammar's own text",
    "echoed-chat": (
        "a template that takes lists turns a text into parts, which the stream then refuses"
    ),
    "error-bad-role": "the text comes from the chat template and pydantic's union of message types",
    "error-token-out-of-range": "the vocabularies differ in size",
    "completion-stop-streamed": "whether there is an event before the stop is random",
    "completion-stop-included": "whether there is an event before the stop is random",
    "chat-stop-included-streamed": "whether there is an event before the stop is random",
    "chat-stop-streamed": "whether there is an event before the stop is random",
    "chat-tools-required": "a random model's arguments are cut off, and then no call",
    "chat-tools-named": "a random model's arguments are cut off, and then no call",
    "chat-tools-auto": "a random model calls no tool by itself",
    "chat-tools-auto-streamed": "a random model calls no tool by itself",
    "chat-tools-auto-called": "the forced text is the grammar's, not the model's",
    "chat-tools-auto-called-streamed": "the forced text is the grammar's, not the model's",
    "completion-stop-first-streamed": "whether there is an event before the stop is random",
    "completion-beam": "beam search is not simulated",
    "completion-beams": "beam search is not simulated",
    "chat-max-tokens-absent": "the tokenizers count differently, and the prompt is as long as fits",
    "chat-stop-first-streamed": "whether there is an event before the stop is random",
    "chat-eos-after-two": "the simulated model has another vocabulary",
    "chat-n-tools": "the forced text is the grammar's, not the model's",
    "chat-beam": "beam search is not simulated",
    "chat-reasoning-asked": "reasoning is not simulated",
    "chat-tools-called-twice": "the forced text is the grammar's, not the model's",
    "chat-tools-called-once-of-two": "the forced text is the grammar's, not the model's",
    "chat-tools-called-once-of-two-streamed": "the forced text is the grammar's, not the model's",
    "chat-tools-called-after-words": "the forced text is the grammar's, not the model's",
    "chat-tools-called-after-words-streamed": "the forced text is the grammar's, not the model's",
    "chat-tools-call-cut-streamed": "the forced text is the grammar's, not the model's",
    "chat-tools-required-once": "a random model's arguments are cut off, and then no call",
    "error-logit-bias": "the simulator is not as strict",
    "error-logit-bias-out-of-range": "the vocabularies differ in size",
    "error-allowed-out-of-range": "the vocabularies differ in size",
    "error-allowed-none": "the simulator is not as strict",
    "error-beam-streamed": "beam search is not simulated",
    "error-suffix": "the simulator is not as strict",
    "error-cache-salt-empty": "the simulator is not as strict",
    "error-n-greedy": "the simulator is not as strict",
    "error-n-greedy-streamed": "the simulator is not as strict",
    "error-grammar": "xgrammar's own text",
    "error-choice-empty": "the simulator is not as strict",
    "error-thinking-budget": "the simulator is not as strict",
    "error-template-in-the-request": "the simulator is not as strict",
    "error-format-type": "the simulator is not as strict",
    "error-generation-prompt-and-continued": "the simulator is not as strict",
}


class Side(Protocol):
    """A plain, a prefill and a decode engine, real or simulated."""

    async def ask(
        self, role: str, path: str, body: dict[str, Any], progress: Progress | None = None
    ) -> Answer:
        """Send one request."""

    async def counters(self, role: str) -> Counters:
        """Return the engine's metrics."""

    async def kill(self, role: str) -> None:
        """Send SIGKILL."""

    async def freeze(self, role: str) -> None:
        """Send SIGSTOP."""

    async def heal(self) -> None:
        """Resume or restart all engines."""


class Real:
    """The fleet's first engines of each role."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def _engine(self, role: str) -> Any:
        return {
            "plain": self._fleet.plain,
            "p": self._fleet.prefills[0],
            "d": self._fleet.decodes[0],
        }[role]

    async def ask(
        self, role: str, path: str, body: dict[str, Any], progress: Progress | None = None
    ) -> Answer:
        return await ask(self._engine(role).url, path, body, progress=progress)

    async def counters(self, role: str) -> Counters:
        return await asyncio.to_thread(self._engine(role).counters)

    async def kill(self, role: str) -> None:
        self._engine(role).kill()

    async def freeze(self, role: str) -> None:
        self._engine(role).signal(signal.SIGSTOP)

    async def heal(self) -> None:
        for role in ("p", "d"):
            self._engine(role).signal(signal.SIGCONT)
        await asyncio.to_thread(self._fleet.heal)


class Simulated:
    """Three simulated engines of the same facts."""

    def __init__(self, engines: dict[str, SimServer]) -> None:
        self._engines = engines

    @classmethod
    @asynccontextmanager
    async def started(cls, *roles: str) -> AsyncIterator["Simulated"]:
        common: dict[str, Any] = {
            "model": MODEL,
            "block_size": BLOCK,
            "max_model_len": CONTEXT,
            "num_gpu_blocks": 512,
            "max_num_seqs": 16,
            "enable_prompt_tokens_details": True,
            "eos_every": 0,
            "hardware": Hardware(decode_step_s=0.01),
            "version": wanted_vllm(),
        }
        named: dict[str, Any] = {"plain": "aggregated", "p": "prefill", "d": "decode"}
        async with AsyncExitStack() as stack:
            servers = {role: SimServer(SimFacts(role=named[role], **common)) for role in roles}
            yield cls(
                {role: await stack.enter_async_context(server) for role, server in servers.items()}
            )

    async def ask(
        self, role: str, path: str, body: dict[str, Any], progress: Progress | None = None
    ) -> Answer:
        return await ask(self._engines[role].url, path, body, progress=progress)

    async def counters(self, role: str) -> Counters:
        from aiohttp import ClientSession

        async with (
            ClientSession() as session,
            session.get(f"{self._engines[role].url}/metrics") as answer,
        ):
            return Counters.parse(await answer.text())

    async def kill(self, role: str) -> None:
        await self._engines[role].kill()

    async def freeze(self, role: str) -> None:
        await self._engines[role].freeze()

    async def heal(self) -> None:
        for role in ("p", "d"):
            await self._engines[role].restart()


@pytest.fixture
async def simulated() -> AsyncIterator[Simulated]:
    async with Simulated.started("plain", "p", "d") as side:
        yield side


REFUSALS = [shape for shape in SHAPES if shape.status != 200] + REFUSED_IN_THE_STREAM
ANSWERED = [shape for shape in SHAPES if shape.status == 200]
EVERY = 2 if os.environ.get("PDPROXY_TEST_SHAPES") == "all" else 5


@pytest.mark.parametrize(
    "shape",
    [shape for shape in (*ANSWERED[::EVERY], *REFUSALS) if shape.name not in NOT_COMPARED],
    ids=str,
)
async def test_a_plain_engine_answers_alike(shape: Shape, fleet: Fleet) -> None:
    """Every fifth shape of the equality suite (`.ci/full`: every second), whole and streamed, and
    all refused ones.
    """
    body = {k: v for k, v in shape.make(secrets.token_hex(6)).items() if k != "kv_transfer_params"}
    if shape.status == 200:
        body.setdefault("ignore_eos", True)
    async with Simulated.started("plain") as simulated:
        real, sim = await asyncio.gather(
            Real(fleet).ask("plain", shape.path, body), simulated.ask("plain", shape.path, body)
        )
    assert not structure_difference(view(sim), view(real))


def test_what_is_not_compared_exists() -> None:
    """A renamed shape must not be left out unnoticed."""
    assert set(NOT_COMPARED) <= {shape.name for shape in (*SHAPES, *REFUSED_IN_THE_STREAM)}


# -- the script of P, D and their faults: each step returns its observations

Step = Callable[[Side], Awaitable[list[Any]]]


def _body(**fields: Any) -> dict[str, Any]:
    base = {
        "model": MODEL,
        "prompt": story(secrets.token_hex(6)),
        "temperature": 0,
        "max_tokens": 12,
        "ignore_eos": True,
    }
    return base | fields


async def _prefilled(side: Side, path: str, body: dict[str, Any]) -> tuple[Answer, dict[str, Any]]:
    asked = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
    answer = await side.ask("p", path, asked | {"max_tokens": 1, "kv_transfer_params": PREFILL})
    return answer, answer.json["kv_transfer_params"]


async def _external(side: Side) -> float:
    found = await side.counters("d")
    return found.sum("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")


async def _usage_falls(side: Side, within: float) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if (await side.counters("p")).sum("vllm:kv_cache_usage_perc") == 0:
            return True
        await asyncio.sleep(0.1)
    return False


async def handed_over(side: Side) -> list[Any]:
    """P, then D, on both routes, whole and streamed; the prompt's KV comes from P, and P's KV is
    freed.
    """
    seen: list[Any] = []
    for path, said in (
        (COMPLETIONS, {}),
        (CHAT, {"messages": [{"role": "user", "content": story(secrets.token_hex(6))}]}),
    ):
        for how in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
            body = _body(**said, **how, return_token_ids=True)
            if path == CHAT:
                del body["prompt"]
            first, handle = await _prefilled(side, path, body)
            before = await _external(side)
            second = await side.ask("d", path, body | {"kv_transfer_params": handle})
            moved = await _external(side) - before
            seen += [
                view(first),
                view(second),
                moved == handle["remote_num_tokens"],
                await _usage_falls(side, 5),
            ]
    return seen


async def given_back(side: Side) -> list[Any]:
    """D refuses a handle with max_tokens 0: P frees the KV. A schema error releases nothing; the
    next refusal does.
    """
    _, handle = await _prefilled(side, COMPLETIONS, _body())
    refused = await side.ask(
        "d", COMPLETIONS, _body(prompt="x", max_tokens=0, kv_transfer_params=handle)
    )
    free = await _usage_falls(side, 5)
    _, handle = await _prefilled(side, COMPLETIONS, _body())
    unread = await side.ask(
        "d", COMPLETIONS, _body(prompt="x", max_tokens="abc", kv_transfer_params=handle)
    )
    still = await _usage_falls(side, 1.0)
    await side.ask("d", COMPLETIONS, _body(prompt="x", temperature=-1, kv_transfer_params=handle))
    return [view(refused), free, view(unread), still, await _usage_falls(side, 5)]


async def recomputed(side: Side) -> list[Any]:
    """Without do_remote_prefill D computes the prompt itself, and the answer does not show it."""
    body = _body()
    _, handle = await _prefilled(side, COMPLETIONS, body)
    before = await _external(side)
    answer = await side.ask(
        "d", COMPLETIONS, body | {"kv_transfer_params": handle | {"do_remote_prefill": False}}
    )
    moved = await _external(side) - before
    await side.ask("d", COMPLETIONS, _body(prompt="x", max_tokens=0, kv_transfer_params=handle))
    return [view(answer), moved]


async def wrong_engine(side: Side) -> list[Any]:
    """A handle that names an engine which does not listen there: 500 whole, 200 and an error event
    streamed.
    """
    seen: list[Any] = []
    for path in (COMPLETIONS, CHAT):
        for stream in (False, True):
            body = _body(stream=stream)
            if path == CHAT:
                body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
            _, handle = await _prefilled(side, path, body)
            wrong = handle | {"remote_engine_id": "somebody-else"}
            seen.append(view(await side.ask("d", path, body | {"kv_transfer_params": wrong})))
            await side.ask(
                "d", COMPLETIONS, _body(prompt="x", max_tokens=0, kv_transfer_params=handle)
            )
    return [*seen, await _usage_falls(side, 5)]


async def killed_prefill(side: Side) -> list[Any]:
    """P dies after its answer, when D is already connected to it: 500 at once, or an error event if
    streamed.
    """
    body = _body()
    await side.ask(
        "d",
        COMPLETIONS,
        body | {"kv_transfer_params": (await _prefilled(side, COMPLETIONS, body))[1]},
    )
    handles = [
        (await _prefilled(side, COMPLETIONS, one := _body()))[1] | {"body": one} for _ in range(2)
    ]
    await side.kill("p")
    seen = []
    for handle, stream in zip(handles, (False, True), strict=True):
        asked = handle.pop("body") | {"stream": stream, "kv_transfer_params": handle}
        seen.append(view(await side.ask("d", COMPLETIONS, asked)))
    await side.heal()
    return seen


async def killed_decode(side: Side) -> list[Any]:
    """D dies in the middle of a stream: the connection ends without an error."""
    progress = Progress(3)
    asking = asyncio.create_task(
        side.ask("d", COMPLETIONS, _body(stream=True, max_tokens=1500), progress)
    )
    await progress.wait()
    await side.kill("d")
    answer = await asking
    await side.heal()
    return [answer.status, bool(answer.broken), answer.body.endswith(b"[DONE]\n\n")]


async def longer_prompt(side: Side) -> list[Any]:
    """A prompt that needs more blocks than the handle has: the core dies, and all requests fail."""
    _, handle = await _prefilled(side, COMPLETIONS, _body(prompt="short " * 20))
    answer = await side.ask("d", COMPLETIONS, _body(kv_transfer_params=handle))
    after = await side.ask("d", COMPLETIONS, _body())
    await side.heal()
    return [view(answer), after.status in (0, 500)]


STEPS: list[Step] = [
    handed_over,
    given_back,
    recomputed,
    wrong_engine,
    killed_prefill,
    killed_decode,
    longer_prompt,
]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
async def test_prefill_and_decode_behave_as_real_ones(
    step: Step, fleet: Fleet, simulated: Simulated
) -> None:
    """In each step a client gets the same from real and from simulated engines."""
    real = Real(fleet)
    await real.heal()
    wanted = await step(real)
    await handed_over(simulated)  # the real engines have already exchanged a prompt, too
    assert not structure_difference(await step(simulated), wanted)
