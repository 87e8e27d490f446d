"""Whether one client, or one engine, can harm others: honest clients next to hostile ones, one kind
after another.

Usage: hostile.py [--kinds a,b] [--seconds 20] [--checkout DIR] [--out FILE] [--settings NAME=VALUE
...]

One row per kind, with new mock engines and a new proxy with its default limits:

- answers of 16 honest clients (honest.py): right, wrong, refused (503), with times and reasons of
  refusals; 99th percentiles of the gaps between tokens and of the time to the first token;
- how late `/health` is on a kept connection, requested every 20 ms by another honest process, and
  the proxy's own `pdproxy_loop_lateness_seconds`, if it has that metric: the 99th percentile,
  interpolated in its bucket, and the upper bound of the last bucket with a count;
- the proxy's peak memory, with and without its child processes, sampled every 50 ms, and the size
  of its log.

For the proxy, all honest clients are one client (127.0.0.1), and each hostile process is another
(127.0.1.x), unless its kind says otherwise. Hostile processes have a lower priority (nice 10) and
limits in bytes and seconds. A proxy that takes more than 4 GB is killed (`ended`). `calm` has no
hostile client; `all` has most of them at once, with bodies of 16 MiB.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import trustme

import stage
from hostile_clients import KEYS

MAX_KB = 4 << 20
"""KB of memory at which a proxy is killed; the operating system refuses it more than 1.5 times
this.
"""
SAMPLE_INTERVAL = 0.05
"""Seconds between two samples of memory."""
CALM_BEFORE = 1.0
"""Seconds for which honest clients run alone before the hostile ones begin."""
CLIENTS, CHUNKS, ITL = 16, 32, 0.02
HONEST_KEY, OTHER_KEYS = "honest", 21_000
"""The key of honest clients, and how many keys besides those of clients are valid."""
END_TIMEOUT = 60.0
"""Seconds that a process may take to end and print its result."""


@dataclass(frozen=True)
class Kind:
    """One row. `what`: its description. `clients`: kinds of hostile_clients.py that run at once.

    `page`: the page that is hostile on one more pair of engines. `files`: the proxy's limit of open
    files. `pipe`: its log is a pipe that nobody reads. `more`: flags of the clients. `keys`: the
    proxy requires keys, and honest clients have one. `tls`: it speaks TLS, with a key of 2048 bits
    (RSA).
    """

    what: str
    clients: tuple[str, ...] = ()
    page: str | None = None
    files: int | None = None
    pipe: bool = False
    more: tuple[str, ...] = ()
    keys: bool = False
    tls: bool = False


KINDS: dict[str, Kind] = {
    "calm": Kind("none"),
    "prompts": Kind("lists of 262,000 and of 16 million prompts of one letter", ("prompts",)),
    "keys": Kind("6 million top-level keys", ("keys",)),
    "nested": Kind("63 MiB of empty arrays in response_format", ("nested",)),
    "messages": Kind("63 MiB of empty messages, or of short ones", ("messages",)),
    "parts": Kind("63 MiB of content parts", ("parts",)),
    "nan": Kind("63 MiB of NaN; one NaN before a long text", ("nan",)),
    "utf16": Kind("63 MiB in UTF-16", ("utf16",)),
    "anew": Kind("4 connections with 63 MiB in UTF-16 that become 3 times as much in JSON", ("anew",
    )),
    "xargs": Kind("63 MiB of keys in vllm_xargs, in extra_args", ("xargs",)),
    "numbers": Kind("60 MiB of token ids; a number of 60 MiB", ("numbers",)),
    "deep": Kind("30 million nested arrays", ("deep",)),
    "model": Kind("models with names of 16 MiB", ("model",)),
    "stalled": Kind("21 bodies of 64 MiB that lack their last byte", ("stalled",)),
    "stalled-keys": Kind("the same, each with a key of its own", ("stalled-keys",), keys=True),
    "stalled-addresses": Kind("the same, each from an address of its own", ("stalled-addresses",)),
    "keyless": Kind("250 halves of bodies without a key, to routes of each kind", ("keyless",),
    keys=True),
    "wrong-keys": Kind("one wrong key after the other, where 21,000 are valid", ("wrong-keys",),
    keys=True),
    "tls-calm": Kind("none, and all clients speak TLS", tls=True),
    "tls-handshakes": Kind("handshakes that stop behind their first message, 4,000 at once",
    ("tls-handshakes",), tls=True),
    "drip": Kind("bodies at one byte per second; bodies in chunks of one byte", ("drip",)),
    "readers": Kind("500 streams that are read at one byte per second", ("readers",)),
    "idle": Kind("4,000 connections that send nothing, or half a head", ("idle",)),
    "pipeline": Kind("64 connections, 64 requests each, no answer read", ("pipeline",)),
    "unread": Kind("12 connections that ask for 60 KB again and again, no answer read", ("unread",
    )),
    "dribble": Kind("the same, read at 0.9 KB per second", ("dribble",)),
    "unread-large": Kind("2 connections that ask for 5 MB again and again, no answer read",
    ("unread-large",)),
    "passed": Kind("large bodies to embeddings, tokenize, responses, messages", ("passed",)),
    "logpipe": Kind("the log is a pipe that nobody reads; bad requests", ("logpipe",), pipe=True),
    "files": Kind("256 open files; 500 clients", ("files",), files=256),
    "fragments": Kind("targets with fragments, and other unusual ones", ("fragments",)),
    "answer1g": Kind("engines answer with 1 GB", ("answer1g",)),
    "head": Kind("engines answer with an endless header", ("head",)),
    "headers": Kind("engines answer with endless headers", ("headers",)),
    "health": Kind("an endless /health page", page="health"),
    "metrics": Kind("a /metrics page with a million of the lines that pdproxy reads",
    page="metrics"),
    "event": Kind("engines stream an endless event", ("event",)),
    "tiny": Kind("engines stream thousands of tiny events per read", ("tiny",)),
    "comments": Kind("engines stream thousands of comments per read", ("comments",)),
    "all": Kind(
        "most of these at once",
        ("prompts", "keys", "nested", "messages", "parts", "nan", "utf16", "xargs", "numbers",
        "deep", "model", "stalled", "drip",
         "readers", "idle", "pipeline", "passed", "fragments", "answer1g", "head", "event", "tiny"),
        page="metrics",
        more=("--largest", str(16 << 20), "--bytes", "3000000000", "--connections", "1"),
    ),
}  # fmt: skip


class Watch(threading.Thread):
    """Records the peak of a process tree's memory, and kills the tree if it takes too much."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid = pid
        self.kb = self.own_kb = 0.0
        """Peak KB of the tree, and of its first process."""
        self.ended = False
        self.over = threading.Event()

    def run(self) -> None:
        """Sample memory twenty times per second; list the processes once per second."""
        pids: list[int] = []
        looks = 0
        while not self.over.wait(SAMPLE_INTERVAL):
            if looks % 20 == 0:
                pids = stage.tree(self.pid)
            looks += 1
            kb = sum(map(_rss, pids))
            self.kb, self.own_kb = max(self.kb, kb), max(self.own_kb, _rss(self.pid))
            if kb > MAX_KB:
                self.ended = True
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                return


