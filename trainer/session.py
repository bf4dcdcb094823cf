"""One call of `train`: settle the settings, build what `fit` needs, tell people, and turn errors into exits."""

import contextlib
import dataclasses
import errno
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

from trainer import batches, manifest
from trainer.batches import EvaluationBatches, Schedule
from trainer.checkpoint import Checkpoints, storage_failure
from trainer.compare import changes_bits, in_words, manifest_differences, read_entries, verdict
from trainer.config import (
    DEFAULT_BATCH_SIZE,
    DEFAULT_EPOCHS,
    DEFAULT_LEARNING_RATE,
    FREE_AT_RESUME,
    Config,
    check,
    differences,
    parse_config,
    scaled_learning_rate,
    split_metric,
)
from trainer.digest import tensors_digest
from trainer.distributed import Process, is_network_error
from trainer.errors import Failure, NetworkFailure, OutOfMemory, StorageFailure, WrongUse
from trainer.fit import Job, Stopwatch, build_optimizer, fit
from trainer.losses import LossModule
from trainer.reduction import Reduction
from trainer.run import RunDirectory
from trainer.running import RunningLosses
from trainer.seeding import derive_seed
from trainer.stopping import StopRequest
from trainer.task import Task, load_task
from trainer.trial import try_task

_MOST_LOADER_WORKERS = 8


def train_task(
    config: Config,
    stop: StopRequest,
    device_name: str,
    runs_dir: Path,
    run_name: str | None,
    data_dir: Path,
    resume: str,
    until_step: int | None = None,
) -> None:
    """Train `config.task` to its end in `runs_dir/run_name`, going on where a stopped run of the same settings ended.

    With `until_step` it ends there, as if that were the end, at the learning rates of the whole.

    Raises:
        Failure: any end but the good one, with its exit code.
    """
    with _told_as_failures(runs_dir):
        process = Process.start(device_name)
        task = load_task(config.task, config.fields)
        run = RunDirectory(runs_dir / (run_name or _default_name(config, process, runs_dir)), process.rank)
        try:
            settled = settle(config, task, process, run)
            check(settled, process.device.type)
            job = build(settled, task, process, run, data_dir)
            job.until_step = until_step
            _resume(job, resume)
            try:
                _start(job, stop, resume)
            finally:
                job.checkpoints.finish()
        finally:
            run.close()
        process.leave()


def verify_run(path: Path, steps: int | None, stop: StopRequest, device_name: str, data_dir: Path) -> None:
    """Do the run in `path` again, whole or its first `steps`, in a folder that is removed, and compare the digests.

    Raises:
        Differs: the digests are not the same; it says where first, and which manifest entries are not.
        Failure: the run cannot be done again.
    """
    text = _text_of(path / "config.json")
    stored, before = read_entries(path / "digests.jsonl"), json.loads(_text_of(path / "manifest.json"))
    with tempfile.TemporaryDirectory(prefix="trainbox-verify-") as folder:
        again = Path(folder) / "again"
        config = parse_config(text, path / "config.json")
        train_task(config, stop, device_name, Path(folder), again.name, data_dir, "never", steps)
        if (again / "manifest.json").exists():  # on the first process
            found = read_entries(again / "digests.jsonl")
            after = json.loads(_text_of(again / "manifest.json"))
            changed = manifest_differences(before, after)
            print(verdict(str(path), "the same settings done again", stored, found, in_words(changed)), flush=True)


