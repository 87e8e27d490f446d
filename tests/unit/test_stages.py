"""vllm-omni's stage configurations: which engines they make, and what is told at the start of those
that make no pair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from pdproxy.settings.dump import dump
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.external_file import ForeignFile
from pdproxy.settings.load import POOL, EngineFlag, Flag, load
from pdproxy.settings.pools import Pool
from pdproxy.settings.stages import Reader, Stage, bootstrap, check, pairs

Tree = dict[str, Any]
KV = "engine_args.kv_transfer_config"
FILE = ForeignFile(" (file)")


def stage(role: str | None, ident: int | str | None = None, **changes: Any) -> Tree:
    """A stage. A change's name is a dotted path, dots as two underscores; a value of `...` takes
    the key out.
    """
    tree: Tree = {
        "stage_type": "llm",
        "runtime": {"devices": "0"},
        "engine_args": {"model_stage": "thinker"},
    }
    if ident is not None:
        tree["stage_id"] = ident
    if role is not None:
        producer = role == "prefill"
        tree[f"is_{role}_only"] = True
        tree["engine_args"]["kv_transfer_config"] = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_producer" if producer else "kv_consumer",
            "kv_rank": 0 if producer else 1,
            "kv_parallel_size": 2,
        }
    if role == "decode":
        tree["engine_input_source"] = [0]
    for path, value in changes.items():
        *above, last = path.split("__")
        section = tree
        for name in above:
            section = section.setdefault(name, {})
        if value is ...:
            del section[last]
        else:
            section[last] = value
    return tree


def kv(**changes: Any) -> Tree:
    """Changes of a stage's kv_transfer_config."""
    return {f"engine_args__kv_transfer_config__{name}": value for name, value in changes.items()}


def read(*stages: object) -> tuple[Stage, ...]:
    """The flagged stages of a file with these."""
    return Reader(FILE).stages({"stage_args": list(stages)})


def paired(*stages: object) -> list[tuple[int, int]]:
    """Which places in the file are pairs."""
    return [(pair.prefill.index, pair.decode.index) for pair in pairs(read(*stages), FILE)]


def checked(*stages: object, connector: str | None = None) -> str | None:
    """The contract of the pairs."""
    return check(pairs(read(*stages), FILE), FILE, connector)


def refusal(do: Callable[[], object]) -> str:
    """What is told of a mistake: one line, with the file's name at its end."""
    with pytest.raises(SettingsError) as caught:
        do()
    text = str(caught.value)
    assert "\n" not in text
    return text


def refused(*stages: object, connector: str | None = None) -> str:
    """The same of stages that are no pairs."""
    text = refusal(lambda: checked(*stages, connector=connector))
    assert text.endswith(" (file)")
    return text.removesuffix(" (file)")


# -- which stages are a pair


def test_no_flags_no_pairs() -> None:
    """Stages that pass text and sound on are no prefill and decode, and their engines no business
    of ours.
    """
    plain = stage(None, 0), stage(None, 1, engine_input_source=[0], engine_args=7, runtime="?")
    assert paired(*plain) == []
    assert checked(*plain) is None
    assert paired() == []


def test_flags_that_say_no() -> None:
    assert (
        paired(
            stage(None, is_prefill_only=False),
            stage(None, is_decode_only=False, is_prefill_only=None),
        )
        == []
    )


def test_a_pair_in_a_pipeline() -> None:
    """The stages behind it don't matter, nor what else D takes."""
    talker = stage(None, 2, engine_input_source=[1])
    assert paired(
        stage("prefill", 0), stage("decode", 1, engine_input_source=[2, 0]), talker, stage(None, 3)
    ) == [(0, 1)]


@pytest.mark.parametrize(
    ("first", "second", "source"),
    [(0, 1, 0), (10, 20, 10), (10, 20, 0), ("p", "d", "p"), ("p", "d", 0), (None, None, 0)],
    ids=str,
)
def test_a_source_is_an_id_or_a_place(first: Any, second: Any, source: Any) -> None:
    assert paired(
        stage("prefill", first), stage("decode", second, engine_input_source=[source])
    ) == [(0, 1)]


def test_an_id_is_stronger_than_a_place() -> None:
    """With ids that are other stages' places, the ids count."""
    stages = stage("prefill", 1), stage("prefill", 0), stage("decode", 2, engine_input_source=[0])
    assert "no decode stage names it" in refused(*stages)
    stages[2]["engine_input_source"] = [0, 1]
    assert paired(*stages) == [(1, 2), (0, 2)]


