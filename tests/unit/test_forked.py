"""Processes that tests fork are as those that the system starts: what they print, how they end,
where they run.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.fakes.forked import piped

SAYS = """
import os, sys
print(sys.argv[1:], os.getcwd(), os.environ.get("MARK"), sys.stdin.read() if sys.stdin else "")
sys.stderr.write("and this\\n")
sys.exit(3)
"""


async def test_what_it_prints_and_how_it_ends(tmp_path: Path) -> None:
    """Both outputs, the exit code, its arguments, its folder and its environment. There is nothing
    to read.
    """
    process = await piped("a", "b c", env={**os.environ, "MARK": "x"}, code=SAYS, cwd=tmp_path)
    out, err = await process.communicate()
    assert out.decode() == f"['a', 'b c'] {tmp_path} x \n"
    assert err == b"and this\n"
    assert process.returncode == 3


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "ValueError"])
async def test_an_error_that_nobody_catches_is_shown(error: str) -> None:
    """It is no end with 0."""
    process = await piped(env=os.environ, code=f"raise {error}")
    _, err = await process.communicate()
    assert error in err.decode()
    assert process.returncode != 0
