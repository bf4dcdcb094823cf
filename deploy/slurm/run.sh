#!/usr/bin/env bash
# What the batch scripts here have in common: `deploy/slurm/run.sh WORDS...`, inside a job, runs `trainbox WORDS...` once on
# each node and puts the job back into the queue when the exit code says that the same command goes on (docs/exit-codes.md).
#
#   RUN_IN=venv:.venv                 a virtual environment that all nodes see (the default)
#   RUN_IN=apptainer:trainbox.sif     an Apptainer image
#   RUN_IN=pyxis:registry.example#trainbox:0.1.0    an image for Pyxis and Enroot
#   RESTARTS=20                       how often a job may start again before a failure ends it
set -euo pipefail

say() { printf 'run.sh: %s\n' "$*" >&2; }

# The own number of an array's last task is that of the whole array: name the task.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}

# One task a node: trainbox starts the processes, and tells node 0, which SLURM lists first, to hold the rendezvous.
# A node whose task has ended gives the others 60 s to save and end, too; ended at once, they would lose the checkpoint.
step=(srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1
    --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=0 --wait=60)
[ "$SLURM_JOB_NUM_NODES" = 1 ] || step+=(--label)

where=${RUN_IN:-venv:.venv}
case $where in
venv:*) step+=("${where#*:}/bin/trainbox") ;;
apptainer:*) step+=(env "SIF=${where#*:}" deploy/apptainer/trainbox.sh) ;;
pyxis:*) step+=(--container-image="${where#*:}" --container-mounts="$PWD:$PWD" --container-workdir="$PWD" trainbox) ;;
*) say "RUN_IN=$where: write venv:FOLDER, apptainer:IMAGE.sif or pyxis:IMAGE" && exit 2 ;;
esac

# GPUs that SLURM gave and trainbox does not find are an error (3), and never a training on the CPU.
export GPUS=${GPUS:-${SLURM_GPUS_ON_NODE:-}}

# SLURM warns this shell alone (--signal=B:USR1@120): pass it on, and each node saves and ends with 75.
trap 'kill -USR1 $! || true' USR1
"${step[@]}" "$@" &
while kill -0 $! 2>/dev/null; do wait $! || true; done
code=0
wait $! || code=$?

restarts=${SLURM_RESTART_COUNT:-0}
if ((code == 0)); then exit; fi
# Here only if trainbox ended by itself: of a job that is cancelled or loses a node, SLURM kills this shell, too.
if ((code != 75 && code != 3 && code != 7 && code <= 128)); then
    say "trainbox ended with $code: a person is needed"
elif ((code != 75 && restarts >= ${RESTARTS:=20})); then
    say "trainbox ended with $code after $restarts restarts, and RESTARTS=$RESTARTS: a person is needed"
else
    say "trainbox ended with $code: back into the queue"
    scontrol requeue "$job" || say "SLURM did not take it: submit the same again, and it goes on"
fi
exit "$code"
