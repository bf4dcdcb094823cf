"""Profile some steps of a training for `--profile`."""

import time
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from trainbox.errors import StorageFailure
from trainer.loop.state import Job

_WARM_UP_STEPS = 10  # before the profile: first steps allocate memory and load kernels
_LONGEST = 10  # operators to print
_FILE = "profile.json"


class Profile:
    """A profile of `steps` steps of rank 0, which begins after a few steps of warm-up.

    The bits of the training are the same with and without a profile.
    """

    def __init__(self, job: Job, steps: int) -> None:
        self._job, self._steps = job, steps
        self._profiler: torch.profiler.profile | None = None
        self._begun, self._begin_s = 0, 0.0
        if job.world.is_first:
            job.before_step.append(self._before_step)

    def _before_step(self, step: int, _waited_s: float) -> None:
        if step == _WARM_UP_STEPS:
            self._start()
        elif self._begun == self._steps:
            self.finish()
        if self._profiler is not None:
            self._begun += 1

    def _start(self) -> None:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self._job.world.device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=kinds)
        self._profiler.start()
        self._begin_s = time.monotonic()  # the first start of the profiler takes a while

    def finish(self) -> None:
        """Write the trace, and print the longest operators; a second call does nothing.

        Raises:
            StorageFailure: The trace cannot be written.
        """
        profiler, self._profiler = self._profiler, None
        if not self._begun:
            self._job.run.report(
                f"--profile {self._steps}: no step was profiled, because this start has trained "
                f"at most the {_WARM_UP_STEPS} steps of warm-up: train more steps"
            )
        if profiler is None:
            return
        if self._job.world.device.type == "cuda":
            torch.cuda.synchronize(self._job.world.device)
        seconds = time.monotonic() - self._begin_s
        profiler.stop()
        path = self._job.run.path / _FILE
        _export(profiler, path)
        lines = _longest(profiler.key_averages(), self._job.world.device.type == "cuda")
        self._job.run.report(
            f"profile of {self._begun} steps, {seconds / self._begun * 1e3:.1f} ms each: {path}; "
            "to view it, open https://ui.perfetto.dev\n" + "\n".join(lines)
        )


def _export(profiler: torch.profiler.profile, path: Path) -> None:
    """Write the trace to `path`.

    torch raises no error if it cannot write: it only logs a line, and leaves a part of the trace
    beside `path`.

    Raises:
        StorageFailure: The trace cannot be written.
    """
    try:
        path.unlink(missing_ok=True)
        profiler.export_chrome_trace(str(path))
    except (OSError, RuntimeError) as error:
        raise StorageFailure(f"{path} cannot be written ({error}): free space") from error
    if not path.exists():
        path.with_name(f"{path.name}.tmp").unlink(missing_ok=True)
        raise StorageFailure(f"{path} cannot be written: free space")


def _longest(operators: Any, on_gpu: bool) -> list[str]:
    """Return a table of the operators with the most time of their own.

    `operators` are the averages of a profiler. On a GPU, the table has its kernels and copies. The
    profiler also adds their time to the operators that started them, and to annotated regions.
    """
    if on_gpu:
        operators = [
            operator
            for operator in operators
            if operator.device_type == DeviceType.CUDA and not operator.is_user_annotation
        ]
    name = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    spent = sorted(operators, key=lambda operator: -getattr(operator, name))
    whole = sum(getattr(operator, name) for operator in spent) or 1.0
    return [f"{'share':>6} {'ms':>10} {'calls':>7}  operator"] + [
        f"{getattr(operator, name) / whole:>6.1%} {getattr(operator, name) / 1e3:>10.2f} "
        f"{operator.count:>7}  {operator.key[:60]}"
        for operator in spent[:_LONGEST]
    ]
