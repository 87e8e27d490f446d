"""Which tests are the nearest to a module of the data path: those that import it, and then those of
what it is a part of.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
DATA_PATH = ("web", "upstream", "serving", "deciding", "scheduling", "transfer", "wire")
"""The packages through which requests, answers and handles go."""
LEFT_OUT = (
    "web/admin/",
    "web/app.py",
    "web/docs_page.py",
    "web/openapi.py",
    "upstream/admin.py",
    "scheduling/auto/",
)
"""What is no data path: operators' routes, and what learns for the placement `auto`."""

PARTS: dict[str, tuple[str, ...]] = {
    "web/passthrough": (
        "proxy/test_revoked_keys.py",
        "proxy/test_audio.py",
        "proxy/test_other_routes_fail.py",
    ),
    "web/guard": ("fuzz/test_ingress.py", "proxy/test_http.py", "proxy/test_other_routes_fail.py"),
    "web/operat": ("proxy/test_operator_routes.py", "proxy/test_operation.py"),
    "web/body_budget": ("proxy/test_shares.py",),
    "web/cycle": ("fuzz/test_ingress.py", "proxy/test_http.py", "proxy/test_shares.py"),
    "web/client_certificates": ("proxy/test_revoked_certificates.py",),
    "web/": (
        "fuzz/test_ingress.py",
        "proxy/test_http_manners.py",
        "proxy/test_http.py",
        "proxy/test_wrong_keys.py",
        "proxy/test_unwanted_bodies.py",
        "proxy/test_slow_readers.py",
        "proxy/test_hostile_clients.py",
    ),
    "upstream/": (
        "fuzz/test_answers.py",
        "proxy/test_hostile_engines.py",
        "proxy/test_http_engine_client.py",
    ),
    "serving/access/": ("proxy/test_keys.py", "proxy/test_tenants.py", "proxy/test_pools.py"),
    "serving/request/passthrough": (
        "proxy/test_other_routes.py",
        "proxy/test_other_routes_fail.py",
        "proxy/test_key_rights.py",
        "proxy/test_audio.py",
        "proxy/test_lost_engines.py",
    ),
    "serving/request/service": (
        "proxy/test_key_rights.py",
        "proxy/test_lists.py",
        "proxy/test_flagged_routes.py",
        "proxy/test_requests.py",
        "proxy/test_batches.py",
    ),
    "serving/request/lifecycle": ("proxy/test_monitoring.py", "proxy/test_requests.py"),
    "serving/request/body_reader": ("proxy/test_audio.py", "proxy/test_requests.py"),
    "deciding/local_admission": (
        "unit/test_admission_overload.py",
        "proxy/test_admission_and_drain.py",
        "proxy/test_overload_virtual.py",
    ),
    "serving/request/meter": ("proxy/test_requests_at_fault.py", "proxy/test_quotas.py"),
    "serving/request/": (
        "proxy/test_requests.py",
        "proxy/test_batches.py",
        "proxy/test_admission_and_drain.py",
    ),
    "serving/dispatch/co": (
        "proxy/test_continued.py",
        "proxy/test_continued_edges.py",
        "proxy/test_both_legs.py",
    ),
    "serving/dispatch/record": ("proxy/test_continued_parsed.py", "proxy/test_continued.py"),
    "serving/dispatch/decode_leg": (
        "proxy/test_decode_fails.py",
        "proxy/test_client_leaves.py",
        "proxy/test_handles_once.py",
        "proxy/test_incompatible_engines.py",
        "proxy/test_both_legs.py",
    ),
    "serving/dispatch/decode_": (
        "proxy/test_connectors.py",
        "proxy/test_decode_fails.py",
        "proxy/test_client_leaves.py",
    ),
    "deciding/local_scheduler": ("proxy/test_placement.py", "proxy/test_decode_fails.py"),
    "deciding/engines_lost": (
        "proxy/test_lost_engines.py",
        "proxy/test_lost_engines_parts.py",
        "proxy/test_lost_engines_turns.py",
    ),
    "deciding/loss": ("proxy/test_lost_engines.py",),
    "deciding/re": ("unit/test_retry_budget.py", "proxy/test_retry_budget.py"),
    "deciding/few": ("unit/test_few_first.py", "proxy/test_lost_engines_turns.py"),
    "deciding/suspects": ("unit/test_suspects.py", "proxy/test_lost_engines.py"),
    "deciding/comebacks": ("unit/test_remote_losses.py",),
    "deciding/": ("unit/test_kv_buffers.py", "proxy/test_connectors.py"),
    "serving/dispatch/attempt": (
        "proxy/test_decode_fails.py",
        "proxy/test_client_leaves.py",
        "proxy/test_connectors.py",
    ),
    "serving/dispatch/exchange": (
        "proxy/test_slow_request.py",
        "proxy/test_prefill_fails.py",
        "proxy/test_decode_fails.py",
        "proxy/test_requests_at_fault.py",
        "proxy/test_connectors.py",
        "proxy/test_turns.py",
    ),
    "serving/dispatch/following": ("proxy/test_continued_not.py", "proxy/test_continued.py"),
    "serving/dispatch/prefill_leg": (
        "proxy/test_prefill_fails.py",
        "proxy/test_client_leaves.py",
        "proxy/test_connectors.py",
    ),
    "serving/dispatch/prompt_request": ("proxy/test_decode_fails.py", "proxy/test_continued.py"),
    "serving/dispatch/resources": (
        "proxy/test_kv_faults.py",
        "proxy/test_decode_fails.py",
        "proxy/test_prefill_fails.py",
    ),
    "serving/dispatch/whole_prompts": ("proxy/test_alone.py",),
    "serving/dispatch/orders": (
        "proxy/test_both_legs.py",
        "proxy/test_both_legs_races.py",
        "proxy/test_client_leaves.py",
    ),
    "serving/dispatch/prefix": ("proxy/test_prefixes.py",),
    "serving/dispatch/turn": ("proxy/test_turns.py", "proxy/test_turns_faults.py"),
    "serving/dispatch/": (
        "proxy/test_decode_fails.py",
        "proxy/test_prefill_fails.py",
        "proxy/test_client_leaves.py",
    ),
    "serving/kv/turn": ("proxy/test_turns.py", "proxy/test_turns_faults.py"),
    "serving/kv/": (
        "proxy/test_client_leaves.py",
        "proxy/test_notifier.py",
        "proxy/test_both_legs_lost.py",
    ),
    "serving/stream/event_filter": ("proxy/test_nothing_inside.py", "fuzz/test_streams.py"),
    "serving/stream/named": ("proxy/test_named_routes.py", "unit/test_relay.py"),
    "serving/stream/": (
        "fuzz/test_streams.py",
        "proxy/test_slow_readers.py",
        "proxy/test_decode_fails.py",
    ),
    "scheduling/prefix/reading": ("unit/test_prefix_events.py", "proxy/test_prefixes.py"),
    "scheduling/prefix": ("proxy/test_prefixes.py",),
    "scheduling/ledger": (
        "proxy/test_models_lost.py",
        "proxy/test_placement.py",
        "proxy/test_outliers.py",
    ),
    "scheduling/po": (
        "unit/test_policies.py",
        "unit/test_plugins.py",
        "proxy/test_placement.py",
    ),
    "scheduling/readiness": ("unit/test_ledger.py",),
    "scheduling/": (
        "unit/test_breakers.py",
        "proxy/test_placement.py",
        "proxy/test_outliers.py",
    ),
    "transfer/detect": ("proxy/test_auto.py",),
    "transfer/": ("proxy/test_connectors.py", "proxy/test_split_or_alone.py"),
    "wire/routes/": (
        "proxy/test_named_routes.py",
        "proxy/test_split_or_alone.py",
        "proxy/test_media.py",
        "clients/test_bodies.py",
    ),
    "wire/client_routes": ("proxy/test_invocations.py",),
    "wire/api_errors": ("proxy/test_audio.py", "proxy/test_other_routes_fail.py"),
    "wire/": ("proxy/test_requests.py", "proxy/test_split_or_alone.py"),
}
"""Tests of a part of the package, most of them with simulated engines: the first beginning that
fits a module's path.
"""


MOST = 6
"""Files that import a module, at most: those that import least else are the nearest."""


def nearest(module: str) -> tuple[str, ...]:
    """Return the files of tests that import a module, and then those of its part. `module`: its
    path in the package.
    """
    name = "pdproxy." + module.removesuffix(".py").replace("/", ".")
    importers = sorted((len(names), file) for file, names in _imports().items() if name in names)
    part = next((files for beginning, files in PARTS.items() if module.startswith(beginning)), ())
    return tuple(dict.fromkeys((*(file for _, file in importers[:MOST]), *part)))


@cache
def _imports() -> dict[str, frozenset[str]]:
    """Return the modules that each file of fast tests imports."""
    found: dict[str, frozenset[str]] = {}
    for folder in ("unit", "tokens"):
        for file in sorted((TESTS / folder).glob("test_*.py")):
            nodes = list(ast.walk(ast.parse(file.read_text())))
            names = {
                node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module
            }
            names |= {
                f"{node.module}.{one.name}"
                for node in nodes
                if isinstance(node, ast.ImportFrom)
                for one in node.names
            }
            names |= {
                one.name for node in nodes if isinstance(node, ast.Import) for one in node.names
            }
            found[f"{folder}/{file.name}"] = frozenset(names)
    return found
