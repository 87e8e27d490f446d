"""Asks `pdproxy plan` which arrangement of the engines serves a load best: `--arrangement auto`
where there are a load, a profile and an SLO.

It is asked as a command: the simulation takes some seconds of CPU time, and can be ended.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from pdproxy_lab.up.arrangement import Chosen, Role
from pdproxy_lab.up.errors import CANT_START, UpError
from pdproxy_lab.up.options import UpOptions, number_of
from pdproxy_lab.up.program import Ended, run
from pdproxy_lab.up.taken_out import PDPROXY

DEADLINE = 180.0
"""Seconds. Eight engines take ten."""
_NONE_KEEPS, _WRONG = 1, 2


class _Best(msgspec.Struct):
    prefill: int
    decode: int
    aggregated: int
    any: int
    max_num_batched_tokens: int
    prefill_max_num_batched_tokens: int | None


class _Extrapolated(msgspec.Struct):
    lines: list[str]


class _Answer(msgspec.Struct):
    plan: _Best | None
    extrapolated: _Extrapolated | None = None


async def choose(options: UpOptions, engines: int) -> Chosen:
    """Return the best arrangement of so many engines for the load of the options.

    Raises:
        UpError: an option has no meaning for `plan`.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        try:
            ended = await run(_command(options, engines, file), DEADLINE, "pdproxy plan")
        except UpError as error:
            return Chosen(
                "auto", reasons=(f"The arrangement is not chosen for the load: {error}.",)
            )
        said = (ended.err + ended.out).decode("utf-8", "replace").strip()
        if ended.code == _WRONG:
            raise UpError(said.removeprefix("pdproxy plan: "), CANT_START)
        return _chosen(ended, said, file.read_bytes())


def _command(options: UpOptions, engines: int, file: Path) -> Sequence[str | Path]:
    slo, load = options.slo, options.load
    assert load is not None
    assert options.profile is not None
    limits = {"ttft": slo.ttft, "tpot": slo.tpot, "gap": slo.gap}
    given = [f"{name}={_ms(limit)}" for name, limit in limits.items() if limit is not None]
    line: list[str | Path] = [*PDPROXY, "plan", "--gpus", str(engines), "--seeds", "1"]
    line += ["--slo", ",".join(given), "--profile", options.profile, "--json", file]
    for name, value in (
        ("--input-tokens", load.input_tokens),
        ("--output-tokens", load.output_tokens),
        ("--rate", load.rate),
        ("--chunks", number_of(options.flags, "--max-num-batched-tokens")),
        ("--max-num-seqs", number_of(options.flags, "--max-num-seqs")),
    ):
        if value is not None:
            line += [name, str(value)]
    return line


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3f}".rstrip("0").rstrip(".") + "ms"


def _chosen(ended: Ended, said: str, content: bytes) -> Chosen:
    # what is best, what it serves, and why; behind an empty line are the alternatives
    lines = said.partition("\n\n")[0].splitlines()
    words: tuple[str, ...]
    words = (f"`pdproxy plan` for this load: {lines[0]}", *(f"  {line}" for line in lines[1:]))
    try:
        found = msgspec.json.decode(content, type=_Answer)
    except msgspec.MsgspecError:
        found = _Answer(None)
    best = found.plan
    if found.extrapolated is not None:
        words += tuple(f"  {line}" for line in found.extrapolated.lines)
    if ended.code == _NONE_KEEPS or best is None:
        return Chosen("auto", reasons=words)
    chunk = best.max_num_batched_tokens
    if best.any:
        return Chosen("any", {"any": chunk}, words)
    chunks: Mapping[Role, int]
    if best.aggregated:
        chunks = {"aggregated": chunk}
        return Chosen(f"{best.aggregated}A", chunks, words)
    chunks = {"decode": chunk, "prefill": best.prefill_max_num_batched_tokens or chunk}
    return Chosen(f"{best.prefill}P{best.decode}D", chunks, words)
