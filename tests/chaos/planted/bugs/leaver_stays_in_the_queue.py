"""A client that leaves the queue, and stays in it."""

from tests.chaos.planted.bug import Bug, Change

BUG = Bug(
    what="a request that no longer waits keeps its turn in the queue, and gets a place",
    rules=(
        "places are given back",
        "gauges go back to 0",
    ),
    changes=(
        Change(
            "serving/request/admission.py",
            """\
            self._queue.stop_waiting(entry)
""",
            """\
            pass
""",
        ),
        Change(
            "serving/request/admission.py",
            """\
        return still_waits
""",
            """\
        return True
""",
        ),
    ),
)
