"""Do encoder engines save the encoding on a GPU? A plain engine, and encoder, prefill and decode
engines behind pdproxy, all on one GPU, with a model that sees.

Usage: encoders.py MODEL [--connector cpu|example] [--each 1] [--requests 200] [--clients 1 8]
       [--lost] [--out encoders-out]

MODEL is a folder; `tests/engines/make_vision_model.py` makes a tiny one. Runs with a Python that
has vLLM, NIXL, and the needs of pdproxy and its tests. Both sides are asked the chats of
`tests/engines/long_media.py`, with new pictures each time, `--requests` of them for each number of
`--clients`. Printed are answers that differ, and what the engines have counted. The exit code is 1
if an answer differs, if a prefill or decode engine encoded a picture or did not load an output, or
if a decode engine computed a part of a prompt. `--out` gets the table and the logs.

`--lost`: at the end an encoder engine is killed behind its answer, before a prefill engine is asked
with that answer, and the time of this request is printed; then requests go on without the killed
engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import secrets
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.engines.client import ask  # noqa: E402
from tests.engines.compare import differs  # noqa: E402
from tests.engines.engine import MODEL, Engine, Role  # noqa: E402
from tests.engines.equality import SOURCE  # noqa: E402
from tests.engines.long_media import SHAPES  # noqa: E402
from tests.engines.prompts import CHAT  # noqa: E402
from tests.engines.proxy import Proxy  # noqa: E402
from tests.engines.vision import FLAGS as SEEING  # noqa: E402
from tests.engines.vision import encoded  # noqa: E402
from tests.fakes.pictures import asking, png  # noqa: E402
from tests.fakes.ports import free_port  # noqa: E402

SERVED = [shape for shape in SHAPES if shape.status == 200]
SETTLED = 20.0
"""Seconds in which engines' counters and logs are up to date."""
PAUSE = 1.5
"""Seconds between two looks at them."""
FLAGS = (
    f"--served-model-name {MODEL} --host 127.0.0.1 --dtype float32 --enforce-eager --seed 0 "
    "--max-model-len 2048 --max-num-seqs 16 --block-size 32 --gpu-memory-utilization 0.05 "
    "--kv-cache-memory-bytes 268435456 --enable-prompt-tokens-details "
    """--structured-outputs-config '{"backend": "xgrammar", "disable_any_whitespace": true}' """
    + SEEING
)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "VLLM_EC_SIDE_CHANNEL_HOST": "127.0.0.1",
    # Triton multiplies float32 as tf32 otherwise: one greedy answer in a hundred is another then.
    "TRITON_F32_DEFAULT": "ieee",
}
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(levelname)s %(asctime)s %(message)s"}},
    "handlers": {"out": {"class": "logging.StreamHandler", "formatter": "line"}},
    "loggers": {
        "vllm": {"handlers": ["out"], "level": "INFO", "propagate": False},
        "vllm.distributed.ec_transfer": {"level": "DEBUG"},
    },
}
"""Only vLLM's debug log says which outputs have moved."""
EC: dict[str, tuple[str, dict[str, Any]]] = {
    "cpu": ("ECCPUConnector", {"ec_enable_nixl": True, "ec_cpu_bytes": 64 << 20}),
    "example": ("ECExampleConnector", {}),
}
SAVED, LOADED = [
    re.compile(rf"EC {name}: (\d+) entr\S+ \((\d+) bytes\) took ([\d.]+) ms")
    for name in ("save", "load")
]
READ = re.compile(r"NIXL xfer complete mm_hash=()")


