"""A token that comes twice where another engine goes on."""

from tests.chaos.planted.bug import Bug, Change

BUG = Bug(
    what="the engine that goes on is not given the last token that the client has",
    rules=("an answer is wrong",),
    changes=(
        Change(
            "serving/dispatch/continuing.py",
            "ids[: cut.done], limit=limit)",
            "ids[: max(cut.done - 1, 0)], limit=limit)",
        ),
    ),
)
