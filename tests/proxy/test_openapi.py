"""`/openapi.json` says what is answered: each answer's status, media type and body are what the
document names for its route.
"""

# `long_openapi.py` has schemathesis make the requests.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest

from pdproxy.serving.access.routes import ENTRIES, TABLE, RouteKind
from tests.fakes import scripts
from tests.fakes.client import Answer
from tests.fakes.flagged import FLAGS, MAKE
from tests.fakes.forms import spoken, typed
from tests.fakes.passed import FORMS
from tests.fakes.world import CHAT, COMPLETIONS, PROMPT, World, chat, completion, world

MESSAGES = [{"role": "user", "content": PROMPT}]
GOOD: dict[str, list[dict[str, Any]]] = {
    COMPLETIONS: [
        completion(),
        completion(stream=True),
        completion(prompt=[1, 2, 3]),
        completion(echo=True),
    ],
    CHAT: [chat(), chat(stream=True)],
    "/v1/chat/completions/batch": [
        {"model": "tiny", "messages": [MESSAGES, MESSAGES], "max_tokens": 2}
    ],
    "/invocations": [completion(), chat(stream=True)],
    "/v1/responses": [
        {"model": "tiny", "input": PROMPT, "max_output_tokens": 4, "store": False, "stream": stream}
        for stream in (False, True)
    ],
    "/v1/messages": [
        {"model": "tiny", "messages": MESSAGES, "max_tokens": 4, "stream": stream}
        for stream in (False, True)
    ],
    **{path: [make(), make(stream=True)] for path, make in MAKE.items()},
    "/v1/messages/count_tokens": [{"model": "tiny", "messages": MESSAGES}],
    "/tokenize": [{"model": "tiny", "prompt": "x"}, {"model": "tiny", "messages": MESSAGES}],
    "/detokenize": [{"model": "tiny", "tokens": [1, 2]}],
}
"""Requests that are answered with 200, and fit their schemas."""
BAD: tuple[object, ...] = (
    b"",
    b"{",
    b"\xff",
    b"[]",
    {},
    {"model": 5},
    {"model": "nope"},
    {"messages": [], "prompt": 7},
)


