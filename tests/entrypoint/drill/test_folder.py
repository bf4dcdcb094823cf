"""The files and the steps of a script, as the drill sees them in its run folder."""

from pathlib import Path

from entrypoint.drill.folder import StepReader, steps, version_of, versions


def test_only_the_files_of_the_script_count(tmp_path: Path) -> None:
    for name in ("config.json", "manifest.json", "manifest.json.new", "metrics.jsonl", "lock"):
        (tmp_path / name).touch()
    for folder in ("logs", "tensorboard", "weights/logs"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a").touch()
    (tmp_path / "model.pt").touch()
    found = versions(tmp_path)
    assert sorted(found) == ["model.pt", "weights/logs/a"]
    (tmp_path / "model.pt").write_text("x")
    assert versions(tmp_path) != found
    assert version_of(tmp_path / "none") is None and versions(tmp_path / "none") == {}


def test_each_step_is_read_once(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    whole, later = StepReader(tmp_path), StepReader(tmp_path)
    assert whole.read() == []
    metrics.write_text('{"kind": "health", "step": 9}\nno JSON\n[1]\n{"step": "4"}\n{"step": 1}\n')
    with metrics.open("a") as file:
        file.write(f"{'[' * 100_000}\n")  # nested too deeply for Python's parser
    with metrics.open("a") as file:
        file.write('{"kind": "train", "step": 2}\n{"step"')
    assert whole.read() == [1, 2] and whole.read() == []
    from_end = StepReader(tmp_path, from_end=True)
    with metrics.open("a") as file:
        file.write(': 3}\n{"step": 4}\n')
    assert whole.read() == [3, 4]
    assert from_end.read() == [4]  # the rest of a line is not JSON
    assert later.read() == steps(tmp_path) == [1, 2, 3, 4]
    metrics.write_text('{"step": 1}\n')  # a script that begins its file again
    assert whole.read() == []
    with metrics.open("a") as file:
        file.write('{"step": 2}\n')
    assert whole.read() == [2]
