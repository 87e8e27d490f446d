"""A traceback without the words of the exception: those may quote what failed, and that may be a prompt or a key."""

from __future__ import annotations

import traceback


def frames(error: BaseException) -> str:
    """Return the types of an exception and of its causes, each with its frames, the innermost last, on one line."""
    parts: list[str] = []
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        steps = traceback.extract_tb(one.__traceback__)
        way = " > ".join(f"{step.filename}:{step.lineno} {step.name}" for step in steps)
        parts.append(f"{type(one).__qualname__} at {way or 'no frame'}")
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return ", from ".join(parts)
