"""The engines that a recording needs, simulated: as the recorded ones were set up, but without
hardware that takes time.
"""

import json
import socket
from contextlib import AsyncExitStack
from typing import Any, Literal

from pdproxy.engine_model.hardware import Hardware
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.server import SimServer
from pdproxy_lab.sim.tokenizer import BuiltInTokenizer
from tests.sim.raw import Raw, ask, until
from tests.sim.recordings.reading import Exchange, Sent
from tests.sim.shape import Seen, differences

BLOCK = 32
PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
MEETING = 40
"""How many tokens' KV moves when two engines are made to meet."""
_SETUP: dict[str, Any] = {
    "model": "tiny",
    "max_model_len": 2048,
    "block_size": BLOCK,
    "num_gpu_blocks": 512,
    "add_bos": True,
    "eos_every": 0,
    "enable_auto_tool_choice": False,
    "hardware": Hardware(speed=0),
    "handshake_timeout": 1.0,
}

ROOMY = {"max_model_len": 4096}
"""For prompts that fit into the recorded 2048 tokens by the recorded tokenizer alone."""
_tokenizer = BuiltInTokenizer(add_bos=True)


def count_tokens(prompt: str) -> int:
    """How long a completion's prompt is here."""
    return len(_tokenizer.encode(prompt))


def seen(client: Raw) -> Seen:
    """What a connection got to see of an answer."""
    answer = client.answer
    assert answer.status is not None
    body = b"".join(answer.chunks) if "transfer-encoding" in answer.headers else answer.body
    return Seen(answer.status, body, client.data.partition(b"\r\n")[0].decode(), answer.headers)


def other_prompt(count: int) -> list[int]:
    """A prompt of so many tokens that no recording has."""
    return list(range(2000, 2000 + count))


def words(answer: Seen) -> list[str]:
    """What an answer says: a text a choice, a stream's put together."""
    if not answer.streamed:
        return [
            one["text"] if "text" in one else one["message"]["content"]
            for one in answer.json["choices"]
        ]
    events = [json.loads(event[6:]) for event in answer.events if event.startswith(b"data: {")]
    pieces = [
        one.get("text") or one.get("delta", {}).get("content", "")
        for event in events
        for one in event["choices"]
    ]
    return ["".join(pieces)]


class Stage:
    """Starts engines, asks them, compares their answers with recorded ones."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def engine(
        self, role: Literal["aggregated", "prefill", "decode"], **facts: Any
    ) -> SimServer:
        """Start an engine."""
        if role == "aggregated":
            facts = {"connector": "none", "num_gpu_blocks": 8192, **facts}
        made = SimServer(SimFacts(role=role, **{**_SETUP, **facts}))
        self._stack.callback(lambda: _no_crash(made))
        return await self._stack.enter_async_context(made)

    def closed_port(self) -> int:
        """A port that nobody listens on as long as the test lasts."""
        held = self._stack.enter_context(socket.socket())
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])

    async def ask(self, engine: SimServer, sent: Sent) -> Seen:
        """Send a request; return its whole answer."""
        client = await ask(engine.port, sent.raw)
        assert client.answer.complete, (
            f"the answer broke off ({client.ended}): {client.data[-200:]!r}"
        )
        client.leave()
        return seen(client)

    def compare(self, recorded: Exchange, answer: Seen) -> None:
        """Fail where an answer is unlike the recorded one."""
        assert recorded.answer is not None
        found = differences(
            recorded.answer, answer, block_size=BLOCK, same_prompt=_told_by_ids(recorded.sent)
        )
        assert not found, "\n".join(["unlike the recording:", *found])

    async def replay(self, engine: SimServer, recorded: Exchange) -> Seen:
        """Send a recorded request as it was; compare the answers."""
        answer = await self.ask(engine, recorded.sent)
        self.compare(recorded, answer)
        return answer

    async def prefill(self, p: SimServer, sent: Sent) -> dict[str, Any]:
        """Return the handle that a prefill engine answers a request with."""
        answer = await self.ask(p, sent)
        assert answer.status == 200, answer.body
        handle = answer.json["kv_transfer_params"]
        assert handle is not None
        return dict(handle)

    async def meet(self, p: SimServer, d: SimServer) -> None:
        """Let KV move between two engines, so that they know each other."""
        body = {"prompt": list(range(300, 300 + MEETING)), "max_tokens": 1, "temperature": 0}
        sent = Sent("POST", "/v1/completions")
        handle = await self.prefill(p, sent.saying({**body, "kv_transfer_params": PREFILL}))
        answer = await self.ask(d, sent.saying({**body, "kv_transfer_params": handle}))
        assert answer.status == 200
        assert d.engine.stats.prompt_tokens_by_source["external_kv_transfer"] == MEETING
        await until(lambda: not p.engine.handles)

    async def alone(self, sent: Sent, **facts: Any) -> list[str]:
        """What an engine alone says to a request."""
        body = {key: value for key, value in sent.json.items() if key != "kv_transfer_params"}
        return words(await self.ask(await self.engine("aggregated", **facts), sent.saying(body)))


def _told_by_ids(sent: Sent) -> bool:
    if sent.method != "POST" or not sent.body.startswith(b'{"model": "tiny", "prompt": ['):
        return False
    return all(isinstance(one, int) for one in sent.json["prompt"])


def _no_crash(engine: SimServer) -> None:
    assert not engine.crashes
