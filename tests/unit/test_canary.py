"""Which engines are asked for canaries, when again, and what follows from what they say."""

import asyncio
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from pdproxy.fleet import canary
from pdproxy.fleet.canary import MAX_TOKENIZERS, Canaries
from pdproxy.kit.errors import EngineRefusedError, EngineTimeoutError, Wait
from pdproxy.observe.events import Observers, TokenizerJudged
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, Role
from pdproxy.tokens.canaries import CANARIES
from pdproxy.tokens.errors import UnusableError
from pdproxy.tokens.ids import TokenIds
from pdproxy.tokens.tokenizer import ids_of
from pdproxy.upstream.admin import ModelCard
from pdproxy.wire.route import Route
from tests.fakes.recorder import Recorder
from tests.fakes.registry import registry, unused_client
from tests.fakes.tokenizer import SimTokenizer
from tests.fakes.world import until

P, D = "http://p:1", "http://d:1"
FORMS: Any = {False: "string", True: "string"}


class Engines(Recorder):
    """Two engines that answer canaries, and how they were asked."""

    def __init__(self, tokenizer: SimTokenizer | None = None, threads: int = 2) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.roots: list[str] = []
        self.cards = [ModelCard("tiny", "/m", None), ModelCard("adapter", "/a", "tiny")]
        self.models_fail = False
        self.fails: dict[str, Callable[[], Exception]] = {}
        self.makes: dict[str, SimTokenizer] = {}
        self.finds: dict[str, SimTokenizer] = {}
        self.registry, self.ledger = registry(
            EngineSpec(P, Role.PREFILL), EngineSpec(D, Role.DECODE)
        )
        self.threads = ThreadPoolExecutor(threads)
        self.canaries = Canaries(
            self.registry,
            self,  # type: ignore[arg-type]
            Observers([self]),
            self.threads,
            tokenizer=tokenizer,
            find=self._find,
        )

    def up(self, url: str, started: float = 1.0) -> None:
        """Have probed an engine."""
        self.ledger.mark_up(
            url, Evidence(frozenset(card.id for card in self.cards), "1", 16, (), 0, started)
        )
        self.canaries.changed()

    def judged(self) -> list[tuple[str, str, bool | None]]:
        """Engine, model and verdict of each event."""
        return [
            (one.node, one.model, one.agrees)
            for one in self.events
            if isinstance(one, TokenizerJudged)
        ]

    async def models(self, url: str) -> list[ModelCard]:
        """An engine's models."""
        self.asked.append(url)
        if self.models_fail:
            raise EngineTimeoutError("late", wait=Wait.PROBE)
        return self.cards

    async def token_ids(self, url: str, body: bytes, *, max_bytes: int) -> TokenIds:
        """An engine's ids."""
        await asyncio.sleep(0)
        if url in self.fails:
            raise self.fails[url]()
        asked = msgspec.json.decode(body)
        (same,) = [
            one
            for one in CANARIES
            if msgspec.json.decode(one.tokenize_body(asked["model"])) == asked
        ]
        return ids_of(self.makes.get(url, SimTokenizer()), *same.parsed(asked["model"]), FORMS)

    def _find(self, root: str) -> SimTokenizer:
        self.roots.append(root)
        if root in self.finds:
            return self.finds[root]
        if not root.startswith("/m"):
            raise UnusableError("is not a folder")
        return SimTokenizer()


@pytest.fixture
def engines() -> Any:
    """Engines, and their threads ended."""
    made = Engines()
    yield made
    made.threads.shutdown()


async def test_each_engine_is_asked_once_in_each_run(engines: Engines) -> None:
    """And nothing is trusted before all that are up and serve a model have agreed."""
    engines.up(P)
    assert await engines.canaries.look()
    assert engines.canaries.trusted("tiny", Route.CHAT) is not None
    engines.up(D)
    assert engines.canaries.trusted("tiny", Route.CHAT) is None
    assert await engines.canaries.look()
    assert await engines.canaries.look()
    assert engines.asked == [P, D]
    assert engines.roots == ["/m"], "one tokenizer for both"
    assert engines.judged() == [(P, "tiny", True), (D, "tiny", True)]
    trusted = engines.canaries.trusted("tiny", Route.CHAT)
    assert trusted is not None
    assert trusted is engines.canaries.trusted("tiny", Route.CHAT)
    assert (await _same(engines, "adapter"), await _same(engines, None)) == (trusted, trusted)
    assert engines.canaries.trusted("of a client's", Route.CHAT) is None
    engines.up(D, started=2.0)
    assert engines.canaries.trusted("tiny", Route.CHAT) is None, "it may be another one"
    await engines.canaries.look()
    assert engines.asked == [P, D, D]
    assert engines.canaries.trusted("tiny", Route.CHAT) == trusted


