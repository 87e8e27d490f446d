#!/usr/bin/env python3
"""One command from nothing to a running proxy: `python tests/engines/demo.py [--prefill N] [--decode N] [--once]`.

Builds the engines' environment if it isn't there (once, 2.4 GB), starts real vLLM engines with NIXL on this machine's
CPU, puts `pdproxy serve` in front, streams a chat through it, and shows on D's own counters that the prompt's KV came
from P. Then it stays until Ctrl-C. Needs nothing but pdproxy in the environment that runs it.
"""

import argparse
import json
import secrets
import socket
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engines.build import EnginesUnavailable, ensure
from engines.engine import MODEL, Engine, EngineFailed, Role, free_port
from engines.fleet import Fleet
from engines.launcher import Launcher, NurseryFailed
from engines.proxy import Proxy, ProxyFailed

QUESTION = (
    "A barrel is missing from the second ledger. Who went down to the quay with a lantern, and what did she find?"
)
SOURCE = "vllm:prompt_tokens_by_source_total"


def say(text: str) -> None:
    """Print at once: some of the steps take a while."""
    print(text, flush=True)


def chat(url: str, question: str) -> Iterator[str]:
    """Stream one chat through an OpenAI server; yields the answer's pieces."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": question}], "stream": True}
    body |= {"max_tokens": 48, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    yield choice["delta"].get("content") or ""


def sources(engines: list[Engine]) -> dict[str, int]:
    """Where the decode engines had their prompts' tokens from, as they count it themselves."""
    counters = [engine.counters() for engine in engines]
    return {
        name: round(sum(each.sum(SOURCE, source=name) for each in counters))
        for name in ("external_kv_transfer", "local_compute")
    }


def show(proxy: Proxy, fleet: Fleet) -> None:
    """One question, its streamed answer, and the decode engines' counters before and after."""
    question = f"{QUESTION} (#{secrets.token_hex(2)})"  # never asked before, so that no cache has it
    before = sources(fleet.decodes)
    say(f"\n> {question}")
    for piece in chat(proxy.url, question):
        print(piece, end="", flush=True)
    say("\n  (random weights: the words mean nothing, but they are exactly what one plain engine would say)")
    after = sources(fleet.decodes)
    for name, meaning in (("external_kv_transfer", "from P over NIXL"), ("local_compute", "computed by itself")):
        say(f"D's prompt tokens {meaning}: {before[name]} -> {after[name]}")


def port_for(wanted: int) -> int:
    """The wanted port, or a free one where it is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            return free_port()
    return wanted


def run(options: argparse.Namespace) -> int:
    """Build, start, show, stay, stop."""
    say("engines: building the environment (the first time takes minutes) ...")
    fleet = Fleet(Launcher(ensure()))
    names: dict[str, Role] = {f"demo-p{number}": "prefill" for number in range(options.prefill)}
    names |= {f"demo-d{number}": "decode" for number in range(options.decode)}
    proxy = None
    started = time.monotonic()
    try:
        say(f"engines: starting {options.prefill} to prefill and {options.decode} to decode (about a minute) ...")
        fleet.launch(names)
        for engine in fleet.engines.values():
            say(f"  {engine.role:8} {engine.url}  log {engine.log}")
        say(f"engines: up after {time.monotonic() - started:.0f} s")
        with tempfile.TemporaryDirectory() as folder:
            proxy = Proxy.start(fleet.prefills, fleet.decodes, Path(folder), port=port_for(options.port))
            say(f"pdproxy: {proxy.url}")
            show(proxy, fleet)
            if not options.once:
                say(f"\nTry it:\n  curl {proxy.url}/v1/completions -H 'Content-Type: application/json' \\")
                say(f"""    -d '{{"model": "{MODEL}", "prompt": "import os", "max_tokens": 8}}'""")
                say("Ctrl-C stops everything.")
                proxy.process.wait()
            return proxy.stop()
    except KeyboardInterrupt:
        say("\nstopping ...")
        return 0
    finally:
        if proxy and proxy.process.poll() is None:
            proxy.stop()
        fleet.stop()


def main() -> int:
    """The command line. Exit code 3: engines can't be had on this machine."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prefill", type=int, default=1, metavar="N", help="engines that prefill (default 1)")
    parser.add_argument("--decode", type=int, default=1, metavar="N", help="engines that decode (default 1)")
    parser.add_argument("--port", type=int, default=8000, help="the proxy's port; another one where it is taken")
    parser.add_argument("--once", action="store_true", help="stop after the first answer")
    options = parser.parse_args()
    try:
        return run(options)
    except EnginesUnavailable as error:
        print(f"engines unavailable: {error}", file=sys.stderr)
        return 3
    except (EngineFailed, NurseryFailed, ProxyFailed) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
