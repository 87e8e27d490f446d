"""`listen.operator_routes`: what the clients' port shows to whom, and that no route of it is
forgotten.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import msgspec
import pytest
from starlette.routing import BaseRoute, Route

from pdproxy.serving.access.routes import TABLE, Audience, audience_of
from pdproxy.settings.keys import Auth
from pdproxy.settings.limits import Overload
from pdproxy.settings.listen import Listen
from pdproxy.settings.schema import Settings
from pdproxy.web.app import create_app
from pdproxy.web.operators import CLOSED
from pdproxy.web.wrong_keys import AT_ONCE
from tests.fakes.admin import admin
from tests.fakes.client import Answer
from tests.fakes.world import COMPLETIONS, TEXT, World, completion, world

KEYS = {"api_keys": ("client",)}
BOTH = {**KEYS, "admin_keys": ("operator",)}
CLIENT, OPERATOR = ([("authorization", f"Bearer {key}")] for key in ("client", "operator"))
OPERATORS = [entry.path for entry in TABLE if entry.audience is Audience.OPERATORS]
FILES = ["/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css", "/docs/favicon.png"]


@pytest.mark.parametrize(
    ("listen", "auth", "tenant_header", "hidden"),
    [
        ({}, {}, None, False),
        ({}, KEYS, None, True),
        ({}, {"api_keys_file": "keys"}, None, True),
        ({}, {}, "X-Tenant", True),
        ({}, {"admin_keys": ("operator",)}, None, False),
        ({"operator_routes": "everywhere"}, KEYS, "X-Tenant", False),
        ({"operator_routes": "admin"}, {}, None, True),
    ],
)
def test_when_they_are_hidden(
    listen: dict[str, Any], auth: dict[str, Any], tenant_header: str | None, hidden: bool
) -> None:
    settings = Settings(
        listen=Listen(**listen), auth=Auth(**auth), overload=Overload(tenant_header=tenant_header)
    )
    assert settings.hides_operator_routes == hidden


def _audiences(routes: list[BaseRoute]) -> dict[str, Audience | None]:
    return {route.path: audience_of(route.path) for route in routes if isinstance(route, Route)}


async def test_each_route_of_the_application_is_for_somebody() -> None:
    """The table has them all. Who is no operator gets nothing from those that are for operators,
    whatever their names are.
    """
    async with world(auth=KEYS, operator_routes="auto") as w:
        app = create_app(w.proxy.front.answers())
        found = _audiences(app.routes)
        assert None not in found.values()
        assert set(found) == {entry.path for entry in TABLE} | set(FILES)
        for path, audience in found.items():
            answer = await w.get(path.replace("{response_id}", "x"), CLIENT)
            assert (answer.status == 403) == (audience is Audience.OPERATORS), path


async def test_a_route_that_is_not_in_the_table_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever adds a route, and forgets to say for whom it is, opens nothing."""
    monkeypatch.setattr(
        "pdproxy.web.operators.audience_of",
        lambda path: None if path == "/load" else audience_of(path),
    )
    async with world(auth=KEYS, operator_routes="auto") as w:
        assert (await w.get("/load")).status == 403
        assert (await w.get("/health")).status == 200


@pytest.mark.parametrize("more", [{}, {"admin_keys": ("operator",)}])
async def test_a_key_of_which_only_a_digest_is_known_reads_and_does_nothing_else(
    more: dict[str, Any],
) -> None:
    digest = hashlib.sha256(b"reader").hexdigest()
    reader = [("authorization", "bearer  reader")]
    auth = {**KEYS, **more, "reader_key_digests": (digest,)}
    async with world(auth=auth, operator_routes="auto") as w:
        assert (await w.get("/metrics", reader)).status == 200
        assert "state" in (await w.get("/ready", reader)).json
        for headers in ([], CLIENT, [("authorization", f"Bearer {digest}")]):
            assert (await w.get("/metrics", headers)).status in (401, 403)
        answer = await w.ask(COMPLETIONS, completion(), reader)
        assert answer.status == 401, "it is no client's"


@pytest.mark.parametrize("path", [*OPERATORS, *FILES, "/%6coad", "/metrics?x"])
async def test_with_keys_only_operators_see_what_is_theirs(path: str) -> None:
    """At the clients' port with an admin key. A client's key is none, and no key gets what the
    routes show.
    """
    async with world(auth=BOTH, operator_routes="auto") as w:
        for headers in ([], CLIENT, [("authorization", "Bearer wrong")]):
            answer = await w.get(path, headers)
            assert (answer.status, answer.header("www-authenticate")) == (401, "Bearer")
            assert set(answer.json) == {"error"}
        assert (await w.get(path, OPERATOR)).status == 200


