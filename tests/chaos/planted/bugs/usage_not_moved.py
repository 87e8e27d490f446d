"""A usage that counts only a part of the answer."""

from tests.chaos.planted.bug import Bug, Change

BUG = Bug(
    what="the tokens before a continuation are counted as the prompt's",
    rules=("an answer is wrong", "a stream survives one engine"),
    changes=(
        Change(
            "transfer/continued_events.py",
            'moved_usage(event["usage"], self._done, ',
            'moved_usage(event["usage"], 0, ',
        ),
    ),
)
