"""The clients, and how they are installed: `python -m tests.clients.install FOLDER` takes the
newest of each, outside of the project; with `--tried`, the coding agents alone, in the versions of
docs/guide/agents.md. Node is needed.

LlamaIndex has an environment of its own, since it may need another openai-python.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.clients.drivers.coding_agents import AGENTS, PAGE


@dataclass(frozen=True)
class Client:
    """A driver, and the folder of its packages: `js`, or an environment of Python."""

    driver: str
    place: str
    packages: tuple[str, ...]

    def folder(self, at: Path) -> Path:
        return at / self.place

    def command(self, at: Path, drivers: Path, url: str, work: Path) -> list[str]:
        """Return what runs the driver."""
        kind = "mjs" if self.place == "js" and self.driver != "coding_agents" else "py"
        words = [str(drivers / f"{self.driver}.{kind}"), url]
        if self.driver == "coding_agents":
            return [sys.executable, *words, str(at / "js"), str(work)]
        if kind == "mjs":
            return ["node", *words]
        return [str(at / self.place / "bin" / "python"), *words]


_AGENT = re.compile(r"^\| \[(.+?)\]\(#.+?\) \| (\S+) \|", re.MULTILINE)
"""A row of the page's table: an agent, and its version."""
PROVIDERS = ("@ai-sdk/openai", "@ai-sdk/anthropic", "@ai-sdk/openai-compatible")
DRIVERS = (
    Client("openai_python", "py", ("openai",)),
    Client("openai_node", "js", ("openai", "zod")),
    Client("anthropic_python", "py", ("anthropic",)),
    Client("anthropic_node", "js", ("@anthropic-ai/sdk",)),
    Client("ai_sdk", "js", ("ai", *PROVIDERS, "zod")),
    Client("langchain_python", "py", ("langchain-openai", "langchain-anthropic")),
    Client("llama_index_python", "llama", ("llama-index-llms-openai-like>=0.5",)),
    Client("litellm_python", "py", ("litellm",)),
    Client("instructor_python", "py", ("instructor",)),
    Client("agents_python", "py", ("openai-agents",)),
    Client("pydantic_ai_python", "py", ("pydantic-ai-slim[openai]",)),
    Client("coding_agents", "js", tuple(package for _, package, _ in AGENTS.values())),
)


def tried() -> Client:
    """Return the coding agents in the versions of the page."""
    versions = dict(_AGENT.findall(PAGE.read_text()))
    packages = (f"{package}@{versions[agent]}" for agent, (_, package, _) in AGENTS.items())
    return Client("coding_agents", "js", tuple(packages))


def install(at: Path, clients: Sequence[Client]) -> None:
    """Install clients below a folder."""
    places: dict[str, list[str]] = {}
    for client in clients:
        places.setdefault(client.place, []).extend(client.packages)
    for place, packages in places.items():
        folder = at / place
        if place == "js":
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "package.json").write_text('{"private": true}\n')
            words = ["npm", "install", "--loglevel=error", "--no-audit", "--no-fund"]
            words += sorted(set(packages))
            subprocess.run(words, cwd=folder, check=True)
        else:
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            pip = [str(folder / "bin" / "python"), "-m", "pip"]
            # pip itself takes minutes for these
            subprocess.run([*pip, "install", "-qq", "uv"], check=True)
            uv = [str(folder / "bin" / "uv"), "pip", "install", "-q", "--python"]
            subprocess.run([*uv, str(folder / "bin" / "python"), *packages], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Install the clients.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tried", action="store_true", help="agents in the page's versions alone")
    arguments = parser.parse_args()
    install(arguments.folder.resolve(), [tried()] if arguments.tried else DRIVERS)
