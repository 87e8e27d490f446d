"""`pdproxy up` with two real engines on a CPU."""

import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pdproxy_lab.up.state import Folder
from pdproxy_lab.up.system_processes import parse_stat
from tests.demo.processes import Running, alive, running
from tests.fakes.ports import free_port
from tests.up.processes import SERVES

from .build import Built

MODEL = "model"
START = 240.0
"""Seconds. Each engine imports vLLM, for half a minute of a core."""


class Up:
    """One of them. `options`: with which another one changes it."""

    def __init__(self, built: Built) -> None:
        self.port = free_port()
        self.folder = Folder(Path(tempfile.mkdtemp(prefix="up-")))
        self.options = [
            str(built.model),
            *("--vllm", str(built.root / "venv" / "bin" / "vllm")),
            *("--folder", str(self.folder.path), "--port", str(self.port)),
            *("--first-port", str(free_port())),
        ]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def pid(self, name: str) -> int:
        found = parse_stat(self.folder.stat(name).read_text())
        assert found is not None
        return found.pid

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Running]:
        """Until the end of the block; nothing is left then."""
        async with running(*self.options, command="up") as up:
            await up.until(SERVES, START)
            yield up
        assert alive([str(self.folder.path)]) == []
        assert alive([str(self.port)]) == []
        shutil.rmtree(self.folder.path)
