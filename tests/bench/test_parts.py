"""What a run says of its parts: requests by the decision of pdproxy and by class, what was cached,
and conversations.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from pdproxy.cli.main import main
from pdproxy_lab.bench.compare import part_tables, read_records, table_of
from pdproxy_lab.bench.decision import MAX_LENGTH, Decision, decision_of
from pdproxy_lab.bench.measures import MAX_DECISIONS
from pdproxy_lab.bench.record import Record
from pdproxy_lab.bench.report import text_of
from pdproxy_lab.bench.session import BenchSession, Load
from pdproxy_lab.bench.slo import parse_slo
from pdproxy_lab.bench.trace import BLOCK
from pdproxy_lab.bench.workload import Planned
from pdproxy_lab.sim.facts import SimFacts
from tests.bench.servers import DONE, FAST, HEAD, TOKEN, USAGE, answering, engines
from tests.bench.test_measures import failed, one, summary
from tests.bench.test_session import SHAPE, options
from tests.fakes.world import world

SLO = parse_slo("x:ttft=60s")


@pytest.mark.parametrize(
    ("header", "decision"),
    [
        ("whole http://a:1; reason=ttft; ttft=0.1", Decision("whole", "ttft", 0.1)),
        ("whole http://a:1; reason=ttft; ttft=9.5e-05", Decision("whole", "ttft", 9.5e-05)),
        ("whole http://a:1; reason=ttft; ttft=inf; ttft", Decision("whole", "ttft")),
        ("whole http://a:1; reason=ttft; ttft=1e999", Decision("whole", "ttft")),
        ("split http://a:1 -> http://b:1; x=1; reason=split; other=y", Decision("split", "split")),
        ("whole http://a:1; ttft=0.1", None),
        ("whole http://a:1; reason=", None),
        ("whole http://a:1; reason=a b", None),
        (f"{'x' * 33} http://a:1; reason=ttft", None),
        ("; reason=ttft", None),
        ("", None),
    ],
)
def test_a_decision_is_a_choice_and_its_reason_or_none(
    header: str, decision: Decision | None
) -> None:
    assert decision_of(header) == decision


def test_requests_are_measured_by_decision() -> None:
    made = summary(
        *[one(decision="split a -> b; reason=ttft") for _ in range(3)],
        one(decision="split a -> b; reason=tpot", times=[0.5, 0.6, 0.7]),
        failed(decision="whole a; reason=ttft"),
        one(decision="of another form"),
        one(),
        slos=(parse_slo("x:ttft=200ms"),),
    )
    found = {name: (part.requests, part.good.get("x")) for name, part in made.decisions.items()}
    assert found == {
        "split": (4, 3),
        "split: ttft": (3, 3),
        "split: tpot": (1, 0),
        "whole": (1, None),
        "whole: ttft": (1, None),
    }
    assert summary(one(), given_up="x").decisions == {}


def test_predictions_are_compared_with_what_was_measured() -> None:
    """The first token came after 0.1 s, of the first request 0.05 s after its sending."""
    made = summary(
        one(decision="split a -> b; reason=ttft; ttft=0.04", sent=0.05),
        one(decision="whole a; reason=ttft; ttft=0.125"),
        one(decision="whole a; reason=ttft; ttft=inf"),
        failed(decision="whole a; reason=ttft; ttft=9"),
        one(),
        allow_lag=True,
    )
    assert made.ttft_over_prediction == pytest.approx(0.15 / 0.165 - 1)
    found = {name: part.ttft_over_prediction for name, part in made.decisions.items()}
    assert found["split"] == pytest.approx(0.25)
    assert found["whole"] == pytest.approx(-0.2)
    assert summary(one()).ttft_over_prediction is None


def test_the_most_frequent_decisions_are_measured_and_no_more() -> None:
    many = [one(decision=f"whole a; reason=r{number}") for number in range(100)]
    made = summary(*many, one(decision="whole a; reason=r99"))
    assert len(made.decisions) == MAX_DECISIONS
    assert list(made.decisions)[:2] == ["whole", "whole: r99"]


async def test_the_decisions_of_pdproxy_are_in_record_and_report() -> None:
    found: list[Record] = []
    planned = [Planned(number / 100, 4 if number % 2 else 200, 2) for number in range(10)]
    async with world(1, 1) as w:
        asked = options(
            f"http://127.0.0.1:{w.port}",
            loads=(Load(lambda _: planned, SHAPE),),
            slos=(SLO,),
            detailed=True,
        )
        await BenchSession(asked, found.append).measure()
        await w.quiet()
    for record in found:
        decisions = record["pdproxy"]["decisions"]
        assert {name: part["completed"] for name, part in decisions.items()} == {
            "split": 5,
            "split: policy": 5,
            "whole": 5,
            "whole: short_prompt": 5,
        }
        assert decisions["split"]["pdproxy"]["slos"][0]["share"] == 1
        shown = [text.partition(" ")[0] for text in record["pdproxy"]["detailed"]["decisions"]]
        assert shown == ["split", "whole"] * 5
    text = text_of(table_of(found), found)
    assert "it by decision: medians, in req/s and ms" in text
    assert "split: policy" in text


async def test_a_server_without_decisions_has_none_and_a_long_one_is_cut() -> None:
    head = HEAD.replace(b"\r\n\r\n", b"\r\nx-pdproxy-decision: whole %b\r\n\r\n" % (b"\x80" * 8000))
    found: list[Record] = []
    for content in (HEAD, head):
        async with answering(content + TOKEN + TOKEN + USAGE + DONE) as url:
            asked = options(url, model="m", warm_up=0, seeds=range(1), detailed=True)
            await BenchSession(asked, found.append).measure()
    assert [one["pdproxy"]["decisions"] for one in found] == [{}, {}]
    none, long = (one["pdproxy"]["detailed"]["decisions"] for one in found)
    assert none == [None] * 10
    assert [len(text) for text in long] == [MAX_LENGTH] * 10
    assert all(text.isprintable() for text in long)
    assert "by decision" not in text_of(table_of(found), found)


CLASSES = [
    "--class",
    "chat:share=3,input=5:9,output=2,ttft=60s",
    "--class",
    "document:share=1,input=700,output=3,ttft=0.001ms",
    "--class",
    "other:share=1",
]


def test_classes_have_results_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page = tmp_path / "out.jsonl", tmp_path / "page.html"
    common = ["--seeds", "1", "--allow-lag", "--rate", "500", "--requests", "100"]
    with engines(FAST) as (engine,):
        words = ["bench", f"it={engine.url}", *common, *CLASSES]
        words += ["--send-slo", "--slo", "all:gap=9s"]
        assert main([*words, "--detailed", "--json", str(path)]) == 0
        sent = [
            (len(asked.json["prompt"]), dict(asked.headers)) for asked in list(engine.requests)[1:]
        ]
    (made,) = read_records(path)
    classes, ours = made["pdproxy"]["classes"], made["pdproxy"]
    assert list(classes) == ["chat", "document", "other"]
    counts = {name: part["completed"] for name, part in classes.items()}
    assert counts == Counter(ours["detailed"]["classes"])
    assert sum(counts.values()) == 100
    assert min(counts.values()) > 5
    shares = {slo["name"]: (slo["good"], slo["share"]) for slo in ours["slos"]}
    chats, judged = counts["chat"], counts["chat"] + counts["document"]
    assert shares == {
        "all": (100, 1),
        "chat": (chats, 1),
        "document": (0, 0),
        "own class": (chats, chats / judged),
    }
    assert made["request_goodput"] == pytest.approx(100 / made["duration"])
    named = {
        tokens: {name: value for name, value in headers.items() if "-slo-" in name}
        for tokens, headers in sent
    }
    assert named[700] == {"x-pdproxy-slo-ttft-ms": "0.001"}
    assert named[5] == {"x-pdproxy-slo-ttft-ms": "60000"}
    assert named[1024] == {"x-pdproxy-slo-gap-ms": "9000"}
    text = capsys.readouterr().out
    assert main(["bench", "--compare", str(path), "--html", str(page)]) == 0
    assert capsys.readouterr().out == text
    for line in (
        "it by class: medians, in req/s and ms",
        "good: document (%)",
        "good: own class (%)",
    ):
        assert line in text
        assert line in page.read_text()
    rows = text[text.index("it by class") :].splitlines()
    assert rows[1].split("  ")[-1] == "good: own class (%)"
    assert rows[1].count("good: ") == 2, "for all, and of the own class: in percent"
    assert [row.split()[-1] for row in rows[2:5]] == ["100.0", "0.0", "-"]


def test_a_conversation_of_a_trace_has_one_name_and_a_cached_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two conversations of three turns each; only the first server reports what it has cached."""
    trace, path = tmp_path / "trace.jsonl", tmp_path / "out.jsonl"
    lines = [
        {
            "timestamp": 0,
            "input_length": BLOCK * (turn + 2),
            "output_length": 2,
            "hash_ids": [0, *range(10 * one, 10 * one + turn + 1)],
        }
        for turn in range(3)
        for one in (1, 2)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    facts = SimFacts(hardware=FAST.hardware, eos_every=0, enable_prompt_tokens_details=True)
    words = ["--trace", str(trace), "--rate", "5", "--arrivals", "constant", "--seeds", "1"]
    words += ["--allow-lag", "--warm-up", "0", "--session-header", "X-Session-ID"]
    words += ["--class", "long:input=1500:9999,ttft=60s"]
    with engines(facts, FAST) as (one, other):
        servers = [f"a={one.url}", f"b={other.url}"]
        assert main(["bench", *servers, *words, "--json", str(path)]) == 0
        named = [
            {
                (asked.json["prompt"][BLOCK], dict(asked.headers)["x-session-id"])
                for asked in engine.requests
            }
            for engine in (one, other)
        ]
    assert [len(pairs) for pairs in named] == [2, 2], "a name for each first word behind block 0"
    assert len({name for pairs in named for _, name in pairs}) == 4
    assert not [name for asked in one.requests for name, _ in asked.headers if "-slo-" in name]
    first, second = read_records(path)
    assert first["request_goodput"] == pytest.approx(4 / first["duration"])
    share = first["pdproxy"]["cached_share"]
    assert 0 < share < 1
    assert first["pdproxy"]["cached_tokens"] == round(share * 18 * BLOCK)
    assert second["pdproxy"]["cached_share"] is None
    text = capsys.readouterr().out
    row = next(line for line in text.splitlines() if line.startswith("prompt tokens cached (%)"))
    assert row.split()[-2:] == [f"{100 * share:.1f}", "-"]
    assert "b: not measured: cached_tokens: the server reports no cached tokens" in text
    assert "a, seed 0: 2 requests are of no class" in text


def test_parts_of_a_file_may_be_anything(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    parts = {
        "\x1b[2J": {"completed": 3, "pdproxy": {"slos": [7]}},
        "a": 5,
        "b": {"pdproxy": 5},
        **{f"c{number}": {"completed": 1, "pdproxy": {}} for number in range(30)},
    }
    path.write_text(
        json.dumps({"request_throughput": 1, "pdproxy": {"name": "n", "decisions": parts}})
        + "\n"
        + json.dumps({"request_throughput": 1, "pdproxy": {"name": "m", "decisions": [1]}})
    )
    records = read_records(path)
    ((caption, table),) = part_tables(records)
    assert (caption, len(table.names)) == ("n by decision", 16)
    text = text_of(table_of(records), records)
    assert "\x1b" not in text
    assert "?[2J" in text
