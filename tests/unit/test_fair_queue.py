"""A queue that is fair between tenants: by weight and cost, without credit, and without losing a
place or a request.
"""

from __future__ import annotations

import math
import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.kit import fair_queue
from pdproxy.kit.fair_queue import FairQueue, QueueFullError, TenantRequest


class Served:
    """A queue whose tickets are names of requests, and what has become of them."""

    def __init__(self, places: int, max_waiting: int = 1000, max_size: int = 0) -> None:
        self.unwanted: set[str] = set()
        self.granted: list[str] = []
        self.displaced: list[str] = []
        self.entries: dict[str, TenantRequest[str]] = {}
        self.queue: FairQueue[str] = FairQueue(
            places, max_waiting, max_size, self._granted, self.displaced.append
        )

    def _granted(self, ticket: str) -> bool:
        if ticket in self.unwanted:
            return False
        self.granted.append(ticket)
        return True

    def enter(
        self,
        ticket: str,
        cost: float = 1.0,
        weight: float = 1.0,
        size: int = 0,
        priority: int = 0,
        until: float = math.inf,
    ) -> None:
        """Take a place or wait; the tenant is the ticket's first letter."""
        queue, values = self.queue, (ticket[0], weight, ticket, cost, size)
        entry = queue.take(*values)
        if entry is not None:
            self.granted.append(ticket)
        self.entries[ticket] = entry or queue.queue_up(*values, priority, until)
        queue.fill()

    def leave(self, ticket: str, cost: float | None = None) -> None:
        self.queue.leave(self.entries.pop(ticket), cost)


def test_tenants_get_tokens_by_weight() -> None:
    """Two tenants that always wait, with requests of very different sizes: a million tokens are
    divided 3 to 1, within 2 %.
    """
    chance = random.Random(1)
    served = Served(8)
    sent = {"a": 0, "b": 0}
    costs: dict[str, int] = {}
    got = {"a": 0, "b": 0}

    def send(name: str) -> None:
        ticket = f"{name}{sent[name]}"
        sent[name] += 1
        costs[ticket] = chance.randint(1, 2000) if name == "a" else chance.randint(1, 200)
        served.enter(ticket, costs[ticket], {"a": 3.0, "b": 1.0}[name])

    for _ in range(40):
        send("a")
        send("b")
    running = deque(served.granted)
    while sum(got.values()) < 1_000_000:
        ticket = running.popleft()
        before = len(served.granted)
        served.leave(ticket)
        running.extend(served.granted[before:])
        got[ticket[0]] += costs.pop(ticket)
        send(ticket[0])
    assert got["a"] / got["b"] == pytest.approx(3.0, rel=0.02)


def test_what_requests_cost_in_the_end_counts() -> None:
    """A tenant that announces little and takes much gets no more than the other one."""
    served = Served(1, max_waiting=5000)
    got = {"a": 0, "b": 0}
    for number in range(2000):
        for name in "ab":
            served.enter(f"{name}{number}", 10.0)
    for _ in range(1000):
        ticket = served.granted[-1]
        cost = 100 if ticket[0] == "a" else 10
        got[ticket[0]] += cost
        served.leave(ticket, cost)
    assert got["a"] / got["b"] == pytest.approx(1.0, rel=0.02)


def test_idle_times_give_no_credit() -> None:
    """A tenant that comes late takes turns with one that was served before; it does not catch
    up.
    """
    served = Served(1)
    for number in range(100):
        served.enter(f"a{number}")
    for number in range(50):
        served.leave(f"a{number}")
    for number in range(10):
        served.enter(f"b{number}")
    for _ in range(10):
        served.leave(served.granted[-1])
    late = [ticket[0] for ticket in served.granted[-10:]]
    assert sorted(late) == ["a"] * 5 + ["b"] * 5


def test_what_took_nothing_from_others_counts_only_while_it_is_held() -> None:
    """A tenant that got all places while nobody waited lets another one go first, and gets as much
    as that one from then on.
    """
    served = Served(4)
    for number in range(8):
        served.enter(f"a{number}", 1000.0)
    for number in range(4):
        served.enter(f"b{number}", 1000.0)
    for number in range(4):
        served.leave(f"a{number}", 1000.0)
    assert served.granted[4:] == ["b0", "b1", "a4", "a5"]
    served = Served(1)
    for ticket in ("a0", "a1", "b0"):
        served.enter(ticket, 1000.0)
    served.leave("a0", 1000.0)
    assert served.granted == ["a0", "a1"], "nobody has anything, and this one has waited longer"


