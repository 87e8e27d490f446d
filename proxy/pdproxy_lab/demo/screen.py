"""Shows figures once per second: a live view in a terminal, else one line each. Owns the terminal.

It draws in a thread: a terminal that is stopped (Ctrl-S) must block neither the proxy nor its
engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live

from pdproxy.observe.formats import TextFormatter
from pdproxy_lab.demo import view
from pdproxy_lab.demo.figures import Figures
from pdproxy_lab.demo.options import Say


class Screen:
    """Where figures go. Use it as a context manager: on exit the terminal is restored."""

    def __init__(self, title: str, say: Say, *, lines: bool) -> None:
        """Make one; `lines`: without a terminal, print the figures as lines."""
        self._title = title
        self._say = say
        self._lines = lines
        self._console = Console()
        self._live: Live | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            # Other output to the same terminal (warnings) is shown above the view.
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=sys.stderr.isatty(),
            )

    def __enter__(self) -> Self:
        """Take the terminal."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore it."""
        if self._live is not None:
            self._live.stop()

    async def show(self, figures: Figures) -> None:
        """Show figures in place of the last ones."""
        if self._live is not None:
            await asyncio.to_thread(self._draw, self._live, figures)
        elif self._lines:
            self._say(view.line(figures))

    def _draw(self, live: Live, figures: Figures) -> None:
        width, height = self._console.size
        live.update(view.render(figures, self._title, width=width, height=height), refresh=True)


def log_to_stderr(level: int, write: Callable[[str], object] | None = None) -> None:
    """Send the log lines of the proxy and of uvicorn to the current standard error, which a live
    view replaces.
    """
    handler = _ToStderr(write)
    handler.setFormatter(TextFormatter())
    for name in ("pdproxy", "uvicorn", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level)
    logging.getLogger("uvicorn.access").disabled = True


class _ToStderr(logging.Handler):
    def __init__(self, write: Callable[[str], object] | None) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        # standard error is closed: logging must not fail
        with contextlib.suppress(OSError, ValueError):
            (self._write or sys.stderr.write)(self.format(record) + "\n")
