"""The table of all options and arguments of all commands.

The launcher parses the options of a command by this table, from the command line, the environment
and an experiment's file. It starts the trainer with `arguments`, which the trainer parses by the
same table. A new option of the training needs a line here and its use.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from trainbox.options.config import CAPTURE, CHANNELS_LAST, CONTIGUOUS, Config
from trainbox.options.optimizers import OPTIMIZERS
from trainbox.options.strategies import STRATEGY_RULES
from trainbox.options.types import (
    GpuCount,
    NamedPath,
    Number,
    Numbers,
    ResumeMode,
    Whole,
)

PREFIX = "TRAINBOX_"
MOST_PROCESSES = 4096  # of a machine
RDZV_TIMEOUT_S = 600
_LAUNCHER_SECTIONS = ("Launch", "Health", "Cluster")


@dataclass(eq=False)
class Option:
    """An option of a command.

    Attributes:
        flags: the names, such as `-m --module`, or `--health/--no-health` for a switch.
        type: the type of click; None is a text, and bool is a switch.
        help: the text of the help page, which adds the default unless the text names one.
        default: the value if no source has one.
        name: the parameter with the value; by default the name of the first long flag.
        metavar: the name of the value in the help; by default the name of the type.
        repeats: whether the option can be given several times.
        everyday: whether `--help` shows it; `--help-all` shows all options in sections.
        hidden: whether no help shows it.
        required: whether the command is refused without it.
        shown: whether manifests and messages may show a text from the environment. They show
            numbers, choices, switches and paths.
        section: the section of the help page; options of a single command have none.
        variables: the environment variables that set it.
    """

    flags: str
    type: Any
    help: str
    default: Any = None
    _: dataclasses.KW_ONLY
    name: str = ""
    metavar: str | None = None
    repeats: bool = False
    everyday: bool = False
    hidden: bool = False
    required: bool = False
    shown: bool = False
    section: str = ""
    variables: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Return the name in an experiment's file: `batch-size` for `--batch-size`."""
        return self.flags.split("/")[0].split()[-1].lstrip("-")

    @property
    def parameter(self) -> str:
        """Return the name of the parameter with the value."""
        return self.name or self.key.replace("-", "_")

    @property
    def of_trainer(self) -> bool:
        """Return whether the trainer gets the value. The file of --config is already read."""
        return self.section not in _LAUNCHER_SECTIONS and self is not CONFIG

    @property
    def help_with_default(self) -> str:
        """Return the help with the default, unless it names one itself."""
        if self.type is bool or self.default in (None, "", []) or "efault" in self.help:
            return self.help
        shown = f"{self.default:g}" if isinstance(self.default, float) else self.default
        return f"{self.help} Default: {shown}."

    def click(self, with_variables: bool = True) -> click.Option:
        """Return the option of click, which reads the environment if `with_variables`."""
        # click takes an explicit None for a default, and an explicit is_flag for an optional value.
        given: dict[str, Any] = {} if self.default is None else {"default": self.default}
        if self.type is bool:
            # A switch with two names may be neither on nor off.
            default = self.default if "/" in self.flags else bool(self.default)
            given = {"is_flag": True, "default": default}
        return click.Option(
            [*self.flags.split(), self.parameter],
            type=None if self.type is bool else self.type,
            **given,
            help=self.help_with_default,
            metavar=self.metavar,
            multiple=self.repeats,
            hidden=self.hidden,
            required=self.required,
            envvar=self.variables if with_variables else None,
        )

    @property
    def may_be_shown(self) -> bool:
        """Return whether manifests and messages may show the value from the environment."""
        return self.type is not None or self.shown

    def arguments(self, value: Any) -> list[str]:
        """Return the arguments that give the option this value."""
        flag, _, opposite = self.flags.partition("/")
        if self.type is bool:
            return [flag if value else opposite]
        values = value if self.repeats else [value]
        return [text for one in values for text in (flag.split()[-1], str(one))]


