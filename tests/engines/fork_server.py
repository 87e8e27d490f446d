#!/usr/bin/env python3
"""Import vLLM once and fork an engine for each order: a start then takes five seconds of a core
instead of thirty.

Runs with the engines' own Python. An order is a line of JSON on stdin: `argv` for the API server,
`env` to add, `log` to write to; the answer on stdout is `{"pid": ...}`. The engine leads its own
session and keeps running after the fork server, which ends when stdin closes. No thread runs before
a fork: the imports start none.
"""

import contextlib
import json
import os
import runpy
import sys
from typing import Any

SERVER = "vllm.entrypoints.openai.api_server"


def preload() -> None:
    """Import everything that an engine needs in any of its processes."""
    import setproctitle
    import vllm.distributed.kv_transfer.kv_connector.v1.nixl
    import vllm.entrypoints.openai.api_server
    import vllm.model_executor.models.llama
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401

    # finds the title's memory by the environment: later that has moved, and no title is set
    setproctitle.getproctitle()


def take_orders() -> dict[str, Any] | None:
    """Fork for each order. Returns the order in the child, None in the fork server at the end of
    stdin.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of imports must not look like an answer
    print(json.dumps({"pid": os.getpid()}), file=answers, flush=True)
    while line := sys.stdin.readline():
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not (pid := os.fork()):
            answers.close()
            return json.loads(line)
        print(json.dumps({"pid": pid}), file=answers, flush=True)
    return None


def become_engine(order: dict[str, Any]) -> None:
    """Turn this process into `python -m SERVER`, with its own session, log and environment."""
    os.setsid()
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    # Python reads PYTHONPATH only at its start, which was the fork server's start. Processes of the
    # engine read it anew.
    folders = [order["env"].get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
    sys.path[:0] = filter(None, (folders[0] or "").split(os.pathsep))
    os.environ.update(order["env"] | {"PYTHONPATH": os.pathsep.join(filter(None, folders))})
    sys.argv = [SERVER, *order["argv"]]
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    preload()
    if order := take_orders():
        become_engine(order)
