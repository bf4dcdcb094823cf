"""--init and --freeze on two processes."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.ranks import Ranks
from tests.support.transfer import TRANSFER, Transfer


@pytest.fixture
def file(ranks: Ranks) -> Path:
    """Write the weights of a model with another number of classes."""
    torch.manual_seed(3)
    save_file(dict(Transfer(classes=4).build_model().state_dict()), ranks.folder / "w.safetensors")
    return ranks.folder / "w.safetensors"


def _command(run: str, *words: str) -> tuple[str, ...]:
    return (
        *("train", TRANSFER, "--device", "cpu", "--threads", "1", "--max-steps", "3"),
        *("--init", "w.safetensors", "--freeze", "body", "--run", run, *words),
    )


def _weights(ranks: Ranks, run: str) -> dict[str, Any]:
    path = ranks.folder / "runs" / run / "checkpoints/step-00000003.pt"
    weights: dict[str, Any] = torch.load(path, weights_only=True)["model"]
    return weights


def test_one_and_two_processes_have_the_same_bits(ranks: Ranks, file: Path) -> None:
    one, two = (ranks(n, *_command(f"on-{n}", "--shards", "2")) for n in (1, 2))
    assert one.codes == [0] and two.codes == [0, 0], two.errs
    assert "w.safetensors: 7 of 9 tensors; head is new (3 classes)\n" in two.out
    assert one.digest == two.digest


def test_another_file_on_another_machine_is_refused(ranks: Ranks, file: Path) -> None:
    other = ranks.folder / "other"
    other.mkdir()
    given = load_file(file)
    save_file({**given, "body.0.bias": given["body.0.bias"] + 1}, other / "w.safetensors")
    ended = ranks(2, *_command("r"), env_by_rank=[{}, {"OTHER_FOLDER": "other"}])
    assert ended.codes == [2, 2]
    assert "the SHA-256 of --init w.safetensors is " in ended.errs[0], ended.errs
    assert "but differs in another process: copy the same file to all machines" in ended.errs[0]


def test_other_weights_on_another_machine_are_not_evaluated(ranks: Ranks, file: Path) -> None:
    ranks(1, *_command("r"))
    folder = ranks.folder / "other/runs/r/checkpoints"
    shutil.copytree(ranks.folder / "runs/r", folder.parent)
    saved = torch.load(folder / "step-00000003.pt", weights_only=True)
    saved["model"]["head.bias"] += 1
    torch.save(saved, folder / "step-00000003.pt")
    command = ("evaluate", "runs/r", "--device", "cpu")
    ended = ranks(2, *command, env_by_rank=[{}, {"OTHER_FOLDER": "other"}])
    assert ended.codes == [2, 2], ended.errs
    assert "the digest of the weights in runs/r/checkpoints/step-00000003.pt is " in ended.errs[0]
    assert "but differs in another process: copy the same run to all machines" in ended.errs[0]


def test_fsdp_loads_shares_and_keeps_frozen_weights(ranks: Ranks, file: Path) -> None:
    ranks(1, *_command("one"))
    ended = ranks(2, *_command("fsdp"), strategy="fsdp")
    assert ended.codes == [0, 0], ended.errs
    one, fsdp, given = _weights(ranks, "one"), _weights(ranks, "fsdp"), load_file(file)
    frozen = [name for name in given if name.startswith("body")]
    assert len(frozen) == 7
    for name in frozen:
        assert torch.equal(fsdp[name], given[name]), name
    # Both heads start from the same new weights and train on the same batches.
    torch.testing.assert_close(fsdp["head.weight"], one["head.weight"])
