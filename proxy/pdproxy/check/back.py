"""Whether KV can go back: does D keep that of an answer, and does P take it?

P is sent D's handle with no tokens to pull. With `bidirectional_kv_xfer` it then reports to D that
it reads nothing, and D frees the blocks, which its metrics show. Without the option P ignores the
handle; one with tokens would make it wait forever.
"""

from __future__ import annotations

import msgspec

from pdproxy.check import prompts
from pdproxy.check.engines import scrape
from pdproxy.check.facts import Back, EngineFacts
from pdproxy.check.handles import Handles
from pdproxy.check.http_client import HttpClient
from pdproxy.check.metrics import EngineMetrics
from pdproxy.check.options import CheckOptions
from pdproxy.transfer.contract import Dispatch, Handle
from pdproxy.transfer.turns import DecodeHandle
from pdproxy.wire.fields import Fields

_TRIES = 2
"""The first request may only cause the handshake: P then reports in a later step."""


class BackProbe:
    """Tries it with one pair at a time."""

    def __init__(self, http: HttpClient, handles: Handles, options: CheckOptions) -> None:
        self._http, self._handles, self._options = http, handles, options

    async def back(
        self,
        prefill: EngineFacts,
        decode: EngineFacts,
        model: str,
        params: bytes | None,
        before: EngineMetrics | None,
    ) -> Back:
        """Return what can go back. `params`: of D's answer; `before`: D's metrics before that
        request. D's KV is released.
        """
        rules = self._handles.contract.turns
        found = rules.read(params) if rules is not None and params is not None else "nothing"
        if rules is None or not isinstance(found, DecodeHandle):
            return "nothing"
        if (host := self._handles.hosts.get(decode.url)) is not None:
            found = rules.at_host(found, host)
        if before is None or before.busy:
            await self._release(prefill, rules.release_body(model, found))
            return "unsure"
        nothing = msgspec.json.decode(found.params, type=Fields) | {
            "remote_num_tokens": msgspec.Raw(b"0")
        }
        dispatch = Dispatch(turn=msgspec.json.encode(nothing))
        parsed = prompts.parsed(model, "x")
        for number in range(_TRIES):
            usage = await scrape(self._http, prefill.url)
            handle = await self._handles.take(
                prefill, parsed, f"pdproxy-check-back-{number}", dispatch
            )
            if isinstance(handle, Handle):
                await self._handles.release(
                    prefill, decode.url, model, handle, usage.kv_usage if usage is not None else 0.0
                )
            if await self._handles.freed(decode.url, before.kv_usage, self._options.settle):
                return "used"
        await self._release(prefill, rules.release_body(model, found))
        return "kept"

    async def _release(self, prefill: EngineFacts, body: bytes) -> None:
        for number in range(_TRIES):
            await self._http.post(
                prefill.url, prompts.PATH, body, f"pdproxy-check-release-back-{number}"
            )
