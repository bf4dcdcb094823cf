"""Values that processes send each other are JSON.

They arrive unchanged, and no code of another process runs.
"""

import ast
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Trainbox, finish
from tests.support.exchange_checks import VALUES
from tests.support.hostile import Evil
from tests.support.nodes import free_port
from tests.support.paths import SUPPORT
from tests.support.ranks import EndedRanks, Ranks
from tests.support.tiny import TINY
from trainbox.processes.environment import LaunchFacts

ROOT = Path(__file__).parents[2]
SAME_VERSION = "start the same version of Trainbox on each machine"


def found_by_ranks(ranks: Ranks, check: str) -> EndedRanks:
    """Run a check of `exchange_checks` on two ranks of two machines; no peer's code may run."""
    marker = ranks.folder / "marker"
    ended = ranks(
        2,
        check,
        str(marker),
        module="tests.support.exchange_checks",
        env={"GROUP_WORLD_SIZE": "2"},
    )
    assert ended.codes == [0, 0], ended
    assert not marker.exists()
    return ended


def _found(ranks: Ranks, check: str) -> Any:
    return json.loads(found_by_ranks(ranks, check).out)


def test_values_arrive_bit_by_bit(ranks: Ranks) -> None:
    assert _found(ranks, "values") == [repr(value) for value in VALUES]


def test_gradients_that_are_added_during_the_backward_have_the_bits_of_one_process(
    ranks: Ranks,
) -> None:
    assert _found(ranks, "gradients_of_many_buckets") == [True] * 3


def test_a_pickle_from_a_peer_is_not_loaded(ranks: Ranks) -> None:
    assert (
        _found(ranks, "sends_a_pickle")
        == f"another process sent bytes that are not JSON: {SAME_VERSION}"
    )


def test_sizes_and_bytes_that_a_peer_chose_are_refused(ranks: Ranks) -> None:
    sizes = [
        f"another process announced {size} bytes instead of 1 to 16777216"
        for size in (-1, 0, 2**40)
    ]
    garbled = ["another process sent bytes that are not JSON"] * 3
    assert _found(ranks, "sends_other_bytes") == [
        f"{text}: {SAME_VERSION}" for text in sizes + garbled
    ]


def test_objects_of_torchs_own_collectives_are_refused_between_machines(ranks: Ranks) -> None:
    plain, refused = _found(ranks, "uses_objects")
    assert plain == "[0.5, 'a', {'b': (1, None)}]"
    assert re.fullmatch(
        r"a collective of torch.distributed received an object of _?io.open from another machine, "
        r"and unpickling an object runs code: exchange tensors or plain values",
        refused,
    )


@pytest.mark.parametrize("value", [(1, 2), {1: "a"}, {"a": (1,)}])
def test_a_value_that_json_would_change_is_a_mistake(value: Any) -> None:
    from trainer.parallel.plain_values import packed

    with pytest.raises(AssertionError, match="JSON would change"):
        packed(value)


def test_a_rank_that_sends_pickles_ends_the_training_with_7(ranks: Ranks) -> None:
    marker = ranks.folder / "marker"
    words = ("train", TINY, "--device", "cpu", "--run", "r", "--max-steps", "4")
    ended = ranks(
        2,
        str(marker),
        *words,
        module="tests.support.hostile",
        env={"GROUP_WORLD_SIZE": "2"},
    )
    assert ended.codes[0] == 7, ended
    assert "another process sent bytes that are not JSON" in ended.errs[0]
    assert "Traceback" not in ended.errs[0]
    assert not marker.exists()


@pytest.mark.slow
def test_a_node_that_sends_pickles_ends_the_training_with_7(trainbox: Trainbox) -> None:
    """Start the real command on two nodes, where node 1 sends pickles instead of values."""
    place = (
        "--nnodes",
        "2",
        "--rdzv-timeout-s",
        "60",
        "--rdzv-endpoint",
        f"127.0.0.1:{free_port()}",
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
        "--no-rehearsal",
    )
    here = {"PYTHONPATH": str(ROOT)}
    first = trainbox.start(*words, *place, "--node-rank", "0", env=here)
    marker = trainbox.folder / "marker"
    argv = json.loads(trainbox("plan", *words[1:], *place, "--node-rank", "1", env=here).out)[
        "argv"
    ]
    begin = argv.index("trainer.programs.ranks.torchrun") + 1
    rank = argv.index("-m", begin)
    hostile = [*argv[begin:rank], "--", str(SUPPORT / "hostile.py"), str(marker), *argv[rank + 3 :]]
    other = trainbox.start(
        *hostile, module="trainer.programs.ranks.torchrun", env=here | LaunchFacts("cpu").variable()
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
    allow = words.get("allow_pickle")
    return allow is not None and not (isinstance(allow, ast.Constant) and allow.value is False)


def test_no_source_unpickles_what_another_program_sends() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {ast.unparse(node)}"
        for package in ("entrypoint", "trainer", "trainbox")
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_bytes()))
        if _unpickles(node)
    ]
    # Only one function reads the files of torch.save, so all readers have the same reasons.
    readers = [
        path.stem
        for package in ("entrypoint", "trainer", "trainbox")
        for path in (ROOT / package).rglob("*.py")
        if "torch.load(" in path.read_text()
    ]
    assert readers == ["tensor_files"]
    # The answers of the driver's process and the batches of loader workers, which are forks.
    assert found == [
        "entrypoint/driver/process.py: pickle.loads(_read_exactly(end, size))",
        "trainer/data/sending.py: pickle.loads(self.content)",
    ]
    for text in (
        "torch.load(f)",
        "torch.load(f, weights_only=x)",
        "np.load(f, allow_pickle=True)",
        "np.load(f, allow_pickle=x)",
        "dist.all_gather_object(a, b)",
        "pickle.loads(x)",
        "c.recv()",
    ):
        assert _unpickles(ast.parse(text, mode="eval").body), text
    for text in ("torch.load(f, weights_only=True)", "np.load(f, allow_pickle=False)"):
        assert not _unpickles(ast.parse(text, mode="eval").body), text
    assert pickle.dumps(Evil())