async def _same(engines: Engines, model: str | None) -> Any:
    return engines.canaries.trusted(model, Route.CHAT)


async def test_an_adapter_that_is_loaded_later(engines: Engines) -> None:
    """Its base was compared: only its base model is looked up, and no canary is asked again."""
    engines.up(P)
    await engines.canaries.look()
    engines.cards.append(ModelCard("later", "/l", "tiny"))
    engines.up(P)
    assert engines.canaries.trusted("later", Route.CHAT) is None
    engines.models_fail = True
    assert not await engines.canaries.look()
    engines.models_fail = False
    assert await engines.canaries.look()
    assert (
        engines.canaries.trusted("later", Route.CHAT)
        == engines.canaries.trusted("tiny", Route.CHAT)
        is not None
    )
    assert await engines.canaries.look()
    assert (engines.judged(), engines.asked) == ([(P, "tiny", True)], [P] * 3)


async def test_one_that_went_down_does_not_count(engines: Engines) -> None:
    """Its model is tokenized here as long as the others agree; back in the same run, it isn't asked
    again.
    """
    engines.makes[D] = SimTokenizer("plain")
    engines.up(P)
    engines.up(D)
    await engines.canaries.look()
    assert engines.judged()[1:] == [(D, "tiny", False)] or engines.judged()[:1] == [
        (D, "tiny", False)
    ]
    assert engines.canaries.trusted("tiny", Route.CHAT) is None
    assert engines.canaries.trusted("tiny", Route.COMPLETIONS) is not None, (
        "its template differs, not its tokenizer"
    )
    engines.ledger.mark_down(D, "gone", 0.0)
    engines.canaries.changed()
    assert engines.canaries.trusted("tiny", Route.CHAT) is not None
    engines.up(D)
    assert engines.canaries.trusted("tiny", Route.CHAT) is None
    await engines.canaries.look()
    assert engines.asked.count(D) == 1
    assert dict(engines.canaries.agreements()) == {(P, "tiny"): 1.0, (D, "tiny"): 0.0}
    (line,) = engines.canaries.shortcomings()
    assert line.startswith(
        f"{D}: prompts of tiny are not tokenized here: other token ids than the engine's for a "
        f"message, "
    )


async def test_one_that_reports_no_start_is_asked_whenever_it_comes_back(engines: Engines) -> None:
    """Several API servers show no start of theirs: it may have been restarted with another
    template.
    """
    engines.up(P, started=0.0)
    await engines.canaries.look()
    assert engines.canaries.trusted("tiny", Route.CHAT) is not None
    engines.makes[P] = SimTokenizer("plain")
    engines.ledger.mark_down(P, "gone", 0.0)
    engines.up(P, started=0.0)
    assert engines.canaries.trusted("tiny", Route.CHAT) is None
    await engines.canaries.look()
    assert engines.judged() == [(P, "tiny", True), (P, "tiny", False)]


