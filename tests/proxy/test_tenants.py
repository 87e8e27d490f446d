"""Tenants: who may name one, which part of the places each gets, and what a request's priority
does.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdproxy.settings.limits import Overload
from pdproxy.settings.schema import Settings
from tests.fakes import scripts
from tests.fakes.client import bearer
from tests.fakes.engine import prefill
from tests.fakes.passed import everyone
from tests.fakes.world import COMPLETIONS, World, completion, world
from tests.proxy.test_quotas import keys
from tests.proxy.test_shares import begun

Lines = list[tuple[str, str]]


def overload(**fields: Any) -> Callable[[Settings], Settings]:
    return lambda settings: msgspec.structs.replace(settings, overload=Overload(**fields))


def trusting(**fields: Any) -> Callable[[Settings], Settings]:
    def adjust(settings: Settings) -> Settings:
        listen = msgspec.structs.replace(settings.listen, trusted_proxies=("127.0.0.0/8",))
        return msgspec.structs.replace(settings, listen=listen, overload=Overload(**fields))

    return adjust


async def order(w: World, sent: list[tuple[str, Lines]], **fields: Any) -> list[str]:
    """Send requests while none is served; return their names in the order in which they were served
    then.
    """
    go = asyncio.Event()
    w.prefill[0].script(scripts.gate(go, prefill))
    clients = [await begun(w, ident, headers, **fields) for ident, headers in sent]
    go.set()
    assert {(await client.answer()).status for client in clients} == {200}
    return [one.ident for one in w.prefill[0].requests]


def tenants(w: World) -> set[bytes | str]:
    return {client.name for one in w.workers for client in one.known_clients}


async def test_places_are_divided_by_weight(tmp_path: Path) -> None:
    """Three to one between names of keys, by their lines; each one's own requests stay in order."""
    auth = keys(tmp_path, "a:sk-a weight=3\nb:sk-b")
    async with world(auth=auth, limits={"max_inflight": 1}) as w:
        sent = [(f"{name}{number}", bearer(f"sk-{name}")) for number in range(16) for name in "ab"]
        served = await order(w, sent)
        assert Counter(one[0] for one in served[1:17]) == {"a": 12, "b": 4}
        for name in "ab":
            own = [one for one in served if one[0] == name]
            assert own == sorted(own, key=lambda one: int(one[1:]))


async def test_weights_of_the_settings(tmp_path: Path) -> None:
    """For names of keys without a weight, and for tenants; a line's own weight goes first."""
    auth = keys(tmp_path, "a:sk-a\nb:sk-b weight=1")
    adjust = overload(weights={"a": 3, "b": 100})
    async with world(auth=auth, limits={"max_inflight": 1}, adjust=adjust) as w:
        sent = [(f"{name}{number}", bearer(f"sk-{name}")) for number in range(9) for name in "ab"]
        assert Counter(one[0] for one in (await order(w, sent))[1:9]) == {"a": 6, "b": 2}


async def test_a_tenant_is_named_by_a_header_of_clients_with_a_key(tmp_path: Path) -> None:
    """Behind one key, as a gateway has it. Names are cut at 64 characters; without the header the
    key's name counts.
    """
    auth = keys(tmp_path, "gate:sk-g\nplain")
    adjust = overload(tenant_header="X-Tenant", weights={"gold": 3})
    async with world(auth=auth, limits={"max_inflight": 1}, adjust=adjust) as w:
        gold, iron = ([*bearer("sk-g"), ("X-Tenant", name)] for name in ("gold", "iron"))
        sent = [
            (f"{name[0]}{number}", lines)
            for number in range(9)
            for name, lines in (("gold", gold), ("iron", iron))
        ]
        assert Counter(one[0] for one in (await order(w, sent))[1:9]) == {"g": 6, "i": 2}
        found = w.metric("pdproxy_tenant_tokens_total", tenant="gold")
        assert found > 0
        assert w.metric("pdproxy_tenant_tokens_total", tenant="other") == found, (
            "no name that a client invents is a label"
        )
        w.decode[0].script(*[scripts.stall] * 4)
        go = asyncio.Event()
        w.prefill[0].script(scripts.gate(go, prefill))
        waiting = [
            await begun(w, "1", [*bearer("sk-g"), ("x-tenant", "n" * 64)]),
            await begun(w, "2", [*bearer("sk-g"), ("x-tenant", "n" * 64 + "m")]),
            await begun(w, "3", bearer("sk-g")),
            await begun(w, "4", [*bearer("plain"), ("x-tenant", " ")]),
        ]
        names = tenants(w)
        assert {f"tenant:{'n' * 64}", "tenant:gate"} < names
        assert len([name for name in names if isinstance(name, bytes)]) == 1, (
            "the key without a name"
        )
        for client in waiting:
            client.close()
        go.set()


