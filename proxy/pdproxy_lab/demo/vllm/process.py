"""The demo's engines as processes, each under a guard.

Owns their process groups. See `scripts/guard.py` for how an engine ends even where the demo is
killed.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pdproxy_lab.up.program import kill_group

GUARD = Path(__file__).resolve().parents[1] / "scripts" / "guard.py"
GRACE = 10.0
"""Seconds that an engine gets between SIGTERM and SIGKILL."""


class EngineProcess:
    """One engine under its guard."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> None:
        self.name = name
        self.log = log
        self._command = command
        self._environment = environment
        self._guard: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it; everything it prints goes to its log."""
        with self.log.open("wb") as out:
            self._guard = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(GUARD), str(GRACE), *self._command),
                stdin=asyncio.subprocess.PIPE,
                stdout=out,
                stderr=out,
                env=dict(self._environment),
                start_new_session=True,
            )

    @property
    def ended(self) -> bool:
        """Whether it has ended, or was not started."""
        return self._guard is None or self._guard.returncode is not None

    def said(self, *words: str) -> bool:
        """Return whether its log has one of these."""
        try:
            text = self.log.read_text(errors="replace")
        except OSError:
            return False
        return any(word in text for word in words)

    async def stop(self, at_once: asyncio.Event) -> None:
        """End it with its children: gracefully, or by SIGKILL once `at_once` is set or the grace
        has passed.
        """
        guard = self._guard
        if guard is None:
            return
        if guard.stdin is not None:
            guard.stdin.close()
        ended = asyncio.ensure_future(guard.wait())
        hurry = asyncio.ensure_future(at_once.wait())
        await asyncio.wait({ended, hurry}, timeout=GRACE + 2.0, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not ended.done():
            kill_group(guard.pid)
        await ended
