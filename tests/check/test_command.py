"""`pdproxy check` as typed: what is printed where, and exit codes."""

import asyncio
import json
import os

import pytest

from pdproxy.cli.main import main

FEW = ["--lease-watch", "0", "--max-inflight", "16"]


@pytest.fixture(autouse=True)
def _a_plain_environment(monkeypatch):
    for name in [
        name
        for name in os.environ
        if name.startswith("PDPROXY_") or name.lower().endswith("_proxy")
    ]:
        monkeypatch.delenv(name)


async def run(bench, *arguments: str) -> int:
    """Run the command in a thread: it has an event loop of its own."""
    engines = [part for one in bench.running for part in (f"--{one.facts.role}", one.url)]
    return await asyncio.to_thread(main, ["check", *engines, *FEW, *arguments])


async def test_a_good_pair_is_0_and_a_verdict(bench, capsys):
    await bench.start("prefill")
    await bench.start("decode")
    assert await run(bench) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "ready: KV moves in 1 of 1 pairs"
    assert "\x1b" not in out
    assert err == ""


async def test_errors_are_1(bench, capsys):
    await bench.start("prefill", connector="none")
    await bench.start("decode")
    assert await run(bench) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "NOT READY: 1 error"


async def test_warnings_are_1_only_if_strict(bench):
    await bench.start("prefill")
    await bench.start("decode", enable_prompt_tokens_details=False)
    assert await run(bench) == 0
    assert await run(bench, "--strict") == 1


async def test_json_is_one_object(bench, capsys):
    await bench.start("aggregated")
    assert await run(bench, "--json") == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "ready: no pair to try"


@pytest.fixture
async def pools(bench, tmp_path):
    """A file with a good pool, a bad one, and one that can't be checked."""
    for connector in ("nixl", "none"):
        for role in ("prefill", "decode"):
            await bench.start(role, connector=connector if role == "prefill" else "nixl")
    rows = [f"{{url: {one.url}, role: {one.facts.role}}}" for one in bench.running]
    other = (
        "{name: other, connector: mooncake, nodes: [{url: http://m:1, role: prefill}, {url: "
        "http://n:1, role: decode}]}"
    )
    path = tmp_path / "pdproxy.yaml"
    path.write_text(
        f"pools:\n- {{name: good, nodes: [{', '.join(rows[:2])}]}}\n- {{name: bad, nodes: "
        f"[{', '.join(rows[2:])}]}}\n- {other}\n"
    )
    return ["check", "--config", str(path), *FEW]


async def test_each_pool_has_its_report(pools, capsys):
    """And the exit code is the worst one."""
    assert await asyncio.to_thread(main, pools) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("pool ")] == [
        "pool good",
        "pool bad",
        "pool other",
    ]
    assert [line for line in lines if "ready" in line.lower()] == [
        "ready: KV moves in 1 of 1 pairs",
        "NOT READY: 1 error",
    ]
    assert (
        lines[-1]
        == "not checked: connector mooncake: run `pdproxy conformance`, which tests all connectors"
    )


async def test_each_pool_has_its_report_as_json(pools, capsys):
    assert await asyncio.to_thread(main, [*pools, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["report"]["exit_code"]) for one in found["pools"]] == [
        ("good", 0),
        ("bad", 1),
    ]
    assert ([one["name"] for one in found["not_checked"]], found["exit_code"]) == (["other"], 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no engine is configured"),
        (["--prefill", "a:1"], "no decode engine"),
        (["--prefill", "a:1", "--decode", "a:1"], "given twice"),
        (["--prefill", "ftp://a:1", "--decode", "b:1"], "ftp"),
        (["--decode", "a:1", "--timeout", "soon"], "expected 0.1 to 600 seconds, got 'soon'"),
        (["--decode", "a:1", "--timeout", "0"], "expected 0.1 to 600 seconds"),
        (["--decode", "a:1", "--lease-watch", "-1"], "expected 0 to 600 seconds"),
        (["--decode", "a:1", "--lease-watch", "nan"], "expected 0 to 600 seconds"),
        (["--decode", "a:1", "--config", "/no/such/file"], "/no/such/file"),
    ],
)
def test_wrong_settings_are_2_and_name_what_is_wrong(arguments, words, capsys):
    assert main(["check", *arguments]) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert "Traceback" not in err
    assert out == ""
