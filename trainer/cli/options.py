"""Define the options that several commands share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from trainbox.contract.config import CHANNELS_LAST, CONTIGUOUS, load_config_file
from trainbox.contract.experiment import SUFFIX
from trainbox.contract.optimizers import OPTIMIZERS
from trainer.cli.parameters import (
    BATCH,
    BITS,
    COUNT,
    STORAGE,
    TRAINING,
    VALIDATION,
    Number,
    Option,
    Whole,
    add_options,
    make_option,
)


def _read_config_file(ctx: click.Context, _param: click.Parameter, path: Path | None) -> None:
    if path is not None and path.suffix == SUFFIX:
        from trainer.cli.experiment import apply_experiment

        apply_experiment(ctx, path)
    elif path is not None:
        settings = load_config_file(path)
        ctx.meta["fields"] = settings.pop("fields", {})
        # As text, so that a value is parsed as on the command line. For example, 1.5 epochs are
        # refused.
        ctx.default_map = {
            name: list(map(str, value)) if isinstance(value, list) else str(value)
            for name, value in settings.items()
            if value is not None
        }


def _as_list(_ctx: click.Context, _param: click.Parameter, values: Sequence[str]) -> list[str]:
    """Return `values` as JSON has them, so that they can be compared with a run's config.json."""
    return list(values)


def seed_option(section: str, text: str) -> Any:
    """Return the option `--seed` with this help."""
    return make_option(
        "--seed",
        section=section,
        everyday=True,
        type=Whole(0, 2**63 - 1),
        metavar="N",
        default=0,
        help=text,
    )


