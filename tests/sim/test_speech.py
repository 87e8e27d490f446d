"""The audio routes of a speech model: fields, refusals and answers as vLLM 0.32.0 has them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from pdproxy_lab.sim.api.speech import MAX_FILE
from pdproxy_lab.sim.server import SimServer
from tests.fakes.client import request
from tests.fakes.forms import (
    TRANSCRIPTIONS,
    TRANSLATIONS,
    Field,
    form,
    recording,
    spoken,
    typed,
)
from tests.sim.moments import FAST
from tests.sim.raw import Answer, ask

FOUR: Field = ("max_completion_tokens", b"4")
STREAM: Field = ("stream", b"true")


@pytest.fixture
async def speaking() -> AsyncIterator[SimServer]:
    async with SimServer(replace(FAST, speech=True), chance=7) as made:
        yield made
        assert not made.crashes


async def post(sim: SimServer, path: str, body: bytes) -> Answer:
    return (await ask(sim.port, request("POST", path, body, [typed()]))).answer


def form_of(*fields: Field, seconds: float = 1.0) -> bytes:
    return spoken(*fields, model=b"sim", seconds=seconds)


async def test_whole_answers(speaking: SimServer) -> None:
    """Transcriptions have their seconds, rounded up; translations have no usage."""
    body = form_of(FOUR, seconds=1.5)
    said = (await post(speaking, TRANSCRIPTIONS, body)).json
    assert list(said) == ["text", "usage"]
    assert said["usage"] == {"type": "duration", "seconds": 2}
    again = (await post(speaking, TRANSCRIPTIONS, body)).json
    other = (await post(speaking, TRANSCRIPTIONS, form_of(FOUR, seconds=2))).json
    assert said == again != other
    assert list((await post(speaking, TRANSLATIONS, body)).json) == ["text"]
    assert (await post(speaking, TRANSCRIPTIONS, form_of(FOUR, ("response_format", b"text")))).json


async def test_long_audio_is_read_in_pieces(speaking: SimServer) -> None:
    """Of 30 seconds, each with a limit of its own; segments have their times."""
    fields = (FOUR, ("response_format", b"verbose_json"))
    said = (await post(speaking, TRANSCRIPTIONS, form_of(*fields, seconds=70))).json
    assert list(said) == ["duration", "language", "text", "segments", "words"]
    assert (said["duration"], said["language"], said["words"]) == (70.0, "en", None)
    assert [(one["start"], one["end"]) for one in said["segments"]] == [
        (0.0, 30.0),
        (30.0, 60.0),
        (60.0, 70.0),
    ]
    assert speaking.engine.stats.generation_tokens == 12


@pytest.mark.parametrize("path", [TRANSCRIPTIONS, TRANSLATIONS])
async def test_streams(speaking: SimServer, path: str) -> None:
    """Chunks with deltas, the usage if it is asked for, and the end mark."""
    usage: Field = ("stream_include_usage", b"true")
    whole = (await post(speaking, path, form_of(FOUR))).json["text"]
    for fields in ((FOUR, STREAM), (FOUR, STREAM, usage)):
        answer = await post(speaking, path, form_of(*fields))
        *events, last, end = b"".join(answer.chunks).split(b"\n\n")
        assert (last, end) == (b"data: [DONE]", b"")
        chunks = [json.loads(event.removeprefix(b"data: ")) for event in events]
        assert {one["object"] for one in chunks} == {
            "transcription.chunk" if path == TRANSCRIPTIONS else "translation.chunk"
        }
        if usage in fields:
            counts = chunks.pop()
            assert (counts["choices"], counts["usage"]["completion_tokens"]) == ([], 4)
            assert counts["usage"]["prompt_tokens"] > 100
        made = [one["choices"][0] for one in chunks]
        assert "".join(one["delta"]["content"] for one in made) == whole
        assert all("finish_reason" not in one for one in made[:-1])
        assert (made[-1]["finish_reason"], made[-1]["stop_reason"]) == ("length", None)


LANGUAGE = "Unsupported language: 'xx'.  Must be one of ['de', 'en', 'es', 'fr', 'ja', 'zh']."
FORMATS = (
    "Currently only support response_format: `text`, `json`, `verbose_json` or `diarized_json`"
)
REFUSED: list[tuple[bytes, int, str, str | None]] = [
    (form(("model", b"sim")), 400, "Field required", "body.file"),
    (
        form(("file", b"RIFF"), ("model", b"sim")),
        422,
        "Expected 'file' to be a file-like object, not 'str'.",
        None,
    ),
    (spoken(model=b"other"), 404, "The model `other` does not exist.", "model"),
    (form_of(("n", b"two")), 400, "int_parsing", "body.n"),
    (form_of(("stream", b"perhaps")), 400, "bool_parsing", "body.stream"),
    (form_of(("response_format", b"xml")), 400, "literal_error", "body.response_format"),
    (
        form_of(("timestamp_granularities[]", b"letter")),
        400,
        "literal_error",
        "body.0",  # vLLM leaves names with brackets out
    ),
    (
        form_of(("stream_include_usage", b"true")),
        400,
        "Stream options can only be defined when `stream=True`.",
        "stream_include_usage",
    ),
    (form_of(("vllm_xargs", b"{")), 400, "Failed to parse vllm_xargs", "vllm_xargs"),
    (form_of(("vllm_xargs", b'{"a":{}}')), 400, "vllm_xargs", None),
    (form_of(STREAM, ("use_beam_search", b"1")), 400, "not currently supported with beam", None),
    (form_of(("response_format", b"srt")), 400, FORMATS, None),
    (form_of(("response_format", b"vtt")), 400, FORMATS, None),
    (form_of(("response_format", b"diarized_json")), 400, "do not support diarized_json", None),
    (
        form_of(STREAM, ("response_format", b"verbose_json")),
        400,
        "verbose_json format doesn't support streaming case",
        None,
    ),
    (form_of(("language", b"xx")), 400, LANGUAGE, None),
    (form_of(("to_language", b"xx")), 400, LANGUAGE, None),
    (form(("file", b"no audio", "a.wav")), 400, "Invalid or unsupported audio file.", None),
    (form(("file", recording()[:44], "a.wav")), 400, "Invalid or unsupported audio file.", None),
    (
        form(("file", bytes(MAX_FILE + 1), "a.wav")),
        400,
        "Maximum file size exceeded",
        "audio_filesize_mb",
    ),
]


@pytest.mark.parametrize(("body", "status", "said", "param"), REFUSED)
async def test_refusals(
    speaking: SimServer, body: bytes, status: int, said: str, param: str | None
) -> None:
    """In vLLM's words and order."""
    answer = await post(speaking, TRANSCRIPTIONS, body)
    assert answer.status == status, answer.body
    error = answer.json["error"]
    assert said in error["message"]
    assert error["code"] == status
    if param is not None:
        assert error["param"] == param


async def test_a_translation_can_not_be_diarized(speaking: SimServer) -> None:
    body = form_of(("response_format", b"diarized_json"))
    answer = await post(speaking, TRANSLATIONS, body)
    assert "literal_error" in answer.json["error"]["message"]


async def test_other_models_do_not_have_the_routes(sim: SimServer) -> None:
    assert (await post(sim, TRANSCRIPTIONS, form_of())).status == 404
