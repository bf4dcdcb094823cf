"""Decide what a public report may show of an environment and of a text. Pure.

A variable's value is shown only if its name is on the list `_SHOWN`. So no rule has to recognize a
secret in the environment, and a new variable is hidden until its name is added.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from trainbox.contract.secret_rule import NOT_SHOWN, is_secret, without_secrets

_LONGEST = 240  # characters shown of a value; an image's NVIDIA_REQUIRE_CUDA has a thousand
_LONGEST_READ = 10 * _LONGEST  # the rest of a longer text is ignored

# Variables whose values are numbers, switches, devices, endpoints, network interfaces or paths.
_SHOWN_BY_TOPIC = {
    "the launch": """
        DEVICE GPUS GPU_IDS HEALTH HEALTH_LIMITS NNODES NODE_RANK PROCESSES RDZV_ENDPOINT
        RDZV_TIMEOUT_S STRATEGY TASK
    """,
    "settings, the image and the launcher": """
        TRAINBOX_ACCUMULATION TRAINBOX_BASE_BATCH_SIZE TRAINBOX_BATCH_SIZE
        TRAINBOX_BATCH_SIZE_PER_GPU TRAINBOX_CHECKPOINT_MINUTES TRAINBOX_CHECKPOINT_STEPS
        TRAINBOX_CLIP_NORM TRAINBOX_COMPILE TRAINBOX_CONFIG TRAINBOX_DATA_DIR
        TRAINBOX_DETERMINISTIC TRAINBOX_DEVICE TRAINBOX_DIGEST_STEPS TRAINBOX_DRIVER_DEADLINE_S
        TRAINBOX_EPOCHS TRAINBOX_EVAL_EVERY TRAINBOX_IMAGE_DIGEST TRAINBOX_KEEP
        TRAINBOX_LOG_STEPS TRAINBOX_LR TRAINBOX_LR_SCALING TRAINBOX_MAX_STEPS
        TRAINBOX_OPTIMIZER TRAINBOX_PATIENCE TRAINBOX_PRECISION TRAINBOX_RESUME
        TRAINBOX_RUNS_DIR TRAINBOX_SEED TRAINBOX_SHARDS TRAINBOX_SKIP_NONFINITE
        TRAINBOX_THREADS TRAINBOX_WARMUP_EPOCHS TRAINBOX_WEIGHT_DECAY TRAINBOX_WORKERS
    """,
    "schedulers": """
        JOB_COMPLETION_INDEX PET_MASTER_ADDR PET_MASTER_PORT PET_NNODES PET_NODE_RANK
        PET_NPROC_PER_NODE PET_RDZV_ENDPOINT SLURM_CPUS_ON_NODE SLURM_CPUS_PER_TASK SLURM_GPUS
        SLURM_GPUS_ON_NODE SLURM_GPUS_PER_NODE SLURM_JOB_CPUS_PER_NODE SLURM_JOB_GPUS
        SLURM_JOB_ID SLURM_JOB_NUM_NODES SLURM_LOCALID SLURM_MEM_PER_NODE SLURM_NNODES
        SLURM_NODEID SLURM_NTASKS SLURM_NTASKS_PER_NODE SLURM_PROCID SLURM_RESTART_COUNT
        SLURM_STEP_GPUS SLURM_STEP_ID SLURM_STEP_NUM_NODES SLURM_STEP_NUM_TASKS
        SLURM_TASKS_PER_NODE
    """,
    "cuda and the container runtime": """
        CUBLAS_WORKSPACE_CONFIG CUDA_DEVICE_MAX_CONNECTIONS CUDA_DEVICE_ORDER CUDA_HOME
        CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING CUDA_MPS_PIPE_DIRECTORY CUDA_VERSION
        CUDA_VISIBLE_DEVICES NVIDIA_DISABLE_REQUIRE NVIDIA_DRIVER_CAPABILITIES
        NVIDIA_REQUIRE_CUDA NVIDIA_TF32_OVERRIDE NVIDIA_VISIBLE_DEVICES
    """,
    "communication": """
        GLOO_SOCKET_IFNAME NCCL_ALGO NCCL_BUFFSIZE NCCL_CROSS_NIC NCCL_CUMEM_ENABLE NCCL_DEBUG
        NCCL_DEBUG_SUBSYS NCCL_IB_DISABLE NCCL_IB_GID_INDEX NCCL_IB_HCA NCCL_IB_TIMEOUT
        NCCL_LAUNCH_MODE NCCL_MAX_NCHANNELS NCCL_MIN_NCHANNELS NCCL_NET NCCL_NET_GDR_LEVEL
        NCCL_NVLS_ENABLE NCCL_P2P_DISABLE NCCL_P2P_LEVEL NCCL_PROTO NCCL_SHM_DISABLE
        NCCL_SOCKET_FAMILY NCCL_SOCKET_IFNAME NCCL_TOPO_FILE TP_SOCKET_IFNAME
    """,
    "torch, threads and libraries": """
        HOME LD_LIBRARY_PATH LD_PRELOAD MKL_NUM_THREADS OMP_NUM_THREADS OMP_PROC_BIND
        PYTHONHASHSEED PYTHONPATH PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF
        PYTORCH_NVML_BASED_CUDA_CHECK TORCHINDUCTOR_CACHE_DIR TORCH_CPP_LOG_LEVEL
        TORCH_CUDA_ARCH_LIST TORCH_DISTRIBUTED_DEBUG TORCH_HOME TORCH_LOGS
        TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_BLOCKING_WAIT
    """,
}
_SHOWN = frozenset(name for names in _SHOWN_BY_TOPIC.values() for name in names.split())
# Other variables that may explain a problem. Only their names are shown.
_NAMED = (
    *("RDZV_ID", "RDZV_SECRET", "RDZV_SECRET_FILE", "SET", "http_proxy", "https_proxy", "no_proxy"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
_NAMED_PREFIXES = (
    *("CUDA_", "NVIDIA_", "NCCL_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "OMP_", "MKL_"),
    *("GLOO_", "TP_SOCKET", "SLURM_JOB", "SLURM_STEP", "SLURM_NODE", "PET_", "TRAINBOX_"),
)

# Variables with the address of another machine, and sometimes a port.
_ENDPOINTS = ("RDZV_ENDPOINT", "PET_RDZV_ENDPOINT", "PET_MASTER_ADDR", "MASTER_ADDR")
_HOST = re.compile(r"(?:.*//)?(?:.*@)?([\w.-]+)(?::\d+)?/?")
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")

_OTHERS_HOME = re.compile(r"/(home|Users)/[^/\s:'\"]+")

# Common names of accounts and machines. If they were hidden, much of the report would be hidden.
_NOBODY = (
    "root",
    "trainbox",
    "ubuntu",
    "debian",
    "nvidia",
    "user",
    "nobody",
    "jovyan",
    "localhost",
    "local",
    "localdomain",
)

Hidden = Sequence[tuple[str, str]]  # (text to hide, its replacement), the longest text first


def private_names(homes: Iterable[str], users: Iterable[str], hosts: Iterable[str]) -> Hidden:
    """Return the names that identify a user or a machine, with their replacements.

    Home folders become ~, names become [user], [host] and [domain]. A home at the root, such as
    /tmp in an image, identifies nobody and is not hidden.
    """
    names = {home.rstrip("/"): "~" for home in homes if home.rstrip("/").count("/") > 1}
    for host in hosts:
        label, _, domain = host.partition(".")
        names |= {host: "[host]", label: "[host]", domain: "[domain]"}
    names |= dict.fromkeys(users, "[user]")
    kept = ((name, shown) for name, shown in names.items() if name and name.lower() not in _NOBODY)
    return sorted(kept, key=lambda pair: -len(pair[0]))


def other_hosts(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of other machines in the environment. An address is not a name."""
    found = (match[1] for name in _ENDPOINTS if (match := _HOST.fullmatch(env.get(name, ""))))
    return tuple(host for host in found if not host.replace(".", "").isdigit())