@dataclass(eq=False)
class Argument:
    """A positional argument of a command, which the trainer gets as well."""

    parameter: str
    type: Any = None
    default: Any = None
    required: bool = True
    count: int = 1  # -1: any number
    metavar: str | None = None
    variables: tuple[str, ...] = ()

    def click(self, with_variables: bool = True) -> click.Argument:
        """Return the argument of click, which reads the environment if `with_variables`."""
        return click.Argument(
            [self.parameter],
            type=self.type,
            required=self.required,
            nargs=self.count,
            metavar=self.metavar,
            envvar=self.variables if with_variables else None,
            **({} if self.default is None else {"default": self.default}),
        )


Row = Option | Argument
Everyday = functools.partial(Option, everyday=True)


def _section(title: str, *rows: Option) -> tuple[Option, ...]:
    """Put the rows in a section of the help, and name their variables by their keys."""
    prefix = "" if title in _LAUNCHER_SECTIONS else PREFIX
    for row in rows:
        row.section = title
        row.variables += (prefix + row.key.replace("-", "_").upper(),)
    return rows


# A table: one or two lines for each option.
# fmt: off
_COUNT = Whole(1)
_FOLDER = NamedPath("folder", readable=False, file_okay=False)
_FILE, _RUN = NamedPath("file"), NamedPath("run")

_DEVICE: tuple[Option, ...] = _section("Launch",
    Everyday("--gpus", GpuCount(), "Number of GPUs; 0 is the CPU. Default: all visible."),
    Everyday("--gpu-ids", None, "The GPUs to use: 0,2 or UUIDs, or 0:1 for a MIG slice.",
        metavar="IDS", shown=True),
    Everyday("--processes", Whole(1, MOST_PROCESSES),
        "Number of CPU processes: torchrun DDP over gloo, or a sweep's trials at a time."),
)
DEVICE = Option("--device", click.Choice(["auto", "cuda", "mps", "cpu"]),
    "Device to train on. Default: auto, which is cuda if there are GPUs.", section="Launch",
    variables=("DEVICE", "TRAINBOX_DEVICE"))
