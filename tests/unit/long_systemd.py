"""What systemd says of the units in configs/systemd: all settings are known, little is open to the
proxy's service, and `pdproxy up` runs, is reloaded, comes back and ends as its unit says.
"""

# Needs systemd-analyze on PATH; the last test needs root, and systemd itself, which it runs in
# namespaces of its own.

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.vllm_box import VllmBox

UNITS = Path(__file__).parents[2] / "configs" / "systemd"
UNIT, UP = UNITS / "pdproxy.service", UNITS / "pdproxy-up.service"
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


@pytest.mark.parametrize("one", [UNIT, UP], ids=lambda one: one.name)
def test_systemd_has_nothing_to_say(one: Path, tmp_path: Path) -> None:
    assert analyze("verify", "--man=no", unit(tmp_path, one.read_text())) == ""


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


SYSTEMD = Path("/lib/systemd/systemd")
BOOT = """
set -e
ip link set lo up
mount -t tmpfs tmpfs /run
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir -p /run/systemd/system
cp {folder}/units/* /run/systemd/system/
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin container=test {systemd} --system --unit=try.target
"""
DRIVE = """
import json, subprocess, sys, time, urllib.request

def systemctl(*words):
    done = subprocess.run(["systemctl", *words], capture_output=True, text=True)
    return done.stdout.strip() or done.stderr.strip() or str(done.returncode)

def shown(name):
    return systemctl("show", "--value", "-p", name, "pdproxy-up")

def serves():
    body = {"model": "tiny", "prompt": "some words", "max_tokens": 4}
    late = time.monotonic() + 100
    while time.monotonic() < late:
        try:
            asked = urllib.request.Request(
                "http://127.0.0.1:8000/v1/completions",
                json.dumps(body).encode(),
                {"content-type": "application/json"},
            )
            with urllib.request.urlopen(asked, timeout=5) as answer:
                return answer.status
        except OSError:
            time.sleep(0.2)
    return systemctl("status", "--no-pager", "-n0", "pdproxy-up")

found = {"serves": serves(), "state": shown("ActiveState")}
options = open(sys.argv[1]).read()
open(sys.argv[1], "w").write(options.replace("-- ", "-- --max-num-seqs 64 "))
found["reload"] = systemctl("reload", "pdproxy-up")
found["reloaded"] = shown("ReloadResult")
pid = shown("MainPID")
systemctl("kill", "--kill-whom=main", "--signal=KILL", "pdproxy-up")
while shown("NRestarts") != "1":
    time.sleep(0.2)
found["again"] = serves()
found["other"] = shown("MainPID") != pid
found["stop"] = systemctl("stop", "pdproxy-up")
found["result"] = shown("Result")
left = subprocess.run(["pgrep", "-f", "pdproxy (sim|serve)"], capture_output=True, text=True)
found["left"] = left.stdout
open(sys.argv[2], "w").write(json.dumps(found))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that the unit's PrivateTmp does not hide."""
    if os.geteuid() or not SYSTEMD.exists():
        pytest.skip("needs root, and systemd")
    found = Path(tempfile.mkdtemp(prefix="pdproxy-", dir="/srv"))
    yield found
    shutil.rmtree(found)


@pytest.mark.timeout(300)
def test_up_runs_is_reloaded_comes_back_and_ends(folder: Path) -> None:
    box = VllmBox(folder)
    options = folder / "up"
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    env = {**box.env, "PYTHONPATH": os.environ.get("PYTHONPATH", ""), "PATH": path}
    text = (
        UP.read_text()
        .replace("/opt/pdproxy/bin/pdproxy", f"{Path(sys.executable).parent}/pdproxy")
        .replace("/opt/vllm/bin/vllm", str(box.vllm))
        .replace("/var/lib/pdproxy", str(folder))
        .replace("/etc/pdproxy/up", str(options))
        .replace("User=pdproxy", f"User=root\nStandardOutput=file:{folder}/said")
        # where the interpreter of the tests may be: a home, or /tmp
        .replace("ProtectHome=yes", "ProtectHome=read-only")
        .replace("PrivateTmp=yes", f"PrivateTmp=yes\nBindReadOnlyPaths={sys.prefix}")
        # of a whole system nothing else is started
        .replace("[Unit]", "[Unit]\nDefaultDependencies=no")
        .replace("Wants=network-online.target\n", "")
    )
    lines = [f"{name}='{value}'" for name, value in env.items() if name != "XDG_STATE_HOME"]
    options.write_text("\n".join(["UP=tiny -- --max-model-len 4096", *lines]) + "\n")
    units = folder / "units"
    units.mkdir()
    (units / UP.name).write_text(text)
    drive, answer = folder / "drive.py", folder / "answer"
    drive.write_text(DRIVE)
    (units / "drive.service").write_text(
        "[Unit]\nDefaultDependencies=no\n[Service]\nType=oneshot\nTimeoutStartSec=250\n"
        f"ExecStart={sys.executable} {drive} {options} {answer}\n"
        f"StandardError=file:{folder}/errors\n"
    )
    (units / "try.target").write_text(
        f"[Unit]\nDefaultDependencies=no\nWants={UP.name} drive.service\n"
    )
    boot = folder / "boot"
    boot.write_text(BOOT.format(folder=folder, systemd=SYSTEMD))
    namespaces = ["unshare", "-m", "-p", "-f", "-u", "-i", "-n", "--kill-child", "--mount-proc"]
    with subprocess.Popen([*namespaces, "sh", boot], stdin=subprocess.DEVNULL) as system:
        try:
            late = time.monotonic() + 250
            while not answer.exists() and time.monotonic() < late:
                time.sleep(0.2)
        finally:
            system.kill()
    said = [one.read_text() for name in ("said", "errors") if (one := folder / name).exists()]
    assert answer.exists(), said
    found = json.loads(answer.read_text())
    print(found)
    assert found == {
        "serves": 200,
        "state": "active",
        "reload": "0",
        "reloaded": "success",
        "again": 200,
        "other": True,
        "stop": "0",
        "result": "success",
        "left": "",
    }
    log = (folder / "state/pdproxy/up-8000/any-0.log").read_text()
    assert log
    assert any("64" in note["argv"] for note in box.notes("any"))
