"""The words of other programs, and what they are here."""

# Options: what is after `--` in other programs, and the option with or without a value.
OPTIONS = {
    **dict.fromkeys(("num-train-epochs", "max-epochs", "n-epochs"), "--epochs"),
    **dict.fromkeys(("per-device-train-batch-size", "bs", "batch"), "--batch-size"),
    **dict.fromkeys(("gradient-accumulation-steps", "accumulate-grad-batches"), "--accumulation"),
    **dict.fromkeys(("amp", "mixed-precision", "amp-dtype", "dtype"), "--precision"),
    **{name: f"--precision {name}" for name in ("bf16", "fp16", "tf32")},
    **dict.fromkeys(("devices", "ngpus", "num-gpus"), "--gpus"),
    **dict.fromkeys(("nproc-per-node", "num-processes", "nproc"), "--processes"),
    **dict.fromkeys(("num-nodes",), "--nnodes"),
    **dict.fromkeys(("output-dir", "out-dir", "output", "log-dir", "logdir"), "--runs-dir"),
    **dict.fromkeys(("name", "run-name", "exp-name", "run-id"), "--run"),
    **dict.fromkeys(("data", "data-path", "dataset-dir"), "--data-dir"),
    **dict.fromkeys(("save-steps", "save-every"), "--checkpoint-steps"),
    **dict.fromkeys(("load", "pretrained", "checkpoint"), "--init"),
    **dict.fromkeys(("wd", "l2", "decay", "weight-decay-rate", "reg"), "--weight-decay"),
    **dict.fromkeys(("cpu", "no-cuda", "use-cpu"), "--device cpu"),
    **dict.fromkeys(("accelerator",), "--device"),
    **dict.fromkeys(("dataloader-num-workers", "num-workers"), "--workers"),
    "early-stopping-patience": "--patience",
    **dict.fromkeys(("gradient-clip-val", "max-grad-norm", "clip-grad-norm"), "--clip-norm"),
    **dict.fromkeys(("grad-clip", "clip-grad", "gradient-clip", "clip"), "--clip-norm"),
    **dict.fromkeys(("logging-steps", "log-every-n-steps", "log-freq"), "--log-steps"),
    **dict.fromkeys(("log-every", "log-interval", "print-freq", "print-every"), "--log-steps"),
    "no-deterministic": "--fast",
    "save-total-limit": "--keep",
    "format": "--to",
}
_OF_TASKS = {
    **dict.fromkeys(
        ("resume-from-checkpoint", "resume-from", "continue-from", "ckpt-path"),
        "the command that started a run resumes it, and --init RUN starts a new run from the "
        "weights of another run",
    ),
    **dict.fromkeys(
        ("scheduler", "lr-scheduler", "lr-scheduler-type", "lr-schedule"),
        "here: schedule() of the task",
    ),
    "momentum": "here: build_optimizer() of the task",
    "label-smoothing": "here: losses() of the task, whose fields are set by --set NAME=VALUE",
    **dict.fromkeys(
        ("val-split", "validation-split", "val-fraction"),
        "here: train_dataset() and validation_dataset() of the task, whose fields are set by --set "
        "NAME=VALUE",
    ),
    **dict.fromkeys(
        ("report-to", "logger", "wandb", "tracker"),
        "docs/guides/send-runs.md shows how to send a run to a tracker",
    ),
    **dict.fromkeys(
        ("evaluate", "eval", "test", "validate", "evaluate-only", "eval-only", "test-only"),
        "`trainbox evaluate RUN` computes the metrics of a run",
    ),
    "predict": "`trainbox predict RUN FILES` predicts files with the weights of a run",
    **dict.fromkeys(("dry-run", "n", "cfg"), "`trainbox plan` shows what would be launched"),
    **dict.fromkeys(("multirun", "m", "sweep"), "here: `trainbox sweep`, as with --grid lr=0.1,1"),
}
# Options of torchrun that `trainbox run` does not have, and why a command needs none.
_SET_UP = "Trainbox sets up torchrun itself"
OF_TORCHRUN = {
    **dict.fromkeys(
        ("standalone", "rdzv-backend", "rdzv-conf", "role", "monitor-interval", "start-method"),
        _SET_UP,
    ),
    **dict.fromkeys(("local-addr", "multi-gpu", "redirects", "tee", "no-python"), _SET_UP),
    **dict.fromkeys(
        ("master-addr", "master-port", "main-process-ip", "main-process-port"),
        f"{_SET_UP}; several machines need --rdzv-endpoint HOST:PORT",
    ),
}
LETTERS = {"b": "--batch-size", "e": "--epochs", "g": "--gpus", "s": "--seed", "p": "--processes"}
_CHECKPOINTS = {name: f"here: --checkpoint {name}" for name in ("best", "last")}
# The cures of options that one verb has in other programs.
OF_VERBS: dict[str, dict[str, str]] = {
    "clean": {
        **dict.fromkeys(
            ("dry-run", "n"), "clean removes nothing until you answer yes or add --yes"
        ),
        **dict.fromkeys(("force", "f"), "here: --yes"),
        "all": "clean keeps each last way to resume; you can remove the folder of a run yourself",
    },
    "cli": dict.fromkeys(("v", "V"), "did you mean --version?"),
    "doctor": dict.fromkeys(("verbose", "v", "full"), "the report has everything already"),
    "evaluate": {
        **dict.fromkeys(("split", "dataset"), "here: --data"),
        **dict.fromkeys(("ckpt", "ckpt-path", "epoch"), "here: --checkpoint"),
        **_CHECKPOINTS,
    },
    "export": {
        "onnx": "here: --to onnx",
        **dict.fromkeys(("output", "o"), "here: --out, a folder"),
        **_CHECKPOINTS,
    },
    "health": dict.fromkeys(("watch", "loop", "serve"), "here: --monitor"),
    "new": dict.fromkeys(("type", "template", "task"), "here: --kind"),
    "plan": _OF_TASKS,
    "predict": {
        **dict.fromkeys(
            ("input", "inputs", "data", "source", "image", "images", "i"),
            "write the files after the run: predict RUN FILES",
        ),
        **dict.fromkeys(
            ("output", "o", "out"), "the rows go to standard output: > predictions.csv"
        ),
        **_CHECKPOINTS,
    },
    "run": {
        "dry-run": "`trainbox plan run` shows what would be launched",
        **dict.fromkeys(("n", "np"), "here: --processes"),
    },
    "runs": {**dict.fromkeys(("a",), "here: --all"), "format": "here: --json"},
    "sweep": {
        **dict.fromkeys(
            ("jobs", "parallel", "n-jobs", "max-parallel"),
            "a sweep trains on all GPUs at a time; --processes is the number of trials on a CPU",
        ),
        **{name: f"here: --sampler {name}" for name in ("random", "tpe")},
    },
    "train": _OF_TASKS,
}
# Verbs.
VERBS = {
    **dict.fromkeys(("fit", "start", "launch"), "train"),
    **dict.fromkeys(("status", "list", "ls", "history"), "runs"),
    **dict.fromkeys(("help", "usage"), "--help"),
    "version": "--version",
    **dict.fromkeys(("delete", "prune", "remove", "gc"), "clean"),
    **dict.fromkeys(("tune", "search", "hpo", "multirun"), "sweep"),
    **dict.fromkeys(("benchmark", "profile"), "bench"),
    **dict.fromkeys(("exec", "script"), "run"),
    **dict.fromkeys(("eval", "test", "validate", "score"), "evaluate"),
    **dict.fromkeys(("infer", "inference", "classify"), "predict"),
    **dict.fromkeys(("convert", "save"), "export"),
    **dict.fromkeys(("create", "template", "scaffold"), "new"),
    **dict.fromkeys(("check", "doctor-gpu", "gpus"), "health"),
    **dict.fromkeys(("reproduce", "repeat"), "verify"),
    "dry-run": "plan",
    "models": "tasks",
    "diff": "compare",
}
NO_VERBS = {
    "logs": "the output of a run is in its folder, in logs/",
    **dict.fromkeys(
        ("show", "info"),
        "`trainbox runs` lists the runs, and `trainbox config RUN` has the settings of a run",
    ),
    **dict.fromkeys(
        ("tensorboard", "board"), "`tensorboard --logdir runs` shows the curves of the runs"
    ),
    "sbatch": "docs/guides/slurm.md shows the batch script",
    "resume": "the command that started a run resumes it",
    **dict.fromkeys(
        ("stop", "cancel"), "Ctrl-C or SIGTERM stops a run, which saves a checkpoint before"
    ),
}
# The cures of a run as an argument of a verb that is for all runs.
OF_ONE_RUN = {
    "runs": "`trainbox runs` lists all runs, and `trainbox config RUN` has the settings of a run",
    "clean": "`trainbox clean` is for all runs, and you can remove the folder of a run yourself",
}
# Values of choices.
VALUES = {
    **dict.fromkeys(("gpu", "nvidia"), "cuda"),
    **dict.fromkeys(("16", "half", "float16", "16-mixed", "fp16-mixed", "16-true"), "fp16"),
    **dict.fromkeys(("bfloat16", "bf16-mixed", "bf16-true"), "bf16"),
    **dict.fromkeys(("32", "float32", "full", "32-true"), "fp32"),
    **dict.fromkeys(("deepspeed", "zero", "zero3", "fsdp2"), "fsdp"),
    **dict.fromkeys(("optuna", "bayes", "bayesian"), "tpe"),
    **dict.fromkeys(("json", "jsonlines"), "jsonl"),
    **dict.fromkeys(("accuracy", "loss", "best"), "metric"),
    **dict.fromkeys(("date", "time", "newest"), "age"),
    **dict.fromkeys(("pt", "pth", "torch", "torchscript"), "pt2"),
}