HEALTH = _section("Health",
    Option("--health/--no-health", bool, "Check the GPUs before the training, watch them during "
        "it, and exit with code 3 if they fail. Default: yes.", True),
    Option("--health-limits", _FILE, "TOML file that overrides limits: docs/guides/health.md."),
)
_REQUESTABLE = {name: rules.help for name, rules in STRATEGY_RULES.items() if rules.help}
_STRATEGY = _section("Launch",
    Everyday("--strategy", click.Choice(list(_REQUESTABLE)),
        "".join(f"{name}: {text}. " for name, text in _REQUESTABLE.items())
        + "Default: ddp on 2 GPUs or more."),
)
_CLUSTER = _section("Cluster",
    Option("--nnodes", _COUNT, "Number of machines. Default: the scheduler's value."),
    Option("--node-rank", Whole(0), "This machine's number, from 0."),
    Option("--rdzv-endpoint", None, "Address of the rendezvous, on node 0.", metavar="HOST:PORT",
        shown=True),
    Option("--rdzv-id", None, "Name of the job at the rendezvous, the same on all machines.",
        metavar="TEXT"),
    Option("--rdzv-timeout-s", _COUNT, "Seconds to wait for the other machines.", RDZV_TIMEOUT_S,
        metavar="SECONDS"),
)
_PER_GPU = Option("--per-gpu", _COUNT, "Trials that share a GPU.", 1, metavar="K", section="Launch")
_SWEPT: tuple[Option, ...] = _section("Sweep",
    Everyday("--seeds", _COUNT, "Trials of each combination, with seeds from --seed on.", 1),
    Everyday("--grid", None, "Values of a field or an option; repeatable.", name="grids",
        metavar="NAME=A,B,C", repeats=True),
    Everyday("--range", None, "Range that a sampler draws from; repeatable.", name="ranges",
        metavar="NAME=LOW:HIGH[:log]", repeats=True),
    Everyday("--sampler", click.Choice(["grid", "random", "tpe"]),
        "Default: grid, which trains all combinations.", "grid"),
    Everyday("--trials", _COUNT, "Number of trials that a sampler draws."),
    Everyday("--metric", None, "Metric that ranks the trials: accuracy, min:loss.",
        metavar="METRIC", shown=True),
    Everyday("--pruner", click.Choice(["none", "median"]),
        "median: stop trials that are worse than the median.", "none"),
    Option("--retries", Whole(0), "Retries of a failed trial, on another GPU.", 1),
    Option("--retry-failed", bool, "Train trials again that failed after all retries."),
    Everyday("--trial-minutes", Number(0),
        "Stop a trial that takes longer, as failed. Default: no limit.", metavar="N"),
    Everyday("--name", None, "The sweep's folder in --runs-dir. Default: the task and a digest.",
        metavar="NAME"),
    Option("--worker", bool, "Join the sweep of another machine: wait for it, and print no table."),
)
# What is different in the sweep of a script.
_OF_SCRIPT = {
    "grid": "Values of {NAME} in ARGS; repeatable.",
    "metric": "Metric that ranks the trials: accuracy, min:loss. none: the script reports none.",
    "name": "The sweep's folder in --runs-dir. Default: the script and a digest.",
}
_FOLDERS = _DATA_DIR, _RUNS_DIR = _section("Storage",
    Option("--data-dir", _FOLDER, "Folder of the datasets.", Path("data")),
    Option("--runs-dir", _FOLDER, "Folder of the runs.", Path("runs")),
)
_OWN_DATA_DIR, _OWN_RUNS_DIR = (dataclasses.replace(row, section="") for row in _FOLDERS)
CONFIG, _FIELDS = _section("Training",
    Everyday("--config", _FILE,
        "File of settings: exp.toml, or the folder of a run; other options override it."),
    Everyday("--set", None, "A field of the task; repeatable.", name="pairs", metavar="NAME=VALUE",
        repeats=True, variables=("SET",)),
)
_SAME_BITS = _, _, _, _SEED, _ = _section("Same bits",
    Option("--shards", _COUNT, "Shards of a batch: the same bits on 1 to V processes. Default: "
        "the number of processes of the run's first start.", metavar="V"),
    Option("--threads", Whole(1, 1024), "CPU threads per process; they change bits, so a run "
        "keeps them. Default: its share of the CPUs."),
    Option("--digest-steps", _COUNT, "Steps between entries in digests.jsonl. Default: one "
        "epoch, or more if that takes long."),
    Everyday("--seed", Whole(0, 2**63 - 1), "Seed of all random numbers."),
    Option("--deterministic/--fast", bool,
        "The same bits each time (default), or the fastest kernels."),
)
_REHEARSAL, = _section("Same bits",
    Option("--rehearsal/--no-rehearsal", bool, "Before its first step, a run shows that its own "
        "resume gives the same bits. Default: yes.", True),
)
# The settings of Config, by their names.
_SETTINGS = (
    *_section("Training",
        Option("--init", None,
            "Start from the best weights of another run, or from a .safetensors or .pt file.",
            metavar="RUN|FILE", shown=True),
        Option("--freeze", None,
            "Weights that do not train, such as 'backbone' or '*.bias'; repeatable.",
            metavar="PATTERN", repeats=True),
        Everyday("--epochs", _COUNT, "Passes over the training set. Default: the task's."),
        Option("--max-steps", _COUNT, "Optimizer steps, instead of --epochs."),
        Everyday("--lr", Number(0), "Peak learning rate. Default: the task's.",
            name="learning_rate"),
        Option("--warmup-epochs", Number(0, open_low=False, high=1e9),
            "Epochs of linear warm-up. Default: the task's, or 0."),
        Option("--optimizer", click.Choice(list(OPTIMIZERS)),
            "Optimizer, unless the task builds its own. Default: the task's, or adamw."),
        Option("--weight-decay", Number(0, open_low=False),
            "Factor of the decay of weights. Default: the optimizer's."),
        Option("--clip-norm", Number(0), "Largest gradient norm. Default: no limit."),
        Option("--skip-nonfinite", Whole(0), "Skip up to N steps in a row whose gradient is not "
            "finite. Default: 0, which stops the training at the first."),
        Everyday("--precision", click.Choice(["fp32", "tf32", "bf16", "fp16"]), "Number format of "
            "the computations. Default: bf16 on Ampere or newer, fp16 on older GPUs, fp32 "
            "elsewhere."),
        Option("--workers", Whole(0, 1024),
            "Loader workers per process, for data that is not in memory."),
        Option("--compile/--no-compile", bool,
            "torch.compile the model; needs a C compiler, and triton on a GPU."),
        Option("--capture", click.Choice(list(CAPTURE)), "auto: capture steps as CUDA graphs if "
            "the rehearsal shows that they have the bits of eager steps."),
        Option("--memory-format", click.Choice([CONTIGUOUS, CHANNELS_LAST]), "Order of the weights "
            "of 2D convolutions; a run keeps it. Default: channels_last in bf16 on CPUs if the "
            "task works with it, else contiguous."),
    ),
    *_section("Batch",
        Everyday("--batch-size", _COUNT,
            "Examples per optimizer step, over all GPUs. Default: the task's."),
        Option("--batch-size-per-gpu", _COUNT, "The same, for each process."),
        Option("--accumulation", _COUNT, "Micro-batches per step for each shard. Default: 1, and "
            "more if the first steps do not fit."),
        Option("--lr-scaling", click.Choice(["none", "linear", "sqrt"]),
            "Scale --lr with the batch size."),
        Option("--base-batch-size", _COUNT, "Batch size that --lr is for."),
    ),
    *_SAME_BITS,
    *_section("Validation",
        Option("--eval-every", _COUNT, "Epochs between validations."),
        Option("--best-by", None,
            "Metric of the best checkpoint: accuracy, min:loss. Default: the task's.",
            metavar="METRIC", shown=True),
        Option("--early-stopping", None, "Stop when this metric no longer improves.",
            metavar="METRIC", shown=True),
        Option("--patience", _COUNT, "Validations to wait for an improvement."),
    ),
    *_section("Storage",
        Option("--checkpoint-steps", _COUNT,
            "Steps between checkpoints, in addition to --checkpoint-minutes."),
        Option("--checkpoint-minutes", Number(0), "Minutes between checkpoints."),
        Option("--keep", _COUNT, "Newest checkpoints to keep, in addition to the best."),
        Option("--log-steps", _COUNT,
            "Steps between entries in metrics.jsonl. Default: 50, or more if that takes long."),
    ),
)
# The settings by the names that a task could give them: the option's name and the field's name in
# `Config`.
SETTINGS_BY_NAME = {
    name: row for row in _SETTINGS for name in (row.key.replace("-", "_"), row.parameter)
}
_defaults = dataclasses.asdict(Config())
for _row in _SETTINGS:
    _default = _defaults[_row.parameter]
    _row.default = None if _row.repeats else _default
