"""Recordings of connectors other than NIXL: several exchanges with engines told apart by their
ports, and remarks on D's metrics.

Requests were recorded in part (3000 characters) where prompts are long: those are left out, with
their answers.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Awaitable, Callable
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from pdproxy_lab.sim.facts import LMCacheFacts
from pdproxy_lab.sim.server import SimServer
from tests.sim.raw import until
from tests.sim.recordings.reading import Exchange, raw, read_all
from tests.sim.recordings.sequences import warm
from tests.sim.recordings.stage import Stage
from tests.sim.shape import Seen

_REMARK = re.compile(rb"^### (.*?)(?: (\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}))?$")
_SOURCE = re.compile(r'source="(\w+)"')
_IDS = {"enable_prefix_caching": False, "num_gpu_blocks": 512}

Scene = Callable[[Stage, str], Awaitable[None]]


def _whole(one: Exchange) -> bool:
    try:
        return isinstance(one.sent.json, dict) and isinstance(one.answer and one.answer.json, dict)
    except ValueError:
        return False


def _remarks(name: str) -> list[tuple[list[Exchange], dict[str, int]]]:
    """Return the exchanges before each remark, with what it says about D: prompt tokens by
    source.
    """
    left, found = read_all(name), []
    for part in re.split(rb"^(?=### )", raw(name), flags=re.MULTILINE)[1:]:
        line = part.partition(b"\n")[0]
        found.append((line, len(re.findall(rb"^>>> ", part, re.MULTILINE))))
    before = [len(left) - sum(count for _, count in found), *(count for _, count in found)]
    told = []
    for (line, _), count in zip(found, before, strict=False):
        match = _REMARK.match(line)
        counted = ast.literal_eval(match[2].decode()) if match and match[2] else {}
        by_source = {
            m[1]: int(value) for key, value in counted.items() if (m := _SOURCE.search(key))
        }
        told.append((left[:count], by_source))
        left = left[count:]
    return told


def _ids(answer: Seen) -> list[int]:
    ids = answer.json["choices"][0]["token_ids"]
    return [] if ids is None else list(ids)


def _sources(engine: SimServer) -> dict[str, int]:
    return dict(engine.engine.stats.prompt_tokens_by_source)


async def _replay(
    stage: Stage, name: str, engines: dict[int, SimServer], ports: tuple[int, int]
) -> int:
    """Replay what was recorded whole; return how many exchanges that were."""
    alone, decode = ports
    count = 0
    for exchanges, recorded in _remarks(name):
        if not all(map(_whole, exchanges)):
            continue
        said: dict[str, list[int]] = {}
        for one in exchanges:
            if one.sent.path == "/tokenize":  # it counts in another vocabulary
                continue
            if one.port == alone:
                await warm(stage, engines[alone], one)
            asked, before = one.sent.json, _sources(engines[decode])
            told_by_ids = isinstance(asked.get("prompt"), list)
            sent = one.sent
            # the recorded prompt ends with the recorded P's token
            if one.port == decode and told_by_ids:
                sent = sent.saying({**asked, "prompt": [*asked["prompt"][:-1], *said["first"]]})
            answer = await stage.ask(engines[one.port], sent)
            stage.compare(one, answer)
            count += 1
            if one.port == alone:
                said["alone"] = _ids(answer)
            elif one.port == decode:
                after = {
                    key: value - before.get(key, 0)
                    for key, value in _sources(engines[decode]).items()
                }
                got = {key: value for key, value in after.items() if value}
                assert got == recorded if told_by_ids else got.keys() == recorded.keys()
                assert [*(said["first"] if told_by_ids else ()), *_ids(answer)] == said["alone"]
            else:
                said["first"] = _ids(answer)
    return count


async def shared(stage: Stage, name: str) -> None:
    """ExampleConnector: P and D with one folder."""
    with TemporaryDirectory() as folder:
        both = {"connector": "shared", "shared_storage_path": folder}
        engines = {
            8100: await stage.engine("aggregated", enable_prompt_tokens_details=True),
            8202: await stage.engine("prefill", **both),
            8302: await stage.engine("decode", **both),
        }
        assert await _replay(stage, name, engines, (8100, 8302)) == 18


def lmcache(exchanges: int, notices: list[str], *, degraded: bool = False) -> Scene:
    """Return the scene of LMCache's recordings: so many whole exchanges, and the notices of
    those.
    """

    async def scene(stage: Stage, name: str) -> None:
        import zmq

        context = zmq.Context()
        proxy = context.socket(zmq.PULL)
        try:
            port = proxy.bind_to_random_port("tcp://127.0.0.1")
            both: dict[str, Any] = {"connector": "lmcache-pd", **_IDS}
            config: dict[str, Any] = {
                "chunk_size": 32,
                "pd_backend_mode": "sync",
                "degraded": degraded,
            }
            receiver = LMCacheFacts(**config, skip_last_n_tokens=1)
            engines = {
                8100: await stage.engine(
                    "aggregated", enable_prompt_tokens_details=True, num_gpu_blocks=512
                ),
                8204: await stage.engine(
                    "prefill",
                    notify=f"tcp://127.0.0.1:{port}",
                    lmcache=LMCacheFacts(**config),
                    **both,
                ),
                8304: await stage.engine("decode", lmcache=receiver, **both),
            }
            assert await _replay(stage, name, engines, (8100, 8304)) == exchanges
            await until(lambda: engines[8204].engine.notice_sender.counts["sent"] == len(notices))
            got = [msgspec.msgpack.decode(proxy.recv()) for _ in notices]
            assert got == [{"type": "ProxyNotif", "req_id": one} for one in notices]
        finally:
            proxy.close(linger=0)
            context.term()

    return scene
