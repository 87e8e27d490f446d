"""Asks engines which KV connector they run, before there is any part of the proxy that depends on
it.

Owns the questions and what they leave. Each engine is asked for its version, its metrics and its
configuration. A prefill engine whose metrics show that this is safe is asked for the KV of one
token; what it keeps then is released through a decode engine, or ends with its lease. An engine
that does not answer is asked again until the deadline: engines load their models for minutes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

import msgspec

from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import EngineError, EngineRefusedError, OverloadedError
from pdproxy.transfer import detect, registry
from pdproxy.transfer.contract import NO_DISPATCH, Contract, Handle, HeldByPrefill
from pdproxy.transfer.detect import Observation
from pdproxy.transfer.signs import SignQuestion
from pdproxy.upstream.admin import EngineAdmin
from pdproxy.wire.engine import PrefillAnswer, prefill_answer
from pdproxy.wire.request import parse
from pdproxy.wire.route import Route

logger = logging.getLogger("pdproxy")

PAUSE = 1.0
"""Seconds between two attempts to ask an engine."""
FIRST_CONTACT = 1.0
"""Seconds until a decode engine is asked to release KV once more: it may have had to get to know
the prefill engine first.
"""
MAX_ANSWER = 1 << 20
"""Bytes of the answer to a request for one token."""
_PROMPT = "x"
_NO_KEY = (401, 403)


class AskedEngine(msgspec.Struct, frozen=True):
    """An engine that could be asked. `model` is one that it serves, `answer` a prefill answer that
    holds KV.
    """

    seen: Observation
    model: str | None = None
    answer: PrefillAnswer | None = None


class Detection:
    """One pool's engines.

    - `admin` asks them; `others` asks servers that are no engines, without any key.
    - `engines`: role by URL.
    - `seconds`: how long a completion of one token may take.
    - `bootstraps`: where a prefill engine's bootstrap server is, by the engine's URL.
    - `kv_hosts`: where decode engines reach a prefill engine, if not where it says itself.
    """

    def __init__(
        self,
        admin: EngineAdmin,
        others: EngineAdmin,
        engines: Mapping[str, str],
        clock: Clock,
        *,
        seconds: float,
        bootstraps: Mapping[str, str] | None = None,
        kv_hosts: Mapping[str, str | None] | None = None,
    ) -> None:
        self._admin = admin
        self._others = others
        self._engines = engines
        self._clock = clock
        self._seconds = seconds
        self._bootstraps = bootstraps or {}
        self._kv_hosts = kv_hosts or {}
        self.asked: dict[str, AskedEngine] = {}
        """What is known of the engines that have answered, by URL."""
        self.troubles: dict[str, str] = {}
        """Why the others have not, by URL."""

    async def ask_all(self, deadline: float) -> None:
        """Ask all engines until each has answered, or for `deadline` seconds."""
        asking = [
            asyncio.create_task(self._ask_until_answered(url), name=f"asks {url}")
            for url in self._engines
        ]
        try:
            with self._clock.within(deadline):
                await asyncio.gather(*asking)
        except TimeoutError:
            return
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    def seen(self) -> list[Observation]:
        """Return what the engines showed that have answered, in the order of the settings."""
        return [self.asked[url].seen for url in self._engines if url in self.asked]

    async def release(self, decodes: Sequence[str], contract: Contract) -> None:
        """Have decode engines release what prefill engines keep because of the questions. What
        fails ends with its lease.
        """
        holder = contract.holder
        if not isinstance(holder, HeldByPrefill):
            return
        decodes = [url for url in decodes if url in self.asked]
        await asyncio.gather(
            *(self._release(contract, holder, one, decodes) for one in self.asked.values())
        )

    async def _release(
        self, contract: Contract, holder: HeldByPrefill, asked: AskedEngine, decodes: Sequence[str]
    ) -> None:
        if asked.answer is None:
            return
        handle = contract.handle(
            parse(Route.COMPLETIONS, _body(asked.model, None)), asked.answer, NO_DISPATCH
        )
        if not isinstance(handle, Handle):
            return
        host = self._kv_hosts.get(asked.seen.url)
        if host is not None and contract.at_host is not None:
            handle = contract.at_host(handle, host)
        body = holder.release_body(asked.model, handle)
        for url in [other for other in decodes if other != asked.seen.url]:
            if await self._refuses(url, body):
                await asyncio.sleep(FIRST_CONTACT)
                await self._refuses(url, body)
                return

    async def _refuses(self, url: str, body: bytes) -> bool:
        try:
            await self._admin.post(
                url, Route.COMPLETIONS.path, body, timeout=self._seconds, max_bytes=MAX_ANSWER
            )
        except EngineRefusedError as error:
            return error.status == 400
        except (EngineError, OverloadedError):
            return False
        return False

    async def _ask_until_answered(self, url: str) -> None:
        while True:
            try:
                self.asked[url] = await self._ask(url, self._engines[url])
            except (EngineError, OverloadedError) as error:
                if self.troubles.get(url) != error.message:
                    logger.info("connector %s: %s: %s", registry.AUTO, url, error.message)
                self.troubles[url] = error.message
                if isinstance(error, EngineRefusedError) and error.status in _NO_KEY:
                    return  # that does not change by itself
                await asyncio.sleep(PAUSE)
                continue
            self.troubles.pop(url, None)
            return

    async def _ask(self, url: str, role: str) -> AskedEngine:
        admin = self._admin
        models = await admin.models(url)  # an engine that loads its model answers nothing yet
        model = next((card.id for card in models if card.parent is None), None)
        seen = Observation(
            url=url,
            role=role,
            version=await admin.version(url),
            metrics=await self._metrics(url),
            kv_connector=await admin.kv_connector(url),
            bootstrap=await self._bootstrap(url),
        )
        asks = detect.question(seen)
        if asks is None:
            return AskedEngine(seen, model)
        try:
            answer = await self._answer(url, model, asks)
        except EngineRefusedError as error:
            return AskedEngine(msgspec.structs.replace(seen, refusal=error.message), model)
        if answer is None:
            return AskedEngine(
                msgspec.structs.replace(seen, refusal="something else than a completion"), model
            )
        return AskedEngine(
            msgspec.structs.replace(seen, answer=bytes(answer.kv_transfer_params)), model, answer
        )

    async def _metrics(self, url: str) -> frozenset[str] | None:
        try:
            return await self._admin.metric_names(url, detect.metrics_to_look_for())
        except EngineRefusedError:
            return None  # it has none

    async def _bootstrap(self, url: str) -> bool | None:
        where = self._bootstraps.get(url) if detect.has_bootstrap() else None
        return await self._others.answers(where, "/query") if where is not None else None

    async def _answer(
        self, url: str, model: str | None, asks: SignQuestion
    ) -> PrefillAnswer | None:
        body = _body(model, asks.params)
        path, seconds = Route.COMPLETIONS.path, self._seconds
        return prefill_answer(
            await self._admin.post(url, path, body, timeout=seconds, max_bytes=MAX_ANSWER)
        )


def _body(model: str | None, params: bytes | None) -> bytes:
    """Return a completion of one token."""
    fields: dict[str, object] = {
        "prompt": _PROMPT,
        "max_tokens": 1,
        "stream": False,
        "temperature": 0,
    }
    if model is not None:
        fields["model"] = model
    if params is not None:
        fields["kv_transfer_params"] = msgspec.Raw(params)
    return msgspec.json.encode(fields)
