"""`pdproxy bench` as it is called: reports, files, exit codes, an orderly end."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import trustme

from pdproxy.cli.main import main
from pdproxy_lab.bench import session as bench_session
from pdproxy_lab.bench.errors import BenchError
from pdproxy_lab.simulate.cluster import Call, Cluster
from pdproxy_lab.simulate.records import RequestTimes
from tests.bench.servers import FAST, engines, tls_context

LOAD = [
    "--rate",
    "200",
    "--requests",
    "30",
    "--input-tokens",
    "5:30",
    "--output-tokens",
    "3",
    "--allow-lag",
]


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_two_servers_are_measured_with_the_same_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.jsonl"
    with engines(FAST, FAST) as (one, other):
        code = main(
            [
                "bench",
                f"a={one.url}",
                f"b={other.url}/v1/",
                *LOAD,
                "--seeds",
                "2",
                "--slo",
                "x:ttft=60s",
                "--json",
                str(path),
            ]
        )
        asked = [
            [len(request.json["prompt"]) for request in engine.requests] for engine in (one, other)
        ]
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    assert "median of 2 runs" in captured.out
    assert "good: x (%)" in captured.out
    assert "100.0 (100.0 to 100.0)" in captured.out
    made = records(path)
    assert [(one["label"], one["pdproxy"]["seed"]) for one in made] == [
        ("a", 0),
        ("b", 0),
        ("a", 1),
        ("b", 1),
    ]
    assert all(one["completed"] == 30 and one["failed"] == 0 for one in made)
    assert (
        made[0]["total_input_tokens"]
        == made[1]["total_input_tokens"]
        != made[2]["total_input_tokens"]
    )
    assert made[0]["model_id"] == "sim"
    assert "ttfts" not in made[0]
    assert [len(lengths) for lengths in asked] == [61, 61]
    assert main(["bench", "--compare", str(path), str(path)]) == 0
    assert "median of 4 runs" in capsys.readouterr().out


def test_a_profile_gets_the_same_requests_as_the_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.jsonl"
    asked = []

    class Noting(Cluster):
        def run(self, calls: Iterable[Call]) -> RequestTimes:
            found = list(calls)
            asked.append([(call.prompt, call.output) for call in found])
            return super().run(found)

    with engines(FAST) as (one,), pytest.MonkeyPatch.context() as patch:
        patch.setattr("pdproxy_lab.simulate.run.Cluster", Noting)
        seeds = ["--seeds", "2", "--first-seed", "7"]
        code = main(
            [
                "bench",
                one.url,
                *LOAD,
                *seeds,
                "--warm-up",
                "0",
                "--json",
                str(path),
                "--profile",
                "h200-8b",
            ]
        )
        sent = sorted(len(request.json["prompt"]) for request in one.requests)
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    assert "profile h200-8b" in captured.out.splitlines()[1]
    assert len(asked) == 2
    assert asked[0] != asked[1]
    assert sorted(prompt for run in asked for prompt, _ in run) == sent
    assert {output for run in asked for _, output in run} == {3}
    # what was simulated is no measurement
    assert [one["pdproxy"]["seed"] for one in records(path)] == [7, 8]


def test_prompts_of_two_servers_and_of_two_commands_differ(tmp_path: Path) -> None:
    """Otherwise the second of two proxies before the same engines would find all prompts cached."""
    with engines(FAST) as (engine,):
        for _ in range(2):
            assert main(["bench", f"a={engine.url}", f"b={engine.url}", *LOAD, "--seeds", "1"]) == 0
        prompts = [tuple(request.json["prompt"]) for request in engine.requests]
    assert len(set(prompts)) == len(prompts) == 2 * 2 * 31


def test_a_trace_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, path = tmp_path / "trace.jsonl", tmp_path / "out.jsonl"
    lines = [
        {
            "timestamp": 1000 * (number // 2),
            "input_length": 600,
            "output_length": 2,
            "hash_ids": [0, number],
        }
        for number in range(10)
    ]
    lines.append({"timestamp": 5000, "input_length": 5, "output_length": 60_000, "hash_ids": [7]})
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = [
        "--scale",
        "50",
        "--spread",
        "--max-tokens",
        "1000",
        "--slice",
        "1:9",
        "--seeds",
        "1",
        "--allow-lag",
        "--detailed",
    ]
    with engines(FAST) as (engine,):
        code = main(["bench", engine.url, "--trace", str(trace), *options, "--json", str(path)])
        prompts = [tuple(request.json["prompt"]) for request in list(engine.requests)[1:]]
    assert code == 0
    made = records(path)[0]
    assert made["start_times"] == pytest.approx([number / 100 for number in range(8)])
    assert made["input_lens"] == [600] * 8
    assert made["pdproxy"]["left_out"] == 1
    assert len({prompt[:512] for prompt in prompts}) == 1
    assert len(set(prompts)) == 8
    assert "1 requests of trace.jsonl were left out" in capsys.readouterr().out


def test_chats_headers_and_keys_are_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    facts = type(FAST)(hardware=FAST.hardware, eos_every=0, api_key="secret")
    common = [
        *LOAD,
        "--seeds",
        "1",
        "--endpoint",
        "chat",
        "--extra-body",
        '{"temperature": 0}',
        "--header",
        "X-Test: 1",
    ]
    with engines(facts) as (engine,):
        assert main(["bench", engine.url, *common, "--api-key-file", str(key)]) == 0
        last = engine.requests[-1]
        assert main(["bench", engine.url, *common]) == 1
    assert dict(last.headers)["x-test"] == "1"
    assert last.json["temperature"] == 0
    assert last.json["max_completion_tokens"] == 3
    captured = capsys.readouterr()
    assert "status 401" in captured.err
    assert captured.err.count("\n") == 1


def test_chats_have_the_tokens_that_were_asked_for(tmp_path: Path) -> None:
    """The server's words are of several tokens, and its template adds some."""
    path = tmp_path / "r.jsonl"
    load = [
        *LOAD,
        "--seeds",
        "1",
        "--endpoint",
        "chat",
        "--input-tokens",
        "800",
        "--json",
        str(path),
    ]
    with engines(FAST) as (engine,):
        assert main(["bench", engine.url, *load]) == 0
        words = [len(one.json["messages"][0]["content"].split(" ")) for one in engine.requests]
    made = records(path)[0]
    assert made["total_input_tokens"] == pytest.approx(800 * made["completed"], rel=0.02)
    assert words[0] == 800
    assert words[1:3] == [1, 313]
    assert 800 not in words[3:]


