"""KV that moves again, and is still left out."""

from tests.chaos.planted.bug import Bug, Change

BUG = Bug(
    what="an engine that could load no KV gets one prompt at a time for ever, whatever it loads",
    rules=("each engine is in use again",),
    changes=(
        Change(
            "serving/dispatch/decode_leg.py",
            "            transfers.loaded(custody.prefill, self._url, self.since)\n",
            "            transfers.loaded(custody.prefill, self._url, -1.0)\n",
        ),
    ),
)
