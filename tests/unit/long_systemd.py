"""What systemd says of the unit in configs/systemd: all settings of the unit are known, and little
is open to the service.
"""

# Needs systemd-analyze on PATH.

import re
import subprocess
import sys
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[2] / "configs" / "systemd" / "pdproxy.service"
MOST = 2.0
"""Of 10, as systemd counts what a service could do to the machine. pdproxy has 1.5."""


def analyze(*words: str) -> str:
    done = subprocess.run(
        ["systemd-analyze", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def unit(folder: Path, text: str) -> str:
    """Write the unit with a program that this machine has."""
    file = folder / "pdproxy.service"
    file.write_text(
        text.replace("/opt/pdproxy/bin/pdproxy", f"{Path(sys.executable).parent}/pdproxy")
    )
    return str(file)


def test_systemd_has_nothing_to_say(tmp_path: Path) -> None:
    assert analyze("verify", "--man=no", unit(tmp_path, UNIT.read_text())) == ""


@pytest.mark.parametrize(
    ("text", "wrong", "said"),
    [
        ("ProtectClock=", "ProtectClok=", "Unknown key"),
        ("Type=exec", "Type=execute", "Failed to parse service type"),
    ],
)
def test_what_systemd_does_not_know_is_found(
    text: str, wrong: str, said: str, tmp_path: Path
) -> None:
    assert said in analyze(
        "verify", "--man=no", unit(tmp_path, UNIT.read_text().replace(text, wrong))
    )


def test_little_is_open_to_the_service(tmp_path: Path) -> None:
    found = analyze("security", "--offline=yes", "--no-pager", unit(tmp_path, UNIT.read_text()))
    last = found.strip().splitlines()[-1]
    print(last.partition(" ")[2])
    exposure = re.search(r": ([0-9.]+) ", last)
    assert exposure is not None
    assert float(exposure[1]) <= MOST
