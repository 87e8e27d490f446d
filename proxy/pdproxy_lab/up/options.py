"""What the user of `pdproxy up` asks for. Pure: flags of vLLM and GPUs from their texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdproxy.scheduling.slo import NO_SLO, Slo
from pdproxy_lab.up.errors import CANT_START, UpError

OWN_FLAGS: Mapping[str, str] = {
    "--model": "the model is the first argument",
    "--host": "engines listen on the loopback; the proxy's address is --host before `--`",
    "--port": "each engine gets a port; the proxy's is --port before `--`",
    "--uds": "each engine gets a port",
    "--kv-transfer-config": "it follows from each engine's role",
    "--kv-events-config": "each engine gets its own ports",
    "--api-key": "set VLLM_API_KEY, and give the proxy --engine-api-key-file",
    "--data-parallel-size": "each engine is one rank; more engines do the same",
    "-dp": "each engine is one rank; more engines do the same",
    "--pipeline-parallel-size": "engines use tensor parallel ranks alone",
    "-pp": "engines use tensor parallel ranks alone",
}
"""Flags of vLLM that are not the user's here, each with the reason."""
_SHORT = {"-tp": "--tensor-parallel-size"}


@dataclass(frozen=True, slots=True)
class Load:
    """A load as `pdproxy plan` takes it: tokens, or ranges A:B of tokens, and requests per second.
    None: not given.
    """

    input_tokens: str | None = None
    output_tokens: str | None = None
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class UpOptions:
    """The command line. `gpus`: their indices, None: those that are free. `load`: for which the
    arrangement is chosen, None: for none. `flags`: of vLLM, for each engine. `first_port`: where
    the engines' ports are looked for, None: at the usual ones.
    """

    model: str
    gpus: tuple[int, ...] | None = None
    arrangement: str = "auto"
    slo: Slo = NO_SLO
    profile: str | None = None
    load: Load | None = None
    flags: tuple[str, ...] = ()
    first_port: int | None = None


def value_of(flags: Sequence[str], name: str) -> str | None:
    """Return the value of a flag of vLLM, the last one that is given; None: it is not given.

    Values follow their flag, or stand behind `=`; vLLM takes underscores for hyphens.
    """
    found = None
    for at, flag in enumerate(flags):
        given, equals, value = _spelled(flag)
        if given != name:
            continue
        if equals:
            found = value
        elif at + 1 < len(flags):
            found = flags[at + 1]
    return found


def number_of(flags: Sequence[str], name: str) -> int | None:
    """Return the value of a flag that takes a whole number above 0.

    Raises:
        UpError: it is another thing.
    """
    text = value_of(flags, name)
    if text is None:
        return None
    if not text.isdecimal() or not 0 < int(text) < 1 << 31:
        raise UpError(f"{name}: expected a whole number above 0, got {text[:80]!r}", CANT_START)
    return int(text)


def refuse_own(flags: Sequence[str]) -> None:
    """Refuse flags that `up` itself sets.

    Raises:
        UpError: names the flag and the reason.
    """
    for flag in flags:
        name = _spelled(flag)[0]
        if name in OWN_FLAGS:
            raise UpError(f"{name} can't be given to the engines: {OWN_FLAGS[name]}", CANT_START)


def gpu_list(text: str) -> tuple[int, ...]:
    """Return the indices that a text such as `0-3,6` means.

    Raises:
        ValueError: it means none.
    """
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = (one.strip() for one in part.partition("-"))
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(part) > 9:
            raise ValueError(f"expected indices such as 0-3 or 0,2, got {text!r}")
        numbers = range(int(first), int(last or first) + 1)
        if not numbers or len(numbers) > 64:
            raise ValueError(f"expected 1 to 64 GPUs in ascending order, got {text!r}")
        found += numbers
    if len(set(found)) != len(found):
        raise ValueError(f"a GPU is named twice: {text!r}")
    return tuple(found)


def _spelled(flag: str) -> tuple[str, bool, str]:
    name, equals, value = flag.partition("=")
    if name.startswith("--"):
        name = name.replace("_", "-")
    return _SHORT.get(name, name), bool(equals), value
