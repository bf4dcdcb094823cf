#!/usr/bin/env bash
# trainbox in Apptainer, as Docker Compose runs it: read-only, as the caller, with runs/, data/ and my_tasks/ of this folder.
#
#   deploy/apptainer/trainbox.sh train digits --epochs 5
#
# SIF is the image (trainbox.sif). The other settings are those of make: GPUS, TASK, SET, RUNS_DIR, TRAINBOX_EPOCHS ...
# docs/clusters.md explains each choice.
set -euo pipefail

refuse() {
    echo "trainbox.sh: $1" >&2
    exit "${2:-2}"
}

sif=${SIF:-trainbox.sif}
runs=${RUNS_DIR:-${TRAINBOX_RUNS_DIR:-runs}}
data=${DATA_DIR:-${TRAINBOX_DATA_DIR:-data}}
tasks=${TASKS_DIR:-my_tasks}
for word in "${TASK-}" "$@"; do # TASK=folder/file.py:Class
    if [[ -z ${TASKS_DIR-} && $word == */*.py:* ]]; then tasks=${word%/*.py:*}; fi
done

command -v apptainer >/dev/null || refuse "no apptainer on PATH: where it is a module, module load apptainer"
[[ -e $sif ]] || refuse "SIF=$sif is not there: build it with make sif, or say where it is: SIF=/shared/trainbox.sif"
mkdir -p "$runs" "$data" || refuse "RUNS_DIR=$runs or DATA_DIR=$data cannot be made: name folders that you may write to" 4

# The host's /tmp is everybody's, and the one that Apptainer makes holds 64 MB. One for each user and node: what is
# compiled is there for the next run, and nothing has to stay behind to clean up.
tmp=${TMPDIR:-/tmp}/trainbox-$UID
mkdir -m 700 "$tmp" 2>/dev/null || true # it is there
[[ -d $tmp && -O $tmp && ! -L $tmp ]] || refuse "$tmp is no folder of yours: set TMPDIR to a folder that you may write to" 4

# no-eval: a shell in the container would else expand $ and run `` in what is handed on.
options=(--containall --no-eval --home "$tmp:/tmp" --pwd /workspace)
options+=(--bind "$(realpath "$runs"):/workspace/runs" --bind "$(realpath "$data"):/workspace/data")
if [[ $tasks == /* ]]; then inside=$(realpath -ms "$tasks"); else inside=$(realpath -ms "/workspace/$tasks"); fi
case $inside in / | /tmp | /workspace | /workspace/runs | /workspace/data)
    refuse "the task's folder, ${tasks:-/}, would hide runs/, data/ or the image: put the file into one of its own, as my_tasks/mine.py:Mine"
    ;;
esac
if [[ -d $tasks ]]; then options+=(--bind "$(realpath "$tasks"):$inside:ro"); fi
if [[ -e ${NVIDIA_DEVICE:-/dev/nvidiactl} ]]; then options+=(--nv); fi

# The caller's environment stays outside (a PYTHONPATH or LD_LIBRARY_PATH of a module would change what runs), but for:
for name in $(compgen -e); do
    case $name in
    TRAINBOX_*_DIR | TORCH_HOME | TORCH_*_DIR | TRAINBOX_HEARTBEAT | TRAINBOX_BUILD_INFO | TRAINBOX_COMMAND) ;; # paths of this machine mean nothing in there
    GPUS | GPU_IDS | STRATEGY | PROCESSES | DEVICE | NNODES | NODE_RANK | RDZV_ENDPOINT | RDZV_ID | RDZV_TIMEOUT_S | RDZV_SECRET | TASK | SET | HEALTH | TRAINBOX_* | \
        SLURM_* | PET_* | CUDA_VISIBLE_DEVICES | CUDA_LAUNCH_BLOCKING | NCCL_* | GLOO_* | TORCH_* | PYTORCH_* | OMP_NUM_THREADS | \
        *_proxy | *_PROXY)
        export "APPTAINERENV_$name=${!name}"
        ;;
    esac
done
export APPTAINERENV_TRAINBOX_COMMAND=$0 # how messages spell the commands that they recommend
if [[ -n ${HEALTH_LIMITS-} ]]; then
    options+=(--bind "$(realpath "$HEALTH_LIMITS"):/workspace/limits.toml:ro")
    export APPTAINERENV_HEALTH_LIMITS=/workspace/limits.toml
fi
if [[ -n ${RDZV_SECRET_FILE-} ]]; then
    options+=(--bind "$(realpath "$RDZV_SECRET_FILE"):/workspace/rdzv-secret:ro")
    export APPTAINERENV_RDZV_SECRET_FILE=/workspace/rdzv-secret
fi

# For the manifest, from `sha256sum trainbox.sif > trainbox.sif.sha256`: to read gigabytes at each start would take too long.
if [[ -z ${TRAINBOX_IMAGE_DIGEST-} && $sif.sha256 -nt $sif ]]; then
    read -r digest _ <"$sif.sha256"
    export APPTAINERENV_TRAINBOX_IMAGE_DIGEST=sif:$digest
fi

exec apptainer exec "${options[@]}" "$sif" trainbox "$@"
