"""Coding agents run twenty commands behind pdproxy, on real engines whose model writes a script: P
computes every prompt, D no token of one, and all counters say so.
"""

# Runs only if it is named, and only in a network namespace of its own, so that no agent reaches
# anything but loopback: unshare -rn sh -c 'ip link set lo up; exec pytest ...'.
# `PDPROXY_TEST_AGENTS` is the folder of `python -m tests.clients.install FOLDER --tried`.

import asyncio
import dataclasses
import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.clients.drivers.coding_agents import AGENTS, configured, version
from tests.clients.placement import CHAT, MESSAGES, RESPONSES

from .build import ensure
from .counters import Counters
from .engine import BLOCK, MODEL, Engine, Role
from .equality import SOURCE
from .fleet import Fleet
from .launcher import Launcher
from .proxy import Proxy

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900, func_only=True)]

TURNS = 20
COMMAND = "echo step {} | tee -a steps; seq 200"
LAST = "All steps are done."
SHELLS = {
    "exec_command": "cmd",
    "Bash": "command",
    "run_shell_command": "command",
    "bash": "command",
}
"""How agents name the tool that runs a command, and its argument."""
ROUTES = {
    "Codex": RESPONSES,
    "Claude Code": MESSAGES,
    "Qwen Code": CHAT,
    "opencode": CHAT,
}
NAMES: dict[str, Role] = {"agents-p": "prefill", "agents-d": "decode"}
FLAGS = "--max-model-len 131072 --num-gpu-blocks-override 8192"
BLOCK_BYTES = BLOCK * 2 * 64 * 4
"""The keys and values of one head of 64 floats."""
UNWATCHED = {"health": {"stalled_after": 0}}
"""On a busy machine an engine's step takes long, and the engine is asked for a token beside it."""
SETTLED = 30.0
MARK = """
{%- set results = messages | selectattr('role', 'equalto', 'tool') | list | length %}
{%- set found = namespace(mark='<|last|>') %}
{%- for tool in tools or [] if results < TURNS and tool.function.name in SHELLS %}
{%- set found.mark = '<|' + tool.function.name + ' ' + results | string + '|>' %}
{%- endfor %}
{{- found.mark }}"""
"""The mark says which call comes next: the conversation has the results of those before."""


def _script() -> dict[str, object]:
    """What the model writes behind each mark: a call for each turn, then a text."""
    answers = {"<|last|>": [LAST[:9], LAST[9:]]}
    for tool, argument in SHELLS.items():
        for turn in range(TURNS):
            answers[f"<|{tool} {turn}|>"] = [
                f'<tool_call>\n{{"turn": {turn}, "name": "{tool}", "arguments": ',
                f'{{"{argument}": "{COMMAND.format(turn)}"',
                "}}\n</tool_call>",
            ]
    mark = MARK.replace("TURNS", str(TURNS)).replace("SHELLS", json.dumps([*SHELLS]))
    return {"answers": answers, "mark": mark}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A prefill and a decode engine with that model, where nothing but loopback can be reached."""
    with (
        socket.socket(type=socket.SOCK_DGRAM) as probe,
        pytest.raises(OSError, match="unreachable"),
    ):
        probe.connect(("192.0.2.1", 9))  # sends nothing
    built, folder = ensure(), tmp_path_factory.mktemp("scripted")
    script, model = folder / "script.json", folder / "model"
    script.write_text(json.dumps(_script()))
    make = Path(__file__).with_name("make_scripted_model.py")
    subprocess.run([built.python, make, built.model, script, model], check=True)
    launcher = Launcher(dataclasses.replace(built, model=model))
    fleet = Fleet(launcher, flags=FLAGS)
    try:
        fleet.launch(NAMES)
        yield fleet
    finally:
        launcher.close()
        fleet.end()


def _increase(before: Counters, after: Counters, name: str, **labels: str) -> int:
    return round(after.sum(name, **labels) - before.sum(name, **labels))


@pytest.mark.parametrize("agent", AGENTS)
async def test_an_agent_of_twenty_turns(engines: Fleet, tmp_path: Path, agent: str) -> None:
    packages = Path(os.environ["PDPROXY_TEST_AGENTS"]) / "js"
    work = tmp_path / "work"
    work.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=work, check=True)
    proxy = Proxy.start(engines.prefills, engines.decodes, tmp_path, settings=UNWATCHED)
    try:
        parts: list[Engine | Proxy] = [*engines.prefills, *engines.decodes, proxy]
        before = [one.counters() for one in parts]
        changes = {"my-model": MODEL}
        command = next(iter(AGENTS[agent][2].values()))[0]
        done = await asyncio.to_thread(
            subprocess.run,
            command,
            cwd=work,
            env=configured(agent, proxy.url, packages, tmp_path / "home", changes),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        async with asyncio.timeout(SETTLED):
            while proxy.counters().sum("pdproxy_kv_handles"):
                await asyncio.sleep(0.2)
        now = [one.counters() for one in parts]
    finally:
        assert proxy.stop() == 0, proxy.tail()
    assert LAST in done.stdout
    steps = "".join(f"step {turn}\n" for turn in range(TURNS))
    assert (work / "steps").read_text() == steps
    p, d, ours = (partial(_increase, *pair) for pair in zip(before, now, strict=True))
    print(f"\n{agent} {version(agent, packages)}: {_agree(p, d, ours, ROUTES[agent])}")


def _agree(
    p: Callable[..., int], d: Callable[..., int], ours: Callable[..., int], route: str
) -> str:
    """Compare what the engines and the proxy have counted; return it in words."""
    requests = ours("pdproxy_requests_total", endpoint=route)
    assert requests > TURNS
    assert ours("pdproxy_requests_total", endpoint=route, outcome="ok") == requests
    for engine in (p, d):
        assert engine("vllm:request_success_total") == requests
    prompts = p("vllm:prompt_tokens_total")
    assert ours("pdproxy_prompt_tokens_total", served="split") == prompts
    assert ours("pdproxy_prompt_tokens_total") == prompts
    assert ours("pdproxy_alone_total") == 0
    assert ours("pdproxy_leg_failures_total") == 0
    assert ours("pdproxy_kv_moved_total", result="recomputed") == 0

    known = p("vllm:prefix_cache_hits_total")
    assert p(SOURCE, source="external_kv_transfer") == 0
    assert p(SOURCE, source="local_cache_hit") == known
    assert p(SOURCE, source="local_compute") == prompts - known > 0

    kept = d("vllm:prefix_cache_hits_total")
    pulled = prompts - kept
    assert d("vllm:prompt_tokens_total") == prompts
    assert d(SOURCE, source="local_compute") == 0
    assert d(SOURCE, source="local_cache_hit") == kept
    assert d(SOURCE, source="external_kv_transfer") == pulled > 0
    assert d("vllm:external_prefix_cache_hits_total") == pulled
    blocks = d("vllm:nixl_bytes_transferred_sum") / BLOCK_BYTES
    assert pulled / BLOCK <= blocks < pulled / BLOCK + requests  # the last one is not full
    return (
        f"{requests} requests, {prompts} prompt tokens, all split; P computed {prompts - known} "
        f"and had {known}; D computed 0, pulled {pulled} in {blocks:.0f} blocks and had {kept}"
    )