def test_a_source_named_twice_is_one_pair() -> None:
    assert paired(stage("prefill", 7), stage("decode", 8, engine_input_source=[7, 0, 7])) == [
        (0, 1)
    ]


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        (([0], [1]), [(0, 2), (1, 3)]),
        (([0, 1], [1, 0]), [(0, 2), (1, 2), (1, 3), (0, 3)]),
        (([0, 1], [1]), [(0, 2), (1, 2), (1, 3)]),
    ],
)
def test_any_number_of_pairs(
    sources: tuple[list[int], ...], expected: list[tuple[int, int]]
) -> None:
    """Where vllm-omni takes one, we take all that go together."""
    decodes = [stage("decode", engine_input_source=one) for one in sources]
    assert paired(stage("prefill"), stage("prefill"), *decodes) == expected
    assert checked(stage("prefill"), stage("prefill"), *decodes) == "nixl"


@pytest.mark.parametrize("sources", [[], None, [5], ["0"], [1], ...])
def test_a_decode_stage_without_its_prefill(sources: Any) -> None:
    """Half a pair would compute every prompt by itself, and nobody would notice."""
    says = refused(stage("prefill", 0), stage("decode", 1, engine_input_source=sources))
    assert says == "stage_args[1].engine_input_source: names no prefill stage (0)"


def test_halves() -> None:
    assert (
        refused(stage("prefill"))
        == "stage_args[0]: no decode stage names it in engine_input_source"
    )
    assert (
        refused(stage("decode"))
        == "stage_args[0].engine_input_source: names no prefill stage (there is none)"
    )


# -- what a stage may hold


@dataclass
class KvConfig:
    kv_connector: str = "NixlConnector"
    kv_role: str = "kv_both"
    engine_id: str = "e"
    kv_connector_extra_config: Tree = field(default_factory=dict)


class EngineArgs(dict[str, Any]):
    """Attributes and items, as vllm-omni's own tests have it."""


