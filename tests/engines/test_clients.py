"""Common clients of an OpenAI server: OpenAI's Python library, curl, and vLLM's serving
benchmark.
"""

import asyncio
import json
import secrets
import shutil
import subprocess
from pathlib import Path
from typing import Any, Literal

import pytest
from openai import AsyncOpenAI, NotFoundError, OpenAI
from pydantic import BaseModel

from .bench import bench_serve
from .client import ask
from .engine import MODEL
from .fleet import Fleet
from .proxy import Proxy
from .shapes import CALL, CHAT, COMPLETIONS, TOOLS, question, story

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300, func_only=True)]


@pytest.fixture
def openai(proxy_2p2d: Proxy) -> OpenAI:
    """OpenAI's client for the proxy, without retries, which could hide the proxy's errors."""
    return OpenAI(base_url=f"{proxy_2p2d.url}/v1", api_key="unused", max_retries=0, timeout=120)


async def _plain_text(fleet: Fleet, path: str, body: dict[str, Any]) -> str:
    return (await ask(fleet.plain.url, path, body)).text


async def test_openai_chat(fleet: Fleet, openai: OpenAI) -> None:
    """A chat and the same one streamed give the plain engine's text, with usage."""
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": question(secrets.token_hex(6)),
        "temperature": 0,
        "max_tokens": 16,
    }
    text = await _plain_text(fleet, CHAT, body)
    whole = await asyncio.to_thread(openai.chat.completions.create, **body)  # type: ignore[arg-type]
    assert whole.choices[0].message.content == text
    assert whole.usage
    assert whole.usage.completion_tokens == 16

    def stream() -> list[Any]:
        return list(
            openai.chat.completions.create(
                **body, stream=True, stream_options={"include_usage": True}
            )
        )

    chunks = await asyncio.to_thread(stream)
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    )
    assert chunks[-1].usage.completion_tokens == 16
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"


async def test_openai_async_completions(fleet: Fleet, proxy_2p2d: Proxy) -> None:
    """Eight asynchronous streams at once: each text belongs to its own prompt."""
    bodies = [
        {"model": MODEL, "prompt": story(secrets.token_hex(6)), "temperature": 0, "max_tokens": 12}
        for _ in range(8)
    ]
    async with AsyncOpenAI(
        base_url=f"{proxy_2p2d.url}/v1", api_key="unused", max_retries=0
    ) as client:

        async def one(body: dict[str, Any]) -> str:
            stream = await client.completions.create(**body, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

        texts = await asyncio.gather(*(one(body) for body in bodies))
    assert texts == [await _plain_text(fleet, COMPLETIONS, body) for body in bodies]


async def test_openai_tools(openai: OpenAI) -> None:
    """A tool call arrives as a tool call, whole and streamed."""
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": question(secrets.token_hex(6)),
        "temperature": 0,
        "tools": TOOLS,
    }
    body |= {"max_tokens": 120, "extra_body": {"structured_outputs": {"regex": CALL}}}
    whole = await asyncio.to_thread(openai.chat.completions.create, **body)  # type: ignore[arg-type]
    assert whole.choices[0].finish_reason == "tool_calls"
    calls = whole.choices[0].message.tool_calls
    assert calls
    call = calls[0].function  # type: ignore[union-attr]
    assert call.name == "forecast"

    def stream() -> list[Any]:
        return list(openai.chat.completions.create(**body, stream=True))

    deltas = [chunk.choices[0].delta for chunk in await asyncio.to_thread(stream)]
    functions = [part.function for delta in deltas for part in delta.tool_calls or ()]
    assert [function.name for function in functions if function.name] == ["forecast"]
    assert json.loads("".join(function.arguments or "" for function in functions)) == json.loads(
        call.arguments
    )


class Trip(BaseModel):
    """The class that the answer must have."""

    abroad: bool
    city: Literal["Oslo", "Rome"]


async def test_openai_structured_output(openai: OpenAI) -> None:
    """`parse` returns an object of the class: the grammar reached the decode engine."""
    answer = await asyncio.to_thread(
        openai.chat.completions.parse,  # type: ignore[arg-type]
        model=MODEL,
        messages=question(secrets.token_hex(6)),
        response_format=Trip,
        temperature=0,
        max_tokens=60,
    )
    assert isinstance(answer.choices[0].message.parsed, Trip)


async def test_openai_error(openai: OpenAI) -> None:
    """An engine's 404 arrives as the library's own exception, with the engine's text."""
    with pytest.raises(NotFoundError, match="no-such-model"):
        await asyncio.to_thread(
            openai.chat.completions.create,  # type: ignore[arg-type]
            model="no-such-model",
            messages=[{"role": "user", "content": "hello"}],
        )


async def test_openai_models(openai: OpenAI) -> None:
    """The model list names the engines' model, once."""
    assert [model.id for model in (await asyncio.to_thread(openai.models.list)).data] == [MODEL]


@pytest.mark.skipif(not shutil.which("curl"), reason="curl isn't installed")
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_curl(fleet: Fleet, proxy_2p2d: Proxy, streamed: bool) -> None:
    """curl gets status 200, the right text and, if streamed, events up to [DONE]; it ends by itself
    with code 0.
    """
    body = {
        "model": MODEL,
        "prompt": story(secrets.token_hex(6)),
        "temperature": 0,
        "max_tokens": 10,
        "stream": streamed,
    }
    command = [
        "curl",
        "-sSN",
        "--fail",
        "-m",
        "100",
        f"{proxy_2p2d.url}{COMPLETIONS}",
        "-d",
        json.dumps(body),
    ]
    command += ["-H", "Content-Type: application/json"]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    text = await _plain_text(fleet, COMPLETIONS, body)
    if streamed:
        events = [event.removeprefix("data: ") for event in done.stdout.split("\n\n") if event]
        assert events.pop() == "[DONE]"
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == text
    else:
        assert json.loads(done.stdout)["choices"][0]["text"] == text


async def test_vllm_bench_serve(fleet: Fleet, proxy_2p2d: Proxy, tmp_path: Path) -> None:
    """vLLM's own load generator finishes 30 random requests through the proxy; none fails, all
    tokens arrive.
    """
    built = fleet.launcher.built
    measured = await bench_serve(
        built, proxy_2p2d.url, COMPLETIONS, tmp_path, requests=30, tokens=16, clients=8
    )
    assert (measured["completed"], measured["total_output_tokens"]) == (30, 30 * 16)
