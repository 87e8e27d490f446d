"""KV in storage that both engines reach (contract `shared`), with vLLM's ExampleConnector on two
real engines.
"""

# The connector stores whole blocks, and looks for blocks before the prompt's last two tokens. The
# decode engine computes the rest.

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from .client import ask
from .compare import differs
from .connected import by_files, pair
from .engine import BLOCK, MODEL, Engine
from .equality import RACES, SOURCE, Increases, equal
from .fleet import Fleet
from .launcher import Launcher
from .prompts import ids
from .proxy import Proxy
from .shapes import CHAT, COMPLETIONS, SHAPES, Shape, question

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300, func_only=True)]

FEW = {"completion-block", "completion-block-and-one"}
"""Prompts that have no whole block before their last two tokens."""
ANSWERED = [
    shape for shape in SHAPES if not shape.alone and shape.status == 200 and shape.name not in FEW
]
ALONE = [
    shape for shape in SHAPES if (shape.alone or shape.status != 200) and shape.name not in RACES
]


@pytest.fixture(scope="module")
def sharers(
    launcher: Launcher, plain: Engine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """A prefill and a decode engine that share one folder."""
    options = by_files(tmp_path_factory.mktemp("kv"))
    with pair(launcher, plain, "shared", options, {}) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def proxy(sharers: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """pdproxy in front of them."""
    settings = {"pools": [{"connector": "shared"}]}
    folder = tmp_path_factory.mktemp("shared")
    proxy = Proxy.start(sharers.prefills, sharers.decodes, folder, settings=settings)
    yield proxy
    assert proxy.stop() == 0, proxy.tail()


def whole_blocks(increases: Increases) -> bool:
    """Return whether the decode engine got whole blocks of the prompts, and computed the rest.

    If a prompt has one token more than whole blocks, the connector writes a block that it doesn't
    look for.
    """
    given, missed = increases["pulled"], increases["prompt"] % BLOCK == 1
    return (
        increases["prompt"] == given + increases["computed"]
        and given % BLOCK == 0
        and (given > 0 or missed)
    )


@pytest.mark.parametrize("shape", ANSWERED[::7], ids=str)
async def test_answer_is_the_plain_engines(sharers: Fleet, proxy: Proxy, shape: Shape) -> None:
    """Status, body and events equal the plain engine's, including cached tokens in the usage; the
    KV came from storage.
    """
    await equal(sharers, proxy, shape, moved=whole_blocks, several=False)


@pytest.mark.parametrize("shape", ALONE[::16], ids=str)
async def test_what_is_not_split_is_the_plain_engines_too(
    sharers: Fleet, proxy: Proxy, shape: Shape
) -> None:
    """As with NIXL: served by one engine alone, or refused."""
    await equal(sharers, proxy, shape)


@pytest.mark.parametrize("length", [66, 200, 640])
async def test_whole_blocks_move(sharers: Fleet, proxy: Proxy, length: int) -> None:
    """All whole blocks before the prompt's last two tokens move, and nothing else."""
    (decode,) = sharers.decodes
    body = {
        "model": MODEL,
        "prompt": ids(secrets.token_hex(6), length),
        "temperature": 0,
        "max_tokens": 4,
    }
    before = decode.counters()
    plain, other = (
        await ask(sharers.plain.url, COMPLETIONS, body),
        await ask(proxy.url, COMPLETIONS, body),
    )
    assert not differs(plain, other)
    after = decode.counters()
    given = {
        source: after.sum(SOURCE, source=source) - before.sum(SOURCE, source=source)
        for source in ("external_kv_transfer", "local_compute")
    }
    blocks = (length - 2) // BLOCK * BLOCK
    assert given == {"external_kv_transfer": blocks, "local_compute": length - blocks}


async def test_cached_tokens_of_a_repeated_prompt(sharers: Fleet, proxy: Proxy) -> None:
    """A repeated prompt counts as cached, as on the plain engine; KV that the decode engine
    received does not.
    """
    body = {
        "model": MODEL,
        "messages": question(secrets.token_hex(6)),
        "temperature": 0,
        "max_tokens": 5,
    }
    cached = []
    for _ in range(2):
        plain, other = await ask(sharers.plain.url, CHAT, body), await ask(proxy.url, CHAT, body)
        assert not differs(plain, other, warm=True)
        cached.append(other.json["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0
    assert cached[1] >= 2 * BLOCK


async def test_without_the_prefill_engine_no_kv_is_found(sharers: Fleet) -> None:
    """Control: without the prefill engine, the decode engine computes the whole prompt."""
    (decode,) = sharers.decodes
    before = decode.counters().sum(SOURCE, source="external_kv_transfer")
    await ask(
        decode.url,
        COMPLETIONS,
        {"model": MODEL, "prompt": ids(secrets.token_hex(6), 200), "max_tokens": 2},
    )
    assert decode.counters().sum(SOURCE, source="external_kv_transfer") == before