@pytest.mark.parametrize(
    "config",
    [
        KvConfig(),
        SimpleNamespace(kv_connector="NixlConnector", kv_role="kv_both", engine_id="e"),
        {"kv_connector": "NixlConnector", "kv_role": "kv_both", "engine_id": "e", "kv_rank": 0},
        '{"kv_connector": "NixlConnector", "kv_role": "kv_both", "engine_id": "e"}',
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_config_in_many_shapes(config: object) -> None:
    """A mapping, what describes itself as one, or JSON as the engine's own flag takes it."""
    args = EngineArgs(kv_transfer_config=config, tensor_parallel_size=2)
    for shape in (args, SimpleNamespace(**args)):
        found = read({"is_prefill_only": True, "engine_args": shape})[0]
        assert (found.kv.connector, found.kv.role, found.kv.engine_id) == (
            "NixlConnector",
            "kv_both",
            "e",
        )
        assert (found.tensor_parallel_size, found.id, found.index) == (2, 0, 0)


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize(
    ("config", "says"),
    [
        (..., "missing: a {role} stage needs one, with kv_connector and kv_role"),
        (None, "missing: a {role} stage needs one, with kv_connector and kv_role"),
        ({}, "an empty mapping (dict): expected kv_connector and kv_role"),
        ([], "can't be read: expected a mapping, got list"),
        ([1], "can't be read: expected a mapping, got list"),
        (5, "can't be read: expected a mapping, got int"),
        (True, "can't be read: expected a mapping, got bool"),
        ("kv_both", 'can\'t be read: expected a mapping or its JSON, got "kv_both"'),
        ("[1]", "can't be read: expected a mapping, got list"),
        (object(), "can't be read: expected a mapping, got object"),
        ({1: 2}, "can't be read: expected a mapping, got dict with names that are no text"),
    ],
    ids=lambda value: "object" if type(value) is object else repr(value),
)
def test_a_config_that_is_none(at: int, config: object, says: str) -> None:
    """A missing or unreadable config is an error that says which one and what it was, never an
    empty one.
    """
    stages = [stage("prefill"), stage("decode")]
    role = ("prefill", "decode")[at]
    stages[at] = stage(role, engine_args__kv_transfer_config=config)
    assert refused(*stages) == f"stage_args[{at}].{KV}: {says.format(role=role)}"


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("connector", [None, "", ...])
def test_no_connector(at: int, connector: Any) -> None:
    """Not even where neither stage has one."""
    for others in (connector, "NixlConnector"):
        stages = [
            stage("prefill", **kv(kv_connector=others)),
            stage("decode", **kv(kv_connector=others)),
        ]
        stages[at] = stage(("prefill", "decode")[at], **kv(kv_connector=connector))
        assert "kv_connector: missing: a " in refused(*stages)


@pytest.mark.parametrize(
    "role", ["kv_consumer", "kv_producer", "kv_both", "producer", None, 3, [], ...]
)
def test_roles(role: Any) -> None:
    """P makes KV or does both, D takes it or does both."""
    for at, wrong in enumerate(("kv_consumer", "kv_producer")):
        name = ("prefill", "decode")[at]
        stages = [stage("prefill"), stage("decode")]
        stages[at] = stage(name, **kv(kv_role=role))
        if role == "kv_both" or role == stage(name)["engine_args"]["kv_transfer_config"]["kv_role"]:
            assert checked(*stages) == "nixl"
            continue
        says = refused(*stages)
        right = {"kv_consumer": "kv_producer", "kv_producer": "kv_consumer"}[wrong]
        assert says.startswith(
            f"stage_args[{at}].{KV}.kv_role: a {name} stage needs {right} or kv_both, got "
        )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"is_prefill_only": 1}, "stage_args[0].is_prefill_only: expected true or false, got 1"),
        (
            {"is_prefill_only": "true"},
            'stage_args[0].is_prefill_only: expected true or false, got "true"',
        ),
        (
            {"is_decode_only": True},
            "stage_args[0]: is_prefill_only and is_decode_only exclude each other",
        ),
        ({"stage_id": True}, "stage_args[0].stage_id: expected a stage's number or name, got true"),
        ({"stage_id": 1}, "stage_args[1].stage_id: 1 is the id of stage_args[0], too"),
        ({"stage_id": []}, "stage_args[0].stage_id: expected a stage's number or name, got a list"),
        (
            {"engine_input_source": 0},
            "stage_args[0].engine_input_source: expected a list of stages, got 0",
        ),
        (
            {"engine_input_source": "0"},
            'stage_args[0].engine_input_source: expected a list of stages, got "0"',
        ),
        (
            {"engine_input_source": {0: 1}},
            "stage_args[0].engine_input_source: expected a list of stages, got a mapping",
        ),
        (
            {"engine_input_source": [1.5]},
            "stage_args[0].engine_input_source[0]: expected a stage's number or name, got 1.5",
        ),
        (
            {"engine_args": [1]},
            "stage_args[0].engine_args: can't be read: expected a mapping, got list",
        ),
        ({"runtime": "gpu"}, "stage_args[0].runtime: can't be read: expected a mapping, got str"),
        (kv(kv_connector=5), f"stage_args[0].{KV}.kv_connector: expected text, got 5"),
        (kv(engine_id=5), f"stage_args[0].{KV}.engine_id: expected text, got 5"),
        (kv(kv_ip=[]), f"stage_args[0].{KV}.kv_ip: expected text, got a list"),
        (kv(kv_buffer_device=1), f"stage_args[0].{KV}.kv_buffer_device: expected text, got 1"),
        (
            kv(kv_buffer_size="much"),
            f'stage_args[0].{KV}.kv_buffer_size: expected a number, got "much"',
        ),
        (
            kv(kv_connector_extra_config="x"),
            (
                f"stage_args[0].{KV}.kv_connector_extra_config: can't be read: expected a mapping, "
                f"got str"
            ),
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_key_that_is_something_else(change: Tree, says: str) -> None:
    """Only keys that decide something are looked at, and those closely."""
    assert refused(stage("prefill", 0, **change), stage("decode", 1)) == says


@pytest.mark.parametrize("size", [0, -1, 1.5, "2", True, []])
def test_a_size_that_is_none(size: Any) -> None:
    says = refused(stage("prefill", engine_args__tensor_parallel_size=size), stage("decode"))
    assert says.startswith(
        "stage_args[0].engine_args.tensor_parallel_size: expected a whole number >= 1, got "
    )


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        (None, "the top level: expected a mapping, got null"),
        ([], "the top level: can't be read: expected a mapping, got list"),
        ("x", "the top level: can't be read: expected a mapping, got str"),
        ({}, "stage_args: expected vllm-omni's list of stages, got null"),
        ({"stage_args": {}}, "stage_args: expected vllm-omni's list of stages, got a mapping"),
        ({"stage_args": "x"}, 'stage_args: expected vllm-omni\'s list of stages, got "x"'),
        ({"stage_args": [None]}, "stage_args[0]: expected a mapping, got null"),
        ({"stage_args": [[]]}, "stage_args[0]: can't be read: expected a mapping, got list"),
    ],
)
def test_a_file_that_is_something_else(tree: object, says: str) -> None:
    assert refusal(lambda: Reader(FILE).stages(tree)) == f"{says} (file)"


# -- what a pair must have in common


def test_one_connector_for_both() -> None:
    says = refused(stage("prefill"), stage("decode", **kv(kv_connector="MooncakeConnector")))
    other = f"stage_args[0].{KV}.kv_connector is NixlConnector"
    assert (
        says
        == f"stage_args[1].{KV}.kv_connector: MooncakeConnector, but {other}: a pair needs the same"
    )