def test_debt_outlives_the_requests_that_made_it() -> None:
    """A tenant with one request at a time pays for the last one before it is served again."""
    served = Served(1)
    for number in range(20):
        served.enter(f"b{number}", 10.0)
    served.enter("a0", 50.0)
    served.leave("b0")  # b1
    served.leave("b1")  # a0
    assert served.granted[-1] == "a0"
    served.leave("a0", 50.0)
    served.enter("a1", 50.0)
    for number in range(2, 5):
        served.leave(f"b{number}")
    assert served.granted[-1] == "b5"
    served.leave("b5")
    assert served.granted[-1] == "a1", "the other one has received as much by now"


def test_priorities_order_the_requests_of_one_tenant() -> None:
    """A smaller number is served first, as in vLLM; it is not served before another tenant's
    requests for that.
    """
    served = Served(1)
    served.enter("x0")
    served.enter("a0", priority=5)
    served.enter("a1", priority=-(2**63))
    served.enter("a2", priority=5)
    served.enter("b0", priority=9)
    for _ in range(4):
        served.leave(served.granted[-1])
    assert served.granted == ["x0", "a1", "b0", "a0", "a2"]


def test_of_equal_priorities_who_waits_for_the_shortest_time_is_next() -> None:
    """Then the oldest. Another tenant is not overtaken."""
    served = Served(1)
    served.enter("x0")
    served.enter("a0", until=9.0)
    served.enter("a1", until=5.0)
    served.enter("a2", until=5.0)
    served.enter("a3", until=1.0, priority=1)
    served.enter("b0")
    for _ in range(5):
        served.leave(served.granted[-1])
    assert served.granted == ["x0", "a1", "b0", "a2", "a0", "a3"]


def test_weights_count_where_requests_wait_only_at_times() -> None:
    """Half of the places come free when nobody waits, and go to as many requests of each tenant.
    The other half makes up.
    """
    served, got, number = Served(8), {"a": 0, "b": 0}, 0

    def send(names: str) -> None:
        nonlocal number
        for name in names:
            number += 1
            served.enter(f"{name}{number}", 10.0, {"a": 3.0, "b": 1.0}[name])

    def leave(count: int) -> None:
        for ticket in [one for one, entry in served.entries.items() if entry.has_place][:count]:
            got[ticket[0]] += 1
            served.leave(ticket, 10.0)

    send("abababab")
    for _ in range(200):
        send("ababab" * 2)
        leave(4)
        for ticket in [one for one, entry in served.entries.items() if entry.waits]:
            served.queue.stop_waiting(served.entries.pop(ticket))
        leave(4)
        assert served.queue.waiting == 0
        send("baba")
    assert got["a"] / got["b"] == pytest.approx(3.0, rel=0.05)


def test_a_while_after_nobody_has_waited_places_are_free_again() -> None:
    """A tenant that then takes all of them does not pay for it later."""
    served = Served(4)
    for ticket in ("a0", "a1", "a2", "a3", "b0"):
        served.enter(ticket, 10.0)
    for ticket in ("a0", "a1", "a2", "a3"):
        served.leave(ticket)
    for number in range(10, 30):
        served.enter(f"a{number}", 10.0)
        served.leave(f"a{number}")
    for name in ("a30", "a31", "a32", "a33", "a34", "b1", "a35", "b2"):
        served.enter(name, 10.0)
    served.leave("b0")
    served.leave("a30")
    served.leave("a31")
    served.leave("a32")
    assert sorted(one[0] for one in served.granted[-4:]) == ["a", "a", "b", "b"]


def test_what_is_owed_is_bounded() -> None:
    """A tenant with one place for long, while another got all others, goes first for as many
    requests as there are places.
    """
    served = Served(4)
    served.enter("b0", 10.0)
    for number in range(103):
        served.enter(f"a{number}", 10.0)
    for _ in range(60):
        served.leave(
            next(one for one, entry in served.entries.items() if entry.has_place and one != "b0")
        )
    for number in range(1, 50):
        served.enter(f"b{number}", 10.0)
    before = len(served.granted)
    for _ in range(12):
        served.leave(
            next(one for one, entry in served.entries.items() if entry.has_place and one != "b0")
        )
    names = "".join(one[0] for one in served.granted[before:])
    assert names.startswith("bbb")
    assert 4 <= names.count("a") <= 6, "then they take turns"


