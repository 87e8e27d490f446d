"""A reasoning parser: a model's text before `</think>` is not content. Pure.

Owns the rules of vLLM's `deepseek_r1` parser (0.32.0, `reasoning/deepseek_r1_reasoning_parser.py`),
with its errors: text that is held back when the mark comes is lost in a stream, and reasoning
tokens are counted only after a `<think>` of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdproxy_lab.sim.tokenizer import THINK, THINK_END

_BEGIN, _END = "<think>", "</think>"


class Thoughts:
    """The reasoning of one choice of a stream. `open`: the next text is reasoning."""

    def __init__(self, prompt: Sequence[int]) -> None:
        """Begin after a prompt, which may contain the end of the reasoning."""
        marks = [token for token in prompt if token in (THINK, THINK_END)]
        self.open = not marks or marks[-1] != THINK_END

    def add(self, text: str, ids: Sequence[int]) -> dict[str, str | None] | None:
        """Take a delta while `open`; return the part that is sent, None: nothing."""
        if THINK_END in ids:
            self.open = False
        if len(ids) == 1 and ids[0] in (THINK, THINK_END):
            return None
        if THINK_END in ids:
            end = text.find(_END)
            content = text[end + len(_END) :]
            return {"content": content or None, "reasoning": text[:end]}
        return {"reasoning": text}


def split(text: str) -> tuple[str | None, str | None]:
    """Return the reasoning and the content of a whole answer."""
    _, mark, behind = text.partition(_BEGIN)
    rest = behind if mark else text
    if _END not in rest:
        return rest, None
    reasoning, _, content = rest.partition(_END)
    return reasoning, content or None


def count(ids: Sequence[int]) -> int:
    """Return how many of an answer's tokens vLLM counts as reasoning."""
    found = depth = 0
    for token in ids:
        if token == THINK:
            depth += 1
        elif token == THINK_END:
            depth = max(depth - 1, 0)
        else:
            found += depth > 0
    return found
