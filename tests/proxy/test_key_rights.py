"""What a client's key is good for: nothing gets around its models, pools, routes, tenants, tokens,
answers and time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdproxy.observe.events import RequestEnded
from pdproxy.serving.access.routes import TABLE
from pdproxy.settings.keys import Auth
from pdproxy.settings.limits import Overload
from pdproxy.settings.schema import Settings
from tests.fakes.client import Answer, bearer
from tests.fakes.passed import everyone, fine
from tests.fakes.pools import PoolOf, pools
from tests.fakes.world import CHAT, COMPLETIONS, World, chat, completion, world
from tests.proxy.test_keys import head

BATCH, INVOCATIONS, EMBED = "/v1/chat/completions/batch", "/invocations", "/v1/embeddings"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
ADAPTER = ("x-amzn-sagemaker-adapter-identifier", "tiny")
TURNS = [{"role": "user", "content": "hello"}]
KEY = "key-of-this-client"


def auth(tmp_path: Path, words: str) -> dict[str, Any]:
    path = tmp_path / "keys"
    path.write_text(f"team:{KEY} {words}\nall:key-for-everything\n")
    return {"api_keys_file": str(path)}


async def ask(
    w: World, path: str, body: object, *headers: tuple[str, str], method: str = "POST"
) -> Answer:
    return await w.ask(path, body, [*bearer(KEY), *headers], method=method)


def asked(w: World) -> int:
    return sum(len(engine.requests) for engine in w.engines)


REFUSED: list[tuple[str, str, Any, str | None]] = [
    ("models=llama-*", COMPLETIONS, completion(), "model"),
    ("models=tin", COMPLETIONS, completion(), "model"),
    ("models=tiny2,*-tiny", CHAT, chat(), "model"),
    ("models=other", BATCH, chat(messages=[TURNS, TURNS]), "model"),
    ("models=other", EMBED, {"model": "tiny", "input": "x"}, "model"),
    ("models=other", RESPONSES, {"model": "tiny", "input": "x"}, "model"),
    ("models=tiny", COMPLETIONS, completion(model=None), "model"),
    ("models=tiny", EMBED, {"input": "x"}, "model"),
    ("models=tiny", "/detokenize", {"tokens": [1]}, "model"),
    # An engine does not read the `model` of an invocation's body.
    ("models=tiny", INVOCATIONS, completion(), "model"),
    ("routes=chat", COMPLETIONS, completion(), None),
    ("routes=chat,completions", EMBED, {"model": "tiny", "input": "x"}, None),
    ("routes=chat,completions", BATCH, chat(messages=[TURNS]), None),
    ("routes=chat,completions", INVOCATIONS, chat(), None),
    ("routes=chat", RESPONSES, {"model": "tiny", "input": "x"}, None),
    ("max_tokens=10", COMPLETIONS, completion(max_tokens=11), "max_tokens"),
    ("max_tokens=10", CHAT, chat(max_completion_tokens=11), "max_completion_tokens"),
    ("max_tokens=10", CHAT, chat(max_tokens=5, max_completion_tokens=11), "max_completion_tokens"),
    ("max_tokens=10", CHAT, chat(max_completion_tokens="5"), "max_completion_tokens"),
    ("max_tokens=10", COMPLETIONS, completion(max_tokens=1e3), "max_tokens"),
    ("max_tokens=10", BATCH, chat(messages=[TURNS, TURNS], max_tokens=11), "max_tokens"),
    ("max_tokens=10", INVOCATIONS, chat(max_tokens=11), "max_tokens"),
    (
        "max_tokens=10",
        RESPONSES,
        {"model": "tiny", "input": "x", "max_output_tokens": 11},
        "max_output_tokens",
    ),
    (
        "max_tokens=10",
        MESSAGES,
        {"model": "tiny", "messages": TURNS, "max_tokens": 11},
        "max_tokens",
    ),
    ("n=2", COMPLETIONS, completion(n=3), "n"),
    ("n=2", COMPLETIONS, completion(n="3"), "n"),
    ("n=2", COMPLETIONS, completion(best_of=3), "best_of"),
    ("n=2", COMPLETIONS, completion(prompt=["a", "b", "c"]), "n"),
    ("n=3", COMPLETIONS, completion(prompt=["a", "b"], n=2), "n"),
    ("n=2", BATCH, chat(messages=[TURNS, TURNS, TURNS]), "n"),
    ("n=2", INVOCATIONS, completion(prompt=["a", "b", "c"]), "n"),
    ("n=2", CHAT, chat(n=2.5), "n"),
]


@pytest.mark.parametrize(("words", "path", "body", "param"), REFUSED, ids=str)
async def test_what_a_key_is_not_good_for(
    tmp_path: Path, words: str, path: str, body: Any, param: str | None
) -> None:
    """403 in the API's shape before any engine is asked; another key may do it."""
    async with world(auth=auth(tmp_path, words)) as w:
        seen = everyone(w, path, fine)
        answer = await ask(w, path, body)
        error = answer.json["error"]
        kind = "permission_error" if path == MESSAGES else "ForbiddenError"
        assert (answer.status, error["type"]) == (403, kind), answer.body
        assert "This API key" in error["message"]
        if path != MESSAGES:
            assert (error["param"], error["code"]) == (param, 403)
        assert KEY not in answer.body.decode()
        assert not seen
        assert not asked(w)
        ended = await w.ended()
        assert (ended.outcome, ended.status, ended.key) == ("client", 403, "team")


