#!/usr/bin/env bash
# One supervisor and one torchrun on every node; stops in time, and is queued again until the run is finished.
#
#   RUN=runs/30b sbatch --nodes=2 --gpus-per-node=8 --time=24:00:00 launch/slurm.sh --recipe 30b
#   RUN=runs/124m sbatch --array=1-5 --gpus-per-node=8 --time=8:00:00 launch/slurm.sh --recipe 124m
#   RUN=runs/30b PROGRAM="-m pretraining.doctor" sbatch --nodes=2 --gpus-per-node=8 --time=0:30:00 launch/slurm.sh --recipe 30b
#
# The second starts a job for each seed: job 3 trains with `training.seed=3` in runs/124m-seed3. The third examines the nodes.
# Nodes without a shared disk: docs/fleet.md.
#
# A node has one rank for each of its GPUs (without GPUs, one). The job takes whole nodes: the ranks of a node and their data
# workers share all its cores. What each rank prints is also in $RUN/logs/job-<id>.<restart>/<node>/.../<local rank>/stderr.log.
#
# Ten minutes before the job's time is over, SLURM signals this shell (change @600 if a save takes longer). The shell writes a
# stop file in the run folder. All ranks then save, and the supervisors exit with 75. No signal goes to the ranks themselves.
# If a node is lost, SLURM ends the job after its SlurmdTimeout and queues it again. It continues from the newest checkpoint.
#
# If a node's own name resolves to a loopback address (Debian's /etc/hosts), export GLOO_SOCKET_IFNAME with the interface
# between the nodes.
#SBATCH --exclusive
#SBATCH --job-name=pretraining
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -uo pipefail

: "${RUN:?name the run folder: RUN=runs/30b}"
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
  RUN=$RUN-seed$SLURM_ARRAY_TASK_ID
  set -- "$@" --set "training.seed=$SLURM_ARRAY_TASK_ID"
fi
FIRST_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
LOGS=$RUN/logs/job-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
# other jobs and programs on this node have other ports, and the meeting of the job's last start stays closed
PORT=${PORT:-$((20000 + SLURM_JOB_ID % 9000))}
MEETING=$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
export RUN FIRST_NODE LOGS PORT MEETING PROGRAM=${PROGRAM:--m pretraining.train}

start_node() { # on each node
  mkdir -p "$LOGS/$SLURMD_NODENAME"
  exec python -m pretraining.supervise -- torchrun --nproc_per_node="${SLURM_GPUS_ON_NODE:-1}" --nnodes="$SLURM_NNODES" \
    --rdzv_backend=c10d --rdzv_id="$MEETING" --rdzv_endpoint="$FIRST_NODE:$PORT" \
    --log_dir="$LOGS/$SLURMD_NODENAME" --tee=3 $PROGRAM "$@" --output_dir "$RUN"
}
export -f start_node

# without --cpus-per-task, newer versions give a step one core a task
srun --cpus-per-task="$SLURM_CPUS_ON_NODE" --cpu-bind=none bash -c 'start_node "$@"' start_node "$@" &
step=$!
trap 'out_of_time=1; mkdir -p "$RUN" && touch "$RUN/STOP"' USR1
trap 'kill -TERM $step' TERM
wait $step
code=$?
while kill -0 $step 2>/dev/null; do # a trapped signal ends `wait`, not the step
  wait $step
  code=$?
done

# a stop file of the user means the end, and the job's own one that it goes on
last_stop=$(grep -s '"event": *"stopped"' "$RUN/events.jsonl" | tail -n 1)
if [ $code -eq 75 ] && { [ -n "${out_of_time:-}" ] || [[ $last_stop != *'"a stop file"'* ]]; }; then
  scontrol requeue "${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}"
fi
exit $code
