"""Values that processes send each other are JSON: they arrive unchanged, and no peer's code
runs.
"""

import ast
import json
import math
import os
import pickle
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_nodes import _free_port
from tests.support.commands import Trainbox, clean_environment, finish
from tests.support.hostile import Evil
from tests.support.paths import SUPPORT

ROOT = Path(__file__).parents[2]
SAME_VERSION = "start the same version of Trainbox on each machine"
VALUES: list[Any] = [
    *(
        None,
        True,
        0,
        -(2**62),
        0.1,
        -0.0,
        1e-310,
        math.pi,
        math.inf,
        math.nan,
        "",
        "ä\n\x1b[31m\ud800",
        [],
        {},
    ),
    {"accuracy": 0.1 + 0.2, "loss": math.nan, "deep": [[1, [2.5, None]], {"x": []}]},
]


# Two ranks, forked from a process that has loaded torch. Each check runs on both and returns what
# rank 0 found.


def _values(process: Any) -> list[str]:
    first = [
        repr(process.from_first(value if process.is_first else "rank 1's own")) for value in VALUES
    ]
    each = [[repr(one) for one in process.from_each([process.rank, value])] for value in VALUES]
    assert each == [[repr([rank, value]) for rank in range(2)] for value in VALUES]
    return first


def _sends_a_pickle(process: Any) -> str:
    from tests.support import hostile
    from trainer.parallel import world as distributed

    if not process.is_first:
        distributed._packed = hostile.packed
    try:
        return repr(process.from_each(Evil() if process.rank else 0))
    except distributed.NetworkFailure as failure:
        return str(failure)


def _sends_other_bytes(process: Any) -> list[str]:
    """What rank 0 makes of sizes and bytes that a peer chose."""
    import torch
    import torch.distributed as dist

    from trainer.parallel import world as distributed

    found = []
    for size, sent in (
        (-1, b""),
        (0, b""),
        (2**40, b""),
        (8, b"[" * 8),
        (3, b"\xff\xfe\x00"),
        (4, b"nul]"),
    ):
        if process.is_first:
            try:
                process.from_each(None)
            except distributed.NetworkFailure as failure:
                found.append(str(failure))
        else:
            dist.all_gather(
                [torch.empty(1, dtype=torch.int64) for _ in range(2)], torch.tensor([size])
            )
            if sent:
                bytes_N = torch.zeros(max(len(sent), 4), dtype=torch.uint8)
                bytes_N[: len(sent)] = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
                dist.all_gather([torch.empty_like(bytes_N) for _ in range(2)], bytes_N)
    return found


def _uses_objects(process: Any) -> list[str]:
    """torch's own object collectives between two machines, as torch.compile may call them."""
    import torch.distributed as dist

    from trainer.errors import WrongUse

    plain: list[Any] = [None, None]
    dist.all_gather_object(plain, [0.5, "a", {"b": (1, None)}])
    found = [repr(plain[1])]
    values: list[Any] = [None, None]
    try:
        dist.all_gather_object(values, Evil() if process.rank else 0)
    except WrongUse as refused:
        found.append(str(refused))
    return found


def _serve(folder: str) -> None:
    """Run each check on two forked ranks of its own, and print what rank 0 found."""
    import trainer.session  # noqa: F401 - loaded once

    os.environ.update(WORLD_SIZE="2", GROUP_WORLD_SIZE="2", LOCAL_RANK="0")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    for check in CHECKS:
        Evil.marker = f"{folder}/{check.__name__}"
        os.environ["TRAINBOX_STORE"] = f"{folder}/store-{check.__name__}"
        for rank in (0, 1):
            if os.fork() == 0:
                os.environ["RANK"] = str(rank)
                _rank(check)
        codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(2)]
        assert codes == [0, 0], (check, codes)


CHECKS = (_values, _sends_a_pickle, _sends_other_bytes, _uses_objects)