def _with_pools(settings: Settings) -> Settings:
    """The pools that a line may name are those of the settings: here another one that serves
    nothing.
    """
    other = msgspec.structs.replace(settings.pools[0], name="other", nodes=())
    return msgspec.structs.replace(settings, pools=(*settings.pools, other))


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", COMPLETIONS, completion()),
        ("POST", EMBED, {"model": "tiny", "input": "x"}),
        ("GET", "/tokenizer_info", b""),
    ],
)
async def test_a_pool_that_a_key_does_not_name(
    tmp_path: Path, method: str, path: str, body: Any
) -> None:
    """The only one that has the model, and the one that serves what names none."""
    async with world(auth=auth(tmp_path, "pools=other"), adjust=_with_pools) as w:
        seen = everyone(w, path, fine)
        answer = await ask(w, path, body, method=method)
        assert (answer.status, answer.json["error"]["param"]) == (403, "model")
        assert not seen
        assert not asked(w)


ALLOWED: list[tuple[str, str, Any]] = [
    ("models=t*", COMPLETIONS, completion()),
    ("models=tiny", CHAT, chat()),
    ("models=tiny n=2", BATCH, chat(messages=[TURNS, TURNS])),
    ("pools=default", COMPLETIONS, completion()),
    ("routes=completions", COMPLETIONS, completion()),
    ("routes=invocations", INVOCATIONS, completion()),
    ("max_tokens=16 n=2", COMPLETIONS, completion(prompt=["a", "b"])),
    ("max_tokens=10", CHAT, chat(max_tokens=10)),
    ("until=9999-01-01T00:00:00Z", COMPLETIONS, completion()),
]


@pytest.mark.parametrize(("words", "path", "body"), ALLOWED, ids=str)
async def test_what_it_is_good_for(tmp_path: Path, words: str, path: str, body: Any) -> None:
    async with world(auth=auth(tmp_path, words)) as w:
        answer = await ask(w, path, body)
        assert answer.status == 200, answer.body


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, {"model": "tiny", "messages": TURNS}, "max_tokens"),
        (CHAT, {"model": "tiny", "messages": TURNS, "max_completion_tokens": None}, "max_tokens"),
        (COMPLETIONS, {"model": "tiny", "prompt": "x"}, "max_tokens"),
        (COMPLETIONS, {"model": "tiny", "prompt": "x", "max_tokens": None}, "max_tokens"),
        (
            COMPLETIONS,
            {"model": "tiny", "prompt": "x", "max_tokens": None, "max_completion_tokens": 5},
            "max_tokens",
        ),
        (INVOCATIONS, {"prompt": "x", "echo": "true", "max_completion_tokens": 5}, "max_tokens"),
    ],
)
async def test_a_request_without_a_limit_gets_the_keys(
    tmp_path: Path, path: str, body: Any, field: str
) -> None:
    """Without one, an engine would go on to the end of its context."""
    async with world(prefill=0, decode=0, aggregated=1, auth=auth(tmp_path, "max_tokens=7")) as w:
        whole = everyone(w, INVOCATIONS, fine)
        assert (await ask(w, path, body)).status == 200
        (got,) = whole or w.engines[0].requests
        assert got.json[field] == 7


