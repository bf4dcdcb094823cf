"""One `trainbox run`: its starts, and the records of each."""

import contextlib
import functools
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entrypoint.launch.children import SCRIPT_RUN
from entrypoint.launch.plan import LaunchPlan
from entrypoint.launch.stopping import Fault
from entrypoint.launch.supervise import Ending, supervise
from entrypoint.script.accelerate import ignored_settings
from entrypoint.script.hang import Hang
from entrypoint.script.manifest import SOFTWARE, describe, describe_start, is_manifest
from entrypoint.script.on_resume import missing_file
from entrypoint.script.output import Log, Pipes, Stream
from entrypoint.script.python import Python
from entrypoint.script.script_folder import ScriptFolder
from entrypoint.script.sources import sources_of
from entrypoint.script.target import Target
from entrypoint.script.telemetry import GpuRecord
from entrypoint.script.working_copies import WORK, UserFolder
from trainbox.disclosure.suggested_commands import command, from_here
from trainbox.errors import (
    NOTHING_SAVED,
    STOPPED_ITSELF,
    ExitCode,
    Failure,
    StorageFailure,
    WrongUse,
    signal_of,
)
from trainbox.files.energy import energy_row
from trainbox.files.regular_files import open_from
from trainbox.files.temporary import temporary_folder
from trainbox.folders.record_folder import (
    LOGS,
    MANIFEST,
    SavedFile,
    ended_by,
    has_saved,
    saved_files,
)
from trainbox.processes.environment import Internal
from trainbox.processes.process_tree import launched_cpu_s
from trainbox.processes.streams import message, say, write_all

if TYPE_CHECKING:
    from entrypoint.health.watch import Telemetry, Watch  # most trials do without it

# What Python and torch print if the script has no variables of torchrun.
_NEEDS_TORCHRUN = re.compile(
    rb"KeyError: '(RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)'"
    rb"|environment variable (RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT) expected"
)
# What Python prints last.
_MISSING_MODULE = re.compile(rb"\nModuleNotFoundError: No module named '([^']+)'[^\n]*\s*\Z")
_COLOUR = re.compile(rb"\x1b\[[0-9;]*m")  # of Python 3.13 and newer on a terminal
_END_BYTES = 2**14  # of a log, in which the error of the script is
_TEMPORARY = (ExitCode.PREEMPTED, ExitCode.HARDWARE, ExitCode.NETWORK)


@dataclass(frozen=True)
class ScriptRun:
    """What every start of a run has in common.

    Attributes:
        restarts: the number of automatic restarts.
        restart_on: `any` for a restart after every failure, `temporary` after failures that it can
        fix.
        hang_minutes: the time without output and computation after which the script is ended.
        prefix: whether each line of the output has its rank in front.
        on_resume: the arguments of --on-resume as `for_rank` returns them, or None.
        trial: whether this is a trial of a sweep: it runs in a copy of the current folder, and its
            output is only in its log.
        watched: opens the watch over the GPUs; None if they are not watched.
    """

    plan: LaunchPlan
    target: Target
    folder: ScriptFolder
    restarts: int
    restart_on: str
    hang_minutes: float | None
    prefix: bool
    on_resume: str | None = None
    trial: bool = False
    watched: Callable[["Telemetry"], "AbstractContextManager[Watch]"] | None = None


def run(asked: ScriptRun) -> int:
    """Run the script until it has ended and is not started again, and return the exit code.

    Raises:
        Failure: the script is not valid Python, or the manifest of a new run cannot be written.
    """
    folder, target, plan = asked.folder, asked.target, asked.plan
    begin_s = time.monotonic()
    manifest, differing = _manifest(asked)
    gpus = GpuRecord(folder, plan.gpus)
    user = UserFolder(Path.cwd()) if asked.trial else None
    work = folder.path / WORK if user else None
    python = target.python or Python()
    chosen = "" if python.is_ours else f"; {python.command[0]} ({python.origin})"
    message(f"{target.name} in {from_here(folder.path)}: {plan.reason}{chosen}")
    for line in (plan.settings, ignored_settings(target, os.environ)):
        if line:
            message(line)
    starts, received = 0, list[int]()
    while True:
        code = 0
        try:
            if user and work:
                user.copy(work)
            ending, needs_reset = _run_once(asked, manifest, differing, gpus, received, work)
            differing = []
            starts, code = starts + 1, ending.code
            folder.write_json(MANIFEST, manifest)
        except Failure as error:  # such as a GPU that is not fit for a restart
            message(str(error))
            code = code or error.exit_code
            with contextlib.suppress(StorageFailure):  # the message above may be about it
                folder.write_json(MANIFEST, manifest)
            break
        if starts > asked.restarts or not starts_again(ending, asked.restart_on):
            break
        if needs_reset:
            message(f"not started again, because a GPU needs a reset: {needs_reset}")
            break
        message(f"the script exited with code {code}: restart {starts} of {asked.restarts}")
    if user and work:
        user.remove_unchanged(work)
    if (explained := _explained(code, asked, bool(received))) != code:
        code = manifest["starts"][-1]["exit_code"] = explained
        folder.write_json(MANIFEST, manifest)
    for line in closing(folder, time.monotonic() - begin_s, starts, manifest, code):
        say(line)
    return code


