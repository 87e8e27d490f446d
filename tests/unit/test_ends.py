"""A test that hangs ends, and shows where it hangs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.failures.recorder import recorded
from tests.unit.test_failures import run

WAITING = """
import asyncio, pytest

async def a_step():
    await asyncio.Event().wait()

async def restless():
    while True: pass

@pytest.mark.timeout(1)
async def test_waits():
    await a_step()

@pytest.mark.timeout(1)
async def test_beside_a_task_that_never_rests():
    asyncio.ensure_future(restless())
    await a_step()

def test_good(): pass
"""


@pytest.mark.timeout(300)
def test_one_that_waits_says_what_it_waits_for(tmp_path: Path) -> None:
    """Also where the first signal has ended another task."""
    code, output = run(tmp_path, WAITING)
    assert code == 1
    found = recorded(tmp_path / "report")
    assert found.keys() == {
        f"test_some.py::test_{name}" for name in ("waits", "beside_a_task_that_never_rests")
    }
    assert all("Timeout (>1.0s)" in one for one in found.values())
    assert "1 passed" in output
    for test in found:
        place = (
            r":\d+ "
            + test.partition("::")[2]
            + r": await a_step\(\)\n.*:\d+ a_step: await asyncio.Event"
        )
        assert re.search(r"- Tasks that wait -+\n.*" + place, output, re.DOTALL)


ON_UVLOOP = """
import asyncio, gc, pytest, uvloop

async def a_step():
    await asyncio.Event().wait()

@pytest.mark.timeout(1)
def test_waits():
    uvloop.run(a_step())

async def frozen():
    gc.freeze()
    await a_step()

@pytest.mark.timeout(1)
def test_waits_where_the_collector_does_not_look():
    uvloop.run(frozen())

def test_good(): pass
"""


@pytest.mark.timeout(300)
def test_one_that_waits_on_uvloops_loop_ends_too(tmp_path: Path) -> None:
    """That loop reports what a signal raises, and goes on."""
    code, output = run(tmp_path, ON_UVLOOP)
    assert code == 1
    found = recorded(tmp_path / "report")
    assert len(found) == 2
    assert all("Timeout (>1.0s)" in one for one in found.values())
    assert len(re.findall(r":\d+ a_step: await asyncio.Event", output)) >= 2
    assert "1 passed" in output


HANGING = """
import pytest, threading
@pytest.fixture
def hangs():
    yield
    threading.Event().wait()

@pytest.mark.timeout(1)
def test_bad(hangs): assert 0

def test_good(): pass
"""


@pytest.mark.timeout(300)
def test_one_that_hangs_behind_its_timeout_ends_with_its_process(tmp_path: Path) -> None:
    """The last stack says where. The other tests run in a new process."""
    code, output = run(tmp_path, HANGING, "-n", "1")
    assert code == 1
    assert recorded(tmp_path / "report").keys() == {"test_some.py::test_bad"}
    assert "crashed while running" in output
    assert "1 passed" in output
    assert re.search(r"test_some.py\", line \d+ in hangs\n", output)
