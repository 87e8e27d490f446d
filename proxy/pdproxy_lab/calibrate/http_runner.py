"""Carries out trials on an engine over HTTP, and asks it what it is. Every wait has a deadline;
nothing is sent twice.

Times are by `time.perf_counter`: the event loop's own time may have steps of a millisecond.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import aiohttp
import msgspec

from pdproxy.check.metrics import EXTERNAL, EngineMetrics, read
from pdproxy_lab.bench.client import session_of
from pdproxy_lab.bench.errors import one_line
from pdproxy_lab.bench.events import BrokenStream, ErrorEvent, EventReader
from pdproxy_lab.bench.prompts import PATHS, Prompts
from pdproxy_lab.bench.workload import Lengths, Planned
from pdproxy_lab.calibrate.trials import (
    BESIDE_AFTER,
    MergedError,
    OutOfTimeError,
    Seen,
    Trial,
    TrialError,
    TrialPrompt,
)

_MOST_BYTES = 8 << 20
"""Of an answer to a question about the engine."""
_ASK = 10.0
"""Seconds for such an answer."""
_IDS = Lengths(300, 4000)
"""Token ids of prompts: most tokenizers have text there, not control marks."""
_POLL = 0.1
_IDLE = 10.0
"""Seconds after a trial in which the engine must have no requests left."""
_BLOCKS = re.compile(r'^vllm:cache_config_info\{.*\bnum_gpu_blocks="(\d{1,9})"', re.MULTILINE)
_BYTES = re.compile(
    r"^vllm:nixl_bytes_transferred_sum\S* (\d{1,18}(?:\.\d{1,18})?(?:e\+?\d{1,2})?)$", re.MULTILINE
)
_ATTEMPTS = 3
"""Of a trial in which an event had several tokens: an API server that falls behind merges some now
and then.
"""
_AFTER_DONE = 1.0
"""Seconds that a server gets to end an answer after its end mark, so that the connection can be
used again.
"""


class BusyError(TrialError):
    """The engine has requests of others."""


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Card]


class _Version(msgspec.Struct):
    version: str = ""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine says of itself."""

    model: str
    max_model_len: int | None
    version: str
    block_size: int | None
    num_gpu_blocks: int | None


@dataclass(frozen=True, slots=True)
class Target:
    """The engine, and how it is asked."""

    url: str
    headers: Mapping[str, str]
    tls: ssl.SSLContext | None = None
    model: str | None = None
    """None: the first one that it lists."""
    timeout: float = 60.0
    """Seconds that one trial may take."""
    busy: bool = False
    """Whether requests of others are accepted."""
    ids: Lengths = _IDS


@dataclass(frozen=True, slots=True)
class Through:
    """Where the prompts beside streams are sent instead, with its key: a proxy in front of the
    engine and another one.
    """

    url: str
    key: str