_ONE_RUN = _section("Storage",
    Everyday("--run", None,
        "The run's folder in --runs-dir. Default: the task, the settings and a digest.",
        metavar="NAME"),
    Everyday("--resume", ResumeMode(), "auto: resume from the run's "
        "newest checkpoint. never: refuse a run that has one. anyway: resume even if the software, "
        "the hardware, the data or the task changed.", "auto"),
    Option("--profile", _COUNT,
        "Profile N steps: write profile.json, and print the ten longest operators."),
    Option("--hang-minutes", Number(0), "End the training with code 7 if there is no step and no "
        "batch of a validation for N minutes. Default: no limit.", metavar="N"),
)
_MEASURE = Option("--measure-seconds", Number(0), "For `trainbox bench`.", hidden=True)
_TASK = Argument("task", None, "digits", metavar="[TASK]", variables=("TASK",))
_STORED_RUN: tuple[Option, ...] = (
    Option("--checkpoint", click.Choice(["best", "last"]),
        "The weights of the best validation (default), or of the newest checkpoint.", "best"),
    _OWN_DATA_DIR,
    Option("--anyway", bool, "Accept changed source files of the task."),
)
_JSON = Option("--json", bool, "One JSON object instead of lines.", name="as_json")
_SCRIPT_FOLDER = (
    Option("--run", None, "The run's folder in --runs-dir. Default: the script's name and a digest "
        "of its arguments, so that the same command has the same folder.", name="run_name",
        metavar="NAME"),
    _OWN_RUNS_DIR,
)
_MODULE = Option("-m --module", None,
    "Run a module, found from the current folder, instead of a file.", metavar="MODULE")
