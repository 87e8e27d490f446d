"""A traceback without the exception's message, which may quote a prompt or a key. Of a module that
can't be imported its name is shown.
"""

from __future__ import annotations

import traceback

FIRST_FRAMES, LAST_FRAMES = 3, 12
"""Frames of a traceback that are shown. An endless recursion has a thousand."""
MAX_CAUSES = 5
MAX_NAME = 100
"""Characters of a module's name that is shown."""


def frames(error: BaseException) -> str:
    """Return the types of an exception and of its causes, each with its frames, the innermost last,
    on one line.
    """
    parts: list[str] = []
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        if len(parts) == MAX_CAUSES:
            parts.append("others")
            break
        seen.add(id(one))
        # `extract_tb` would also read the lines of the source, from a disk that may hang.
        walked = [(step.f_code, line) for step, line in traceback.walk_tb(one.__traceback__)]
        steps = [f"{code.co_filename}:{line} {code.co_name}" for code, line in walked]
        if len(steps) > FIRST_FRAMES + LAST_FRAMES:
            left_out = len(steps) - FIRST_FRAMES - LAST_FRAMES
            steps = [*steps[:FIRST_FRAMES], f"({left_out} frames)", *steps[-LAST_FRAMES:]]
        parts.append(f"{_kind(one)} at {' > '.join(steps) or 'no frame'}")
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return ", from ".join(parts)


def _kind(error: BaseException) -> str:
    kind, name = type(error).__qualname__, error.name if isinstance(error, ImportError) else None
    if name is None or len(name) > MAX_NAME or not all(map(str.isidentifier, name.split("."))):
        return kind
    return f"{kind} ({name})"


def drop_traceback(error: BaseException) -> None:
    """Remove the traceback of an error that was handled, and of its causes, and the references
    between them.

    A traceback refers to frames, and one of these usually refers to the error, or to a future that
    failed with it. Such a cycle would keep all objects of a request until the garbage collector
    runs.
    """
    one: BaseException | None = error
    while one is not None:
        before = one.__context__
        one.__traceback__ = one.__context__ = one.__cause__ = None
        one = before
