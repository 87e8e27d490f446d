"""The report: what an operator reads, what a script reads, and the exit code."""

import pytest
from msgspec import json

from pdproxy.check import report
from pdproxy.check.findings import Finding
from pdproxy.check.rules import judge
from tests.check.test_rules import P, good, tried

ERROR = Finding(level="error", code="broken", where=(P,), says="it is broken", remedy="mend it")
WARNING = Finding(level="warning", code="odd", says="it is odd")
NOTE = Finding(level="note", code="so", says="it is so")
PLAIN = report.TextStyle()


@pytest.mark.parametrize(
    ("findings", "code", "strict"),
    [
        ([], 0, 0),
        ([NOTE], 0, 0),
        ([WARNING], 0, 1),
        ([ERROR], 1, 1),
        ([NOTE, WARNING, ERROR], 1, 1),
    ],
)
def test_exit_code(findings, code, strict):
    assert report.exit_code(findings, strict=False) == code
    assert report.exit_code(findings, strict=True) == strict


@pytest.mark.parametrize(
    ("findings", "words"),
    [
        ([], "ready: KV moves in 1 of 1 pairs"),
        ([NOTE], "ready: KV moves in 1 of 1 pairs"),
        ([WARNING], "ready, with 1 warning: KV moves in 1 of 1 pairs"),
        ([ERROR, ERROR, WARNING], "NOT READY: 2 errors and 1 warning"),
    ],
)
def test_the_last_line_is_the_verdict(findings, words):
    assert report.as_text(good(), findings, PLAIN).splitlines()[-1] == words


def test_a_good_report_names_engines_pairs_and_what_moved():
    text = report.as_text(good(), [], PLAIN)
    assert "✓ prefill" in text
    assert (
        "vLLM 0.32.0, llama, 8192 tokens, blocks of 16, side channel 10.0.0.1:5600, lease over 5 s"
        in text
    )
    assert "50 of 50 prompt tokens moved, the same answer as D alone" in text
    assert "findings" not in text


def test_a_finding_comes_with_its_remedy_below():
    lines = report.as_text(good(), [ERROR], PLAIN).splitlines()
    place = lines.index("  ✗ it is broken [broken]")
    assert lines[place + 1] == "      → mend it"
    assert any(line.startswith("  ✗ prefill") for line in lines)


def test_marks_need_no_unicode_and_no_colour_unless_wanted():
    facts = good(pairs=tried(moved=0))
    text = report.as_text(facts, judge(facts), report.TextStyle(unicode=False))
    assert text.isascii()
    assert "\x1b" not in text
    assert "\x1b[31m" in report.as_text(facts, judge(facts), report.TextStyle(colour=True))


def test_no_line_is_wider_than_a_report_should_be():
    facts = good(pairs=tried(moved=0))
    found = report.as_text(facts, judge(facts), PLAIN).partition("findings")[2]
    assert max(map(len, found.splitlines())) <= report.WIDTH


def test_json_says_the_same():
    facts = good(pairs=tried(moved=0))
    body = json.decode(report.as_json(facts, judge(facts), strict=False))
    assert body["exit_code"] == 1
    assert body["verdict"].startswith("NOT READY")
    assert [finding["code"] for finding in body["findings"]] == ["kv_not_moved"]
    assert set(body["findings"][0]) == {"level", "code", "where", "says", "remedy"}
    assert [engine["role"] for engine in body["engines"]] == ["prefill", "decode"]
    assert body["pairs"][0]["kv_moved"] is False
