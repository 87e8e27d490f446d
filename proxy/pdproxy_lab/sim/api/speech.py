"""`/v1/audio/transcriptions` and `/v1/audio/translations` of a speech model: a form with a file in,
text out. Bodies and events have vLLM's bytes.

Owns what is made of the audio: WAV alone is read, in pieces of 30 seconds, and the text depends on
its bytes. Source: vLLM 0.32.0 `entrypoints/speech_to_text`.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import time
import wave
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import Request, UploadFile
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from pdproxy_lab.sim.api import answer
from pdproxy_lab.sim.api.errors import RefusedRequest, response
from pdproxy_lab.sim.api.generation import Delta, LoadFailedError, SimPrompt, deltas
from pdproxy_lab.sim.api.protocol import CompletionBody
from pdproxy_lab.sim.api.sampling import sampling_params
from pdproxy_lab.sim.engine import SimEngine

MAX_FILE = 25 << 20
"""Bytes of a file: `VLLM_MAX_AUDIO_CLIP_FILESIZE_MB`."""
CLIP = 30
"""Seconds of audio that the model reads at once."""
TOKENS_PER_SECOND = 100
LANGUAGES = ("de", "en", "es", "fr", "ja", "zh")
_STREAM_OPTIONS = ("stream_include_usage", "stream_continuous_usage_stats")
_WHOLE = ("text", "json", "verbose_json", "diarized_json")
Format = Literal["json", "text", "srt", "verbose_json", "vtt"]


class SpeechBody(BaseModel):
    """What both routes share."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    file: UploadFile
    model: str | None = None
    prompt: str = ""
    use_beam_search: bool = False
    n: int = 1
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    temperature: float = 0.0
    watermarking: bool | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = 0.0
    repetition_penalty: float | None = None
    presence_penalty: float | None = 0.0
    language: str | None = None
    hotwords: str | None = None
    to_language: str | None = None
    stream: bool | None = False
    stream_include_usage: bool | None = False
    stream_continuous_usage_stats: bool | None = False
    max_completion_tokens: int | None = None
    vllm_xargs: dict[str, str | int | float | list[str | int | float]] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if isinstance(data.get("file"), str):
            raise RefusedRequest(
                "Expected 'file' to be a file-like object, not 'str'.",
                kind=HTTPStatus(422).phrase,
                status=422,
            )
        wanted = [name for name in _STREAM_OPTIONS if data.get(name, False)]
        if wanted and not data.get("stream", False):
            raise RefusedRequest(
                "Stream options can only be defined when `stream=True`.", wanted[0]
            )
        if isinstance(data.get("vllm_xargs"), str):
            try:
                data["vllm_xargs"] = json.loads(data["vllm_xargs"])
            except json.JSONDecodeError as error:
                raise RefusedRequest(
                    f"Failed to parse vllm_xargs. Must be valid JSON: {error}", "vllm_xargs"
                ) from error
        return data

    @property
    def kv_transfer_params(self) -> dict[str, Any] | None:
        """None: no field of these routes has a handle."""
        return None

    @property
    def shape(self) -> str:
        """The `response_format`."""
        raise NotImplementedError


class TranscriptionBody(SpeechBody):
    """The form of `/v1/audio/transcriptions`."""

    response_format: Format | Literal["diarized_json"] = "json"
    timestamp_granularities: Annotated[
        list[Literal["word", "segment"]], Field(alias="timestamp_granularities[]")
    ] = []

    @property
    def shape(self) -> str:
        """The `response_format`."""
        return self.response_format


class TranslationBody(SpeechBody):
    """The form of `/v1/audio/translations`."""

    response_format: Format = "json"

    @property
    def shape(self) -> str:
        """The `response_format`."""
        return self.response_format


async def speak(engine: SimEngine, body: SpeechBody, request: Request) -> Response:
    """Answer one request.

    Raises:
        Refused, EngineDeadError, LoadFailedError: for the caller to answer.
    """
    if body.file.size is not None and body.file.size > MAX_FILE:
        raise RefusedRequest(
            "Maximum file size exceeded", "audio_filesize_mb", value=body.file.size / 2**20
        )
    audio = await body.file.read()
    if body.stream and body.use_beam_search:
        raise RefusedRequest("Streaming is not currently supported with beam search")
    answer.check_model(body.model, engine)
    model, shape = body.model or engine.facts.model, body.shape
    if shape not in _WHOLE:
        raise RefusedRequest(
            "Currently only support response_format: `text`, `json`, `verbose_json` or "
            "`diarized_json`"
        )
    if shape == "diarized_json":
        raise RefusedRequest(f"Currently do not support diarized_json for {model}")
    if shape == "verbose_json" and body.stream:
        raise RefusedRequest("verbose_json format doesn't support streaming case")
    for language in (body.language, body.to_language or None):
        if language is not None and language not in LANGUAGES:
            raise RefusedRequest(
                f"Unsupported language: {language!r}.  Must be one of {list(LANGUAGES)}."
            )
    is_transcription = isinstance(body, TranscriptionBody)
    job = _Job(engine, body, request, model, _pieces(audio), is_transcription=is_transcription)
    if body.stream:
        return answer.streamed(job.events(), engine.facts.version)
    return await job.whole()