async def test_a_completion_without_a_limit_stays_short(tmp_path: Path) -> None:
    """vLLM's default is 16 tokens there."""
    async with world(prefill=0, decode=0, aggregated=1, auth=auth(tmp_path, "max_tokens=70")) as w:
        assert (await ask(w, COMPLETIONS, {"model": "tiny", "prompt": "x"})).status == 200
        (got,) = w.engines[0].requests
        assert "max_tokens" not in got.json


async def test_responses_without_a_limit_get_the_keys(tmp_path: Path) -> None:
    async with world(auth=auth(tmp_path, "max_tokens=7")) as w:
        assert (await ask(w, RESPONSES, {"model": "tiny", "input": "x"})).status == 200
        assert w.decode[0].requests[0].json["max_output_tokens"] == 7


async def test_a_route_is_refused_before_the_body(tmp_path: Path) -> None:
    """Nothing of the body is waited for, on both kinds of routes."""
    async with world(auth=auth(tmp_path, "routes=chat"), deadlines={"client_body": 30}) as w:
        for path in (COMPLETIONS, EMBED):
            answer = await w.exchange(head(path, 64 * 2**20, *bearer(KEY)))
            assert (answer.status, answer.header("connection")) == (403, "close")
        assert w.metric("pdproxy_early_refusals_total", reason="not_allowed") == 2


async def test_an_invocation_with_an_adapter_names_its_model(tmp_path: Path) -> None:
    """Its header is what engines read."""
    async with world(auth=auth(tmp_path, "models=tiny")) as w:
        assert (await ask(w, INVOCATIONS, completion(model="other"), ADAPTER)).status == 200
        wrong = (ADAPTER[0], "other")
        assert (await ask(w, INVOCATIONS, completion(model="tiny"), wrong)).status == 403


@pytest.mark.parametrize("blank", ["", " ", "\t "])
async def test_a_blank_adapter_names_no_model(tmp_path: Path, blank: str) -> None:
    """Engines would serve their first model, whatever the body names: such a header counts as none,
    and goes to no engine.
    """
    header = (ADAPTER[0], blank)
    async with world(prefill=0, decode=0, aggregated=1, auth=auth(tmp_path, "models=other")) as w:
        for body in (
            completion(model="other"),
            chat(model="other"),
            completion(model="other", n=2),
        ):
            assert (await ask(w, INVOCATIONS, body, header)).status == 403
        assert not asked(w)
        # one engine gets what is neither a chat nor a completion
        whole = {"input": "x", "model": "other"}
        seen = everyone(w, INVOCATIONS, fine)
        assert (
            await w.ask(INVOCATIONS, whole, [*bearer("key-for-everything"), header])
        ).status == 200
        (got,) = seen
        assert (dict(got.headers).get(ADAPTER[0]), "model" in got.json) == (None, False)


async def test_routes_by_id_are_routes_of_responses(tmp_path: Path) -> None:
    """Nothing is stored there; a key for other routes does not learn that."""
    async with world(auth=auth(tmp_path, "routes=chat")) as w:
        for method, path in (("GET", f"{RESPONSES}/x"), ("POST", f"{RESPONSES}/x/cancel")):
            assert (await ask(w, path, b"", method=method)).status == 403
            assert (
                await w.ask(path, b"", bearer("key-for-everything"), method=method)
            ).status == 404
        assert (await ask(w, "/v1/models", b"", method="GET")).status == 200, (
            "each key may list its models"
        )


async def test_every_route_with_a_key_can_be_named(tmp_path: Path) -> None:
    """And each path that needs a key is refused by a key for another route."""
    async with world(auth=auth(tmp_path, "routes=invocations")) as w:
        for entry in TABLE:
            if entry.needs_key and entry.path not in ("/v1/models", INVOCATIONS):
                path = entry.path.replace("{response_id}", "x")
                assert (await ask(w, path, b"{}", method=entry.methods[0])).status == 403, (
                    entry.path
                )


