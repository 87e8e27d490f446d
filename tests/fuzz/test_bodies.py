"""Bodies of every kind: what an engine's server takes is served, what it refuses is refused in its
words; no handle passes.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from pdproxy.kit.errors import BadRequestError
from pdproxy.transfer.contract import encode
from pdproxy.wire.errors import error_body
from pdproxy.wire.request import Parsed, parse
from pdproxy.wire.route import Route
from pdproxy_lab.sim.api.batch import BatchBody
from pdproxy_lab.sim.api.cohere import CohereBody
from pdproxy_lab.sim.api.errors import RefusedRequest, refusal, response, schema_message
from pdproxy_lab.sim.api.invocations import invoke
from pdproxy_lab.sim.api.messages import MessagesBody
from pdproxy_lab.sim.api.protocol import ChatBody, CompletionBody
from pdproxy_lab.sim.api.responses import ResponsesBody
from pdproxy_lab.sim.api.token_ids import GenerateBody
from pdproxy_lab.sim.error_body import error_body as engine_error
from tests.fuzz.bodies import check_body, check_content_types
from tests.fuzz.mutations import mutated
from tests.fuzz.seeds import recorded_bodies

BODIES = recorded_bodies()
ROUTES = st.sampled_from(Route)
FAKE = {"do_remote_prefill": True, "remote_engine_id": "made-up"}
NAMES = ("kv_transfer_params", "ec_transfer_params")
ENCODINGS = (
    "utf-8",
    "utf-8-sig",
    "utf-16",
    "utf-16-le",
    "utf-16-be",
    "utf-32",
    "utf-32-le",
    "utf-32-be",
)
VALUES = st.sampled_from(
    ["1", "-0", "1E400", "-1e-400", "NaN", "Infinity", '"\\ud800"', '"\\udc00\\ud800"', '"\u2028"',
    '"\x7f"', "[[[]]]", "null",
     '{"a":1,"a":2}', "1" * 4301, "[" * 1200 + "]" * 1200, "true", '"\\u0000"', "0.1e1", "{}",
     '"x"', "tru", "01", '"\t"']
)  # fmt: skip
FIELDS = st.sampled_from(
    ["prompt", "messages", "model", "stream", "logprobs", "structured_outputs", "response_format",
    "vllm_xargs",
     "sampling_params", "x", "max_tokens", "temperature", "\\ud800", "logprob_token_ids",
     "stream_options", "n"]
)  # fmt: skip


@st.composite
def spelt(draw: st.DrawFn, name: str) -> str:
    """A key in JSON, some of its letters as escapes."""
    letters = [
        f"\\u{ord(letter):04x}" if draw(st.integers(0, 9)) == 0 else letter for letter in name
    ]
    return '"' + "".join(letters) + '"'


@st.composite
def handles(draw: st.DrawFn) -> str:
    """Members of an object that hold handles, any number of times, between others."""
    members = []
    for _ in range(draw(st.integers(1, 3))):
        name = draw(spelt(draw(st.sampled_from(NAMES))))
        members.append(
            f"{name}:{draw(st.sampled_from([json.dumps(FAKE), 'null', '1', '[]', '{}']))}"
        )
        if draw(st.booleans()):
            members.append(f'"keep":{draw(VALUES)}')
    return ",".join(members)


@st.composite
def poisoned(draw: st.DrawFn) -> bytes:
    """A request with handles at the top and in every carrier, in any encoding, among values of
    every kind.
    """
    route = draw(ROUTES)
    chat = '[{"role":"user","content":"hello"}]'
    contents = {Route.COMPLETIONS: '"prompt":"hello"', Route.BATCH: f'"messages":[{chat},{chat}]'}
    content = contents.get(route, f'"messages":{chat}')
    members = [content, draw(handles())]
    for _ in range(draw(st.integers(0, 2))):
        members.append(f"{draw(spelt('vllm_xargs'))}:{{{draw(handles())}}}")
        extra = f"{draw(spelt('extra_args'))}:{{{draw(handles())}}}"
        members.append(f"{draw(spelt('sampling_params'))}:{{{extra}}}")
    members += [f'"{draw(FIELDS)}":{draw(VALUES)}' for _ in range(draw(st.integers(0, 2)))]
    text = "{" + ",".join(draw(st.permutations(members))) + "}"
    return text.encode(draw(st.sampled_from(ENCODINGS)), "surrogatepass")


@settings(max_examples=100, deadline=None)
@given(poisoned(), ROUTES)
def test_no_handle_of_a_client_reaches_an_engine(body: bytes, route: Route) -> None:
    """Hidden anywhere, spelt anyhow, in any encoding: gone from every body that an engine could
    get.
    """
    check_body(route, body)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(BODIES)).map(BODIES.__getitem__).flatmap(mutated), ROUTES)
@example(b'{"prompt":["a","\xff"]}', Route.COMPLETIONS)
@example(b'{"prompt":[[1],[%b]]}' % (b"1" * 4301), Route.COMPLETIONS)
@example(b'{"prompt":"a","structured_outputs":{"x":%b}}' % (b"1" * 4301), Route.COMPLETIONS)
@example(b'{"prompt":"a","structured_outputs":%b}' % (b"[" * 500 + b"]" * 500), Route.COMPLETIONS)
def test_mutated_bodies(body: bytes, route: Route) -> None:
    """Recorded bodies with bytes changed, doubled, lost and moved."""
    check_body(route, body)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(FIELDS, VALUES), max_size=5), ROUTES, st.sampled_from(ENCODINGS))
def test_values_at_the_edge_of_json(
    members: list[tuple[str, str]], route: Route, encoding: str
) -> None:
    """What the fast parser and the engines' own might read in two ways."""
    text = "{" + ",".join(f'"{name}":{value}' for name, value in members) + "}"
    check_body(route, text.encode(encoding, "surrogatepass"))


