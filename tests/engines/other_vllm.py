#!/usr/bin/env python3
"""Lay a release of vLLM over the environment's kernels: `PYTHON other_vllm.py WHEEL FOLDER`, with
the engines' Python.

FOLDER gets the release's files without its compiled ones, which are for GPUs, and links to those of
the environment's vLLM. It comes first in PYTHONPATH; VLLM_TARGET_DEVICE=cpu then chooses the CPU
platform. What the release's Python code asks of the kernels must be in the older ones: a release
that starts and answers so shows its server, its scheduler and its connectors, not its kernels.

Uses only the standard library.
"""

import sys
import sysconfig
import zipfile
from pathlib import Path

from patch_env import replace  # type: ignore[import-not-found]  # this file is run as a program

COMPILED = ".so"
FRONTEND = "vllm/vllm-rs"
"""The release's server in Rust (60 MB), which no test starts."""


def main() -> None:
    """Make FOLDER from WHEEL."""
    wheel, folder = map(Path, sys.argv[1:])
    with zipfile.ZipFile(wheel) as release:
        names = [
            name
            for name in release.namelist()
            if COMPILED not in Path(name).suffixes and name != FRONTEND
        ]
        release.extractall(folder, names)
    environment = Path(sysconfig.get_paths()["purelib"])
    for kernels in (environment / "vllm").rglob(f"*{COMPILED}"):
        link = folder / kernels.relative_to(environment)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(kernels)
    # As in patch_env.py, which says why; that file's digest decides whether a whole environment is
    # built again.
    queue = folder / "vllm/distributed/device_communicators/shm_broadcast.py"
    replace(queue, "busy_loop_s: float = 1,", "busy_loop_s: float = 0.001,")
    method = 'os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = '
    replace(folder / "vllm/platforms/cpu.py", f'{method}"spawn"', f'{method}"fork"')


if __name__ == "__main__":
    main()
