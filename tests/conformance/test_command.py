"""`pdproxy conformance` as typed: what is printed where, exit codes, and the page that shows it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from pathlib import Path

import pytest

from pdproxy.cli.main import main
from pdproxy_lab.conformance.checks import CHECKS
from tests.conformance import sample
from tests.conformance.engines import Rig, rig


@pytest.fixture(autouse=True)
def _a_plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PDPROXY_")]:
        monkeypatch.delenv(name)


async def run(engines: Rig, *arguments: str) -> int:
    """Run the command in a thread: it has an event loop of its own."""
    line = [
        "conformance",
        "--prefill",
        engines.p.url,
        "--decode",
        engines.d.url,
        "--lease-watch",
        "0",
        *arguments,
    ]
    return await asyncio.to_thread(main, line)


async def test_the_page_shows_what_the_command_prints_now() -> None:
    """If not: `python -m tests.conformance.sample`."""
    code, printed = await sample.report()
    assert code == 0, printed
    assert sample.alike(sample.excerpt(printed)) == sample.alike(sample.shown())


def test_the_page_names_every_check() -> None:
    page = sample.PAGE.read_text().partition("## Checks")[2].partition("## ")[0]
    assert [check.name for check in CHECKS if f"`{check.name}`" not in page] == []


async def test_a_failure_is_1_and_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    async with rig(p={"version": "0.31.0"}) as engines:
        assert await run(engines, "--json") == 1
        out, err = capsys.readouterr()
        found = json.loads(out)
        assert found["exit_code"] == 1
        assert found["verdict"].startswith("DOES NOT CONFORM to nixl: 1 failed")
        assert found["counts"]["not_judged"] == len(CHECKS) - 1
        (pair,) = found["pairs"]
        assert (pair["prefill"], pair["decode"]) == (engines.p.url, engines.d.url)
        assert [one["name"] for one in pair["results"]] == [check.name for check in CHECKS]
        assert set(pair["results"][0]) == {"name", "does", "verdict", "says", "seconds"}
        assert err == ""


@pytest.mark.parametrize("form", ["text", "json"])
async def test_each_pool_has_its_report(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """But one in which nothing is split. The exit code is the worst one."""
    path = tmp_path / "pdproxy.yaml"
    async with rig(p={"version": "0.31.0"}) as first, rig(p={"version": "0.31.0"}) as second:
        pools = [
            f"- {{name: {name}, nodes: [{{url: {one.p.url}, role: prefill}}, {{url: {one.d.url}, "
            f"role: decode}}]}}"
            for name, one in (("one", first), ("two", second))
        ]
        pools.append(f"- {{name: whole, nodes: [{{url: {first.plain.url}, role: aggregated}}]}}")
        path.write_text("pools:\n" + "\n".join(pools) + "\n")
        line = [
            "conformance",
            "--config",
            str(path),
            "--lease-watch",
            "0",
            *(["--json"] if form == "json" else []),
        ]
        assert await asyncio.to_thread(main, line) == 1
        out = capsys.readouterr().out
        urls = [(one.p.url, one.d.url) for one in (first, second)]
        if form == "text":
            assert [one for one in out.splitlines() if one.startswith("pool ")] == [
                "pool one",
                "pool two",
            ]
            assert out.count("DOES NOT CONFORM to nixl") == 2
        else:
            found = json.loads(out)
            reports = {one["name"]: one["report"]["pairs"][0] for one in found["pools"]}
            assert found["exit_code"] == 1
            assert [(one["prefill"], one["decode"]) for one in reports.values()] == urls
            assert list(reports) == ["one", "two"]


async def test_an_engine_that_is_down_is_a_failure_and_no_error() -> None:
    async with rig() as engines:
        await engines.d.stop()
        assert await run(engines) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no engine is configured"),
        (["--decode", "a:1"], "conformance needs a prefill and a decode engine"),
        (["--prefill", "a:1", "--decode", "b:1", "--plain", "b:1"], "given twice"),
        (["--prefill", "a:1", "--decode", "b:1", "--plain", "ftp://c:1"], "ftp"),
        (["--prefill", "a:1", "--decode", "b:1", "--connector", "pigeon"], "pigeon"),
        (["--prefill", "a:1", "--decode", "b:1", "--connector", "lmcache-pd"], "needs init_ports"),
        (["--prefill", "a:1", "--decode", "b:1", "--timeout", "0"], "expected 1 to 600 seconds"),
        (
            ["--prefill", "a:1", "--decode", "b:1", "--lease-watch", "nan"],
            "expected 0 to 600 seconds",
        ),
    ],
)
def test_wrong_settings_are_2_and_name_what_is_wrong(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conformance", *arguments]) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize("connector", ["lmcache-pd", "lmcache-mp"])
async def test_where_notices_are_awaited_nobody_else_may_listen(
    connector: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        lines = {
            "lmcache-pd": [
                "--kv-ready-port",
                port,
                "--receiver-init-port",
                "7300",
                "--receiver-alloc-port",
                "7400",
            ],
            "lmcache-mp": ["--kv-ready-port", port],
        }
        async with rig() as engines:
            assert await run(engines, "--connector", connector, *lines[connector]) == 2
        assert port in capsys.readouterr().err
