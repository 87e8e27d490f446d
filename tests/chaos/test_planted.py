"""Planted bugs: each one's old text is in the package, one that is gone fails; the script says what
was caught.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.chaos.course import Result
from tests.chaos.finding import Finding
from tests.chaos.options import Options
from tests.chaos.planted import __main__ as script
from tests.chaos.planted import hunt as hunting
from tests.chaos.planted.bug import PACKAGE, Bug, Change, GoneError, copy_package
from tests.chaos.planted.bugs import BUGS

CHAOS = Path(__file__).parent


def test_there_are_bugs_in_many_parts() -> None:
    assert len(BUGS) >= 15
    files = {change.path for bug in BUGS.values() for change in bug.changes}
    parts = {path.rpartition("/")[0] for path in files}
    assert len(parts) >= 10, sorted(parts)


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_can_be_planted(name: str) -> None:
    """Its old texts are in the package once each, and what they become is a program."""
    texts: dict[str, str] = {}
    for change in BUGS[name].changes:
        before = texts.get(change.path) or (PACKAGE / change.path).read_text()
        texts[change.path] = after = change.of(before)
        assert after != before
    for path, text in texts.items():
        ast.parse(text, path)
    assert BUGS[name].rules


def test_rules_are_those_of_chaos() -> None:
    sources = "".join(file.read_text() for file in CHAOS.glob("*.py"))
    missing = [rule for bug in BUGS.values() for rule in bug.rules if f'"{rule}"' not in sources]
    assert missing == []


@pytest.mark.parametrize("old", ["a text that is gone", "import"])
def test_a_text_that_is_not_there_once_fails(tmp_path: Path, old: str) -> None:
    package = copy_package(tmp_path)
    bug = Bug(
        "two changes",
        ("a rule",),
        (Change("kit/ids.py", "def mint", "def mint2"), Change("kit/ids.py", old, "x")),
    )
    with pytest.raises(GoneError, match=r"^kit/ids\.py has [0-9]+ times the text"):
        bug.plant(package)
    assert "def mint2" not in (package / "kit" / "ids.py").read_text(), "nothing is changed then"


def test_where_lines_are_broken_is_no_matter() -> None:
    change = Change("kit/ids.py", "    mint(one, two)\n    end()\n", "    mint()\n")
    assert change.of("    mint(\n        one,\n        two,\n    )\n    end()\n") == "    mint()\n"
    with pytest.raises(GoneError):
        change.of("    remint(one, two)\n    end()\n")


def test_a_copy_is_what_runs(tmp_path: Path) -> None:
    """A copy that can't run is no bug that was caught."""
    package = copy_package(tmp_path)
    (package / "app" / "compose.py").write_text("raise SystemExit('this is the copy')\n")
    with pytest.raises(RuntimeError, match="this is the copy"):
        hunting.run_seed(package, Options())


def _results(found: dict[int, list[str]]) -> object:
    def run_seed(package: Path, options: Options) -> Result:
        return Result([Finding(rule, "text") for rule in found.get(options.seed, [])], cpu=2.0)

    return run_seed


BUG = Bug("it is wrong", ("the rule", "another"), (Change("kit/ids.py", "def mint", "def mint2"),))


def test_a_hunt_ends_with_the_rule_that_the_bug_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hunting, "copy_package", _fake_copy)
    monkeypatch.setattr(
        hunting, "run_seed", _results({1: ["not this"], 2: ["the rule", "not this"]})
    )
    found = hunting.hunt("name", BUG, range(5), Options())
    assert found.caught
    assert (found.seeds, found.rules, found.cpu) == ([0, 1, 2], ["the rule"], 6.0)
    assert [(seed, one.rule) for seed, one in found.others] == [(1, "not this")]
    assert found.line() == "| name | seed 2 | 3 | the rule | 6.0 |"
    missed = hunting.hunt("name", BUG, range(2), Options())
    assert not missed.good
    assert missed.line() == "| name | NOT CAUGHT | 2 | - | 4.0 |"


def _fake_copy(folder: Path) -> Path:
    (folder / "kit").mkdir()
    (folder / "kit" / "ids.py").write_text("def mint(): ...\n")
    return folder


@pytest.mark.parametrize(
    ("found", "code", "said"),
    [
        ({3: ["the rule"]}, 1, "a rule is broken"),  # the control breaks it as well
        ({}, 1, "NOT CAUGHT"),
    ],
)
def test_the_script(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    found: dict[int, list[str]],
    code: int,
    said: str,
) -> None:
    monkeypatch.setattr(hunting, "copy_package", _fake_copy)
    monkeypatch.setattr(hunting, "run_seed", _results(found))
    monkeypatch.setattr(script, "BUGS", {"one": BUG})
    assert script.main(["one", "--seeds", "4"]) == code
    assert said in capsys.readouterr().out


def test_the_script_if_all_is_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The control gets fewer seeds: it does not reach the one that breaks the rule."""
    monkeypatch.setattr(hunting, "copy_package", _fake_copy)
    monkeypatch.setattr(hunting, "run_seed", _results({3: ["the rule"]}))
    monkeypatch.setattr(script, "BUGS", {"one": BUG})
    assert script.main(["--seeds", "4", "--control", "3"]) == 0
    assert "3 of 3 are as they should be" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        script.main(["two"])
    assert ended.value.code == 2
