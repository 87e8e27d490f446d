"""What the running proxy says of itself, and what of it is shown."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdproxy.settings.schema import Settings
from pdproxy_lab.up.running_proxy import REPEATED, RunningProxy, Said


class Admin:
    """An admin listener that answers with what it holds."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        body = json.dumps(self.answers[path]).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()


@pytest.mark.parametrize(
    ("requests", "idle"),
    [
        ([], math.inf),
        ([{"ended_s": 61.5}], 61.5),
        ([{"ended_s": None}], 0.0),
        ("none", 0.0),
    ],
)
async def test_for_how_long_it_has_had_no_request(
    tmp_path: Path, requests: Any, idle: float
) -> None:
    admin, path = Admin(), f"{tmp_path}/s"
    settings = msgspec.convert({"listen": {"admin": f"unix:{path}"}}, Settings)
    proxy = RunningProxy(settings)
    assert await proxy.idle() == 0.0
    assert await proxy.details() == []
    admin.answers = {
        "/admin/v1/requests?limit=1": {"requests": requests},
        "/ready": {"ready": True, "details": ["one more decode engine"]},
    }
    async with await asyncio.start_unix_server(admin.take, path):
        assert await proxy.idle() == idle
        assert await proxy.details() == ["one more decode engine"]
        admin.answers["/ready"] = {"ready": True}
        assert await proxy.details() == []


def test_each_sentence_is_shown_once_an_hour_whatever_its_numbers() -> None:
    said = Said()
    assert said.new(["wants 1.2 engines", "is slow"], 0.0) == ["wants 1.2 engines", "is slow"]
    assert said.new(["wants 31 engines", "is slow"], 15.0) == []
    assert said.new([], 30.0) == []
    assert said.new(["wants 3 engines", "is full"], REPEATED - 1) == ["is full"]
    assert said.new(["wants 3 engines"], REPEATED) == ["wants 3 engines"]
    for number in range(600):
        said.new([f"about {'x' * number}"], 0.0)
    assert len(said._shown) == 256