class Stage:
    """The engines by role, and the proxy. Close it."""

    def __init__(self, options: argparse.Namespace, outputs: Path) -> None:
        self.out: Path = options.out
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "logging.json").write_text(json.dumps(LOGGING))
        self._model, self._connector = options.model, options.connector
        self._outputs = outputs
        self.proxy: Proxy | None = None
        self.engines: dict[Role, list[Engine]] = {"plain": [self._start("plain", 0)]}
        for role in ("encode", "prefill", "decode"):
            self.engines[role] = [self._start(role, at) for at in range(options.each)]

    def _start(self, role: Role, at: int) -> Engine:
        port, name = free_port(), f"{role}{at}"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(self._model), "--port", str(port), *shlex.split(FLAGS)]
        if role in {"encode", "prefill"}:
            ec_role = "ec_producer" if role == "encode" else "ec_consumer"
            connector, extra = EC[self._connector]
            extra = {**extra, "shared_storage_path": str(self._outputs)}
            ec = {"ec_connector": connector, "ec_role": ec_role, "ec_connector_extra_config": extra}
            command += ["--ec-transfer-config", json.dumps(ec)]
        if role in {"prefill", "decode"}:
            kv_role = "kv_producer" if role == "prefill" else "kv_consumer"
            kv = {"kv_connector": "NixlConnector", "kv_role": kv_role}
            command += ["--kv-transfer-config", json.dumps(kv)]
        env = os.environ | ENVIRONMENT
        env["VLLM_LOGGING_CONFIG_PATH"] = str(self.out / "logging.json")
        env |= {f"VLLM_{of}_SIDE_CHANNEL_PORT": str(free_port()) for of in ("NIXL", "EC")}
        log = self.out / f"{name}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, env=env, stdout=out, stderr=out, start_new_session=True
            )
        return Engine(name, role, port, process.pid, str(log))

    @property
    def every(self) -> list[Engine]:
        """All engines."""
        return [engine for some in self.engines.values() for engine in some]

    async def ready(self) -> Proxy:
        """Return the proxy once all serve, and each has computed a picture and a text: kernels are
        compiled then.
        """
        began = time.monotonic()
        for engine in self.every:
            engine.wait()
        print(
            f"{len(self.every)} engines are up after {time.monotonic() - began:.0f} s", flush=True
        )
        nodes = [{"url": one.url, "role": "encode"} for one in self.engines["encode"]]
        self.proxy = proxy = Proxy.start(
            self.engines["prefill"],
            self.engines["decode"],
            self.out,
            settings={"pools": [{"ec_connector": self._connector, "nodes": nodes}]},
        )
        for url in (*(engine.url for engine in self.every), proxy.url):
            answer = await ask(url, CHAT, _what(png(secrets.token_hex(6))))
            assert answer.status == 200, answer.body
        return proxy

    def close(self) -> None:
        """End all processes."""
        if self.proxy:
            self.proxy.stop()
        for engine in self.every:
            engine.kill()

    def told(self, role: Role, pattern: re.Pattern[str]) -> list[tuple[str, ...]]:
        """Return what the logs of a role's engines say: the groups of each match."""
        texts = (Path(one.log).read_text(errors="replace") for one in self.engines[role])
        return [found.groups() for text in texts for found in pattern.finditer(text)]

    def counted(self) -> dict[str, int]:
        """Return what engines and proxy have counted so far, by what it says."""
        rows = {
            f"pictures encoded by {role} engines": sum(map(encoded, engines))
            for role, engines in self.engines.items()
        }
        rows[SAVES] = sum(int(number) for number, *_ in self.told("encode", SAVED))
        rows[READS] = len(self.told("prefill", READ))
        rows[LOADS] = sum(int(number) for number, *_ in self.told("prefill", LOADED))
        (plain,) = (engine.counters() for engine in self.engines["plain"])
        decodes = [engine.counters() for engine in self.engines["decode"]]
        rows[PROMPT] = int(plain.sum("vllm:prompt_tokens_total"))
        rows[MOVED] = int(sum(one.sum(SOURCE, source="external_kv_transfer") for one in decodes))
        rows[COMPUTED] = int(sum(one.sum(SOURCE, source="local_compute") for one in decodes))
        assert self.proxy
        front = self.proxy.counters()
        for name, label in (("encoded_media", "result"), ("alone", "reason")):
            found = front.by(f"pdproxy_{name}_total", label)
            rows |= {f"pdproxy: {name}, {key}": int(number) for key, number in found.items()}
        return rows


SAVES = "outputs that encode engines have put into host memory"
READS = "outputs that prefill engines have read from there, by NIXL"
LOADS = "outputs that prefill engines have loaded"
PROMPT = "prompt tokens of the plain engine"
MOVED = "prompt tokens whose KV decode engines got"
COMPUTED = "prompt tokens that decode engines have computed"


def _what(picture: bytes, tokens: int = 8) -> dict[str, Any]:
    messages = [asking(picture, "What is missing?")]
    return {"messages": messages, "temperature": 0, "max_tokens": tokens}


async def compare(stage: Stage, requests: int, clients: int) -> list[str]:
    """Ask the plain engine and the proxy the same chats. Return how their answers differ."""
    (plain,), proxy = stage.engines["plain"], stage.proxy
    assert proxy
    places = asyncio.Semaphore(clients)
    wrong: list[str] = []

    async def one(at: int) -> None:
        shape = SERVED[at % len(SERVED)]
        body = shape.make(secrets.token_hex(6))
        async with places:
            answers = await asyncio.gather(*(ask(to.url, CHAT, body) for to in (plain, proxy)))
        assert answers[0].status == 200, answers[0].body
        if why := differs(*answers, strict=False):
            wrong.append(f"{shape.name}: {why}")

    await asyncio.gather(*(one(at) for at in range(requests)))
    return wrong


