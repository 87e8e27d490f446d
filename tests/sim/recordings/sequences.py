"""Recordings of several exchanges with three engines, told apart by their ports."""

from typing import Any

from pdproxy_lab.sim.server import SimServer
from tests.sim.raw import until
from tests.sim.recordings.reading import Exchange, Sent, read_all
from tests.sim.recordings.stage import ROOMY, Stage, words

_ALONE, _P, _D = 8100, 8201, 8301
_LATE = {"req-cffb99"}
"""Requests that came to D when P's lease had ended."""


async def replay(stage: Stage, name: str) -> None:
    """Replay one exchange after the other.

    What D says is what the engine alone said, wherever the same was asked of it. Only with a handle
    that was read before it says something else: the recorded engine had nothing else to do, so that
    freed blocks were intact.
    """
    alone = await stage.engine("aggregated", enable_prompt_tokens_details=True, **ROOMY)
    p = await stage.engine("prefill", **ROOMY)
    d = await stage.engine("decode", kv_load_failure_policy="recompute", **ROOMY)
    engines = {_ALONE: alone, _P: p, _D: d}
    recorded_handles: dict[str, dict[str, Any]] = {}
    handles: dict[str, dict[str, Any]] = {}
    said: dict[str, list[str]] = {}
    read: set[str] = set()
    for one in read_all(name):
        assert one.answer is not None
        asked = one.sent.json
        sent = one.sent
        if one.port == _D:
            wanted = asked["kv_transfer_params"]
            recorded = recorded_handles[wanted["remote_request_id"]]
            wrong = {key: value for key, value in wanted.items() if value != recorded[key]}
            if "remote_port" in wrong:
                wrong["remote_port"] = stage.closed_port()
            handle = handles[wanted["remote_request_id"]] | wrong
            sent = sent.saying({**asked, "kv_transfer_params": handle})
            if asked_late(sent):
                p.engine.expire_leases()
        else:
            await warm(stage, engines[one.port], one)
        answer = await stage.ask(engines[one.port], sent)
        stage.compare(one, answer)
        if one.port == _P:
            handle = one.answer.json["kv_transfer_params"]
            recorded_handles[handle["remote_request_id"]] = handle
            handles[handle["remote_request_id"]] = answer.json["kv_transfer_params"]
        elif one.port == _ALONE:
            said[asked["prompt"]] = words(answer)
        elif asked["prompt"] in said:
            name = asked["kv_transfer_params"]["remote_request_id"]
            assert (words(answer) == said[asked["prompt"]]) is (name not in read)
            read.add(name)
    p.engine.expire_leases()
    await until(lambda: not p.engine.handles)


def asked_late(sent: Sent) -> bool:
    """Whether P's lease had ended when D was asked."""
    return sent.headers.get("X-Request-Id") in _LATE


async def warm(stage: Stage, engine: SimServer, one: Exchange) -> None:
    """Ask before, where the recorded engine found the prompt in its cache."""
    assert one.answer is not None
    answer = one.answer.json
    details = answer["usage"]["prompt_tokens_details"] or {}
    handle = answer["kv_transfer_params"] or {}
    if details.get("cached_tokens") or handle.get("remote_prefill_cached_tokens"):
        body = {key: value for key, value in one.sent.json.items() if key != "kv_transfer_params"}
        await stage.ask(engine, one.sent.saying(body))
