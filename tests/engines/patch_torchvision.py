#!/usr/bin/env python3
"""Make torchvision usable beside torch's CPU build: `patch_torchvision.py FOLDER` of the overlay.

Its compiled operators are for CUDA and cannot be loaded, and torchvision then fails while it
declares their shapes. Processors of pictures use only its transforms, which are written in Python.
"""

import sys
from pathlib import Path

if __package__ in {None, ""}:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "engines"

from .patch_env import replace

DECLARED = "    _autograd_registrations,\n    _meta_registrations,\n"


def main(folder: Path) -> None:
    """Patch the torchvision in `folder`."""
    begin = "from torchvision import (\n"
    replace(folder / "torchvision" / "__init__.py", begin + DECLARED, begin)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