def test_a_full_queue_makes_room_by_weight() -> None:
    """The tenant with the most waiting per weight loses its newest request, unless the newcomer
    would then have more.
    """
    served = Served(1, max_waiting=4)
    served.enter("x0")
    for number in range(4):
        served.enter(f"a{number}", weight=3.0)
    served.enter("b0")
    assert served.displaced == ["a3"]
    with pytest.raises(QueueFullError):
        served.enter("b1")
    served.enter("c0", weight=9.0)
    assert served.displaced == ["a3", "a2"]
    assert served.queue.waiting == 4


def test_a_tenants_urgent_request_displaces_its_own() -> None:
    """In a full queue, where it may take nothing from others."""
    served = Served(1, max_waiting=2)
    served.enter("x0")
    served.enter("a0", priority=1)
    served.enter("a1")
    served.enter("a2")
    assert served.displaced == ["a0"]
    with pytest.raises(QueueFullError):
        served.enter("a3")


def test_a_large_request_is_not_overtaken() -> None:
    """While it waits for space, smaller ones behind it wait as well; one that is too large for all
    space is served alone.
    """
    served = Served(10, max_size=100)
    served.enter("a0", size=60)
    served.enter("a1", size=60)
    served.enter("a2", size=1)
    assert (served.granted, served.queue.size) == (["a0"], 60)
    served.leave("a0")
    assert served.granted == ["a0", "a1", "a2"]
    served.enter("c0", size=500)
    served.leave("a1")
    assert served.queue.waiting == 1
    served.leave("a2")
    assert (served.granted[-1], served.queue.size) == ("c0", 500)


def test_a_request_whose_turn_is_before_the_large_one_does_not_wait_for_it() -> None:
    """Its tenant has got less so far."""
    served = Served(10, max_size=100)
    served.enter("a0", size=60)
    served.enter("a1", size=60)
    served.enter("b0", size=1)
    assert (served.granted, served.queue.waiting) == (["a0", "b0"], 1)


def test_others_are_served_once_the_large_request_has_left_the_queue() -> None:
    served = Served(10, max_size=100)
    served.enter("a0", size=60)
    served.enter("a1", size=60)
    served.enter("a2", size=1)
    served.queue.stop_waiting(served.entries["a1"])
    served.queue.stop_waiting(served.entries["a1"])
    assert (served.granted, served.queue.waiting) == (["a0", "a2"], 0)


def test_a_place_that_is_not_wanted_any_more_goes_to_the_next() -> None:
    """Its request has left and was not removed yet: nobody is charged."""
    served = Served(1)
    for ticket in ("x0", "a0", "a1", "b0"):
        served.enter(ticket)
    served.unwanted |= {"a0"}
    served.leave("x0")
    assert served.granted == ["x0", "a1"]
    served.queue.stop_waiting(served.entries["a0"])
    assert served.queue.waiting == 1


def test_what_places_hold_can_change() -> None:
    served = Served(4, max_size=3)
    for ticket in ("a0", "a1", "a2"):
        served.enter(ticket, size=2)
    assert served.granted == ["a0"]
    served.queue.resize(4, 4)
    assert served.granted == ["a0", "a1"]
    served.queue.resize(4, 1)
    served.leave("a0")
    assert served.queue.max_size == 1
    assert served.granted == ["a0", "a1"], "less takes nothing from those that have a place"
    served.queue.resize(4, 0)
    assert served.granted == ["a0", "a1", "a2"]


def test_the_number_of_places_can_change() -> None:
    served = Served(1)
    for ticket in ("a0", "a1", "a2"):
        served.enter(ticket)
    served.queue.resize(3, 0)
    assert served.granted == ["a0", "a1", "a2"]
    served.queue.resize(1, 0)
    served.enter("b0")
    served.leave("a0")
    served.leave("a1")
    assert "b0" not in served.granted
    served.leave("a2")
    assert served.granted[-1] == "b0"


def test_shares_are_parts_by_weight() -> None:
    """A tenant is over its share only while others wait."""
    served = Served(4)
    for number in range(3):
        served.enter(f"a{number}", weight=3.0)
    served.enter("b0")
    assert not served.queue.over_share("a")
    served.enter("b1")
    assert not served.queue.over_share("a"), "three of four places at weights 3 and 1"
    served.enter("c0", weight=3.0)
    assert served.queue.over_share("a")
    assert not served.queue.over_share("c")
    assert not served.queue.over_share("d")