def test_one_contract_for_all_pairs() -> None:
    """A pool runs one."""
    names = kv(kv_connector="ExampleConnector")
    stages = (
        stage("prefill"),
        stage("decode"),
        stage("prefill", **names),
        stage("decode", engine_input_source=[2], **names),
    )
    says = refused(*stages)
    assert says.startswith(f"stage_args[2].{KV}.kv_connector: ExampleConnector, but stage_args[0].")
    assert says.endswith("is NixlConnector: a pool has one contract")


@pytest.mark.parametrize(
    ("name", "ours", "theirs", "same"),
    [
        ("kv_buffer_device", "cuda", "cpu", False),
        ("kv_buffer_device", "cuda", "cuda", True),
        ("kv_buffer_device", "cuda", None, True),
        ("kv_buffer_device", None, "cpu", True),
        ("kv_buffer_size", 1e9, 2e9, False),
        ("kv_buffer_size", 0, 1, False),
        ("kv_buffer_size", 1_000_000_000, "1e9", True),
        ("kv_buffer_size", 1e9, None, True),
    ],
)
def test_buffers(name: str, ours: Any, theirs: Any, same: bool) -> None:
    """The same where both say something; 1e9 is text to YAML."""
    stages = stage("prefill", **kv(**{name: ours})), stage("decode", **kv(**{name: theirs}))
    if same:
        assert checked(*stages) == "nixl"
    else:
        says = refused(*stages)
        assert says.startswith(f"stage_args[1].{KV}.{name}: ")
        assert f"but stage_args[0].{KV}.{name} is " in says


@pytest.mark.parametrize(
    ("connector", "sizes", "well"),
    [
        ("NixlConnector", (2, 2), True),
        ("NixlConnector", (2, 4), True),
        ("NixlConnector", (4, 1), True),
        ("NixlConnector", (2, 3), False),
        ("NixlConnector", (6, 4), False),
        ("NixlPushConnector", (1, 8), True),
        ("MooncakeConnector", (2, 4), True),
        ("MooncakeConnector", (3, 4), False),
        ("MoRIIOConnector", (8, 2), True),
        ("LMCacheConnectorV1", (2, 2), True),
        ("LMCacheConnectorV1", (1, 2), False),
        ("LMCacheMPConnector", (2, 1), False),
        ("ExampleConnector", (1, 2), False),
        ("P2pNcclConnector", (1, 2), False),
    ],
)
def test_tensor_parallel_sizes(connector: str, sizes: tuple[int, int], well: bool) -> None:
    """Some contracts cut KV anew between engines, others pass it rank by rank. One that is not
    given is 1.
    """
    for p, d in {sizes, tuple(... if size == 1 else size for size in sizes)}:
        stages = (
            stage("prefill", **kv(kv_connector=connector)),
            stage("decode", **kv(kv_connector=connector)),
        )
        for one, size in zip(stages, (p, d), strict=True):
            if size is not ...:
                one["engine_args"]["tensor_parallel_size"] = size
        if well:
            assert checked(*stages) is not None
        else:
            says = refused(*stages)
            assert says.startswith(
                f"stage_args[1].engine_args.tensor_parallel_size: {sizes[1]}, but stage 0 "
                f"prefills with"
            )


@pytest.mark.parametrize(
    ("given", "well"), [((True, True), True), ((True, False), False), ((False, False), False)]
)
def test_lmcache_with_one_rank_that_stores(given: tuple[bool, bool], well: bool) -> None:
    """Of MLA one rank has all KV: where LMCache was told so on both sides, sizes don't matter."""
    stages = []
    for at, said in enumerate(given):
        extra = {"lmcache.extra_config": {"save_only_first_rank": said}}
        changes = kv(kv_connector="LMCacheConnectorV1", kv_connector_extra_config=extra)
        stages.append(
            stage(("prefill", "decode")[at], engine_args__tensor_parallel_size=at + 1, **changes)
        )
    if well:
        assert checked(*stages) == "lmcache-pd"
    else:
        assert "lmcache-pd needs the same" in refused(*stages)


def test_each_pair_is_checked() -> None:
    """Not the first alone; and stages that are no pair may differ."""
    p0, p1 = (
        stage("prefill", engine_args__tensor_parallel_size=2),
        stage("prefill", engine_args__tensor_parallel_size=3),
    )
    d0 = stage("decode", engine_args__tensor_parallel_size=4)
    d1 = stage("decode", engine_args__tensor_parallel_size=6, engine_input_source=[1])
    assert checked(p0, p1, d0, d1) == "nixl"
    d1["engine_input_source"] = [1, 0]
    assert checked(p0, p1, d0, d1) == "nixl"
    d0["engine_input_source"] = [0, 1]
    assert refused(p0, p1, d0, d1).startswith(
        "stage_args[2].engine_args.tensor_parallel_size: 4, but stage 1 prefills with 3"
    )


