"""A machine that builds images and runs containers: `.ci/containers` made its Debian, and its
mounts and its network end with it.

It differs from a user's machine in four things. The base image is a stand-in (`.ci/containers`).
Nothing calls health checks, since that is a timer of systemd: `healthy` does. Control groups are
off: containers have no limits of memory and CPU. The build trusts the certificates that this
machine trusts, and has them by a mount, so the image does not.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("PDPROXY_CONTAINERS_DIR") or ROOT / ".containers").resolve()
TARGETS = {"local": "", "tokenizer": "tokenizer"}
"""The tag of each image of the Dockerfile, and its target."""
_ENVIRONMENT = (
    "HOME=/root",
    "LANG=C.UTF-8",
    "PATH=/usr/sbin:/usr/bin:/sbin:/bin",
    "PYTHONPATH=/opt/podman-compose",
)


class Machine:
    """Its programs run by `run`; its folder `/work` is `FOLDER`."""

    def __init__(self) -> None:
        self._mounts = _holder("--mount", "--propagation", "private", "bash", _MOUNTS, str(FOLDER))
        self._network = _holder(
            "--net", "sh", "-c", "ip link set lo up; echo ready; cat >/dev/null"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.run("podman", "rm", "--force", "--all", "--time", "1", check=False)
        for one in (self._network, self._mounts):
            one.communicate(timeout=30)

    def run(
        self, *words: str, check: bool = True, online: bool = False, timeout: float = 600
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of the machine, in its own network or, `online`, in that of the tests."""
        network = [] if online else [f"--net=/proc/{self._network.pid}/ns/net"]
        inside = ["nsenter", f"--target={self._mounts.pid}", "--mount", *network]
        done = subprocess.run(
            [*inside, "env", "-i", *_ENVIRONMENT, *words],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert not check or done.returncode == 0, (
            f"{words}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
        return done

    def podman(self, *words: str, check: bool = True) -> str:
        """Return what podman prints."""
        return self.run("podman", *words, check=check).stdout.strip()

    def start(self, name: str, image: str, *words: str, options: tuple[str, ...] = ()) -> None:
        """Start a container as a careful operator would: no rights, nothing to write to."""
        self.podman("run", "--detach", "--name", name, *CAREFUL, *options, image, *words)

    def ask(self, path: str, body: Any = None, port: int = 8000) -> tuple[int, str]:
        """Ask a port that is published on the machine's loopback."""
        code = (
            "import sys, urllib.error, urllib.request as u\n"
            "url, data = sys.argv[1:]\n"
            "r = u.Request(url, data.encode() or None, {'Content-Type': 'application/json'})\n"
            "try: a = u.build_opener(u.ProxyHandler({})).open(r, timeout=30)\n"
            "except urllib.error.HTTPError as e: a = e\n"
            "print(a.status, a.read().decode())"
        )
        data = "" if body is None else json.dumps(body)
        url = f"http://127.0.0.1:{port}{path}"
        status, _, text = self.run("python3", "-c", code, url, data).stdout.partition(" ")
        return int(status), text

    def healthy(self, *names: str, within: float = 60) -> None:
        """Call the image's health check in the place of a timer, until all containers pass it."""
        ends, left = time.monotonic() + within, list(names)
        while left:
            assert time.monotonic() < ends, (left, self.podman("ps", "--all"))
            left = [
                one
                for one in left
                if self.run("podman", "healthcheck", "run", one, check=False).returncode
            ]
            time.sleep(0.5)

    def build(self) -> None:
        """Build each image of the tests' own checkout. What has not changed comes from earlier
        builds.
        """
        files = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        ).stdout
        self.run("rm", "-rf", "/work/context")
        self.run("mkdir", "/work/context")
        packed = subprocess.run(
            ["tar", "--null", "--ignore-failed-read", "-T", "-", "-cf", "-"],
            cwd=ROOT,
            input=files,
            capture_output=True,
            check=True,
        ).stdout
        (FOLDER / "context.tar").write_bytes(packed)
        self.run("tar", "-C", "/work/context", "-xf", "/work/context.tar")
        if self.run("podman", "image", "exists", base(), check=False).returncode:
            self._make_base()
        for tag, target in TARGETS.items():
            self.run(
                *("buildah", "bud", "--isolation", "chroot", "--network", "host", "--pull-never"),
                *("--layers", "--format", "docker"),  # the other format has no health checks
                *("--volume", "/work/ca.crt:/etc/ssl/certs/ca-certificates.crt:ro"),
                *(["--target", target] if target else []),
                *("--tag", f"pdproxy:{tag}", "/work/context"),
                online=True,
                timeout=1500,
            )

    def _make_base(self) -> None:
        container = self.run("buildah", "from", "scratch").stdout.strip()
        self.run("buildah", "add", "--quiet", container, "/work/base.tar", "/")
        path = "PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
        self.run("buildah", "config", "--env", path, "--env", "LANG=C.UTF-8", container)
        name = f"docker.io/library/{base()}"
        self.run("buildah", "commit", "--quiet", "--rm", "--format", "docker", container, name)


CAREFUL = (
    *("--read-only", "--read-only-tmpfs=false", "--cap-drop", "ALL"),
    *("--security-opt", "no-new-privileges"),
)
_MOUNTS = str(Path(__file__).with_name("mounts.sh"))


def base() -> str:
    """Return the name of the image that the Dockerfile begins with."""
    found = re.search(r"^FROM (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def _holder(*words: str) -> subprocess.Popen[str]:
    """Start a process that holds namespaces until its input ends."""
    process = subprocess.Popen(
        ["unshare", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", words
    return process