class HttpRunner:
    """Carries out trials until `seconds` from now. `salt`: with another one, all prompts differ.
    Close it.
    """

    def __init__(
        self, target: Target, salt: str, seconds: float, through: Through | None = None
    ) -> None:
        self._target = target
        usual = {
            "content-type": "application/json",
            "accept": "text/event-stream",
            "accept-encoding": "identity",
        }
        self._engine = (target.url + PATHS["completions"], usual | dict(target.headers))
        self._beside_at = self._engine
        if through is not None:
            self._beside_at = (
                through.url + PATHS["completions"],
                usual | {"authorization": f"Bearer {through.key}"},
            )
        self._salt = salt
        self._session = session_of(target.tls)
        self._end = time.perf_counter() + seconds
        self._prompts: Prompts | None = None
        self._count = 0
        self.readable = True
        """Whether its metrics can be read."""
        self.prompt_tokens = 0
        """Tokens of all prompts that were sent."""
        self.through_tokens = 0
        """Those of them that were sent through the proxy."""
        self._before: EngineMetrics | None = None

    async def aclose(self) -> None:
        """Close its connections."""
        await self._session.close()

    async def info(self) -> EngineInfo:
        """Ask the engine what it is.

        Raises:
            TrialError: it can't be asked, or lists no model.
            BusyError: it has requests.
        """
        try:
            cards = msgspec.json.decode(await self._get("/v1/models"), type=_Models).data
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise TrialError(
                f"{self._target.url}/v1/models: the answer is no list of models"
            ) from None
        named = [card for card in cards if self._target.model in (None, card.id)]
        if not named or not 0 < len(named[0].id) <= 256:
            raise TrialError(
                f"{self._target.url}: it lists no model"
                + (" of this name" if self._target.model else "")
            )
        version, page = "", ""
        with contextlib.suppress(TrialError, msgspec.MsgspecError, ValueError, RecursionError):
            version = one_line(
                msgspec.json.decode(await self._get("/version"), type=_Version).version, 40
            )
        try:
            page = (await self._get("/metrics")).decode("utf-8", "replace")
        except TrialError:
            self.readable = False
        self._before = read(page) if page else None
        self.readable = self._before is not None and self._before.vllm
        if self.readable:
            await self._idle(0.0)
        blocks = _BLOCKS.search(page)
        self._prompts = Prompts(
            "completions", named[0].id, self._salt, self._target.ids, {"temperature": 0}
        )
        length = named[0].max_model_len
        size = self._before.block_size if self._before is not None else None
        return EngineInfo(
            model=one_line(named[0].id, 100),
            max_model_len=length if length is not None and length > 0 else None,
            version=version,
            block_size=size if size and size > 0 else None,
            num_gpu_blocks=int(blocks[1]) or None if blocks else None,
        )

    async def others(self, sent: int | None = None, *, pulls: bool = False) -> str | None:
        """Return what shows that requests of others were there, or that prompts were found in a
        cache; None: nothing does.

        `sent`: tokens of all prompts that it was sent, None: by this runner alone. `pulls`: whether
        KV comes from another engine.
        """
        sent = self.prompt_tokens if sent is None else sent
        if self._before is None or not self.readable:
            return None
        after = read((await self._get("/metrics")).decode("utf-8", "replace"))
        if after is None or not after.by_source or sent == 0:
            return None
        if after.started != self._before.started:
            return "the engine was restarted meanwhile"
        moved = {
            name: after.by_source[name] - self._before.by_source.get(name, 0.0)
            for name in after.by_source
        }
        foreign = sum(moved.values()) - sent
        if foreign > 0.01 * sent:
            return f"others have sent {foreign:.0f} prompt tokens meanwhile"
        computed = moved.get("local_compute", sum(moved.values())) + (
            moved.get(EXTERNAL, 0.0) if pulls else 0.0
        )
        cached = sum(moved.values()) - computed
        if cached > 0.01 * sent:
            return f"{cached:.0f} prompt tokens were not computed: a cache had them"
        return None

    async def transferred(self) -> tuple[float, float] | None:
        """Return bytes of KV and prompt tokens that came from other engines since its start; None:
        its metrics don't show it.
        """
        if not self.readable:
            return None
        page = (await self._get("/metrics")).decode("utf-8", "replace")
        found, sums = read(page), [float(value) for value in _BYTES.findall(page)]
        return (sum(sums), found.external) if found is not None and sums else None

    async def __call__(self, trial: Trial) -> Seen:
        """Carry out a trial.

        Raises:
            TrialError: it failed.
            BusyError: the engine has requests of others.
            OutOfTimeError: the time for all trials is over.
        """
        for _ in range(_ATTEMPTS - 1):
            with contextlib.suppress(MergedError):
                return await self._once(trial)
        return await self._once(trial)

    async def _once(self, trial: Trial) -> Seen:
        if self.readable:
            await self._idle(_IDLE)
        left = self._end - time.perf_counter()
        if left <= 0:
            raise OutOfTimeError("the time is over")
        timeout = min(self._target.timeout, left)
        try:
            async with asyncio.timeout(timeout):
                return await self._carry_out(trial)
        except TimeoutError:
            if timeout == left:
                raise OutOfTimeError("the time is over") from None
            raise TrialError(f"{trial.name}: no whole answer within {timeout:g} s") from None
        except (BrokenStream, ErrorEvent) as error:
            raise TrialError(f"{trial.name}: {error}") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise TrialError(f"{trial.name}: {error or type(error).__name__}") from None

    async def _carry_out(self, trial: Trial) -> Seen:
        tasks: list[asyncio.Task[list[float]]] = []
        started = asyncio.Event()
        waiting = trial.streams

        def on_token(count: int) -> None:
            nonlocal waiting
            # Several events may come at once.
            if count >= BESIDE_AFTER:
                waiting -= 1
                if waiting == 0:
                    started.set()

        def send(tokens: int, output: int, notify: Callable[[int], None] | None) -> None:
            self.prompt_tokens += tokens
            body = self._body(tokens, output)
            tasks.append(
                asyncio.create_task(self._send(self._engine, body, tokens, output, notify))
            )

        try:
            for _ in range(trial.streams):
                send(trial.prompt_tokens, trial.output_tokens, on_token)
            sent: list[float] = []
            if trial.beside:
                bodies = [(self._body(tokens, 1), tokens) for tokens in trial.beside]
                if trial.streams:
                    await self._first_of(started, tasks)
                for body, tokens in bodies:
                    self.prompt_tokens += tokens
                    self.through_tokens += tokens if self._beside_at is not self._engine else 0
                    sent.append(time.perf_counter())
                    tasks.append(
                        asyncio.create_task(self._send(self._beside_at, body, tokens, 1, None))
                    )
            found = [await task for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
        prompts = [
            TrialPrompt(at, times[0])
            for at, times in zip(sent, found[trial.streams :], strict=True)
        ]
        return Seen(tuple(tuple(times) for times in found[: trial.streams]), tuple(prompts))

    @staticmethod
    async def _first_of(started: asyncio.Event, tasks: list[asyncio.Task[list[float]]]) -> None:
        """Wait for an event; a task that fails before ends the wait."""
        waiting = asyncio.ensure_future(started.wait())
        try:
            pending = {waiting, *tasks}
            while not waiting.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            waiting.cancel()
            await asyncio.wait([waiting])

    def _body(self, tokens: int, output: int) -> bytes:
        assert self._prompts is not None, "info comes first"
        self._count += 1
        return self._prompts.body(self._count, Planned(0.0, tokens, output))

    async def _send(
        self,
        where: tuple[str, Mapping[str, str]],
        body: bytes,
        tokens: int,
        output: int,
        notify: Callable[[int], None] | None,
    ) -> list[float]:
        """Return when each token came."""
        reader, told = EventReader(output + 1), False
        url, headers = where
        async with self._session.post(
            url, data=body, headers=headers, allow_redirects=False
        ) as answer:
            if answer.status != 200:
                text = (await answer.content.read(4096)).decode("utf-8", "replace")
                raise TrialError(
                    f"a prompt of {tokens} tokens: status {answer.status}: {one_line(text, 200)}"
                )
            if answer.content_type != "text/event-stream":
                raise BrokenStream(f"content-type is {one_line(answer.content_type, 100)}")
            async for chunk in answer.content.iter_any():
                reader.feed(chunk, time.perf_counter())
                if notify is not None and not told and len(reader.times) >= BESIDE_AFTER:
                    told = True
                    notify(len(reader.times))
                if reader.done:
                    break
            reader.end()
            with contextlib.suppress(TimeoutError, aiohttp.ClientError):
                async with asyncio.timeout(_AFTER_DONE):
                    async for _ in answer.content.iter_any():
                        pass
        if reader.prompt_tokens is not None and reader.prompt_tokens != tokens:
            raise TrialError(
                f"a prompt of {tokens} tokens had {reader.prompt_tokens} by the engine's count "
                f"(--token-ids)"
            )
        if reader.output_tokens not in (None, output):
            raise TrialError(
                f"an answer of {output} tokens had {reader.output_tokens} by the engine's count "
                f"(does it heed ignore_eos?)"
            )
        if len(reader.times) != output:
            raise MergedError(
                f"{output} tokens came in {len(reader.times)} events: the time of each one is "
                f"not known"
            )
        return reader.times

    async def _idle(self, seconds: float) -> None:
        """Wait until the engine has no requests."""
        if self._target.busy:
            return
        end = min(time.perf_counter() + seconds, self._end)
        while True:
            found = read((await self._get("/metrics")).decode("utf-8", "replace"))
            if found is None or not found.busy:
                return
            if seconds and time.perf_counter() >= self._end:
                raise OutOfTimeError("the time is over")
            if time.perf_counter() >= end:
                count = f"{found.running:.0f} running and {found.waiting:.0f} waiting"
                raise BusyError(
                    f"the engine has requests of others: {count} (--busy measures all the same)"
                )
            await asyncio.sleep(_POLL)

    async def _get(self, path: str) -> bytes:
        url = self._target.url + path
        content = b""
        try:
            async with (
                asyncio.timeout(_ASK),
                self._session.get(
                    url,
                    headers={**self._target.headers, "accept-encoding": "identity"},
                    allow_redirects=False,
                ) as answer,
            ):
                async for chunk in answer.content.iter_any():
                    content += chunk
                    if len(content) > _MOST_BYTES:
                        raise TrialError(f"{url}: the answer is longer than {_MOST_BYTES} bytes")
                if answer.status != 200:
                    raise TrialError(f"{url}: status {answer.status}")
        except TimeoutError:
            raise TrialError(f"{url}: no answer within {_ASK:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise TrialError(f"{url}: {error or type(error).__name__}") from None
        return content
