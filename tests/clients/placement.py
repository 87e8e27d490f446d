"""Where a body is expected to be served: by a pair of engines, or by one alone, and why.

This is written from what the API says, without a look at the proxy's own rules. The reasons are
labels of `pdproxy_alone_total{reason}`.
"""

from __future__ import annotations

from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
_RUN_BY_ENGINES = {"web_search_preview", "code_interpreter", "container", "mcp"}
"""Tools that an engine itself may run between two generations (vLLM 0.32.0). It gives other
built-in tools, such as `web_search`, to no model, and the client's functions to the client.
"""


def why_alone(route: str, body: dict[str, Any]) -> str:
    """Return why one engine has to serve a body, "" if a pair can."""
    if route in (CHAT, COMPLETIONS):
        return "echo" if body.get("echo") else ""
    if route == RESPONSES:
        refers = body.get("previous_response_id") or _refers(body.get("input"))
        if body.get("background") or refers:
            return "unusual"
        if any(tool.get("type") in _RUN_BY_ENGINES for tool in body.get("tools") or ()):
            return "built_in_tools"
    return ""


def _refers(items: Any) -> bool:
    """Whether items of an earlier answer are named only: one engine at most knows them."""
    return isinstance(items, list) and any(
        item.get("type") == "item_reference" for item in items if isinstance(item, dict)
    )
