"""Sums over processes, followed by what has changed: as all columns hold them, whatever comes, goes
and is killed.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pdproxy.kit import shared_sums
from pdproxy.kit.shared_sums import MANY, MEASURES, OtherSums
from pdproxy.kit.shared_table import RING, SharedTable


class Followed:
    """What one process follows of these keys: their sums as it was told of them, and how often
    something else had changed.
    """

    def __init__(self, table: SharedTable, number: int, keys: dict[int, str]) -> None:
        self.sums: Counter[str] = Counter()
        self.noted = 0
        self.others = OtherSums(table.others(number), self._noted)
        for key, name in keys.items():
            self.follow(key, name)

    def _noted(self) -> None:
        self.noted += 1

    def follow(self, key: int, name: str) -> None:
        def moved(more: int) -> None:
            self.sums[name] += more

        self.others.follow(key, moved)

    def look(self) -> Counter[str]:
        self.others.look()
        return +self.sums


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("keys", [3, 2 * MANY])
def test_the_sums_are_those_of_all_columns(keys: int, seed: int) -> None:
    """Keys come and go in each process by itself, and processes are killed."""
    chance, names = random.Random(seed), {7 * at - 30: f"k{at}" for at in range(keys)}
    table = SharedTable(4, keys + 1, MEASURES)
    columns = [table.column(number) for number in range(1, 4)]
    held: list[dict[int, int]] = [{} for _ in columns]
    many: set[int] = set()
    followed = Followed(table, 0, names)
    for _ in range(4000):
        number, key = chance.randrange(3), chance.choice([*names, 99_999])
        column, step = columns[number], chance.random()
        if step < 0.01:
            table.clear(number + 1)
            columns[number] = table.column(number + 1)
            held[number].clear()
            many.discard(number)
        elif step < 0.1 and key in held[number]:
            column.drop(key)
            del held[number][key]
        else:
            slot = column.place(key)
            for _ in range(2 * RING if step > 0.998 else 1):
                held[number][key] = column.cells.rows[slot] = chance.randrange(1, 1 << 60)
                if shared_sums.are_many(slot):
                    many.add(number)
                if number in many:
                    shared_sums.note(column, slot)
        if chance.random() < 0.3:
            sums = followed.look()
            assert sums == {
                name: sum(one.get(key, 0) for one in held)
                for key, name in names.items()
                if sums[name]
            }
            assert sum(sums.values()) == sum(
                one[key] for one in held for key in one if key in names
            )


def test_what_follows_a_key_later_gets_its_sums_at_once() -> None:
    """And what follows it no more hears of nothing."""
    table = SharedTable(2, 4, MEASURES)
    column = table.column(1)
    column.cells.rows[column.place(5)] = 30
    followed = Followed(table, 0, {})
    followed.look()
    followed.follow(5, "late")
    assert followed.sums == {"late": 30}
    followed.others.follow(5, None)
    column.cells.rows[column.place(5)] = 31
    followed.others.look()
    assert followed.sums == {"late": 30}


@pytest.mark.parametrize("keys", [1, 2 * MANY])
def test_what_is_noted_beside_the_table(keys: int) -> None:
    """Once. Whoever was killed between a change and its note has said nothing: that counts as a
    note.
    """
    table = SharedTable(2, keys, MEASURES)
    column = table.column(1)
    slots = [column.place(key + 1) for key in range(keys)]
    followed = Followed(table, 0, {})
    followed.look()
    before = followed.noted
    assert before
    column.cells.rows[slots[-1]] = 5
    if shared_sums.are_many(slots[-1]):
        shared_sums.note(column, slots[-1])
    followed.look()
    followed.look()
    assert followed.noted == before
    for happens in (lambda: shared_sums.note(column), lambda: table.clear(1)):
        before = followed.noted
        happens()
        followed.look()
        assert followed.noted > before


def test_what_was_not_noted_of_many_is_found_by_a_look_at_all_of_it() -> None:
    """A store that another core saw behind its note."""
    table = SharedTable(2, 2 * MANY, MEASURES)
    column = table.column(1)
    slot = [column.place(key + 1) for key in range(2 * MANY)][-1]
    followed = Followed(table, 0, {2 * MANY: "a"})
    followed.look()
    column.cells.rows[slot] = 5
    assert not followed.look()
    followed.others.look(all_of_it=True)
    assert followed.sums == {"a": 5}


@pytest.mark.parametrize("keys", [1])
def test_a_number_that_changes_while_a_layout_is_read_is_found_by_the_next_look(keys: int) -> None:
    """A key that takes another one's slot meanwhile is found by the look behind it, and nothing
    stays with the key before.
    """
    table = SharedTable(2, keys, MEASURES)
    column = table.column(1)
    for key in range(1, keys + 1):
        column.cells.rows[column.place(key)] = 10
    followed = Followed(table, 0, {1: "a", 1000: "b"})
    assert followed.look() == {"a": 10}
    seen = followed.others._columns[0]
    layout = seen.had[1]
    slot = column.place(1)
    column.drop(1)
    assert column.place(1000) == slot
    column.cells.rows[slot] = 4
    # As a reader sees it that has read the count of layouts before all of that.
    now, column.cells.header[1] = column.cells.header[1], layout
    followed.look()
    column.cells.header[1] = now
    assert followed.look() == {"b": 4}


def test_without_a_slot_the_others_see_nothing() -> None:
    """What is written to the spare slot is read by nobody."""
    table = SharedTable(2, 1, MEASURES)
    column = table.column(1)
    column.place(1)
    spare = column.place(2)
    assert spare == column.spare
    column.cells.rows[spare] += 7
    followed = Followed(table, 0, {1: "a", 2: "b"})
    assert not followed.look()
    column.drop(1)
    column.cells.rows[column.place(2)] = 8
    assert followed.look() == {"b": 8}
