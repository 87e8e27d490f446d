"""Pictures of comparisons, fixed."""

from pdproxy_lab.demo.comparison.scores import Score, Spread
from pdproxy_lab.demo.comparison.verdict import verdict
from pdproxy_lab.demo.comparison.view import ComparedEngine, Picture, Side
from pdproxy_lab.up import examples

SPLIT = Score(
    80, 0.93, 14.9, Spread(0.22, 0.53), Spread(0.0062, 0.0071), Spread(0.0055, 0.0216), 0.042
)
PLAIN = Score(
    80, 0.61, 9.8, Spread(0.124, 0.276), Spread(0.0076, 0.0105), Spread(0.0051, 0.0979), 0.103
)
URL = "http://127.0.0.1:8000"


def engines(*names: str) -> list[ComparedEngine]:
    return [ComparedEngine(name, "up", 12, 3) for name in names]


def side(title: str, score: Score, *names: str) -> Side:
    return Side(title, score, [score] * 240, engines(*names), 1234, 0)


def picture(count: int = 4) -> Picture:
    """Half of `count` engines prefill."""
    names = [f"{role} {number}" for role in ("prefill", "decode") for number in range(count // 2)]
    return Picture(
        elapsed=41.0,
        rate=4.0 * count,
        limits="TTFT ≤ 500 ms, TPOT ≤ 8 ms",
        speed=0.25,
        split=side("split: 2 prefill, 2 decode", SPLIT, *names),
        plain=side(
            "plain: 4 engines, chunk 4096", PLAIN, *(f"plain {number}" for number in range(count))
        ),
        verdict=verdict("split", SPLIT, PLAIN),
        news="Engine 4 was killed: decode 1 and plain 3. " + 30 * "Some more words. ",
        curl=lambda width: examples.curl(URL, "sim", width),
    )
