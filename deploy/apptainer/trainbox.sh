#!/usr/bin/env bash
# Run trainbox in Apptainer as Docker Compose does: read-only, as the caller, with runs/, data/ and
# my_tasks/ of this folder.
#
#   deploy/apptainer/trainbox.sh train digits --epochs 5
#
#   deploy/apptainer/trainbox.sh run train.py -- --epochs 5
#
# SIF is the image (default: trainbox.sif). The other variables are the same as for make: GPUS,
# TASK, SET, RUNS_DIR, PROJECT_DIR ... docs/guides/apptainer.md explains each choice.
set -euo pipefail

refuse() { # CODE MESSAGE...
    echo "trainbox.sh: ${*:2}" >&2
    exit "$1"
}

# Apptainer reads `:` and `,` in the paths of a mount as separators.
mountable() { # SETTING PATH
    local path
    path=$(realpath -m "$2")
    if [[ $2$path == *[:,]* ]]; then
        refuse 2 "$1=$2 is $path, and Apptainer cannot mount a path with a colon or a comma:" \
            "set $1 to another path"
    fi
}

sif=${SIF:-trainbox.sif}
runs=${RUNS_DIR:-${TRAINBOX_RUNS_DIR:-runs}}
data=${DATA_DIR:-${TRAINBOX_DATA_DIR:-data}}
tasks=${TASKS_DIR:-my_tasks}
workdir=/workspace project=''
case "${1-} ${2-}" in # your own script starts in its project folder: `run train.py`, `plan run ...`
run\ * | *\ run) project=${PROJECT_DIR:-.} ;;
esac
case "${1-} ${2-}" in # the runs are not in the project folder, which is read-only
run\ *) set -- run --runs-dir /workspace/runs "${@:2}" ;;
plan\ run | sweep\ run) set -- "$1" run --runs-dir /workspace/runs "${@:3}" ;;
esac
for argument in "${TASK-}" "$@"; do # TASK=folder/file.py:Class
    if [[ -z ${TASKS_DIR-} && $argument == */*.py:* ]]; then tasks=${argument%/*.py:*}; fi
done

command -v apptainer >/dev/null || refuse 2 "no apptainer on PATH: install it, or load its module"
[[ -e $sif ]] || refuse 2 "SIF=$sif does not exist: build it with make sif, or set SIF to its path"
mountable RUNS_DIR "$runs"
mountable DATA_DIR "$data"
mountable TMPDIR "${TMPDIR:-/tmp}"
if [[ -d $tasks ]]; then mountable TASKS_DIR "$tasks"; fi
if [[ $project ]]; then
    [[ -d $project ]] ||
        refuse 2 "PROJECT_DIR=$project is not a folder: set it to the script's folder"
    mountable PROJECT_DIR "$project"
fi
if [[ -n ${HEALTH_LIMITS-} ]]; then
    [[ -f $HEALTH_LIMITS ]] ||
        refuse 2 "HEALTH_LIMITS=$HEALTH_LIMITS is not a file: set it to the path of a file"
    mountable HEALTH_LIMITS "$HEALTH_LIMITS"
fi

inside=/workspace/$tasks
if [[ $tasks == /* ]]; then inside=$tasks; fi
inside=$(realpath -ms "$inside")
# deploy/host.py has the same list: a test compares the two.
case $inside in
/ | /workspace | /workspace/runs | /workspace/data | /tmp | /opt | \
    /opt/venv | /opt/venv/* | /opt/trainbox | /opt/trainbox/* | \
    /bin | /bin/* | /sbin | /sbin/* | /lib | /lib/* | /lib64 | /lib64/* | \
    /usr | /usr/* | /etc | /etc/* | /proc | /proc/* | /sys | /sys/* | /dev | /dev/*)
    refuse 2 "the task's folder, ${tasks:-/}, would hide runs/, data/ or the image:" \
        "move the file into a folder of its own, such as my_tasks/mine.py:Mine"
    ;;
esac

mkdir -p "$runs" "$data" ||
    refuse 4 "RUNS_DIR=$runs or DATA_DIR=$data cannot be created:" \
        "set them to folders that you may write to"
# All users share the host's /tmp, and Apptainer's own has only 64 MB. Each user therefore gets a
# folder on each node. It keeps compiled code for the next run, so nothing needs to be cleaned up.
tmp=${TMPDIR:-/tmp}/trainbox-$UID
mkdir -m 700 "$tmp" 2>/dev/null || true # the folder may exist
[[ -d $tmp && -O $tmp && ! -L $tmp ]] ||
    refuse 4 "$tmp is not your own folder: set TMPDIR to a folder that you may write to"

# Without --no-eval, a shell in the container would expand $ and `` in the variables that are passed
# on.
if [[ $project ]]; then workdir=/workspace/project; fi
options=(--containall --no-eval --home "$tmp:/tmp" --pwd "$workdir")
options+=(--bind "$(realpath "$runs"):/workspace/runs")
options+=(--bind "$(realpath "$data"):/workspace/data")
if [[ $project ]]; then
    options+=(--bind "$(realpath "$project"):/workspace/project:ro")
    # Scripts look for data in ./data of the project or in ../data, and some download it.
    if mkdir -p "$project/data" 2>/dev/null; then
        options+=(--bind "$(realpath "$project/data"):/workspace/project/data")
    fi
fi
if [[ -d $tasks ]]; then options+=(--bind "$(realpath "$tasks"):$inside:ro"); fi
# The second file shows an NVIDIA GPU on WSL2.
for sign in ${NVIDIA_DEVICE:-/dev/nvidiactl /usr/lib/wsl/lib/libcuda.so.1}; do
    if [[ -e $sign ]]; then options+=(--nv); break; fi
done
# --containall hides the devices of InfiniBand, and NCCL would use TCP without a message.
infiniband=${INFINIBAND:-/dev/infiniband}
if [[ -e $infiniband ]]; then options+=(--bind "$infiniband"); fi

# A PYTHONPATH or LD_LIBRARY_PATH of the caller could change the training. Only these variables are
# passed on.
for name in $(compgen -e); do
    case $name in
    # these paths do not exist in the container
    TRAINBOX_*_DIR | TORCH_HOME | TORCH_*_DIR | \
        TRAINBOX_HEARTBEAT | TRAINBOX_BUILD_INFO | TRAINBOX_COMMAND) ;;
    GPUS | GPU_IDS | STRATEGY | PROCESSES | DEVICE | NNODES | NODE_RANK | \
        RDZV_ENDPOINT | RDZV_ID | RDZV_TIMEOUT_S | TASK | SET | HEALTH | \
        TRAINBOX_* | SLURM_* | PET_* | CUDA_VISIBLE_DEVICES | CUDA_LAUNCH_BLOCKING | \
        NCCL_* | GLOO_* | TORCH_* | PYTORCH_* | OMP_NUM_THREADS | *_proxy | *_PROXY)
        export "APPTAINERENV_$name=${!name}"
        ;;
    esac
done
export APPTAINERENV_TRAINBOX_COMMAND=$0 # messages recommend commands in this form
if [[ -n ${HEALTH_LIMITS-} ]]; then
    options+=(--bind "$(realpath "$HEALTH_LIMITS"):/workspace/limits.toml:ro")
    export APPTAINERENV_HEALTH_LIMITS=/workspace/limits.toml
fi

# The digest for the manifest is read from a file, because hashing gigabytes at each start takes too
# long. Make this file with `sha256sum trainbox.sif > trainbox.sif.sha256`.
if [[ -z ${TRAINBOX_IMAGE_DIGEST-} && $sif.sha256 -nt $sif ]]; then
    read -r digest _ <"$sif.sha256" || true # an empty file, or one without a line end
    if [[ -n $digest ]]; then export APPTAINERENV_TRAINBOX_IMAGE_DIGEST=sif:$digest; fi
fi

exec apptainer exec "${options[@]}" "$sif" trainbox "$@"
