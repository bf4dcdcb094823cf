"""`--compile`: the same bits in two processes that compile for themselves (G8)."""

import pytest

from tests.gpu.check import Check
from tests.gpu.digests import by_step


@pytest.mark.gpu(step=5, seconds=28, settles="G8: --compile is deterministic across processes")
def test_compiled_trainings_have_the_same_bits_in_two_processes(check: Check) -> None:
    check.needs_training()
    check.needs_compiler()
    started = []
    for name in ("one", "other"):
        # Without a common cache, each process compiles and tunes for itself.
        env = {f"{tool}_CACHE_DIR": str(check.folder / f"{tool}-{name}")
               for tool in ("TORCHINDUCTOR", "TRITON")}  # fmt: skip
        words = ("digits", "--compile", "--max-steps", "30", "--digest-steps", "10")
        started.append(check.start_trainbox(*check.training(name, *words), env=env))
    for process in started:
        check.finish(process)
    one, other = (by_step(check.folder / "runs" / name) for name in ("one", "other"))
    check.saw(f"step {max(one)}: {one[max(one)]}")
    assert one == other
