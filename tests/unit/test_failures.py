"""What is recorded of tests that fail, and the list of those that failed once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from datetime import date
from pathlib import Path

import pytest

from tests.failures.__main__ import KNOWN, LAST_FAILED, few, main
from tests.failures.recorder import REPORT, recorded
from tests.failures.rows import LIST, Row, parse, unknown

ROOT = Path(__file__).parents[2]
HOOKS = (
    "from tests.conftest import *\nfrom tests.failures import ends\nends.GRACE, ends.AGAIN = "
    "2.0, 0.5\n"
)
PLUGINS = {
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTEST_ADDOPTS": "-p timeout -p asyncio -p xdist",
}
ROW = Row(
    'tests/x.py::test_y[a "b"]',
    "0123456789ab",
    date(2026, 3, 1),
    "the gate",
    "assert 1 == 2\n  because \\ é",
)


def run(folder: Path, tests: str, *arguments: str, report: str = "report") -> tuple[int, str]:
    """Run pytest on a file of tests, with the hooks of all tests. Return its exit code and all it
    printed.
    """
    (folder / "conftest.py").write_text(HOOKS)
    (folder / "pytest.ini").write_text(
        "[pytest]\ntimeout = 100\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = "
        "function\n"
    )
    (folder / "test_some.py").write_text(tests)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "test_some.py", *arguments],
        cwd=folder, env={**os.environ, **PLUGINS, "PYTHONPATH": str(ROOT),
        REPORT: report and str(folder / report)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


FAILING = """
import os, pytest
@pytest.fixture
def broken():
    yield
    raise ValueError("at its end")
