"""A prompt that is known by its first ids, whose other ids come while it waits for engines."""

from __future__ import annotations

import asyncio
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdproxy.scheduling.prefix.keys import PromptKeys, of_ids
from pdproxy.scheduling.prefix.prompts import PromptBeginning
from pdproxy.serving.dispatch.prefixes import PrefixQuestions
from pdproxy.tokens.ids import from_numbers
from tests.fakes.world import until

UNIT = 4


async def test_keys_that_are_being_made_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop reads those of the first ids until a thread has made all."""
    completed: list[PromptBeginning] = []
    knowledge = SimpleNamespace(completed=lambda beginning, _: completed.append(beginning))
    questions = PrefixQuestions(cast("Any", knowledge), lambda: 0.0)
    ids, go, begun = list(range(4000)), Event(), Event()
    first = of_ids(ids[: 2 * UNIT], UNIT, 0)
    beginning = PromptBeginning(first, 2 * UNIT, UNIT, of_text=False)
    beginning.begin(3000)
    keys = PromptBeginning.keys_of

    def slow(one: PromptBeginning, all_ids: Any) -> PromptKeys:
        made = keys(one, all_ids)
        steps = made._steps

        def stepwise() -> Any:
            begun.set()
            assert go.wait(20)
            yield from steps

        made._steps = stepwise()
        return made

    monkeypatch.setattr(PromptBeginning, "keys_of", slow)
    questions.complete(beginning, from_numbers(ids))
    await until(begun.is_set)
    assert beginning.keys.all() == first.all()
    assert (beginning.tokens, completed) == (3000, [])
    go.set()
    await until(lambda: completed)
    await asyncio.sleep(0)
    assert beginning.keys.all() == of_ids(ids, UNIT, 0).all()
    assert (beginning.tokens, beginning.is_begun) == (4000, False)
