"""Questions to engines outside the data path: health, models, version, tokenize, metrics. On aiohttp.

Owns one aiohttp session. Every question has a deadline; what goes wrong becomes an `EngineError`.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from pdproxy.kit.errors import (
    EngineError,
    EngineRefusedError,
    EngineTimeoutError,
    EngineTlsError,
    EngineUnreachableError,
    OverloadedError,
    Wait,
)
from pdproxy.tokens.ids import TokenIds
from pdproxy.upstream.client import OUR_LIMITS, tls_words
from pdproxy.wire.model import LONGEST_MODEL


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One entry of an engine's `/v1/models`. `parent` names an adapter's base model."""

    id: str
    root: str | None
    parent: str | None


@dataclass(frozen=True, slots=True)
class Scrape:
    """What we read of an engine's `/metrics` (names of vLLM 0.32.0). Token counts are since the engine's start.

    `by_source`: prompt tokens by where their KV came from; empty where the engine does not say.
    """

    started: float
    block_size: int | None
    running: float
    waiting: float
    kv_usage: float
    by_source: Mapping[str, float]


_T = TypeVar("_T")


NO_METRICS = Scrape(0.0, None, 0.0, 0.0, 0.0, {})
"""What is read of an engine that shows no metrics."""


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Card]


class _Version(msgspec.Struct):
    version: str = ""


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _TokenIds(msgspec.Struct):
    tokens: msgspec.Raw
    count: int