def _rank(check: Callable[[Any], Any]) -> None:
    try:
        from trainer.parallel.world import World

        process = World.start("cpu")
        found = check(process)
        if process.is_first:
            print(json.dumps(found), flush=True)
        process.barrier()
        os._exit(0)
    except BaseException:  # noqa: BLE001 - a fork must not return into the test
        traceback.print_exc()
        os._exit(1)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of the markers, and what each check found."""
    folder = tmp_path_factory.mktemp("exchange")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from tests.distributed.test_exchange import _serve; _serve({str(folder)!r})",
        ],
        cwd=ROOT,
        env=clean_environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    lines = map(json.loads, done.stdout.splitlines())
    return folder, {check.__name__: line for check, line in zip(CHECKS, lines, strict=True)}


Found = tuple[Path, dict[str, Any]]


def test_values_arrive_bit_by_bit(ran: Found) -> None:
    assert ran[1]["_values"] == [repr(value) for value in VALUES]


def test_no_check_ran_a_peers_code(ran: Found) -> None:
    assert [path.name for path in ran[0].iterdir() if not path.name.startswith("store-")] == []


def test_a_pickle_from_a_peer_is_not_loaded(ran: Found) -> None:
    assert (
        ran[1]["_sends_a_pickle"] == f"another process sent bytes that are not JSON: {SAME_VERSION}"
    )


def test_sizes_and_bytes_that_a_peer_chose_are_refused(ran: Found) -> None:
    sizes = [
        f"another process announced {size} bytes instead of 1 to 16777216"
        for size in (-1, 0, 2**40)
    ]
    garbled = ["another process sent bytes that are not JSON"] * 3
    assert ran[1]["_sends_other_bytes"] == [f"{text}: {SAME_VERSION}" for text in sizes + garbled]


def test_objects_of_torchs_own_collectives_are_refused_between_machines(ran: Found) -> None:
    plain, refused = ran[1]["_uses_objects"]
    assert plain == "[0.5, 'a', {'b': (1, None)}]"
    assert re.fullmatch(
        r"a collective of torch.distributed received an object of _?io.open from another machine, "
        r"and unpickling an object runs code: exchange tensors or plain values",
        refused,
    )


@pytest.mark.parametrize("value", [(1, 2), {1: "a"}, {"a": (1,)}])
def test_a_value_that_json_would_change_is_a_mistake(value: Any) -> None:
    from trainer.parallel.world import _packed

    with pytest.raises(AssertionError, match="JSON would change"):
        _packed(value)


def test_a_node_that_sends_pickles_ends_the_training_with_7(trainbox: Trainbox) -> None:
    """The whole way: it joins as node 1, trains along, and sends a pickle when values are
    exchanged.
    """
    place = (
        "--nnodes",
        "2",
        "--rdzv-timeout-s",
        "60",
        "--rdzv-endpoint",
        f"127.0.0.1:{_free_port()}",
    )
    words = (
        "train",
        "tests.support.tiny:Tiny",
        "--device",
        "cpu",
        "--run",
        "r",
        "--max-steps",
        "4",
    )
    here = {"PYTHONPATH": str(ROOT)}
    first = trainbox.start(*words, *place, "--node-rank", "0", env=here)
    marker = trainbox.folder / "marker"
    argv = json.loads(trainbox("plan", *words[1:], *place, "--node-rank", "1", env=here).out)[
        "argv"
    ]
    begin = argv.index("trainer.launch.torchrun") + 1
    rank = argv.index("-m", begin)
    hostile = [*argv[begin:rank], "--", str(SUPPORT / "hostile.py"), str(marker), *argv[rank + 3 :]]
    other = trainbox.start(
        *hostile, module="trainer.launch.torchrun", env=here | {"TRAINBOX_DEVICE": "cpu"}
    )
    ended, hostile_end = finish(first), finish(other)
    assert ended.code == 7, (ended, hostile_end)
    assert "another process sent bytes that are not JSON" in ended.err, (ended, hostile_end)
    assert "Traceback" not in ended.err
    assert not marker.exists()


# The sources.


def _unpickles(node: ast.AST) -> bool:
    """Whether the call can run code that its data chooses."""
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
    words = {word.arg: word.value for word in node.keywords}
    if owner in ("pickle", "marshal", "dill", "joblib", "shelve"):
        return name in ("load", "loads", "Unpickler", "open")
    if (owner, name) == ("torch", "load"):
        weights_only = words.get("weights_only")
        return not (isinstance(weights_only, ast.Constant) and weights_only.value is True)
    if name == "recv":  # of multiprocessing's connections; a socket's names a size
        return not node.args
    if owner in ("dist", "torch.distributed"):  # torch's object collectives
        return name.endswith(("_object", "_object_list"))
    return "allow_pickle" in words


def test_no_source_unpickles_what_another_program_sends() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {ast.unparse(node)}"
        for package in ("entrypoint", "trainer", "trainbox")
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_bytes()))
        if _unpickles(node)
    ]
    # The driver's answers, from a process that it has forked itself.
    assert found == ["entrypoint/driver/process.py: pickle.loads(_read_exactly(end, size))"]
    for text in (
        "torch.load(f)",
        "torch.load(f, weights_only=x)",
        "dist.all_gather_object(a, b)",
        "pickle.loads(x)",
        "c.recv()",
    ):
        assert _unpickles(ast.parse(text, mode="eval").body), text
    assert not _unpickles(ast.parse("torch.load(f, weights_only=True)", mode="eval").body)
    assert pickle.dumps(Evil())
