"""The bugs by their names. None of them is in the product: `tests.chaos.planted.hunt` applies them
to a copy.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.chaos.planted.bug import Bug, Change

BUGS: Mapping[str, Bug] = {
    "between_tokens_deadline_dropped": Bug(
        what="a stream that has begun may be silent for as long as it wants",
        rules=("each wait of a stream has its deadline",),
        changes=(
            Change(
                "serving/stream/relay.py",
                "        timer = StallTimer(clock, between_tokens, last, late, works)",
                "        timer = StallTimer(clock, 1000 * between_tokens, last, late, works)",
            ),
        ),
    ),
    "body_kept": Bug(
        what="the bytes of a body that was no longer needed before its request's end are not "
        "given back",
        rules=(
            "bytes are given back",
            "gauges go back to 0",
        ),
        changes=(
            Change(
                "web/cycle.py",
                (
                    '        """Release the request\'s body: no engine needs it any more."""\n   '
                    "     self._forget_body()\n"
                ),
                (
                    '        """Release the request\'s body: no engine needs it any more."""\n'
                    '        self._body, self._size = b"", 0\n'
                ),
            ),
        ),
    ),
    "breaker_never_closes": Bug(
        what="an engine whose breaker was open gets one request at a time for ever, however good "
        "they are",
        rules=("each engine is in use again",),
        changes=(
            Change(
                "scheduling/breakers.py",
                """\
        if lease.proved or lease.trial != engine.trial_number or now < engine.open_until:
            return
""",
                """\
        if lease.proved or lease.trial <= engine.trial_number or now < engine.open_until:
            return
""",
            ),
            Change(
                "scheduling/breakers.py",
                """\
        elif now >= engine.open_until:
            self._tried(engine, now)
""",
                "",
            ),
        ),
    ),
    "connection_reused_too_early": Bug(
        what="a leg that is closed leaves its connection to the next request while the engine "
        "still answers on it",
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
    ),
    "data_behind_an_error": Bug(
        what="what an engine sends behind an error event is forwarded in front of it",
        rules=("an answer is wrong",),
        changes=(
            Change(
                "serving/stream/event_filter.py",
                """\
                self.failure = error
                break
""",
                """\
                self.failure = error
                continue
""",
            ),
        ),
    ),
    "deadline_not_cancelled": Bug(
        what="the timer of a wait that has ended in time goes on",
        rules=(
            "no error is logged",
            "timers are cancelled",
        ),
        changes=(
            Change(
                "kit/clock.py",
                """\
        self._timer.cancel()
        self._timer = None
""",
                """\
        self._timer = None
""",
            ),
        ),
    ),
    "emptied_handle_written": Bug(
        what="a handle that has ended before its decode engine is asked is sent nevertheless, "
        "without its params",
        rules=("each body is JSON",),
        changes=(
            Change(
                "serving/kv/custody.py",
                """\
            raise KvGoneError(f"the KV at {self.prefill} is gone")
        lease, expired =""",
                """\
            handle = Handle(b"", None, self.handle.prompt_tokens, self.handle.remote_request_id)
        lease, expired =""",
            ),
            Change(
                "transfer/contract.py",
                '    if not value:\n        raise ValueError("an empty text is no JSON")\n',
                "",
            ),
        ),
        options={"notices": "notifier"},
    ),
    "engine_stays_down": Bug(
        what="an engine that has served before and went down is not marked as up by its probes",
        rules=(
            "each engine serves again",
            "each engine is in use again",
        ),
        changes=(
            Change(
                "scheduling/ledger.py",
                "        engine.evidence, engine.down_because, engine.probed = evidence, None, "
                "True\n",
                """\
        if not was_down or engine.evidence is None:
            engine.down_because = None
        engine.evidence, engine.probed = evidence, True
""",
            ),
        ),
    ),
    "failed_kv_counted_on_nobody": Bug(
        what="a decode engine that can load no KV fails fast, and nobody counts it",
        rules=(
            "KV that does not move is named",
            "KV that does not move is left out",
        ),
        changes=(
            Change(
                "serving/dispatch/resources.py",
                "            self.scheduler.kv_failed(one.prefill, one.decode, one.at, "
                "first=one.first)\n",
                "            pass\n",
            ),
        ),
    ),
    "first_token_deadline_dropped": Bug(
        what="a decode engine may take as long as the whole request until its first data",
        rules=(
            "each wait of a stream has its deadline",
            "no request outlives deadlines.total",
        ),
        changes=(
            Change(
                "serving/dispatch/decode_leg.py",
                "            self._first_data_within(deadlines.first_token)\n        # Nothing",
                "            self._first_data_within(deadlines.total)\n        # Nothing",
            ),
        ),
    ),
    "handle_sent_twice": Bug(
        what="behind a kept connection that has closed, the decode leg is sent again as it was: "
        "the KV may have been read",
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
                """\
        if (
            not isinstance(handle, Handle)
            or self.how is not None
            or self.state is CustodyState.RELEASING
        ):
""",
                "        if not isinstance(handle, Handle):\n",
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
    ),
    "handle_used_again": Bug(
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
""",  # noqa: E501
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
    ),
    "kv_fault_never_over": Bug(
        what="an engine that could load no KV gets one prompt at a time for ever, whatever it "
        "loads",
        rules=("each engine is in use again",),
        changes=(
            Change(
                "serving/dispatch/decode_leg.py",
                "            self._resources.scheduler.kv_loaded(custody.prefill, self._url, "
                "self.since)\n",
                "            self._resources.scheduler.kv_loaded(custody.prefill, self._url, "
                "-1.0)\n",
            ),
        ),
    ),
    "lease_closed_twice": Bug(
        what="an attempt closes the leases that its legs have closed, and the ledger does not see "
        "that",
        rules=("leases end",),
        changes=(
            Change(
                "scheduling/ledger.py",
                """\
        if lease.closed:
            return False
""",
                "",
            ),
            Change(
                "serving/dispatch/attempt.py",
                """\
        for lease in self._unused:
""",
                """\
        for lease in self.assignment.leases:
""",
            ),
        ),
    ),
    "leaver_stays_in_the_queue": Bug(
        what="a request that no longer waits keeps its turn in the queue, and gets a place",
        rules=(
            "places are given back",
            "gauges go back to 0",
        ),
        changes=(
            Change(
                "deciding/local_admission.py",
                """\
            self._queue.stop_waiting(entry)
""",
                """\
            pass
""",
            ),
            Change(
                "deciding/local_admission.py",
                """\
        return still_waits
""",
                """\
        return True
""",
            ),
        ),
    ),
    "lost_engines_forgotten": Bug(
        what="a request is tried again however many engines have disappeared under it",
        rules=("one request takes two engines at most",),
        changes=(
            Change(
                "deciding/engines_lost.py",
                """\
        if not number or number + request.earlier < MOST:
""",
                """\
        if number is not None:
""",
            ),
        ),
    ),
    "prefill_not_adopted": Bug(
        what="the answer to a prefill whose client has left is not awaited: nobody releases the "
        "KV that it names",
        rules=("without faults KV is released",),
        changes=(
            Change(
                "serving/dispatch/prefill_leg.py",
                """\
            self._resources.custodian.orphans.adopt(self._pending, record, end)
""",
                """\
            record.nothing_kept("nobody awaits it")
            end()
""",
            ),
        ),
    ),
    "record_kept": Bug(
        what="what is kept to go on with a stream counts for ever",
        rules=("gauges go back to 0",),
        changes=(
            Change(
                "serving/dispatch/prompt_request.py",
                """\
            records.drop(record)
""",
                """\
            record.size = 0
""",
            ),
        ),
    ),
    "release_forgotten": Bug(
        what="neither the decode leg nor the attempt releases KV that was not loaded",
        rules=("handles end",),
        changes=(
            Change(
                "serving/dispatch/decode_leg.py",
                """\
                    custody.release()  # whatever has not ended by now
""",
                """\
                    pass
""",
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
    ),
    "retry_slot_kept": Bug(
        what="an attempt behind the first one keeps its place in the retry budget",
        rules=("gauges go back to 0",),
        changes=(
            Change(
                "serving/dispatch/prompt_request.py",
                """\
            self.slot.leave()
""",
                "",
            ),
        ),
    ),
    "stale_run_number": Bug(
        what="the number of an engine's run stays when it is started again: what its run before "
        "had counts as the new one's",
        rules=("engines that have met have moved KV",),
        changes=(
            Change(
                "scheduling/ledger.py",
                "            engine.run_number = self.runs.of(engine, evidence)\n",
                "            self.runs.of(engine, evidence)\n",
            ),
        ),
        options={"notices": "notifier"},
    ),
    "stalled_never_let_in": Bug(
        what="an engine that stood still gets no requests any more, whatever it shows",
        rules=(
            "each engine serves again",
            "each engine is in use again",
        ),
        changes=(
            Change(
                "fleet/stalls.py",
                """\
        if self._ledger.let_in(engine.url, self._clock.now()):
""",
                """\
        if self._ledger.let_in(engine.url + "/", self._clock.now()):
""",
            ),
        ),
    ),
    "token_lost": Bug(
        what="what the engine that goes on has sent before its stream flows does not reach the "
        "client",
        rules=("an answer is wrong",),
        changes=(
            Change(
                "serving/stream/relay.py",
                """\
        batch, prompt_ids = self._held.take()
        if batch:
""",
                """\
        batch, prompt_ids = self._held.take()
        if batch and not hasattr(output, "is_broken"):
""",
            ),
        ),
    ),
    "token_repeated": Bug(
        what="the engine that goes on is not given the last token that the client has",
        rules=("an answer is wrong",),
        changes=(
            Change(
                "serving/dispatch/continuing.py",
                "ids[: cut.done], limit=limit)",
                "ids[: max(cut.done - 1, 0)], limit=limit)",
            ),
        ),
    ),
    "usage_not_moved": Bug(
        what="the tokens before a continuation are counted as the prompt's",
        rules=("an answer is wrong", "a stream survives one engine"),
        changes=(
            Change(
                "transfer/continued_events.py",
                'moved_usage(event["usage"], self._done, ',
                'moved_usage(event["usage"], 0, ',
            ),
        ),
    ),
    "wrong_handle_released": Bug(
        what="the request that releases KV names a handle that the prefill engine does not know",
        rules=("without faults KV is released",),
        changes=(
            Change(
                "transfer/refusal.py",
                "raw(given.params)",
                'raw(given.params.replace(given.remote_request_id.encode(), b"another"))',
            ),
        ),
    ),
}
