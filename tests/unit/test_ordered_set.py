"""Sets that keep an order."""

from __future__ import annotations

from pdproxy.kit.ordered_set import OrderedSet


def test_members_keep_the_order_in_which_they_came() -> None:
    made: OrderedSet[object] = OrderedSet()
    members = [object() for _ in range(50)]
    for member in (*members, *reversed(members)):
        made.add(member)
    made.discard(members[3])
    made.discard(members[3])
    assert list(made) == [*members[:3], *members[4:]]
    assert members[3] not in made
    assert len(made) == 49
    made.add(members[3])
    assert list(made)[-1] is members[3]