@pytest.mark.parametrize(
    ("trusted", "seen"), [(False, {"127.0.0.1"}), (True, {"127.0.0.1", "tenant:gold"})]
)
async def test_without_keys_only_trusted_proxies_name_tenants(
    trusted: bool, seen: set[str]
) -> None:
    """Anybody else would take another one's part."""
    adjust = (trusting if trusted else overload)(tenant_header="X-Tenant")
    async with world(adjust=adjust) as w:
        go = asyncio.Event()
        w.prefill[0].script(scripts.gate(go, prefill))
        client = await begun(w, "1", [("x-tenant", "gold")])
        assert tenants(w) == seen
        go.set()
        assert (await client.answer()).status == 200


async def test_a_wrong_key_names_no_tenant(tmp_path: Path) -> None:
    adjust = overload(tenant_header="X-Tenant", weights={"gold": 3})
    async with world(auth=keys(tmp_path, "a:sk-a"), adjust=adjust) as w:
        answer = await w.ask(COMPLETIONS, completion(), [*bearer("wrong"), ("x-tenant", "gold")])
        assert answer.status == 401
        assert w.metric("pdproxy_tenant_tokens_total") == 0
        assert (await w.ended()).tenant is None


# -- priorities


async def test_priority_orders_the_requests_of_one_tenant(tmp_path: Path) -> None:
    """By the body's field or the header, which goes first; another tenant's requests keep their
    turns.
    """
    async with world(auth=keys(tmp_path, "a:sk-a\nb:sk-b"), limits={"max_inflight": 1}) as w:
        go = asyncio.Event()
        w.prefill[0].script(scripts.gate(go, prefill))
        a, b = bearer("sk-a"), bearer("sk-b")
        clients = [
            await begun(w, "a0", a),
            await begun(w, "a1", a, priority=5),
            await begun(w, "a2", a, priority=-1),
            await begun(w, "a3", [*a, ("x-vllm-priority", "-7")], priority=9),
            await begun(w, "a4", [*a, ("x-vllm-priority", "high")], priority=1),
            await begun(w, "b0", b, priority=99),
        ]
        go.set()
        assert {(await client.answer()).status for client in clients} == {200}
        assert [one.ident for one in w.prefill[0].requests] == ["a0", "a3", "b0", "a2", "a4", "a1"]


async def test_priorities_can_be_ignored() -> None:
    """Engines get them all the same."""
    async with world(limits={"max_inflight": 1}, adjust=overload(priority="ignore")) as w:
        served = await order(
            w, [(str(number), [("x-vllm-priority", str(-number))]) for number in range(4)]
        )
        assert served == ["0", "1", "2", "3"]
        assert sent(w) == ["0", "-1", "-2", "-3"]


def sent(w: World) -> list[str | None]:
    """The priorities in the headers of prefill legs."""
    return [dict(one.headers).get("x-vllm-priority") for one in w.prefill[0].requests]


@pytest.mark.parametrize(
    ("header", "field", "to_engine"),
    [
        (None, None, None),
        (None, 3, None),
        (None, 11, "10"),
        (None, -(2**63), "0"),
        ("4", None, "4"),
        ("-4", 3, "0"),
        ("9" * 4000, 3, "10"),
        (" 7_0 ", 3, "10"),
        ("x", 3, "x"),
        ("x", 30, "10"),
        (None, "-5", "0"),
        (None, -5.0, "0"),
        ("4", "-5", "4"),
    ],
)
async def test_a_key_bounds_the_priorities_of_its_requests(
    tmp_path: Path, header: str | None, field: float | str | None, to_engine: str | None
) -> None:
    """Engines get the nearest that is allowed, in the header that they read first. They read more
    than integers in the field.
    """
    async with world(auth=keys(tmp_path, "a:sk-a priority=0..10")) as w:
        lines = bearer("sk-a") + ([("x-vllm-priority", header)] if header is not None else [])
        fields = {} if field is None else {"priority": field}
        assert (await w.ask(COMPLETIONS, completion(**fields), lines)).status == 200
        assert sent(w) == [to_engine]


@pytest.mark.parametrize(
    ("header", "to_engine"), [(None, "0"), ("5", "5"), ("-5", "0"), ("high", "0")]
)
async def test_on_routes_of_one_engine_only_the_header_is_read(
    tmp_path: Path, header: str | None, to_engine: str
) -> None:
    """So that a body's field, which is not, can't go beyond the bounds."""
    async with world(0, 0, 1, auth=keys(tmp_path, "a:sk-a priority=0..10")) as w:
        seen = everyone(w, "/v1/messages", scripts.whole(b"{}"))
        lines = bearer("sk-a") + ([("x-vllm-priority", header)] if header is not None else [])
        assert (await w.ask("/v1/messages", {"model": "tiny", "priority": -9}, lines)).status == 200
        assert dict(seen[0].headers)["x-vllm-priority"] == to_engine
