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

finish() { # exit code: end with it, and put the job back into the queue if the same command goes on
    local restarts=${SLURM_RESTART_COUNT:-0}
    if (($1 == 0)); then exit; fi
    # Here only if trainbox ended by itself: of a job that is cancelled or loses a node, SLURM kills this shell, too.
    if (($1 != 75 && $1 != 3 && $1 != 7 && $1 <= 128)); then
        say "trainbox ended with $1: a person is needed"
    elif (($1 != 75 && restarts >= ${RESTARTS:=20})); then
        say "trainbox ended with $1 after $restarts restarts, and RESTARTS=$RESTARTS: a person is needed"
    else
        say "trainbox ended with $1: back into the queue"
        scontrol requeue "$job" || say "SLURM did not take it: submit the same again, and it goes on"
    fi
    exit "$1"
}
trap 'finish 75' USR1 # until the nodes have begun, there is nobody to warn

# One task a node: trainbox starts the processes, and tells node 0, which SLURM lists first, to hold the rendezvous.
# A node whose task has ended gives the others 60 s to save and end, too; ended at once, they would lose the checkpoint.
step=(srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1
    --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=0 --wait=60 --export=ALL)
if [ "$SLURM_JOB_NUM_NODES" != 1 ]; then
    step+=(--label)
    # The nodes recognise each other by a secret of this start. It travels in the environment, which only the job's user
    # can read, and never in arguments, which everybody on the node can.
    if [ -z "${RDZV_SECRET-}${RDZV_SECRET_FILE-}" ]; then
        RDZV_SECRET=$(od -An -vtx1 -N32 /dev/urandom | tr -d ' \n')
        export RDZV_SECRET
    fi
fi

where=${RUN_IN:-venv:.venv}
case $where in
venv:*) step+=("${where#*:}/bin/trainbox") ;;
apptainer:*) step+=(env "SIF=${where#*:}" deploy/apptainer/trainbox.sh) ;;
pyxis:*) step+=(--container-image="${where#*:}" --container-mounts="$PWD:$PWD" --container-workdir="$PWD" trainbox) ;;
*) say "RUN_IN=$where: write venv:FOLDER, apptainer:IMAGE.sif or pyxis:IMAGE" && exit 2 ;;
esac

# GPUs that SLURM gave and trainbox does not find are an error (3), and never a training on the CPU.
export GPUS=${GPUS:-${SLURM_GPUS_ON_NODE:-}}

weight() { # of an exit code: that of the node where it began outweighs those of the nodes that only followed
    case $1 in
    0) echo 0 ;;
    75) echo 1 ;; # told to end: also a node that was still waiting for the others
    7) echo 2 ;; # lost contact
    1) echo 3 ;; # a traceback, which a peer that is lost may cause
    3 | 129 | 1[3-9][0-9] | 2[0-9][0-9]) echo 4 ;; # a GPU, a signal
    *) echo 5 ;; # a person is needed
    esac
}

# srun ends with the highest of its tasks' codes, and names each in a line of its own: `srun: error: n1: task 0: Exited with
# exit code 5`. With --label no line of a task begins like that.
codes=$(mktemp)
trap 'rm -f "$codes"' EXIT
exec 3> >(trap '' TERM USR1 && exec sed -u "/^srun: error: .* Exited with exit code [0-9]*\$/w $codes" >&2)
lines=$!

warned=''
"${step[@]}" "$@" 2>&3 3>&- &
step_pid=$!
# SLURM warns this shell alone (--signal=B:USR1@120): pass it on, and each node saves and ends with 75.
trap 'warned=yes; kill -USR1 "$step_pid" || true' USR1
exec 3>&-
code=0
wait "$step_pid" || code=$?
while [ "$warned" ]; do # the warning has ended that wait
    warned='' code=0
    wait "$step_pid" || code=$?
done
trap '' USR1
wait "$lines" || true
while read -r ended; do
    if (($(weight "${ended##* }") > $(weight "$code"))); then code=${ended##* }; fi
done <"$codes"
finish "$code"
