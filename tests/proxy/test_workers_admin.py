"""The admin API of a proxy with two workers, as processes: the scheduler process serves it, and
workers follow, also those that are started again.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pdproxy.fleet.entries import engine_id
from tests.fakes import answers, scripts
from tests.fakes.admin import BASE
from tests.fakes.books import Books
from tests.fakes.client import Client, exchange, request
from tests.fakes.engine import FakeEngine
from tests.fakes.forked import piped
from tests.fakes.process import PATIENCE
from tests.fakes.scripts import WORD
from tests.fakes.served_workers import ENVIRONMENT, Run, nodes, serving
from tests.fakes.world import COMPLETIONS, TEXT, completion, until

SEED = int(os.environ.get("PDPROXY_TEST_SEED", "5"))


@asynccontextmanager
async def running(
    tmp_path: Path, spare: int = 1, admin: str | None = None, pool: str = ""
) -> AsyncIterator[Run]:
    """Run two workers, an engine of each role, and decode engines that the proxy does not know.
    `admin`: where its API is; `pool`: further settings of the pool.
    """
    books = Books()
    engines = [FakeEngine(role, books) for role in ("prefill", *["decode"] * (1 + spare))]

    def settings(port: int, admin_port: int) -> str:
        return (
            f"listen: {{port: {port}, workers: 2, admin: '{admin or f'127.0.0.1:{admin_port}'}'}}\n"
            "deadlines: {drain: 5}\nprobes: {interval: 0.2}\npools:\n- connector: nixl\n"
            + pool
            + nodes(engines[:2])
        )

    async with serving(tmp_path, engines, settings, spare=engines[2:]) as run:
        yield run


def fields(engine: FakeEngine, **more: Any) -> dict[str, Any]:
    return {"url": engine.url, "role": engine.role, **more}


def states(shown: Any) -> dict[str, str]:
    """The states of all engines in a list."""
    return {one["url"]: one["state"] for one in shown["engines"]}


async def test_an_engine_comes_to_all_workers_and_goes_from_all(tmp_path: Path) -> None:
    """All have it soon behind the answer; it is gone once no worker has a request there."""
    go = asyncio.Event()

    async with running(tmp_path) as run:
        (new,), proxy = run.spare, run.proxy
        added = await run.ask("POST", "/engines", fields(new, labels={"rack": "7"}))
        assert (added.status, added.json["result"]) == (201, "added")
        assert new.url in states((await run.ask("GET", "/engines")).json)
        await run.all_say(
            f"/engines/{engine_id(new.url)}", lambda shown: shown["state"] in ("warming", "serving")
        )
        assert await proxy.metric("pdproxy_node_up", node=new.url) == 1, "in both"
        assert await proxy.metric("pdproxy_member_changes_total", change="added") == 1
        refused = await run.ask("POST", "/engines", fields(new, labels={"rack": "8"}))
        assert (refused.status, refused.json["error"]["owner"]) == (409, "admin")
        assert (
            await run.ask("POST", f"/engines/{engine_id(proxy.decode.url)}/drain")
        ).status == 202
        await run.all_say("/engines", lambda shown: states(shown)[proxy.decode.url] == "drained")

        new.scripts.clear()
        clients = []
        for _ in range(8):
            new.script(scripts.after_word(go, scripts.one_more_word))
            client = await Client.connect(proxy.port)
            client.post(COMPLETIONS, completion(stream=True))
            clients.append((client, await client.head()))
        await run.all_say(
            "/engines", lambda shown: any(one["load"]["requests"] == 8 for one in shown["engines"])
        )
        removed = await run.ask("DELETE", f"/engines/{engine_id(new.url)}?seconds=60")
        assert (removed.status, removed.json["result"]) == (202, "removing")
        shown = await run.all_say(
            f"/engines/{engine_id(new.url)}", lambda one: one["state"] == "draining"
        )
        assert (
            shown["drain"]["removes"],
            shown["drain"]["waits_for"],
            shown["load"]["requests"],
        ) == (
            True,
            "requests",
            8,
        )
        assert (await run.ask("POST", f"/engines/{engine_id(proxy.decode.url)}/undrain")).json[
            "result"
        ] == "undrained"
        go.set()
        for client, head in clients:
            assert (await client.rest(head)).body == WORD + WORD + answers.end()
        async with asyncio.timeout(PATIENCE):
            while (await run.ask("GET", f"/engines/{engine_id(new.url)}")).status != 404:
                await asyncio.sleep(0.02)
        for _ in range(8):
            assert new.url not in states((await run.ask("GET", "/engines")).json)
        for _ in range(8):
            assert (await proxy.ask("POST", COMPLETIONS, completion())).text == TEXT
        lines = (tmp_path / "log").read_text()
        assert lines.count("the admin API listens on") == 1


async def test_decisions_have_the_outcomes_that_workers_know(tmp_path: Path) -> None:
    """The scheduler process has decided, a worker has served: the list of decisions has both, and
    so has the worker's access line.
    """
    auto = "  policy: {placement: auto}\n  profile: h200-8b\n  slo: {ttft: 60, tpot: 60}\n"
    async with running(tmp_path, pool=auto) as run:
        for number in range(4):
            named = [("X-Request-Id", f"mine-{number}"), ("X-PDProxy-Decision", "1")]
            body = completion(stream=True, max_tokens=4)
            answer = await exchange(run.proxy.port, request("POST", COMPLETIONS, body, named))
            assert answer.status == 200
            assert re.search(
                "; term=[a-z]+; other=(whole|split) ", answer.header("x-pdproxy-decision") or ""
            )
        shown = await run.all_say(
            "/decisions",
            lambda shown: all(
                (one["outcome"] or {}).get("state") == "ok" for one in shown["decisions"]
            ),
        )
        assert [one["request_id"] for one in shown["decisions"]] == [
            f"mine-{number}" for number in (3, 2, 1, 0)
        ]
        for one in shown["decisions"]:
            assert (one["outcome"]["good"], one["outcome"]["completion_tokens"]) == (True, 4)
            assert abs(sum(one["parts"].values()) - one["values"]["cost"]) < 1e-9
            assert one["other"]["values"]["cost"] >= one["values"]["cost"]
    lines = [line for line in (tmp_path / "log").read_text().splitlines() if "mine-0" in line]
    assert any("term=" in line and "good=" in line for line in lines), lines


async def test_workers_that_start_again_have_all_changes(tmp_path: Path) -> None:
    """So has another scheduler process, also when all of them were killed at once: engines, drains
    and the log level; and what was taken back stays so.
    """
    async with running(tmp_path, spare=3) as run:
        kept, drained, gone = run.spare
        for engine in run.spare:
            assert (await run.ask("POST", "/engines", fields(engine))).status == 201
        assert (await run.ask("POST", f"/engines/{engine_id(drained.url)}/drain")).status == 202
        assert (await run.ask("DELETE", f"/engines/{engine_id(gone.url)}?at_once=true")).json[
            "result"
        ] == "removed"
        level = await run.ask("PUT", "/log_level", {"level": "debug"})
        assert level.json == {"level": "debug", "set_by": "admin"}

        def is_so(shown: Any) -> bool:
            found = states(shown)
            return (
                len(found) == 4
                and found[drained.url] == "drained"
                and found[kept.url] in ("serving", "warming")
                and gone.url not in found
            )

        await run.all_say("/engines", is_so)
        await run.kill(run.proxy.workers()[0])
        await run.all_say("/engines", is_so)
        await run.kill_scheduler()
        await run.all_say("/engines", is_so)
        for pid in (run.proxy.scheduler(), *run.proxy.workers()):
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        await run.whole()
        shown = await run.all_say("/engines", is_so)
        (one,) = (one for one in shown["engines"] if one["url"] == kept.url)
        assert (one["source"], one["state"]) == ("admin", "serving"), (
            "it does not begin slowly once more"
        )
        await run.all_say(
            "/log_level", lambda shown: shown == {"level": "debug", "set_by": "admin"}
        )
        assert await run.proxy.metric("pdproxy_node_up", node=kept.url) == 1
        assert (await run.ask("POST", f"/engines/{engine_id(drained.url)}/undrain")).status == 200
        await run.kill_scheduler()
        await run.all_say(
            "/engines", lambda shown: states(shown).get(drained.url) in ("serving", "warming")
        )
        assert (await run.ask("DELETE", f"/engines/{engine_id(drained.url)}")).status == 202
        await run.kill_scheduler()
        await run.all_say("/engines", lambda shown: drained.url not in states(shown))
        async with asyncio.timeout(PATIENCE):  # also what killed workers have counted of it goes
            while drained.url in (page := (await run.proxy.ask("GET", "/metrics")).body.decode()):
                await asyncio.sleep(0.1)
        assert kept.url in page


async def test_an_engine_that_came_back_into_the_file_is_not_drained_again(tmp_path: Path) -> None:
    """Drained by an operator, taken out of the file and put back before its last stream ended: it
    serves in a new worker, too.
    """
    go = asyncio.Event()
    async with running(tmp_path) as run:
        proxy, engine, path = (
            run.proxy,
            run.proxy.decode,
            f"/engines/{engine_id(run.proxy.decode.url)}",
        )
        engine.script(scripts.after_word(go, scripts.one_more_word))
        client = await Client.connect(proxy.port)
        client.post(COMPLETIONS, completion(stream=True))
        head = await client.head()
        assert (await run.ask("POST", f"{path}/drain")).json["result"] == "draining"
        file = run.config.read_text()
        run.config.write_text(file.replace(engine.url, run.spare[0].url))
        await run.all_say(path, lambda shown: shown["drain"]["removes"])
        run.config.write_text(file)
        await run.all_say(path, lambda shown: shown["state"] in ("serving", "warming"))
        await run.kill_scheduler()
        await run.all_say(path, lambda shown: (shown["state"], shown["drain"]) == ("serving", None))
        go.set()
        assert (await client.rest(head)).body == WORD + WORD + answers.end()


async def test_processes_killed_in_the_middle_of_changes(tmp_path: Path) -> None:
    """Four operators change engines of their own while the scheduler process and workers are
    killed: in the end all have what was answered last.
    """
    async with running(tmp_path, spare=4) as run:
        over = asyncio.Event()

        async def operate(engine: FakeEngine, chance: random.Random) -> set[str]:
            """Add and remove an engine at random. Return its URL if it is there. What a killed
            process was asked is looked up.
            """
            has = False
            while not over.is_set():
                name = engine_id(engine.url)
                wants = not has if chance.random() < 0.8 else has
                try:
                    if wants:
                        answer = await run.api.ask("POST", f"{BASE}/engines", fields(engine))
                    else:
                        answer = await run.api.ask("DELETE", f"{BASE}/engines/{name}?at_once=true")
                    assert answer.status in ((200, 201) if wants else (200, 404)), answer.body
                    has = wants
                except (OSError, EOFError):
                    await run.whole()
                    answer = await run.ask("GET", f"/engines/{name}")
                    has = answer.status == 200
                await asyncio.sleep(chance.random() * 0.01)
            return {engine.url} if has else set()

        chance = random.Random(SEED)
        operators = [
            asyncio.create_task(operate(one, random.Random(SEED + at)))
            for at, one in enumerate(run.spare)
        ]
        for number in range(8):
            await asyncio.sleep(0.1 + chance.random() * 0.3)
            if number % 4:
                await run.kill_scheduler()
            else:
                await run.kill(chance.choice(run.proxy.workers()))
            if failed := [task for task in operators if task.done()]:
                failed[0].result()
        over.set()
        wanted = set().union(*await asyncio.gather(*operators))
        await run.whole()
        known = wanted | {run.proxy.prefill.url, run.proxy.decode.url}
        await run.all_say("/engines", lambda shown: set(states(shown)) == known)
        for _ in range(8):
            assert (await run.proxy.ask("POST", COMPLETIONS, completion())).text == TEXT
        assert await run.proxy.metric("pdproxy_worker_restarts_total") == 2
        assert await run.proxy.metric("pdproxy_scheduler_restarts_total") == 6


async def test_a_worker_that_stands_still_is_named_and_has_the_change_later(tmp_path: Path) -> None:
    """Nobody waits for it. Lists say that how its prompts were served is missing."""
    async with running(tmp_path) as run:
        (new,) = run.spare
        still, other = run.proxy.workers()
        os.kill(still, signal.SIGSTOP)
        added = await run.ask("POST", "/engines", fields(new))
        assert (added.status, added.json["result"]) == (201, "added")
        listed = (await run.ask("GET", "/engines")).json
        assert len(listed["silent_workers"]) == 1
        assert new.url in states(listed)
        os.kill(still, signal.SIGCONT)
        await run.all_say("/engines", lambda shown: not shown["silent_workers"])
        assert run.proxy.workers() == [still, other]
        async with asyncio.timeout(PATIENCE):  # 0.5 where one of two workers does not have it
            while await run.proxy.metric("pdproxy_node_up", node=new.url) != 1:
                await asyncio.sleep(0.05)


async def test_requests_of_all_workers_are_shown_by_time(tmp_path: Path) -> None:
    """Those that run, the longest-running first, and the last ones, the newest first, whoever has
    served them. A client has its answer a moment before the worker is done with the request.
    """
    async with running(tmp_path) as run:
        sent = []
        for number in range(16):
            named = request("POST", COMPLETIONS, completion(), [("X-Request-Id", f"id{number}")])
            assert (await exchange(run.proxy.port, named)).status == 200
            sent.append(f"id{number}")
        shown = await run.all_say("/requests", lambda found: len(found["requests"]) == 16)
        newest = [one["id"] for one in shown["requests"]]
        assert sorted(newest) == sorted(sent)
        assert [one["ended_s"] for one in shown["requests"]] == sorted(
            one["ended_s"] for one in shown["requests"]
        )
        for _ in range(4):
            (one,) = (await run.ask("GET", "/requests?id=id3")).json["requests"]
            assert one["id"] == "id3"
            limited = (await run.ask("GET", "/requests?limit=3")).json["requests"]
            assert [one["id"] for one in limited] == newest[:3]
        go = asyncio.Event()
        clients = []
        before = len(run.proxy.decode.requests)
        for number in range(6):
            run.proxy.decode.script(scripts.gate(go, scripts.reset))
            client = await Client.connect(run.proxy.port)
            client.post(COMPLETIONS, completion(), [("X-Request-Id", f"run{number}")])
            clients.append(client)
            await until(lambda: len(run.proxy.decode.requests) == before + len(clients), PATIENCE)
        shown = await run.all_say(
            "/requests?outcome=running", lambda found: len(found["requests"]) == 6
        )
        assert [one["id"] for one in shown["requests"]] == [f"run{number}" for number in range(6)]
        for client in clients:
            client.close()
        go.set()


async def _engines(*arguments: str, place: str) -> tuple[int, str]:
    # where COLUMNS is not set, as pytest's workers have it, the table is whole
    env = {name: value for name, value in ENVIRONMENT.items() if name != "COLUMNS"}
    process = await piped("engines", *arguments, "--admin", place, env=env)
    output, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, (output + errors).decode()


async def test_the_command_works_at_a_unix_socket(tmp_path: Path) -> None:
    """The socket outlives the scheduler process and a worker that drains, and is gone at the
    end.
    """
    path = tmp_path / "admin.sock"
    place = f"unix:{path}"
    async with running(tmp_path, admin=place) as run:
        (new,), drained = run.spare, run.proxy.workers()[0]
        assert path.stat().st_mode & 0o777 == 0o600
        os.kill(drained, signal.SIGTERM)
        await until(
            lambda: drained not in run.proxy.workers() and len(run.proxy.workers()) == 2, PATIENCE
        )
        await run.whole()
        await run.kill_scheduler()
        assert path.exists()
        for arguments in (
            ("add", new.url, "--role", "decode", "--wait"),
            ("drain", new.url, "--wait"),
            ("undrain", new.url, "--wait"),
        ):
            code, output = await _engines(*arguments, place=place)
            assert code == 0, output
        assert await run.proxy.metric("pdproxy_node_up", node=new.url) == 1
        code, table = await _engines("list", place=place)
        assert (code, engine_id(new.url) in table) == (0, True)
        assert (await _engines("remove", new.url, "--wait", place=place))[0] == 0
        assert await run.proxy.metric("pdproxy_node_info", node=new.url) == 0, "in no worker"
        code, output = await _engines("remove", new.url, place=place)
        assert (code, "no engine of this pool" in output) == (1, True)
    assert not path.exists()
