"""The recorded bodies: tests/data/client_bodies has a file for each route."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.clients.placement import CHAT, COMPLETIONS, MESSAGES, RESPONSES

FOLDER = Path(
    os.environ.get("PDPROXY_TEST_CLIENT_BODIES")
    or Path(__file__).resolve().parents[1] / "data" / "client_bodies"
)
"""Where bodies are read from: the recorded ones, if the variable does not name others."""
FILES = {
    CHAT: "chat_completions.json",
    COMPLETIONS: "completions.json",
    MESSAGES: "messages.json",
    RESPONSES: "responses.json",
}
SPLIT = frozenset({CHAT, COMPLETIONS, MESSAGES, RESPONSES})
"""The routes that are split. On the others every body is expected at one engine, until they stand
here.
"""
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_LIMIT = {
    CHAT: "max_tokens",
    COMPLETIONS: "max_tokens",
    MESSAGES: "max_tokens",
    RESPONSES: "max_output_tokens",
}


@dataclass(frozen=True)
class Body:
    """One body, its route, and who sends such a body, with versions. `alone`: why one engine must
    serve it, "" if two can.
    """

    name: str
    clients: list[str]
    route: str
    headers: dict[str, str]
    alone: str
    body: dict[str, Any]

    def __str__(self) -> str:
        return self.name

    def fitted(self, model: str, limit: int) -> dict[str, Any]:
        """Return the body for a small model: with its name and no chance in its answers, which are
        not longer than `limit`; 0: only limits that the client has set are lowered, to 40.
        """
        body = self.body | {"model": model}
        if body.get("seed") is None or (body.get("n") or 1) == 1:
            body["temperature"] = 0
        for name in LIMITS:
            if body.get(name) is not None:
                body[name] = min(body[name], limit or 40)
        thinking = body.get("thinking")
        if isinstance(thinking, dict) and "budget_tokens" in thinking:
            body["thinking"] = thinking | {"budget_tokens": 1024}  # less is refused
            body["max_tokens"] = 1025
        if limit and all(body.get(name) is None for name in LIMITS):
            body[_LIMIT[self.route]] = limit
        return body


def load(folder: Path = FOLDER) -> list[Body]:
    """Return all bodies of a folder."""
    return [
        Body(route=route, **one)
        for route, name in FILES.items()
        for one in json.loads((folder / name).read_text())
    ]


def save(bodies: list[Body], folder: Path) -> None:
    """Write them, a file for each route."""
    folder.mkdir(parents=True, exist_ok=True)
    for route, name in FILES.items():
        listed = [asdict(one) for one in bodies if one.route == route]
        for one in listed:
            del one["route"]
        (folder / name).write_text(json.dumps(listed, indent=1, ensure_ascii=False) + "\n")
