"""Have real clients talk to a scripted server, and keep what they send:
`python -m tests.clients.record CLIENTS --to FOLDER`.

CLIENTS is the folder of `tests.clients.install`. All of it runs in a network namespace that has
nothing but loopback, so that no client reaches anything else. What the recorded bodies of the
project do not have is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.clients.bodies import FOLDER, Body, load, save
from tests.clients.install import DRIVERS, Client
from tests.clients.placement import why_alone
from tests.clients.stub import Recorded, Stub
from tests.clients.trim import shape, trimmed

HERE = Path(__file__).resolve().parent
_INSIDE = "PDPROXY_TEST_INSIDE"
ENVIRONMENT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}


def kept(requests: list[Recorded]) -> list[Body]:
    """Return what is kept of these requests: one body of each shape, with all clients that send
    it.
    """
    found: dict[object, Body] = {}
    names: collections.Counter[str] = collections.Counter()
    for one in sorted(requests, key=lambda one: "@" not in one.client):
        body = trimmed(one.body)
        key = (one.route, shape(body))
        if key not in found:
            name = f"{one.client.partition('@')[0]}-{one.case}"
            names[name] += 1
            name += f"-{names[name]}" if names[name] > 1 else ""
            alone = why_alone(one.route, body)
            found[key] = Body(name, [], one.route, one.headers, alone, body)
        if one.client not in found[key].clients:
            found[key].clients.append(one.client)
    return list(found.values())


async def _drive(client: Client, at: Path, url: str) -> bool:
    with tempfile.TemporaryDirectory() as work:
        command = client.command(at, HERE / "drivers", url, Path(work) / "work")
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=client.folder(at),
            env={"PATH": os.environ["PATH"], "HOME": work, **ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        said, _ = await process.communicate()
    if process.returncode:
        print(f"{client.driver} ended with {process.returncode}:\n{said.decode()[-4000:]}")
    return process.returncode == 0


async def record(at: Path, folder: Path, only: list[str]) -> bool:
    """Record all clients; return whether each of them has done all of its cases."""
    stub = await Stub().start()
    good = True
    for client in DRIVERS:
        if not only or client.driver in only:
            before = len(stub.requests)
            good &= await _drive(client, at, stub.url)
            print(f"{client.driver}: {len(stub.requests) - before} requests", flush=True)
    await stub.stop()
    if stub.others:
        print("also asked for:", dict(collections.Counter(stub.others)))
    bodies = kept(stub.requests)
    known = {(one.route, shape(one.body)) for one in load()} if FOLDER.exists() else set()
    new = [one for one in bodies if (one.route, shape(one.body)) not in known]
    save(bodies, folder)
    print(f"{len(stub.requests)} requests, {len(bodies)} shapes, {len(new)} of them new")
    for body in new:
        print(f"new: {body} ({', '.join(body.clients)}), {body.alone or 'split'}")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description="Record what clients send.")
    parser.add_argument("clients", type=Path, help="the folder of tests.clients.install")
    parser.add_argument("--to", type=Path, default=FOLDER, help="where the bodies go")
    parser.add_argument("--only", action="append", default=[], help="a driver")
    arguments = parser.parse_args()
    if _INSIDE not in os.environ:  # once more, where there is only loopback
        inside = [sys.executable, "-m", "tests.clients.record", *sys.argv[1:]]
        words = ["unshare", "-rn", "sh", "-c", 'ip link set lo up; exec "$@"', "sh", *inside]
        return subprocess.run(words, env=os.environ | {_INSIDE: "1"}, check=False).returncode
    good = asyncio.run(record(arguments.clients.resolve(), arguments.to, arguments.only))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
