"""Wrong keys are counted, and answered with 429 where an address sends too many, while right ones
are always served.
"""

from __future__ import annotations

import logging

import pytest

from pdproxy.kit.errors import LimitError, UnauthorizedError
from pdproxy.observe.events import Observers
from pdproxy.web.wrong_keys import AT_ONCE, MAX_ADDRESSES, PER_SECOND, WrongKeys
from tests.fakes.admin import BASE, admin
from tests.fakes.client import bearer
from tests.fakes.world import COMPLETIONS, completion, world

WRONG = UnauthorizedError("wrong", code="invalid_api_key")


async def test_too_many_wrong_keys_of_an_address() -> None:
    """On all routes together; a right key of the same address is served, and no key at all is told
    so.
    """
    async with world(auth={"api_keys": ("right",)}) as w:
        for at in range(AT_ONCE + 3):
            path = (COMPLETIONS, "/v1/embeddings", "/v1/models")[at % 3]
            answer = await w.ask(
                path, completion(), bearer(f"wrong-{at}"), method="GET" if at % 3 == 2 else "POST"
            )
            assert answer.status == (401 if at < AT_ONCE else 429), at
        assert answer.json["error"]["reason"] == "wrong_keys"
        assert 1 <= int(answer.header("retry-after") or 0) <= 1 / PER_SECOND
        assert b"wrong-" not in answer.body
        for path in (COMPLETIONS, COMPLETIONS):
            assert (await w.ask(path, completion(), bearer("right"))).status == 200
        assert (await w.ask(COMPLETIONS, completion())).status == 401
        assert w.metric("pdproxy_wrong_keys_total", listener="clients", answer="refused") == AT_ONCE
        assert w.metric("pdproxy_wrong_keys_total", listener="clients", answer="throttled") == 3
        assert w.metric("pdproxy_early_refusals_total", reason="wrong_key") == AT_ONCE + 3


async def test_wrong_keys_of_the_admin_api(caplog: pytest.LogCaptureFixture) -> None:
    """They have no line of a change, nor has what anybody may ask for: so nobody can fill the
    log.
    """
    caplog.set_level(logging.INFO)
    async with (
        world(auth={"api_keys": ("right",), "admin_keys": ("operator",)}) as w,
        admin(w) as api,
    ):
        found = [
            (await api.ask("POST", f"{BASE}/engines", b"", bearer("x"))).status
            for _ in range(AT_ONCE + 1)
        ]
        assert found == [401] * AT_ONCE + [429]
        assert (await api.ask("POST", "/docs", b"")).status == 405
        assert not [one for one in caplog.records if one.getMessage().startswith("POST")]
        assert (await api.ask("GET", f"{BASE}/engines", b"", bearer("operator"))).status == 200
        assert w.metric("pdproxy_wrong_keys_total", listener="admin", answer="throttled") == 1


def test_addresses_are_apart_and_their_number_is_bounded() -> None:
    """Nobody pays for another one, and the table stays small whatever is sent."""
    now = 0.0
    wrong = WrongKeys(lambda: now, Observers([]))

    def is_throttled(address: str) -> bool:
        answer = wrong.answer(WRONG, address)
        assert answer is WRONG or isinstance(answer, LimitError)
        return answer is not WRONG

    assert [is_throttled("a") for _ in range(AT_ONCE + 1)] == [False] * AT_ONCE + [True]
    assert not is_throttled("b")
    now += 1 / PER_SECOND
    assert [is_throttled("a"), is_throttled("a")] == [False, True]
    for number in range(3 * MAX_ADDRESSES):
        is_throttled(str(number))
        is_throttled("a")
    assert len(wrong._known) <= MAX_ADDRESSES
    assert is_throttled("a"), "who goes on is not forgotten for others"
    now += AT_ONCE / PER_SECOND
    assert [is_throttled("a") for _ in range(AT_ONCE + 1)] == [False] * AT_ONCE + [True]
