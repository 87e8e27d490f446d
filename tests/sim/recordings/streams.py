"""Streams that broke off: recorded as raw bytes, of which a head and a tail were kept."""

import re
from dataclasses import replace
from typing import Any

import pytest

from pdproxy.engine_model.hardware import Hardware
from pdproxy_lab.sim.server import SimServer
from tests.sim.raw import Raw, turns
from tests.sim.recordings.reading import Sent, raw, read
from tests.sim.recordings.stage import PREFILL, Stage, seen
from tests.sim.shape import Seen, differences, event_view, unlike

_FRAMED = re.compile(rb"\n([0-9a-f]+)\r\n(data: [^\n]*\n\n)\r\n")
_SLOW = Hardware(decode_step_s=0.005)
"""The recorded requests want 1500 tokens: they are not made before the engine is gone."""


async def killed(stage: Stage, name: str) -> None:
    """SIGKILL: the end of the connection, no last chunk."""
    d, client = await _under_way(stage, read(name).sent)
    await d.kill()
    await client.end()
    assert client.ended == "eof"
    assert not client.answer.complete
    _compare_head(name, client)
    _compare_events(name, client)


async def terminated(stage: Stage, name: str) -> None:
    """SIGTERM: not a byte more, no end either; nobody else is let in.

    The request was not recorded: the one of the other recording is sent.
    """
    d, client = await _under_way(stage, read("fail_D_sigkill_midstream").sent)
    await d.terminate()
    before = client.data
    await turns()
    assert client.data == before
    assert not client.ended
    with pytest.raises(ConnectionRefusedError):
        await Raw.connect(d.port)
    _compare_events(name, client)
    client.leave()


async def _under_way(stage: Stage, sent: Sent) -> tuple[SimServer, Raw]:
    """Have KV handed over, and five events streamed by D."""
    p, d = await stage.engine("prefill"), await stage.engine("decode", hardware=_SLOW)
    asked: dict[str, Any] = sent.json
    prompt = {"prompt": asked["prompt"], "temperature": 0, "max_tokens": 1}
    handle = await stage.prefill(p, sent.saying({**prompt, "kv_transfer_params": PREFILL}))
    client = await Raw.connect(d.port)
    client.send(sent.saying({**asked, "kv_transfer_params": handle}).raw)
    await client.until(lambda: len(client.answer.chunks) >= 5)
    return d, client


def _compare_head(name: str, client: Raw) -> None:
    head = raw(name).partition(b"<<< raw bytes: head and tail\n")[2].partition(b"\r\n\r\n")[0]
    line, *fields = head.decode().split("\r\n")
    headers = dict(field.split(": ", 1) for field in fields)
    body = client.answer.chunks[0]  # what the bodies have in common is compared elsewhere
    got = replace(seen(client), body=body)
    assert not differences(Seen(200, body, line, headers), got, block_size=1)


def _compare_events(name: str, client: Raw) -> None:
    """Each event is a chunk, each like each."""
    recorded = _FRAMED.findall(raw(name))
    assert recorded
    assert all(int(size, 16) == len(event) for size, event in recorded)
    (wanted,) = _distinct([event_view(event) for _, event in recorded])
    for chunk in client.answer.chunks:
        assert not unlike(wanted, event_view(chunk))


def _distinct(items: list[Any]) -> list[Any]:
    return [item for number, item in enumerate(items) if item not in items[:number]]
