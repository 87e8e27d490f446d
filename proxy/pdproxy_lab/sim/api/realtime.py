"""`/v1/realtime` of a model of live speech: a WebSocket on which audio comes and text goes. Events,
texts of errors and the order of all checks are vLLM's.

Owns what is made of the audio: a second of it becomes `TOKENS` tokens, which depend on its bytes,
and so does what is left at its end. Source: vLLM 0.32.0 `entrypoints/speech_to_text/realtime`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import logging
import re
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from secrets import token_hex
from typing import Any, Literal

import msgspec
from fastapi import WebSocket
from pydantic import BaseModel, ConfigDict
from starlette.websockets import WebSocketDisconnect

from pdproxy_lab.sim import since
from pdproxy_lab.sim.api.generation import LoadFailedError, SimPrompt, deltas
from pdproxy_lab.sim.api.protocol import CompletionBody
from pdproxy_lab.sim.api.sampling import sampling_params
from pdproxy_lab.sim.engine import SimEngine
from pdproxy_lab.sim.failed import INTERNAL
from pdproxy_lab.sim.request import EngineDeadError

logger = logging.getLogger("pdproxy")

RATE, SAMPLE = 16_000, 2
"""Samples in a second, and bytes of each: PCM16, mono."""
TOKENS = 4
"""Of a second of audio: a model's `realtime_max_tokens`."""
MAX_AUDIO = 25 << 20
"""Samples of one event: vLLM compares `VLLM_MAX_AUDIO_CLIP_FILESIZE_MB` with these."""
_HIDDEN = (
    (re.compile(r" at 0x[0-9a-fA-F]+>"), ">"),
    (re.compile(r"/(?:home|usr|opt|var|tmp|root|lib|mnt|srv)(?:/[\w.\-]+)+"), "<path>"),
    (re.compile(r"(?:/[\w\-]+)+/[\w\-]+\.\w+"), "<path>"),
)


class InputAudioBufferAppend(BaseModel):
    """More audio. The name stands in the text of an error."""

    model_config = ConfigDict(extra="allow")

    type: Literal["input_audio_buffer.append"] = "input_audio_buffer.append"
    audio: str


class InputAudioBufferCommit(BaseModel):
    """The audio is to be written down; `final`: it is complete."""

    model_config = ConfigDict(extra="allow")

    type: Literal["input_audio_buffer.commit"] = "input_audio_buffer.commit"
    final: bool = False


class Realtime:
    """One WebSocket."""

    def __init__(self, engine: SimEngine, websocket: WebSocket) -> None:
        self._engine = engine
        self._websocket = websocket
        self._id = f"ws-{token_hex(16)}"
        self._audio: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._generating: asyncio.Task[None] | None = None
        self._is_validated = False

    async def serve(self) -> None:
        """Serve it until the client leaves."""
        await self._websocket.accept()
        created = {"id": f"sess-{token_hex(16)}", "created": int(time.time())}
        await self._send({"type": "session.created", **created})
        try:
            while True:
                message = await self._websocket.receive_text()
                try:
                    await self._take(json.loads(message))
                except json.JSONDecodeError:
                    await self._fail("Invalid JSON", "invalid_json")
                except Exception as error:
                    await self._fail(_shown(str(error)), "processing_error")
        except WebSocketDisconnect:
            pass
        except Exception as error:  # a binary message, for one: vLLM logs it, and ends
            logger.debug("a WebSocket ended: %r", error)
        finally:
            self._audio.put_nowait(None)
            if self._generating is not None:
                self._generating.cancel()
                await asyncio.gather(self._generating, return_exceptions=True)

    async def _take(self, event: Any) -> None:
        kind = event.get("type")
        if kind == "session.update":
            model = event.get("model")
            if model is None:
                await self._fail("Missing required field: model", "invalid_event")
            elif model and model != self._engine.facts.model:
                await self._fail(f"The model `{model}` does not exist.", "model_not_found")
            else:
                self._is_validated = True
        elif kind == "input_audio_buffer.append":
            await self._append(InputAudioBufferAppend(**event))
        elif kind == "input_audio_buffer.commit":
            if not self._is_validated:
                text = (
                    "Model not validated. Make sure to validate the model by sending a "
                    "session.update event."
                )
                await self._fail(text, "model_not_validated")
            elif InputAudioBufferCommit(**event).final:
                self._audio.put_nowait(None)
            elif self._generating is None or self._generating.done():
                self._generating = asyncio.create_task(self._generate())
        else:
            await self._fail(f"Unknown event type: {kind}", "unknown_event")

    async def _append(self, event: InputAudioBufferAppend) -> None:
        try:
            audio = base64.b64decode(event.audio)
        except ValueError:
            audio = b""
        if not audio or len(audio) % SAMPLE or len(audio) // SAMPLE > MAX_AUDIO:
            await self._fail("Invalid audio data", "invalid_audio")
        else:
            self._audio.put_nowait(audio)

    async def _seconds(self) -> AsyncGenerator[bytes, None]:
        """Yield the audio of each second, and what is left at the end."""
        found, size = bytearray(), RATE * SAMPLE
        while (audio := await self._audio.get()) is not None:
            found += audio
            while len(found) >= size:
                yield bytes(found[:size])
                del found[:size]
        if found:
            yield bytes(found)

    async def _generate(self) -> None:
        text, prompt, completion = "", 0, 0
        try:
            async with aclosing(self._seconds()) as seconds:
                async for audio in seconds:
                    ids = self._engine.tokenizer.encode(hashlib.sha256(audio).hexdigest())
                    prompt = prompt or len(ids)
                    async for piece, made in self._run(ids):
                        text += piece
                        completion += made
                        await self._send({"type": "transcription.delta", "delta": piece})
            usage = {
                "prompt_tokens": prompt,
                "total_tokens": prompt + completion,
                "completion_tokens": completion,
                "prompt_tokens_details": None,
                "completion_tokens_details": None,
            }
            await self._send({"type": "transcription.done", "text": text, "usage": usage})
            while not self._audio.empty():
                self._audio.get_nowait()
        except EngineDeadError:
            await self._failed(since.dead_message(self._engine.facts.version))
        except LoadFailedError:
            await self._failed(INTERNAL)

    async def _run(self, ids: list[int]) -> AsyncGenerator[tuple[str, int], None]:
        """Yield the pieces of text of some audio, each with its tokens."""
        engine = self._engine
        if engine.dead:
            raise EngineDeadError
        body = CompletionBody.model_validate(
            {"prompt": "audio", "max_tokens": TOKENS, "temperature": 0.0}
        )
        params = sampling_params(body, ids, engine.facts, engine.tokenizer)
        name = f"rt-{self._id}-{engine.new_id()}"
        found = deltas(engine, name, [SimPrompt(ids, "")], [params], body, numbered=False)
        async with aclosing(found) as made:
            async for delta in made:
                if delta.finish_reason == "error":
                    raise LoadFailedError
                yield delta.text, len(delta.tokens)

    async def _send(self, event: dict[str, Any]) -> None:
        await self._websocket.send_text(msgspec.json.encode(event).decode())

    async def _fail(self, text: str, code: str) -> None:
        await self._send({"type": "error", "error": text, "code": code})

    async def _failed(self, text: str) -> None:
        with contextlib.suppress(Exception):  # the client may have left
            await self._fail(text, "processing_error")


def _shown(text: str) -> str:
    for pattern, replacement in _HIDDEN:
        text = pattern.sub(replacement, text)
    return text.strip()
