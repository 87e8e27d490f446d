"""The KV handles of a check: taken from a prefill engine, held, released.

A handle goes to a decode engine unchanged, or with another engine's id in it, but never incomplete:
that kills a decode engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from pdproxy.check import prompts
from pdproxy.check.engines import resolve, scrape
from pdproxy.check.facts import EngineFacts, Reach, Side, Trouble
from pdproxy.check.http_client import HttpClient
from pdproxy.check.options import CheckOptions
from pdproxy.kit.addresses import is_loopback
from pdproxy.kit.ids import mint
from pdproxy.transfer.contract import (
    NO_DISPATCH,
    Contract,
    Dispatch,
    Handle,
    HeldByPrefill,
    PushedToDecode,
)
from pdproxy.wire.engine import prefill_answer
from pdproxy.wire.fields import Fields
from pdproxy.wire.request import Parsed

PULL = "pull"
_EPSILON = 1e-9


class _Params(msgspec.Struct):
    remote_engine_id: str = ""
    remote_host: str = ""
    remote_port: int = 0
    transfer_mode: str = PULL


class Handles:
    """Takes and releases handles of one contract. `hosts`: where others reach an engine for KV, if
    not where it says itself.
    """

    def __init__(
        self,
        http: HttpClient,
        contract: Contract,
        options: CheckOptions,
        hosts: Mapping[str, str | None] | None = None,
    ) -> None:
        self.contract = contract
        self.hosts = hosts or {}
        self._http, self._options = http, options

    async def take(
        self,
        prefill: EngineFacts,
        parsed: Parsed,
        request_id: str,
        dispatch: Dispatch = NO_DISPATCH,
    ) -> Handle | str:
        """Have a prompt prefilled; return its handle, or why there is none. What the handle shows
        is stored in `prefill`.
        """
        leg = self.contract.prefill(parsed, parsed.prompts[0], dispatch)
        reply = await self._http.post(prefill.url, leg.route.path, leg.body, request_id)
        if isinstance(reply, Trouble):
            return reply.text
        if reply.status != 200:
            return f"answered {reply.summary()}"
        if (answer := prefill_answer(reply.body)) is None:
            return "its answer is not a completion"
        handle = self.contract.handle(parsed, answer, dispatch)
        if isinstance(handle, str):
            return handle
        host = self.hosts.get(prefill.url)
        if host is not None and self.contract.at_host is not None:
            handle = self.contract.at_host(handle, host)
        params = msgspec.json.decode(handle.params, type=_Params)
        if prefill.side is None and params.remote_host:
            prefill.side = await self._side_channel(prefill, params)
        elif prefill.side is not None and prefill.side.engine_id != params.remote_engine_id:
            prefill.restarted = True
        if params.transfer_mode != PULL:
            return f"its handle has transfer_mode={params.transfer_mode}"
        return handle

    async def release(
        self, prefill: EngineFacts, decode: str, model: str, handle: Handle, before: float
    ) -> bool:
        """Have a decode engine release a handle; return whether P's KV usage came down to `before`.

        The request is sent again if nothing happens: a decode engine that does not know P may
        release only after their handshake.
        """
        holder = self.contract.holder
        if not isinstance(holder, HeldByPrefill | PushedToDecode) or holder.release_body is None:
            return False
        if (body := holder.release_body(model, handle)) is None:
            return False
        for _ in range(2 if holder.handshakes else 1):
            reply = await self._http.post(
                decode, prompts.PATH, body, f"pdproxy-check-release-{mint()[:12]}"
            )
            if isinstance(reply, Trouble):
                return False
            if await self.freed(prefill.url, before, self._options.settle / 2):
                return True
        return False

    async def freed(self, prefill: str, before: float, within: float) -> bool:
        """Return whether a prefill engine comes to hold no more KV than `before` within `within`
        seconds.

        It is asked once more behind them: this process itself may have stood still since the last
        answer.
        """
        end = time.monotonic() + within
        while True:
            is_last = time.monotonic() >= end
            metrics = await scrape(self._http, prefill)
            if metrics is not None and metrics.kv_usage <= before + _EPSILON:
                return True
            if is_last:
                return False
            await asyncio.sleep(self._options.poll)

    async def _side_channel(self, prefill: EngineFacts, params: _Params) -> Side:
        """Return what this machine can see of the side channel."""
        addresses = await resolve(params.remote_host, self._http.timeout)
        reach: Reach = "untried"
        if not addresses:
            reach = "unresolvable"
        elif not any(map(is_loopback, addresses)) or any(map(is_loopback, prefill.addresses)):
            reach = await _connected(
                urlsplit(f"//{params.remote_host}").hostname or "", params.remote_port
            )
        return Side(
            params.remote_engine_id,
            params.remote_host,
            params.remote_port,
            params.transfer_mode,
            addresses,
            reach,
        )


def with_other_engine(handle: Handle, engine_id: str) -> Handle:
    """Return the handle with another engine's id: complete, but no engine has that id."""
    fields = msgspec.json.decode(handle.params, type=Fields)
    fields["remote_engine_id"] = msgspec.Raw(msgspec.json.encode(engine_id))
    return msgspec.structs.replace(handle, params=msgspec.json.encode(fields))


async def _connected(host: str, port: int) -> Reach:
    try:
        async with asyncio.timeout(2):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError, OverflowError):
        return "closed"
    writer.close()
    return "open"
