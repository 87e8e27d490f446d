"""KV that moves again, and is still left out."""

from tests.chaos.planted.bug import Bug, Change

BUG = Bug(
    what="an engine that could load no KV gets one prompt at a time for ever, whatever it loads",
    rules=("each engine is in use again",),
    changes=(
        Change(
            "serving/dispatch/decode_answer.py",
            "        transfers.loaded(custody.prefill, decode, since)\n",
            "        transfers.loaded(custody.prefill, decode, -1.0)\n",
        ),
    ),
)