_DATA_DIR = make_option(
    "--data-dir",
    section=STORAGE,
    type=click.Path(path_type=Path),
    default=Path("data"),
    help="Folder of the datasets. Default: data.",
)
RUNS_DIR = make_option(
    "--runs-dir",
    section=STORAGE,
    type=click.Path(readable=False, path_type=Path),
    default=Path("runs"),
    help="Folder of the runs. Default: runs.",
)
_TRAINING_OPTIONS = [
    click.option(
        "--config",
        cls=Option,
        section=TRAINING,
        everyday=True,
        type=click.Path(path_type=Path),
        envvar="TRAINBOX_CONFIG",
        is_eager=True,
        expose_value=False,
        callback=_read_config_file,
        help="File of settings: exp.toml, or a run's config.json; other options override it.",
    ),
    make_option(
        "--set",
        "pairs",
        section=TRAINING,
        everyday=True,
        multiple=True,
        metavar="NAME=VALUE",
        also=["SET"],
        help="A field of the task; repeatable.",
    ),
    make_option(
        "--init",
        section=TRAINING,
        metavar="RUN|FILE",
        help="Start from the best weights of another run, or from a .safetensors or .pt file.",
    ),
    make_option(
        "--freeze",
        section=TRAINING,
        multiple=True,
        metavar="PATTERN",
        callback=_as_list,
        help="Weights that do not train, such as 'backbone' or '*.bias'; repeatable.",
    ),
    make_option(
        "--epochs",
        section=TRAINING,
        everyday=True,
        type=COUNT,
        metavar="N",
        help="Passes over the training set. Default: the task's.",
    ),
    make_option(
        "--max-steps",
        section=TRAINING,
        type=COUNT,
        metavar="N",
        help="Optimizer steps, instead of --epochs.",
    ),
    make_option(
        "--batch-size",
        section=BATCH,
        everyday=True,
        type=COUNT,
        metavar="N",
        help="Examples per optimizer step, over all GPUs. Default: the task's.",
    ),
    make_option(
        "--batch-size-per-gpu",
        section=BATCH,
        type=COUNT,
        metavar="N",
        help="The same, for each process.",
    ),
    make_option(
        "--accumulation",
        section=BATCH,
        type=COUNT,
        metavar="N",
        help="Micro-batches per step for each shard. Default: 1, and more if the first steps do "
        "not fit.",
    ),
    make_option(
        "--shards",
        section=BITS,
        type=COUNT,
        metavar="V",
        help="Shards of a batch: the same bits on 1 to V processes. Default: the number of "
        "processes of the run's first start.",
    ),
    make_option(
        "--threads",
        section=BITS,
        type=Whole(1, 1024),
        metavar="N",
        help="CPU threads per process; they change bits, so a run keeps them. Default: its share "
        "of the CPUs.",
    ),
    make_option(
        "--lr",
        "learning_rate",
        section=TRAINING,
        everyday=True,
        type=Number(0),
        help="Peak learning rate. Default: the task's.",
    ),
    make_option(
        "--lr-scaling",
        section=BATCH,
        type=click.Choice(["none", "linear", "sqrt"]),
        default="none",
        help="Scale --lr with the batch size. Default: none.",
    ),
    make_option(
        "--base-batch-size",
        section=BATCH,
        type=COUNT,
        metavar="N",
        default=256,
        help="Batch size that --lr is for. Default: 256.",
    ),
    make_option(
        "--warmup-epochs",
        section=TRAINING,
        type=Number(0, open_low=False, high=1e9),
        default=0.0,
        help="Epochs of linear warm-up. Default: 0.",
    ),
    make_option(
        "--optimizer",
        section=TRAINING,
        type=click.Choice(list(OPTIMIZERS)),
        default="adamw",
        help="Optimizer, unless the task builds its own. Default: adamw.",
    ),
    make_option(
        "--weight-decay",
        section=TRAINING,
        type=Number(0, open_low=False),
        help="Factor of the decay of weights. Default: the optimizer's.",
    ),
    make_option(
        "--clip-norm",
        section=TRAINING,
        type=Number(0),
        help="Largest gradient norm. Default: no limit.",
    ),
    make_option(
        "--skip-nonfinite",
        section=TRAINING,
        type=Whole(0),
        metavar="N",
        default=0,
        help="Skip up to N steps in a row whose gradient is not finite. Default: 0, which "
        "stops the training at the first.",
    ),
    make_option(
        "--precision",
        section=TRAINING,
        everyday=True,
        type=click.Choice(["fp32", "tf32", "bf16", "fp16"]),
        help="Number format of the computations. Default: bf16 on Ampere or newer, fp16 on "
        "older GPUs, fp32 elsewhere.",
    ),
    make_option(
        "--eval-every",
        section=VALIDATION,
        type=COUNT,
        metavar="N",
        default=1,
        help="Epochs between validations. Default: 1.",
    ),
    make_option(
        "--best-by",
        section=VALIDATION,
        metavar="METRIC",
        help="Metric of the best checkpoint: accuracy, min:loss. Default: the task's.",
    ),
    make_option(
        "--early-stopping",
        section=VALIDATION,
        metavar="METRIC",
        help="Stop when this metric no longer improves.",
    ),
    make_option(
        "--patience",
        section=VALIDATION,
        type=COUNT,
        metavar="N",
        default=5,
        help="Validations to wait for an improvement. Default: 5.",
    ),
    make_option(
        "--checkpoint-steps",
        section=STORAGE,
        type=COUNT,
        metavar="N",
        help="Steps between checkpoints, in addition to --checkpoint-minutes.",
    ),
    make_option(
        "--checkpoint-minutes",
        section=STORAGE,
        type=Number(0),
        default=5.0,
        help="Minutes between checkpoints. Default: 5.",
    ),
    make_option(
        "--keep",
        section=STORAGE,
        type=COUNT,
        metavar="N",
        default=3,
        help="Newest checkpoints to keep, in addition to the best. Default: 3.",
    ),
    make_option(
        "--log-steps",
        section=STORAGE,
        type=COUNT,
        metavar="N",
        help="Steps between entries in metrics.jsonl. Default: 50, or more if that takes long.",
    ),
    make_option(
        "--digest-steps",
        section=BITS,
        type=COUNT,
        metavar="N",
        help="Steps between entries in digests.jsonl. Default: one epoch, or more if that takes "
        "long.",
    ),
    make_option(
        "--workers",
        section=TRAINING,
        type=Whole(0, 1024),
        metavar="N",
        help="Loader workers per process, for data that is not in memory.",
    ),
    seed_option(BITS, "Seed of all random numbers. Default: 0."),
    make_option(
        "--deterministic/--fast",
        section=BITS,
        default=True,
        help="The same bits each time (default), or the fastest kernels.",
    ),
    make_option(
        "--compile/--no-compile",
        section=TRAINING,
        default=False,
        help="torch.compile the model; needs a C compiler, and triton on a GPU.",
    ),
    make_option(
        "--memory-format",
        section=TRAINING,
        type=click.Choice([CONTIGUOUS, CHANNELS_LAST]),
        help="Order of the weights of 2D convolutions; a run keeps it. Default: channels_last in "
        "bf16 on CPUs if the task works with it, else contiguous.",
    ),
    RUNS_DIR,
    make_option(
        "--run",
        section=STORAGE,
        everyday=True,
        metavar="NAME",
        help="The run's folder in --runs-dir. Default: the task and a digest of the settings.",
    ),
    _DATA_DIR,
    make_option(
        "--resume",
        section=STORAGE,
        everyday=True,
        type=click.Choice(["auto", "never", "anyway"]),
        default="auto",
        help="auto: resume from the run's newest checkpoint. never: refuse a run that has one. "
        "anyway: resume even if the software, the hardware, the data or the task changed.",
    ),
]


# The options of a command that the launcher plans. It checks the arguments with --check, and starts
# the processes with --device-on-stdin while it still looks for the GPUs.
_LAUNCH_OPTIONS = [
    make_option(
        "--device",
        type=click.Choice(["auto", "cuda", "mps", "cpu"]),
        default="auto",
        help="Default: auto.",
    ),
    click.option("--check", "only_check", is_flag=True, hidden=True),
    click.option("--device-on-stdin", is_flag=True, hidden=True),
]


training_options = add_options(*_TRAINING_OPTIONS, *_LAUNCH_OPTIONS)
planned_options = add_options(*_LAUNCH_OPTIONS)
verification_options = add_options(_DATA_DIR, *_LAUNCH_OPTIONS)
data_option = add_options(_DATA_DIR)
