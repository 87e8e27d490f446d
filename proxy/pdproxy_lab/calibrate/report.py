"""The report of a calibration as text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from pdproxy.engine_model.hardware import Hardware
from pdproxy_lab.calibrate.misfit import Misfit
from pdproxy_lab.calibrate.run import Calibration

_FAR = 0.2
"""A prediction that is further off is marked."""
_UNITS = {
    "decode_step_s": (1e3, "ms"),
    "decode_step_per_seq_s": (1e6, "µs"),
    "context_token_s": (1e9, "ns"),
    "chunk_base_s": (1e3, "ms"),
    "attention_s": (1e9, "ns"),
    "prompt_begin_s": (1e3, "ms"),
    "request_overhead_s": (1e3, "ms"),
    "prefill_tokens_per_s": (1.0, "tokens/s"),
    "handoff_overhead_s": (1e3, "ms"),
    "pull_s": (1e3, "ms"),
    "further_pull_s": (1e3, "ms"),
    "pull_token_s": (1e6, "µs"),
    "link_bytes_per_s": (1e-9, "GB/s"),
}


def text_of(found: Calibration) -> str:
    """Return the report: each term with its spread, what was assumed, and the misfit of each kind
    of trial.
    """
    profile = found.profile
    limits = profile.engine
    lines = [
        (
            f"{profile.name}: {profile.origin.model} on {profile.origin.engine}, {found.trials} "
            f"trials in {found.seconds:.0f} s"
        ),
        "",
        *_table([("term", "measured", "80 % of resampled"), *_terms(found, profile.hardware)]),
        "",
        f"max_num_batched_tokens {limits.max_num_batched_tokens}: {found.budget_note}",
        (
            f"KV of {limits.num_gpu_blocks * limits.block_size} tokens, prompts and answers of "
            f"up to "
            f"{limits.max_model_len}"
        ),
        *textwrap.wrap(f"fitted to {profile.fitted.said if profile.fitted else ''}", 100),
        "",
        "Assumed:",
        *(f"- {line}" for line in profile.origin.assumed),
        "",
        "The profile against its own measurements:",
        *_table([("trial", "of", "n", "measured", "predicted", "off"), *_misfits(found)]),
    ]
    if any(abs(one.relative) > _FAR for one in found.misfits):
        lines.append(
            f"!: more than {100 * _FAR:.0f} % off. Either the client was late, or the model does "
            f"not fit there."
        )
    return "\n".join(lines) + "\n"


def _terms(found: Calibration, hardware: Hardware) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, (factor, unit) in _UNITS.items():
        if name in found.spreads:
            one = found.spreads[name].scaled(factor)
            rows.append((name, f"{one.value:.4g} {unit}", f"{one.low:.4g} to {one.high:.4g}"))
    return [*rows, ("weights_read_once", "yes" if hardware.weights_read_once else "no", "")]


def _misfits(found: Calibration) -> list[tuple[str, ...]]:
    return [
        (
            one.name,
            one.what,
            str(one.trials),
            _measured(one),
            f"{one.predicted * 1e3:.2f} ms",
            f"{one.relative * 100:+.1f} %" + (" !" if abs(one.relative) > _FAR else ""),
        )
        for one in found.misfits
    ]


def _measured(one: Misfit) -> str:
    said = f"{one.measured * 1e3:.2f} ms"
    if one.lowest is None or one.highest is None:
        return said
    return f"{said} ({one.lowest * 1e3:.2f} to {one.highest * 1e3:.2f})"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
