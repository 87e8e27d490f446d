"""Prints what vLLM there is and what it can use, as one JSON object. Runs with vLLM's own
interpreter.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import sys


def main() -> None:
    """Look and print."""
    # The distribution's name is another one in some CPU builds.
    names = importlib.metadata.packages_distributions().get("vllm", [])
    version = importlib.metadata.version(names[0]) if names else None
    cpu = any("cpu" in f"{name} {version}" for name in names)
    try:
        gpus = importlib.import_module("torch").cuda.device_count()
    except ImportError:
        gpus = 0
    nixl = importlib.util.find_spec("nixl") is not None
    sys.stdout.write(
        json.dumps({"version": version, "nixl": nixl, "gpus": gpus, "cpu": cpu}) + "\n"
    )


if __name__ == "__main__":
    main()