def test_good(): assert True
@pytest.mark.parametrize("text", ["a b"])
def test_bad(text, broken): assert len(text) == 2, "a reason\\nof\\nthree lines"
def test_gone(): os._exit(1)
"""


def test_failures_are_shown_and_written_as_they_happen(tmp_path: Path) -> None:
    code, output = run(tmp_path, FAILING.replace("os._exit(1)", "assert 0"))
    assert code == 1
    assert recorded(tmp_path / "report") == {
        "test_some.py::test_bad[a b]": "AssertionError: a reason\nof",
        "test_some.py::test_gone": "assert 0",
    }
    bad = "FAILED test_some.py::test_bad[a b]"
    assert output.index(f"{bad} (call): AssertionError: a reason") < output.index("= FAILURES =")
    assert f"{bad} (teardown): ValueError: at its end" in output


def test_failures_are_shown_where_no_file_is_named(tmp_path: Path) -> None:
    """Nobody waits for the end of the run to see which test it was."""
    code, output = run(tmp_path, FAILING.replace("os._exit(1)", "assert 0"), report="")
    assert code == 1
    assert output.index("FAILED test_some.py::test_gone (call): assert 0") < output.index(
        "= FAILURES ="
    )
    assert not (tmp_path / "report").exists()


def test_failures_in_other_processes_are_recorded_once_and_those_of_a_process_that_died(
    tmp_path: Path,
) -> None:
    code, _ = run(tmp_path, FAILING, "-n", "2")
    assert code == 1
    found = recorded(tmp_path / "report")
    assert found["test_some.py::test_bad[a b]"] == "AssertionError: a reason\nof"
    assert "crashed while running" in found["test_some.py::test_gone"]
    assert len((tmp_path / "report").read_text().splitlines()) == 3
    assert few(tmp_path / "report", tmp_path / LAST_FAILED) is None


def test_only_few_failures_run_again(tmp_path: Path) -> None:
    report, last = tmp_path / "report", tmp_path / "lastfailed"

    def write(count: int, recorded: int) -> None:
        last.write_text(json.dumps({f"t{number}": True for number in range(count)}))
        report.write_text(
            "".join(json.dumps({"test": f"t{n}", "message": "m"}) + "\n" for n in range(recorded))
        )

    write(3, 3)
    assert few(report, last) is None
    write(4, 4)
    assert few(report, last) == "4 tests failed: only up to 3 run again"
    write(0, 0)
    assert few(report, last) is not None
    write(2, 1)
    assert "but ['t0'] failed" in str(few(report, last)), (
        "whose message is not known is not run again"
    )


def test_rows_are_printed_as_the_list_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A test that has no row yet may let work land; one that has a row may not."""
    listed, report, to = tmp_path / "failed_once.toml", tmp_path / "report", tmp_path / "rows.toml"
    monkeypatch.setattr("tests.failures.__main__.LIST", listed)
    listed.write_text(ROW.toml())
    report.write_text(json.dumps({"test": "t::new", "message": "one\ntwo"}) + "\n")
    arguments = ["rows", str(report), "--where", "the gate, 2 cores", "--to", str(to)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert to.read_text() in printed
    assert str(to) in printed
    (row,) = parse(to.read_text()).failed
    assert (row.test, row.message, row.where) == ("t::new", "one\ntwo", "the gate, 2 cores")
    assert re.fullmatch("[0-9a-f]{12}", row.commit)
    assert parse(listed.read_text() + to.read_text()).failed == (ROW, row)

    report.write_text(json.dumps({"test": ROW.test, "message": "another reason"}) + "\n")
    assert main(arguments) == KNOWN
    assert f"{ROW.test} has a row" in capsys.readouterr().out


GOOD = ROW.toml() + '[[at_risk]]\ntests = ["tests/z.py"]\ncause = "a cause"\n'


def test_a_list_is_read_as_it_was_written() -> None:
    listed = parse(GOOD)
    assert listed.failed == (ROW,)
    assert listed.named() == [ROW.test, "tests/z.py"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[failed]\n", "Expected"),
        ("[[other]]\n", "unknown: other"),
        (ROW.toml() * 2, "two rows"),
        (GOOD.replace("commit", "comit"), "expected test, commit, day, where, message"),
        (GOOD.replace("2026-03-01", '"2026-03-01"'), "day must be a date"),
        (GOOD.replace('"the gate"', '""'), "where must be a str, and not empty"),
        (GOOD.replace('cause = "a cause"', ""), "expected tests, cause"),
        (GOOD.replace('["tests/z.py"]', "[]"), "tests must be a list, and not empty"),
    ],
)
def test_a_list_that_is_wrong(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse(text)


def test_each_name_in_the_list_must_be_a_test() -> None:
    collected = {"tests/x.py::test_y[a::b]", "tests/x.py::test_z"}
    good = ["tests/x.py", "tests/x.py::test_y", "tests/x.py::test_y[a::b]", "tests/x.py::test_z"]
    assert unknown(good, collected) == []
    bad = [
        "tests/x.py::test_",
        "tests/x.py::test_y[a",
        "tests/y.py",
        "tests",
        "tests/x.py::test_z[a]",
    ]
    assert unknown(bad, collected) == bad


def test_the_list_is_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The gate asks whether it names tests that are collected."""
    names = parse(LIST.read_text()).named()
    collected = tmp_path / "collected"
    collected.write_text(
        "\n".join(name if "::" in name else f"{name}::test_x" for name in names) + "\n\n9 tests\n"
    )
    assert main(["check", str(collected)]) == 0
    listed = tmp_path / "list.toml"
    monkeypatch.setattr("tests.failures.__main__.LIST", listed)
    listed.write_text(ROW.toml())
    assert main(["check", str(collected)]) == 1
    listed.write_text("[[failed]]\n")
    assert main(["check", str(collected)]) == 1
    errors = capsys.readouterr().err
    assert f"there is no test {ROW.test}" in errors
    assert "expected test, commit" in errors


def test_no_test_has_a_second_try() -> None:
    """The README's command runs each test once: no plugin here or option there runs failed tests
    again.
    """
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    second = re.compile(r"rerun|retry|retries|flaky|flakefinder|last-failed|--lf")
    assert not second.search(str(project["tool"]["pytest"]))
    installed = (ROOT / "requirements.lock").read_text()
    assert not re.findall(
        r"^(?:pytest-)?(?:rerunfailures|retry|flaky|flakefinder|repeat)\b.*",
        installed,
        re.MULTILINE,
    )
    commands = [
        line for line in (ROOT / "README.md").read_text().splitlines() if "bin/pytest" in line
    ]
    assert commands
    assert not second.search(str(commands))