@pytest.mark.parametrize("at", [(0, 1), (0, 2), (1, 2)])
def test_an_engine_id_is_one_engine_s(at: tuple[int, int]) -> None:
    stages = [stage("prefill"), stage("prefill"), stage("decode", engine_input_source=[0, 1])]
    for index in at:
        stages[index]["engine_args"]["kv_transfer_config"]["engine_id"] = "same"
    says = refused(*stages)
    assert says.startswith(
        f"stage_args[{at[1]}].{KV}.engine_id: same is the value of "
        f"stage_args[{at[0]}].{KV}.engine_id, too"
    )


# -- which contract


@pytest.mark.parametrize(
    ("name", "wanted", "contract"),
    [
        ("NixlConnector", None, "nixl"),
        ("NixlPullConnector", None, "nixl"),
        ("NixlPushConnector", None, "nixl-push"),
        ("MooncakeConnector", None, "mooncake"),
        ("LMCacheConnectorV1", None, "lmcache-pd"),
        ("LMCacheConnectorV1", "shared", "shared"),
        ("LMCacheMPConnector", None, "lmcache-mp"),
        ("ExampleConnector", None, "shared"),
        ("MooncakeStoreConnector", None, "shared"),
        ("MooncakeStoreConnector", "kvstore-keys", "kvstore-keys"),
        ("OwnConnector", "nixl", "nixl"),
        ("MultiConnector", "lmcache-pd", "lmcache-pd"),
    ],
)
def test_the_connector_tells_the_contract(name: str, wanted: str | None, contract: str) -> None:
    """Where it can speak several, or is nobody's that we know, the operator says which."""
    stages = stage("prefill", **kv(kv_connector=name)), stage("decode", **kv(kv_connector=name))
    assert checked(*stages, connector=wanted) == contract


def test_a_contract_that_can_t_be_had() -> None:
    """One that nobody knows, and one that the engines don't run."""
    teleport = (
        stage("prefill", **kv(kv_connector="TeleportConnector")),
        stage("decode", **kv(kv_connector="TeleportConnector")),
    )
    assert refused(*teleport).endswith(
        "it is not known which contract TeleportConnector runs: name one by --connector"
    )
    says = refused(stage("prefill"), stage("decode"), connector="shared")
    assert says.endswith("NixlConnector runs nixl, but the pool's connector is shared")


# -- where Mooncake is found


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "http://engine:8998"),
        (kv(kv_connector_extra_config={"mooncake_bootstrap_port": 25201}), "http://engine:25201"),
        (kv(kv_connector_extra_config={"mooncake_bootstrap_port": None}), "http://engine:8998"),
        (kv(kv_connector_extra_config=None), "http://engine:8998"),
        (
            kv(kv_ip="10.0.0.1", kv_connector_extra_config={"mooncake_bootstrap_port": "25201"}),
            "http://10.0.0.1:25201",
        ),
        (kv(kv_ip="fd00::1"), "http://[fd00::1]:8998"),
        (kv(kv_ip="[fd00::1]"), "http://[fd00::1]:8998"),
        ({"runtime__env": {"VLLM_MOONCAKE_BOOTSTRAP_PORT": "9001"}}, "http://engine:9001"),
        (
            {"runtime__env": {"VLLM_MOONCAKE_BOOTSTRAP_PORT": 9001, "OTHER": []}},
            "http://engine:9001",
        ),
        (
            {
                "runtime__env": {"VLLM_MOONCAKE_BOOTSTRAP_PORT": "9001"},
                **kv(kv_connector_extra_config={"mooncake_bootstrap_port": 9001}),
            },
            "http://engine:9001",
        ),
        (
            kv(kv_ip="x", kv_connector_extra_config={"bootstrap_server_address": "b:7"}),
            "http://b:7",
        ),
    ],
    ids=str,
)
def test_bootstrap_addresses(changes: Tree, expected: str) -> None:
    """By the file, else at the engine's host and the pool's port."""
    found = read(stage("prefill", **{**kv(kv_connector="MooncakeConnector"), **changes}))[0]
    assert bootstrap(found, "engine", 8998) == expected


@pytest.mark.parametrize("port", [0, 65536, "x", "-1", 1.5, True, []])
def test_ports_that_are_none(port: Any) -> None:
    says = refused(
        stage("prefill", **kv(kv_connector_extra_config={"mooncake_bootstrap_port": port})),
        stage("decode"),
    )
    key = f"stage_args[0].{KV}.kv_connector_extra_config.mooncake_bootstrap_port"
    assert says.startswith(f"{key}: expected a port, 1 to 65535, got ")