_TORCHRUN = Option("--torchrun/--no-torchrun", bool, "Start with torchrun, or one process without "
    "it that sees all chosen GPUs, as for DataParallel. Default: torchrun for several processes or "
    "if --processes is given.")
_ON_RESUME = Option("--on-resume", None, "Arguments that the script gets too, once their file "
    "exists, such as '--resume {run}/last.pt'.", metavar="ARGS")
_REST = Argument("arguments", click.UNPROCESSED, count=-1, required=False)

LAUNCH: tuple[Option, ...] = (*_DEVICE, DEVICE, *HEALTH, *_STRATEGY, *_CLUSTER)
_TRAINING = (CONFIG, _FIELDS, *_SETTINGS, _REHEARSAL, _RUNS_DIR)
# The keys of an experiment's file in the tables [train] and [sweep].
KEYS_OF_TRAIN = (*_SETTINGS, _REHEARSAL, _RUNS_DIR, _DATA_DIR, *_ONE_RUN)
KEYS_OF_SWEEP = (*_SWEPT, _PER_GPU)
_TRAIN: tuple[Row, ...] = (
    *LAUNCH, _TASK, *_TRAINING, *_ONE_RUN[:1], _DATA_DIR, *_ONE_RUN[1:], _MEASURE,
)
_SCRIPT: tuple[Row, ...] = (
    *_DEVICE, DEVICE, *HEALTH, *_CLUSTER, _MODULE, *_SCRIPT_FOLDER,
    _TORCHRUN, _ON_RESUME,
    Option("--restarts", Whole(0),
        "Start the script again up to N times after code 75, 3 or 7, or if a process was killed.",
        0),
    Option("--restart-on", click.Choice(["temporary", "any"]), "any: also after other codes than "
        "0, such as after an exception. Default: temporary, the codes of --restarts.",
        "temporary"),
    Option("--hang-minutes", Number(0), "End the script with code 7 if no process prints or "
        "computes for N minutes. Default: no limit.", metavar="N",
        variables=(f"{PREFIX}HANG_MINUTES",)),
    Option("--python", None, "The Python that runs the script. Default: the Python of the active "
        "virtual environment or conda, else of the script's first line, else of Trainbox.",
        metavar="PATH"),
    Option("--prefix", bool, "Put the process's number in front of each line of output."),
    Option("--trial", bool, "For `trainbox sweep run`.", hidden=True),
    dataclasses.replace(_REST, metavar="SCRIPT [--] [ARGS]"),
)
_JUDGED = (
    Option("--gpus", GpuCount(), "Required number of GPUs. Default: any number.",
        variables=("GPUS",)),
    Option("--gpu-ids", None, "Required GPUs; only these are judged.", metavar="IDS",
        variables=("GPU_IDS",), shown=True),
    dataclasses.replace(HEALTH[1], section=""),
    _OWN_RUNS_DIR,
)
_HEALTH = (
    *_JUDGED[:2],
    Option("--gate", bool, "Before a run: one sample, in less than a second."),
    Option("--live", bool,
        "Liveness probe: check that the driver answers and all GPUs are present."),
    Option("--monitor", bool,
        "During runs: sample periodically, and serve the findings over HTTP."),
    Option("--deep", bool, "Compute on each GPU and communicate between each pair; takes minutes."),
    Option("--list", bool, "List the visible GPUs and MIG slices; judge nothing."),
    Option("--json", bool, "Print JSON: docs/reference/health.schema.json; --list: an array.",
        name="as_json"),
    Option("--require", None, "Checks that must be readable here, such as ecc-uncorrected,nvlink.",
        "", metavar="CHECKS"),
    _JUDGED[2],
    # For HEALTH=0, with which the two modes that decide about a training pass without a check.
    Option("--health/--no-health", bool, "", True, name="wanted", hidden=True,
        variables=("HEALTH",)),
    Option("--processes", _COUNT, "Processes to start here. Default: one per GPU.",
        variables=("PROCESSES",)),
    _JUDGED[3],
    Option("--deadline-s", Number(1, open_low=False), "--deep: seconds for each of its "
        "programs.", 120.0, metavar="S"),
    Option("--listen", None, "--monitor: address to listen on.", "127.0.0.1:9400",
        metavar="HOST:PORT"),
    Option("--interval-s", Number(0.1, open_low=False, high=86400), "--monitor: seconds between "
        "two samples.", 5.0, metavar="S"),
)
_DRILL_SEED = Option("--seed", Whole(0), "Seed of the random kills. Default: random.")
# Which devices the trainings of a command use.
_USED = (
    *(dataclasses.replace(row, section="") for row in _DEVICE[:2]),
    Option("--device", click.Choice(["auto", "cuda", "cpu"]), "Device to use. Default: auto.",
        variables=DEVICE.variables),
)
_BENCH: tuple[Row, ...] = (
    Option("--gpus", Numbers(0), "Numbers of GPUs; 0 is the CPU. Default: 1, 2, 4 ... and all.",
        name="counts", variables=("GPUS",)),
    Option("--processes", Numbers(1, MOST_PROCESSES),
        "Numbers of CPU processes. Default without GPUs: 1, 2 ... up to 4.",
        variables=("PROCESSES",)),
    *_USED[1:],
    Option("--strategies", None, "Strategies on several GPUs.", "ddp", metavar="ddp,dp",
        variables=("STRATEGY",), shown=True),
    Option("--batch-size", Numbers(1), "Examples per step (strong scaling) and per GPU (weak "
        "scaling). Default: the task's, without weak scaling.", name="batch_sizes",
        variables=("TRAINBOX_BATCH_SIZE",)),
    Option("--workers", Numbers(0),
        "Loader workers of each process. Default: the same as for train.",
        variables=("TRAINBOX_WORKERS",)),
    Option("--rounds", _COUNT, "Measurements of each case.", 3),
    Option("--seconds", Number(0.1, open_low=False, high=3600),
        "Measured seconds of each case, after a warm-up.", 10.0, metavar="S"),
    Option("--out", _FOLDER, "Also write bench.md, bench.json and bench.svg to this folder."),
    dataclasses.replace(_REST, metavar="TASK"),
)

