"""A handle that is sent to a decode engine a second time."""

from tests.chaos.planted.bug import Bug, Change

BUG = Bug(
    what="behind a kept connection that has closed, the decode leg is sent again as it was: the KV may have been read",
    rules=("an answer is wrong", "without faults each request is right"),
    changes=(
        Change(
            "serving/kv/custody.py",
            """\
        if self.was_asked:
            raise RuntimeError(f"{self!r} was given away before")
""",
            "",
        ),
        Change(
            "serving/kv/custody.py",
            "if not isinstance(handle, Handle) or self.how is not None or self.state is State.RELEASING:",
            "if not isinstance(handle, Handle):",
        ),
        Change(
            "serving/dispatch/decode_leg.py",
            """\
        del message
        return await self.relay.first
""",
            """\
        try:
            return await self.relay.first
        except StaleConnectionError:
            self.relay = request.relay = request.new_relay()
            self._leg = await self._client.send(message, self._sink(), fresh=True)
            return await self.relay.first
""",
        ),
        Change(
            "serving/dispatch/decode_leg.py",
            "    OwnBodyRefusedError,\n",
            "    OwnBodyRefusedError,\n    StaleConnectionError,\n",
        ),
    ),
)
