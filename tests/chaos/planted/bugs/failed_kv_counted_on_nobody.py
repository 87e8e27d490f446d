"""KV that does not move, on nobody's account."""

from tests.chaos.planted.bug import Bug, Change

BUG = Bug(
    what="a decode engine that can load no KV fails fast, and nobody counts it",
    rules=(
        "KV that does not move is named",
        "KV that does not move is left out",
    ),
    changes=(
        Change(
            "serving/dispatch/resources.py",
            "            self.transfers.failed(one.prefill, one.decode, first=one.first, at=one.at)\n",
            "            pass\n",
        ),
    ),
)