def _explained(code: int, asked: ScriptRun, signalled: bool) -> int:
    """Return the exit code of the run, and log what the code of the script does not show."""
    # A scheduler would start a script that always exits with 75 for ever. On several nodes, another
    # node may have got the signal, and trainer.programs.ranks.torchrun has the same rule.
    if code == ExitCode.PREEMPTED and not signalled and asked.plan.nnodes == 1:
        message(STOPPED_ITSELF)
        return ExitCode.UNEXPECTED
    is_alone = asked.plan.strategy == "process"
    if code and is_alone and (missing := _in_log(asked.folder.path, _NEEDS_TORCHRUN)):
        message(f"the script needs the variables of torchrun, such as {missing}: add --torchrun")
    if code and (module := _in_log(asked.folder.path, _MISSING_MODULE)):
        message(_missing(module, asked.target.python or Python()))
    if code == 0 and (tasks := _only_tasks(asked)):
        name = f"{asked.target.name}:{tasks[-1]}"
        message(
            f"{asked.target.name} only defines a task, and trained nothing: "
            f"`{command('train', shlex.quote(name))}` trains it"
        )
    return code


def _only_tasks(asked: ScriptRun) -> list[str]:
    """Return the tasks of a script that does nothing but define them, and has printed nothing."""
    from trainbox.task_names.task_spec import only_defined_tasks

    target, log = asked.target, _log_path(asked, 0)
    if target.is_module or target.python is None or not log.exists() or log.stat().st_size:
        return []
    return only_defined_tasks(Path(target.name))


def _missing(module: str, python: Python) -> str:
    """Return what is wrong with a module that Python cannot import, with cures.

    Python names `a.b` only if it has imported the package a, of the user or an installed one.
    """
    package, _, name = module.rpartition(".")
    if package:
        return (
            f"the package {package} has no module {name}: correct the import, or use another "
            f"version of {package}"
        )
    return (
        f"{python.command[0]} ({python.origin}) has no module {module}: install it there, name "
        "another Python with --python, or set PYTHONPATH to the folder that has the module"
    )


def _in_log(run: Path, error: re.Pattern[bytes]) -> str | None:
    """Return the group of an error that the end of the script's log has, or None."""
    log_path = run / LOGS / "rank-0.log"
    with contextlib.suppress(OSError), open_from(log_path, most_bytes=_END_BYTES) as log:
        if found := error.search(_COLOUR.sub(b"", log.read())):
            group: bytes = next(filter(None, found.groups()))
            return group.decode(errors="replace")
    return None


def starts_again(ending: Ending, restart_on: str) -> bool:
    """Return whether the script is started again after this end of a start.

    A stop that the user has requested is not followed by a restart.
    """
    has_failed = restart_on == "any" and ending.code != 0
    return not ending.signalled and (has_failed or _can_succeed(ending.code))


def _can_succeed(code: int) -> bool:
    """Return whether the same command can succeed after this exit code."""
    return code in _TEMPORARY or signal_of(code) is not None


def closing(
    folder: ScriptFolder,
    duration_s: float,
    starts: int,
    manifest: Mapping[str, Any],
    code: int,
) -> list[str]:
    """Return the lines that `trainbox run` prints at the end."""
    again = "" if code == 0 or not _can_succeed(code) else ": the same command starts it again"
    rows = {"run": from_here(folder.path), "exit code": f"{code}{again}"}
    rows["duration"] = f"{duration_s:.1f} s" + (f", {starts} starts" if starts > 1 else "")
    samples = folder.newest("samples")
    if type(samples) in (int, float):
        rows["samples"] = f"{samples:,}"
    rows |= energy_row(manifest)
    return [f"{name:<10} {value}" for name, value in rows.items()]


def _manifest(asked: ScriptRun) -> tuple[dict[str, Any], list[str]]:
    """Return the manifest of the run, and what of its software differs now. Write a new one."""
    folder, new = asked.folder, describe(asked.target, os.environ)
    if folder.writes and (folder.path / MANIFEST).exists():
        if is_manifest(known := folder.read_json(MANIFEST) or {}):
            return known, [name for name in SOFTWARE if known.get(name) != new[name]]
        message(f"{from_here(folder.path / MANIFEST)} was damaged: it begins again")
    folder.write_json(MANIFEST, new)
    return new, []


