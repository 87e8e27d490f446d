"""A simulated engine with a reasoning parser answers as a real one did: tests/data/reasoning,
recorded from vLLM 0.32.0.
"""

from pathlib import Path

import pytest

from tests.engines.client import Answer, ask
from tests.engines.skeleton import structure_difference, view
from tests.fakes.books import Books
from tests.fakes.engine import FakeEngine

CHAT = "/v1/chat/completions"
NOT_SIMULATED = {"not_included_then_call_stream"}
"""Where thoughts are not included, vLLM's grammar begins with them and fails at their end: a 500
inside the stream.
"""
RECORDED = sorted((Path(__file__).parents[1] / "data" / "reasoning").glob("*.txt"))


def recorded(path: Path) -> tuple[bytes, Answer]:
    """The request and the answer of a recorded exchange."""
    request, _, answer = path.read_bytes().partition(b"\n\n<<< ")
    head, _, body = answer.partition(b"\n\n")
    line, *headers = head.decode().split("\n")
    kind = next(
        header.partition(": ")[2] for header in headers if header.startswith("content-type: ")
    )
    return request.partition(b"\n\n")[2], Answer(
        int(line.split()[1]), {"Content-Type": kind}, body.rstrip()
    )


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
async def test_thoughts_are_told_as_recorded(path: Path) -> None:
    """Kinds of events in their order, keys in theirs, types and nulls are those of the real
    engine.
    """
    sent, wanted = recorded(path)
    engine = FakeEngine(
        "aggregated", Books(), reasoning_parser="deepseek_r1", enable_prompt_tokens_details=True
    )
    await engine.listen()
    try:
        why = structure_difference(view(await ask(engine.url, CHAT, sent)), view(wanted))
        assert bool(why) is (path.stem in NOT_SIMULATED), why
    finally:
        await engine.close()
