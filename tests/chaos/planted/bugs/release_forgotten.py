"""KV that nobody releases."""

from tests.chaos.planted.bug import Bug, Change

BUG = Bug(
    what="neither the decode leg nor the attempt releases KV that was not loaded",
    rules=("handles end",),
    changes=(
        Change(
            "serving/dispatch/decode_leg.py",
            """\
                custody.release()  # whatever has not ended by now
""",
            "",
        ),
        Change(
            "serving/dispatch/attempt.py",
            """\
        if self.custody is not None:
            self.custody.release()  # whatever has not ended by now
""",
            "",
        ),
    ),
)