def _pieces(audio: bytes) -> list[tuple[bytes, float]]:
    """Return the audio's pieces, each with its seconds."""
    try:
        with wave.open(io.BytesIO(audio)) as opened:
            rate, found = opened.getframerate(), []
            while data := opened.readframes(CLIP * rate):
                found.append((data, len(data) / opened.getsampwidth() / opened.getnchannels()))
    except (wave.Error, EOFError, ValueError):
        found = []
    if not found:
        raise RefusedRequest("Invalid or unsupported audio file.")
    return [(data, frames / rate) for data, frames in found]


class _Job:
    """The answer to one request while it is generated."""

    def __init__(
        self,
        engine: SimEngine,
        body: SpeechBody,
        request: Request,
        model: str,
        pieces: Sequence[tuple[bytes, float]],
        *,
        is_transcription: bool,
    ) -> None:
        task = "transcribe" if is_transcription else "translate"
        self._object = "transcription.chunk" if is_transcription else "translation.chunk"
        self._engine, self._body, self._model = engine, body, model
        self._is_transcription = is_transcription
        self._id = f"{task}-{request.headers.get('x-request-id') or engine.new_id()}"
        self._created = int(time.time())
        self._pieces = pieces
        self._seconds = sum(seconds for _, seconds in pieces)
        self._language = body.language or "en"
        start = f"{task} {self._language} {body.prompt} "
        self._prompts = [
            engine.tokenizer.encode(start + hashlib.sha256(data).hexdigest()) for data, _ in pieces
        ]
        given: dict[str, Any] = {"seed": body.seed, "max_tokens": body.max_completion_tokens}
        given |= {"temperature": body.temperature, "top_p": body.top_p}
        self._completion = CompletionBody.model_validate({"prompt": "audio", **given})
        self._completion.max_tokens = body.max_completion_tokens

    def _run(self, number: int) -> AsyncGenerator[Delta, None]:
        engine, ids = self._engine, self._prompts[number]
        params = sampling_params(self._completion, ids, engine.facts, engine.tokenizer)
        name = self._id if len(self._prompts) == 1 else f"{self._id}-{number}"
        return deltas(
            engine, name, [SimPrompt(ids, "")], [params], self._completion, numbered=False
        )

    async def whole(self) -> Response:
        """Return the whole answer."""
        texts = []
        for number in range(len(self._prompts)):
            text = ""
            async with aclosing(self._run(number)) as found:
                async for delta in found:
                    if delta.finish_reason == "error":
                        raise LoadFailedError
                    text += delta.text
            texts.append(text)
        made: dict[str, Any] = {"text": " ".join(texts)}
        if self._body.shape == "verbose_json":
            verbose = {"duration": self._seconds, "language": self._language, **made}
            return response({**verbose, "segments": self._segments(texts), "words": None})
        if self._is_transcription:
            made["usage"] = {"type": "duration", "seconds": math.ceil(self._seconds)}
        return response(made)

    def _segments(self, texts: Sequence[str]) -> list[dict[str, Any]]:
        begins = [number * float(CLIP) for number in range(len(texts))]
        return [
            {
                "id": number,
                "avg_logprob": -0.5,
                "compression_ratio": 1.0,
                "end": begin + seconds,
                "no_speech_prob": None,
                "seek": int(begin),
                "start": begin,
                "temperature": self._body.temperature,
                "text": text,
                "tokens": self._engine.tokenizer.encode(text),
            }
            for number, (begin, text, (_, seconds)) in enumerate(
                zip(begins, texts, self._pieces, strict=True)
            )
        ]

    def _usage(self, prompt: int, completion: int) -> dict[str, object]:
        return answer.usage(prompt + math.ceil(self._seconds * TOKENS_PER_SECOND), completion)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream except `[DONE]`."""
        body = self._body
        at_end = self._engine.facts.enable_force_include_usage or body.stream_include_usage
        head = {"id": self._id, "object": self._object, "created": self._created}
        head["model"] = self._model
        prompt = made = 0
        for number, ids in enumerate(self._prompts):
            prompt, is_first = len(ids), True
            async with aclosing(self._run(number)) as found:
                async for delta in found:
                    if delta.finish_reason == "error":
                        raise LoadFailedError
                    made += len(delta.tokens)
                    text = delta.text
                    if number and is_first and text:
                        text, is_first = " " + text, False
                    if delta.finish_reason is None and not text:
                        continue
                    choice: dict[str, Any] = {"delta": {"content": text}}
                    if delta.finish_reason is not None:
                        choice["finish_reason"] = delta.finish_reason
                        choice["stop_reason"] = delta.stop_reason
                    chunk = head | {"choices": [choice]}
                    if at_end and body.stream_continuous_usage_stats:
                        chunk["usage"] = self._usage(prompt, made)
                    yield answer.event(chunk)
        if at_end:
            yield answer.event(head | {"choices": [], "usage": self._usage(prompt, made)})
