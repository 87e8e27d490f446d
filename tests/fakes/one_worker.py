"""Tests that need a proxy of one process, and why. With PDPROXY_TEST_WORKERS=2 they are left out,
and counted by their reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

EACH = (
    "it counts what each worker does by itself: lines of the log, files that it follows, turns "
    "of engines, first requests"
)
KEPT = "it counts connections to engines, which each worker keeps for itself"
DIVIDED = (
    "it fills a bound that is divided among workers: connections, bytes of bodies and answers, "
    "readers"
)
INSIDE = (
    "it looks into one process, or changes that one alone: its tasks and parts, its engines, its "
    "admin API"
)

ONE_WORKER: Mapping[str, str] = MappingProxyType(
    {
        "test_admission_and_drain.py::test_drain_cuts_off_what_is_left_at_its_deadline": EACH,
        (
            "test_auto_placement.py::"
            "test_an_engines_own_settings_say_how_many_tokens_its_steps_have"
        ): INSIDE,
        "test_continued_edges.py::test_a_request_whose_time_is_up_between_two_streams": EACH,
        "test_continued_not.py::test_records_are_bounded_and_counted": DIVIDED,
        "test_decode_fails.py::test_a_kept_connection_that_the_engine_had_closed": KEPT,
        "test_decode_fails.py::test_connections_are_kept_and_closed_as_the_engine_says": KEPT,
        "test_drained.py::test_legs_to_an_engine_that_was_removed_at_once_count": INSIDE,
        (
            "test_engine_networks.py::test_a_notice_for_a_client_that_has_left_names_no_other_host"
        ): INSIDE,
        "test_engines_come_and_go.py::test_a_removed_engine_is_asked_nothing": KEPT,
        "test_first_contact.py::test_a_refusal_is_a_release_once_kv_has_moved": EACH,
        "test_handles_once.py::test_a_lease_that_ends_while_the_engine_is_connected_to": INSIDE,
        "test_handles_once.py::test_a_notice_of_a_leg_that_has_failed_has_its_kv_released": INSIDE,
        "test_handles_once.py::test_a_notice_while_it_connects": INSIDE,
        "test_handles_once.py::test_kv_that_is_being_released_is_not_read": INSIDE,
        "test_handles_once.py::test_kv_whose_lease_ends_is_not_read": INSIDE,
        "test_hostile_bodies.py::test_a_body_is_read_in_time_or_not_at_all": DIVIDED,
        "test_hostile_bodies.py::test_an_honest_large_body_is_served_byte_for_byte": DIVIDED,
        "test_hostile_bodies.py::test_bodies_that_wait_to_be_read_are_bounded": DIVIDED,
        "test_hostile_clients.py::test_bodies_under_way_have_one_bound_in_all": DIVIDED,
        "test_hostile_engines.py::test_a_stream_that_goes_wrong_behind_its_data": EACH,
        "test_hostile_engines.py::test_many_answers_share_one_room": DIVIDED,
        "test_hostile_logs.py::test_a_pipe_that_nobody_reads": EACH,
        "test_hostile_logs.py::test_the_last_lines_are_written": EACH,
        "test_key_rights.py::test_a_pool_that_a_key_does_not_name": INSIDE,
        "test_membership.py::test_a_fleet_that_changes_under_streaming_clients": INSIDE,
        "test_membership.py::test_nothing_is_left_of_an_engine_that_went": INSIDE,
        "test_metrics_table.py::test_series_of_a_removed_engine_are_dropped": INSIDE,
        "test_metrics_table.py::test_the_process_and_its_versions_are_on_the_page": INSIDE,
        "test_monitoring.py::test_a_body_that_is_refused_is_counted": DIVIDED,
        "test_monitoring.py::test_a_connection_that_is_refused_is_counted": DIVIDED,
        "test_monitoring.py::test_a_flood_of_refusals_does_not_fill_the_log": EACH,
        "test_notifier.py::test_a_notice_is_enough_once_nobody_waits_for_the_answer": INSIDE,
        "test_notifier.py::test_a_notice_proves_ids_as_an_answer_does": EACH,
        "test_notifier.py::test_notices_for_a_proxy_that_is_gone": INSIDE,
        "test_notifier.py::test_the_decode_engine_is_asked_before_the_prefills_answer": INSIDE,
        "test_operation.py::test_a_balancer_keeps_a_proxy_whose_engines_load": INSIDE,
        "test_operator_routes.py::test_keys_that_are_guessed_at_health_checks_are_counted": EACH,
        "test_operator_routes.py::test_who_sees_it_follows_the_settings": INSIDE,
        "test_other_routes.py::test_bodies_of_all_routes_share_one_bound": DIVIDED,
        "test_placement.py": INSIDE,
        "test_prefixes.py::test_a_prefill_engine_is_asked_to_report_and_may_refuse": EACH,
        "test_realtime.py::test_bodies_of_all_clients_share_their_space": DIVIDED,
        "test_realtime.py::test_one_without_an_engine_makes_room": DIVIDED,
        "test_registered.py::test_a_decode_engine_that_waits_for_a_writer_that_failed": INSIDE,
        (
            "test_requests_at_fault.py::"
            "test_an_answer_without_space_and_limit_costs_what_who_leaves_pays"
        ): DIVIDED,
        (
            "test_requests_at_fault.py::"
            "test_an_answer_without_space_costs_no_more_than_was_asked_for"
        ): DIVIDED,
        (
            "test_requests_at_fault.py::test_an_answer_without_space_is_paid_as_far_as_it_had_come"
        ): DIVIDED,
        "test_requests_at_fault.py::test_two_of_three_engines_that_fail_each_request": EACH,
        "test_root_tasks.py::test_a_notice_that_can_not_be_handled": INSIDE,
        "test_root_tasks.py::test_no_other_task_must_always_run": INSIDE,
        "test_shares.py::test_a_body_that_goes_on_is_not_the_one_that_gives_way": DIVIDED,
        "test_shares.py::test_a_client_with_fewer_connections_loses_none": DIVIDED,
        "test_shares.py::test_a_client_with_its_share_gets_no_more_of_others": DIVIDED,
        "test_shares.py::test_a_connection_too_many_is_told_so": DIVIDED,
        "test_shares.py::test_a_stalled_body_gives_way_to_a_client_with_less": DIVIDED,
        "test_shares.py::test_an_idle_connection_gives_way_to_a_new_one": DIVIDED,
        "test_shares.py::test_answers_that_nobody_reads_have_a_bound": DIVIDED,
        "test_shares.py::test_bodies_in_service_leave_room_for_others": DIVIDED,
        "test_shares.py::test_bodies_that_engines_work_on_give_way_to_nobody": DIVIDED,
        "test_shares.py::test_half_a_request_is_idle": DIVIDED,
        "test_signals.py::test_a_hangup_ends_no_stream": EACH,
        "test_slow.py::test_an_event_loop_that_is_held": EACH,
        "test_slow.py::test_slow_clients": EACH,
        "test_tls.py::test_a_certificate_that_expires_is_reported": EACH,
        "test_tls.py::test_half_of_a_renewal_changes_nothing": EACH,
        "test_tls_engines.py::test_engines_in_tls": KEPT,
        "test_tokenize.py::test_a_template_that_differs_is_found": EACH,
        "test_tokenize.py::test_an_engine_that_serves_other_ids_than_it_tokenizes": EACH,
        "test_tokenize.py::test_chat_ids_stand_beside_the_kv_params": EACH,
        "test_tokenize.py::test_completion_ids_go_to_both": EACH,
        "test_tokenize.py::test_each_prompt_of_a_list_has_its_own": EACH,
        "test_tokenize.py::test_late_ids_cost_the_request_nothing": EACH,
        "test_tokenize.py::test_now_and_then_an_engine_shows_its_own": EACH,
        "test_tokenize.py::test_one_engine_of_several_that_differs": EACH,
        "test_tokenize.py::test_the_engines_own_model": EACH,
        "test_wrong_keys.py::test_too_many_wrong_keys_of_an_address": EACH,
    }
)
"""Reasons by the test's file and name, or by the file for all in it. All parameters of a test are
left out.
"""


def reason(file: str, name: str) -> str | None:
    """Return why a test needs one worker, None if it does not."""
    return ONE_WORKER.get(f"{file}::{name}", ONE_WORKER.get(file))