def test_the_work_ahead_is_what_fair_order_serves_before() -> None:
    """Of others only as much as is served until then; of the tenant's own all."""
    served = Served(1)
    served.enter("x0")
    for number in range(10):
        served.enter(f"a{number}", 10.0)
    assert served.queue.cost_ahead("a", 1.0) == 100.0
    assert served.queue.cost_ahead("b", 1.0) == 10.0, "one that has waited longer"
    for number in range(3):
        served.enter(f"b{number}", 5.0)
    assert served.queue.cost_ahead("b", 1.0) == 15.0 + 15.0
    assert served.queue.cost_ahead("a", 1.0) == 100.0 + 15.0


def test_the_work_of_very_many_tenants_is_estimated() -> None:
    """A few of them are looked at."""
    served = Served(1)
    served.enter("x0")
    for number in range(500):
        served.enter(chr(1000 + number), 10.0)
    assert served.queue.cost_ahead("new", 1.0) == 5000.0
    assert served.queue.cost_ahead(chr(1000), 1.0) == pytest.approx(5000.0, rel=0.01)


def test_nothing_is_remembered_that_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tenants that have received more are remembered up to a bound; nobody is once all is quiet;
    dead heap items are few.
    """
    monkeypatch.setattr(fair_queue, "MAX_RESTING", 10)
    served = Served(1)
    served.enter("~0")
    for number in range(200):
        served.enter(chr(1000 + number), 100.0)
        served.enter("~" + str(number + 1), 1.0)
        served.leave(served.granted[-1])
        assert len(served.queue._order) <= 2 * len(served.queue._queued) + 65
    while served.queue.taken:
        assert len(served.queue._resting) <= 10
        served.leave(served.granted[-1])
    assert (served.queue._tenants, served.queue._resting, served.queue._order) == ({}, {}, [])


STEPS = st.tuples(
    st.sampled_from(["enter", "enter", "enter", "leave", "stop", "unwanted", "resize"]),
    st.sampled_from("abc"),
    st.integers(0, 5),
)


@given(st.lists(STEPS, max_size=60), st.integers(1, 3), st.integers(0, 4), st.sampled_from([0, 6]))
@settings(deadline=None, max_examples=300)
def test_no_order_of_calls_loses_a_place(
    steps: list[tuple[str, str, int]], places: int, queue: int, size: int
) -> None:
    """Bounds hold, nobody waits while there is a place for the next one, each request has one end,
    and all places come back.
    """
    served = Served(places, queue, size)
    count = 0
    for step, name, number in steps:
        running = [
            one for one in served.granted if one in served.entries and served.entries[one].has_place
        ]
        waiting = [one for one, entry in served.entries.items() if entry.waits]
        if step == "enter":
            count += 1
            try:
                served.enter(
                    f"{name}{count}",
                    1.0 + number,
                    1.0 + number % 2,
                    number,
                    number // 3,
                    -float(number),
                )
            except QueueFullError:
                assert served.queue.waiting == queue
        elif step == "leave" and running:
            served.leave(running[number % len(running)], float(number))
        elif step == "stop" and waiting:
            served.queue.stop_waiting(served.entries[waiting[number % len(waiting)]])
        elif step == "unwanted" and waiting:
            served.unwanted.add(waiting[number % len(waiting)])
        elif step == "resize":
            size = size and 3 + number
            served.queue.resize(number, size)
        held = [one for one in served.entries.values() if one.has_place]
        waits = [one for one in served.entries.values() if one.waits]
        assert (served.queue.taken, served.queue.waiting) == (len(held), len(waits))
        assert served.queue.size == sum(one.size for one in held)
        assert served.queue.waiting <= queue
        assert set(served.queue.tickets()) == {one.ticket for one in waits}
        assert served.queue._active_weight == pytest.approx(
            sum(one.weight for one in served.queue._tenants.values() if one.places or one.waiting)
        )
        if waits and len(held) < served.queue.places:
            assert size
            assert held
            assert any(served.queue.size + one.size > size for one in waits)
    served.queue.resize(1000, size)
    for ticket in list(served.entries):
        if served.entries[ticket].waits:
            served.queue.stop_waiting(served.entries[ticket])
    for ticket in list(served.entries):
        if served.entries[ticket].has_place:
            served.leave(ticket)
    assert (
        served.queue.taken,
        served.queue.waiting,
        served.queue.size,
        len(served.queue._tenants),
    ) == (0, 0, 0, 0)
