"""A connection that carries two answers."""

from tests.chaos.planted.bug import Bug, Change

BUG = Bug(
    what="a leg that is closed leaves its connection to the next request while the engine still answers on it",
    rules=(
        "an answer is wrong",
        "no error is logged",
    ),
    changes=(
        Change(
            "upstream/connection.py",
            (
                '        """Close the connection: the engine aborts the request."""\n'
                "        if self._connection.carries(self._number):\n"
                "            self._connection.close()\n"
            ),
            (
                '        """Close the connection: the engine aborts the request."""\n'
                "        if self._connection.carries(self._number):\n"
                "            self._connection._finish(keep=True)\n"
            ),
        ),
    ),
)
