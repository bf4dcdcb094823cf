"""Whether the copies of batches to the GPU overlap with the computation (G15)."""

import pytest

from tests.gpu.check import Check, errors
from tests.gpu.machine import shared_memory_mib
from tests.gpu.rows import table


@pytest.mark.gpu(
    step=4, seconds=12, settles="G15: copies of batches overlap, and use pinned memory"
)
def test_copies_of_batches_overlap_with_the_computation(check: Check) -> None:
    check.needs_training()
    # The model takes longer than the workers, also if /dev/shm has room for small batches only.
    roomy = shared_memory_mib() >= 1024
    clips = {"width": 96} if check.on_gpu else {"examples": 64, "width": 1}
    cases = {
        "loader workers": {
            "task": "tests.gpu.tasks:Clips",
            "fields": clips,
            "eval_every": 1000,
            "workers": (8 if roomy else 2) if check.on_gpu else 1,
            "batch_size": (64 if roomy else 4) if check.on_gpu else 2,
        },
        "data on the CPU": {
            "task": "tests.gpu.tasks:Wide",
            "fields": {"size": 64} if check.on_gpu else {"size": 8, "channels": 2},
            "eval_every": 1000,
            "placed": False,
            "precision": "fp32",
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
        assert figures["overlap_share"] > 0.5, (name, figures)
