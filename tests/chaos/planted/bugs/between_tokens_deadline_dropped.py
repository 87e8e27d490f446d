"""A stream without the deadline between its tokens."""

from tests.chaos.planted.bug import Bug, Change

BUG = Bug(
    what="a stream that has begun may be silent for as long as it wants",
    rules=("each wait of a stream has its deadline",),
    changes=(
        Change(
            "serving/stream/relay.py",
            "        timer = StallTimer(clock, between_tokens, last, late, works)",
            "        timer = StallTimer(clock, 1000 * between_tokens, last, late, works)",
        ),
    ),
)