def test_errors_are_counted_and_latencies_are_of_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with engines(FAST, faults=("status:status=503,next=5",)) as (engine,):
        code = main(
            [
                "bench",
                f"a={engine.url}",
                *LOAD,
                "--seeds",
                "1",
                "--warm-up",
                "0",
                "--slo",
                "ttft=60s",
            ]
        )
    text = capsys.readouterr().out
    assert code == 0
    assert "a, seed 0: 5 x status 503" in text
    assert "5 of 30 requests failed" in text
    assert "83.3" in text


def test_a_server_that_fails_at_once_is_reported_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with engines(FAST) as (engine,):
        url = engine.url
        assert main(["bench", f"a={url}", *LOAD, "--model", "other"]) == 1
        assert main(["bench", f"a={url}", *LOAD, "--token-ids", "300000:400000"]) == 1
    assert main(["bench", f"a={url}", *LOAD]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("pdproxy bench: a: the first request failed: status 404")
    assert "out of vocabulary" in lines[1]
    assert lines[2].startswith(f"pdproxy bench: a: {url}/v1/models: ")


def test_a_refused_run_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    with engines(FAST, faults=("stall:rate=1",)) as (engine,):
        code = main(
            [
                "bench",
                f"a={engine.url}",
                *LOAD,
                "--seeds",
                "1",
                "--warm-up",
                "0",
                "--max-in-flight",
                "5",
            ]
        )
    assert code == 1
    assert "a, seed 0: NOT MEASURED: 5 requests were in flight" in capsys.readouterr().out


def test_an_interrupt_ends_it_orderly_with_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with engines(FAST) as (engine,):
        command = [
            sys.executable,
            "-m",
            "pdproxy",
            "bench",
            f"a={engine.url}",
            "--rate",
            "20",
            "--duration",
            "3600",
        ]
        command += [
            "--input-tokens",
            "8",
            "--output-tokens",
            "2",
            "--allow-lag",
            "--json",
            str(path),
        ]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
        ) as process:
            ends = time.monotonic() + 90
            while len(engine.requests) < 10 and time.monotonic() < ends:
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err == "pdproxy bench: interrupted\n"
    assert "a, seed 0: PARTIAL: it was stopped" in out
    made = records(path)
    assert len(made) == 1
    assert made[0]["pdproxy"]["partial"]
    assert made[0]["completed"] >= 5


