"""A traceback without the words of the exception: those may quote what failed, and that may be a prompt or a key."""

from __future__ import annotations

import traceback

FIRST_FRAMES, LAST_FRAMES = 3, 12
"""Of a traceback: the entry, and where it went wrong. A recursion without an end has a thousand frames."""
MOST_CAUSES = 5


def frames(error: BaseException) -> str:
    """Return the types of an exception and of its causes, each with its frames, the innermost last, on one line."""
    parts: list[str] = []
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        if len(parts) == MOST_CAUSES:
            parts.append("others")
            break
        seen.add(id(one))
        # Not `extract_tb`, which also reads the lines of the source, from a disk that may hang.
        walked = [(step.f_code, line) for step, line in traceback.walk_tb(one.__traceback__)]
        steps = [f"{code.co_filename}:{line} {code.co_name}" for code, line in walked]
        if len(steps) > FIRST_FRAMES + LAST_FRAMES:
            left_out = len(steps) - FIRST_FRAMES - LAST_FRAMES
            steps = [*steps[:FIRST_FRAMES], f"({left_out} frames)", *steps[-LAST_FRAMES:]]
        parts.append(f"{type(one).__qualname__} at {' > '.join(steps) or 'no frame'}")
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return ", from ".join(parts)


def drop_traceback(error: BaseException) -> None:
    """Part an error that has been dealt with, and those that it came from, from their tracebacks and from each other.

    A traceback holds the frames that were passed, and mostly one of these holds the error, or a future that was failed by it:
    all of a request would wait for the garbage collector.
    """
    one: BaseException | None = error
    while one is not None:
        before = one.__context__
        one.__traceback__ = one.__context__ = one.__cause__ = None
        one = before
