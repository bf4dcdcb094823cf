"""Plan a launch by the options, the environment and the GPUs of this machine."""

import contextlib
import dataclasses
import functools
import os
import platform
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entrypoint.cli.verb import environment_names, file_settings, origin
from entrypoint.driver.gpus import Gpu
from entrypoint.driver.process import Driver, detect, visible_to_cuda
from entrypoint.launch.plan import LaunchPlan, plan_launch
from entrypoint.launch.request import LaunchRequest, allocation_of, detect_cluster, hosts_of_job
from entrypoint.system.cgroup import usable_cpus
from entrypoint.system.infiniband import read_infiniband
from entrypoint.system.torch_build import torch_architectures, torch_cuda
from trainbox.errors import OutOfMemory
from trainbox.files.regular_files import read_text
from trainbox.options.config import Config, check, check_strategy
from trainbox.options.table import LAUNCH, arguments
from trainbox.processes.programs import TRAINER
from trainbox.processes.streams import printable

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from entrypoint.health.limits import Limits
    from entrypoint.health.watch import Watch


# With torch for CUDA, a training of `digits` on the CPU failed with 4.1 GB and trained with 4.4 GB.
# Most of it is mapped and never used.
_TORCH_BYTES = 41 * 10**8


@dataclasses.dataclass(frozen=True)
class Launch:
    """A launch that was planned and checked.

    Attributes:
        plan: what is started.
        driver: the process that has read the GPUs; None if they are not checked and watched.
        limits: the limits of the health rules from --health-limits; None for the defaults.
    """

    plan: LaunchPlan
    driver: Driver | None = None
    limits: "Limits | None" = None

    def watch(self) -> "Callable[..., AbstractContextManager[Watch]] | None":
        """Return what opens the watch over the plan's GPUs, or None if they are not watched."""
        if self.driver is None:
            return None
        from entrypoint.health.watch import watched

        return functools.partial(watched, self.plan, self.driver, self.limits)


def _node_file() -> str:
    """Return the text of the file in which PBS lists the hosts of the job, or ""."""
    with contextlib.suppress(KeyError, OSError, ValueError):
        return read_text(Path(os.environ["PBS_NODEFILE"]))
    return ""


def make_launch(
    argv: tuple[str, ...],
    values: dict[str, Any],
    decide: Callable[[LaunchRequest, tuple[Gpu, ...]], LaunchPlan],
    of_our_torch: bool = True,
) -> Launch:
    """Return the launch that `decide` plans of the launch options and of the GPUs found here.

    `argv` is what each process runs, and `values` has the values of the parameters. A program that
    is not `of_our_torch` may support other GPUs.

    Raises:
        Failure: the file of the limits is wrong, the driver does not answer, or `decide` refuses
            the request.
    """
    given = {row.parameter: values[row.parameter] for row in LAUNCH if row.parameter in values}
    health, file, limits = given.pop("health"), given.pop("health_limits"), None
    if file:
        from entrypoint.health.limits import read_limits

        limits = read_limits(file)
    given["device"] = _device(given["device"], given["processes"])
    threads = os.environ.get("OMP_NUM_THREADS", "")
    request = LaunchRequest(
        argv=argv,
        cpus=usable_cpus(),
        allocation=allocation_of(os.environ),
        hosts=hosts_of_job(os.environ, _node_file()),
        omp_num_threads=int(threads) if threads.isdecimal() and int(threads) > 0 else None,
        settings=_settings(),
        config_file=(
            {"name": str(found.path), "sha256": found.digest}
            if (found := file_settings()) and found.digest
            else None
        ),
        **given,
    )
    # A CPU run does not query the driver, so it works with a broken driver.
    if request.device in ("cpu", "mps") or request.gpus == 0:
        return Launch(_on_interfaces(decide(request, ())))
    driver = Driver()
    gpus = visible_to_cuda(detect(driver))
    if gpus:
        request = dataclasses.replace(
            request,
            architectures=torch_architectures() if of_our_torch else (),
            network=read_infiniband(os.environ).network,
        )
    plan = _on_interfaces(decide(request, gpus))
    if health and plan.gpus:
        return Launch(plan, driver, limits)
    driver.close()
    return Launch(plan)


def refuse_small_address_space(limit_bytes: int) -> None:
    """Check that torch can be loaded in an address space of this size; -1 is unlimited.

    Below, its import ends with one of many errors and exit codes, and with a traceback or an abort.

    Raises:
        OutOfMemory: the limit is too small.
    """
    if 0 <= limit_bytes < _TORCH_BYTES and torch_cuda():
        raise OutOfMemory(
            f"the address space of a process is limited to {limit_bytes / 1e9:.1f} GB, and torch "
            f"needs more than {_TORCH_BYTES / 1e9:.1f} GB: raise the limit with `ulimit -v`, or in "
            "the job (Grid Engine: h_vmem, PBS: pvmem)"
        )


def _on_interfaces(plan: LaunchPlan) -> LaunchPlan:
    """Return the plan, if its ranks have the interfaces that the environment names."""
    if plan.nnodes * plan.nproc_per_node > 1:
        from entrypoint.launch.interfaces import refuse_unknown_interface

        refuse_unknown_interface(os.environ, uses_nccl=bool(plan.gpus))
    return plan


def plan_training(request: LaunchRequest, gpus: tuple[Gpu, ...]) -> LaunchPlan:
    return plan_launch(request, gpus, detect_cluster(os.environ))


def prepare(
    command: str,
    values: dict[str, Any],
    decide: Callable[[LaunchRequest, tuple[Gpu, ...]], LaunchPlan] = plan_training,
    config: Config | None = None,
    *extra: str,
) -> Launch:
    """Plan the launch of a command of the trainer with these values of its parameters.

    Args:
        command: the command in the option table. `plan` plans what `train` does.
        values: the values of the command's parameters, also of the launch options.
        decide: makes the plan of the request and the GPUs.
        config: the settings of the training, to check.
        extra: arguments of the trainer that are not in the table.

    Raises:
        Failure: the settings contradict each other, the GPUs are missing, or the request cannot be
            launched.
    """
    verb = "train" if command == "plan" else command
    argv = (TRAINER.module, *arguments(verb, values), *extra)
    refuse_small_address_space(resource.getrlimit(resource.RLIMIT_AS)[0])
    launch = make_launch(argv, values, decide)
    if config is not None:
        check(config, launch.plan.device)
        check_strategy(config, launch.plan.strategy)
    return launch


def _device(requested: str | None, processes: int | None) -> str | None:
    if requested not in (None, "auto"):
        return requested
    return (
        "mps"
        if (sys.platform, platform.machine()) == ("darwin", "arm64") and processes is None
        else None
    )


def _settings() -> str:
    """Return a text such as `from exp.toml; device cpu (from DEVICE)`.

    The run shows it, because a forgotten variable would change the run without a message.
    """
    if not (names := environment_names()):
        return origin()
    # The patterns take 3 ms to compile.
    from trainbox.disclosure.secret_rule import NOT_SHOWN, shown_variable

    def setting(name: str) -> str:
        label = name.removeprefix("TRAINBOX_").lower().replace("_", "-")
        value = printable(shown_variable(name, os.environ[name]).replace(NOT_SHOWN, ""))
        return f"{' '.join(filter(None, [label, value]))} (from {name})"

    shown = ", ".join(map(setting, names))
    return "; ".join(filter(None, [origin(), shown]))
