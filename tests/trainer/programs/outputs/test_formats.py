"""The formats of files that a script can leave, whole and damaged."""

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from entrypoint.drill.compare_files import SUFFIXES
from tests.support.unsafe_pickle import MakesFolder
from trainbox.errors import WrongUse
from trainer.programs.outputs.__main__ import main
from trainer.programs.outputs.contents import digest
from trainer.programs.outputs.differences import first_difference
from trainer.programs.outputs.formats import FORMATS, read_entries


def test_the_drill_knows_the_same_formats() -> None:
    assert set(SUFFIXES) == FORMATS.keys()


def _kinds(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {
        ".".join(map(str, key)): (entry.kind, entry.values.shape)
        for key, entry in read_entries(path).items()
    }


def _write(path: Path, weight: float = 1.0) -> Path:
    """Write a file of the format that the suffix names, with one number that may vary."""
    if path.suffix == ".safetensors":
        save_file({"w": torch.tensor([weight, 2.0], dtype=torch.bfloat16)}, path)
    elif path.suffix in (".pt", ".pth", ".bin"):
        torch.save({"model": {"0.w": torch.tensor([weight])}, "epoch": 3}, path)
    elif path.suffix == ".npz":
        np.savez(path, w=np.array([weight]), step=np.array(3))
    elif path.suffix == ".npy":
        np.save(path, np.array([[weight]], np.float16))
    elif path.suffix == ".json":
        path.write_text(json.dumps({"loss": [weight, 2], "name": "a", "last": {"step": 3}}))
    else:
        path.write_text(f"epoch,loss,note\n1,{weight},a\n2,,b\n")
    return path


_FORMATS = {
    "f.safetensors": {"w": ("bfloat16", (2,))},
    "f.pt": {"model.0.w": ("float32", (1,)), "epoch": ("int64", ())},
    "f.pth": {"model.0.w": ("float32", (1,)), "epoch": ("int64", ())},
    "f.bin": {"model.0.w": ("float32", (1,)), "epoch": ("int64", ())},
    "f.npz": {"w": ("float64", (1,)), "step": ("int64", ())},
    "f.npy": {"array": ("float16", (1, 1))},
    "f.json": {"loss": ("float64", (2,)), "name": ("text", ()), "last.step": ("int64", ())},
    "f.csv": {"epoch": ("number", (2,)), "loss": ("number", (2,)), "note": ("text", (2,))},
}


@pytest.mark.parametrize("name", _FORMATS)
def test_a_format(name: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    one, other = _write(tmp_path / name), _write(tmp_path / "other" / name, weight=1.5)
    assert _kinds(one) == _FORMATS[name]
    difference = first_difference(read_entries(one), read_entries(other))
    assert difference and "1.0 and 1.5, by 0.5" in difference
    assert digest(read_entries(one)) != digest(read_entries(other))
    assert digest(read_entries(one)) == digest(read_entries(_write(tmp_path / "other" / name)))


@pytest.mark.parametrize("name", _FORMATS)
def test_a_file_that_cannot_be_compared(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with pytest.raises(WrongUse, match=f"{name} is missing in "):
        read_entries(path)
    path.touch()
    with pytest.raises(WrongUse, match=f"{name} is empty"):
        read_entries(path)
    content = _write(path).read_bytes()
    path.write_bytes(content[: -len(content) // 3])
    with pytest.raises(WrongUse, match=rf"{name} cannot be read \(\w.*: compare another file"):
        read_entries(path)


def test_a_file_without_numbers(tmp_path: Path) -> None:
    texts = {
        "f.json": '{"a": "b", "c": [], "d": NaN}',
        "f.csv": "loss\n",
        "g.csv": "a\nb\n",
        "h.csv": "\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(WrongUse, match=f"{name} has no finite numbers: compare a file"):
            read_entries(tmp_path / name)
    # After the first NaN, each training has the same result, also if it does not resume.
    for values in (torch.empty(0), torch.tensor([torch.nan, torch.inf])):
        torch.save({"model": {"a": values}}, tmp_path / "f.pt")
        with pytest.raises(WrongUse, match="f.pt has no finite numbers"):
            read_entries(tmp_path / "f.pt")


def test_a_column_with_one_row_is_read(tmp_path: Path) -> None:
    table = torch.arange(6.0).view(2, 3)
    for name, tensor in (("column.pt", table[:1, -1]), ("copy.pt", torch.tensor([2.0]))):
        torch.save(tensor, tmp_path / name)
    column, copy = (digest(read_entries(tmp_path / name)) for name in ("column.pt", "copy.pt"))
    assert column == copy


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn])
def test_types_that_numpy_lacks_are_compared_by_their_bits(
    kind: torch.dtype, tmp_path: Path
) -> None:
    """Each pattern of bits is an entry, also each NaN."""
    size = 256**kind.itemsize
    raw = torch.arange(size).to(torch.uint8 if kind.itemsize == 1 else torch.uint16)
    torch.save(dict(enumerate(raw.view(kind).split(size // 256))), tmp_path / "f.pt")
    entries = read_entries(tmp_path / "f.pt")
    assert {entry.kind for entry in entries.values()} == {str(kind).removeprefix("torch.")}
    digests = {digest({("w",): entry}) for entry in entries.values()}
    assert len(digests) == len(entries) == 256
    (first, *_, last) = entries.values()
    assert first_difference({("w",): first}, {("w",): last}) is not None


def test_a_key_that_a_json_object_has_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text('{"a": {"loss": 1.0, "b": 2.0, "loss": 3.0}, "b": 1}')
    with pytest.raises(WrongUse, match="f.json has the key 'loss' more than once in one object"):
        read_entries(tmp_path / "f.json")


def test_objects_are_refused_and_named(tmp_path: Path) -> None:
    torch.save(
        {"w": torch.ones(1), "n": Counter([1]), "m": torch.nn.Linear(1, 1)}, tmp_path / "f.pt"
    )
    with pytest.raises(WrongUse, match=r"an object of torch\.nn\.modules\.linear\.Linear, and on"):
        read_entries(tmp_path / "f.pt")
    (tmp_path / "h.pt").write_bytes(pickle.dumps(MakesFolder(tmp_path / "ran"), protocol=2))
    with pytest.raises(WrongUse, match=r"an object of posix\.mkdir, and only tensors"):
        read_entries(tmp_path / "h.pt")
    assert not (tmp_path / "ran").exists()
    np.save(tmp_path / "f.npy", np.array([object()]), allow_pickle=True)
    with pytest.raises(WrongUse, match=r"f\.npy cannot be read \(Object arrays cannot be loaded"):
        read_entries(tmp_path / "f.npy")
    torch.save(torch.eye(3).to_sparse(), tmp_path / "g.pt")
    with pytest.raises(WrongUse, match=r"g\.pt cannot be read \(a sparse or quantized tensor"):
        read_entries(tmp_path / "g.pt")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1,2\n3,4\n", {"1": ("number", (2,)), "2": ("number", (2,))}),
        ("a,a\n3,4.5\n", {"a.0": ("number", (1,)), "a.1": ("number", (1,))}),
        ("id,v\n9007199254740993,1e2\n", {"id": ("number", (1,)), "v": ("number", (1,))}),
        ("v,t\n1,\n\n-inf,x\n", {"v": ("number", (2,)), "t": ("text", (2,))}),
    ],
)
def test_the_columns_of_a_table(
    text: str, expected: dict[str, tuple[str, tuple[int, ...]]], tmp_path: Path
) -> None:
    (tmp_path / "f.csv").write_text(text)
    assert _kinds(tmp_path / "f.csv") == expected


def test_whole_numbers_of_a_table_must_be_equal(tmp_path: Path) -> None:
    for name, text in (("a", "n,v\n100,1\n"), ("b", "n,v\n101,0.999\n"), ("c", "n,v\n100,1\n")):
        (tmp_path / f"{name}.csv").write_text(text)
    a, b, c = (read_entries(tmp_path / f"{name}.csv") for name in "abc")
    assert str(first_difference(a, b, 0.1)).startswith("tensor n: ")
    assert first_difference({("v",): a["v",]}, {("v",): b["v",]}, 0.1) is None
    assert first_difference(a, c, 0.1) is None
    assert "v" in str(first_difference({("v",): a["v",]}, {("v",): b["v",]}))


def test_a_table_whose_rows_differ_in_length(tmp_path: Path) -> None:
    (tmp_path / "f.csv").write_text("a,b\n1,2\n3\n")
    with pytest.raises(WrongUse, match="row 2 has 1 cells, and the first line has 2"):
        read_entries(tmp_path / "f.csv")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = (
        _write(tmp_path / name, weight) for name, weight in (("1.csv", 1), ("2.csv", 1.5))
    )

    def compared(*files: Path, tolerance: float = 0.0, ignored: tuple[str, ...] = ()) -> int:
        request = {"tolerance": tolerance, "ignored": ignored, "files": [[str(f)] for f in files]}
        return main([json.dumps(request)])

    found: dict[str, Any] = {}
    for files in ([one, one], [one, other]):
        assert compared(*files) == 0
        found[str(len(found))] = json.loads(capsys.readouterr().out)
    assert found["0"] == {"digest": digest(read_entries(one)), "difference": None, "largest": 0.0}
    assert found["1"]["difference"].startswith("column loss: (number, 2) 1 of 2 values differ")
    assert found["1"]["largest"] == 0.5
    assert found["1"]["digest"] == digest(read_entries(other))
    for accepted in ({"tolerance": 0.5}, {"ignored": ("lo*",)}):
        assert compared(one, other, **accepted) == 0
        assert json.loads(capsys.readouterr().out)["difference"] is None
    assert compared(one, tmp_path / "none.csv") == 2
    err = capsys.readouterr().err
    assert err.startswith(f"trainbox: none.csv is missing in {tmp_path.name}/: let the script ")