@pytest.mark.parametrize("member", ["structured_outputs", "logprob_token_ids", "response_format"])
@pytest.mark.parametrize("value", [b"1" * 4301, b"[" * 300 + b"]" * 300])
def test_what_only_decode_engines_see_costs_no_prefill_if_it_cannot_be_parsed(
    member: str, value: bytes
) -> None:
    """A field that is dropped on the prefill leg and that some engine's parser may refuse is one
    engine's business.
    """
    parsed = parse(
        Route.COMPLETIONS, b'{"prompt":"a","logprobs":1,"%b":%b}' % (member.encode(), value)
    )
    assert parsed.alone is not None


@given(st.one_of(st.binary(max_size=40), st.sampled_from([b"application/json",
    b"application/x+json", b"text/json", b"a/b"])
                 .flatmap(mutated)), st.sampled_from([b"", b"{}", b"{", b"\xff"]))  # fmt: skip
def test_content_types(kind: bytes, body: bytes) -> None:
    """Only vLLM's is taken."""
    check_content_types(kind, body)


# -- the same, beside FastAPI and the engines' models


class Engine:
    """What stands before a model in vLLM's server: FastAPI reading a body into the request's model,
    and its refusals.
    """

    def __init__(self) -> None:
        self.app = FastAPI()

        @self.app.exception_handler(RequestValidationError)
        async def refused(_: Any, error: RequestValidationError) -> Response:
            message, param = schema_message(error.errors())
            return response(engine_error(message, "Bad Request", 400, param), 400)

        @self.app.exception_handler(Exception)
        async def failed(_: Any, error: Exception) -> Response:
            return Response(repr(error), 418)

        @self.app.post(Route.COMPLETIONS.path)
        async def completions(body: CompletionBody) -> Response:
            return Response(repr(body))

        @self.app.post(Route.CHAT.path)
        async def chat(body: ChatBody) -> Response:
            return Response(repr(body))

        @self.app.post(Route.BATCH.path)
        async def batch(body: BatchBody) -> Response:
            return Response(repr(body))

        @self.app.post(Route.RESPONSES.path)
        async def responses(body: ResponsesBody) -> Response:
            return _read(body)

        @self.app.post(Route.MESSAGES.path)
        async def messages(body: MessagesBody) -> Response:
            return _read(body)

        @self.app.post(Route.GENERATE.path)
        async def generate(body: GenerateBody) -> Response:
            return _read(body)

        @self.app.post(Route.COHERE.path)
        async def cohere(body: CohereBody) -> Response:
            return _read(body)

        @self.app.post(Route.INVOCATIONS.path)
        async def invoked(request: Request) -> Response:
            try:
                return await invoke(request, chat, completions)
            except RefusedRequest as error:
                return refusal(error)

    async def ask(self, route: Route, body: bytes) -> tuple[int, bytes]:
        """Return status and body."""
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": route.path,
            "raw_path": route.path.encode(), "query_string": b"",
                 "headers": [(b"content-type", b"application/json")], "http_version": "1.1",
                 "scheme": "http",
                 "root_path": "", "server": ("x", 80), "client": ("x", 1)}  # fmt: skip
        try:
            await self.app(scope, receive, send)
        except Exception as error:
            return 418, repr(error).encode()
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def _read(body: BaseModel) -> Response:
    """What was read, without an id that each reading makes."""
    return Response(repr(body.model_dump(exclude={"request_id"})))