def test_ports_that_contradict_each_other() -> None:
    """The engine obeys one, vllm-omni's orchestrator the other."""
    changes = kv(kv_connector_extra_config={"mooncake_bootstrap_port": 2})
    says = refused(
        stage("prefill", runtime__env={"VLLM_MOONCAKE_BOOTSTRAP_PORT": "1"}, **changes),
        stage("decode"),
    )
    assert says.startswith("stage_args[0].runtime.env.VLLM_MOONCAKE_BOOTSTRAP_PORT: 1, but ")
    assert says.endswith("mooncake_bootstrap_port is 2")


# -- the pool that comes of it


def write(folder: Path, *stages: Tree, name: str = "stages.yaml", **more: Any) -> Path:
    """A file with these stages."""
    path = folder / name
    path.write_text(
        yaml.safe_dump(
            {"async_chunk": False, "stage_args": list(stages), "runtime": {"enabled": True}, **more}
        )
    )
    return path


def pool(
    path: Path, *engines: EngineFlag, config: Path | None = None, flags: tuple[Flag, ...] = ()
) -> Pool:
    """The pool of a stage configuration."""
    return load(config, {}, flags, engines, stage_config=path).pool


P, D = EngineFlag("prefill", "p:1"), EngineFlag("decode", "d:2")


def test_stages_are_engines(tmp_path: Path) -> None:
    """With their role, size and id, at the URLs of the flags in the file's order."""
    path = write(
        tmp_path,
        stage("prefill", engine_args__tensor_parallel_size=2, **kv(engine_id="one")),
        stage("decode", engine_input_source=[0, 2]),
        stage("prefill"),
        stage(None),
    )
    found = pool(path, D, P, EngineFlag("prefill", "https://p:3"), EngineFlag("aggregated", "a:4"))
    assert [(engine.url, engine.role) for engine in found.nodes] == [
        ("http://p:1", "prefill"),
        ("http://d:2", "decode"),
        ("https://p:3", "prefill"),
        ("http://a:4", "aggregated"),
    ]
    facts = [engine.facts for engine in found.nodes]
    assert [fact.tensor_parallel_size for fact in facts] == [2, 1, 1, None]
    assert [fact.engine_id for fact in facts] == ["one", None, None, None]
    assert [engine.sources for engine in found.nodes] == [(), (), (), ()], (
        "all of all: nothing to be said"
    )
    assert found.connector == "nixl"


def test_pairs_stay_apart(tmp_path: Path) -> None:
    """A decode engine takes KV from the engines of its stage's sources alone."""
    stages = (
        stage("prefill"),
        stage("prefill"),
        stage("decode", engine_input_source=[1]),
        stage("decode"),
    )
    path = write(tmp_path, *stages)
    found = pool(path, P, EngineFlag("prefill", "p:3"), D, EngineFlag("decode", "d:4"))
    assert [engine.sources for engine in found.nodes] == [(), (), ("http://p:3",), ("http://p:1",)]


@pytest.mark.parametrize(
    ("changes", "url"),
    [
        ({"runtime__url": "http://x:1"}, "http://x:1"),
        ({"runtime__url": "x:1"}, "http://x:1"),
        ({"runtime__url": "https://X"}, "https://x:443"),
        ({"engine_args__port": 81}, "http://127.0.0.1:81"),
        ({"engine_args__port": "81", "engine_args__host": "x"}, "http://x:81"),
        ({"engine_args__port": 81, "engine_args__host": "::1"}, "http://[::1]:81"),
    ],
    ids=str,
)
def test_a_stage_s_own_url(tmp_path: Path, changes: Tree, url: str) -> None:
    """Its own, or vLLM's names for host and port. It takes no URL of the flags then."""
    path = write(tmp_path, stage("prefill", **changes), stage("decode"))
    assert [engine.url for engine in pool(path, D).nodes] == [url, "http://d:2"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"runtime__url": "x:1", "engine_args__port": 1},
            "stage_args[0].runtime.url: excludes engine_args.host and engine_args.port: give one",
        ),
        (
            {"engine_args__host": "x"},
            "stage_args[0].engine_args.host: has no effect without engine_args.port",
        ),
        (
            {"engine_args__host": "0.0.0.0", "engine_args__port": 1},
            "stage_args[0].engine_args.host: 0.0.0.0 is an address to listen on: give runtime.url",
        ),
        (
            {"engine_args__port": 0},
            "stage_args[0].engine_args.port: expected a port, 1 to 65535, got 0",
        ),
        (
            {"runtime__url": "ftp://x:1"},
            (
                'stage_args[0].runtime.url: "ftp://x:1": expected http://host:port or '
                "https://host:port"
            ),
        ),
    ],
)
def test_a_url_that_is_none(tmp_path: Path, changes: Tree, says: str) -> None:
    path = write(tmp_path, stage("prefill", **changes), stage("decode"))
    assert refusal(lambda: pool(path, D)) == f"{says} (stage config {path})"


