"""A request's body that counts for ever."""

from tests.chaos.planted.bug import Bug, Change

BUG = Bug(
    what="the bytes of a body that was no longer needed before its request's end are not given back",
    rules=(
        "bytes are given back",
        "gauges go back to 0",
    ),
    changes=(
        Change(
            "web/cycle.py",
            ('        """Release the request\'s body: no engine needs it any more."""\n        self._forget_body()\n'),
            (
                '        """Release the request\'s body: no engine needs it any more."""\n'
                '        self._body, self._size = b"", 0\n'
            ),
        ),
    ),
)
