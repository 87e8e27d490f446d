"""Requests to engines outside the data path: health, models, version, tokenize, metrics. On
aiohttp.

Owns one aiohttp session. Every request has a deadline, and a limit on its answer. Every failure
becomes an `EngineError`, with quotes of the engine's answer truncated.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import aiohttp
import msgspec

from pdproxy.kit.engine_networks import USUAL, EngineNetworks
from pdproxy.kit.errors import (
    ConnectionLostError,
    EngineError,
    EngineRefusedError,
    EngineTimeoutError,
    EngineTlsError,
    EngineUnreachableError,
    Wait,
    no_more_files,
)
from pdproxy.kit.frames import drop_traceback
from pdproxy.kit.text import truncate
from pdproxy.settings.limits import Deadlines
from pdproxy.tokens.ids import TokenIds
from pdproxy.upstream import reach
from pdproxy.upstream.answer_budget import AnswerBudget, BudgetShare
from pdproxy.upstream.client import LOCAL_ERRORS, describe_os, describe_tls
from pdproxy.upstream.metrics_page import MAX_PAGE, Scrape, names_in, read_metrics
from pdproxy.wire.bootstrap import MAX_ANSWER, BootstrapAnswerError, Ranks, read_ranks
from pdproxy.wire.kv_events import Sources, read_sources
from pdproxy.wire.model import MAX_MODEL_NAME

MAX_SHORT_ANSWER = 64 << 10
"""Bytes of a version, or of a short prompt's text or ids."""
MAX_MODEL_LIST = 4 << 20
"""Bytes of a list of models, which has 600 bytes for each."""
MAX_SERVER_INFO = 4 << 20
"""Bytes of an engine's configuration with its environment: tens of KB."""
MAX_MODELS = 4096
"""Models and adapters of an engine."""
_MAX_NAME = 1024
_OBJECTS_PER_MODEL = 2
"""JSON objects of a model in such a list, in vLLM: itself and its permissions."""
_IDS_PER_BYTE = 8
_IDS = 1 << 20
"""Bytes of a prompt's ids. An id has up to eight bytes with its comma, and is made of one byte of
the request or more. A chat template and images add ids.
"""
_MOST_IDS = 32 << 20
"""Bytes of a prompt's ids, however long the request: four million ids."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One entry of an engine's `/v1/models`. `parent` names an adapter's base model.

    `max_model_len`: how many tokens a prompt and its answer may have together, None if the engine
    does not report it.
    """

    id: str
    root: str | None
    parent: str | None
    max_model_len: int | None = None


_T = TypeVar("_T")
_LENGTH = re.compile(rb"[0-9]{1,9}")


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: msgspec.Raw = msgspec.Raw()

    @property
    def longest(self) -> int | None:
        """`max_model_len`, None if it is no length: an engine that reports it otherwise works all
        the same.
        """
        length = bytes(self.max_model_len)
        return int(length) if _LENGTH.fullmatch(length) else None


class _Models(msgspec.Struct):
    data: list[_Card]


class _Version(msgspec.Struct):
    version: str = ""


class _KvTransferConfig(msgspec.Struct):
    kv_connector: str | None = None


class _Config(msgspec.Struct):
    kv_transfer_config: _KvTransferConfig | None


class _ServerInfo(msgspec.Struct):
    vllm_config: _Config


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Count(msgspec.Struct):
    input_tokens: int


class _Text(msgspec.Struct):
    prompt: str


class _TokenIds(msgspec.Struct):
    tokens: msgspec.Raw
    count: int


