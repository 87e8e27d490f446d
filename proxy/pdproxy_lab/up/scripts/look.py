"""Prints what vLLM there is and which connectors are installed beside it, as one JSON object. Runs
with vLLM's own interpreter, and imports none of it: that takes long.
"""

import importlib.metadata
import importlib.util
import json
import sys

CONNECTORS = {"nixl": "nixl", "mooncake": "mooncake", "lmcache": "lmcache"}
"""The names of connectors, each with the package that it needs."""


def main() -> None:
    """Look and print."""
    # The distribution's name is another one in some CPU builds.
    names = importlib.metadata.packages_distributions().get("vllm", [])
    version = importlib.metadata.version(names[0]) if names else None
    cpu = any("cpu" in f"{name} {version}" for name in names)
    connectors = [
        name
        for name, package in CONNECTORS.items()
        if importlib.util.find_spec(package) is not None
    ]
    sys.stdout.write(json.dumps({"version": version, "connectors": connectors, "cpu": cpu}) + "\n")


if __name__ == "__main__":
    main()
