"""`vllm bench serve` as a subprocess of the engines' environment."""

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

from .build import Built
from .engine import MODEL
from .launcher import ENVIRONMENT

# The command `vllm bench serve` needs the metadata of a distribution named vllm; its module does
# not.
BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


async def bench_serve(
    built: Built, url: str, path: str, folder: Path, *, requests: int, tokens: int, clients: int
) -> dict[str, Any]:
    """Send `requests` random prompts of 200 tokens, with `tokens` to generate each; return vLLM's
    result. Fails if it fails.
    """
    result = folder / "result.json"
    backend = "openai-chat" if "chat" in path else "openai"
    flags = ["--backend", backend, "--base-url", url, "--endpoint", path, "--model", MODEL]
    flags += [
        "--tokenizer",
        str(built.model),
        "--dataset-name",
        "random",
        "--random-input-len",
        "200",
    ]
    flags += [
        "--random-output-len",
        str(tokens),
        "--num-prompts",
        str(requests),
        "--max-concurrency",
        str(clients),
    ]
    flags += ["--ignore-eos", "--save-result", "--result-filename", str(result)]
    done = await asyncio.create_subprocess_exec(
        built.python,
        "-c",
        BENCH,
        *flags,
        env=ENVIRONMENT | built.environment() | {"HOME": str(folder), "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output, _ = await done.communicate()
    assert done.returncode == 0, output.decode()[-3000:]
    measured: dict[str, Any] = json.loads(result.read_text())
    return measured