async def test_without_keys_of_operators_the_answer_names_the_settings() -> None:
    async with world(auth=KEYS, operator_routes="auto") as w:
        for headers in ([], CLIENT):
            answer = await w.get("/metrics", headers)
            error = answer.json["error"]
            assert (answer.status, error["type"], error["message"]) == (
                403,
                "ForbiddenError",
                CLOSED,
            )
        assert w.proxy.front.warnings(), "the operator reads at the start who can see them"
        assert (await w.ask(COMPLETIONS, completion(), CLIENT)).text == TEXT


def _bodies(*found: Answer) -> list[Any]:
    return [answer.json for answer in found]


async def _checks(w: World, headers: list[tuple[str, str]]) -> list[Any]:
    assert [(await w.get(path)).status for path in ("/health", "/ping")] == [200, 200]
    return _bodies(
        *[await w.get(path, headers) for path in ("/ready", "/ready/proxy", "/healthcheck")]
    )


async def test_health_checks_need_no_key_and_show_no_details() -> None:
    async with world(auth=BOTH, operator_routes="auto") as w:
        w.prefill[0].stop()
        await w.probe()
        for headers in ([], CLIENT, [("authorization", "Bearer wrong")]):
            assert await _checks(w, headers) == [{"ready": True}, {"ready": True}, {"status": "ok"}]
        ready, proxy, instances = await _checks(w, OPERATOR)
        assert ready["state"] == "degraded"
        assert any(w.prefill[0].url in line for line in ready["details"])
        assert proxy == {"ready": True, "reason": None}
        assert instances == {"status": "ok", "prefill_instances": 1, "decode_instances": 1}
        w.decode[0].stop()
        await w.probe()
        answer = await w.get("/ready")
        assert (answer.status, answer.json) == (503, {"ready": False})


@pytest.mark.parametrize("path", ["/ready", "/ready/proxy", "/healthcheck"])
async def test_keys_that_are_guessed_at_health_checks_are_counted(path: str) -> None:
    """As everywhere else. The check is answered all the same; no key, another scheme, and a
    client's key are no guesses.
    """
    wrong, basic = [("authorization", "Bearer wrong")], [("authorization", "Basic eDp5")]
    async with world(auth=BOTH, operator_routes="auto") as w:
        for headers in ([], basic, CLIENT, OPERATOR):
            assert (await w.get(path, headers)).status == 200
        assert w.metric("pdproxy_early_refusals_total", reason="wrong_key") == 0
        for _ in range(AT_ONCE + 1):
            answer = await w.get(path, wrong)
            assert answer.status == 200
            assert not {"details", "reason", "prefill_instances"} & set(answer.json)
        assert w.metric("pdproxy_wrong_keys_total", listener="clients", answer="refused") == AT_ONCE
        assert w.metric("pdproxy_wrong_keys_total", listener="clients", answer="throttled") == 1
        assert w.metric("pdproxy_early_refusals_total", reason="wrong_key") == AT_ONCE + 1


async def test_everything_is_shown_where_the_admin_api_listens() -> None:
    """By the rules of that listener: with keys of operators only with one of them, without any to
    this machine.
    """
    for auth, headers, refused in ((KEYS, [], None), (BOTH, OPERATOR, 401)):
        async with world(auth=auth, operator_routes="auto") as w, admin(w) as api:
            page = await api.ask("GET", "/metrics", headers=headers)
            assert (page.status, page.header("content-type")) == (
                200,
                "text/plain; version=0.0.4; charset=utf-8",
            )
            assert b"pdproxy_requests_total" in page.body
            ready = await api.ask("GET", "/ready", headers=headers)
            assert ready.json == {"ready": True, "state": "ok", "reason": None, "details": []}
            for path in (
                "/load",
                "/version",
                "/health",
                "/ready/proxy",
                "/healthcheck",
                "/docs",
                "/openapi.json",
            ):
                assert (await api.ask("GET", path, headers=headers)).status == 200, path
            if refused:
                for path in ("/metrics", "/ready", "/version"):
                    assert (await api.ask("GET", path, headers=CLIENT)).status == refused
        settings = msgspec.structs.replace(w.proxy.settings.listen, admin="127.0.0.1:1")
        w.proxy.front.settings = msgspec.structs.replace(w.proxy.settings, listen=settings)
        assert not w.proxy.front.warnings()


async def test_without_keys_all_is_shown_to_all() -> None:
    """As vLLM does it: nobody's monitoring changes who has no keys."""
    async with world(operator_routes="auto") as w:
        for path in (*OPERATORS, *FILES):
            assert (await w.get(path)).status == 200, path
        assert (await w.get("/ready")).json["state"] == "ok"
        assert not w.proxy.front.warnings()


async def test_who_sees_it_follows_the_settings(caplog: pytest.LogCaptureFixture) -> None:
    """A tenant header that comes while the proxy runs hides them at once."""
    caplog.set_level(logging.ERROR)
    async with world(operator_routes="auto") as w:
        front = w.proxy.front
        assert (await w.get("/metrics")).status == 200
        front.settings = msgspec.structs.replace(
            front.settings, overload=Overload(tenant_header="X-Tenant")
        )
        assert (await w.get("/metrics")).status == 403
        assert not caplog.records
