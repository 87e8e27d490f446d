"""An engine's error text in a log line: its own words, and nothing that a client has written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.wire.engine_words import MAX_SHOWN, engine_words


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "EngineCore encountered an issue. See stack trace (above) for the root cause.",
            "EngineCore encountered an issue See stack trace above for the root cause",
        ),
        (
            "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0",
            "CUDA out of memory Tried to allocate ... MiB GPU ...",
        ),
        ("torch.OutOfMemoryError:\nout of\x1b[31m memory", "OutOfMemoryError out ... memory"),
        ("KeyError: 'my secret: 123 456'", "KeyError ..."),
        ("hunter2 Zürich\u2028forged=line", ""),
        ("", ""),
    ],
)
def test_what_is_shown(text: str, shown: str) -> None:
    """Numbers may be token ids, and a name may be a client's."""
    assert engine_words(text) == shown


@given(st.text(), st.sampled_from(["engine ", "out of memory: "]))
def test_it_is_bounded_and_one_line(text: str, begin: str) -> None:
    found = engine_words(begin + text * 100 + begin * 1000)
    assert len(found) <= MAX_SHOWN
    assert found.isascii()
    assert found.isprintable()
