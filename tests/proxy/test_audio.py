"""Transcriptions and translations: forms go on to one engine as they came, by the same rules as all
bodies; what is made to harm is refused.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from pdproxy.observe.events import RequestEnded
from pdproxy_lab.sim.journal import Request
from tests.fakes.client import Answer, Client, bearer, request
from tests.fakes.clock import ManualClock
from tests.fakes.engine import Reply
from tests.fakes.forms import (
    BOUNDARY,
    TRANSCRIPTIONS,
    TRANSLATIONS,
    Field,
    form,
    recording,
    spoken,
    typed,
)
from tests.fakes.passed import FORMS, everyone
from tests.fakes.pools import PoolOf, pools
from tests.fakes.world import World, until, world
from tests.proxy.test_quotas import keys
from tests.proxy.test_usage import TPM, charged

SPEECH = {"speech": True}
SHORT: Field = ("max_completion_tokens", b"4")
STREAM: Field = ("stream", b"true")
KEY = bearer("sk-a")
JSON_ERROR = {"message", "type", "param", "code"}


async def heard(w: World, body: bytes, *headers: tuple[str, str], path: str = "") -> Answer:
    return await w.ask(path or TRANSCRIPTIONS, body, [typed(), *headers])


async def fine(reply: Reply) -> None:
    await reply.whole(b'{"text":"fine","usage":{"type":"duration","seconds":2}}')


def fields_of(seen: Request) -> dict[str, str]:
    """The fields that an engine got, of a form in which each comes once."""
    kind = seen.header("content-type")
    assert kind == f'multipart/form-data; boundary="{BOUNDARY}"'
    parts = seen.body.split(f"--{BOUNDARY}".encode())[1:-1]
    found = [part.removesuffix(b"\r\n").partition(b"\r\n\r\n") for part in parts]
    made = {
        head.partition(b'name="')[2].partition(b'"')[0].decode(): value.decode("latin-1")
        for head, _, value in found
    }
    assert len(made) == len(found)
    return made


# -- what goes on


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize("seconds", [1, 60])
async def test_a_form_goes_on_as_it_came(path: str, seconds: float) -> None:
    """To an engine that decodes, byte for byte; with the forwarded headers."""
    lists: list[Field] = [("timestamp_granularities[]", one) for one in (b"word", b"x")]
    async with world(1, 1, facts=SPEECH) as w:
        seen = everyone(w, path, fine)
        body = spoken(*lists, seconds=seconds)
        answer = await heard(w, body, ("x-request-id", "mine"), ("traceparent", "t"), path=path)
        assert (answer.status, answer.json["text"]) == (200, "fine")
        assert answer.header("x-request-id") == "mine"
        (one,) = seen
        assert one.body == body
        assert (one.header("traceparent"), one.header("x-request-id")) == ("t", "mine")
        ended = await w.ended()
        assert (ended.endpoint, ended.model, ended.outcome) == (path, "tiny", "ok")
        assert ended.legs[0].decode == w.decode[0].url


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize(
    "fields",
    [
        (SHORT,),
        (SHORT, STREAM),
        (SHORT, STREAM, ("stream_include_usage", b"true")),
        (SHORT, STREAM, ("stream_include_usage", b"1"), ("stream_continuous_usage_stats", b"1")),
        (SHORT, ("response_format", b"text")),
        (SHORT, ("response_format", b"verbose_json"), ("language", b"de")),
        (("response_format", b"srt"),),
        (("response_format", b"xml"),),
        (("language", b"xx"),),
        (("stream_include_usage", b"true"),),
        (("n", b"two"),),
        (STREAM, ("use_beam_search", b"true")),
    ],
)
async def test_answers_are_the_engines_own(path: str, fields: tuple[Field, ...]) -> None:
    """Whole ones, streams with their end, and refusals: the same bytes as without a proxy."""
    async with world(0, 1, facts=SPEECH) as w:
        body = spoken(*fields)
        got = await heard(w, body, ("x-request-id", "one"), path=path)
        plain = await _plainly(w, path, body)
        assert (got.status, got.ended) == (plain.status, True)
        assert _still(got.body) == _still(plain.body)
        assert (got.header("content-type"), STREAM in fields and got.status == 200) == (
            plain.header("content-type"),
            got.body.endswith(b"data: [DONE]\n\n"),
        )
        if got.status != 200:
            assert set(got.json["error"]) == JSON_ERROR


async def _plainly(w: World, path: str, body: bytes) -> Answer:
    client = await Client.connect(w.decode[0].port)
    client.send(request("POST", path, body, [typed(), ("x-request-id", "one")]))
    answer = await client.answer()
    client.close()
    return answer


def _still(body: bytes) -> list[bytes]:
    """Without the time at which it was made."""
    return [part.partition(b",")[2] for part in body.split(b'"created":')[1:]] or [body]


# -- whose it is


@pytest.mark.parametrize("last", [False, True])
async def test_the_engines_get_their_own_name_of_a_model(last: bool) -> None:
    """Wherever the field stands; of the other parts no byte changes."""
    async with pools(PoolOf("a"), PoolOf("b", settings={"aliases": {"whisper": "b"}})) as found:
        w, engines = found.world, [one for (one,) in found.engines]
        parts: list[Field] = [("file", recording(), "a.wav"), ("prompt", b"\xc3\xa9"), SHORT]

        def made(name: bytes) -> bytes:
            return form(*parts, ("model", name)) if last else form(("model", name), *parts)

        def got() -> list[list[bytes]]:
            return [
                [one.body for one in engine.journal._others.kept if one.path == TRANSCRIPTIONS]
                for engine in engines
            ]

        for name in (b"whisper", b"a"):  # these engines have no speech: they answer themselves
            assert (await heard(w, made(name))).json == {"detail": "Not Found"}
        assert got() == [[made(b"a")], [made(b"b")]]
        unknown = await heard(w, made(b"nope"))
        assert (unknown.status, unknown.json["error"]["type"]) == (404, "NotFoundError")
        assert got() == [[made(b"a")], [made(b"b")]]


RIGHTS: list[tuple[str, bytes, str | None]] = [
    ("models=other", spoken(), "model"),
    ("models=tiny", form(("file", recording(), "a.wav")), "model"),
    ("models=tiny", spoken(model=b""), "model"),
    ("routes=chat,translations", spoken(), None),
    ("max_tokens=10", spoken(("max_completion_tokens", b"11")), "max_completion_tokens"),
    ("max_tokens=10", spoken(("max_completion_tokens", b" 5 ")), "max_completion_tokens"),
    ("max_tokens=10", spoken(("max_completion_tokens", b"5.0")), "max_completion_tokens"),
    ("max_tokens=10", spoken(("max_completion_tokens", b"")), "max_completion_tokens"),
    ("max_tokens=10", spoken(("max_completion_tokens", b"9" * 99)), "max_completion_tokens"),
    ("n=2", spoken(("n", b"3"), ("use_beam_search", b"true")), "n"),
    ("n=2", spoken(("n", b"+1")), "n"),
]


@pytest.mark.parametrize(("right", "body", "param"), RIGHTS)
async def test_what_a_key_is_not_good_for(
    tmp_path: Path, right: str, body: bytes, param: str | None
) -> None:
    async with world(0, 1, auth=keys(tmp_path, f"a:sk-a {right}"), facts=SPEECH) as w:
        seen = everyone(w, TRANSCRIPTIONS, fine)
        answer = await heard(w, body, *KEY)
        assert (answer.status, answer.json["error"]["param"]) == (403, param)
        assert not seen
        assert (await heard(w, spoken(), path=TRANSCRIPTIONS)).status == 401


async def test_a_form_without_a_limit_gets_that_of_its_key(tmp_path: Path) -> None:
    auth = keys(tmp_path, "a:sk-a max_tokens=3 models=tiny routes=transcriptions n=1")
    async with world(0, 1, auth=auth, facts=SPEECH) as w:
        seen = everyone(w, TRANSCRIPTIONS, fine)
        for limit in ((), (("max_completion_tokens", b"2"),)):
            assert (await heard(w, spoken(*limit), *KEY)).status == 200
        assert [fields_of(one)["max_completion_tokens"] for one in seen] == ["3", "2"]
        assert seen[0].body == spoken(("max_completion_tokens", b"3"))


async def test_tenants_have_salts_of_their_own() -> None:
    """As on all routes where prompts are computed, for engines that read it here."""
    async with world(0, 1, auth={"api_keys": ("sk-a", "sk-b")}, facts=SPEECH) as w:
        seen = everyone(w, TRANSCRIPTIONS, fine)
        for key in ("sk-a", "sk-b", "sk-a"):
            body = spoken(("cache_salt", b"mine"))
            assert (await heard(w, body, *bearer(key))).status == 200
        got = [fields_of(one)["cache_salt"] for one in seen]
        assert got[0] == got[2] != got[1]
        assert all(len(one) == 64 for one in got)


# -- what it costs


@pytest.mark.parametrize(
    ("path", "fields", "prompt"),
    [
        (TRANSCRIPTIONS, (SHORT,), 200),
        (TRANSCRIPTIONS, (SHORT, ("response_format", b"verbose_json")), 200),
        (TRANSLATIONS, (SHORT,), 64_044 * 100 // 8000),
        (TRANSCRIPTIONS, (SHORT, STREAM, ("stream_include_usage", b"true")), None),
        (TRANSCRIPTIONS, (SHORT, STREAM), 64_044 * 100 // 8000),
    ],
)
async def test_what_a_key_pays(
    tmp_path: Path, path: str, fields: tuple[Field, ...], prompt: int | None
) -> None:
    """What a stream reports; else seconds, or what the file's size says of them; and the text."""
    clock = ManualClock()
    auth = keys(tmp_path, f"a:sk-a tpm={TPM}")
    async with world(0, 1, auth=auth, clock=clock, facts=SPEECH) as w:
        answer = await heard(w, spoken(*fields, seconds=2), *KEY, path=path)
        assert (answer.status, answer.ended) == (200, True)
        used = charged(w, await w.ended())
        if b"usage" in answer.body and prompt is None:
            usage = json.loads(answer.events[-2].removeprefix(b"data: "))["usage"]
            assert used == (usage["prompt_tokens"], usage["completion_tokens"])
        elif answer.body.startswith(b"{"):
            text = answer.json["text"].encode()
            assert used[0] == pytest.approx(prompt, abs=8)
            assert used[1] == -(-len(text) // 4)
        else:
            assert used[0] == pytest.approx(prompt, abs=8)
            assert used[1] == len(answer.events)


# -- failures


def _error(status: int, text: str) -> bytes:
    body = {"message": text, "type": "InternalServerError", "param": None, "code": status}
    return b"data: " + json.dumps({"error": body}).encode() + b"\n\n"


CHUNK = b'data: {"id":"x","object":"transcription.chunk","choices":[{"delta":{"content":"a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


async def _failing(reply: Reply) -> None:
    await reply.whole(b'{"error":{"message":"no"}}', status=500)


async def _begins_with_an_error(reply: Reply) -> None:
    await reply.start()
    await reply.pieces(_error(500, "no"), DONE)
    await reply.finish()


async def _says_nothing(reply: Reply) -> None:
    await reply.start()
    await reply.pieces(DONE)
    await reply.finish()


@pytest.mark.parametrize("how", [_failing, _begins_with_an_error, _says_nothing])
async def test_another_engine_is_asked(how: Callable[[Reply], Awaitable[None]]) -> None:
    """Until one has sent text: the client sees nothing of the failure."""
    async with world(0, 2, facts=SPEECH) as w:
        seen: list[Request] = []

        async def once(reply: Reply) -> None:
            seen.append(reply.request)
            await (how(reply) if len(seen) == 1 else reply.serve())

        everyone(w, TRANSCRIPTIONS, once)
        answer = await heard(w, spoken(SHORT, STREAM))
        assert (answer.status, answer.events[-1]) == (200, DONE)
        assert b"error" not in answer.body
        assert len({one.body for one in seen}) == 1
        ended = await w.ended()
        assert (ended.outcome, ended.legs[0].attempts) == ("ok", 2)


async def test_an_error_behind_the_first_text_shows_no_engine() -> None:
    """It is the engine's own event, without the addresses in it."""
    async with world(0, 1, facts=SPEECH) as w:

        async def script(reply: Reply) -> None:
            await reply.start()
            for one in (CHUNK, _error(500, f"no connection to {w.decode[0].url}/x"), DONE):
                await reply.pieces(one)
                await asyncio.sleep(0.05)  # each is read on its own
            await reply.finish()

        everyone(w, TRANSCRIPTIONS, script)
        first, error, done = (await heard(w, spoken(STREAM))).events
        assert (first, done) == (CHUNK, DONE)
        assert b"127.0.0.1" not in error
        assert b"no connection to an" in error


async def test_a_stream_that_breaks_off_ends_with_an_error() -> None:
    async with world(0, 1, facts=SPEECH) as w:

        async def script(reply: Reply) -> None:
            await reply.start()
            await reply.pieces(CHUNK, CHUNK[:20])
            await asyncio.sleep(0.05)
            reply.eof()

        everyone(w, TRANSCRIPTIONS, script)
        answer = await heard(w, spoken(STREAM))
        first, error = answer.events
        assert first == CHUNK
        assert set(json.loads(error.removeprefix(b"data: "))["error"]) == JSON_ERROR
        assert (await w.ended()).outcome == "engine"


async def test_engines_without_speech_answer_themselves() -> None:
    async with world(0, 1) as w:
        answer = await heard(w, spoken())
        assert (answer.status, answer.json) == (404, {"detail": "Not Found"})


async def test_a_client_that_leaves_ends_the_work() -> None:
    async with world(0, 1, facts=SPEECH) as w:
        seen = everyone(w, TRANSCRIPTIONS, Reply.stall)
        client = await w.client()
        client.send(request("POST", TRANSCRIPTIONS, spoken(), [typed()]))
        await until(lambda: seen)
        client.close()
        await until(lambda: seen[0].left.is_set())
        assert (await w.ended()).outcome == "client_left"


# -- what is made to harm


def _parts(number: int) -> bytes:
    return spoken(*[("a[]", b"b")] * number)


HOSTILE: dict[str, Callable[[], tuple[bytes, str]]] = {
    "no boundary": lambda: (spoken(), "multipart/form-data"),
    "another boundary": lambda: (spoken(), "multipart/form-data; boundary=x"),
    "two boundaries": lambda: (spoken(), f"{typed()[1]}; boundary=x"),
    "JSON": lambda: (b'{"model":"tiny"}', "application/json"),
    "no type": lambda: (spoken(), ""),
    "nothing": lambda: (b"", typed()[1]),
    "thousands of parts": lambda: (_parts(20_000), typed()[1]),
    "an endless head": lambda: (spoken().replace(b"audio/wav", b"a" * (8 << 20)), typed()[1]),
    "no end": lambda: (spoken()[:-4], typed()[1]),
    "dashes alone": lambda: (b"-" * (16 << 20), f"multipart/form-data; boundary={'-' * 60}"),
    "a boundary that is nearly everywhere": lambda: (
        form(("file", (b"-" * 69 + b"a") * 200_000, "a"), boundary="-" * 70)[:-2] + b"x",
        f"multipart/form-data; boundary={'-' * 70}",
    ),
    "two models": lambda: (spoken(("model", b"other")), typed()[1]),
    "a model in a file's name": lambda: (
        spoken().replace(b'"a.wav"', b'"\\"; name=\\"model"'),
        typed()[1],
    ),
    "a model that is a file": lambda: (form(("model", b"tiny", "a")), typed()[1]),
    "a hidden part": lambda: (
        spoken(
            ("prompt", b'a\n--x\nContent-Disposition: form-data; name="model"\n\nother')
        ).replace(b"--x", f"--{BOUNDARY}".encode()),
        typed()[1],
    ),
    "a huge field": lambda: (spoken(("prompt", b"a" * (4 << 20))), typed()[1]),
    "a huge model": lambda: (spoken(model=b"a" * (4 << 20)), typed()[1]),
    "base64": lambda: (
        spoken().replace(b"audio/wav", b"audio/wav\r\ncontent-transfer-encoding: base64"),
        typed()[1],
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_forms_are_refused(name: str) -> None:
    """In OpenAI's shape, before any engine; nothing of them is kept, and others go on meanwhile."""
    body, kind = HOSTILE[name]()
    async with world(0, 1, facts=SPEECH) as w:
        seen = everyone(w, TRANSCRIPTIONS, fine)
        answer = await w.ask(TRANSCRIPTIONS, body, [("content-type", kind)])
        assert answer.status == 400, answer.body
        error = answer.json["error"]
        assert (error["type"], error["param"], error["code"]) == ("BadRequestError", "body", 400)
        assert len(error["message"]) < 300
        assert not seen
        await until(lambda: not w.body_bytes)
        assert (await w.ended()).outcome == "client"
        assert (await heard(w, spoken())).status == 200


async def test_a_body_that_is_too_large_is_not_read() -> None:
    async with world(0, 1, facts=SPEECH, limits={"max_body_bytes": 1 << 20}) as w:
        seen = everyone(w, TRANSCRIPTIONS, fine)
        answer = await heard(w, spoken(seconds=40))
        assert (answer.status, set(answer.json["error"])) == (413, JSON_ERROR)
        assert not seen


async def test_a_long_model_is_shortened_where_it_is_kept() -> None:
    async with world(0, 1, facts=SPEECH) as w:
        name = b"m" * 5000
        answer = await heard(w, spoken(model=name))
        assert answer.status == 404
        ended: RequestEnded = await w.ended()
        assert ended.model is not None
        assert len(ended.model) < 300


# -- OpenAI's client


async def test_openais_client() -> None:
    """It sends what it usually sends: a file, and fields as text."""
    import openai

    async with world(0, 1, facts=SPEECH) as w:
        url = f"http://127.0.0.1:{w.port}/v1"
        client = openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0)
        given: dict[str, Any] = {"model": "tiny", "extra_body": {"max_completion_tokens": 4}}
        with tempfile.NamedTemporaryFile(suffix=".wav") as file:
            file.write(recording())
            file.flush()
            whole = await client.audio.transcriptions.create(file=Path(file.name), **given)
            assert whole.text
            verbose = await client.audio.transcriptions.create(
                file=Path(file.name),
                response_format="verbose_json",
                timestamp_granularities=["segment"],
                **given,
            )
            assert verbose.duration == 1.0
        await client.close()
