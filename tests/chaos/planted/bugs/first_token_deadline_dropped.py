"""A wait without its deadline."""

from tests.chaos.planted.bug import Bug, Change

BUG = Bug(
    what="a decode engine may take as long as the whole request until its first data",
    rules=(
        "each wait of a stream has its deadline",
        "no request outlives deadlines.total",
    ),
    changes=(
        Change(
            "serving/dispatch/decode_leg.py",
            "            self._first_data_within(deadlines.first_token)\n        # Nothing",
            "            self._first_data_within(deadlines.total)\n        # Nothing",
        ),
    ),
)
