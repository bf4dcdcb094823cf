"""Whether the copies of batches to the GPU overlap with the computation (G15)."""

import pytest

from tests.gpu.check import Check, errors
from tests.gpu.rows import table


@pytest.mark.gpu(seconds=15, settles="G15: copies of batches overlap, and use pinned memory")
def test_copies_of_batches_overlap_with_the_computation(check: Check) -> None:
    check.needs("tensorboard", "safetensors", "tqdm")
    small = {} if check.on_gpu else {"examples": 64, "width": 1}
    batch = {} if check.on_gpu else {"batch_size": 2}
    cases = {
        "loader workers": {
            "task": "tests.gpu.tasks:Clips",
            "fields": small,
            "workers": 8 if check.on_gpu else 1,
            **batch,
        },
        "data on the CPU": {
            "task": "tests.gpu.tasks:Wide",
            "fields": {"size": 64} if check.on_gpu else {"size": 8, "channels": 2},
            "placed": False,
        },
    }
    found = check.program("profiles", folder=str(check.folder), cases=cases)
    assert not errors(found)
    check.tables.append(
        (
            "Copies of batches",
            table(
                ("Data", "Copies", "ms", "Share during kernels", "Own stream", "Kinds"),
                [
                    (
                        name,
                        f["copies"],
                        f"{f['copied_ms']:.1f}",
                        f"{f['overlap_share']:.2f}",
                        f["own_stream"],
                        ", ".join(f["kinds"]),
                    )
                    for name, f in found.items()
                ],
            ),
        )
    )
    check.needs_gpu()
    for name, figures in found.items():
        check.saw(f"{name}: {figures['overlap_share']:.2f} of the copies' time overlaps")
    for name, figures in found.items():
        assert figures["copies"] >= 10, (name, figures)
        assert not any("Pageable" in kind for kind in figures["kinds"]), (name, figures)
        assert figures["own_stream"], (name, figures)
    assert found["loader workers"]["overlap_share"] > 0.5
