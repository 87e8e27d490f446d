"""`pdproxy up`: engines on this machine's GPUs, and the proxy in front of them, in one command."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pdproxy.cli.options import add_groups
from pdproxy.cli.parser import Parser, examples
from pdproxy.cli.reading import seconds
from pdproxy.cli.settings_flags import FlagGroup, groups
from pdproxy.settings.load import POOL, Flag
from pdproxy_lab.bench import reading
from pdproxy_lab.cli.load_options import add_lengths, typed

if TYPE_CHECKING:
    from pdproxy.cli.parser import Commands
    from pdproxy.scheduling.slo import Slo
    from pdproxy_lab.up.options import Load, UpOptions

_OWN = (f"{POOL}connector", "kv_ready", "registration", "listen.uds")
"""Settings that follow from the engines, or that have no meaning here."""
_LONGEST_WAIT = 7200.0
INTERRUPTED = 130


def add(commands: Commands, summary: str) -> None:
    """Add the command. `summary`: what it does, in the list of all commands."""
    parser: Parser = commands.add_parser(
        "up",
        help=summary,
        description="Look at this machine, say which engines of vLLM are started on which GPUs and "
        "why, start them, check them, and serve. Engines that end are started again. Ctrl-C ends "
        "all of it. What follows `--` are flags of vLLM for each engine.",
        usage="pdproxy up MODEL [--gpus LIST] [--arrangement TEXT] [option ...] [-- vLLM's flags]",
        epilog=examples(
            "pdproxy up Qwen/Qwen3-8B",
            "pdproxy up Qwen/Qwen3-8B --gpus 0-3 --arrangement 1P3D -- --max-model-len 8192",
            "pdproxy up /models/llama --slo ttft=500ms,tpot=15ms --print",
        ),
    )
    parser.keeps_rest = True
    group = parser.add_argument_group("engines")
    group.add_argument(
        "model",
        metavar="MODEL",
        help="a name on the hub or a folder; tiny: a small model of random weights",
    )
    group.add_argument(
        "--gpus",
        metavar="LIST",
        type=_gpus,
        help="the GPUs to use, such as 0-3 or 0,2 (default: those that nobody uses)",
    )
    group.add_argument(
        "--arrangement",
        metavar="TEXT",
        default="auto",
        help="numbers of prefill, decode and plain engines, such as 2P6D or 4A; any, auto: all of "
        "role any (default: auto)",
    )
    group.add_argument(
        "--slo",
        metavar="LIMITS",
        type=_slo,
        help="what is wanted of a request's times, such as ttft=500ms,tpot=15ms (default: none)",
    )
    group.add_argument(
        "--profile",
        metavar="NAME",
        help="how long an engine's work takes: a profile's name, or a file of `pdproxy calibrate` "
        "(default: it is learned)",
    )
    add_lengths(group)
    group.add_argument(
        "--rate",
        metavar="R",
        type=typed(reading.number(0.0, 100_000.0, "requests per second")),
        help="requests per second that are expected. With lengths or a rate, --slo and --profile, "
        "`pdproxy plan` chooses the arrangement (default: not known)",
    )
    group.add_argument(
        "--vllm",
        metavar="PATH",
        default="vllm",
        help="the program vllm (default: the one on the PATH)",
    )
    group.add_argument(
        "--first-port",
        metavar="PORT",
        type=_port,
        help="the engines get free ports from this one on (default: from 8100, 8200, 8300, 5557 "
        "and 5600 on, by purpose)",
    )
    group.add_argument(
        "--print",
        action="store_true",
        dest="only_print",
        help="print a shell script with the commands and the settings file, and start nothing "
        "(default: start them)",
    )
    group = parser.add_argument_group("keeping them running")
    group.add_argument(
        "--folder",
        metavar="FOLDER",
        type=Path,
        help="where logs are, and what was started is written down (default: pdproxy/up-PORT in "
        "XDG_STATE_HOME or ~/.local/state)",
    )
    group.add_argument(
        "--apply",
        action="store_true",
        help="have the `pdproxy up` that runs start its engines again with these flags, one after "
        "the other, each drained before (default: refuse to start beside it)",
    )
    group.add_argument(
        "--calibrate",
        metavar="S",
        nargs="?",
        const=60.0,
        type=seconds(minimum=1.0, maximum=_LONGEST_WAIT),
        help="after so many seconds without a request (60) measure an engine, while the others "
        "serve, and write its profile into the folder (default: none is measured)",
    )
    group.add_argument(
        "--wait",
        metavar="S",
        type=seconds(minimum=1.0, maximum=_LONGEST_WAIT),
        default=1800.0,
        help="seconds until an engine must be ready (default: 1800)",
    )
    group.add_argument(
        "--no-check",
        action="store_false",
        dest="checks",
        help="serve without a check of each pair of engines (default: they are checked)",
    )
    add_groups(parser, _groups())
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Start the engines and the proxy, and return the exit code once they have ended."""
    # Imported here: the libraries take a while to load, and wrong options should be reported at
    # once.
    from pdproxy.scheduling.slo import NO_SLO
    from pdproxy_lab.up.errors import UpError
    from pdproxy_lab.up.options import UpOptions

    options = UpOptions(
        arguments.model,
        arguments.gpus,
        arguments.arrangement,
        arguments.slo or NO_SLO,
        arguments.profile,
        _load(arguments),
        tuple(arguments.rest),
        arguments.first_port,
    )
    try:
        return (_print if arguments.only_print else _start)(options, arguments)
    except UpError as error:
        sys.stderr.write(f"{arguments.prog}: {error}\n")
        return error.code
    except KeyboardInterrupt:
        return INTERRUPTED


