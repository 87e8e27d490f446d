"""Makes the files that Helm renders from the chart: `python -m tests.chart.generate`.

`configs/kubernetes/2p2d.yaml` is for those who have no Helm. The others are for readers of changes
of the chart, and are below this folder. A file that the chart shares with the operator is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pdproxy_operator import definitions
from tests.chart.render import ROOT, text_of
from tests.chart.sets import SETS
from tests.release import version

_HEAD = f"""\
# Two prefill and two decode engines (vLLM, Qwen3-0.6B, a GPU each), and two proxies: what
# `helm template` makes of configs/chart with these values:
#
#   engineDefaults: {{model: Qwen/Qwen3-0.6B}}
#   engines:
#     - {{name: prefill, role: prefill, replicas: 2}}
#     - {{name: decode, role: decode, replicas: 2, args: [--max-num-seqs=256]}}
#
# Put the name of your image in place of pdproxy:{version.current()}, and your namespace in place
# of `default` at the subject of the RoleBinding. Then:
#
#   kubectl apply -f configs/kubernetes/2p2d.yaml
#
# Made by `python -m tests.chart.generate`: edit the chart.
"""


def _manifest() -> str:
    return _HEAD + text_of(SETS["2p2d"], "--no-hooks", namespace="default")


HOOK = ROOT / "proxy" / "pdproxy_operator" / "prestop.sh"
"""What engines' pods run before they end."""
FILES: dict[str, Callable[[], str]] = {
    "configs/chart/files/prestop.sh": HOOK.read_text,
    "configs/kubernetes/2p2d.yaml": _manifest,
    "tests/chart/golden/pods_of_two_namespaces.yaml": lambda: text_of(
        SETS["pods that are there, of two namespaces"]
    ),
    **{
        f"configs/chart-operator/files/{name}.yaml": partial(definitions.text_of, name)
        for name in definitions.NAMES
    },
}

if __name__ == "__main__":
    for name, made in FILES.items():
        (ROOT / name).parent.mkdir(exist_ok=True)
        (ROOT / name).write_text(made())
        print(f"wrote {name}")