URL = "127.0.0.1:1"
WRONG: list[tuple[list[str], str]] = [
    ([], "a URL or --compare is missing"),
    ([URL], "--rate, --sweep or --trace is missing"),
    ([URL, "--sweep", "1,2", "--rate", "1"], "--rate and --sweep: give one of them"),
    ([URL, "--sweep", "1,2", "--arrivals", "ramp"], "--sweep: has no ramps"),
    ([URL, "--sweep", "1:16:1", "--seeds", "100"], "--sweep: 1600 runs, 500 at most"),
    ([URL, "--sweep", "5"], "--sweep: expected 2 to 16 rates"),
    ([URL, "--sweep", "1:2"], "--sweep: expected rates A,B,... or A:B:STEP"),
    ([URL, "--rate", "1", "--max-seconds", "9"], "--max-seconds: has no effect without --sweep"),
    (["ftp://x", "--rate", "1"], "expected [NAME=]http://HOST:PORT"),
    (["http://u:p@x", "--rate", "1"], "expected [NAME=]http://HOST:PORT"),
    (["x:99999", "--rate", "1"], "expected [NAME=]http://HOST:PORT"),
    (["a=x:1", "a=x:2", "--rate", "1"], "two servers have the name a"),
    ([f"s{number}={URL}" for number in range(9)] + ["--rate", "1"], "9 servers: 8 at most"),
    ([URL, "--rate", "0"], "--rate: expected requests per second above 0"),
    ([URL, "--rate", "nan"], "--rate: expected requests per second above 0"),
    ([URL, "--rate", "1:2"], "--rate: a ramp needs two rates"),
    ([URL, "--rate", "1", "--arrivals", "ramp"], "--rate: a ramp needs two rates"),
    ([URL, "--rate", "100000", "--duration", "86400"], "more than 1000000 in one run"),
    (
        [URL, "--rate", "1", "--duration", "1", "--requests", "1"],
        "--duration and --requests: give one of them",
    ),
    ([URL, "--rate", "1", "--input-tokens", "5:1"], "--input-tokens: expected 1 to"),
    ([URL, "--rate", "1", "--output-tokens", "x"], "--output-tokens: expected a number of tokens"),
    ([URL, "--rate", "1", "--slo", "ttft=1"], "--slo: expected [NAME:]ttft=500ms"),
    (
        [URL, "--rate", "1", "--slo", "a:ttft=1s", "--slo", "a:ttft=2s"],
        "--slo, --class: two have the name a",
    ),
    ([URL, "--rate", "1", "--seeds", "0"], "--seeds: expected 1 to 100"),
    ([URL, "--rate", "1", "--scale", "2"], "--scale: has no effect without --trace"),
    (
        [URL, "--rate", "1", "--burstiness", "2"],
        "--burstiness: has no effect without --arrivals burst",
    ),
    ([URL, "--rate", "1", "--plot", "/nowhere/x.svg"], "--plot: x.svg can't be written"),
    ([URL, "--rate", "1", "--profile", "nowhere"], "--profile: nowhere: neither a file nor one of"),
    (["--compare", "x", "--profile", "h200-8b"], "--profile: has no effect without a URL"),
    ([URL, "--rate", "1", "--spread"], "--spread: has no effect without --trace"),
    ([URL, "--rate", "1", "--sharegpt", "/no/such"], "--sharegpt: such can't be read"),
    ([URL, "--sharegpt", "x"], "--rate, --sweep or --trace is missing"),
    ([URL, "--sharegpt", "x", "--trace", "y"], "--trace and --sharegpt: give one of them"),
    (
        [URL, "--rate", "1", "--sharegpt", "x", "--output-tokens", "4"],
        "--output-tokens: has no effect with --sharegpt",
    ),
    ([URL, "--rate", "1", "--max-tokens", "4"], "--max-tokens: has no effect without --trace"),
    ([URL, "--trace", "/no/such"], "--trace: such can't be read"),
    ([URL, "--trace", "x", "--input-tokens", "4"], "--input-tokens: has no effect with --trace"),
    ([URL, "--trace", "x", "--rate", "1", "--scale", "4"], "--scale: has no effect with --rate"),
    ([URL, "--trace", "x", "--slice", "5:1"], "--slice: expected seconds A:B"),
    ([URL, "--rate", "1", "--header", "a\r\nb: c"], "--header: expected 'Name: value'"),
    (
        [URL, "--rate", "1", "--header", "Content-Length: 3"],
        "--header: Content-Length is set by pdproxy itself",
    ),
    ([URL, "--rate", "1", "--api-key", "a\nb"], "--api-key: expected a key"),
    ([URL, "--rate", "1", "--api-key", "a", "--api-key-file", "b"], "give one of them"),
    ([URL, "--rate", "1", "--api-key-file", "/no/such"], "--api-key-file: can't be read"),
    ([URL, "--rate", "1", "--ca", "/no/such"], "--ca: such: No such file"),
    ([URL, "--rate", "1", "--extra-body", "[]"], "--extra-body: expected a JSON object"),
    (
        [URL, "--rate", "1", "--extra-body", '{"stream": false}'],
        "--extra-body: stream is set by pdproxy itself",
    ),
    ([URL, "--rate", "1", "--token-ids", "9:1"], "--token-ids: expected two token ids"),
    (
        [URL, "--rate", "1", "--endpoint", "chat", "--token-ids", "1:9"],
        "--token-ids: has no effect with --endpoint chat",
    ),
    ([URL, "--rate", "1", "--class", "a b"], "--class: a name has"),
    ([URL, "--rate", "1", "--class", "a:share=0"], "--class: expected share= above 0"),
    ([URL, "--rate", "1", "--class", "a:input=1,input=2"], "--class: input is there twice"),
    ([URL, "--rate", "1", "--class", "a:input=0"], "--class: expected 1 to"),
    ([URL, "--rate", "1", "--class", "a:speed=2"], "--class: expected"),
    (
        [URL, "--rate", "1", "--class", "a", "--slo", "a:ttft=1s"],
        "--slo, --class: two have the name a",
    ),
    (
        [URL, "--rate", "1", *[f"--class=c{number}" for number in range(9)]],
        "--class: 9 classes, 8 at most",
    ),
    (
        [URL, "--trace", "x", "--class", "a:output=2"],
        "--class a: share and output have no effect with --trace or --sharegpt",
    ),
    ([URL, "--rate", "1", "--send-slo"], "--send-slo: no --slo or --class has ttft"),
    (
        [URL, "--rate", "1", "--slo", "e2e=1s", "--send-slo"],
        "--send-slo: no --slo or --class has ttft",
    ),
    ([URL, "--rate", "1", "--session-header", "a b"], "--session-header: expected a header"),
    ([URL, "--rate", "1", "--session-header", "Host"], "--session-header: Host is set by"),
    (
        [URL, "--rate", "1", "--session-header", "X-Session-ID"],
        "--session-header: has no effect without --trace",
    ),
    ([URL, "--rate", "1", "--detailed"], "--detailed: has no effect without --json"),
    ([URL, "--rate", "1", "--json", "/no/such/file"], "--json: file can't be written"),
    ([URL, "--rate", "1", "--plot", "x.txt"], "--plot: expected a file that ends with"),
    ([URL, "--rate", "1", "--max-in-flight", "0"], "--max-in-flight: expected 1 to"),
    ([URL, "--rate", "1", "--timeout", "0"], "--timeout: expected seconds above 0"),
    (["--compare", "/no/such"], "such can't be read"),
    (["--compare", "x", "--json", "y"], "--json: has no effect without a URL"),
]


