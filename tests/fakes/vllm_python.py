"""Stands in for the interpreter of a vLLM environment: the demo's scripts say what the test wants,
engines are simulated.

`FAKE_VLLM` holds, as JSON: `look` (what `look.py` prints), `slow` (engines never listen), `die`
(the role that dies at once). Engines note their process ids in the folder `notes`, and start a
child that would outlive them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ORDERS = json.loads(os.environ["FAKE_VLLM"])


def option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def engine() -> None:
    role = "aggregated"
    if "--kv-transfer-config" in sys.argv:
        role = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "any"}[
            json.loads(option("--kv-transfer-config"))["kv_role"]
        ]
    Path(ORDERS["notes"], f"{role}-{os.getpid()}").write_text(
        json.dumps({"argv": sys.argv, "env": dict(os.environ)})
    )
    subprocess.Popen(["sleep", ORDERS["child"]])
    if role == ORDERS.get("die") or "--dtype=wrong" in sys.argv:
        print("Starting to load model\nout of luck", flush=True)
        sys.exit(3)
    if ORDERS.get("slow"):
        os.execvp("sleep", ["sleep", ORDERS["child"]])
    print("Starting to load model", flush=True)
    line = [
        "sim",
        "--role",
        role,
        "--port",
        option("--port"),
        "--model",
        option("--served-model-name"),
    ]
    if role != "aggregated":
        line += ["--side-channel-port", os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"]]
    line += ["--enable-prompt-tokens-details", "--speed", ORDERS.get("speed", "0")]
    os.execv(sys.executable, [sys.executable, "-m", "pdproxy", *line])


if sys.argv[1].endswith("look.py"):
    print("a warning of some library's\n" + json.dumps(ORDERS["look"]))
elif sys.argv[1].endswith("tiny_model.py"):
    Path(sys.argv[2]).mkdir()
else:
    engine()
