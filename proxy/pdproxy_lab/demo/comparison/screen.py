"""Where the comparison is shown: a screen of its own in a terminal, else lines. Owns the terminal
and its keys.

It draws in a thread: a terminal that is stopped (Ctrl-S) must block neither proxies nor engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import os
import sys
import termios
import tty
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live

from pdproxy_lab.demo.comparison import view
from pdproxy_lab.demo.comparison.view import Picture
from pdproxy_lab.demo.options import Say

SIZES = ((80, 24), (120, 40), (200, 60))
"""Columns and rows of pictures."""
_MAX_KEYS = 64
"""Bytes that are read at a time: nobody types as many."""


class ComparisonScreen:
    """Use it as a context manager inside an event loop: on exit the terminal is restored."""

    def __init__(self, say: Say, pressed: Callable[[str], None]) -> None:
        """Make one; `pressed` gets each key: a character, or the bytes of an arrow key as text."""
        self._say = say
        self._pressed = pressed
        self._console = Console()
        self._live: Live | None = None
        self._input: int | None = None
        self._modes: list[Any] = []
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                console=self._console,
                screen=True,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            if sys.stdin.isatty():
                self._input = sys.stdin.fileno()

    @property
    def is_terminal(self) -> bool:
        """Whether there is a terminal to draw on."""
        return self._live is not None

    @property
    def has_keys(self) -> bool:
        """Whether keys can be pressed."""
        return self._input is not None

    def __enter__(self) -> Self:
        """Take the terminal."""
        if self._live is not None:
            self._live.start(refresh=False)
        if self._input is not None:
            self._modes = termios.tcgetattr(self._input)
            tty.setcbreak(self._input)  # Ctrl-C stays a signal
            asyncio.get_running_loop().add_reader(self._input, self._read, self._input)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore it."""
        if self._input is not None:
            asyncio.get_running_loop().remove_reader(self._input)
            with contextlib.suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(self._input, termios.TCSADRAIN, self._modes)
        if self._live is not None:
            self._live.stop()

    async def show(self, picture: Picture) -> None:
        """Show a picture in place of the last one."""
        if self._live is not None:
            await asyncio.to_thread(self._draw, self._live, picture)
        else:
            self._say(view.line(picture))

    def _draw(self, live: Live, picture: Picture) -> None:
        width, height = self._console.size
        live.update(Group(*view.render(picture, width=width, height=height)), refresh=True)

    def _read(self, source: int) -> None:
        try:
            typed = os.read(source, _MAX_KEYS).decode(errors="replace")
        except OSError:
            typed = ""
        if not typed:  # the terminal is gone
            asyncio.get_running_loop().remove_reader(source)
        elif typed.startswith("\x1b"):  # one key that is no character
            self._pressed(typed)
        else:
            for key in typed:
                self._pressed(key)


def capture(folder: Path, picture: Picture) -> None:
    """Write a picture to a folder as SVG, in each of `SIZES`, as it looks where there are keys.

    Raises:
        OSError: it can't be written.
    """
    picture = dataclasses.replace(picture, keys=True)
    for width, height in SIZES:
        console = Console(
            record=True,
            width=width,
            file=io.StringIO(),
            force_terminal=True,
            color_system="truecolor",
        )
        console.print(Group(*view.render(picture, width=width, height=height)))
        path = folder / f"demo-{width}x{height}.svg"
        path.write_text(console.export_svg(title="pdproxy demo", unique_id=f"demo{width}"))