def _text_of(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise WrongUse(f"{path} cannot be read ({error.strerror}): is {path.parent} a run's folder?") from error


def _default_name(config: Config, process: Process, runs_dir: Path) -> str:
    """The task and a digest of the settings; for more processes than that run has shards, a run of their own."""
    name = f"{config.task.rpartition(':')[2].lower()}-{config.fingerprint()}"
    shards = process.from_first(_shards_of(runs_dir / name))
    return (
        name if config.shards is not None or shards is None or shards >= process.world_size else f"{name}-x{process.world_size}"
    )


def _shards_of(path: Path) -> int | None:
    """Into how many shards the run in `path` cuts a batch; None if that is not written."""
    try:
        shards = json.loads((path / "config.json").read_text())["shards"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return shards if isinstance(shards, int) else None


def settle(config: Config, task: Task, process: Process, run: RunDirectory) -> Config:
    """`config` with every open choice made: as the run was started, else by the task, the hardware, the processes.

    Raises:
        WrongUse: the run was started with other settings.
    """
    stored_text = process.from_first(run.read_config_text())
    stored = parse_config(stored_text, run.path / "config.json") if stored_text is not None else None
    given = dataclasses.asdict(config) | {"batch_size_per_gpu": None}
    if config.batch_size_per_gpu is not None:
        given["batch_size"] = config.batch_size_per_gpu * process.world_size
    if stored is not None and config.max_steps is None and config.epochs is None:
        given |= {"epochs": stored.epochs, "max_steps": stored.max_steps}
    elif config.max_steps is None and config.epochs is None:
        given["epochs"] = task.epochs or DEFAULT_EPOCHS
    fallback = stored or Config(
        batch_size=task.batch_size or DEFAULT_BATCH_SIZE,
        learning_rate=task.learning_rate or DEFAULT_LEARNING_RATE,
        precision=_default_precision(process.device),
        best_by=task.best_by,
        shards=process.world_size,
        threads=_default_threads(config),
    )
    for name in ("batch_size", "learning_rate", "precision", "best_by", "shards", "threads"):
        if given[name] is None:
            given[name] = getattr(fallback, name)
    settled = Config(**given)
    if stored is not None and (changed := differences(stored, settled)):
        raise WrongUse(
            f"{run.path} was started with other settings ({'; '.join(changed)}): give those again, "
            "or train anew under another --run name"
        )
    return settled


def _default_precision(device: torch.device) -> str:
    if device.type != "cuda":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def _default_threads(config: Config) -> int:
    """The process's share of the CPUs; with --shards a shard's, so that it is the same on any number of processes."""
    if config.shards is None:
        return torch.get_num_threads()
    return max(1, _cpus() // config.shards)


def _cpus() -> int:
    return int(os.environ.get("TRAINBOX_CPUS") or os.cpu_count() or 1)


def build(config: Config, task: Task, process: Process, run: RunDirectory, data_dir: Path) -> Job:
    """Data, model and optimizer; raises WrongUse where the sizes cannot be."""
    assert config.batch_size and config.learning_rate and config.shards and config.best_by and config.precision
    _set_arithmetic(config)
    with process.first_goes_first():
        train = batches.place_tensors(task.train_dataset(data_dir), process.device)
        validation = batches.place_tensors(task.validation_dataset(data_dir), process.device)
    schedule = _schedule(config, process, batches.length(train))
    if batches.length(validation) == 0:
        raise WrongUse(f"task {config.task}: the validation set is empty: nothing to choose the best model by")
    # As large as a training part, which fits, and the same on each process, which must agree on who has what.
    size = -(-config.batch_size // (config.shards * config.accumulation))
    workers = _workers(config, train)
    ranks = range(process.world_size)
    own = process.owned(batches.evaluation_batch_count(batches.length(validation), size))
    torch.manual_seed(derive_seed(config.seed, "model"))
    model = task.build_model().to(process.device)
    if config.compile:
        model.compile()
    autocast_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.precision)
    peak = scaled_learning_rate(config.learning_rate, config.lr_scaling, config.batch_size, config.base_batch_size)
    loss_module = process.wrap(LossModule(task, model, process.device.type, autocast_dtype))
    return Job(
        task=task,
        config=config,
        process=process,
        run=run,
        checkpoints=Checkpoints(run.path / "checkpoints", config.keep, run.writes, run.say),
        model=model,
        loss_module=loss_module,
        optimizer=build_optimizer(task, config, model, peak),
        scaler=torch.amp.GradScaler(process.device.type, enabled=config.precision == "fp16"),
        autocast_dtype=autocast_dtype,
        train=train,
        evaluation=EvaluationBatches(validation, size, own, process.device, workers),
        schedule=schedule,
        workers=workers,
        watch=Stopwatch(),
        running=RunningLosses(process, [len(process.owned_by(r, config.shards)) * config.accumulation for r in ranks]),
        reduction=Reduction(process, config.shards, config.accumulation, model),
    )


def _schedule(config: Config, process: Process, examples: int) -> Schedule:
    assert config.batch_size and config.shards
    if examples == 0:
        raise WrongUse(f"task {config.task}: the training set is empty: look into --data-dir, or at the task's train_dataset")
    if config.batch_size > examples:
        raise WrongUse(
            f"--batch-size {config.batch_size} is more than the training set's {examples} examples: lower it to {examples}"
        )
    if process.world_size > config.shards:
        raise WrongUse(
            f"this run cuts a batch into {config.shards} shard(s), and {process.world_size} processes are given: "
            f"use at most {config.shards}, or train anew under another --run name with --shards {process.world_size}"
        )
    if config.batch_size < config.shards * config.accumulation:
        raise WrongUse(
            f"--batch-size {config.batch_size} is less than {config.shards} shards x {config.accumulation} accumulation: "
            "each must get an example; raise the batch size"
        )
    micros = batches.micro_batches(config.batch_size, config.shards, config.accumulation, process.owned(config.shards))
    steps_per_epoch = examples // config.batch_size
    total_steps = config.max_steps or (config.epochs or 0) * steps_per_epoch
    return Schedule(config.seed, examples, config.batch_size, total_steps, micros)


def _workers(config: Config, dataset: Dataset[Any]) -> int:
    if isinstance(dataset, TensorDataset):
        return 0
    if config.workers is not None:
        return config.workers
    return min(_MOST_LOADER_WORKERS, max(1, _cpus() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def _set_arithmetic(config: Config) -> None:
    """The switches that change bits: what `--deterministic` and `--precision` mean to torch."""
    assert config.threads
    torch.set_num_threads(config.threads)
    multiply = "tf32" if config.precision == "tf32" else "ieee"
    torch.backends.cuda.matmul.fp32_precision = multiply
    torch.backends.cudnn.conv.fp32_precision = multiply  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn.fp32_precision = multiply  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = not config.deterministic
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA's matrix library starts
        # Not use_deterministic_algorithms, which says the same and imports the compiler for it.
        torch.set_deterministic_debug_mode("error")
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _resume(job: Job, resume: str) -> None:
    """Restore the newest whole checkpoint, if there is one; all processes take the first one's choice."""
    if job.run.writes:
        job.checkpoints.sweep()
    step = job.process.from_first(job.checkpoints.newest() if job.process.is_first else None)
    if step is None:
        return
    if resume == "never":
        raise WrongUse(
            f"--resume never, and {job.run.path} holds a checkpoint of step {step}: "
            "choose another --run name, or remove the folder"
        )
    job.restore(job.checkpoints.load(step))


def _start(job: Job, stop: StopRequest, resume: str) -> None:
    """Write down what is about to be done, do it, and close with what came out."""
    run, progress = job.run, job.progress
    first_step = progress.step
    complete = (progress.step >= job.schedule.total_steps and progress.evaluated_step == progress.step) or progress.ended_early
    if run.writes and not complete:
        _describe(job, resume == "anyway")
    run.write_json("config.json", job.config.to_json())
    _header(job)
    run.begin(first_step, progress.evaluated_step, job.schedule.total_steps, job.schedule.batch_size)
    if complete:
        run.say("this run is complete: nothing is left to do (another --run name or --seed starts a new one)")
    else:
        try_task(job)
        fit(job, stop)
        run.hyperparameters(job.config, job.progress.best_step or 0, job.progress.best_metrics)
    run.end_progress()
    _closing(job)


def _describe(job: Job, anyway: bool) -> None:
    """Write the manifest of a new run; add to that of a resumed one what is not as it was."""
    step, run = job.progress.step, job.run
    data = {"train": job.train, "validation": job.evaluation.dataset}
    weights = None if step else tensors_digest(job.model.state_dict())
    settings = {n: v for n, v in dataclasses.asdict(job.config).items() if n not in FREE_AT_RESUME | {"threads"}}
    found = manifest.describe(job.process, job.task, sys.argv[1:], settings, data, job.workers, weights)
    stored = run.read_json("manifest.json") if step else found
    if stored is None and not anyway:
        raise WrongUse(
            f"{run.path}/manifest.json is missing or damaged, so nobody knows whether the same bits can follow: restore it, or "
            "go on all the same with --resume anyway"
        )
    if stored is None or step == 0:
        run.write_json("manifest.json", json.dumps(found, indent=2) + "\n")
        return
    changed = manifest_differences(stored, found | {"initial_weights_sha256": stored.get("initial_weights_sha256")})
    if (breaking := {n: v for n, v in changed.items() if changes_bits(n)}) and not anyway:
        raise WrongUse(
            f"{run.path} cannot go on to the same bits, since it was started with {in_words(breaking)}: "
            "restore that, or go on all the same with --resume anyway, or train anew under another --run name"
        )
    if changed:
        run.say(f"changed since the run's start: {in_words(changed)}")
    start = {"step": step, "argv": sys.argv[1:], "plan": found["plan"], "changed": changed}
    run.write_json("manifest.json", json.dumps(stored | {"resumes": [*stored.get("resumes", []), start]}, indent=2) + "\n")


def _header(job: Job) -> None:
    config, process, schedule, say = job.config, job.process, job.schedule, job.run.say
    rows = {
        "run": str(job.run.path),
        "plan": os.environ.get("TRAINBOX_REASON") or f"{process.world_size} process(es) on {process.device}",
        "batch": batch_equation(job),
        **(
            {"shards": f"{config.shards} on {process.world_size} process(es), the same bits on 1 to {config.shards}"}
            if (config.shards or 1) > 1
            else {}
        ),
        "model": f"{type(job.task).__name__}, {sum(p.numel() for p in job.model.parameters()):,} parameters",
        "data": _data_sizes(job),
        "steps": f"{schedule.total_steps:,}, {schedule.steps_per_epoch:,} an epoch",
        "precision": f"{config.precision}, {'deterministic' if config.deterministic else 'fast'}, "
        f"{torch.get_num_threads()} CPU thread(s) a process",
    }
    if job.progress.step:
        rows["resume"] = f"from step {job.progress.step}, epoch {job.progress.step // schedule.steps_per_epoch + 1}"
    say("\n".join(f"{name:<10} {value}" for name, value in rows.items()))


def batch_equation(job: Job) -> str:
    """`384 = 3 GPUs x 128 x 1 accumulation`: how a step's examples are shared out."""
    config, process = job.config, job.process
    assert config.batch_size and config.shards
    if process.strategy == "dp":
        parts, noun, ending = torch.cuda.device_count(), "GPU", "s"
        most, rest = divmod(config.batch_size, parts * config.accumulation)
        each = f"up to {most + 1}" if rest else f"{most}"  # scattered as torch.chunk cuts
    else:
        parts, noun, ending = config.shards, "shard", "s"
        if config.shards == process.world_size:
            noun, ending = ("GPU", "s") if process.device.type == "cuda" else ("process", "es")
        each = _share(config.batch_size, config.shards * config.accumulation)
    return f"{config.batch_size} = {parts} {noun}{ending * (parts > 1)} x {each} x {config.accumulation} accumulation"


def _share(whole: int, parts: int) -> str:
    least, rest = divmod(whole, parts)
    return f"{least} or {least + 1}" if rest else f"{least}"


def _data_sizes(job: Job) -> str:
    held = "read by " + (f"{job.workers} loader workers a process" if job.workers else "the training process")
    if isinstance(job.train, TensorDataset):
        held = f"held on {job.train.tensors[0].device}"
    return f"{job.schedule.examples:,} training and {job.evaluation.size:,} validation examples, {held}"


def _closing(job: Job) -> None:
    config, progress, path = job.config, job.progress, job.run.path
    assert config.best_by is not None
    _, name = split_metric(config.best_by, "--best-by")
    steps = progress.step
    speed = steps * job.schedule.batch_size / progress.train_seconds if progress.train_seconds else math.nan
    best = f"{name} {progress.best_metrics[name]:.4f}, step {progress.best_step}" if progress.best_metrics else "none"
    rows = {
        "best": best + (f" (ended early at step {steps})" if progress.ended_early else ""),
        "trained": f"{steps:,} steps in {progress.train_seconds:.1f} s, {speed:,.0f} samples/s",
        "weights": f"{path}/model.safetensors (the best), " * bool(progress.best_step) + f"{path}/checkpoints/ (to go on)",
        "digest": f"{tensors_digest(job.model.state_dict())} (of the last weights)",
        "figures": f"{path}/metrics.jsonl; to look at them: tensorboard --logdir {path.parent}",
    }
    width = min(100, shutil.get_terminal_size().columns)
    job.run.say("-" * width + "\n" + "\n".join(f"{key:<10} {value}" for key, value in rows.items()))


@contextlib.contextmanager
def _told_as_failures(place: Path) -> Iterator[None]:
    """Known errors of torch and the system, as Failures with their exit codes."""
    try:
        yield
    except Failure:
        raise
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"the GPU's memory is used up ({str(error).splitlines()[0]}): lower --batch-size, or raise --accumulation, "
            "which keeps the batch and cuts it into smaller parts"
        ) from error
    except MemoryError as error:
        raise OutOfMemory("the host's memory is used up: lower --batch-size or --workers") from error
    except RuntimeError as error:
        if "can't allocate memory" in str(error):
            raise OutOfMemory(f"the host's memory is used up ({error}): lower --batch-size or --workers") from error
        if "shared memory" in str(error):  # a loader worker's: refused, or a bus error
            shm = "/dev/shm"  # noqa: S108 - the system's own name
            size_mib = shutil.disk_usage(shm).total // 2**20
            raise StorageFailure(
                f"{shm}, {size_mib} MiB, is too small for what the loader workers hand over: start the container with "
                "--shm-size=1g or --ipc=host, or add --workers 0"
            ) from error
        if "does not have a deterministic implementation" in str(error):
            raise WrongUse(f"{str(error).splitlines()[0]} Add --fast to train without the promise of the same bits") from error
        if is_network_error(error):
            raise NetworkFailure(f"lost contact with another process: {str(error).splitlines()[0]}") from error
        raise
    except OSError as error:
        if isinstance(error, ConnectionError):
            raise NetworkFailure(f"lost contact with another process: {error}") from error
        ours = str(error.filename or "").startswith(str(place))
        if not ours and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise  # the user's own file, say
        raise storage_failure(place, error) from error