async def increases(stage: Stage, before: dict[str, int]) -> dict[str, int]:
    """Return how counts have grown, once they stand still."""
    deadline = time.monotonic() + SETTLED
    last: dict[str, int] = {}
    while (counted := stage.counted()) != last and time.monotonic() < deadline:
        last = counted
        await asyncio.sleep(PAUSE)
    return {name: number - before.get(name, 0) for name, number in counted.items()}


def is_good(rows: dict[str, int], connector: str) -> bool:
    """Whether encoder engines have encoded all pictures, and all KV was moved.

    Two encoder engines may encode one picture: when it comes twice in a chat, or again later.
    """
    pictures = rows["pictures encoded by plain engines"]
    made = rows["pictures encoded by encode engines"]
    wanted = {
        "pictures encoded by prefill engines": 0,
        "pictures encoded by decode engines": 0,
        MOVED: rows[PROMPT],
        COMPUTED: 0,
    }
    if connector == "cpu":
        wanted |= {SAVES: made, READS: pictures, LOADS: pictures}
    return made >= pictures > 0 and rows | wanted == rows


async def lose_an_encoder(stage: Stage) -> list[str]:
    """Kill an encoder engine behind its answer. Return what becomes of requests then."""
    (plain, *_), (encode, *_), (prefill, *_) = (
        stage.engines[role] for role in ("plain", "encode", "prefill")
    )
    picture = png(secrets.token_hex(6))
    told = (await ask(encode.url, CHAT, _what(picture))).json["ec_transfer_params"]
    encode.kill()
    before = encoded(prefill)
    late = await ask(prefill.url, CHAT, _what(picture) | {"ec_transfer_params": told})
    right = await ask(plain.url, CHAT, _what(picture))
    await asyncio.sleep(PAUSE)
    seconds, made = late.seconds, encoded(prefill) - before
    what = f"after {seconds:.1f} s, {'right' if late.text == right.text else 'WRONG'}"
    lines = [
        "an encoder engine is killed behind its answer",
        f"the prefill engine answers {what}; pictures that it has encoded: {made}",
    ]
    counts = stage.counted()
    wrong = await compare(stage, 20, 1)
    rows = await increases(stage, counts)
    lines.append(f"20 chats without that engine: {len(wrong)} answers differ")
    lines += [f"{rows[name]:>8}  {name}" for name in rows if name.startswith("pictures")]
    return lines + wrong


async def run(options: argparse.Namespace, stage: Stage) -> int:
    """Ask, compare, count and print. Return the exit code."""
    code = 0
    with (options.out / "table.txt").open("w") as table:

        def say(*lines: str) -> None:
            print(*lines, sep="\n", flush=True)
            print(*lines, sep="\n", file=table, flush=True)

        await stage.ready()
        (one, *_) = stage.engines["encode"]
        answer = await ask(one.url, CHAT, _what(png("shown")))
        say(f"an encoder engine's ec_transfer_params: {answer.json['ec_transfer_params']}")
        for clients in options.clients:
            before = await increases(stage, {})
            began = time.monotonic()
            wrong = await compare(stage, options.requests, clients)
            took = time.monotonic() - began
            rows = await increases(stage, before)
            good = is_good(rows, options.connector) and not wrong
            code |= not good
            say("", f"{options.requests} chats, {clients} at once, in {took:.0f} s:")
            say(*wrong, f"{len(wrong):>8}  answers that differ")
            say(*(f"{number:>8}  {name}" for name, number in rows.items()))
            say("good" if good else "NOT good")
        copies: list[tuple[Role, re.Pattern[str]]] = [("encode", SAVED), ("prefill", LOADED)]
        for role, pattern in copies:
            if found := stage.told(role, pattern):
                times = sorted(float(took) for *_, took in found)
                size = sum(int(size) for _, size, _ in found)
                say(f"{role}: {size} bytes copied, median {times[len(times) // 2]:.3f} ms")
        if options.lost:
            say(*await lose_an_encoder(stage))
    return code


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--connector", choices=sorted(EC), default="cpu")
    parser.add_argument("--each", type=int, default=1, help="engines of each role")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--out", type=Path, default=Path("encoders-out"))
    parser.add_argument("--lost", action="store_true", help="kill an encoder engine at the end")
    options = parser.parse_args()
    options.out, options.model = options.out.resolve(), options.model.resolve()
    with tempfile.TemporaryDirectory() as outputs:
        stage = Stage(options, Path(outputs))
        try:
            return asyncio.run(run(options, stage))
        finally:
            stage.close()


if __name__ == "__main__":
    sys.exit(main())
