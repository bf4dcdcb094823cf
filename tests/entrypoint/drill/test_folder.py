"""The files and the steps of a script, as the drill sees them in its run folder."""

from pathlib import Path

from entrypoint.drill.folder import steps, version_of, versions


def test_only_the_files_of_the_script_count(tmp_path: Path) -> None:
    for name in ("config.json", "manifest.json", "manifest.json.tmp", "metrics.jsonl", "lock"):
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


def test_the_steps_are_whole_numbers_that_the_script_has_reported() -> None:
    entries = [{"kind": "health", "step": 9}, {"step": "4"}, {"step": True}, {"loss": 1}]
    assert steps([*entries, {"step": 2}, {"kind": "train", "step": 1}]) == [2, 1]