class EngineAdmin:
    """Asks engines about themselves. `timeout` in seconds bounds each question.

    `key` and `tls` are asked with an engine's URL at each question: its bearer token, and the context of TLS with it.
    """

    def __init__(
        self,
        *,
        timeout: float,
        key: Callable[[str], str | None] = lambda _: None,
        tls: Callable[[str], ssl.SSLContext | None] = lambda _: None,
    ) -> None:
        self._timeout = timeout
        self._key = key
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    async def healthy(self, url: str) -> None:
        """Return if the engine says that it is alive; raise EngineError otherwise."""
        await self._get(url, "/health")

    async def models(self, url: str) -> list[ModelCard]:
        """Return the models an engine serves, but for names that are longer than any request's are read here."""
        found = self._read(url, "/v1/models", await self._get(url, "/v1/models"), _Models)
        return [ModelCard(card.id, card.root, card.parent) for card in found.data if len(card.id) <= LONGEST_MODEL]

    async def models_body(self, url: str, authorization: str | None = None) -> bytes:
        """Return the engine's own answer to `/v1/models`, asked with this header ("": with none) in place of our key."""
        return await self._request("GET", url, "/v1/models", None, authorization)

    async def version(self, url: str) -> str:
        """Return the engine's version, "" if it does not say."""
        return self._read(url, "/version", await self._get(url, "/version"), _Version).version

    async def tokenize(self, url: str, body: Mapping[str, object]) -> tuple[int, ...]:
        """Return the token ids of a prompt or a chat."""
        answer = await self._request("POST", url, "/tokenize", msgspec.json.encode(body))
        return tuple(self._read(url, "/tokenize", answer, _Tokens).tokens)

    async def token_ids(
        self, url: str, body: bytes, *, timeout: float | None = None, authorization: str | None = None
    ) -> TokenIds:
        """Return the token ids for a body of `/tokenize`, within `timeout` seconds (None: those of every question).

        Asked with this header ("": with none) in place of our key.
        """
        answer = await self._request("POST", url, "/tokenize", body, authorization, timeout=timeout)
        read = self._read(url, "/tokenize", answer, _TokenIds)
        return TokenIds(bytes(read.tokens), read.count)

    async def scrape(self, url: str) -> Scrape:
        """Return an engine's load and counters."""
        return read_metrics(await self._get(url, "/metrics"))

    async def close(self) -> None:
        """Close the session."""
        if self._session is not None:
            await self._session.close()

    async def _get(self, url: str, path: str) -> bytes:
        return await self._request("GET", url, path, None)

    async def _request(
        self,
        method: str,
        url: str,
        path: str,
        body: bytes | None,
        authorization: str | None = None,
        *,
        timeout: float | None = None,
    ) -> bytes:
        if self._session is None:
            jar = aiohttp.DummyCookieJar()  # engines set none, and to look for them costs at each question
            self._session = aiohttp.ClientSession(trust_env=False, cookie_jar=jar)
        headers = {"content-type": "application/json"} if body is not None else {}
        if authorization is not None:
            headers |= {"authorization": authorization} if authorization else {}
        elif (key := self._key(url)) is not None:
            headers["authorization"] = f"Bearer {key}"
        tls = self._tls(url)
        try:
            # Not redirected: the key is for this engine.
            async with self._session.request(
                method,
                url + path,
                data=body,
                headers=headers,
                ssl=True if tls is None else tls,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=timeout or self._timeout),
            ) as answer:
                content = await answer.read()
        except TimeoutError:
            raise EngineTimeoutError(
                f"{path} did not answer in {timeout or self._timeout:g} s",
                wait=Wait.PROBE if timeout is None else Wait.TOKENIZE,
            ) from None
        except aiohttp.ClientConnectorCertificateError as error:
            raise EngineTlsError(certificate_words(error.certificate_error)) from None
        except aiohttp.ClientConnectorSSLError as error:
            raise EngineTlsError(certificate_words(error.os_error)) from None
        except aiohttp.ClientConnectorError as error:
            if error.errno in OUR_LIMITS:
                raise OverloadedError(f"pdproxy can open no more connections: {error.strerror}") from None
            raise EngineUnreachableError(f"no connection: {error.strerror or error}") from None
        except aiohttp.ServerDisconnectedError:
            # vLLM's server says no more than that to a client without the certificate that it wants.
            hint = "" if tls is None else ": does it want a certificate of ours (tls.certificate)?"
            raise EngineError(f"{path}: closed the connection{hint}") from None
        except ssl.SSLError as error:
            raise EngineTlsError(tls_words(error)) from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(f"{path}: {type(error).__name__}: {error}") from None
        if answer.status != 200:
            hint = ": set auth.engine_api_key, or the node's api_key" if answer.status == 401 else ""
            raise EngineRefusedError(f"{path} answered {answer.status}{hint}", status=answer.status, body=b"")
        return content

    def _read(self, url: str, path: str, content: bytes, kind: type[_T]) -> _T:
        try:
            return msgspec.json.decode(content, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise EngineError(f"{path} answered something else: {error}") from None


def certificate_words(error: Exception) -> str:
    """Say why an engine's certificate is not trusted, from what aiohttp says of it."""
    return tls_words(error) if isinstance(error, ssl.SSLError) else f"no TLS: {error}"


def read_metrics(page: bytes) -> Scrape:
    """Read the Prometheus text of an engine; raise EngineError if what is read of it is none.

    A page is 60 KB, of which a dozen lines are read, and a fleet has hundreds of pages: these lines are found, and no other is
    looked at.
    """
    found: dict[bytes, list[tuple[dict[str, str], float]]] = {name: [] for name in _READ}
    text = b"\n" + page
    for name, samples in found.items():
        at = text.find(b"\n" + name)
        while at >= 0:
            end = text.find(b"\n", at + 1)
            line = text[at + 1 : end if end >= 0 else len(text)]
            if line[len(name) : len(name) + 1] in b"{ \t":
                samples.append(_sample(line))
            at = text.find(b"\n" + name, at + 1)
    by_source: dict[str, float] = {}
    for labels, value in found[_BY_SOURCE]:
        source = labels.get("source", "")
        by_source[source] = by_source.get(source, 0.0) + value
    size = next((labels.get("block_size", "") for labels, _ in reversed(found[_CACHE])), "")
    return Scrape(
        started=next((value for _, value in reversed(found[_STARTED])), 0.0),
        block_size=int(size) if size.isdigit() else None,
        running=sum(value for _, value in found[_RUNNING]),
        waiting=sum(value for _, value in found[_WAITING]),
        kv_usage=max((value for _, value in found[_USAGE]), default=0.0),
        by_source=by_source,
    )


_READ = (
    _STARTED := b"process_start_time_seconds",
    _RUNNING := b"vllm:num_requests_running",
    _WAITING := b"vllm:num_requests_waiting",
    _USAGE := b"vllm:kv_cache_usage_perc",
    _BY_SOURCE := b"vllm:prompt_tokens_by_source_total",
    _CACHE := b"vllm:cache_config_info",
)


def _sample(line: bytes) -> tuple[dict[str, str], float]:
    """Return the labels and the value of a line."""
    try:
        (family,) = text_string_to_metric_families(line.decode("utf-8", "replace") + "\n")
        (sample,) = family.samples
    except (ValueError, KeyError, IndexError) as error:
        raise EngineError(f"/metrics is not in Prometheus text format: {error}") from None
    return sample.labels, sample.value
