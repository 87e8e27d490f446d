"""The sample report of docs/guide/check.md, made on simulated engines: `python -m
tests.conformance.sample`.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
from pathlib import Path

from pdproxy.cli.main import main
from tests.conformance.engines import rig

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "check.md"
BEGIN, END = "```text\n", "```"
FIRST = 2
"""How many checks the excerpt begins with."""
SHOWN = {
    "p": "http://127.0.0.1:8200",
    "d": "http://127.0.0.1:8300",
    "plain": "http://127.0.0.1:8100",
}


async def report() -> tuple[int, str]:
    """Run the command. Return its exit code and what it printed, with the usual ports."""
    async with rig() as engines:
        urls = {name: getattr(engines, name).url for name in SHOWN}
        line = [
            "--prefill",
            urls["p"],
            "--decode",
            urls["d"],
            "--plain",
            urls["plain"],
            "--connector",
            "nixl",
        ]
        out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        with contextlib.redirect_stdout(out):
            code = await asyncio.to_thread(main, ["conformance", *line, "--lease-watch", "20"])
    out.flush()
    text = out.buffer.getvalue().decode()
    for name, shown in SHOWN.items():
        text = text.replace(urls[name], shown)
    return code, text


def alike(text: str) -> str:
    """Return a report without what differs from run to run: numbers, and where lines break because
    of them.
    """
    return re.sub(r"\d+(\.\d+)?", "N", " ".join(text.split()))


def excerpt(report: str) -> str:
    """Return what the page shows of a report: its first checks, the last one, and the verdict."""
    head, *checks = re.split(r"^(?=  [✓·✗] )", report, flags=re.MULTILINE)
    return "".join([head, *checks[:FIRST], "  ...\n", checks[-1]])


def shown() -> str:
    """Return the excerpt that the page shows."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(
        before + BEGIN + excerpt(asyncio.run(report())[1]) + END + rest.partition(END)[2]
    )