# The options and arguments of each command, in the order of its help.
COMMANDS: dict[str, tuple[Row, ...]] = {
    "bench": _BENCH,
    "bench-figure": (Argument("folder", _FOLDER),),  # the trainer draws for `bench`
    "clean": (
        Option("--yes", bool, "Remove without a question."),
        _OWN_RUNS_DIR,
    ),
    "compare": (
        Option("--figure", _FILE, "The picture of the curves: .png, .svg or .pdf.",
            Path("compare.png")),
        Argument("runs", _RUN, count=-1),
    ),
    "config": (Argument("run", _RUN),),
    "doctor": _JUDGED,
    "drill": (
        Option("--shards", _COUNT, "Shards of a batch.", 4, metavar="V"),
        Option("--steps", Whole(10), "Length of each training.", 60),
        _DRILL_SEED, *_USED,
        dataclasses.replace(_DEVICE[2], section="",
            help="Largest number of CPU processes. Default: 4."),
        Argument("tasks", count=-1, required=False, variables=("TASK",)),
    ),
    "drill run": (
        Option("--compare", None,
            "File with the result, in the run folder or the current one: .safetensors, .pt, .npz, "
            ".csv, .json.",
            name="file", metavar="FILE", required=True),
        Option("--processes", Numbers(1, MOST_PROCESSES),
            "Numbers of GPUs or CPU processes. Default: all GPUs in use, or 1 process.",
            name="counts"),
        Option("--kills", Whole(1, 100), "Kills of each training, by SIGKILL and SIGTERM in turn.",
            2),
        Option("--tolerance", Number(0, open_low=False, high=1),
            "Accept floats with |a - b| <= T * max(1, |a|). Default: 0, the same bits.", 0.0,
            metavar="T"),
        Option("--ignore", None, "Leave out a key, column or tensor, such as time or 'time*'.",
            name="ignored", metavar="NAME", repeats=True),
        _ON_RESUME, _DRILL_SEED, *_USED,
        _TORCHRUN,
        dataclasses.replace(_MODULE, help="Train with a module instead of a script."),
        dataclasses.replace(_REST, metavar="SCRIPT [-- ARGS]"),
    ),
    "evaluate": (
        *LAUNCH, *_STORED_RUN,
        Option("--data", click.Choice(["validation", "test"]),
            "The validation data (default), or the task's test_dataset.", "validation"),
        Option("--out", _FOLDER,
            "Folder of the results. Default: evaluations/CHECKPOINT-DATA in RUN."),
        Option("--predictions", _FILE, "Write the prediction for each example as CSV."),
        Option("--intervals/--no-intervals", bool,
            "Bootstrap 95 % intervals of the metrics (default).", True),
        Argument("run", _RUN),
    ),
    "export": (
        Option("--to", click.Choice(["pt2", "onnx"]),
            "The format: pt2 of torch.export (default), or onnx.", "pt2"),
        _STORED_RUN[0],
        Option("--out", _FOLDER, "Folder of the files. Default: exports/CHECKPOINT-FORMAT in RUN."),
        Option("--licence", None, "The licence of the model, for its card.", metavar="NAME"),
        Option("--anyway", bool, "Export even if the source files of the task changed."),
        _STORED_RUN[1],
        Argument("run", _RUN),
    ),
    "health": _HEALTH,
    "new": (
        Option("--kind", click.Choice(["classification", "regression", "sequence", "images",
            "script"]), "What the file trains.", "classification"),
        Argument("path", NamedPath("file", readable=False)),
    ),
    "plan": _TRAIN,
    "plan run": _SCRIPT,
    "predict": (
        *LAUNCH, *_STORED_RUN,
        Option("--format", click.Choice(["csv", "jsonl"]),
            "CSV with a header (default), or a JSON object on each line.", "csv", name="form"),
        Argument("run", _RUN),
        Argument("files", NamedPath("files"), count=-1),
    ),
    "run": _SCRIPT,
    "runs": (
        Option("--task", None, "Only the runs of this task.", metavar="TASK"),
        Option("--sort", click.Choice(["name", "age", "metric", "size", "state"]),
            "The order of the rows.", "age"),
        Option("--all", bool, "Also show the trials of sweeps.", name="trials"),
        dataclasses.replace(_JSON, help="A list of JSON objects instead of the table."),
        _OWN_RUNS_DIR,
    ),
    "sweep": (
        *_DEVICE, DEVICE, *HEALTH, _PER_GPU, _TASK, *_SWEPT, *_TRAINING, _DATA_DIR,
        # Refused with a remedy.
        *(dataclasses.replace(row, hidden=True) for row in _ONE_RUN[:2]),
    ),
    "sweep run": (
        *_DEVICE, DEVICE, *HEALTH, _PER_GPU,
        *tuple(dataclasses.replace(row, help=_OF_SCRIPT.get(row.key, row.help)) for row in _SWEPT),
        dataclasses.replace(_SEED, section="Sweep", help="The first {seed}. Default: 0."),
        _RUNS_DIR,
        dataclasses.replace(_MODULE, section="Sweep"),
        Everyday("--metric-regex", None, "Read the metric from the output: the group of the last "
            "match.", metavar="REGEX", section="Sweep"),
        dataclasses.replace(_ON_RESUME, section="Sweep"),
        Option("--torchrun", bool, "Start each trial with torchrun, for a script that needs its "
            "variables.", section="Sweep"),
        Argument("script", required=False, metavar="SCRIPT -- ARGS"),
    ),
    "sweep show": (
        _OWN_RUNS_DIR,
        Option("--metric", None,
            "Default: the metric that ranks the sweep's trials, or the first of the trials.",
            metavar="NAME", shown=True),
        Option("--csv", bool, "Print all trials and metrics as CSV.", name="as_csv"),
        Option("--figure", _FILE, "Write a figure to this file instead: .png, .svg or .pdf."),
        Argument("name"),
    ),
    "tasks": (_JSON, Argument("name", required=False)),
    "train": _TRAIN,
    "verify": (
        *LAUNCH,
        Option("--steps", _COUNT, "Repeat the first N steps. Default: the whole run."),
        _STORED_RUN[1],
        Argument("run", _RUN),
        Argument("other", _RUN, required=False),
    ),
}

