"""Each connector that runs on a CPU, on the routes and with the media that it splits: answers are
one plain engine's, and the KV moves from P to D.
"""

# Starts three engines for each connector, with a model that sees and the route for token ids.
# Mooncake takes part where there is only the loopback, as in `.ci/full mooncake`: see
# `long_mooncake.py`.

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pdproxy.transfer.registry import ENTRIES
from pdproxy.wire.route import Route
from tests.fakes.pictures import asking, png
from tests.fakes.ports import free_port

from . import long_token_ids, test_split_routes
from .build import ensure, ensure_overlay, libraries
from .client import ask
from .compare import differs
from .connected import CONNECTORS, PairOptions, by_files, pair
from .engine import MODEL, Engine
from .equality import Increases, Moved, equal, in_full
from .fleet import COMPLETIONS, Fleet
from .launcher import Launcher
from .long_media import SHAPES as PICTURES
from .long_mooncake import KV as MOONCAKE
from .long_mooncake import _paired
from .long_shared import whole_blocks
from .long_token_ids import GENERATE
from .prompts import CHAT, STORY
from .proxy import Proxy
from .shapes import Shape
from .test_load import _until
from .test_split_routes import MESSAGES, RESPONSES, body_of, split
from .vision import FLAGS, encoded, vision_launcher

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300, func_only=True)]

ONLY_THE_LOOPBACK = {name for _, name in socket.if_nameindex()} == {"lo"}
NAMES = ("mooncake",) if ONLY_THE_LOOPBACK else ("nixl-push", "shared")
CAN = {entry.name: entry.capabilities for entry in ENTRIES}
FIELDS: dict[str, list[dict[str, Any]]] = {
    RESPONSES: list(test_split_routes.RESPONSES_FIELDS.values()),
    MESSAGES: list(test_split_routes.MESSAGES_FIELDS.values()),
    GENERATE: list(long_token_ids.SPLIT.values()),
}
WITH_PICTURES = [shape for shape in PICTURES if not shape.alone and shape.status == 200]


@dataclass
class Contract:
    """The engines of a connector behind pdproxy. `moved`: how a prompt's KV moves."""

    name: str
    fleet: Fleet
    proxy: Proxy
    moved: Callable[[Increases], bool]


@pytest.fixture(scope="module")
def seeing() -> Iterator[Launcher]:
    """Starts engines with a model that sees, and with Mooncake."""
    built = ensure()
    more, env = [], {}
    if ONLY_THE_LOOPBACK:
        more = [ensure_overlay(built, "mooncake")]
        env = {"LD_LIBRARY_PATH": libraries(more[0])}
    launcher = vision_launcher(built, more, env)
    yield launcher
    launcher.close()


@pytest.fixture(scope="module")
def one(seeing: Launcher) -> Iterator[Engine]:
    """The engine that answers are compared with."""
    engine = Engine.start(seeing, "routes-plain", "plain", flags=f"{FLAGS} --enable-scale-out")
    try:
        engine.wait().post(COMPLETIONS, {"model": MODEL, "prompt": "warm up", "max_tokens": 2})
        yield engine
    finally:
        engine.stop()


def _options(name: str, folder: Path, bootstrap: int) -> PairOptions:
    flags = f"{FLAGS} --enable-scale-out"
    if name == "shared":
        return PairOptions(by_files(folder).kv, flags)
    if name == "nixl-push":
        return PairOptions({"kv_connector": "NixlPushConnector"}, flags)
    env = {
        "PYTHONPATH": str(CONNECTORS),
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap),
    }
    return PairOptions(MOONCAKE, flags, {"prefill": env, "decode": env})


@pytest.fixture(scope="module", params=NAMES)
def contract(
    request: pytest.FixtureRequest,
    seeing: Launcher,
    one: Engine,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Contract]:
    """A prefill and a decode engine, which know each other."""
    name, bootstrap = str(request.param), free_port()
    own: dict[str, Any] = {"connector": name}
    if name == "mooncake":
        own["bootstrap_port"] = bootstrap
    settings = {"pools": [own], "probes": {"scrape_interval": 1.0}}
    options = _options(name, tmp_path_factory.mktemp("kv"), bootstrap)
    with pair(seeing, one, f"routes-{name}", options, {}) as fleet:
        proxy = Proxy.start(
            fleet.prefills, fleet.decodes, tmp_path_factory.mktemp(name), settings=settings
        )
        if name == "mooncake":
            asyncio.run(_paired(proxy))
        else:
            asyncio.run(_until(lambda: proxy.ready() == 200, 60, "not ready"))
        yield Contract(name, fleet, proxy, whole_blocks if name == "shared" else in_full)
        assert proxy.stop() == 0, proxy.tail()


@pytest.mark.parametrize(
    ("path", "number"), [(path, number) for path in FIELDS for number in range(len(FIELDS[path]))]
)
async def test_split_as_by_one_plain_engine(contract: Contract, path: str, number: int) -> None:
    """Status, type and content are equal, and D has computed nothing that can move."""
    assert Route(path) in CAN[contract.name].routes
    fields, fleet, proxy = FIELDS[path][number], contract.fleet, contract.proxy
    if path != GENERATE:
        await split(fleet, proxy, path, body_of(path, fields), contract.moved)
        return
    body = await long_token_ids.body_of(fleet, fields)
    before = Moved.now(fleet, proxy, 1)
    await long_token_ids.compared(fleet, proxy, body)
    await before.settled(lambda found: contract.moved(found) and not found["alone"])


@pytest.mark.parametrize("shape", WITH_PICTURES, ids=str)
async def test_pictures_as_by_one_plain_engine(contract: Contract, shape: Shape) -> None:
    """Only P encodes them, unless D computes blocks in which one is."""
    assert CAN[contract.name].media
    fleet, decode = contract.fleet, contract.fleet.decodes[0]
    before = encoded(decode)
    await equal(fleet, contract.proxy, shape, moved=contract.moved, at_once=True)
    assert contract.name == "shared" or encoded(decode) == before


async def test_prompts_that_begin_with_one_picture(contract: Contract) -> None:
    """A picture, another one of the same size in the same place, and the first one again: no cache
    and no storage takes one for another.
    """
    nonce = secrets.token_hex(6)
    texts = []
    for seed in ("one", "two", "one"):
        messages = [asking(nonce, png(f"{nonce} {seed}", 140, 84), STORY)]
        body = {"messages": messages, "temperature": 0, "max_tokens": 12}
        plain, other = [
            await ask(url, CHAT, body) for url in (contract.fleet.plain.url, contract.proxy.url)
        ]
        assert not differs(plain, other, strict=False, warm=True)
        texts.append(other.text)
    assert texts[0] == texts[2] != texts[1]
