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
        return await first_data(resources, relay, node, in_silence=in_silence)
""",
            """\
        try:
            return await first_data(resources, relay, node, in_silence=in_silence)
        except StaleConnectionError:
            relay = new_relay(attempt)
            self._leg = await self._client.send(message, sink(attempt, relay), fresh=True)
            return await first_data(resources, relay, node, in_silence=in_silence)
""",
        ),
        Change(
            "serving/dispatch/decode_leg.py",
            "from pdproxy.kit.errors import EngineError, EngineTimeoutError, KvGoneError, Wait",
            "from pdproxy.kit.errors import EngineError, EngineTimeoutError, KvGoneError, StaleConnectionError, Wait",
        ),
    ),
)
