"""`python -m tests.chaos`: the proxy under seeded load and faults, in virtual time."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pdproxy.cli.parser import USAGE_ERROR, Parser, examples
from pdproxy.transfer import registry
from pdproxy_lab.bench import reading
from pdproxy_lab.cli.load_options import typed

_INTERRUPTED = 130
_MAX_SEED = 2**31 - 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (None: the process's own), and return its exit code."""
    return run(parser_of_options().parse_args(argv))


def parser_of_options() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="python -m tests.chaos",
        description="Run the proxy and simulated engines in one process in virtual time, under "
        "load "
        "and "
        "faults that a seed"
        " decides, and check that each request ends once and rightly and that nothing is left "
        "behind. A seed repeats exactly."
        " For one that fails, the shortest schedule that still fails is searched for. The exit "
        "code is 0, 1 if a rule was"
        " broken, 2 if the options are wrong, or 130 if it was interrupted.",
        usage="python -m tests.chaos [--seed N] [--seconds S] [option ...]",
        epilog=examples(
            "python -m tests.chaos --seed 17 --seconds 60",
            "python -m tests.chaos --seed 0 --seeds 50 --jobs 2",
            "python -m tests.chaos --seed 17 --seconds 60 --only 3,8,41",
        ),
    )
    parser.add_argument(
        "--seed",
        metavar="N",
        type=typed(reading.whole(0, _MAX_SEED)),
        default=0,
        help="the seed (default: 0)",
    )
    parser.add_argument(
        "--seeds",
        metavar="K",
        type=typed(reading.whole(1, 100_000)),
        default=1,
        help="so many seeds from --seed on (default: 1)",
    )
    parser.add_argument(
        "--seconds",
        metavar="S",
        type=typed(reading.number(0.0, 3600.0, "seconds")),
        default=60.0,
        help="virtual seconds of load and faults (default: 60)",
    )
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}",
            metavar="N",
            type=typed(reading.whole(1, 32)),
            default=3,
            help=f"number of {role} engines (default: 3)",
        )
    parser.add_argument(
        "--encode",
        metavar="N",
        type=typed(reading.whole(0, 32)),
        default=0,
        help="number of encoder engines; with some there are pictures (default: 0)",
    )
    parser.add_argument(
        "--connector",
        metavar="NAME",
        choices=registry.names(),
        default="nixl",
        help="how KV moves: nixl, nixl-push, mooncake, cpu, shared, lmcache-mp or kvstore-keys "
        "(default: nixl)",
    )
    parser.add_argument(
        "--notices",
        choices=("none", "notifier", "early"),
        default="none",
        help="with nixl: engines have the notifier; early: decode engines are asked at its notice "
        "(default: none)",
    )
    parser.add_argument(
        "--pool",
        choices=("roles", "any"),
        default="roles",
        help="engines of one role each, or all of role any (default: roles)",
    )
    parser.add_argument(
        "--workers",
        metavar="N",
        type=typed(reading.whole(1, 8)),
        default=1,
        help="workers of the proxy; with several there is a scheduler process, too (default: 1)",
    )
    parser.add_argument(
        "--rate",
        metavar="R",
        type=typed(reading.number(0.0, 1000.0, "requests per second")),
        default=8.0,
        help="requests per virtual second (default: 8)",
    )
    parser.add_argument(
        "--faults",
        metavar="R",
        type=typed(reading.number(0.0, 1000.0, "faults per second")),
        default=1.5,
        help="faults per virtual second (default: 1.5)",
    )
    parser.add_argument(
        "--only",
        metavar="NUMBERS",
        type=typed(_numbers),
        help="let only these items of the schedule happen (default: all)",
    )
    parser.add_argument(
        "--jobs",
        metavar="N",
        type=typed(reading.whole(1, 64)),
        default=1,
        help="processes at once (default: 1)",
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="write what happens, a line each; for one seed (default: no file)",
    )
    parser.add_argument(
        "--no-shrink",
        action="store_true",
        help="do not search for the shortest schedule of a seed that fails (default: search)",
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Run the seeds, print what was found, return the exit code."""
    if arguments.seeds > 1 and (arguments.trace is not None or arguments.only is not None):
        sys.stderr.write(
            f"{arguments.prog}: --only and --trace are for one seed, not with --seeds\n"
        )
        return USAGE_ERROR
    # Imported here: wrong options should be reported at once.
    from tests.chaos import report
    from tests.chaos.options import Options
    from tests.chaos.run import run_all, run_one, shortest
    from tests.chaos.setup import unsuitable

    options = Options(
        seed=arguments.seed,
        seconds=arguments.seconds,
        prefill=arguments.prefill,
        decode=arguments.decode,
        encode=arguments.encode,
        connector=arguments.connector,
        notices=arguments.notices,
        pool=arguments.pool,
        workers=arguments.workers,
        rate=arguments.rate,
        faults=arguments.faults,
        only=arguments.only,
    )
    if (why := unsuitable(options)) is not None:
        sys.stderr.write(f"{arguments.prog}: {why}\n")
        return USAGE_ERROR
    failed = False
    try:
        seeds = range(arguments.seed, arguments.seed + arguments.seeds)
        found = run_all(options, seeds, arguments.jobs) if arguments.trace is None else iter(())
        if arguments.trace is not None:
            found = iter([(options, run_one(options, arguments.trace))])
        for one, result in found:
            _say(report.line(one, result))
            if not result.findings:
                continue
            failed = True
            _say("\n".join([*report.findings(result.findings), f"  repeat it: {one.command()}"]))
            if arguments.no_shrink or arguments.only is not None:
                continue
            least = shortest(one, result, lambda text: None)
            if least is None:
                _say("  a second run of the same seed did not fail: this failure is flaky")
            else:
                _say("\n".join(report.shrunk(one, least)))
    except KeyboardInterrupt:
        sys.stderr.write(f"{arguments.prog}: interrupted\n")
        return _INTERRUPTED
    return int(failed)


def _numbers(text: str) -> frozenset[int]:
    parts = text.split(",") if text else []
    if not all(part.isdecimal() and len(part) < 10 for part in parts):
        raise ValueError(f"expected numbers such as 3,8,41, got {text[:40]!r}")
    return frozenset(map(int, parts))


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
