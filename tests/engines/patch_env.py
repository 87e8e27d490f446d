#!/usr/bin/env python3
"""Make nixl and vLLM usable on a machine with few cores; run once with the engines' own Python.

1. nixl's Python API hard-codes `pthrDelay = 0`: its progress thread polls without sleeping and
   burns a whole core in every engine. 1000 (us) lets it sleep in poll() and wake on events.
2. vLLM's shared-memory queue spins for a second after each message, in both processes of an engine.
   Two cores and several engines then starve (answers take seconds). It spins for a millisecond
   instead.

3. vLLM's CPU platform insists on `spawn`, so an engine's core imports everything a second time (25
   s of a core). It is forked off the API server instead, as on GPUs.

Idempotent, and it fails where the text to change isn't found. A file is replaced and never written
in place: the installer may have hard-linked it to its own cache.
"""

import os
import sysconfig
from pathlib import Path


def replace(path: Path, old: str, new: str) -> None:
    """Put `new` where `old` stands exactly once in `path`, unless that was done before."""
    text = path.read_text()
    if new in text and old not in text:
        return
    if text.count(old) != 1:
        raise SystemExit(
            f"{path}: expected {old!r} once, found it {text.count(old)} times: another version?"
        )
    fresh = path.with_suffix(".patched")
    fresh.write_text(text.replace(old, new))
    os.replace(fresh, path)


def main() -> None:
    """Patch the environment whose interpreter runs this."""
    packages = Path(sysconfig.get_paths()["purelib"])
    backends = list(packages.glob("nixl_cu1*/_api.py"))
    if not backends:
        raise SystemExit("no nixl backend is installed")
    for path in backends:
        replace(path, "agent_config.pthrDelay = 0", "agent_config.pthrDelay = 1000")
    queue = packages / "vllm/distributed/device_communicators/shm_broadcast.py"
    replace(queue, "busy_loop_s: float = 1,", "busy_loop_s: float = 0.001,")
    method = 'os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = '
    replace(packages / "vllm/platforms/cpu.py", f'{method}"spawn"', f'{method}"fork"')


if __name__ == "__main__":
    main()
