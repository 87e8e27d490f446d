"""The writer of log lines: order, bounds, the count of what is dropped, and streams that can't be
written.
"""

from __future__ import annotations

import gc
import io
import os
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator

import pytest

from pdproxy.observe import lines
from pdproxy.observe.lines import LineWriter

PATIENCE = 30.0


def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def report(count: int) -> str:
    return f"{count} dropped"


class Blocking(io.StringIO):
    """A stream whose writes wait for the test. It has no descriptor."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.go.set()
        self.writes: list[str] = []
        self.error: Exception | None = None

    def write(self, text: str) -> int:
        """One write."""
        assert self.go.wait(PATIENCE)
        if self.error is not None:
            raise self.error
        self.writes.append(text)
        return len(text)

    @property
    def lines(self) -> list[str]:
        """What was written."""
        return "".join(self.writes).splitlines()


@pytest.fixture
def stream() -> Iterator[Blocking]:
    made = Blocking()
    yield made
    made.error = None
    made.go.set()


def test_lines_come_in_order_and_together(stream: Blocking) -> None:
    """From several threads: each thread's lines in its order, and many lines in one write."""
    writer = LineWriter(stream, report)

    def write(name: str) -> None:
        for number in range(500):
            writer.write(f"{name} {number}")

    threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert writer.close(PATIENCE)
    assert len(stream.lines) == 1500
    for name in "abc":
        assert [line for line in stream.lines if line[0] == name] == [
            f"{name} {number}" for number in range(500)
        ]
    assert len(stream.writes) < 150
    assert writer.dropped == 0


@pytest.mark.parametrize("bound", [{"max_bytes": 10_000}, {"max_lines": 50}])
def test_what_is_too_much_is_dropped_and_reported(stream: Blocking, bound: dict[str, int]) -> None:
    """Nobody waits; the queue keeps the first lines; the report stands where lines are missing, and
    later ones behind it.
    """
    writer = LineWriter(stream, report, **bound)
    stream.go.clear()
    for number in range(2000):
        writer.write(f"{number} {'x' * 50}")
    kept = 2000 - writer.dropped
    assert 40 < kept < 120
    assert writer._size <= 20_000
    stream.go.set()
    until(lambda: report(writer.dropped) in stream.lines)
    writer.write("later")
    assert writer.close(PATIENCE)
    numbers = [line.split()[0] for line in stream.lines]
    assert numbers == [*map(str, range(kept)), str(writer.dropped), "later"]


def test_a_line_at_the_bound_of_bytes_counts_what_is_being_written(stream: Blocking) -> None:
    """What the thread has taken and can't get rid of is memory, too."""
    writer = LineWriter(stream, report, max_bytes=10_000)
    stream.go.clear()
    writer.write("x" * 9000)
    until(lambda: not writer._lines)
    writer.write("y" * 9000)
    assert writer.dropped == 1
    stream.go.set()
    assert writer.close(PATIENCE)
    assert stream.lines == ["x" * 9000, "1 dropped"]


def test_a_stream_that_fails_costs_lines_alone(stream: Blocking) -> None:
    """A full disk: lines are counted, and reported once it can be written again."""
    writer = LineWriter(stream, report)
    stream.error = OSError(28, "no space left on device")
    for number in range(3):
        writer.write(f"{number}")
        until(lambda: writer._asleep)
    assert (writer.dropped, stream.lines) == (3, [])
    stream.error = None
    writer.write("again")
    assert writer.close(PATIENCE)
    assert stream.lines == ["again", "3 dropped"]
    writer.write("too late")
    assert writer.dropped == 4


def test_a_close_waits_for_a_moment_only(stream: Blocking) -> None:
    """Who ends is not held up by who doesn't read."""
    writer = LineWriter(stream, report)
    stream.go.clear()
    writer.write("x")
    assert writer.close(0.01) is False


def test_no_stream_is_no_failure() -> None:
    """A process without a standard error: all lines are dropped, no thread is started."""
    writer = LineWriter(None, report)
    writer.write("x")
    assert writer.dropped == 1
    assert writer._thread is None
    assert writer.close()


def test_a_pipe_that_does_not_block_is_written_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Somebody who shares standard error has made it non-blocking: lines wait, and none is torn."""
    monkeypatch.setattr(lines, "RETRY", 0.001)
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    with os.fdopen(read_end) as reader, os.fdopen(write_end, "w") as stream:
        writer = LineWriter(stream, report)
        for number in range(3000):
            writer.write(f"{number} {'x' * 100}")
        found = [reader.readline() for _ in range(3000)]
        assert [line.split()[0] for line in found] == [str(number) for number in range(3000)]
        assert writer.close(PATIENCE)
    assert writer.dropped == 0


def test_half_of_a_letter_is_written(stream: Blocking) -> None:
    """What is no UTF-8 is shown as an escape."""
    writer = LineWriter(stream, report)
    writer.write("\ud83e")
    assert writer.close(PATIENCE)
    assert stream.lines == ["\\ud83e"]


def test_a_destructor_may_log_while_a_line_is_taken(stream: Blocking) -> None:
    """The garbage collector runs wherever it likes, also inside the writer: no thread waits for
    itself, no line is lost.
    """
    writer = LineWriter(stream, report)

    class Collecting(deque[bytes]):
        depth = 0

        def append(self, line: bytes) -> None:
            if self.depth < 3:
                self.depth += 1
                writer.write(f"destroyed {self.depth}")
            super().append(line)

        def popleft(self) -> bytes:
            if self.depth < 6:
                self.depth += 1
                writer.write(f"destroyed {self.depth}")
            return super().popleft()

    writer._lines = Collecting()
    thread = threading.Thread(target=writer.write, args=("first",), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    until(lambda: len(stream.lines) == 7)
    assert writer.close(PATIENCE)
    assert sorted(stream.lines) == sorted(
        ["first", *(f"destroyed {number}" for number in range(1, 7))]
    )
    assert writer._size == 0


def test_a_writer_is_forgotten() -> None:
    """What is registered for children of a fork does not keep it."""
    writer = LineWriter(None, report)
    gone = weakref.ref(writer)
    del writer
    gc.collect()
    assert gone() is None


FORK = """
import os, sys
from pdproxy.observe.lines import LineWriter
writer = LineWriter(sys.stderr, str)
writer.write("before")
child = os.fork()
writer.write("child" if child == 0 else "parent")
assert writer.close(20)
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_child_writes_its_own_lines() -> None:
    """It has no thread of its parent's, and starts one; what waited before is its parent's to
    write, once.
    """
    path = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", FORK],
        env={**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert sorted(done.stderr.splitlines()) == ["before", "child", "parent"]


def test_captured_output_is_written(capfd: pytest.CaptureFixture[str]) -> None:
    """A standard error that pytest captures by its descriptor."""
    writer = LineWriter(sys.stderr, report)
    writer.write("seen")
    assert writer.close(PATIENCE)
    assert capfd.readouterr().err == "seen\n"


def test_captured_objects_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    """What replaces standard error without a descriptor gets whole lines."""
    writer = LineWriter(sys.stderr, report)
    writer.write("seen")
    assert writer.close(PATIENCE)
    assert capsys.readouterr().err == "seen\n"
