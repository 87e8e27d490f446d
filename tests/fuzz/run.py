"""Coverage-guided fuzzing: `python -m tests.fuzz.run ingress --minutes 10`. Needs `atheris` (`pip
install -e .[fuzz]`).

`cost` is another search, guided by what inputs cost, and needs no more than the tests: see
tests/fuzz/cost/search.py.

A finding is saved in tests/fuzz/findings, its assertion printed, and the exit code is 1. Move the
input to tests/fuzz/corpus/TARGET once it is understood: the test suite replays what is there.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
FINDINGS = HERE / "findings"
Check = Callable[[bytes], None]


_HTTP = ("\\x0d\\x0a", "\\x0d\\x0a\\x0d\\x0a", "0\\x0d\\x0a\\x0d\\x0a", "content-length: 0",
    "transfer-encoding: chunked",
         "HTTP/1.1 ", "connection: close", "connection: upgrade", "upgrade: h2c")  # fmt: skip
WORDS = {
    "body": ("kv_transfer_params", "ec_transfer_params", "\\\\u005f", "vllm_xargs",
    "sampling_params", "extra_args",
             "prompt_token_ids", "prompt",
             "messages", "NaN", "1e999", "\\\\ud800", "\\xff\\xfe", "\\xef\\xbb\\xbf",
             "structured_outputs", "logprobs"),
    "ingress": (*_HTTP, "POST /v1/completions HTTP/1.1", "GET /x HTTP/1.1", "expect: 100-continue",
    "GET "),
    "stream": ("data: ", "\\x0a\\x0a", "\\x0d", "[DONE]", '{\\"error\\"', '{\\"id\\":', ": ",
    '\\"finish_reason\\":\\"abort\\"'),
    "registration": ("type", "http_address", "zmq_address", "dp_size", "tp_size", "transfer_mode",
    "10.0.0.1:8000", "READ", "___",
                     "host:", ",handshake:", ",notify:"),
    "answer": (*_HTTP, "HTTP/1.1 100 Continue", "HTTP/1.1 200 OK", "HTTP/1.1 204 No",
    "kv_transfer_params", "usage"),
}  # fmt: skip
"""What libFuzzer may put in, in its own notation."""


def targets() -> dict[str, Check]:
    """What can be fuzzed, by name: a check that raises where something does not hold. They share
    one loop.
    """
    from tests.fuzz.answers import check_answer, check_engine_json
    from tests.fuzz.bodies import check_body, check_content_types
    from tests.fuzz.cost.search import check as check_cost
    from tests.fuzz.ingress import Ingress, check_ingress
    from tests.fuzz.registrations import check_registrations
    from tests.fuzz.streams import check_stream

    loop = asyncio.new_event_loop()
    ingress = Ingress()

    def body(data: bytes) -> None:
        from pdproxy.wire.route import Route

        for route in Route:
            check_body(route, data)
        kind, _, rest = data.partition(b"\n")
        check_content_types(kind, rest)

    def answer(data: bytes) -> None:
        loop.run_until_complete(check_answer(*cut(data)))
        check_engine_json(data)

    return {
        "body": body,
        "ingress": lambda data: loop.run_until_complete(check_ingress(ingress, *cut(data))),
        "stream": lambda data: loop.run_until_complete(check_stream(*cut(data))),
        "answer": answer,
        "registration": lambda data: loop.run_until_complete(check_registrations(*cut(data))),
        "cost": check_cost,
    }


def cut(data: bytes) -> tuple[bytes, list[int]]:
    """Return the bytes to be sent and where to cut them: an input ends with a count of cuts, before
    it their offsets.
    """
    count = data[-1] % 4 if data else 0
    offsets = [
        int.from_bytes(data[-3 - 2 * number : -1 - 2 * number], "big") for number in range(count)
    ]
    return data[: max(0, len(data) - 1 - 2 * count)], offsets


def seeds(target: str) -> list[bytes]:
    """Where a target begins."""
    from tests.fuzz import registrations
    from tests.fuzz.seeds import (
        recorded_answers,
        recorded_bodies,
        recorded_requests,
        recorded_streams,
    )

    found = {
        "body": recorded_bodies,
        "ingress": recorded_requests,
        "stream": recorded_streams,
        "answer": recorded_answers,
        "registration": registrations.recorded,
    }[target]()
    if target == "ingress":
        found |= {f"{name} twice": one * 2 for name, one in found.items()}
        found["chunked"] = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\n"
            b"{}\r\n0\r\nx: y\r\n\r\n"
        )
    end = b"" if target == "body" else b"\x00"
    return [one + end for one in found.values() if len(one) < 8000]


def fuzz(target: str, corpus: Path, seconds: int) -> None:
    """Fuzz in this process. Does not return: libFuzzer ends it."""
    import atheris

    with atheris.instrument_imports(include=["pdproxy"]):
        import pdproxy.serving.stream.relay
        import pdproxy.transfer.nixl
        import pdproxy.upstream.connection
        import pdproxy.web.protocol  # noqa: F401
    check = targets()[target]
    options = [
        f"-max_total_time={seconds}",
        "-max_len=8192",
        "-timeout=20",
        f"-artifact_prefix={FINDINGS}/{target}-",
    ]
    words = corpus.parent / f"{corpus.name}.dict"
    words.write_text("".join(f'"{word}"\n' for word in WORDS[target]))
    options.append(f"-dict={words}")
    atheris.Setup([sys.argv[0], *options, str(corpus)], check)
    atheris.Fuzz()


def main() -> int:
    """Run a target in a child process; return 1 if something was found."""
    if sys.argv[1:2] == ["cost"]:
        from tests.fuzz.cost.search import main as search

        return search(sys.argv[2:], FINDINGS)
    parser = argparse.ArgumentParser(description="Fuzz a part of pdproxy.")
    parser.add_argument(
        "target", choices=["body", "ingress", "stream", "answer", "registration", "cost"]
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--corpus", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.corpus is not None:
        fuzz(given.target, given.corpus, int(given.minutes * 60))
        return 0
    FINDINGS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        folder = f"{folder}/corpus"
        Path(folder).mkdir()
        for one in [
            *seeds(given.target),
            *(path.read_bytes() for path in (HERE / "corpus" / given.target).glob("*")),
        ]:
            (Path(folder) / hashlib.sha256(one).hexdigest()[:16]).write_bytes(one)
        command = [
            sys.executable,
            "-m",
            "tests.fuzz.run",
            given.target,
            "--minutes",
            str(given.minutes),
        ]
        code = subprocess.run([*command, "--corpus", folder], check=False).returncode
    if code:
        print(f"found something: see {FINDINGS}")
        return 1
    print(f"{given.target}: nothing found in {given.minutes:g} minutes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
