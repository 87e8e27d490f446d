"""The options of `pdproxy bench`."""

from __future__ import annotations

import argparse
from pathlib import Path

from pdproxy_lab.bench import reading
from pdproxy_lab.bench.arrivals import KINDS, MAX_REQUESTS
from pdproxy_lab.bench.slo import parse_slo
from pdproxy_lab.cli.load_options import add_burstiness, add_lengths, add_scale, add_trace, typed


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add them to the command."""
    parser.add_argument(
        "servers",
        metavar="URL",
        nargs="*",
        type=typed(reading.server),
        help="a server with OpenAI's API; NAME=URL gives it a name in the report",
    )
    load = parser.add_argument_group("load")
    load.add_argument(
        "--rate",
        metavar="R",
        type=typed(reading.rate),
        help="requests per second; A:B with --arrivals ramp (default: the times of --trace)",
    )
    load.add_argument(
        "--sweep",
        metavar="RATES",
        type=typed(reading.sweep),
        help="measure each of these rates instead of one, the lowest first: A,B,... or A:B:STEP "
        "requests per second; a server is measured no more when a rate is far beyond its capacity "
        "(default: no sweep)",
    )
    load.add_argument(
        "--max-seconds",
        metavar="S",
        type=typed(reading.number(0.0, 86_400.0, "seconds")),
        help="seconds after which no run of a sweep begins or goes on (default: 3600)",
    )
    load.add_argument(
        "--arrivals",
        choices=KINDS,
        default="poisson",
        help="when requests come: in equal steps, at random (poisson), in bursts, or at random "
        "with a rising or falling rate "
        "(default: poisson)",
    )
    add_burstiness(load)
    load.add_argument(
        "--duration",
        metavar="S",
        type=typed(reading.number(0.0, 86_400.0, "seconds")),
        help="seconds in which requests come (default: 60; with --trace: all)",
    )
    load.add_argument(
        "--requests",
        metavar="N",
        type=typed(reading.whole(1, MAX_REQUESTS)),
        help="number of requests, instead of --duration (default: what --duration gives)",
    )
    add_lengths(load)
    load.add_argument(
        "--seeds",
        metavar="N",
        type=typed(reading.whole(1, 100)),
        default=3,
        help="runs of each server, each with another seed (default: 3)",
    )
    load.add_argument(
        "--first-seed",
        metavar="N",
        type=typed(reading.whole(0, 1_000_000)),
        default=0,
        help="the seed of the first run; the same seed has the same requests (default: 0)",
    )
    load.add_argument(
        "--class",
        dest="classes",
        metavar="NAME:KEY=VALUE,...",
        type=typed(reading.request_class),
        action="append",
        default=[],
        help="a class of requests, with its own results: share of the requests, input and output "
        "tokens (else those of the options above), and the limits of its SLO, such as "
        "chat:share=0.9,input=500,output=200,ttft=500ms,tpot=15ms; of a file, the requests with "
        "prompts of input=A:B tokens; may be repeated (default: all requests are alike)",
    )
    trace = parser.add_argument_group(
        "load from a file",
        "Lengths and common beginnings of prompts are a trace's; questions and the lengths of "
        "their answers are ShareGPT's.",
    )
    add_trace(trace, "; with --rate only the times are others")
    add_scale(trace)
    trace.add_argument(
        "--sharegpt",
        metavar="FILE",
        type=Path,
        help="JSON list of conversations in ShareGPT's form: the first question of each is a "
        "prompt, its answer has as many tokens as there (default: none)",
    )
    request = parser.add_argument_group("requests")
    request.add_argument(
        "--endpoint",
        choices=("completions", "chat"),
        default="completions",
        help="completions of token ids, or chats of words (default: completions)",
    )
    request.add_argument(
        "--model",
        metavar="NAME",
        help="model to ask for (default: the first that the server lists)",
    )
    request.add_argument(
        "--token-ids",
        metavar="A:B",
        type=typed(reading.token_ids),
        help="range of the token ids of prompts (default: 300:4000)",
    )
    request.add_argument(
        "--extra-body",
        metavar="JSON",
        type=typed(reading.extra_body),
        default={},
        help="fields that each request gets, such as '{\"temperature\": 0}' (default: none)",
    )
    request.add_argument(
        "--header",
        metavar="'NAME: VALUE'",
        type=typed(reading.header),
        action="append",
        default=[],
        help="a header of each request; may be repeated (default: none)",
    )
    request.add_argument(
        "--session-header",
        metavar="NAME",
        type=typed(reading.header_name),
        help="a header that names the conversation of a request of --trace, such as X-Session-ID, "
        "by which pdproxy's policy session chooses engines (default: none)",
    )
    request.add_argument(
        "--send-slo",
        action="store_true",
        help="tell pdproxy the SLO of each request by headers: that of its class, or else the "
        "first --slo (default: no)",
    )
    request.add_argument(
        "--api-key",
        metavar="KEY",
        help="key to send as 'Authorization: Bearer KEY' (default: none)",
    )
    request.add_argument(
        "--api-key-file",
        metavar="FILE",
        type=Path,
        help="file with that key, which no list of processes shows (default: none)",
    )
    request.add_argument(
        "--ca",
        metavar="FILE",
        type=Path,
        help="authorities of the servers' certificates, PEM (default: the system's)",
    )
    request.add_argument(
        "--timeout",
        metavar="S",
        type=typed(reading.number(0.0, 86_400.0, "seconds")),
        default=300.0,
        help="seconds that each request may take (default: 300)",
    )
    request.add_argument(
        "--max-in-flight",
        metavar="N",
        type=typed(reading.whole(1, 1_000_000)),
        help="end a run in which more requests are in flight: it measures nothing (default: 4096)",
    )
    request.add_argument(
        "--warm-up",
        metavar="N",
        type=typed(reading.whole(0, 1000)),
        default=1,
        help="requests to each server before the first run; if one fails nothing is measured "
        "(default: 1)",
    )
    request.add_argument(
        "--salt",
        metavar="TEXT",
        help="makes the prompts' tokens; the same salt: the same prompts (default: random)",
    )
    report = parser.add_argument_group("report")
    report.add_argument(
        "--slo",
        metavar="[NAME:]LIMITS",
        type=typed(parse_slo),
        action="append",
        default=[],
        help="what a good request keeps, such as chat:ttft=500ms,tpot=15ms,gap=50ms,e2e=10s; may "
        "be repeated (default: none)",
    )
    report.add_argument(
        "--json",
        metavar="FILE",
        type=Path,
        help="write a JSON object per run, with the keys of vLLM's serving benchmark (default: "
        "none)",
    )
    report.add_argument(
        "--detailed", action="store_true", help="--json: with the times of each request"
    )
    report.add_argument(
        "--plot",
        metavar="FILE",
        type=Path,
        help="write a plot: .png, .svg or .pdf; needs matplotlib (default: none)",
    )
    report.add_argument(
        "--html",
        metavar="FILE",
        type=Path,
        help="write the report with its plots as one HTML file that stands alone; needs "
        "matplotlib (default: none)",
    )
    report.add_argument(
        "--compare",
        metavar="FILE",
        type=Path,
        nargs="+",
        default=[],
        help="show the runs of these files of --json, or of vLLM's benchmark, beside the servers "
        "or alone (default: none)",
    )
    report.add_argument(
        "--profile",
        metavar="NAME",
        help="show beside the servers what one engine with this profile would do with the same "
        "requests: a shipped profile, or "
        "a file of `pdproxy calibrate` (default: none)",
    )
    report.add_argument(
        "--allow-lag",
        action="store_true",
        help="report also if this process was late itself: p99 above 10 ms",
    )
