"""Which pool serves a model: names at engines, aliases, patterns, weights, conversations."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pdproxy.kit.errors import ModelNotFoundError
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, LedgerEngine, Role
from pdproxy.serving.access.models import MAX_KEPT, Models, PoolChoice, PoolModels, Routes
from pdproxy.wire.errors import error_body

NOW = 100.0


def node(
    *names: str, role: Role = Role.DECODE, adapters: frozenset[str] = frozenset()
) -> LedgerEngine:
    """An engine that lists these models; without any, one that was never up."""
    made = LedgerEngine(EngineSpec(f"http://{'-'.join(names) or 'new'}:1", role), run_number=1)
    if names:
        made.evidence = Evidence(frozenset(names), "1", 16, (), 0, 1.0, adapters=adapters)
        made.down_because = None
    return made


def pool(
    *engines: LedgerEngine,
    models: tuple[str, ...] = (),
    aliases: dict[str, str] | None = None,
    weight: float = 1,
) -> PoolModels:
    return PoolModels(lambda: engines, models, aliases or {}, weight)


def of(*pools: PoolModels, chance: random.Random | None = None) -> Models:
    return Models([*pools], (chance or random.Random(7)).random, lambda: NOW)


def test_names_at_engines_go_before_aliases_of_a_pool_and_these_before_patterns() -> None:
    """Each request has one pool, and one name that its engines know."""
    models = of(
        pool(node("a"), aliases={"a": "never", "fast": "a"}),
        pool(node("b"), models=("a-*", "*"), aliases={"slow": "b"}),
        pool(node("c"), models=("a-long-*", "exact")),
    )
    found = {
        name: models.choose(name, None)
        for name in ("a", "fast", "b", "slow", "a-1", "a-long-1", "exact", "x")
    }
    assert found == {
        "a": (0, "a"),
        "fast": (0, "a"),
        "b": (1, "b"),
        "slow": (1, "b"),
        "a-1": (1, "a-1"),
        "a-long-1": (2, "a-long-1"),
        "exact": (2, "exact"),
        "x": (1, "x"),
    }
    assert models.choose(None, None) == (0, None)


@pytest.mark.parametrize(
    ("pattern", "name", "fit"),
    [
        ("llama", "llama", 6),
        ("llama*", "llama", 5),
        ("*-8b", "llama-8b", 3),
        ("ll*8b", "llama-8b", 4),
        ("ab*ba", "aba", -1),
        ("llama", "llama-8b", -1),
        ("*", "", 0),
    ],
)
def test_patterns(pattern: str, name: str, fit: int) -> None:
    """A star stands for any text, also for none. A name fits itself best."""
    assert pool(models=(pattern,)).fit(name) == fit


def test_a_name_that_no_pool_has() -> None:
    """The error is vLLM's, with the names of all pools; adapters are not shown, as by vLLM."""
    base = node("a", "lora", adapters=frozenset({"lora"}))
    models = of(pool(base, aliases={"fast": "a"}), pool(node("b")))
    with pytest.raises(ModelNotFoundError) as caught:
        models.choose("nope", None)
    assert error_body(caught.value) == (
        b'{"error":{"message":"The model `nope` does not exist. Valid aliases: a, b, fast.",'
        b'"type":"NotFoundError","param":"model","code":404}}'
    )
    assert caught.value.status == 404
    assert models.choose("lora", None) == (0, "lora")


def test_one_pool_leaves_a_wrong_name_to_its_engines() -> None:
    """Its aliases are replaced all the same."""
    models = of(pool(node("a"), aliases={"fast": "a"}))
    assert [models.choose(name, None) for name in ("fast", "nope")] == [(0, "a"), (0, "nope")]
    assert models.is_of_use
    assert not of(pool(node("a"), models=("*",))).is_of_use


def test_a_pool_that_was_never_up_may_have_any_name() -> None:
    """It answers that no engine is up, which a client may try again. One that was seen is asked no
    more.
    """
    new = node()
    models = of(pool(node("a")), pool(new))
    assert models.choose("b", None) == (1, "b")
    new.evidence = Evidence(frozenset({"c"}), "1", 16, (), 0, 1.0)
    models.changed()
    with pytest.raises(ModelNotFoundError):
        models.choose("b", None)


def test_weights_hold() -> None:
    """With a seeded chance: nine of ten requests, within two of a hundred."""
    models = of(
        pool(node("m"), weight=9),
        pool(node("new"), aliases={"m": "new"}, weight=1),
        pool(node("x")),
    )
    found = Counter(models.choose("m", None) for _ in range(4000))
    assert set(found) == {(0, "m"), (1, "new")}
    assert found[PoolChoice(0, "m")] / 4000 == pytest.approx(0.9, abs=0.02)


