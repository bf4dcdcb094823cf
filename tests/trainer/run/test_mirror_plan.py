"""What a mirror of checkpoints needs: uploads, removals and markers."""

import json
from typing import Any

import pytest

from trainer.run.mirror_plan import (
    MARKER,
    checkpoint_names,
    parse_marker,
    removals,
    stored_steps,
    uploads,
)

_DIGEST = {"bytes": 3, "sha256": "0" * 64}


def marker(step: int = 8, **changes: Any) -> str:
    names = (*checkpoint_names(step), "config.json", "manifest.json")
    whole = {"run_id": "0123", "step": step, "best_step": 4, "files": dict.fromkeys(names, _DIGEST)}
    return json.dumps(whole | changes)


@pytest.mark.parametrize(
    ("local", "best", "complete", "expected"),
    [
        ([], None, [], []),
        ([8], None, [], [8]),
        ([8], 8, [], [8]),
        ([4, 6, 8], 4, [], [4, 8]),  # 6 would be removed soon
        ([4, 6, 8], 4, [4], [8]),
        ([4, 6, 8], 4, [4, 8], []),
        ([6, 8], 4, [], [8]),  # the best checkpoint was removed by hand
    ],
)
def test_the_best_and_the_newest_checkpoint_are_copied_if_they_are_missing(
    local: list[int], best: int | None, complete: list[int], expected: list[int]
) -> None:
    assert uploads(local, best, complete) == expected


@pytest.mark.parametrize(
    ("local", "best", "stored", "expected"),
    [
        ([4, 6, 8], None, [2, 4, 6, 8], [2]),
        ([4, 8], 4, [1, 2, 4, 5, 8], [1, 2, 5]),
        ([4], None, [4, 8], []),  # another machine has trained 8
        ([], None, [4], []),
        ([8], 4, [2, 4, 6], [2, 6]),  # the best checkpoint was removed by hand
    ],
)
def test_what_the_run_does_not_keep_is_removed(
    local: list[int], best: int | None, stored: list[int], expected: list[int]
) -> None:
    assert removals(local, best, stored) == expected


def test_only_a_step_with_a_marker_is_complete() -> None:
    names = [
        f"step-00000004/{MARKER}",
        "step-00000004/config.json",
        "step-00000008/config.json",
        f"step-00000008/checkpoints/{MARKER}",
        f"step-8/{MARKER}",
        f"other/step-00000012/{MARKER}",
        "probe",
    ]
    assert stored_steps(names) == {4: True, 8: False}


def test_a_marker_has_the_files_of_its_checkpoint() -> None:
    found = parse_marker(marker(), 8)
    assert (found.run_id, found.step, found.best_step) == ("0123", 8, 4)
    assert found.files["checkpoints/step-00000008.pt"] == _DIGEST


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        marker(9),
        marker(run_id=3),
        marker(best_step="4"),
        marker(best_step=True),
        marker(files=None),
        marker(files={}),
        marker(files=json.loads(marker())["files"] | {"../../.bashrc": _DIGEST}),
        marker(files=json.loads(marker())["files"] | {"model.safetensors": _DIGEST}),
        marker(files=json.loads(marker())["files"] | {"config.json": {"bytes": 3}}),
        marker(files=json.loads(marker())["files"] | {"config.json": {"bytes": "3"}}),
    ],
)
def test_another_marker_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="."):
        parse_marker(text, 8)
