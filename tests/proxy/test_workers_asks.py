"""With several workers an engine's tokenizer is asked for canaries once, and each worker
tokenizes.
"""

from __future__ import annotations

from collections import Counter

import pytest

from pdproxy.tokens.canaries import CANARIES
from pdproxy.tokens.ids import TokenIds
from pdproxy.upstream.admin import EngineAdmin
from tests.fakes import several
from tests.fakes.tokenizer import Shelf, SimTokenizer
from tests.fakes.world import until, world
from tests.proxy.test_tokenize import always


async def test_canaries_are_asked_once_for_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the process that chooses engines. All trust the tokenizer; of a new run of an engine, it
    asks again.
    """
    monkeypatch.setattr(several, "WORKERS", 3)
    asked: Counter[tuple[EngineAdmin, str]] = Counter()
    token_ids = EngineAdmin.token_ids

    async def counted(self: EngineAdmin, url: str, body: bytes, **options: object) -> TokenIds:
        asked[self, url] += 1
        return await token_ids(self, url, body, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(EngineAdmin, "token_ids", counted)
    async with world(adjust=always(), library=Shelf(model=SimTokenizer())) as w:
        every = [
            pool.tokens.canaries
            for one in w.workers
            for pool in one.pools
            if pool.tokens is not None
        ]
        assert len(every) == 3
        await until(lambda: all(len(list(one.agreements())) == 2 for one in every))
        assert all(value == 1.0 for one in every for _, value in one.agreements())
        first = w.proxy.pools[0].admin
        assert asked == {(first, engine.url): len(CANARIES) for engine in w.engines}
        url = w.decode[0].url
        for one, canaries in zip(w.workers, every, strict=True):
            one.engines[url].run.judgements = None
            canaries.answers.__self__.known.clear()  # type: ignore[attr-defined]
        for canaries in every:
            canaries.changed()
        await until(lambda: all(len(list(one.agreements())) == 2 for one in every))
        assert asked[first, url] == 2 * len(CANARIES)
        assert asked.total() == 3 * len(CANARIES)