def _rss(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * stage.PAGE_KB
    except (OSError, IndexError):
        return 0.0


@contextmanager
def proxy(
    kind: Kind, at: stage.Engines, options: argparse.Namespace, log: IO[bytes]
) -> Iterator[tuple[int, str]]:
    """Run the proxy of a checkout with limits of memory and open files. Yield its pid and base
    URL.
    """
    (port,) = stage.free_ports(1)
    files = f"ulimit -n {kind.files} && " if kind.files else ""
    command = [
        "sh",
        "-c",
        f'ulimit -v {MAX_KB * 3 // 2} && {files}exec "$@"',
        "sh",
        *stage.PDPROXY.command(at, port),
    ]
    env = {**os.environ, "PYTHONPATH": str(options.checkout / "proxy"), **dict(options.settings)}
    made = tempfile.TemporaryDirectory()
    if kind.keys:
        keys = Path(made.name, "keys")
        keys.write_text(
            "\n".join([HONEST_KEY, *KEYS, *(f"other{number}" for number in range(OTHER_KEYS))])
        )
        env["PDPROXY_AUTH__API_KEYS_FILE"] = str(keys)
        env["PDPROXY_LISTEN__OPERATOR_ROUTES"] = "everywhere"  # its metrics are read without a key
    base = stage.url(port)
    if kind.tls:
        env |= certified(Path(made.name))
        base = base.replace("http:", "https:")
    unread, pipe = os.pipe() if kind.pipe else (None, None)
    process = subprocess.Popen(
        command,
        env=env,
        stdout=log,
        stderr=log if pipe is None else pipe,
        start_new_session=True,
        cwd=options.checkout,
    )
    try:
        stage.wait_for(base + stage.PDPROXY.ready, process)
        yield process.pid, base
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(2)
        for end in (unread, pipe):
            if end is not None:
                os.close(end)
        made.cleanup()


def certified(folder: Path) -> dict[str, str]:
    """Write a certificate for the loopback and its key; return the variables that name them to the
    proxy.
    """
    one = trustme.CA().issue_cert("127.0.0.1", key_type=trustme.KeyType.RSA)
    one.private_key_pem.write_to_path(folder / "key.pem")
    one.cert_chain_pems[0].write_to_path(folder / "certificate.pem")
    names = {"CERTIFICATE": "certificate.pem", "KEY": "key.pem"}
    return {f"PDPROXY_LISTEN__TLS__{name}": str(folder / file) for name, file in names.items()}


@contextmanager
def engines(kind: Kind) -> Iterator[stage.Engines]:
    """Run two pairs of engines in two processes, and a third pair if the kind has a hostile
    page.
    """
    ports = stage.free_ports(6 if kind.page else 4)
    with ExitStack() as stack:
        for number in range(len(ports) // 2):
            flags: list[object] = ["--chunks", CHUNKS, "--itl", ITL]
            if number == 2:
                flags += ["--page", str(kind.page)]
            mine = ports[2 * number : 2 * number + 2]
            process = stack.enter_context(
                stage.running(stage.script("hostile_engine.py", *mine, *flags))
            )
            for port in mine:
                stage.wait_for(f"{stage.url(port)}/version", process)
        yield stage.Engines(tuple(ports[::2]), tuple(ports[1::2]))


def started(*command: object, nice: int = 0) -> subprocess.Popen[bytes]:
    """Start a script of this folder that prints JSON."""
    return subprocess.Popen(
        stage.script(*command),  # type: ignore[arg-type]
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=lambda: os.nice(nice) and None,
    )


def output_of(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Return the JSON of the last line that a process printed; {} if it didn't end in time."""
    try:
        out, _ = process.communicate(timeout=END_TIMEOUT)
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        process.kill()
        process.wait()
        return {}
    return found


def lateness(url: str) -> list[tuple[float, float]] | None:
    """Return (seconds, cumulative count) of the proxy's own histogram; [] if it is empty, None if
    the proxy does not answer.
    """
    try:
        page = stage.get(f"{url}/metrics", END_TIMEOUT / 6).decode()
    except OSError:
        return None
    found = re.findall(
        r'^pdproxy_loop_lateness_seconds_bucket\{le="([^"]+)"\} (\S+)$', page, re.MULTILINE
    )
    return [(float(bound), float(count)) for bound, count in found]


def own_lateness(
    before: list[tuple[float, float]] | None, after: list[tuple[float, float]] | None
) -> tuple[float | None, float | None]:
    """Return, in ms, the 99th percentile of the counts between two readings, and the bound of the
    last bucket with a count.

    The percentile is interpolated in its bucket.
    """
    if before is None or not after:
        return None, None
    counts = [
        (bound, new - old)
        for (bound, new), (_, old) in zip(after, before or [(0.0, 0.0)] * len(after), strict=True)
    ]
    total = counts[-1][1]
    p99 = last = None
    lower = below = 0.0
    for bound, count in counts:
        if count > below:
            last = 1000 * bound
            if p99 is None and count >= 0.99 * total:
                # the last bucket has no upper bound
                upper = bound if bound < float("inf") else lower
                p99 = 1000 * (lower + (upper - lower) * (0.99 * total - below) / (count - below))
        lower, below = bound, count
    return p99, last


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one kind and return its row."""
    kind = KINDS[name]
    row: dict[str, Any] = {"kind": name, "what": kind.what}
    with tempfile.TemporaryFile() as log, ExitStack() as stack:
        flags = ["--seconds", options.seconds, *kind.more]
        # The clients make their bodies before the measurement, one after another.
        hostile = [
            _made(stack, client, [*flags, "--address", f"127.0.1.{number}"])
            for number, client in enumerate(kind.clients, 1)
        ]
        at = stack.enter_context(engines(kind))
        pid, url = stack.enter_context(proxy(kind, at, options, log))
        watch = Watch(pid)
        watch.start()
        stack.callback(watch.over.set)
        length = options.seconds + CALM_BEFORE + 1
        before, cpu = lateness(url), stage.cpu(pid)
        honest = started("honest.py", url, "--seconds", length, "--clients", CLIENTS, "--chunks",
            CHUNKS,
                         *(["--key", HONEST_KEY] if kind.keys else []))  # fmt: skip
        late = started("honest.py", url, "--seconds", length, "--late")
        time.sleep(CALM_BEFORE)
        for process in hostile:
            _go(process, url)
        row |= output_of(late) | output_of(honest)
        row["hostile"] = {
            client: output_of(process)
            for client, process in zip(kind.clients, hostile, strict=True)
        }
        row["own_p99_ms"], row["own_last_ms"] = own_lateness(
            before, None if watch.ended else lateness(url)
        )
        row["cpu_s"] = round(stage.cpu(pid) - cpu, 1) if not watch.ended else None
        row["rss_mb"], row["own_mb"] = (
            round(watch.kb * 1024 / 1e6),
            round(watch.own_kb * 1024 / 1e6),
        )
        row["ended"] = watch.ended
        row["log_bytes"] = os.fstat(log.fileno()).st_size
    return row


def _made(stack: ExitStack, client: str, flags: Sequence[object]) -> subprocess.Popen[bytes]:
    process = started("hostile_clients.py", client, *flags, nice=10)
    stack.callback(_end, process)
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        raise stage.NotStartedError(f"{client}: the hostile client did not start")
    return process


def _go(process: subprocess.Popen[bytes], url: str) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(url.encode() + b"\n")
        process.stdin.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


COLUMNS = {
    "right": ("right", "{}"), "wrong": ("wrong", "{}"), "refused": ("refused", "{}"),
    "gap p99 ms": ("gap_p99_ms", "{:.0f}"),
    "first p99 ms": ("first_p99_ms", "{:.0f}"), "/health p50 ms": ("late_p50_ms", "{:.1f}"),
    "p99": ("late_p99_ms", "{:.0f}"),
    "max": ("late_max_ms", "{:.0f}"), "own p99 ms": ("own_p99_ms", "{:.0f}"),
    "last": ("own_last_ms", "{:.0f}"), "peak MB": ("rss_mb", "{:.0f}"),
    "of the proxy": ("own_mb", "{:.0f}"),
    "log KB": ("log_kb", "{:.0f}"), "CPU s": ("cpu_s", "{:.1f}"), "sent MB": ("sent_mb", "{:.0f}"),
}  # fmt: skip


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    shown = row | {
        "wrong": sum(row.get("wrong", {}).values()) if "wrong" in row else None,
        "log_kb": row["log_bytes"] / 1000,
        "sent_mb": sum(one.get("sent", 0) for one in row["hostile"].values()) / 1e6,
    }
    cells = [
        "" if shown.get(key) is None else shape.format(shown[key])
        for key, shape in COLUMNS.values()
    ]
    return "| " + " | ".join([row["kind"], *cells, "ended" if row["ended"] else ""]) + " |"


def notes(row: dict[str, Any]) -> str:
    """Return the errors of honest clients, and the answers to hostile ones."""
    wrong = ", ".join(f"{text} ({count})" for text, count in row.get("wrong", {}).items())
    answers = "; ".join(
        f"{name}: {one.get('answers', 'did not end')}" for name, one in row["hostile"].items()
    )
    refused = "; ".join(f"after {seconds} s {text}" for seconds, text in row.get("refusals", ()))
    return (
        f"- {row['kind']}: {row['what']}. Wrong: {wrong or 'none'}. Refused: {refused or 'none'}. "
        f"Hostile clients got {answers or 'nothing'}"
    )


def _setting(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return f"PDPROXY_{name.upper().replace('.', '__')}", value


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", default=",".join(KINDS), help="comma separated; default: all")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="how long a hostile client runs"
    )
    parser.add_argument(
        "--checkout", type=Path, default=stage.ROOT, help="the checkout whose proxy to measure"
    )
    parser.add_argument(
        "--settings", type=_setting, nargs="*", default=[], metavar="limits.max_inflight=64"
    )
    parser.add_argument("--out", type=Path, help="write the rows to this file as JSON")
    options = parser.parse_args()
    names = options.kinds.split(",")
    if unknown := [name for name in names if name not in KINDS]:
        parser.error(f"unknown kind: {', '.join(unknown)}; known kinds: {', '.join(KINDS)}")
    options.checkout = options.checkout.resolve()
    stage.raise_files()
    result: dict[str, Any] = {"machine": stage.machine(), "seconds": options.seconds, "rows": []}
    print(
        "| " + " | ".join(["hostile", *COLUMNS, ""]) + " |\n" + "|---" * (len(COLUMNS) + 2) + "|",
        flush=True,
    )
    for name in names:
        try:
            row = measure(name, options)
        except stage.NotStartedError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        result["rows"].append(row)
        print(line(row), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    print("\n" + "\n".join(map(notes, result["rows"])))


if __name__ == "__main__":
    main()
