"""Files of secrets that others on this machine can read or change. Owns which of them are
reported.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

_OTHERS = stat.S_IRGRP | stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH
_MOUNTED = "/run/secrets/"
"""Where Docker and Podman mount secrets, readable by all users of the container."""


def exposure(setting: str, path: str) -> str | None:
    """Return that others can read or change a file, as a sentence; None if they can't, or if it
    can't be looked at.

    Secrets that Kubernetes, Docker and Podman mount into a container are readable by all of its
    users by default, and a container has one: these are not reported.
    """
    try:
        mode, real = os.stat(path).st_mode, os.path.realpath(path)  # noqa: PTH116
    except (OSError, ValueError):
        return None
    if not mode & _OTHERS or real.startswith(_MOUNTED):
        return None
    if any(part.startswith("..") and len(part) > 2 for part in Path(real).parts):
        # a folder such as ..2026_01_31_12_00_00.123: the kubelet makes these for secrets
        return None
    return (
        f"{setting}: {path}: others can read or change it (mode {stat.S_IMODE(mode):04o}): chmod "
        f"600 it"
    )
