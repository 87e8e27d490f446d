"""What was started, written down so that the next `up` finds it: in one folder, of which one `up`
at a time has the lock.

    lock         held while an `up` runs
    state.json   the engines and the commands, written before any of them starts
    NAME.stat    what /proc says of a process, written by the process itself before its program runs
    NAME.log     what it prints
    pdproxy.yaml the settings of the proxy
    up.sock      where the running `up` takes changes
    admin.sock   the admin API of the proxy
    taken-out    the URL of the engine that the proxy does not use for a while
    profile.json what --calibrate has measured

So nothing that was started can be missing there, at whatever moment `up` is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from pdproxy_lab.up.arrangement import PlannedEngine
from pdproxy_lab.up.command import EngineCommand
from pdproxy_lab.up.errors import CANT_START, UpError
from pdproxy_lab.up.system_processes import boot_id

MAX_STATE = 4 << 20
_MAX_SOCKET = 100
"""Characters of a Unix socket's path. The system allows 107."""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What runs. `boot`: of the system; after its next start nothing of this is there. `commands`:
    by the engines' names; `settings`: the text of the proxy's file; `port`: the proxy's.
    """

    boot: str
    model: str
    engines: tuple[PlannedEngine, ...]
    events_port: int | None
    commands: Mapping[str, EngineCommand]
    settings: str
    port: int


class Folder:
    """The folder of one `up`."""

    def __init__(self, path: Path) -> None:
        """Make it, if it is not there.

        Raises:
            UpError: it can't be made, or its path is too long for sockets.
        """
        self.path = path.absolute()
        if len(str(self.path / "admin.sock")) > _MAX_SOCKET:
            raise UpError(f"--folder: {self.path} is too long for the path of a socket", CANT_START)
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UpError(
                f"--folder: {self.path}: {error.strerror or error}", CANT_START
            ) from error

    @property
    def settings(self) -> Path:
        """The settings file of the proxy."""
        return self.path / "pdproxy.yaml"

    @property
    def admin(self) -> str:
        """The address of the admin API, if the user names no other one."""
        return f"unix:{self.path / 'admin.sock'}"

    @property
    def orders(self) -> Path:
        """The socket where the running `up` takes changes."""
        return self.path / "up.sock"

    @property
    def taken_out(self) -> Path:
        """Which engine is taken out of use."""
        return self.path / "taken-out"

    @property
    def profile(self) -> Path:
        """What was measured."""
        return self.path / "profile.json"

    def stat(self, name: str) -> Path:
        """Where a process has written itself down."""
        return self.path / f"{name}.stat"

    def log(self, name: str) -> Path:
        """What a process prints."""
        return self.path / f"{name}.log"

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Hold the lock; yields False if another `up` holds it."""
        with (self.path / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
                return
            yield True

    def read(self) -> State | None:
        """Return what was started before; None: nothing, or the system has restarted since."""
        try:
            with (self.path / "state.json").open("rb") as file:
                state = msgspec.json.decode(file.read(MAX_STATE), type=State)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise UpError(
                f"{self.path / 'state.json'} can't be read ({str(error)[:200]}): end what it "
                f"names, and remove the folder",
                CANT_START,
            ) from None
        return state if state.boot == boot_id() else None

    def write(self, state: State) -> None:
        """Write down what is started, and the settings of the proxy."""
        self._write(self.settings, state.settings.encode())
        self._write(self.path / "state.json", msgspec.json.encode(state))

    def forget(self) -> None:
        """Remove what says that something runs. Logs stay."""
        for path in (
            self.path / "state.json",
            self.taken_out,
            *self.path.glob("*.stat"),
            *self.path.glob("*.sock"),
        ):
            path.unlink(missing_ok=True)

    def _write(self, path: Path, content: bytes) -> None:
        fresh = path.with_suffix(".new")
        try:
            with fresh.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
        except OSError as error:
            raise UpError(f"{path} can't be written: {error.strerror or error}") from error
