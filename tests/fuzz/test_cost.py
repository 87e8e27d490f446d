"""What inputs of every known shape cost stays within bounds, in counts: steps of Python and bytes
of memory per byte.
"""

# No clock is looked at. The search for worse ones is `python -m tests.fuzz.run cost`; the bounds,
# each with its reason, are in tests/fuzz/cost/bounds.py.

from __future__ import annotations

import os
import random

import pytest

from pdproxy.kit.errors import BadRequestError
from tests.fuzz.cost.bounds import KIB, Bound
from tests.fuzz.cost.counts import over
from tests.fuzz.cost.known import NOT_YET
from tests.fuzz.cost.measure import Cost, measured, steps, traced
from tests.fuzz.cost.paths import PATHS, Path
from tests.fuzz.cost.recipes import Recipe, many, mutated, nested, recipe
from tests.fuzz.cost.search import Search, judged, replay

SHARE = 1 if os.environ.get("PDPROXY_TEST_COSTS") == "all" else 2
"""Of each path, the gate takes every second input; `.ci/full` takes all."""
INPUTS = [(path, name) for path in PATHS for name in list(path.known)[::SHARE]]


def _inputs() -> list[object]:
    found: list[object] = []
    for path, name in INPUTS:
        known = name in NOT_YET.get(path.name, ())
        marks = [pytest.mark.xfail(strict=True, reason="over a bound today")] if known else []
        found.append(pytest.param(path, name, id=f"{path.name}-{name}", marks=marks))
    return found


@pytest.mark.parametrize(("path", "name"), _inputs())
def test_no_known_input_costs_more_than_its_bound(path: Path, name: str) -> None:
    """Every shape that was costly once stays within the steps and the memory per byte that its path
    may take.
    """
    assert over(path, path.known[name]) is None


def test_what_is_over_a_bound_today_is_known() -> None:
    """The list of what is not mended yet names inputs that there are."""
    for path, names in NOT_YET.items():
        assert names <= {name for one in PATHS if one.name == path for name in one.known}


@pytest.mark.parametrize("size", [KIB, 64 * KIB])
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_recipes_have_the_size_that_is_asked_for(path: Path, size: int) -> None:
    """An input of each shape has about as many bytes as it is to have."""
    for name, one in path.known.items():
        assert size * 0.3 < len(one.render(size)) < size * 1.3 + KIB, name


def test_a_recipe_can_be_written_down() -> None:
    """What was found is found again: a recipe is the same after it was JSON."""
    chance = random.Random(1)
    for path in PATHS:
        one = path.grammar.seeds[0]
        for _ in range(50):
            one = mutated(one, path.grammar, chance)
            assert Recipe.of_json(one.as_json()) == one
            one.render(KIB)


def test_what_grows_shares_the_bytes() -> None:
    """Repeated texts are parted by commas and numbered, pairs are closed as often as they are
    opened.
    """
    assert recipe("[", many("1,"), "]").render(9) == b"[1,1,1]"
    assert recipe("{", many('"k@@":0,'), "}").render(24) == b'{"k0":0,"k1":0,"k2":0}'
    assert nested("<", "[", "x", "]", ">").render(9) == b"<[[[x]]]>"
    assert recipe("a", encoding="utf-16-le").render(9) == b"a\0"


async def _linear(data: bytes) -> None:
    for _ in data:
        pass


async def _square(data: bytes) -> None:
    for _ in range(len(data) // 64):
        data.count(b"x")


async def _hoards(data: bytes) -> None:
    assert len([bytes(100) for _ in data]) == len(data)


async def _refuses(data: bytes) -> None:
    raise BadRequestError("no")


def test_steps_and_memory_are_counted() -> None:
    """A loop over bytes counts a step for each, a call into C is one, and memory is what was held
    at once.
    """
    assert steps(_linear, b"x" * 5000) - steps(_linear, b"x" * 1000) == 8000
    assert steps(_square, b"x" * 64_000) - steps(_square, b"x" * 32_000) >= 1000
    assert steps(_linear, b"x" * 1000) == steps(_linear, b"x" * 1000)
    assert traced(_hoards, bytes(10_000))[0] > 1_000_000
    assert measured(_linear, bytes(1000), 1).size == 1000


def test_costs_are_judged() -> None:
    """Each bound is looked at, and so is a cost that grows faster than its input."""
    bound = Bound(ns=10, ms=50, memory=3, steps=1, why="a reason", made=100)
    path, one = Path("p", _linear, PATHS[0].grammar, {}, bound), recipe(many("a"))
    good = [Cost(64 * KIB, 0.0001, 0.0001, 10_000, 1), Cost(4096 * KIB, 0.0064, 0.0064, 10_000, 1)]
    bad = [Cost(64 * KIB, 0.0001, 0.0001, 10_000, 1), Cost(4096 * KIB, 0.2, 0.2, 40_000_000, 1000)]
    assert judged(path, one, good, 1.0) == []
    found = {each.measure for each in judged(path, one, bad, 1.0)}
    assert found == {
        "ns per byte",
        "ms per turn",
        "memory per byte",
        "bytes written",
        "growth of ns per byte",
    }
    assert {each.measure for each in judged(path, one, bad, 100.0)} == found - {
        "ns per byte",
        "ms per turn",
    }


def test_a_search_finds_what_raises_and_writes_it_down(tmp_path, monkeypatch) -> None:
    """An input on which a path breaks is a finding that can be replayed."""
    path = Path("p", _refuses, PATHS[0].grammar, {}, PATHS[0].bound)
    search = Search([path], tmp_path, tmp_path, random.Random(1))
    search.attempt(path, recipe(many("a")))
    (saved,) = tmp_path.glob("cost-p-*.json")
    monkeypatch.setattr("tests.fuzz.cost.search.PATHS", [path])
    with pytest.raises(BadRequestError):
        replay([saved])
