"""Fixed pages and figures."""

from collections import Counter

from pdproxy_lab.demo.figures import EngineFigures, Figures, Latency, MovedKv, ShownEngine
from pdproxy_lab.demo.pages import Page
from pdproxy_lab.demo.tally import Tally

P0 = ShownEngine("0", "prefill", "http://127.0.0.1:8200")
D0 = ShownEngine("0", "decode", "http://127.0.0.1:8300")


def proxy_page(
    ok: float = 0.0, engine: float = 0.0, *, d_up: float = 1.0, recomputed: float = 0.0
) -> Page:
    def requests(outcome: str) -> tuple[tuple[str, str], ...]:
        return (("endpoint", "chat"), ("model", "sim"), ("outcome", outcome))

    return {
        "pdproxy_node_up": {
            (("node", P0.url), ("role", "prefill")): 1.0,
            (("node", D0.url), ("role", "decode")): d_up,
        },
        "pdproxy_inflight": {(): 3.0},
        "pdproxy_queue": {(): 2.0},
        "pdproxy_requests_total": {requests("ok"): ok, requests("engine"): engine},
        "pdproxy_ttft_seconds_bucket": {
            (("le", "0.1"), ("path", "split")): ok,
            (("le", "+Inf"), ("path", "split")): ok,
        },
        "pdproxy_kv_moved_total": {
            (("result", "transferred"),): 500.0,
            (("result", "recomputed"),): recomputed,
        },
    }


def engine_page(
    prompt: float = 0.0, generated: float = 0.0, *, moved: float = 0.0, failed: float = 0.0
) -> Page:
    one = (("engine", "0"), ("model_name", "sim"))
    return {
        "vllm:num_requests_running": {one: 4.0},
        "vllm:num_requests_waiting": {one: 1.0},
        "vllm:kv_cache_usage_perc": {one: 0.25},
        "vllm:prompt_tokens_total": {one: prompt},
        "vllm:generation_tokens_total": {one: generated},
        "vllm:nixl_bytes_transferred_count": {one: moved},
        "vllm:nixl_bytes_transferred_sum": {one: 1e6 * moved},
        "vllm:nixl_num_failed_transfers_total": {one: failed},
    }


def well(engines: int = 4) -> Figures:
    places = [
        ShownEngine(
            str(n // 2), "prefill" if n % 2 == 0 else "decode", f"http://127.0.0.1:{8200 + n}"
        )
        for n in range(engines)
    ]
    return Figures(
        elapsed=12.0,
        answers=True,
        engines=[EngineFigures(place, True, 3, 0, 0.121, 1203.4) for place in places],
        inflight=3,
        queued=0,
        outcomes={"ok": 1231},
        requests_per_s=4.2,
        ttft=Latency(0.023, 0.080),
        itl=Latency(0.0052, 0.0079),
        prompt_tokens_per_s=12034.0,
        output_tokens_per_s=420.0,
        transfers=MovedKv(1231, 1.234e9, 34.2e6, 0, 0, 0),
        traffic=Tally(1234, 1231),
    )


def ill() -> Figures:
    down = EngineFigures(D0, False, None, None, None, None)
    silent = EngineFigures(P0, True, None, None, None, None)
    return Figures(
        elapsed=3.0,
        answers=True,
        engines=[silent, down],
        inflight=0,
        queued=7,
        outcomes={"ok": 1, "engine": 4, "client_left": 2},
        requests_per_s=None,
        ttft=Latency(None, None),
        itl=Latency(None, None),
        prompt_tokens_per_s=None,
        output_tokens_per_s=None,
        transfers=MovedKv(0, 0, None, 1, 2, 300),
        traffic=Tally(9, 1, 0, Counter({"with status 503": 4, "by a stream that broke off": 1})),
    )
