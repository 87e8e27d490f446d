"""Each test file says in one sentence what it proves."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
NEXT_SENTENCE = re.compile(r"[.?!]\s")


def why_not(source: str) -> str | None:
    """What is wrong with a module's docstring, or None."""
    text = ast.get_docstring(ast.parse(source), clean=False)
    if not text:
        return "no docstring"
    if NEXT_SENTENCE.search(text.strip()):
        return "more than one sentence: notes go into a comment below it"
    return None if text.rstrip().endswith(".") else "no full stop"


def test_each_file_says_what_it_proves() -> None:
    files = [path for path in TESTS.rglob("*.py") if path.name.startswith(("test_", "long_"))]
    assert len(files) > 400
    wrong = {str(path.relative_to(TESTS)): why_not(path.read_text()) for path in files}
    assert {name: why for name, why in wrong.items() if why} == {}


@pytest.mark.parametrize(
    ("source", "good"),
    [
        ('"""Sockets are closed in test_x.py, too."""', True),
        ("import os", False),
        ('""""""', False),
        ('"""Sockets are closed"""', False),
        ('"""Sockets are closed. All of them."""', False),
        ('"""Sockets are closed.\n\nAll of them."""', False),
        ('"""Sockets are closed,\nalso those of test_x.py.\n"""', True),
    ],
)
def test_what_is_no_sentence_is_found(source: str, good: bool) -> None:
    assert (why_not(source) is None) is good
