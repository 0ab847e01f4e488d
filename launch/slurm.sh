#!/usr/bin/env bash
# One supervisor and one torchrun on every node; stops in time, and is queued again until the run is finished.
#
#   RUN=runs/30b sbatch --nodes=2 --gpus-per-node=8 --time=24:00:00 launch/slurm.sh --recipe 30b
#
# Ten minutes before the job's time is over, SLURM signals this shell (change @600 if a save takes longer). The shell writes a
# stop file in the run folder. All ranks then save, and the supervisors exit with 75. No signal goes to the ranks themselves.
#
# The job takes whole nodes: the ranks of a node and their data workers share all its cores. If a node's own name resolves to
# a loopback address (Debian's /etc/hosts), export GLOO_SOCKET_IFNAME with the interface between the nodes.
#SBATCH --exclusive
#SBATCH --job-name=pretraining
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -uo pipefail

: "${RUN:?name the run folder, on a disk that all nodes share: RUN=runs/30b}"
LAUNCHER=${LAUNCHER:-torchrun --nproc_per_node=gpu --nnodes=$SLURM_NNODES --rdzv_backend=c10d
  --rdzv_id=$SLURM_JOB_ID --rdzv_endpoint=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):${PORT:-29500}}

# shellcheck disable=SC2086  # the launcher is several words
srun --cpu-bind=none python -m pretraining.supervise -- $LAUNCHER train.py "$@" --output_dir "$RUN" &
step=$!
trap 'mkdir -p "$RUN" && touch "$RUN/STOP"' USR1
trap 'kill -TERM $step' TERM
wait $step
code=$?
while kill -0 $step 2>/dev/null; do # a trapped signal ends `wait`, not the step
  wait $step
  code=$?
done

if [ $code -eq 75 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
