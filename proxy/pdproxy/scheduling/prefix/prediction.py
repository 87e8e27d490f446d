"""What an engine will report as `cached_tokens` of a prompt, and how near that was. Pure.

Source: vLLM 0.32.0, `v1/core/kv_cache_manager.py` (`get_computed_blocks`),
`v1/core/single_type_kv_cache_manager.py`. With prefill and decode apart it holds for the prefill
leg: that one generates a single token, and nothing of it is cached. A decode engine reports the
prefill engine's number where the handle has `remote_prefill_cached_tokens`, and what it loaded
elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdproxy.scheduling.prefix.prompts import PromptBeginning


def cached_tokens(matched: int, prompt: int, block_size: int, *, drops_last: bool = False) -> int:
    """Return how many of a prompt's tokens an engine will not compute. All in tokens.

    `matched`: of the prompt's beginning, what the engine holds. Engines use whole blocks only, and
    never all of the prompt: they compute its last token at least, and with it its block.
    `drops_last`: one block more, as EAGLE and MTP need it.
    """
    cached = min(matched, prompt - 1) // block_size * block_size
    if drops_last:
        cached -= block_size
    return max(cached, 0)


@dataclass(slots=True, eq=False)
class Prediction:
    """What an engine is expected to find of a prompt in its cache, in tokens. `refreshes`: the
    request asks it for a report.

    `scored`: whether the engine's answer shows how right it was.
    """

    url: str
    tokens: int
    basis: str
    beginning: PromptBeginning
    scored: bool
    refreshes: bool = False


@dataclass(slots=True)
class PredictionScore:
    """Sums over answers: how many predictions were exact, too high and too low; in tokens what was
    predicted and reported.

    `over`, `under`: by how many tokens the wrong ones were wrong, in sum.
    """

    exact: int = 0
    too_high: int = 0
    too_low: int = 0
    predicted: int = 0
    reported: int = 0
    over: int = 0
    under: int = 0

    def add(self, predicted: int, reported: int) -> int:
        """Note one answer. Return the error in tokens: above 0 if too much was predicted."""
        error = predicted - reported
        self.predicted += predicted
        self.reported += reported
        if error > 0:
            self.too_high += 1
            self.over += error
        elif error < 0:
            self.too_low += 1
            self.under -= error
        else:
            self.exact += 1
        return error