def _print(options: UpOptions, arguments: argparse.Namespace) -> int:
    from pdproxy_lab.up.prepared import prepare
    from pdproxy_lab.up.script import script

    prepared = asyncio.run(
        prepare(options, arguments.vllm, _flags(arguments), os.environ, listens=False)
    )
    print(script(prepared.plan, prepared.commands, prepared.text), end="", flush=True)
    return 0


def _start(options: UpOptions, arguments: argparse.Namespace) -> int:
    from pdproxy_lab.up.changes import refuse_other, submit
    from pdproxy_lab.up.errors import CANT_START, UpError
    from pdproxy_lab.up.prepared import prepare
    from pdproxy_lab.up.run import Up, before_of, state_of
    from pdproxy_lab.up.state import Folder
    from pdproxy_lab.up.supervised import Times

    flags = _flags(arguments)
    folder = Folder(arguments.folder or _usual_folder(flags))

    async def work(is_first: bool) -> int:
        state, before = before_of(folder)
        prepared = await prepare(
            options, arguments.vllm, flags, os.environ, admin=folder.admin, before=before
        )
        if not is_first:
            if state is not None:
                refuse_other(state, state_of(prepared))
            await submit(folder, state_of(prepared), _say)
            return 0
        return await Up(
            prepared,
            folder,
            os.environ,
            _say,
            Times(ready=arguments.wait),
            state,
            checks=arguments.checks,
            applies=arguments.apply,
            calibrate=arguments.calibrate,
        ).run()

    with folder.locked() as is_first:
        if not is_first and not arguments.apply:
            raise UpError(
                f"another `pdproxy up` runs with the folder {folder.path}: --apply changes its "
                f"engines",
                CANT_START,
            )
        return asyncio.run(work(is_first))


def _usual_folder(flags: Sequence[Flag]) -> Path:
    """Return the folder of the `up` whose proxy has this port."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    port = next((flag.text for flag in flags if flag.key == "listen.port"), "8000")
    return state / "pdproxy" / f"up-{port if port.isdecimal() else 8000}"


def _say(text: str) -> None:
    # the reader of standard output may be gone: engines are kept running nevertheless
    with contextlib.suppress(OSError):
        print(text, flush=True)


def _groups() -> Iterator[FlagGroup]:
    """Yield the groups of the proxy's own settings."""
    for group in groups():
        flags = tuple(flag for flag in group.flags if not flag.key.startswith(_OWN))
        if flags and not group.receivers:
            yield group._replace(flags=flags)


def _flags(arguments: argparse.Namespace) -> Sequence[Flag]:
    given = vars(arguments)
    return [
        Flag(flag.names[0], flag.key, given[flag.key])
        for group in _groups()
        for flag in group.flags
        if given[flag.key] is not None
    ]


def _load(arguments: argparse.Namespace) -> Load | None:
    """Return the load that is expected; None: nothing is said about it."""
    from pdproxy_lab.up.options import Load

    inputs, outputs = (
        None if one is None else f"{one.low}:{one.high}"
        for one in (arguments.input_tokens, arguments.output_tokens)
    )
    found = Load(inputs, outputs, arguments.rate)
    return None if found == Load() else found


def _gpus(text: str) -> tuple[int, ...]:
    from pdproxy_lab.up.options import gpu_list

    try:
        return gpu_list(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _port(text: str) -> int:
    if not text.isdecimal() or not 1024 <= int(text) < 32_000:
        raise argparse.ArgumentTypeError(f"expected 1024 to 31999, got {text[:20]!r}")
    return int(text)


def _slo(text: str) -> Slo:
    from pdproxy.scheduling.slo import Slo
    from pdproxy_lab.bench.slo import parse_slo

    try:
        found = parse_slo(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if found.e2e is not None:
        raise argparse.ArgumentTypeError("e2e is none of a pool's limits: ttft, tpot and gap are")
    return Slo(found.ttft, found.tpot, found.gap)
