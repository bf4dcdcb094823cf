#!/usr/bin/env bash
# The common part of the batch scripts. In a job, `run.sh ARGS...` runs `trainbox ARGS...` once on
# each node. If the exit code means that the same command can resume
# (docs/reference/exit-codes.md), the job is requeued.
#
#   RUN_IN=venv:.venv                 a virtual environment that all nodes see (the default)
#   RUN_IN=apptainer:trainbox.sif     an Apptainer image
#   RUN_IN=pyxis:registry.example#trainbox:0.1.0    an image for Pyxis and Enroot
#   RESTARTS=20                       the number of restarts after failures
set -euo pipefail

report() { printf 'run.sh: %s\n' "$*" >&2 || true; } # a full disk must not change the code

# SLURM_JOB_ID of an array's last task is the id of the whole array, so use the id with the task's
# number.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}

finish() { # exit with code $1, and requeue the job if the same command can resume
    local restarts=${SLURM_RESTART_COUNT:-0}
    if (($1 == 0)); then exit; fi
    if (($1 > 192)); then # above 128 + 64, the highest signal: 255 is an error of srun or Apptainer
        report "srun or Apptainer exited with code $1, not trainbox: manual action is needed," \
            "see the lines above"
        exit "$1"
    fi
    if [ "$was_warned" ] && (($1 > 128)); then
        report "SLURM warned the job before it had saved anything new: give it a longer --time"
    fi
    # This point is reached only if trainbox exits by itself. If a job is cancelled, SLURM kills
    # this shell as well.
    if (($1 != 75 && $1 != 3 && $1 != 7 && $1 <= 128)); then
        report "trainbox exited with code $1: manual action is needed"
    elif (($1 != 75 && restarts >= ${RESTARTS:=20})); then
        report "trainbox exited with code $1 after $restarts restarts, and RESTARTS=$RESTARTS:" \
            "manual action is needed"
    else
        report "trainbox exited with code $1: the job is requeued"
        scontrol requeue "$job" ||
            report "SLURM cannot requeue the job: submit the same command again to resume"
    fi
    exit "$1"
}

# Start one task per node: trainbox starts the processes. Node 0, which SLURM lists first, hosts the
# rendezvous. After the first task ends, the others have 60 s to save a checkpoint and exit.
step=(srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1
    --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=0 --wait=60 --export=ALL)
if [ "$SLURM_JOB_NUM_NODES" != 1 ]; then
    step+=(--label)
fi

where=${RUN_IN:-venv:.venv}
case $where in
venv:*) step+=("${where#*:}/bin/trainbox") ;;
apptainer:*) step+=(env "SIF=${where#*:}" deploy/apptainer/trainbox.sh) ;;
pyxis:*)
    step+=(--container-image="${where#*:}" --container-mounts="$PWD:$PWD"
        --container-workdir="$PWD" trainbox)
    ;;
*)
    report "RUN_IN=$where is unknown:" \
        "set RUN_IN to venv:FOLDER, apptainer:IMAGE.sif or pyxis:IMAGE"
    exit 2
    ;;
esac

# If trainbox does not find the GPUs that SLURM allocated, it exits with code 3. It never trains on
# the CPU instead.
export GPUS=${GPUS:-${SLURM_GPUS_ON_NODE:-}}

# Print the weight of an exit code. The cause of a failure outweighs the codes of the nodes that
# only lost contact.
weight() {
    case $1 in
    0) echo 0 ;;
    143) echo 1 ;; # ended with the other processes
    75) echo 2 ;; # stopped by a signal, also while the node waited for the others
    7) echo 3 ;; # lost contact
    134) echo 4 ;; # aborted by NCCL, because it lost contact
    1) echo 5 ;; # a traceback, which a lost peer may cause
    3 | 129 | 1[3-8][0-9] | 19[0-2]) echo 6 ;; # a GPU, a signal
    *) echo 7 ;; # manual action is needed
    esac
}

# srun exits with the highest code of its tasks, and prints each code in a line: `srun: error: n1:
# task 0: Exited with exit code 5`. With --label, no line of a task starts like this.
pass_on() { # print the lines of srun, and exit with the code of the cause
    local line cause=0
    while IFS= read -r line || [ "$line" ]; do
        printf '%s\n' "$line" >&2 || true # a full disk must not end srun
        if [[ $line =~ ^'srun: error: '.*' Exited with exit code '([0-9]+)$ ]] &&
            (($(weight "${BASH_REMATCH[1]}") > $(weight "$cause"))); then
            cause=${BASH_REMATCH[1]}
        fi
    done
    exit "$cause"
}
exec 3> >(trap '' TERM USR1 && pass_on)
lines=$!

warned='' was_warned=''
"${step[@]}" "$@" 2>&3 3>&- &
step_pid=$!
# SLURM warns only this shell (--signal=B:USR1@120). Pass the signal on, and each node saves and
# exits with code 75.
trap 'warned=yes was_warned=yes; kill -USR1 "$step_pid" || true' USR1
exec 3>&-
code=0
wait "$step_pid" || code=$?
while [ "$warned" ]; do # the signal interrupted `wait`
    warned='' code=0
    wait "$step_pid" || code=$?
done
trap '' USR1
cause=0
wait "$lines" || cause=$?
# Before version 4.4, bash answers 127 here, because it does not wait for such a process.
if ((cause != 127 && $(weight "$cause") > $(weight "$code"))); then code=$cause; fi
finish "$code"