async def test_a_key_that_has_ended(tmp_path: Path) -> None:
    """401 from its end date on, at each route, in OpenAI's shape."""
    async with world(auth=auth(tmp_path, "until=2027-01-31T01:00:00+01:00")) as w:
        end = 1801353600.0
        for one in w.workers:
            one.credentials.keys.wall = lambda: end - 1
        assert (await ask(w, COMPLETIONS, completion())).status == 200
        for one in w.workers:
            one.credentials.keys.wall = lambda: end
        for path in (COMPLETIONS, EMBED, "/v1/models"):
            answer = await ask(
                w, path, completion(), method="GET" if path == "/v1/models" else "POST"
            )
            assert answer.status == 401
            assert answer.json["error"]["message"] == "The key of this request has expired."
            assert answer.json["error"]["code"] == "key_expired"
            assert answer.header("www-authenticate") == "Bearer"
        assert w.metric("pdproxy_early_refusals_total", reason="ended_key") == 3
        assert [*w.proxy.credentials.keys.ends().values()] == [end], "for streams that run"


async def test_tenants_of_a_key(tmp_path: Path) -> None:
    """A tenant's part of the places is for those who may use it."""

    def adjust(settings: Settings) -> Settings:
        return msgspec.structs.replace(settings, overload=Overload(tenant_header="x-tenant"))

    async with world(auth=auth(tmp_path, "tenants=a,b"), adjust=adjust) as w:
        for tenant, status in (("a", 200), (" b ", 200), ("c", 403), ("", 200)):
            headers = [*bearer(KEY), ("x-tenant", tenant)]
            assert (await w.ask(COMPLETIONS, completion(), headers)).status == status, tenant


async def test_models_and_pools(tmp_path: Path) -> None:
    """An alias opens nothing; of pools with one model only those are chosen that the key names;
    lists show what it may use.
    """
    path = tmp_path / "keys"
    path.write_text(
        "one:key-one models=b\ntwo:key-two pools=first\nthree:key-three pools=third models=a,b\n"
    )
    first = {"name": "first", "aliases": {"fast": "a", "b-fast": "a"}}
    wanted = [
        PoolOf("a", settings=first),
        PoolOf("b", settings={"name": "second"}),
        PoolOf("a", settings={"name": "third"}),
    ]
    async with pools(*wanted, auth=Auth(api_keys_file=str(path))) as w:

        async def status(key: str, model: str) -> int:
            body = completion(model=model, prompt="word " * 20, max_tokens=4)
            return (await w.world.ask(COMPLETIONS, body, bearer(key))).status

        async def listed(key: str) -> list[str]:
            answer = await w.world.get("/v1/models", bearer(key))
            return sorted(card["id"] for card in answer.json["data"])

        assert [await status("key-one", model) for model in ("b", "a", "fast", "b-fast")] == [
            200,
            403,
            403,
            403,
        ]
        assert await listed("key-one") == ["b"]
        assert [await status("key-two", model) for model in ("a", "b", "fast")] == [200, 403, 200]
        assert await listed("key-two") == ["a", "b-fast", "fast"]
        assert await listed("key-three") == ["a"]
        before = w.world.events(RequestEnded)
        for _ in range(8):
            assert await status("key-three", "a") == 200
        ended = w.world.events(RequestEnded)[len(before) :]
        assert {one.legs[0].decode for one in ended} == {w.engines[2][0].url}, (
            "of two pools with the model"
        )
        unknown = await w.world.ask(COMPLETIONS, completion(model="nope"), bearer("key-one"))
        assert unknown.status == 404
        assert (
            unknown.json["error"]["message"] == "The model `nope` does not exist. Valid aliases: b."
        )
        for route in (COMPLETIONS, EMBED):
            answer = await w.world.ask(
                route, {**completion(model="nope"), "input": "x"}, bearer("key-two")
            )
            shown = "The model `nope` does not exist. Valid aliases: a, fast, b-fast."
            assert answer.json["error"]["message"] == shown, "names of other pools are not shown"
