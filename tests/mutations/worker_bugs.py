"""Bugs of what workers, the scheduler process and the supervisor send each other, by their names:
each with the test that finds it.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.chaos.planted.bug import Change
from tests.mutations.bug import Planted

_ADMISSION = "unit/test_remote_admission.py::"
_LINK = "unit/test_item_link.py::"
_PUBLISHER = "unit/test_publisher.py::"
_SCHEDULER = "unit/test_remote_scheduler.py::"
_TURNS = "unit/test_remote_turns.py::"

BUGS: Mapping[str, Planted] = {
    "answer_kept": Planted(
        "an answer for a request that has gone is not ended: its leases stay",
        _SCHEDULER + "test_who_leaves_at_any_moment_leaves_nothing",
        Change(
            "workers/scheduler_link.py",
            "        self.tell(SchedulerClient.unwanted, 0, question.number)\n",
            "",
        ),
    ),
    "buffer_unbounded": Planted(
        "what a process does not read is kept without a bound",
        _LINK + "test_who_does_not_read_is_lost",
        Change(
            "workers/item_link.py",
            "            if len(self._unsent) > self._most:",
            "            if len(self._unsent) > self._most << 30:",
        ),
    ),
    "end_not_seen": Planted(
        "the end of a worker that had not read everything is not seen: its leases stay",
        _SCHEDULER + "test_the_end_of_a_worker_that_has_not_read_everything_ends_its_leases",
        Change(
            "workers/scheduler_links.py",
            "        for client in list(self._clients):\n            client.look()\n",
            "",
        ),
    ),
    "engine_that_came_again_stays": Planted(
        "workers are not told that what came again was gone: its engine is another one",
        _PUBLISHER + "test_a_worker_that_does_not_read_is_told_the_last_values",
        Change(
            "workers/publisher.py",
            "keys[key] = keys.pop(key, False) or was_gone",
            "keys[key] = keys.pop(key, was_gone)",
        ),
    ),
    "given_turns_not_told": Planted(
        "the next scheduler process is not told which kept turns prompts use",
        _TURNS + "test_what_comes_of_it_is_heard_by_the_successor",
        Change(
            "workers/remote_turns.py",
            "TurnsHeld(given, list(self._unheard)",
            "TurnsHeld([], list(self._unheard)",
        ),
    ),
    "held_leases_not_told": Planted(
        "the next scheduler process is not told which leases a worker has",
        _SCHEDULER + "test_a_scheduler_that_ends_at_any_moment_loses_no_request",
        Change(
            "workers/remote_scheduler.py",
            "ChoicesOfWorker.restore, self._pool, held)",
            "ChoicesOfWorker.restore, self._pool, [])",
        ),
    ),
    "held_places_not_told": Planted(
        "the next scheduler process is not told which places a worker's requests have",
        _ADMISSION + "test_a_new_scheduler_process_is_told_of_places_and_asked_again",
        Change(
            "workers/remote_admission.py",
            "AdmittedWorker.restore_places, 0, held)",
            "AdmittedWorker.restore_places, 0, [])",
        ),
    ),
    "held_uses_not_told": Planted(
        "the next scheduler process is not told which keys with limits a worker's requests use",
        _ADMISSION + "test_a_new_scheduler_process_goes_on_with_what_keys_have_left",
        Change(
            "workers/remote_admission.py",
            "AdmittedWorker.restore_uses, 0, held)",
            "AdmittedWorker.restore_uses, 0, [])",
        ),
    ),
    "leases_of_the_dead_kept": Planted(
        "the leases of a worker that has ended are not closed",
        _SCHEDULER + "test_a_worker_that_ends_at_any_moment_leaves_nothing",
        Change(
            "workers/worker_choices.py",
            "        for number in list(self._leases):\n            self._give_up(number)\n",
            "",
        ),
    ),
    "left_alone": Planted(
        "a worker that the scheduler process listens to no more is not connected again",
        "proxy/test_workers_flood.py::test_a_worker_that_floods_is_nobody_elses_trouble[rubbish]",
        Change(
            "workers/supervisor.py",
            "            elif message.kind == NO_PEER:\n                self._connect(worker)\n",
            "            elif message.kind == NO_PEER:\n                pass\n",
        ),
    ),
    "places_of_the_dead_kept": Planted(
        "the places of a worker that has ended are not freed",
        _ADMISSION + "test_what_a_dead_worker_had_is_free_again",
        Change(
            "workers/admitted_worker.py",
            """\
        for client, place in self._places.values():
            place.leave()
            self._clients.leave(client)
        self._places.clear()
