"""Coding agents, each with the configuration of docs/guide/agents.md, and a question for which the
scripted server has commands run.

Arguments: the server's URL, the folder of the agents' packages, an empty folder to work in, and the
names of agents (default: all).
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[3] / "docs" / "guide" / "agents.md"
ADDRESS = "http://127.0.0.1:8000"
QUESTION = "Print the word tide with a command."
AGAIN = "And again."
_FILE = re.compile(r"^`(~/[^`]+)`:\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)
_EXPORT = re.compile(r"^export (\w+)=(.*)$", re.MULTILINE)
SCHEMA = {
    "type": "object",
    "properties": {"word": {"type": "string"}},
    "required": ["word"],
    "additionalProperties": False,
}
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQV"
    "R42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)

CODEX = ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
CLAUDE = ["claude", "-p", "--dangerously-skip-permissions"]
QWEN = ["qwen", "-y"]
NPM = '"npm": "@ai-sdk/openai-compatible"'
Case = tuple[list[str], dict[str, str]]
"""A command, and what is replaced in the configuration."""
AGENTS: dict[str, tuple[str, str, dict[str, Case]]] = {
    "Codex": (
        "codex",
        "@openai/codex",
        {
            "exec": ([*CODEX, QUESTION], {}),
            "resumed": ([*CODEX, "resume", "--last", AGAIN], {}),
            "without-web-search": ([*CODEX, "-c", 'web_search="disabled"', QUESTION], {}),
            "effort": ([*CODEX, "-c", 'model_reasoning_effort="low"', QUESTION], {}),
            "schema": ([*CODEX, "--output-schema", "schema.json", QUESTION], {}),
            "image": ([*CODEX, QUESTION, "-i", "image.png"], {}),
        },
    ),
    "Claude Code": (
        "claude-code",
        "@anthropic-ai/claude-code",
        {
            "print": ([*CLAUDE, QUESTION], {}),
            "resumed": ([*CLAUDE, "--continue", AGAIN], {}),
            "known-model": ([*CLAUDE, "--model", "claude-sonnet-4-5", QUESTION], {}),
            "schema": ([*CLAUDE, "--json-schema", json.dumps(SCHEMA), QUESTION], {}),
        },
    ),
    "Qwen Code": (
        "qwen-code",
        "@qwen-code/qwen-code",
        {
            "print": ([*QWEN, "-p", QUESTION], {}),
            "resumed": ([*QWEN, "--continue", "-p", AGAIN], {}),
        },
    ),
    "opencode": (
        "opencode",
        "opencode-ai",
        {
            "run": (["opencode", "run", QUESTION], {}),
            "resumed": (["opencode", "run", "--continue", AGAIN], {}),
            "responses": (["opencode", "run", QUESTION], {NPM: '"npm": "@ai-sdk/openai"'}),
            "messages": (["opencode", "run", QUESTION], {NPM: '"npm": "@ai-sdk/anthropic"'}),
        },
    ),
}


def main(url: str, packages: Path, at: Path, names: list[str]) -> bool:
    """Run all cases; return whether each has ended with 0."""
    work = at / "work"
    work.mkdir(parents=True)
    (work / "schema.json").write_text(json.dumps(SCHEMA))
    (work / "image.png").write_bytes(base64.b64decode(PIXEL))
    subprocess.run(["git", "init", "-q"], cwd=work, check=True)
    failed = [
        f"{agent}, {case}"
        for agent in names or AGENTS
        for case in AGENTS[agent][2]
        if not _run(agent, case, url, packages, at)
    ]
    print("failed:", failed)
    return not failed


def _run(agent: str, case: str, url: str, packages: Path, at: Path) -> bool:
    client, _, cases = AGENTS[agent]
    command, changes = cases[case]
    address = f"{url}/{client}@{version(agent, packages)}/{case}"
    environment = configured(agent, address, packages, at / client, changes)
    done = subprocess.run(
        command,
        cwd=at / "work",
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    print(f"{agent}, {case}: {done.returncode}: {done.stdout[-300:]!r}")
    if done.returncode:
        print(done.stderr[-1500:])
    return done.returncode == 0


def version(agent: str, packages: Path) -> str:
    """Return the version of an agent's package."""
    file = packages / "node_modules" / AGENTS[agent][1] / "package.json"
    found: str = json.loads(file.read_text())["version"]
    return found


def configured(
    agent: str, address: str, packages: Path, home: Path, changes: dict[str, str]
) -> dict[str, str]:
    """Write an agent's files below `home` as the page has them, with `address` as the proxy's;
    return the variables to run the agent with.
    """
    text = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    section = next(one for one in text if one.startswith(f"{agent}\n"))
    for old, new in {ADDRESS: address, **changes}.items():
        section = section.replace(old, new)
    for name, content in _FILE.findall(section):
        path = home / name.removeprefix("~/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    home.mkdir(parents=True, exist_ok=True)
    return dict(_EXPORT.findall(section)) | {
        "PATH": f"{packages / 'node_modules' / '.bin'}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(home),
        "IS_SANDBOX": "1",  # Claude Code runs commands as root only there
    }


if __name__ == "__main__":
    server, folder, place, *chosen = sys.argv[1:]
    shutil.rmtree(place, ignore_errors=True)
    sys.exit(not main(server, Path(folder), Path(place), chosen))
