"""Downloads what describes a model at the hub: config.json, and the index of its weights if there
is one. Prints the folder as JSON. Runs with vLLM's own interpreter.

    describe.py NAME [REVISION]
"""

import contextlib
import json
import sys
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError


def main(name: str, revision: str | None = None) -> None:
    """Download and print."""
    config = hf_hub_download(name, "config.json", revision=revision)
    with contextlib.suppress(EntryNotFoundError):  # a model with one file has none
        hf_hub_download(name, "model.safetensors.index.json", revision=revision)
    sys.stdout.write(json.dumps(str(Path(config).parent)) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
