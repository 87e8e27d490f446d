"""The HTML report: it stands alone, says all that the text says, and shows names as text."""

import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pdproxy.cli.main import main
from pdproxy_lab.bench import page, plots
from pdproxy_lab.bench.curves import curves_of
from pdproxy_lab.bench.record import Record
from tests.bench.test_compare import record
from tests.bench.test_sweep import sweep_records

NAME = "<b>&'$x$\""


class Reader(HTMLParser):
    """Notes elements, what they refer to, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name in ("href", "xlink:href", "src"):
                self.links.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_data(self, data: str) -> None:
        self.text += data


def made(records: list[Record]) -> tuple[str, Reader]:
    curves = curves_of(records)
    drawn = plots.curves(curves, records) if curves else plots.bars(records)
    text = page.page_of(records, curves, drawn)
    return text, Reader(text)


@pytest.mark.parametrize("records", [[record(NAME, count=30)], sweep_records()], ids=["one", "all"])
def test_a_page_stands_alone(records: list[Record]) -> None:
    text, read = made(records)
    assert "svg" in read.tags
    assert not {"script", "link", "img", "iframe", "b"} & read.tags
    assert [link for link in read.links if not link.startswith("#")] == []
    assert "url(http" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text
    assert "currentColor" in text
    assert len(read.ids) == len(set(read.ids))


def test_a_page_has_the_load_the_table_and_what_was_not_measured() -> None:
    _, read = made([record(NAME, count=100), record("other", count=5, wrong=5)])
    assert read.text.count(NAME) >= 2, "in the table and in the plot"
    assert "answers of 3 tokens on average; model m" in read.text
    assert "TTFT p99 (ms)100.0" in read.text
    assert "other, seed 0: NOT MEASURED: no request was answered" in read.text


def test_a_page_of_a_sweep_has_each_servers_table_and_capacity() -> None:
    _, read = made(sweep_records())
    assert "split: medians, in req/s and ms" in read.text
    assert "up to: split 4 req/s; plain 4 req/s" in read.text
    assert read.text.count("plain: NOT MEASURED at 8 req/s") == 2, "in the plot and in the list"
    assert "split, 8 req/s, seed 0: 50 x status 503: busy" in read.text


def test_the_command_writes_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, result = tmp_path / "page.html", tmp_path / "vllm.json"
    result.write_text('{"request_throughput": 5.0, "median_ttft_ms": 7.0, "request_rate": "inf"}')
    words = ["bench", "--compare", str(result), "--html", str(path)]
    assert main(words) == 0
    assert "vllm" in Reader(path.read_text()).text
    assert main([*words[:-1], "/nowhere/x.html"]) == 2
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "--html: x.html can't be written" in lines[0]
    assert "--html: needs matplotlib" in lines[-1]
