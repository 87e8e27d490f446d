"""The mutations of the data path: what is changed in a module, and which tests are to notice."""

from __future__ import annotations

import ast

import pytest

from tests.chaos.planted.bug import PACKAGE
from tests.mutations import __main__ as script
from tests.mutations import planted
from tests.mutations.nearest import MOST, PARTS, TESTS, nearest
from tests.mutations.sites import Mutation, sites
from tests.mutations.worker_bugs import BUGS

SOURCE = b'''
LIMIT = 3


class Box:
    size: int = 0

    def __repr__(self) -> str:
        return f"{self.size + 1}"

    def put(self, more: int, *, at: str | None) -> bool:
        """Of words."""
        if self.size < LIMIT and at:
            raise ValueError(f"{more + 1}")
        self.size = more
        self.tell(at=at)
        logger.info("put")
        return True
'''
CHANGES = {
    "without `raise ValueError(f\"{more + 1}\")`",
    "without `self.size = more`",
    "without `self.tell(at=at)`",
    "not: `self.size < LIMIT and at`",
    "`self.size < LIMIT` with <=",
    "`self.size < LIMIT and at` without `at`",
    "`self.size < LIMIT and at` without `self.size < LIMIT`",
    "at=None in `self.tell(at=at)`",
    "True is False",
}  # fmt: skip


def test_each_place_is_changed_in_one_way_at_a_time() -> None:
    """Neither words, nor what a module says of itself."""
    found = sites("box.py", SOURCE)
    assert {one.what for one in found} == CHANGES
    assert len(found) == len(CHANGES)
    texts = {one.of(SOURCE) for one in found}
    assert len(texts) == len(found)
    for text in texts:
        ast.parse(text)
        assert text != SOURCE


@pytest.mark.parametrize(
    "module", ["serving/kv/custody.py", "wire/request.py", "web/cycle.py", "scheduling/ledger.py"]
)
def test_the_nearest_tests_are_those_that_import_it_and_those_of_its_part(module: str) -> None:
    found = nearest(module)
    assert found[0].startswith("unit/test_")
    assert found[-1].startswith("proxy/test_")
    assert len({*found}) == len(found) <= MOST + 3


def test_the_tests_of_parts_exist() -> None:
    assert [file for files in PARTS.values() for file in files if not (TESTS / file).exists()] == []


def test_every_module_has_nearest_tests() -> None:
    every = script.all_mutations()
    assert len(every) > 5000
    assert {one.path for one in every if not nearest(one.path)} == set()


def test_survivors_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    every = [Mutation("wire/request.py", number, 0, 0, "", "a change") for number in range(9)]
    monkeypatch.setattr(script, "all_mutations", lambda only: every)
    monkeypatch.setattr(script, "judged", lambda *_: script.SURVIVED)
    monkeypatch.setattr(
        script, "tried", lambda one, limit: script.SURVIVED if one.line == 4 else script.NOTICED
    )
    assert script.main(["--count", "9", "--jobs", "1"]) == 0
    said = capsys.readouterr().out
    assert "survived: wire/request.py:4: a change\n" in said
    assert said.endswith("8 noticed, 1 survived\n")
    monkeypatch.setattr(script, "judged", lambda *_: script.NOTICED)
    assert script.main(["--count", "9"]) == 1
    assert "the tests fail without a mutation" in capsys.readouterr().out


def test_a_copy_is_what_is_tested() -> None:
    """A mutation that nothing could survive is noticed by the smallest of tests."""
    source = (PACKAGE / "scheduling" / "waits.py").read_bytes()
    broken = Mutation(
        "scheduling/waits.py", 1, 0, len(source), "raise SystemExit(1)", "nothing is left"
    )
    assert script.judged(broken, ["unit/test_waits.py"], 100.0) == script.NOTICED


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_a_program_and_its_test_exists(name: str) -> None:
    bug = BUGS[name]
    before = (PACKAGE / bug.change.path).read_text()
    after = bug.change.of(before)
    assert after != before
    ast.parse(after)
    file, _, test = bug.test.partition("::")
    assert f"def {test.partition('[')[0]}(" in (TESTS / file).read_text()


def test_planted_bugs_that_no_test_finds_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missed = BUGS["end_not_seen"].plant

    def tested(change: object, tests: list[str], limit: float) -> str:
        return script.SURVIVED if change is None or change == missed else script.NOTICED

    monkeypatch.setattr(planted, "tested", tested)
    assert planted.main(["answer_kept"]) == 0
    assert planted.main(["answer_kept", "end_not_seen"]) == 1
    said = capsys.readouterr().out
    assert "| end_not_seen | survived | test_the_end_of_a_worker_that_has_not_read_ever" in said
    assert said.endswith("1 of 2 were found\n")
    monkeypatch.setattr(planted, "tested", lambda *_: script.NOTICED)
    assert planted.main([]) == 1
    assert "without a bug: noticed" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        planted.main(["none"])
    assert ended.value.code == 2