def redacted(text: str, hidden: Hidden = (), longest: int = _LONGEST) -> str:
    """Return `text` as one short line without secrets and private names.

    If more than `longest` characters remain, the line is cut and ends with `...`.
    """
    # A list of allowed values is not possible for free text: a message of torch or the driver may
    # quote a command line, an address with a login or a path with a user's name. Here, secrets must
    # be recognized by their form. If in doubt, the text is hidden.
    text = without_secrets(_printable(text))
    for name, shown in hidden:
        text = _pattern(name, shown).sub(shown, text)
    text = _OTHERS_HOME.sub(r"/\1/[user]", text)
    return text if len(text) <= longest else f"{text[:longest]} ..."


def shown_setting(name: str, value: str) -> str:
    """Return the value of a setting as its user may see it, or an empty text for a secret.

    The user's home is not hidden.
    """
    if is_secret(name, value):
        return ""
    text = without_secrets(_printable(value))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def shown_environment(env: Mapping[str, str], hidden: Hidden = ()) -> list[tuple[str, str]]:
    """Return the variables that may explain a problem, sorted by name.

    A value that may be shown is redacted as other text is: an endpoint can have a login, and a path
    a user's name. The name of a variable is not private, unless it is not a name but a text.
    """
    return [
        (
            name if _PLAIN_NAME.fullmatch(name) else redacted(name, hidden),
            _shown(name, env[name], hidden),
        )
        for name in sorted(env)
        if name in _SHOWN or name in _NAMED or name.startswith(_NAMED_PREFIXES)
    ]


def _shown(name: str, value: str, hidden: Hidden) -> str:
    return (redacted(value, hidden) or "(set, empty)") if name in _SHOWN else NOT_SHOWN


def _printable(text: str) -> str:
    """Return the beginning of `text` as one line of printable characters."""
    line = " ".join(text.split())[:_LONGEST_READ]
    return "".join(character if character.isprintable() else "?" for character in line)


def _pattern(name: str, shown: str) -> re.Pattern[str]:
    """Return the pattern that finds `name`.

    A folder matches only as a whole path. A name of fewer than four characters matches only between
    other characters than letters and digits. A longer name matches anywhere.
    """
    if shown == "~":
        return re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])")
    if len(name) < 4:
        return re.compile(rf"(?<![a-z0-9]){re.escape(name)}(?![a-z0-9])", re.IGNORECASE)
    return re.compile(re.escape(name), re.IGNORECASE)
