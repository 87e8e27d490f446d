"""HTTP as vLLM's server does it: cross-origin rules, other methods, other spellings of a path,
headers that come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urljoin

import pytest
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse

from pdproxy.serving.access.routes import TABLE, RouteKind
from pdproxy.settings.listen import Cors
from pdproxy.web.cors import CorsHeaders, middleware_options
from tests.fakes import scripts
from tests.fakes.admin import admin
from tests.fakes.client import Answer
from tests.fakes.world import CHAT, COMPLETIONS, World, chat, completion, world

SITE = "https://site.example"
RULES = [
    Cors(),
    Cors(allowed_origins=("*",)),
    Cors(allowed_origins=("*",), allow_credentials=True),
    Cors(allowed_origins=(SITE,)),
    Cors(allowed_origins=(SITE,), allow_credentials=True),
]


def crossed(answer: Answer) -> dict[str, str]:
    """The headers of an answer that are about origins."""
    return {
        name: value
        for name, value in answer.headers
        if name == "vary" or name.startswith("access-control")
    }


@pytest.mark.parametrize("cors", RULES)
@pytest.mark.parametrize("origin", [None, SITE, "https://other.example", "null", ""])
async def test_the_data_path_says_what_starlettes_middleware_says(
    cors: Cors, origin: str | None
) -> None:
    """For every rule and origin, the headers of the data path are those of the middleware that vLLM
    uses.
    """

    async def page(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("x")(scope, receive, send)

    said: list[Any] = []

    async def send(message: Any) -> None:
        said.append(message)

    lines = [] if origin is None else [(b"origin", origin.encode())]
    scope = {"type": "http", "method": "GET", "headers": lines}
    await CORSMiddleware(page, **middleware_options(cors))(scope, None, send)  # type: ignore[arg-type]
    theirs = sorted(
        (k, v) for k, v in said[0]["headers"] if k == b"vary" or k.startswith(b"access-control")
    )
    assert sorted((name.lower(), value) for name, value in CorsHeaders(cors)(lines)) == theirs


async def everything(w: World, headers: Sequence[tuple[str, str]]) -> dict[str, Answer]:
    """One answer of each sort."""
    w.decode[0].script(scripts.eof)
    failed = await w.ask(COMPLETIONS, completion(n=2), headers)
    return {
        "failed": failed,
        "whole": await w.ask(COMPLETIONS, completion(), headers),
        "streamed": await w.ask(COMPLETIONS, completion(stream=True), headers),
        "list": await w.ask(COMPLETIONS, completion(prompt=["a" * 40, "b" * 40]), headers),
        "refused": await w.ask(COMPLETIONS, b"{", headers),
        "passed": await w.ask("/tokenize", {"model": "tiny", "prompt": "x"}, headers),
        "passed refused": await w.ask("/tokenize", b"{", headers),
        "own": await w.get("/v1/models", headers),
        "404": await w.get("/nope", headers),
        "405": await w.get(COMPLETIONS, headers),
        "400": await w.get("/v1/models", [*headers, ("host", "another")]),
        "431": await w.get("/v1/models", [*headers, ("x", "y" * 100_000)]),
    }


async def test_every_answer_varies_by_origin() -> None:
    """By default no site may read anything, and every answer, of any kind, has `vary: Origin`, as
    vLLM's do.
    """
    async with world(limits={"attempts": 1}) as w:
        for headers in ([], [("origin", SITE)]):
            for sort, answer in (await everything(w, headers)).items():
                assert (sort, crossed(answer)) == (sort, {"vary": "Origin"})


async def test_an_allowed_site_may_read_every_answer() -> None:
    """With `listen.cors` set, answers of all sorts name the site."""
    async with world(
        limits={"attempts": 1}, cors=Cors(allowed_origins=(SITE,), allow_credentials=True)
    ) as w:
        for sort, answer in (await everything(w, [("origin", SITE)])).items():
            assert (sort, crossed(answer)) == (
                sort,
                {
                    "vary": "Origin",
                    "access-control-expose-headers": "X-Request-Id, Retry-After",
                    "access-control-allow-origin": SITE,
                    "access-control-allow-credentials": "true",
                },
            )


@pytest.mark.parametrize(
    "path", [COMPLETIONS, CHAT, "/v1/responses", "/v1/messages", "/invocations"]
)
async def test_streams_are_not_buffered_on_their_way(path: str) -> None:
    """Balancers in between pass each event on as it comes; whole answers have no such headers."""
    body = {COMPLETIONS: completion, "/invocations": completion}.get(path, chat)
    fields = {"input": "hi"} if path == "/v1/responses" else {}
    async with world() as w:
        for stream in (True, False):
            answer = await w.ask(path, {**body(stream=stream), **fields})
            assert answer.status == 200, answer.body
            found = (answer.header("cache-control"), answer.header("x-accel-buffering"))
            assert found == (("no-cache", "no") if stream else (None, None))


async def test_a_list_and_a_continued_stream_are_not_buffered_either() -> None:
    async with world(decode=2) as w:
        answer = await w.ask(COMPLETIONS, completion(prompt=["a" * 40, "b" * 40], stream=True))
        assert answer.header("x-accel-buffering") == "no"
        for engine in w.decode:
            engine.script(scripts.streams(scripts.WORD))
        answer = await w.ask(COMPLETIONS, completion(stream=True))
        assert answer.header("x-accel-buffering") == "no"


async def test_a_preflight_is_answered_on_every_route() -> None:
    """Also on the generating ones, without a key, and without an engine."""
    asked = [
        ("origin", SITE),
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "authorization,content-type"),
    ]
    cors = Cors(allowed_origins=("*",))
    async with world(cors=cors, auth={"api_keys": ("ours",)}) as w:
        for entry in TABLE:
            answer = await w.ask(entry.path, b"", asked, method="OPTIONS")
            assert (answer.status, answer.body) == (200, b"OK")
            assert answer.header("access-control-allow-origin") == "*"
            assert answer.header("access-control-allow-headers") == "authorization,content-type"
            assert "POST" in str(answer.header("access-control-allow-methods"))
        assert not w.decode[0].requests


async def test_a_preflight_of_a_site_that_is_not_allowed() -> None:
    """By default a 400, in Starlette's words."""
    asked = [("origin", SITE), ("access-control-request-method", "POST")]
    async with world() as w:
        answer = await w.ask(COMPLETIONS, b"", asked, method="OPTIONS")
        assert (answer.status, answer.body) == (400, b"Disallowed CORS origin")


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_a_wrong_method(method: str) -> None:
    """405 with the methods that are right: FastAPI's routes answer no HEAD and no plain OPTIONS,
    and so vLLM's don't.
    """
    async with world() as w:
        for entry in TABLE:
            by_fastapi = (method, entry.path) == ("HEAD", "/openapi.json")
            if method in entry.methods or entry.kind is RouteKind.REFUSED or by_fastapi:
                continue
            answer = await w.ask(entry.path, b"", method=method)
            assert (answer.status, entry.path) == (405, entry.path)
            assert set(str(answer.header("allow")).split(", ")) <= set(entry.methods)
            if method != "HEAD":
                assert answer.json == {"detail": "Method Not Allowed"}


