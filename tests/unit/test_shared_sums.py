"""Sums over processes, followed by what has changed: as all columns hold them, whatever comes, goes and is killed."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from pdproxy.kit import shared_sums
from pdproxy.kit.shared_sums import MEASURES, Add, OtherSums, adder
from pdproxy.kit.shared_table import RING, SharedTable

Sums = dict[str, list[int]]


def followed(table: SharedTable, number: int, keys: dict[int, str]) -> tuple[OtherSums[str], Sums]:
    """What a process follows of these keys, and the sums as it was told of them."""
    sums: Sums = defaultdict(lambda: [0, 0])

    def moved(name: str, first: int, second: int) -> None:
        sums[name][0] += first
        sums[name][1] += second

    others = OtherSums(table.others(number), moved)
    for key, name in keys.items():
        others.follow(key, name)
    return others, sums


@pytest.mark.parametrize("seed", range(4))
def test_the_sums_are_those_of_all_columns(seed: int) -> None:
    """Keys come and go in each process by itself, processes are killed, and a reader may be far behind."""
    chance, keys = random.Random(seed), {7: "a", -3: "b", 11: "c"}
    table = SharedTable(4, 8, MEASURES)
    columns = [table.column(number) for number in range(1, 4)]
    adds: list[dict[int, Add]] = [{} for _ in columns]
    held: list[dict[int, list[int]]] = [{} for _ in columns]
    others, sums = followed(table, 0, keys)
    for _ in range(4000):
        number, key = chance.randrange(3), chance.choice([*keys, 99])
        step = chance.random()
        if step < 0.01:
            table.clear(number + 1)
            columns[number] = table.column(number + 1)
            adds[number].clear()
            held[number].clear()
        elif step < 0.04 and key in adds[number]:
            columns[number].drop(key)
            del adds[number][key], held[number][key]
        else:
            if key not in adds[number]:
                adds[number][key], held[number][key] = adder(columns[number], key), [0, 0]
            of = held[number][key]
            for _ in range(2 * RING if step > 0.998 else 1):
                more = chance.randrange(-5, 6), chance.randrange(-999, 1000)
                of[0], of[1] = of[0] + more[0], of[1] + more[1]
                assert adds[number][key](*more) == of[0]
        if chance.random() < 0.3:
            others.look(all_of_it=chance.random() < 0.1)
            for wanted, name in keys.items():
                have = [one.get(wanted, [0, 0]) for one in held]
                assert sums[name] == [sum(one[at] for one in have) for at in range(MEASURES)]


def test_what_follows_a_key_later_gets_its_sums_at_once() -> None:
    """And what follows it no more hears of nothing."""
    table = SharedTable(2, 4, MEASURES)
    add = adder(table.column(1), 5)
    add(2, 30)
    others, sums = followed(table, 0, {})
    others.look()
    others.follow(5, "late")
    assert sums == {"late": [2, 30]}
    others.follow(5, None)
    add(1, 1)
    others.look(all_of_it=True)
    assert sums == {"late": [2, 30]}


def test_what_is_noted_beside_the_table() -> None:
    """Once, and with each look at everything: whoever was killed between a change and its note has said nothing."""
    table = SharedTable(2, 4, MEASURES)
    column = table.column(1)
    others, _ = followed(table, 0, {})
    others.look()
    others.noted = False
    adder(column, 5)(1, 1)
    others.look()
    others.noted = False
    others.look()
    assert not others.noted
    for happens in (lambda: shared_sums.note(column), lambda: table.clear(1)):
        happens()
        others.look()
        assert others.noted
        others.noted = False
    others.look(all_of_it=True)
    assert others.noted


def test_without_a_slot_the_others_see_nothing() -> None:
    """Until one is free. The process itself counts on."""
    table = SharedTable(2, 1, MEASURES)
    column = table.column(1)
    adder(column, 1)
    add = adder(column, 2)
    others, sums = followed(table, 0, {2: "b"})
    assert (add(1, 10), add(1, 10)) == (1, 2)
    others.look()
    assert not sums
    column.drop(1)
    assert add(1, 10) == 3
    others.look()
    assert sums == {"b": [3, 30]}