""",
            "        self._places.clear()\n",
        ),
    ),
    "question_again_and_again": Planted(
        "a question that ends scheduler processes is sent to each next one",
        _SCHEDULER + "test_a_question_that_ends_schedulers_ends_two_at_most",
        Change(
            "workers/scheduler_link.py",
            "            if question.tries < TRIES:",
            "            if question.tries < 1000:",
        ),
    ),
    "records_of_an_heir_lost": Planted(
        "what a worker was to release of another one is lost if it ends, too",
        "unit/test_heirs.py::test_what_an_heir_had_not_taken_is_handed_on",
        Change("workers/heirs.py", "                left += records\n", ""),
    ),
    "silent_scheduler_kept": Planted(
        "a scheduler process that answers nothing is killed no sooner than a worker",
        "proxy/test_workers_stopped.py::test_what_is_stopped_is_nobody_elses_trouble[scheduler]",
        Change(
            "workers/supervisor.py",
            "            return self._times.silent_for_all\n",
            "            return self._times.silent\n",
        ),
    ),
    "space_of_the_dead_kept": Planted(
        "space in receive buffers that a worker had taken is not freed with it",
        _SCHEDULER + "test_space_is_waited_for_and_released",
        Change(
            "workers/worker_choices.py",
            """\
        for space in self._spaces.values():
            space.release()
        self._spaces.clear()
""",
            "        self._spaces.clear()\n",
        ),
    ),
    "too_much_taken": Planted(
        "a worker may have any number of leases",
        _SCHEDULER + "test_a_worker_that_takes_too_much_is_not_listened_to",
        Change(
            "workers/scheduler_clients.py",
            "map(len, self._holders)) > MAX_OPEN:",
            "map(len, self._holders)) > MAX_OPEN << 30:",
        ),
    ),
    "turns_told_twice": Planted(
        "a scheduler process does not note what it has heard of kept turns: it is told again",
        _TURNS + "test_what_finishes_without_a_scheduler_process_is_told_the_next_one",
        Change(
            "workers/turns_of_workers.py",
            "        self._heard[worker] = number\n        return True\n",
            "        return True\n",
        ),
    ),
    "values_not_read": Planted(
        "a worker that does not read is told each value of a topic",
        _PUBLISHER + "test_a_worker_that_does_not_read_is_told_the_last_values",
        Change(
            "workers/publisher.py",
            "if worker.is_behind and not client.unsent:",
            "if worker.is_behind:",
        ),
    ),
    "values_not_told": Planted(
        "the next scheduler process is not told which values a worker has",
        _PUBLISHER + "test_a_new_scheduler_process_has_what_workers_have_before_it_tells",
        Change(
            "workers/scheduler_link.py",
            "            self.tell(Publisher.restore, 0, name, values)",
            "            pass",
        ),
    ),
    "values_that_are_gone_kept": Planted(
        "a worker keeps values that the next scheduler process does not have",
        _PUBLISHER + "test_what_a_new_scheduler_process_does_not_tell",
        Change(
            "workers/subscriber.py",
            "return untold if self._is_whole else set()",
            "return set()",
        ),
    ),
    "waits_for_ever": Planted(
        "requests wait for a scheduler process for as long as there is none",
        _SCHEDULER + "test_nobody_waits_long_for_a_scheduler",
        Change(
            "workers/scheduler_link.py",
            "loop.call_later(PATIENCE, self._give_up)",
            "loop.call_later(PATIENCE + 3600, self._give_up)",
        ),
    ),
    "waits_for_the_stopped": Planted(
        "a scheduler process chooses only once each worker has said what it has",
        "proxy/test_workers_stopped.py::test_a_scheduler_waits_for_no_worker_that_is_stopped",
        Change(
            "workers/scheduler_links.py",
            "        asyncio.get_running_loop().call_later(EXPECTED, self._choose)\n",
            "",
        ),
    ),
}
