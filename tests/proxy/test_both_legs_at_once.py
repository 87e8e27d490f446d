"""Both engines are asked at once, and the prefill engine answers while the decode engine's answer is processed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdproxy.serving.dispatch import decode_leg
from pdproxy.serving.dispatch.decode_start import first_data
from pdproxy.sim.faults.book import Fault
from tests.fakes.pool import pool
from tests.proxy.test_both_legs import PUSH, known
from tests.proxy.test_connectors import COMPLETIONS, bare, completion, events


@pytest.mark.parametrize("fields", [{}, {"stream": True, "max_tokens": 1, "stream_options": {"include_usage": True}}])
async def test_counts_of_an_answer_that_comes_while_the_decode_engines_is_processed(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode engine's answer was read before the prefill engine's, and goes to the client behind it."""

    async def processed_later(*args: Any, **options: Any) -> Any:
        got = await first_data(*args, **options)
        await asyncio.sleep(0.3)
        return got

    async with pool(PUSH, everybody={"enable_prompt_tokens_details": True}) as pair:
        await known(pair)
        pair.p.faults.add(Fault(kind="slow", at="head", args={"delay": 0.1}))
        monkeypatch.setattr(decode_leg, "first_data", processed_later)
        ours = await pair.ask(COMPLETIONS, completion(**fields))
        theirs = await pair.asked_plain(COMPLETIONS, completion(**fields))
        assert events(ours.body) == events(theirs.body)
        assert bare(ours.json if not fields else {}) == bare(theirs.json if not fields else {})
