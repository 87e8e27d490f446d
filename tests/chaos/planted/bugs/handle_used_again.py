"""A handle that is sent to an engine after its end."""

from tests.chaos.planted.bug import Bug, Change

BUG = Bug(
    what="a handle that was loaded is released as well: a decode engine is sent it again",
    rules=("each handle ends once",),
    changes=(
        Change(
            "serving/kv/custody.py",
            """\
        self.state, self.how, self.on_gone = None, how, None
""",
            """\
        self.state, self.how, self.on_gone = None if how is not End.LOADED else self.state, how, None
""",
        ),
        Change(
            "serving/kv/custody.py",
            """\
        if isinstance(self.handle, Handle):
            self.handle = self.handle.counts()
""",
            "",
        ),
        Change(
            "serving/kv/custodian.py",
            """\
        if custody.how is not None:
            return  # a notice has ended it since: there is nothing to release any more
""",
            "",
        ),
    ),
)
