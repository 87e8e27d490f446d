"""`pdproxy calibrate`: measure an engine, and write its profile for `simulate` and `sim`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pdproxy.cli.parser import examples
from pdproxy.settings.errors import SettingsError
from pdproxy_lab.bench import reading
from pdproxy_lab.cli.load_options import check_writable, typed
from pdproxy_lab.cli.progress import ProgressLine, left_text

if TYPE_CHECKING:
    from pdproxy.cli.parser import Commands
    from pdproxy_lab.calibrate.run import CalibrateOptions, Calibration
    from pdproxy_lab.calibrate.stand_in_front import CalibratedPair

_INTERRUPTED = 130
_MAX_TEXT = 100


def add(commands: Commands, summary: str) -> None:
    """Add the command. `summary`: what it does, in the list of all commands."""
    parser = commands.add_parser(
        "calibrate",
        help=summary,
        description="Send an engine prompts and streams of several lengths and numbers, fit the "
        "engine "
        "model to the times, and "
        "write a profile for `pdproxy simulate` and `pdproxy sim`. With a prefill and a decode "
        "engine, the decode engine is "
        "measured, then the transfers between both. The report has each number with its spread, "
        "what was assumed, and how far "
        "the profile misses its own measurements. The engines should have no other requests. The "
        "exit code is 0 if the profile "
        "was written, 1 if not, 2 if the options are wrong, 130 if it was interrupted.",
        usage="pdproxy calibrate (URL | --prefill URL --decode URL --connector NAME) --out FILE "
        "[option ...]",
        epilog=examples(
            "pdproxy calibrate 127.0.0.1:8200 --out mine.json --accelerator 'NVIDIA H200'",
            "pdproxy calibrate --prefill 127.0.0.1:8200 --decode 127.0.0.1:8300 --connector nixl "
            "--out mine.json",
            "pdproxy simulate --profile mine.json --aggregated 8 --rate 40",
        ),
    )
    parser.add_argument(
        "server",
        metavar="URL",
        nargs="?",
        type=typed(reading.server),
        help="an engine with OpenAI's API",
    )
    parser.add_argument(
        "--prefill",
        metavar="URL",
        type=typed(reading.server),
        help="the prefill engine of a pair (default: none)",
    )
    parser.add_argument(
        "--decode",
        metavar="URL",
        type=typed(reading.server),
        help="the decode engine of a pair (default: none)",
    )
    parser.add_argument(
        "--connector",
        metavar="NAME",
        help="the connector of the pair, as for `pdproxy serve` (default: none)",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        required=True,
        help="where the profile is written (required)",
    )
    parser.add_argument(
        "--name",
        metavar="TEXT",
        type=typed(_text),
        help="the profile's name (default: that of the file)",
    )
    parser.add_argument(
        "--accelerator",
        metavar="TEXT",
        type=typed(_text),
        default="not named",
        help="what the engine runs on, for the profile (default: not named)",
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="the model to ask for (default: the first one that is listed)",
    )
    parser.add_argument(
        "--max-seconds",
        metavar="S",
        type=typed(reading.number(0.0, 86_400.0, "seconds")),
        default=300.0,
        help="seconds after which no trial goes on; the fit then uses those that have ended "
        "(default: 300)",
    )
    parser.add_argument(
        "--timeout",
        metavar="S",
        type=typed(reading.number(0.0, 86_400.0, "seconds")),
        default=60.0,
        help="seconds that one trial may take (default: 60)",
    )
    parser.add_argument(
        "--max-num-batched-tokens",
        metavar="N",
        type=typed(reading.whole(2, 1 << 24)),
        help="the engine's option of this name (default: found from the gaps of a stream)",
    )
    parser.add_argument(
        "--max-num-seqs",
        metavar="N",
        type=typed(reading.whole(1, 1 << 24)),
        help="the engine's option of this name; no trial has more streams (default: not known)",
    )
    parser.add_argument(
        "--token-ids",
        metavar="A:B",
        type=typed(reading.token_ids),
        help="range of the token ids of prompts (default: 300:4000)",
    )
    parser.add_argument(
        "--busy", action="store_true", help="measure although the engine has requests of others"
    )
    parser.add_argument("--api-key", metavar="KEY", help="sent as a bearer token (default: none)")
    parser.add_argument(
        "--api-key-file", metavar="FILE", type=Path, help="a file with the key (default: none)"
    )
    parser.add_argument(
        "--ca",
        metavar="FILE",
        type=Path,
        help="trusted certificates in PEM (default: those of the system)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, write the profile, print the report, return the exit code."""
    options = _options(arguments)
    check_writable(arguments.out, "--out")
    # Imported here: wrong options should be reported at once.
    import msgspec

    from pdproxy_lab.bench.errors import one_line
    from pdproxy_lab.calibrate.fitting import CantTellError
    from pdproxy_lab.calibrate.report import text_of
    from pdproxy_lab.calibrate.trials import TrialError

    try:
        found = _measured(options)
    except (TrialError, CantTellError) as error:
        sys.stderr.write(f"{arguments.prog}: {one_line(str(error))}\n")
        return 1
    if found is None:
        sys.stderr.write(f"{arguments.prog}: interrupted, nothing was written\n")
        return _INTERRUPTED
    try:
        arguments.out.write_bytes(
            msgspec.json.format(msgspec.json.encode(found.profile), indent=2) + b"\n"
        )
    except OSError as error:
        sys.stderr.write(
            f"{arguments.prog}: --out: {arguments.out.name} can't be written: {error.strerror}\n"
        )
        return 1
    print(text_of(found), end="")
    return 0


