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


def let_go(error: BaseException) -> None:
    """Part an error that has been dealt with, and those that it came from, from their tracebacks and from each other.

    A traceback holds the frames that were passed, and mostly one of these holds the error, or a future that was failed by it:
    all of a request would wait for the garbage collector.
    """
    one: BaseException | None = error
    while one is not None:
        before = one.__context__
        one.__traceback__ = one.__context__ = one.__cause__ = None
        one = before