async def test_a_trailing_slash_is_redirected() -> None:
    """307 to the path without it, query and all, as FastAPI does; no engine is asked."""
    async with world() as w:
        for path in (COMPLETIONS, "/tokenize", "/v1/responses", "/v1/responses/a%20c", "/docs"):
            answer = await w.ask(f"{path}/?a=1&b=%2F", {"model": "tiny"})
            location = str(answer.header("location"))
            assert (answer.status, location[:3]) == (307, "../"), (
                "no host, and no path that a balancer would have to know"
            )
            assert (
                urljoin(f"https://llm.example/below{path}/?x", location)
                == f"https://llm.example/below{path}?a=1&b=%2F"
            )
        assert not w.prefill[0].requests


@pytest.mark.parametrize(
    "path",
    ["//evil.example/", "/\\evil.example/", "/nothing/", "//v1/models/", "/v1/models//", "/"],
)
async def test_no_other_path_is_redirected(path: str) -> None:
    async with world() as w:
        answer = await w.get(path)
        assert (answer.status, answer.header("location")) == (404, None)


async def test_the_admin_api_names_no_host_either() -> None:
    async with world() as w, admin(w) as api:
        answer = await api.ask("GET", "/admin/v1/log_level/")
        assert (answer.status, answer.header("location")) == (307, "../log_level")


@pytest.mark.parametrize(
    "path", ["//v1/models", "/v1//models", "/v1/models%00", "/v1/./models", "/V1/models"]
)
async def test_a_path_that_only_looks_alike(path: str) -> None:
    """Paths are compared as they are: no folding, no cleaning that an engine could see
    otherwise.
    """
    async with world() as w:
        assert (await w.get(path)).status == 404


@pytest.mark.parametrize("path", ["/tokenize?x=%2F", "/%74okenize", "http://proxy/tokenize"])
async def test_other_forms_of_a_passed_path(path: str) -> None:
    """A query, percent-encoding or the absolute form is the same route; the engine gets the table's
    path and no query.
    """
    async with world() as w:
        answer = await w.ask(path, {"model": "tiny", "prompt": "hi"})
        assert answer.status == 200
        assert (await w.ended()).endpoint == "/tokenize"


async def test_a_segment_with_an_encoded_slash() -> None:
    """A response's id with a slash in it is no longer that route, as Starlette decodes before it
    compares.
    """
    async with world() as w:
        assert (await w.get("/v1/responses/a%2Fb")).status == 404


async def test_what_serves_is_not_told() -> None:
    """No answer has a `server` header."""
    async with world(limits={"attempts": 1}) as w:
        for sort, answer in (await everything(w, [])).items():
            assert (sort, answer.header("server")) == (sort, None)


@pytest.mark.parametrize("rank", ["0", "1", "99", "-1", "x", ""])
async def test_a_clients_rank_is_dropped(rank: str) -> None:
    """A data-parallel rank can't be meant for two engines: neither leg gets it, and the request is
    served.
    """
    async with world() as w:
        answer = await w.ask(COMPLETIONS, completion(), [("x-data-parallel-rank", rank)])
        assert answer.status == 200
        for engine in (w.prefill[0], w.decode[0]):
            assert "x-data-parallel-rank" not in dict(engine.requests[0].headers)


async def test_traces_go_on_to_both_legs() -> None:
    """Both engines join the client's trace."""
    sent = [
        ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ("tracestate", "a=b"),
        ("baggage", "tenant=x"),
    ]
    async with world() as w:
        assert (await w.ask("/v1/chat/completions", chat(), sent)).status == 200
        for engine in (w.prefill[0], w.decode[0]):
            assert set(sent) <= set(engine.requests[0].headers)
