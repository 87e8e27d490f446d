"""An engine made of bytes: each path has an answer, or several in turn, or something to call and
then silence.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

Answer = bytes | Sequence[bytes] | Callable[[], None]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
TOKEN = b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'
DONE = b"data: [DONE]\n\n"


def page(content: bytes, status: bytes = b"200 OK") -> bytes:
    """Return an answer with a body."""
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (
        status,
        len(content),
        content,
    )


MODELS = page(b'{"data":[{"id":"m","max_model_len":2048}]}')


def metrics(
    running: int = 0,
    prompts: int = 0,
    cached: int = 0,
    started: int = 1,
    cache: str = "local_cache_hit",
) -> bytes:
    """Return a page of metrics."""
    lines = (
        f"process_start_time_seconds {started}",
        f'vllm:num_requests_running{{engine="0"}} {running}',
        (
            f'vllm:prompt_tokens_by_source_total{{engine="0",source="local_compute"}} '
            f"{prompts - cached}"
        ),
        f'vllm:prompt_tokens_by_source_total{{engine="0",source="{cache}"}} {cached}',
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="500",engine="0"} 1',
    )
    return page("\n".join(lines).encode() + b"\n")


@contextmanager
def scripted(**answers: Answer) -> Iterator[str]:
    """Yield the URL of a server in a thread of its own. Keys: `models`, `version`, `metrics`,
    `completions`; others are 404.
    """
    paths = {
        f"/v1/{name}" if name in ("models", "completions") else f"/{name}": one
        for name, one in answers.items()
    }
    ready, over = threading.Event(), threading.Event()
    urls: list[str] = []
    thread = threading.Thread(target=lambda: asyncio.run(_serve(paths, urls, ready, over)))
    thread.start()
    try:
        assert ready.wait(60)
        yield urls[0]
    finally:
        over.set()
        thread.join(60)


async def _serve(
    paths: Mapping[str, Answer], urls: list[str], ready: threading.Event, over: threading.Event
) -> None:
    asked: dict[str, int] = {}
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ", 2)[1].decode()
            lengths = [
                line[15:]
                for line in head.lower().split(b"\r\n")
                if line.startswith(b"content-length:")
            ]
            await reader.readexactly(int(lengths[0]) if lengths else 0)
            answer = paths.get(path, page(b"", b"404 Not Found"))
            if callable(answer):
                answer()
                await reader.read()  # until the client leaves
            elif not isinstance(answer, bytes):
                place = asked[path] = asked.get(path, -1) + 1
                answer = answer[min(place, len(answer) - 1)]
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    ready.set()
    await asyncio.to_thread(over.wait)
    server.close()
    for task in list(tasks):
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