def test_a_conversation_stays_in_its_pool() -> None:
    """By a hash, so that the shares of conversations are the weights, too. A new weight moves only
    as many as it must.
    """
    pools = pool(node("m"), weight=3), pool(node("m"), weight=1)
    models = of(*pools)
    names = [f"session {n}" for n in range(2000)]
    first = [models.choose("m", name).pool for name in names]
    assert [models.choose("m", name).pool for name in names] == first
    assert first.count(0) / 2000 == pytest.approx(0.75, abs=0.03)
    pools[0].weight = 4
    moved = sum(
        models.choose("m", name).pool != one for name, one in zip(names, first, strict=True)
    )
    assert moved / 2000 == pytest.approx(0.05, abs=0.02)


def test_a_pool_that_goes_down_moves_no_other_pools_conversations() -> None:
    """Its own ones are shared by the others, by their weights, and come back with it."""
    engines = [node("m") for _ in range(3)]
    models = of(*[pool(one, weight=weight) for one, weight in zip(engines, (1, 2, 1), strict=True)])
    names = [f"session {n}" for n in range(2000)]
    first = [models.choose("m", name).pool for name in names]
    assert [first.count(at) / 2000 for at in range(3)] == pytest.approx([0.25, 0.5, 0.25], abs=0.03)
    engines[0].down_because = "connection refused"
    found = [models.choose("m", name).pool for name in names]
    assert all(new == old for new, old in zip(found, first, strict=True) if old)
    moved = Counter(new for new, old in zip(found, first, strict=True) if not old)
    assert moved[1] / moved.total() == pytest.approx(2 / 3, abs=0.06)
    engines[0].down_because = None
    assert [models.choose("m", name).pool for name in names] == first


def test_a_pool_of_weight_0() -> None:
    """It gets what no other pool serves, and its own aliases."""
    models = of(pool(node("m")), pool(node("m", "own"), aliases={"canary": "m"}, weight=0))
    assert {models.choose("m", None).pool for _ in range(50)} == {0}
    assert models.choose("own", None) == (1, "own")
    assert models.choose("canary", None) == (1, "m")
    both = of(pool(node("m"), weight=0), pool(node("m"), weight=0))
    assert both.choose("m", None) == (0, "m")


@pytest.mark.parametrize("why", ["down", "draining", "prefill only", "excluded"])
def test_a_pool_that_cannot_serve_gets_nothing_another_one_can(why: str) -> None:
    """Whatever its weight is, and for a conversation, too."""
    bad = node("m", role=Role.PREFILL if why == "prefill only" else Role.DECODE)
    if why == "down":
        bad.down_because = "connection refused"
    elif why == "draining":
        bad.draining = "is being drained"
    elif why == "excluded":
        bad.open_until = NOW + 1
    models = of(pool(bad, weight=1000), pool(node("m")))
    assert {
        models.choose("m", session).pool for session in (None, "a", "b", "c") for _ in range(5)
    } == {1}
    alone = of(pool(bad), pool(node("x")))
    assert alone.choose("m", None) == (0, "m"), "its own answer says why"


def test_adapters_come_and_go() -> None:
    """What engines list is looked at again once one has changed, and not before."""
    first, second = node("a"), node("b")
    models = of(pool(first), pool(second))
    with pytest.raises(ModelNotFoundError):
        models.choose("lora", None)
    second.evidence = Evidence(frozenset({"b", "lora"}), "1", 16, (), 0, 1.0)
    models.changed()
    assert models.choose("lora", None) == (1, "lora")
    second.evidence = Evidence(frozenset({"b"}), "1", 16, (), 0, 1.0)
    assert models.choose("lora", None) == (1, "lora"), "from memory"
    models.changed()
    with pytest.raises(ModelNotFoundError):
        models.choose("lora", None)


def test_names_of_clients_are_not_kept_without_end() -> None:
    """A pattern accepts any number of them."""
    models = of(pool(node("a"), models=("*",)), pool(node("b")))
    for n in range(MAX_KEPT + 10):
        models.choose(f"name {n}", None)
    assert len(models._known) <= MAX_KEPT


def test_routes_are_in_the_order_of_the_pools() -> None:
    """The target of a request, and the engines' name of its model."""
    routes = Routes(
        of(pool(node("a"), aliases={"fast": "a"}), pool(node("b"))), ["first", "second"]
    )
    assert [routes.of(name, None) for name in ("fast", "b", None)] == [
        ("first", "a"),
        ("second", "b"),
        ("first", None),
    ]