def _options(arguments: argparse.Namespace) -> CalibrateOptions:
    from pdproxy_lab.bench.workload import Lengths
    from pdproxy_lab.calibrate.http_runner import Target
    from pdproxy_lab.calibrate.run import CalibrateOptions
    from pdproxy_lab.cli.bench import authorization, tls_of

    _check(arguments)
    server = arguments.server or arguments.decode
    headers = authorization(arguments)
    target = Target(
        url=server.url,
        headers=headers,
        tls=tls_of(arguments.ca),
        model=arguments.model,
        timeout=arguments.timeout,
        busy=arguments.busy,
        ids=arguments.token_ids or Lengths(300, 4000),
    )
    return CalibrateOptions(
        target=target,
        name=arguments.name or _name_of(arguments.out),
        accelerator=arguments.accelerator,
        salt=secrets.token_hex(8),
        seconds=arguments.max_seconds,
        budget=arguments.max_num_batched_tokens,
        max_num_seqs=arguments.max_num_seqs,
        pair=None if arguments.server is not None else _pair(arguments, headers),
    )


def _check(arguments: argparse.Namespace) -> None:
    """Refuse options that contradict each other."""
    pair = [arguments.prefill, arguments.decode, arguments.connector]
    mistakes = []
    if arguments.server is not None and any(one is not None for one in pair):
        mistakes.append("URL, or --prefill, --decode and --connector: give one of both")
    if arguments.server is None and any(one is None for one in pair):
        mistakes.append("a URL, or --prefill, --decode and --connector are missing")
    if arguments.api_key is not None and arguments.api_key_file is not None:
        mistakes.append("--api-key and --api-key-file: give one of them")
    if mistakes:
        raise SettingsError(*mistakes)


def _pair(arguments: argparse.Namespace, headers: dict[str, str]) -> CalibratedPair:
    """Return the pair.

    Raises:
        SettingsError: it can't be one, or its decode engine must not serve prompts alone.
    """
    from pdproxy.transfer.registry import AUTO, entry_of
    from pdproxy_lab.calibrate.stand_in_front import CalibratedPair, settings_of

    key = headers["authorization"].partition(" ")[2] if headers else None
    pair = CalibratedPair(
        arguments.prefill.url,
        arguments.decode.url,
        arguments.connector,
        key,
        arguments.ca,
        min(arguments.timeout, 30.0),
    )
    if pair.connector == AUTO:
        raise SettingsError("--connector: name it")
    settings_of(pair)
    if "decode" not in entry_of(pair.connector).capabilities.alone_on:
        raise SettingsError(
            f"--connector: {pair.connector}: its decode engine must not serve prompts alone, "
            f"which is what is measured first"
        )
    return pair


def _measured(options: CalibrateOptions) -> Calibration | None:
    """Return what was found, None if it was interrupted."""
    from pdproxy.observe.logs import configure
    from pdproxy_lab.calibrate.run import calibrate

    # of the proxy in front of the pair
    log = None if options.pair is None else configure("error", "text")
    begun = time.monotonic()
    trials = itertools.count(1)

    async def main() -> Calibration | None:
        task = asyncio.ensure_future(calibrate(options, shown))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            return await task
        return None

    with ProgressLine() as line:

        def shown(name: str) -> None:
            left = left_text(begun + options.seconds - time.monotonic())
            line.show(f"trial {next(trials)}, at most {left}: {name}")

        try:
            return asyncio.run(main())
        finally:
            if log is not None:
                log.close()


def _name_of(path: Path) -> str:
    """Return a profile's name from that of its file, which may have any letters."""
    printable = "".join(letter for letter in path.stem if letter.isprintable())[:_MAX_TEXT]
    return printable if printable.strip() else "profile"


def _text(text: str) -> str:
    if not text.strip() or not text.isprintable() or len(text) > _MAX_TEXT:
        raise ValueError(f"expected 1 to {_MAX_TEXT} printable characters")
    return text
