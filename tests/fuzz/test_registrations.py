"""Messages to the socket at which engines register: vLLM's own, mutated, cut in any way, from any
senders.
"""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.mutations import mutated
from tests.fuzz.registrations import check_registrations, recorded

BEATS = list(recorded().values())
_SENT = st.tuples(
    st.integers(0, 255), st.sampled_from(BEATS) | st.sampled_from(BEATS).flatmap(mutated)
).map(lambda one: bytes([one[0]]) + one[1][1:])


@settings(max_examples=60, deadline=None)
@given(st.lists(_SENT, max_size=12))
def test_mutated_heartbeats(messages: list[bytes]) -> None:
    """Each message is cut where it ends."""
    cuts = [sum(map(len, messages[:count])) for count in range(1, len(messages))]
    asyncio.run(check_registrations(b"".join(messages), cuts))


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=4))
def test_any_bytes(data: bytes, cuts: list[int]) -> None:
    """Nothing raises, and nothing is kept."""
    asyncio.run(check_registrations(data, cuts))
