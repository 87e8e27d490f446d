"""Engines with a reasoning parser: reasoning, answers and calls are the same through the proxy as
from one plain engine.
"""

# Starts three engines, since the parser would change what all other shapes prove: it withholds
# deltas and starts a grammar only after the reasoning.

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from .build import pinned_vllm, wanted_vllm
from .client import Answer, ask
from .engine import Role
from .equality import equal
from .fleet import Fleet
from .proxy import Proxy
from .shapes import CHAT, Shape
from .shapes_reasoning import BRIEFLY, REASONING_SHAPES, thinking
from .skeleton import structure_difference, view

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300, func_only=True)]

RECORDED = Path(__file__).parents[1] / "data" / "reasoning"
NAMES: dict[str, Role] = {"thinker": "plain", "thinker-p": "prefill", "thinker-d": "decode"}


@pytest.fixture(scope="module")
def thinkers(fleet: Fleet) -> Iterator[Fleet]:
    """A plain, a prefill and a decode engine, all with `--reasoning-parser deepseek_r1`."""
    thinkers = Fleet(fleet.launcher, flags="--reasoning-parser deepseek_r1")
    try:
        thinkers.launch(NAMES)
        yield thinkers
    finally:
        thinkers.end()


@pytest.fixture(scope="module")
def proxy(thinkers: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """pdproxy in front of them."""
    proxy = Proxy.start(thinkers.prefills, thinkers.decodes, tmp_path_factory.mktemp("thinkers"))
    yield proxy
    assert proxy.stop() == 0, proxy.tail()


@pytest.mark.parametrize("shape", REASONING_SHAPES, ids=str)
async def test_thoughts_are_the_plain_engines(thinkers: Fleet, proxy: Proxy, shape: Shape) -> None:
    """Status, body and events equal the plain engine's, and the KV moved."""
    await equal(thinkers, proxy, shape)


def _recorded(path: Path) -> tuple[bytes, Answer]:
    """Return the request and the answer of a recorded exchange."""
    request, _, answer = path.read_bytes().partition(b"\n\n<<< ")
    head, _, body = answer.partition(b"\n\n")
    line, *headers = head.decode().split("\n")
    kind = next(
        header.partition(": ")[2] for header in headers if header.startswith("content-type: ")
    )
    return request.partition(b"\n\n")[2], Answer(
        int(line.split()[1]), {"Content-Type": kind}, body.rstrip()
    )


@pytest.mark.skipif(
    wanted_vllm() != pinned_vllm(), reason=f"the recordings are of vLLM {pinned_vllm()}"
)
@pytest.mark.parametrize("path", sorted(RECORDED.glob("*.txt")), ids=lambda path: path.stem)
async def test_recorded_reasoning_is_what_an_engine_sends(thinkers: Fleet, path: Path) -> None:
    """The recordings are of these engines: for the same request they answer with the same
    structure.
    """
    sent, recorded = _recorded(path)
    why = "not asked"
    for _ in range(3):  # a late engine puts two tokens into one event
        why = structure_difference(view(await ask(thinkers.plain.url, CHAT, sent)), view(recorded))
        if not why:
            break
    assert not why


async def test_the_engines_separate_reasoning_from_content(thinkers: Fleet) -> None:
    """Control: a plain engine's answer has reasoning and content."""
    body = {"model": "tiny", "messages": thinking(secrets.token_hex(6)), "temperature": 0} | BRIEFLY
    message = (await ask(thinkers.plain.url, CHAT, body)).json["choices"][0]["message"]
    assert message["reasoning"]
    assert message["content"]