@pytest.mark.parametrize(("words", "says"), WRONG, ids=[" ".join(words)[:60] for words, _ in WRONG])
def test_wrong_options_exit_with_2_and_one_line(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    lines = [
        line for line in capsys.readouterr().err.splitlines() if not line.startswith("See `pdproxy")
    ]
    assert len(lines) == 1, lines
    assert lines[0].startswith("pdproxy bench: ")
    assert says in lines[0]


def test_a_file_without_certificates_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ca.pem"
    path.write_text("nothing")
    assert main(["bench", URL, "--rate", "1", "--ca", str(path)]) == 2
    assert "--ca: ca.pem: " in capsys.readouterr().err


def test_more_in_flight_than_the_system_allows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 200))
    set_to = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_to.append(limits))
    assert bench_session.in_flight_limit(None) == 200 - 64
    assert bench_session.in_flight_limit(50) == 50
    assert set_to == [(200, 200), (114, 200)]
    with pytest.raises(
        BenchError, match="--max-in-flight: 300 need 364 open files, the system allows 200"
    ):
        bench_session.in_flight_limit(300)


def test_authorities_are_trusted(tmp_path: Path) -> None:
    """A server with a certificate of one's own authority."""
    authority = trustme.CA()
    path = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(path)
    with engines(FAST, tls=tls_context(authority)) as (engine,):
        url = engine.url.replace("http://", "https://")
        assert main(["bench", url, *LOAD, "--seeds", "1", "--ca", str(path)]) == 0
        assert main(["bench", url, *LOAD, "--seeds", "1"]) == 1
