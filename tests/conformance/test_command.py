"""`pdproxy conformance` as typed: what is printed where, exit codes, and the page that shows it."""

from __future__ import annotations

import asyncio
import json
import os
import socket

import pytest

from pdproxy.cli.main import main
from pdproxy.lab.conformance.checks import CHECKS
from tests.conformance import sample
from tests.conformance.engines import Rig, rig


@pytest.fixture(autouse=True)
def _a_plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PDPROXY_")]:
        monkeypatch.delenv(name)


async def run(engines: Rig, *arguments: str) -> int:
    """Run the command in a thread: it has an event loop of its own."""
    line = ["conformance", "--prefill", engines.p.url, "--decode", engines.d.url, "--lease-watch", "0", *arguments]
    return await asyncio.to_thread(main, line)


async def test_the_page_shows_what_the_command_prints_now() -> None:
    """If not: `python -m tests.conformance.sample`."""
    code, printed = await sample.report()
    assert code == 0, printed
    assert sample.alike(printed) == sample.alike(sample.shown())


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
        (["--prefill", "a:1", "--decode", "b:1", "--lease-watch", "nan"], "expected 0 to 600 seconds"),
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
            "lmcache-pd": ["--kv-ready-port", port, "--receiver-init-port", "7300", "--receiver-alloc-port", "7400"],
            "lmcache-mp": ["--port", port],
        }
        async with rig() as engines:
            assert await run(engines, "--connector", connector, *lines[connector]) == 2
        assert port in capsys.readouterr().err