async def test_one_that_is_too_busy_is_asked_again(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its silence is no verdict; the task comes back to it by itself."""
    monkeypatch.setattr(canary, "AGAIN", 0.02)
    engines.fails[P] = lambda: EngineTimeoutError("late", wait=Wait.PROBE)
    engines.up(P)
    task = asyncio.ensure_future(engines.canaries.run())
    await until(lambda: engines.asked.count(P) >= 3)
    assert (engines.judged(), engines.canaries.shortcomings()) == ([], [])
    assert engines.canaries.trusted("tiny", Route.CHAT) is None
    engines.fails.clear()
    await until(engines.judged)
    asked = len(engines.asked)
    await asyncio.sleep(0.1)
    assert len(engines.asked) == asked
    engines.up(D)
    await until(lambda: len(engines.judged()) == 2)
    task.cancel()


async def test_one_without_the_route(engines: Engines) -> None:
    """Nothing can be compared, and that is said."""
    engines.fails[P] = lambda: EngineRefusedError("no", status=404, body=b"")
    engines.up(P)
    assert await engines.canaries.look()
    assert engines.canaries.trusted("tiny", Route.COMPLETIONS) is None
    assert (
        "its /tokenize answers 404: nothing can be compared" in engines.canaries.shortcomings()[0]
    )


async def test_one_that_refuses_all(engines: Engines) -> None:
    """400 is an answer: ours is another one."""
    engines.fails[P] = lambda: EngineRefusedError("no", status=400, body=b"")
    engines.up(P)
    assert await engines.canaries.look()
    assert engines.judged() == [(P, "tiny", False)]


async def test_several_models(engines: Engines) -> None:
    """Each by itself: one whose tokenizer isn't here doesn't cost the other's. A request that names
    none is the engine's.
    """
    engines.cards.append(ModelCard("other", "/o", None))
    engines.up(P)
    await engines.canaries.look()
    assert sorted(engines.judged()) == [(P, "other", None), (P, "tiny", True)]
    assert engines.canaries.trusted("tiny", Route.CHAT) is not None
    assert engines.canaries.trusted("other", Route.CHAT) is None
    assert engines.canaries.trusted(None, Route.CHAT) is None


async def test_a_tokenizer_that_comes_later(engines: Engines) -> None:
    """What isn't here when an engine comes up is looked for again in its next run, and once for all
    engines.
    """
    engines.cards = [ModelCard("tiny", "/later", None)]
    engines.up(P)
    engines.up(D)
    assert await engines.canaries.look()
    assert engines.canaries.trusted("tiny", Route.CHAT) is None
    assert engines.roots == ["/later"]
    engines.finds["/later"] = SimTokenizer()
    for url in (P, D):
        engines.up(url, started=2.0)
        assert await engines.canaries.look()
    assert engines.canaries.trusted("tiny", Route.CHAT) is not None
    assert engines.roots == ["/later"] * 2


@pytest.mark.parametrize(("copy", "shared"), [("/m/copy", True), ("/m/plain", False)])
async def test_two_tokenizers_for_one_model(engines: Engines, copy: str, shared: bool) -> None:
    """Engines that loaded one model from two places, each right by itself: where they say the same,
    one's ids are both's.
    """
    engines.makes[D] = engines.finds[copy] = SimTokenizer("chatml" if shared else "plain")
    engines.up(P)
    await engines.canaries.look()
    first = engines.canaries.trusted("tiny", Route.CHAT)
    engines.cards[0] = ModelCard("tiny", copy, None)
    engines.up(D)
    await engines.canaries.look()
    assert engines.judged() == [(P, "tiny", True), (D, "tiny", True)]
    assert engines.roots == ["/m", copy]
    assert first is not None
    assert engines.canaries.trusted("tiny", Route.CHAT) == (first if shared else None)


async def test_a_named_tokenizer_is_for_all() -> None:
    """What the engines call their root is not looked at then."""
    named = SimTokenizer()
    engines = Engines(named)
    engines.up(P)
    await engines.canaries.look()
    trusted = engines.canaries.trusted("tiny", Route.CHAT)
    assert trusted is not None
    assert trusted.tokenizer is named
    assert engines.roots == []
    engines.threads.shutdown()


async def test_an_engine_that_names_its_model_in_ever_other_ways(engines: Engines) -> None:
    """Each way is a tokenizer of its own: those that no engine names any more are forgotten, and
    that of another engine stays.
    """
    engines.up(D)
    await engines.canaries.look()
    for number in range(3 * MAX_TOKENIZERS):
        engines.cards = [ModelCard("tiny", f"/m/{number}", None)]
        engines.up(P, started=2.0 + number)
        assert await engines.canaries.look()
    assert len(engines.canaries._found) <= MAX_TOKENIZERS
    engines.cards = [ModelCard("tiny", "/m", None)]
    engines.up(P, started=1000.0)
    assert await engines.canaries.look()
    assert engines.roots.count("/m") == 1
    assert engines.canaries.trusted("tiny", Route.CHAT) is not None


async def test_an_engine_that_was_removed_does_not_count(engines: Engines) -> None:
    """Nor have its old answers, if it is added again: it may be another one."""
    engines.makes[D] = SimTokenizer("plain")
    engines.up(P)
    engines.up(D)
    await engines.canaries.look()
    assert engines.canaries.trusted("tiny", Route.CHAT) is None
    engines.registry.remove(D)
    assert engines.canaries.trusted("tiny", Route.CHAT) is not None
    assert (engines.canaries.shortcomings(), dict(engines.canaries.agreements())) == (
        [],
        {(P, "tiny"): 1.0},
    )
    engines.canaries.refuted(D, "tiny", Route.CHAT, "a leg that was under way")
    assert engines.canaries.trusted("tiny", Route.CHAT) is not None
    engines.registry.add(EngineSpec(D, Role.DECODE), unused_client(D))
    assert engines.canaries.trusted("tiny", Route.CHAT) is not None, "not up yet"
    engines.makes.clear()
    engines.up(D)
    assert engines.canaries.trusted("tiny", Route.CHAT) is None, "not asked yet"
    await engines.canaries.look()
    assert engines.canaries.trusted("tiny", Route.CHAT) is not None
    assert engines.asked.count(D) == 2


async def test_a_tokenizer_that_is_not_there_leaves_no_garbage(engines: Engines) -> None:
    """The future by which its error came would keep the engine's models until a collection."""
    engines.cards = [ModelCard("other", "/other", None)]
    engines.up(P)
    engines.up(D)
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        assert await engines.canaries.look()
        await asyncio.sleep(0)
        gc.collect()
        left = [one for one in gc.garbage if isinstance(one, UnusableError | ModelCard)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert left == []
    assert engines.roots == ["/other"]
