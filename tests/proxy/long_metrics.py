"""Prometheus' own judgement of the metrics page: `promtool check metrics`, after traffic of all
sorts.
"""

# Needs promtool on PATH.

import json
import subprocess
from pathlib import Path

from tests.fakes.process import served
from tests.fakes.world import CHAT, COMPLETIONS, chat, completion
from tests.unit.test_monitoring_page import PAGE, queries

TRAFFIC = [
    (COMPLETIONS, completion()),
    (COMPLETIONS, completion(stream=True)),
    (CHAT, chat(return_prompt_text=True, stream=True)),
    (CHAT, chat(model="nope")),
    (COMPLETIONS, b"no JSON"),
    ("/tokenize", {"model": "tiny", "prompt": "a b"}),
]


async def test_promtool_has_nothing_to_say() -> None:
    """No error and no advice, on the page of a fresh proxy and after traffic."""
    async with served(subprocess.DEVNULL) as proxy:
        for traffic in ([], TRAFFIC):
            for path, body in traffic:
                await proxy.ask("POST", path, body)
            page = (await proxy.ask("GET", "/metrics")).body
            done = subprocess.run(
                ["promtool", "check", "metrics"], input=page, capture_output=True, timeout=60
            )
            names = {
                line.split()[2] for line in page.decode().splitlines() if line.startswith("# TYPE")
            }
            samples = sum(not line.startswith("#") for line in page.decode().splitlines())
            print(
                f"promtool: exit code {done.returncode}; {len(names)} metrics, {samples} "
                f"samples, {len(page)} bytes"
            )
            print((done.stdout + done.stderr).decode())
            assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def test_prometheus_reads_each_query_of_the_documentation(tmp_path: Path) -> None:
    """Each PromQL expression of the guide, as a rule."""
    found = [
        query
        for query in queries(PAGE)
        if query.startswith(("sum", "rate", "histogram_quantile", "pdproxy_", "process_"))
    ]
    rules = [{"record": f"r:{number}", "expr": query} for number, query in enumerate(found)]
    file = tmp_path / "rules.yaml"
    file.write_text(json.dumps({"groups": [{"name": "guide", "rules": rules}]}))
    done = subprocess.run(
        ["promtool", "check", "rules", str(file)], capture_output=True, text=True, timeout=60
    )
    print(
        f"promtool: exit code {done.returncode}; {len(rules)} queries of docs/guide/monitoring.md"
    )
    assert len(rules) > 40
    assert done.returncode == 0, done.stdout + done.stderr