class EngineAdmin:
    """Asks engines for their state. `deadlines` limit each request.

    `key` and `tls` are called with an engine's URL for each request: its bearer token, and the
    context of TLS with it. `connector` makes the session's connector; None: aiohttp's own, which
    connects to `networks` alone, without its limit of 100 connections for all engines. Probes and
    clients' requests limit them, and an engine that hangs must not hold up the probes of others.
    `budget`: for answers as long as a request, which are those with its token ids.
    """

    def __init__(
        self,
        *,
        deadlines: Deadlines,
        key: Callable[[str], str | None] = lambda _: None,
        tls: Callable[[str], ssl.SSLContext | None] = lambda _: None,
        connector: Callable[[], aiohttp.BaseConnector] | None = None,
        networks: EngineNetworks = USUAL,
        budget: AnswerBudget | None = None,
    ) -> None:
        self._budget = budget or AnswerBudget()
        self._connector = connector or reach.connector(networks)
        self.deadlines = deadlines
        self._key = key
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    async def healthy(self, url: str) -> None:
        """Return if the engine reports that it is up; raise EngineError otherwise."""
        await self._request("GET", url, "/health", None, max_bytes=0)

    async def models(self, url: str) -> list[ModelCard]:
        """Return the models that an engine serves, but for those with a name of more than
        `MAX_MODEL_NAME` characters.
        """
        found = self._read(
            "/v1/models", _checked(await self._get(url, "/v1/models", MAX_MODEL_LIST)), _Models
        )
        if any(
            len(name or "") > _MAX_NAME for card in found.data for name in (card.id, card.parent)
        ):
            raise EngineError(f"/v1/models has a name of more than {_MAX_NAME} characters")
        return [
            ModelCard(card.id, card.root, card.parent, card.longest)
            for card in found.data
            if len(card.id) <= MAX_MODEL_NAME
        ]

    async def models_body(self, url: str, authorization: str | None = None) -> bytes:
        """Return the engine's own answer to `/v1/models`. `authorization`: a header in place of the
        engine's key, "" for none.
        """
        return _checked(
            await self._request(
                "GET", url, "/v1/models", None, authorization, max_bytes=MAX_MODEL_LIST
            )
        )

    async def version(self, url: str) -> str:
        """Return the engine's version, "" if it does not report one."""
        return truncate(
            self._read(
                "/version", await self._get(url, "/version", MAX_SHORT_ANSWER), _Version
            ).version,
            100,
        )

    async def tokenize(self, url: str, body: Mapping[str, object]) -> tuple[int, ...]:
        """Return the token ids of a prompt or a chat."""
        answer = await self._request(
            "POST", url, "/tokenize", msgspec.json.encode(body), max_bytes=MAX_SHORT_ANSWER
        )
        return tuple(self._read("/tokenize", answer, _Tokens).tokens)

    async def message_tokens(self, url: str, body: Mapping[str, object]) -> int | None:
        """Return how many tokens a message has, None if the engine's answer does not say that."""
        path = "/v1/messages/count_tokens"
        answer = await self._request(
            "POST", url, path, msgspec.json.encode(body), max_bytes=MAX_SHORT_ANSWER
        )
        try:
            return self._read(path, answer, _Count).input_tokens
        except EngineError as error:  # it serves all the same
            drop_traceback(error)
            return None

    async def token_ids(
        self,
        url: str,
        body: bytes,
        *,
        timeout: float | None = None,
        authorization: str | None = None,
        max_bytes: int | None = None,
    ) -> TokenIds:
        """Return the token ids for a body of `/tokenize`, within `timeout` seconds (None: those of
        every request).

        `authorization`: a header in place of the engine's key, "" for none. `max_bytes`: the limit
        on the answer; None: by the length of the body.
        """
        max_bytes = max_bytes or min(_IDS + _IDS_PER_BYTE * len(body), _MOST_IDS)
        share = self._budget.share()  # it counts until the ids have been read
        answer = await self._request(
            "POST",
            url,
            "/tokenize",
            body,
            authorization,
            timeout=timeout,
            max_bytes=max_bytes,
            share=share,
        )
        read = self._read("/tokenize", answer, _TokenIds)
        return TokenIds(bytes(read.tokens), read.count)

    async def text_of(
        self, url: str, model: str | None, ids: Sequence[int], *, authorization: str | None = None
    ) -> str:
        """Return the text of token ids, special tokens included. `authorization`: as for
        `token_ids`.
        """
        body = {"tokens": list(ids)} | ({} if model is None else {"model": model})
        answer = await self._request(
            "POST",
            url,
            "/detokenize",
            msgspec.json.encode(body),
            authorization,
            max_bytes=MAX_SHORT_ANSWER,
        )
        return self._read("/detokenize", answer, _Text).prompt

    async def ask(
        self,
        url: str,
        path: str,
        body: bytes,
        *,
        authorization: str | None = None,
        timeout: float | None = None,
        max_bytes: int,
    ) -> bytes:
        """Return the answer to a body. `authorization`, `timeout`: as for `token_ids`."""
        return await self._request(
            "POST", url, path, body, authorization, timeout=timeout, max_bytes=max_bytes
        )

    async def metrics(self, url: str) -> bytes:
        """Return the page of metrics."""
        return await self._get(url, "/metrics", MAX_PAGE)

    async def scrape(self, url: str) -> Scrape:
        """Return an engine's load and counters."""
        return read_metrics(await self.metrics(url))

    async def metric_names(self, url: str, beginnings: Iterable[str]) -> frozenset[str]:
        """Return those beginnings of names that a metric of an engine has."""
        return names_in(await self.metrics(url), beginnings)

    async def kv_connector(self, url: str) -> str | None:
        """Return the `kv_connector` of an engine, "" if it has none; None if the engine does not
        report it.

        vLLM reports its configuration only in its development mode (VLLM_SERVER_DEV_MODE).
        """
        try:
            answer = await self._get(url, "/server_info?config_format=json", MAX_SERVER_INFO)
            config = msgspec.json.decode(answer, type=_ServerInfo).vllm_config.kv_transfer_config
        except (EngineRefusedError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        return truncate(config.kv_connector or "", 100) if config is not None else ""

    async def answers(self, url: str, path: str, *, late: bool = False) -> bool:
        """Return whether something answers a GET with 200; `late` if no answer came in time."""
        try:
            await self._request("GET", url, path, None, max_bytes=0)
        except EngineTimeoutError:
            return late
        except EngineError:
            return False
        return True

    async def post(
        self, url: str, path: str, body: bytes, *, timeout: float, max_bytes: int
    ) -> bytes:
        """Return the answer to a request for one token, within `timeout` seconds."""
        return await self._request(
            "POST", url, path, body, timeout=timeout, wait=Wait.DETECT, max_bytes=max_bytes
        )

    async def canary(
        self, url: str, path: str, body: bytes, rank: int | None, *, timeout: float
    ) -> bytes:
        """Return the answer to a request for one token, within `timeout` seconds. `rank`: the
        data-parallel one.
        """
        headers = {} if rank is None else {"x-data-parallel-rank": str(rank)}
        return await self._request(
            "POST",
            url,
            path,
            body,
            timeout=timeout,
            wait=Wait.CANARY,
            max_bytes=MAX_SHORT_ANSWER,
            more=headers,
        )

    async def bootstrap(self, address: str) -> Ranks:
        """Return what a bootstrap server says of its engine. It is no engine: it gets no key, and
        is asked over plain HTTP.
        """
        answer = await self._request(
            "GET", address, "/query", None, "", max_bytes=MAX_ANSWER, plain=True
        )
        try:
            return read_ranks(answer)
        except BootstrapAnswerError as error:
            raise EngineError(f"/query answered {error}") from None

    async def kv_event_sources(self, url: str) -> Sources:
        """Return where an engine's ranks publish KV events, nothing for those that don't. vLLM up
        to 0.31 has no such route.
        """
        found = read_sources(await self._get(url, "/kv_event_sources", MAX_SHORT_ANSWER))
        if found is None:
            raise EngineError("/kv_event_sources answered something else")
        return found

    async def close(self) -> None:
        """Close the session."""
        if self._session is not None:
            await self._session.close()

    async def _get(self, url: str, path: str, max_bytes: int) -> bytes:
        return await self._request("GET", url, path, None, max_bytes=max_bytes)

    async def _request(
        self,
        method: str,
        url: str,
        path: str,
        body: bytes | None,
        authorization: str | None = None,
        *,
        timeout: float | None = None,
        wait: Wait = Wait.TOKENIZE,
        max_bytes: int,
        plain: bool = False,
        more: Mapping[str, str] | None = None,
        share: BudgetShare | None = None,
    ) -> bytes:
        """Return an answer's body of at most `max_bytes` bytes; with 0 it is not read. `plain`:
        without TLS; `more`: headers.

        `share`: of the budget in which the body counts, None if it is small.
        """
        if self._session is None:
            # engines set no cookies, and a search for them costs at each request
            jar = aiohttp.DummyCookieJar()
            # Not decompressed: the data may become a thousand times as large.
            self._session = aiohttp.ClientSession(
                connector=self._connector(),
                trust_env=False,
                cookie_jar=jar,
                auto_decompress=False,
                skip_auto_headers=("Accept-Encoding",),
            )
        headers = dict(more or ())
        if body is not None:
            headers["content-type"] = "application/json"
        if authorization is not None:
            headers |= {"authorization": authorization} if authorization else {}
        elif (key := self._key(url)) is not None:
            headers["authorization"] = f"Bearer {key}"
        tls = None if plain else self._tls(url)
        try:
            # Not redirected: the key is for this engine.
            async with self._session.request(
                method,
                url + path,
                data=body,
                headers=headers,
                ssl=True if tls is None else tls,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=timeout or self.deadlines.probe),
            ) as answer:
                content = await _body(answer, path, max_bytes, share) if max_bytes else b""
        except TimeoutError:
            raise EngineTimeoutError(
                f"{path} did not answer in {timeout or self.deadlines.probe:g} s",
                wait=Wait.PROBE if timeout is None else wait,
            ) from None
        except aiohttp.ClientConnectorCertificateError as error:
            raise EngineTlsError(describe_certificate(error.certificate_error)) from None
        except aiohttp.ClientConnectorSSLError as error:
            raise EngineTlsError(describe_certificate(error.os_error)) from None
        except aiohttp.ClientConnectorError as error:
            if error.errno in LOCAL_ERRORS:
                raise no_more_files(error) from None
            raise EngineUnreachableError(f"no connection: {describe_os(error.os_error)}") from None
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientConnectionResetError):
            raise ConnectionLostError(f"{path}: {describe_close(tls)}") from None
        except ssl.SSLError as error:
            raise EngineTlsError(describe_tls(error)) from None
        except OSError as error:
            raise ConnectionLostError(f"{path}: {describe_os(error)}") from None
        except aiohttp.ClientPayloadError as error:
            raise ConnectionLostError(
                f"{path}: {type(error).__name__}: {truncate(error)}"
            ) from None
        except aiohttp.ClientError as error:
            raise EngineError(f"{path}: {type(error).__name__}: {truncate(error)}") from None
        if answer.status != 200:
            hint = (
                ": set auth.engine_api_key, or the node's api_key" if answer.status == 401 else ""
            )
            raise EngineRefusedError(
                f"{path} answered {answer.status}{hint}", status=answer.status, body=b""
            )
        return content

    def _read(self, path: str, content: bytes, kind: type[_T]) -> _T:
        try:
            return msgspec.json.decode(content, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise EngineError(f"{path} answered something else: {truncate(error)}") from None


async def _body(
    answer: aiohttp.ClientResponse, path: str, max_bytes: int, share: BudgetShare | None
) -> bytes:
    """Read a body; raise EngineError for one that is too large, as soon as that is known."""
    body = bytearray()
    if (answer.content_length or 0) <= max_bytes:
        while chunk := await answer.content.readany():
            body += chunk
            if share is not None:
                share.grow(len(chunk))
            if len(body) > max_bytes:
                break
        else:
            return bytes(body)
    raise EngineError(f"{path} answered more than {max_bytes} bytes")


def _checked(listed: bytes) -> bytes:
    """Return a list of models, unless it has so many that reading it would take long."""
    if listed.count(b"{") > _OBJECTS_PER_MODEL * MAX_MODELS + 1:
        raise EngineError(f"/v1/models has more than {MAX_MODELS} models")
    return listed


def describe_certificate(error: Exception) -> str:
    """Return why an engine's certificate is not trusted, from aiohttp's error."""
    return describe_tls(error) if isinstance(error, ssl.SSLError) else f"no TLS: {error}"


def describe_close(tls: ssl.SSLContext | None) -> str:
    """Return the text for a connection that an engine closed without an answer, with what is its
    cause more often than not.

    vLLM's server only closes the connection if a client speaks plain HTTP to its TLS, or lacks the
    certificate that it requires.
    """
    if tls is None:
        return "closed the connection: does it expect TLS (https)?"
    return "closed the connection: does it require a client certificate (tls.certificate)?"