# fmt: on


def options(command: str) -> Iterator[Option]:
    """Yield the options of a command."""
    return (row for row in COMMANDS[command] if isinstance(row, Option))


def variables(rows: Iterable[Row]) -> frozenset[str]:
    """Return the environment variables that set one of `rows`."""
    return frozenset(name for row in rows for name in row.variables)


def arguments(command: str, values: Mapping[str, Any]) -> list[str]:
    """Return the command line of the trainer for these values of parameters.

    Defaults are left out.
    """
    named: list[str] = []
    for option in options(command):
        value = values.get(option.parameter, option.default)
        is_default = value in (option.default, None, ()) or (value is False and not option.default)
        if option.of_trainer and not is_default:
            named += option.arguments(value)
    given = [values.get(row.parameter) for row in COMMANDS[command] if isinstance(row, Argument)]
    values_of = [value if isinstance(value, tuple) else (value,) for value in given]
    placed = [str(one) for each in values_of for one in each if one is not None]
    if any(text.startswith("-") for text in placed):
        return [command.replace(" ", "-"), *named, "--", *placed]
    return [command.replace(" ", "-"), *placed, *named]


def swept_names(values: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the fields and settings that --grid and --range vary."""
    return frozenset(text.partition("=")[0] for text in (*values["grids"], *values["ranges"]))


def config_of(values: Mapping[str, Any], fields: Mapping[str, Any]) -> Config:
    """Return the settings of a training with these values of parameters and fields of the task."""
    names = {setting.name for setting in dataclasses.fields(Config)} - {"task", "fields"}
    settings = {name: value for name, value in values.items() if name in names}
    # A list is what JSON has, so that it can be compared with a run's config.json.
    lists = {name: list(value) for name, value in settings.items() if isinstance(value, tuple)}
    return Config(task=values["task"], fields=dict(fields), **(settings | lists))
