"""The names of headless Services: a name server for the proxies, and `getent` for preStop hooks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.fakes.name_server import name_server
from tests.kubernetes.deployments import ended, ends, is_ready
from tests.kubernetes.kinds import POD, SERVICE
from tests.kubernetes.objects import Api, Object

LOOK = 0.1
_GETENT = """#!/bin/sh
# getent ahosts NAME
[ -e "{names}/$2" ] || exit 2
while read -r address; do echo "$address STREAM $2"; done <"{names}/$2"
"""


@asynccontextmanager
async def names(api: Api, folder: Path) -> AsyncIterator[dict[str, str]]:
    """Follow the Services. Yield the variables of the pods that know their names. `folder`: for
    what the hooks read.
    """
    (folder / "names").mkdir(parents=True)
    (folder / "bin").mkdir()
    program = folder / "bin" / "getent"
    program.write_text(_GETENT.format(names=folder / "names"))
    program.chmod(0o755)
    async with name_server() as server:

        async def follow() -> None:
            while True:
                pods = await api.of(POD).list()
                found = {
                    one["metadata"]["name"]: _addresses(one, pods)
                    for one in await api.of(SERVICE).list()
                }
                server.records = {
                    **{(name, "A"): (0, places) for name, places in found.items()},
                    **{(name, "AAAA"): (0, ()) for name in found},
                }
                for gone in {one.name for one in (folder / "names").iterdir()} - found.keys():
                    (folder / "names" / gone).unlink()
                for name, places in found.items():
                    new = folder / f"{name}.new"
                    new.write_text("".join(f"{one}\n" for one in places))
                    new.rename(folder / "names" / name)
                await asyncio.sleep(LOOK)

        task = asyncio.create_task(follow())
        try:
            yield {
                "PDPROXY_DNS__SERVERS": f'["{server.address}"]',
                "PDPROXY_DNS__MIN_TTL": "1",
                "PDPROXY_DNS__MAX_TTL": "1",
                "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            }
        finally:
            await ended([task])


def _addresses(service: Object, pods: list[Object]) -> list[str]:
    """Return the addresses of a Service without one of its own."""
    spec = service["spec"]
    of_all = spec.get("publishNotReadyAddresses", False)
    selector = spec["selector"].items()
    return [
        pod["status"]["podIP"]
        for pod in pods
        if selector <= pod["metadata"].get("labels", {}).items()
        and pod.get("status", {}).get("podIP")
        and (of_all or (is_ready(pod) and not ends(pod)))
    ]