def _run_once(
    asked: ScriptRun,
    manifest: dict[str, Any],
    differing: Sequence[str],
    gpus: GpuRecord,
    received: list[int],
    work: Path | None,
) -> tuple[Ending, str | None]:
    """Start the script once, pass on its output, and add the start to the manifest.

    It starts in the folder `work`, or in the current one.

    Return how it has ended, and why no program can use a GPU until it is reset, or None.
    """
    folder, plan = asked.folder, asked.plan
    begin_s = time.monotonic()
    entry = describe_start(plan, asked.target, os.environ, time.time())
    sources = sources_of(asked.target)
    if found := [*differing, *sources.changed(manifest)]:
        entry["changed"] = found
        message(f"changed since an earlier start: {', '.join(found)}")
    manifest |= {"revision": sources.revision, "sources": dict(sources.digests)}
    if folder.writes:
        sources.write(folder.path)
    is_later = plan.node_rank == 0 and _log_path(asked, 0).exists()
    if asked.on_resume and is_later and (lost := missing_file(asked.on_resume, work or Path())):
        message(lost)
    with ExitStack() as stack:
        watch = None
        if asked.watched is not None:
            watch = stack.enter_context(asked.watched(gpus))
        pipes_folder = stack.enter_context(temporary_folder("script-"))
        streams, terminals = _streams(asked, stack)
        takers = {name: stream.take for name, stream in streams.items()}
        pipes = stack.enter_context(Pipes(pipes_folder, takers, terminals))
        cpu_s = functools.partial(launched_cpu_s, plan.strategy == "process")
        limit = asked.hang_minutes
        hang = Hang(limit, lambda: pipes.count, cpu_s).found if limit else None
        # The entry gets its end later, and none if this command is killed.
        manifest["starts"] = [*manifest["starts"], entry]
        with contextlib.suppress(StorageFailure):  # it is reported at the end of the start
            folder.write_json(MANIFEST, manifest)
        try:
            ending = supervise(
                plan.argv,
                {**os.environ, **plan.env, Internal.PIPES: str(pipes_folder)},
                watch=watch,
                kind=replace(
                    SCRIPT_RUN,
                    ended_by=lambda number: ended_by(number, folder.path),
                    has_saved=functools.partial(_has_saved, folder.path, saved_files(folder.path)),
                ),
                on_start=pipes.start,
                received=received,
                failed=functools.partial(_fault, folder, hang),
                work=work,
            )
        except Failure as error:  # such as a limit on processes
            entry["exit_code"] = error.exit_code
            raise
        if watch is not None:
            watch.final_check()  # reads the energy since the last reading, and logs a late Xid
        # Workers of a script that was killed or stopped end as well, a few seconds after it.
        if ending.left and not ending.signalled and signal_of(ending.code) is None:
            message(f"the script left {ending.left} process(es) behind: killed")
    entry |= {"duration_s": round(time.monotonic() - begin_s, 3), "exit_code": ending.code}
    if plan.gpus:
        manifest |= gpus.with_energy(manifest)
    return ending, watch.needs_reset if watch is not None else None


def _has_saved(run: Path, before: Mapping[str, SavedFile], code: int) -> bool:
    """Return whether the script has saved anything new. If not, log why its `code` is replaced."""
    if has_saved(run, before):
        return True
    if code in (ExitCode.SUCCESS, ExitCode.PREEMPTED):
        message(NOTHING_SAVED)
    return False


def _fault(folder: ScriptFolder, hang: Callable[[], str | None] | None) -> Fault | None:
    """Renew the lease of the folder, and return why the script must stop, or None."""
    try:
        folder.renew()
    except WrongUse as error:
        return Fault(str(error), error.exit_code)
    return Fault(found, ExitCode.NETWORK) if hang and (found := hang()) else None


def _log_path(asked: ScriptRun, rank: int) -> Path:
    node = f"node-{asked.plan.node_rank}-" if asked.plan.nnodes > 1 else ""
    return asked.folder.path / LOGS / f"{node}rank-{rank}.log"


def _streams(asked: ScriptRun, stack: ExitStack) -> tuple[dict[str, Stream], dict[str, int]]:
    """Return the streams of the ranks, and the terminals that rank 0 gets instead of pipes.

    On a terminal, only the first rank of the first node is shown, and its progress bars move.
    """
    plan, streams, terminals = asked.plan, dict[str, Stream](), dict[str, int]()

    for rank in range(plan.nproc_per_node):
        log = stack.enter_context(contextlib.closing(Log(_log_path(asked, rank))))
        is_first = rank == 0 and plan.node_rank == 0
        for name, target in (("out", sys.stdout), ("err", sys.stderr)):
            target.flush()
            as_is = target.isatty() and not asked.prefix
            is_shown = not asked.trial and (is_first or not target.isatty())
            if is_first and is_shown and as_is:
                terminals[f"{rank}.{name}"] = target.fileno()
            stream = streams[f"{rank}.{name}"] = Stream(
                log,
                functools.partial(write_all, target.fileno()) if is_shown else None,
                f"[{rank}] ".encode() if asked.prefix else b"",
                whole_lines=not as_is,
                report=asked.folder.report if is_first and name == "out" else None,
            )
            stack.callback(stream.close)
    return streams, terminals