@pytest.mark.parametrize(
    ("engines", "says"),
    [
        (
            (D,),
            (
                "--prefill: 0 given, expected 1: one for each prefill stage without a URL of its "
                "own "
                "(stage_args[0])"
            ),
        ),
        (
            (P,),
            (
                "--decode: 0 given, expected 1: one for each decode stage without a URL of its own "
                "(stage_args[1])"
            ),
        ),
        ((P, P, D), "--prefill: 2 given, expected 1: "),
        ((P, D, D), "--decode: 2 given, expected 1: "),
    ],
)
def test_urls_and_stages_are_as_many(
    tmp_path: Path, engines: tuple[EngineFlag, ...], says: str
) -> None:
    """One left over would be an engine that nobody checked."""
    path = write(tmp_path, stage("prefill"), stage("decode"))
    assert refusal(lambda: pool(path, *engines)).startswith(says)


def test_no_url_is_left_over(tmp_path: Path) -> None:
    path = write(
        tmp_path, stage("prefill", runtime__url="x:1"), stage("decode", runtime__url="x:2")
    )
    says = refusal(lambda: pool(path, P))
    assert says.startswith(
        "--prefill: 1 given, expected 0: one for each prefill stage without a URL of its own (none)"
    )


def test_a_file_without_flags_adds_nothing(tmp_path: Path) -> None:
    """No PD in it: the engines are those of the flags, and there must be some."""
    path = write(tmp_path, stage(None))
    assert [engine.url for engine in pool(path, P, D).nodes] == ["http://p:1", "http://d:2"]
    assert "no engine is configured" in refusal(lambda: pool(path))


def test_stages_come_behind_the_settings_file(tmp_path: Path) -> None:
    """Its nodes, its connector and its other settings stay."""
    config = tmp_path / "x.yaml"
    config.write_text(
        "pools: [{name: gpu, connector: nixl, nodes: [{url: 'http://a:4', role: aggregated}]}]"
    )
    found = pool(write(tmp_path, stage("prefill"), stage("decode")), P, D, config=config)
    assert found.name == "gpu"
    assert [engine.role for engine in found.nodes] == ["aggregated", "prefill", "decode"]


def test_the_stages_connector_is_the_pool_s(tmp_path: Path) -> None:
    """In place of the default; where the operator named one, it is that one."""
    names = kv(kv_connector="LMCacheMPConnector")
    path = write(tmp_path, stage("prefill", **names), stage("decode", **names))
    assert pool(path, P, D).connector == "lmcache-mp"
    assert (
        pool(path, P, D, flags=(Flag("--connector", f"{POOL}connector", "shared"),)).connector
        == "shared"
    )


def test_the_operator_s_connector_must_fit(tmp_path: Path) -> None:
    stages = (
        stage("prefill", **kv(kv_connector="OwnConnector")),
        stage("decode", **kv(kv_connector="OwnConnector")),
    )
    path = write(tmp_path, *stages)
    assert "it is not known which contract OwnConnector runs" in refusal(lambda: pool(path, P, D))
    assert (
        pool(path, P, D, flags=(Flag("--connector", f"{POOL}connector", "nixl"),)).connector
        == "nixl"
    )


def mooncake(*more: Tree) -> list[Tree]:
    """Two prefill stages on one machine, and a decode stage, that have Mooncake; `more` changes the
    first two.
    """
    own = kv(kv_connector="OurMooncakeConnector")
    prefills = [stage("prefill", **{**own, **changes}) for changes in more]
    return [*prefills, stage("decode", engine_input_source=[0, 1], **own)]


def test_bootstrap_addresses_of_a_pool(tmp_path: Path) -> None:
    """In the prefill engines' facts; the port that nobody gave is the pool's."""
    extra = kv(kv_connector_extra_config={"mooncake_bootstrap_port": 25201})
    config = tmp_path / "x.yaml"
    config.write_text("pools: [{connector: mooncake, bootstrap_port: 25202}]")
    found = pool(
        write(tmp_path, *mooncake(extra, {})), P, EngineFlag("prefill", "p:3"), D, config=config
    )
    assert [engine.facts.bootstrap for engine in found.nodes] == [
        "http://p:25201",
        "http://p:25202",
        None,
    ]


def test_a_contract_without_a_bootstrap_server_gets_no_address(tmp_path: Path) -> None:
    """Whatever the connector's name is: two prefill stages of one host have no port in common."""
    flags = (Flag("--connector", f"{POOL}connector", "nixl"),)
    found = pool(
        write(tmp_path, *mooncake({}, {})), P, EngineFlag("prefill", "p:3"), D, flags=flags
    )
    assert [engine.facts.bootstrap for engine in found.nodes] == [None, None, None]


