"""An engine's `/metrics`: lines as vLLM writes them are read without the library, and as it reads
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from pdproxy.upstream import metrics_lines
from pdproxy.upstream.metrics_lines import read_line
from pdproxy.upstream.metrics_page import read_metrics

PAGES = sorted((Path(__file__).parents[1] / "sim" / "recordings").glob("*_metrics*.txt"))
PARTS = [
    "m",
    "vllm:m_1",
    "{",
    "}",
    "{}",
    '{engine="0"}',
    '{_a="b,c",d="{e} # f"}',
    '{a="1",a="2"}',
    '{__name__="x"}',
    'a="b"',
    ",",
    " ",
    "\t",
    "\r",
    '"',
    "\\",
    r"\n",
    " # ",
    "0",
    "1.5",
    "-2",
    "1e+09",
    "1e400",
    "NaN",
    "1_0",
    " 1700000000",
    "é",
    "\u0661",
]


def by_library(text: str) -> tuple[dict[str, str], float]:
    (family,) = text_string_to_metric_families(text + "\n")
    (sample,) = family.samples
    return sample.labels, sample.value


def not_needed(text: str) -> Any:
    raise AssertionError(text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_recorded_pages_are_read_without_the_library(
    page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_lines, "text_string_to_metric_families", not_needed)
    found = read_metrics(page.read_bytes())
    assert found.started
    assert found.block_size
    assert found.progress


@given(st.lists(st.sampled_from(PARTS), max_size=8).map("".join))
def test_any_line_is_read_as_by_the_library(text: str) -> None:
    try:
        expected = by_library(text)
    except (ValueError, KeyError, IndexError):
        with pytest.raises(ValueError, match="not in Prometheus text format"):
            read_line(text.encode())
        return
    try:
        found = read_line(text.encode())
    except ValueError as error:
        assert "not finite" in str(error)  # noqa: PT017 - the library takes such a value
        return
    assert found == expected
