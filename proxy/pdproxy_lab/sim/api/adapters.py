"""LoRA adapters that are loaded and unloaded while the engine runs, as vLLM does with
`VLLM_ALLOW_RUNTIME_LORA_UPDATING`.

An adapter is a name that the engine lists and serves. Its answers are those of the model: there are
no weights here.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from pdproxy_lab.sim.api.errors import RefusedRequest
from pdproxy_lab.sim.engine import SimEngine

Endpoint = Callable[[Request], Awaitable[Response]]


def routes(engine: SimEngine) -> tuple[tuple[str, Endpoint], ...]:
    """Return the two routes with what answers them."""

    async def load(request: Request) -> Response:
        body = json.loads(await request.body())
        name, path = body.get("lora_name"), body.get("lora_path")
        if not name or not path:
            raise RefusedRequest(
                "Both 'lora_name' and 'lora_path' must be provided.", kind="InvalidUserInput"
            )
        if name == engine.facts.model:
            text = f"The lora adapter '{name}' conflicts with a served base model."
            raise RefusedRequest(text, kind="InvalidUserInput")
        if name in engine.adapters and not body.get("load_inplace", False):
            hint = "If you want to load the adapter in place, set 'load_inplace' to True."
            raise RefusedRequest(
                f"The lora adapter '{name}' has already been loaded. {hint}",
                kind="InvalidUserInput",
            )
        engine.adapters[name] = path
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(request: Request) -> Response:
        name = json.loads(await request.body()).get("lora_name")
        if not name:
            raise RefusedRequest(
                "'lora_name' needs to be provided to unload a LoRA adapter.",
                kind="InvalidUserInput",
            )
        if engine.adapters.pop(name, None) is None:
            raise RefusedRequest(
                f"The lora adapter '{name}' cannot be found.", kind="NotFoundError", status=404
            )
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    return ("/v1/load_lora_adapter", load), ("/v1/unload_lora_adapter", unload)
