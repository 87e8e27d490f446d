"""KV handles in the check's hands: taken from a prefill engine, held, given back. None is forgotten without a word.

A handle goes to a decode engine as it came, or with another engine's id in it, and never with anything missing: an incomplete
one kills a decode engine.
"""

from __future__ import annotations

import asyncio
import time
from urllib.parse import urlsplit

import msgspec

from pdproxy.kit.ids import mint
from pdproxy.lab.check import prompts
from pdproxy.lab.check.ask import Asker
from pdproxy.lab.check.engines import resolve, scrape
from pdproxy.lab.check.facts import EngineFacts, Reach, Side, Trouble
from pdproxy.lab.check.options import Options
from pdproxy.transfer.contract import NO_DISPATCH, Contract, Handle, HeldByPrefill
from pdproxy.wire.engine import prefill_answer
from pdproxy.wire.fields import Fields
from pdproxy.wire.request import Parsed

PULL = "pull"
_NOTHING = 1e-9


class _Params(msgspec.Struct):
    remote_engine_id: str = ""
    remote_host: str = ""
    remote_port: int = 0
    transfer_mode: str = PULL


class Handles:
    """Takes handles and gives them back, by one contract."""

    def __init__(self, asker: Asker, contract: Contract, options: Options) -> None:
        self.contract = contract
        self._asker, self._options = asker, options

    async def take(self, prefill: EngineFacts, parsed: Parsed, request_id: str) -> Handle | str:
        """Have a prompt prefilled; return its handle, or in words why there is none. What it says is put into `prefill`."""
        leg = self.contract.prefill(parsed, parsed.prompts[0], NO_DISPATCH)
        reply = await self._asker.post(prefill.url, leg.route.value, leg.body, request_id)
        if isinstance(reply, Trouble):
            return reply.text
        if reply.status != 200:
            return f"answered {reply.words()}"
        if (answer := prefill_answer(reply.body)) is None:
            return "its answer is no completion"
        handle = self.contract.handle(parsed, answer, NO_DISPATCH)
        if isinstance(handle, str):
            return handle
        params = msgspec.json.decode(handle.params, type=_Params)
        if prefill.side is None:
            prefill.side = await self._look_at(prefill, params)
        elif prefill.side.engine_id != params.remote_engine_id:
            prefill.restarted = True
        if params.transfer_mode != PULL:
            return f"its handle says transfer_mode={params.transfer_mode}"
        return handle

    async def give_back(self, prefill: EngineFacts, decode: str, model: str, handle: Handle, before: float) -> bool:
        """Have a decode engine give a handle back; return whether P's KV usage came down to `before`.

        Told twice if nothing happens: a decode engine that has never met P may say so only after their handshake.
        """
        holder = self.contract.holder
        if not isinstance(holder, HeldByPrefill):
            return False
        body = holder.release_body(model, handle)
        for _ in range(2):
            reply = await self._asker.post(decode, prompts.PATH, body, f"pdproxy-check-release-{mint()[:12]}")
            if isinstance(reply, Trouble):
                return False
            if await self.freed(prefill.url, before, self._options.settle / 2):
                return True
        return False

    async def freed(self, prefill: str, before: float, within: float) -> bool:
        """Watch a prefill engine until it holds no more KV than `before`, for `within` seconds at the most."""
        end = time.monotonic() + within
        while True:
            metrics = await scrape(self._asker, prefill)
            if metrics is not None and metrics.kv_usage <= before + _NOTHING:
                return True
            if time.monotonic() >= end:
                return False
            await asyncio.sleep(self._options.poll)

    async def _look_at(self, prefill: EngineFacts, params: _Params) -> Side:
        """Find out about the side channel what can be seen from here."""
        addresses = await resolve(params.remote_host, self._asker.timeout)
        reach: Reach = "untried"
        if not addresses:
            reach = "unresolvable"
        elif not _loopback(addresses) or _loopback(prefill.addresses):
            reach = await _connected(urlsplit(f"//{params.remote_host}").hostname or "", params.remote_port)
        return Side(
            params.remote_engine_id, params.remote_host, params.remote_port, params.transfer_mode, addresses, reach
        )


def with_other_engine(handle: Handle, engine_id: str) -> Handle:
    """Return the handle as if another engine had given it: complete, but nobody answers to that id."""
    fields = msgspec.json.decode(handle.params, type=Fields)
    fields["remote_engine_id"] = msgspec.Raw(msgspec.json.encode(engine_id))
    return msgspec.structs.replace(handle, params=msgspec.json.encode(fields))


def _loopback(addresses: frozenset[str]) -> bool:
    return any(address.startswith("127.") or address == "::1" for address in addresses)


async def _connected(host: str, port: int) -> Reach:
    try:
        async with asyncio.timeout(2):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError, OverflowError):
        return "closed"
    writer.close()
    return "open"
