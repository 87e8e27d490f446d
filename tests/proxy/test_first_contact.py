"""Engines that have never exchanged KV: what a decode engine has to tell a prefill engine may wait
for its next step.
"""

from __future__ import annotations

import pytest

from pdproxy.observe.events import HandleEnded
from tests.fakes import answers, scripts
from tests.fakes.engine import Script
from tests.fakes.world import COMPLETIONS, completion, world


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdproxy.serving.kv.release.FIRST_CONTACT", 0.05)


def refuses() -> Script:
    """A refusal by the handler, which gives KV back by itself, sooner or later."""
    return scripts.whole(answers.error("no", "BadRequestError", 400, "max_tokens"), 400)


async def test_a_refusal_is_no_release_before_the_first_transfer() -> None:
    """The first request of a pair is refused by D: the KV is given back by us, and once more when
    the handshake is over.
    """
    async with world(strangers=True, leaves=True) as w:
        w.decode[0].script(refuses())
        assert (await w.ask(COMPLETIONS, completion(max_tokens=7))).status == 400
        await w.quiet()
        assert [event.end for event in w.events(HandleEnded)] == ["released"]
        assert len(w.decode[0].releases) == 2


async def test_a_refusal_is_a_release_once_kv_has_moved() -> None:
    """After a transfer of the pair D's refusal is enough; after a restart of either engine it is
    not.
    """
    async with world(strangers=True, leaves=True) as w:
        assert (await w.ask(COMPLETIONS, completion())).status == 200
        w.decode[0].script(refuses())
        assert (await w.ask(COMPLETIONS, completion(max_tokens=7))).status == 400
        await w.quiet()
        assert [event.end for event in w.events(HandleEnded)] == ["loaded", "refused"]
        assert not w.decode[0].releases