ENGINE = Engine()


@settings(max_examples=80, deadline=None)
@given(
    st.one_of(
        poisoned(),
        st.binary(max_size=30),
        st.sampled_from(sorted(BODIES)).map(BODIES.__getitem__).flatmap(mutated),
        st.sampled_from(
            [
                b"",
                b" ",
                b"null",
                b"3",
                b"-0.0",
                b'"x"',
                b"[1]",
                b"true",
                b"NaN",
                b'"' + b"x" * 300 + b'"',
                b"[" * 2000,
            ]
        ),
    ),
    ROUTES,
)
@example(b'"\\ud800"', Route.CHAT)
@example(b"1e999", Route.CHAT)
@example(b"9" * 300, Route.CHAT)
@example(b"9" * 4301, Route.CHAT)
def test_refused_as_an_engine_would_refuse_and_else_the_same_to_it(
    body: bytes, route: Route
) -> None:
    """What is refused here, FastAPI refuses with the same bytes; what is passed on, the model reads
    as it would have.
    """

    async def compare() -> None:
        status, own = await ENGINE.ask(route, body)
        parsed = _parsed(route, body)
        if isinstance(parsed, BadRequestError):
            if route is not Route.INVOCATIONS and _loads_none(body):
                # here vLLM's FastAPI (0.136) says `missing`, as for no body; newer ones no longer
                # do
                return
            if body.count(b"[") + body.count(b"{") > 300 and (
                status == 200 or b"RecursionError" in own
            ):
                return  # at the edge of the parser's stack
            assert (status, own) == (parsed.status, error_body(parsed))
            return
        if b"transfer" in body.replace(b"\x00", b"") or b"\\u" in body.replace(b"\x00", b""):
            return  # what handles become is another test's
        got = await ENGINE.ask(route, encode(parsed.fields))
        assert got == (status, own)

    asyncio.run(compare())


def _parsed(route: Route, body: bytes) -> Parsed | BadRequestError:
    try:
        return parse(route, body)
    except BadRequestError as error:
        return error


def _loads_none(body: bytes) -> bool:
    try:
        return bool(body) and json.loads(body) is None
    except (ValueError, RecursionError):
        return False


def test_no_body_and_null_are_missing() -> None:
    """As the engines' FastAPI has it."""
    missing = (
        "1 validation error:\n  {'type': 'missing', 'loc': 'body', 'msg': 'Field required', "
        "'input': 'None'}"
    )
    for body in (b"", b"null", b" null ", "null".encode("utf-16")):
        with pytest.raises(BadRequestError) as raised:
            parse(Route.CHAT, body)
        assert raised.value.message == missing


def test_the_oracle_is_asked() -> None:
    """The engine of these tests takes a good body and refuses a bad one."""
    assert asyncio.run(ENGINE.ask(Route.COMPLETIONS, b'{"prompt":"x"}'))[0] == 200
    assert asyncio.run(ENGINE.ask(Route.COMPLETIONS, b"{"))[0] == 400