class Document:
    """The document, and what it says of an answer."""

    def __init__(self, read: dict[str, Any]) -> None:
        self.paths, self._components = read["paths"], read["components"]

    def operations(self) -> list[tuple[str, str]]:
        return [
            (method, path)
            for path, found in self.paths.items()
            for method in found
            if method != "parameters"
        ]

    def check(self, value: object, schema: dict[str, Any]) -> None:
        made = {**schema, "components": self._components}
        jsonschema.Draft202012Validator.check_schema(made)
        jsonschema.validate(value, made, jsonschema.Draft202012Validator)

    def request(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = self.paths[path]["post"]["requestBody"]["content"][
            "application/json"
        ]["schema"]
        return found

    def covers(self, answer: Answer, method: str, path: str) -> None:
        """An answer of this operation is one that the document names."""
        said = self.paths[path][method]["responses"]
        assert str(answer.status) in said, f"{method} {path}: {answer.status} {answer.body[:200]!r}"
        content = said[str(answer.status)].get("content", {})
        kind = (answer.header("content-type") or "").partition(";")[0]
        if not content:
            assert (kind, answer.body) == ("", b"")
            return
        assert kind in content, f"{method} {path}: {answer.status} {kind}"
        if kind == "application/json":
            self.check(answer.json, content[kind]["schema"])
        if answer.header("retry-after") is not None:
            assert "Retry-After" in said[str(answer.status)]["headers"]


FORM = "multipart/form-data"
OF_THE_DOCUMENT = ("/docs", "/openapi.json")


async def document_of(w: World) -> Document:
    return Document((await w.get("/openapi.json")).json)


def _url(path: str) -> str:
    return path.replace("{response_id}", "resp_1")


async def test_each_answer_is_one_that_the_document_names() -> None:
    """Of every operation: good requests, which fit their schemas, and wrong ones."""
    async with world(facts=FLAGS) as w:
        document = await document_of(w)
        assert sorted(document.operations()) == sorted(
            (method.lower(), one.path)
            for one in TABLE
            for method in one.methods
            if one.path not in OF_THE_DOCUMENT
        )
        for method, path in document.operations():
            bodies: Sequence[object] = (*GOOD.get(path, ()), *BAD) if method == "post" else (b"",)
            for body in bodies:
                answer = await w.ask(_url(path), body, method=method.upper())
                document.covers(answer, method, path)
                if body in GOOD.get(path, ()):
                    assert answer.status == 200, (path, answer.body)
                    document.check(body, document.request(path))
            wrong = await w.ask(_url(path), b"", method="PATCH")
            assert (wrong.status, wrong.header("allow")) == (405, ", ".join(ENTRIES[path].methods))


@pytest.mark.parametrize("how", ["keys", "gone", "fails", "large", "full"])
async def test_errors_of_the_proxy_and_of_engines(how: str) -> None:
    """Each is documented at every route where it may come, in the shape that it has there."""
    auth = {"api_keys": ("k",)} if how == "keys" else None
    limits = {"large": {"max_body_bytes": 4096}, "full": {"max_queue": 0, "max_inflight": 1}}.get(
        how
    )
    async with world(auth=auth, limits=limits, facts=FLAGS) as w:
        document = await document_of(w)
        if how == "gone":
            for engine in w.engines:
                w.mark_down(engine, "gone")
        seen = set()
        for method, path in document.operations():
            if how == "fails":
                for engine in w.engines:
                    engine.script(*[scripts.eof] * 6)
            body = b" " * 5000 if how == "large" else GOOD.get(path, [{}])[0]
            answer = await w.ask(
                _url(path), body if method == "post" else b"", method=method.upper()
            )
            document.covers(answer, method, path)
            if ENTRIES[path].kind in (RouteKind.SPLIT, RouteKind.PASSED):
                seen.add(answer.status)
            for engine in w.engines:
                engine.scripts.clear()
        wanted = {"keys": {401}, "gone": {503}, "fails": {502}, "large": {413}, "full": {200}}[how]
        assert wanted <= seen


async def test_the_shapes_of_requests() -> None:
    """What every engine refuses does not fit."""
    async with world(facts=FLAGS) as w:
        document = await document_of(w)
        wrong: list[tuple[str, object]] = [
            (COMPLETIONS, {"model": "tiny"}),
            (COMPLETIONS, {"prompt": {}}),
            (CHAT, {"messages": []}),
            (CHAT, {"messages": ["x"]}),
            ("/v1/chat/completions/batch", {"messages": MESSAGES}),
            ("/v1/responses", {}),
            ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
            ("/cohere/v2/chat", {"messages": MESSAGES}),
            ("/inference/v1/generate", {"token_ids": [1]}),
            ("/inference/v1/generate", {"token_ids": [], "sampling_params": {}}),
            ("/tokenize", {}),
            ("/detokenize", {"tokens": "x"}),
        ]
        for path, body in wrong:
            with pytest.raises(jsonschema.ValidationError):
                document.check(body, document.request(path))
            answer = await w.ask(path, body)
            assert answer.status == 400, (path, body, answer.body)


@pytest.mark.parametrize("path", FORMS)
async def test_forms(path: str) -> None:
    """A good one fits; whole answers, streams and refusals are named."""
    limit = ("max_completion_tokens", b"2")
    async with world(facts={"speech": True}) as w:
        document = await document_of(w)
        content = document.paths[path]["post"]["requestBody"]["content"]
        assert list(content) == [FORM]
        document.check({"file": "RIFF", "model": "tiny", "stream": "true"}, content[FORM]["schema"])
        with pytest.raises(jsonschema.ValidationError):
            document.check({"model": "tiny"}, content[FORM]["schema"])
        for fields, status in (((), 200), ((("stream", b"true"),), 200), ((("n", b"x"),), 400)):
            answer = await w.ask(path, spoken(limit, *fields), [typed()])
            assert answer.status == status
            document.covers(answer, "post", path)