def test_vllms_own_mooncake_runs_its_contract(tmp_path: Path) -> None:
    stages = (
        stage("prefill", **kv(kv_connector="MooncakeConnector")),
        stage("decode", **kv(kv_connector="MooncakeConnector")),
    )
    found = pool(write(tmp_path, *stages), P, D)
    assert found.connector == "mooncake"
    assert [engine.facts.bootstrap for engine in found.nodes] == ["http://p:8998", None]


def test_one_port_is_not_bound_twice(tmp_path: Path) -> None:
    """On one machine. On two it is two ports."""
    flags = (Flag("--connector", f"{POOL}connector", "mooncake"),)
    path = write(tmp_path, *mooncake({}, {}))
    says = refusal(lambda: pool(path, P, EngineFlag("prefill", "p:3"), D, flags=flags))
    assert says.startswith(
        "stage_args[1]: its Mooncake bootstrap server would be at http://p:8998, like that of "
        "stage_args[0]"
    )
    engines = pool(path, P, EngineFlag("prefill", "q:3"), D, flags=flags).nodes
    assert [engine.facts.bootstrap for engine in engines] == [
        "http://p:8998",
        "http://q:8998",
        None,
    ]


@pytest.mark.parametrize("text", ["stage_args: [", "stage_args: []\nstage_args: []", "", "\0"])
def test_an_unreadable_file(tmp_path: Path, text: str) -> None:
    """Broken, empty, or not there: an error that names the file."""
    path = tmp_path / "stages.yaml"
    path.write_text(text)
    assert str(path) in refusal(lambda: pool(path, P, D))
    assert str(tmp_path / "none") in refusal(lambda: pool(tmp_path / "none", P, D))


def test_what_is_printed_can_be_loaded(tmp_path: Path) -> None:
    """`config print` shows the stages as nodes; that file needs no stage configuration any more."""
    stages = (
        stage("prefill"),
        stage("prefill"),
        stage("decode"),
        stage("decode", engine_input_source=[1]),
    )
    settings = load(
        None,
        {},
        (),
        (P, EngineFlag("prefill", "p:3"), D, EngineFlag("decode", "d:4")),
        stage_config=write(tmp_path, *stages),
    )
    printed = tmp_path / "printed.yaml"
    printed.write_text(dump(settings))
    assert load(printed, {}) == settings


# -- sources, which a settings file may name as well


@pytest.mark.parametrize(
    ("engines", "says"),
    [
        (
            [
                {"url": "http://p:1", "role": "prefill", "sources": ["http://p:1"]},
                {"url": "http://d:2", "role": "decode"},
            ],
            "pools[0].nodes[0].sources: only a decode engine takes KV",
        ),
        (
            [
                {"url": "http://p:1", "role": "prefill"},
                {"url": "http://d:2", "role": "decode", "sources": ["http://d:2"]},
            ],
            "pools[0].nodes[1].sources[0]: http://d:2 is no prefill engine of this pool",
        ),
        (
            [
                {"url": "http://p:1", "role": "prefill"},
                {"url": "http://d:2", "role": "decode", "sources": ["p"]},
            ],
            'pools[0].nodes[1].sources[0]: "p": expected http://host:port or https://host:port',
        ),
    ],
)
def test_sources_that_are_none(tmp_path: Path, engines: list[Tree], says: str) -> None:
    config = tmp_path / "x.yaml"
    config.write_text(yaml.safe_dump({"pools": [{"nodes": engines}]}))
    assert refusal(lambda: load(config, {})) == f"{says} (file {config})"


def test_sources_are_spelled_as_urls_are(tmp_path: Path) -> None:
    config = tmp_path / "x.yaml"
    decode = {"url": "http://d:2", "role": "decode", "sources": ["http://P:80/"]}
    config.write_text(
        yaml.safe_dump({"pools": [{"nodes": [{"url": "http://p", "role": "prefill"}, decode]}]})
    )
    assert load(config, {}).pool.nodes[1].sources == ("http://p:80",)


def test_the_documented_example(tmp_path: Path) -> None:
    """docs/guide/models.md shows a file that is taken, and says what becomes of it."""
    page = (Path(__file__).parents[2] / "docs" / "guide" / "models.md").read_text()
    path = tmp_path / "stages.yaml"
    example = page.partition("## vllm-omni's stage files")[2]
    path.write_text(example.partition("```yaml\n")[2].partition("```")[0])
    engines = pool(path).nodes
    assert [(engine.url, engine.role) for engine in engines] == [
        ("http://10.0.0.1:8200", "prefill"),
        ("http://10.0.0.2:8300", "decode"),
    ]
    assert [engine.facts.tensor_parallel_size for engine in engines] == [2, 4]
    assert [engine.facts.engine_id for engine in engines] == ["thinker-p", "thinker-d"]
