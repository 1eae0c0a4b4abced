#!/bin/bash
# One job on three kinds of nodes: torchrun on those that train, Ray with their GPUs on those that sample, Ray without
# GPUs on those that run sandboxes. Where all GPUs train (engine.layout=colocated), set ENGINE_NODES=0.
#
#   sbatch --nodes 14 --export=ALL,RUN_DIR=DIR,TRAIN_NODES=8,ENGINE_NODES=4 conf/launch/slurm.sh experiment=... task.source=DIR
#
# Preempted, or after the failure of a node, it is queued again and continues from the last checkpoint in RUN_DIR, on a
# shared disk; after the time limit or an error submit it again with the same RUN_DIR.
#SBATCH --job-name=swe-rl
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=B:TERM@600
#SBATCH --time=2-00:00:00
set -euo pipefail
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun does not take it from sbatch

TRAIN_NODES=${TRAIN_NODES:-$SLURM_NNODES} ENGINE_NODES=${ENGINE_NODES:-0} GPUS=${GPUS:-8}
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
train=("${hosts[@]:0:TRAIN_NODES}") others=("${hosts[@]:TRAIN_NODES}")
words=("run_dir=${RUN_DIR:?a directory that all nodes see}" "$@")
[ -e "$RUN_DIR/config.yaml" ] && words+=("resume=true")

on() { srun --overlap --nodes 1 --ntasks 1 --nodelist "$1" "${@:2}"; }

if [ "${#others[@]}" -gt 0 ]; then
    on "${others[0]}" ray start --head --port 6379 --num-gpus "$([ "$ENGINE_NODES" -gt 0 ] && echo "$GPUS" || echo 0)" --block &
    for index in "${!others[@]}"; do
        [ "$index" -eq 0 ] && continue
        gpus=$([ "$index" -lt "$ENGINE_NODES" ] && echo "$GPUS" || echo 0)
        on "${others[index]}" ray start --address "${others[0]}:6379" --num-gpus "$gpus" --block &
    done
    words+=("rollout=ray" "rollout.ray_address=${others[0]}:6379")
    [ "$ENGINE_NODES" -gt 0 ] && words+=("engine.layout=ray")
fi

# A rank that dies ends the job with its number; --shutdown-timeout leaves time for the step under way.
srun --overlap --nodes "$TRAIN_NODES" --ntasks "$TRAIN_NODES" --nodelist "$(IFS=,; echo "${train[*]}")" \
    torchrun --nnodes "$TRAIN_NODES" --nproc-per-node "$GPUS" --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d \
    --rdzv-endpoint "${train[0]}:29500" --shutdown-timeout 500 -m swe_rl train "${words[@]}" &
training=$!
trap 'kill -TERM "$training"' TERM # the trainers alone: their last rollouts still need Ray
code=0
wait "$training" || code=$?
if kill -0 "$training" 2>/dev/null; then # the signal ended the waiting, not the training
    code=0
    wait "$training" || code=$?
fi
exit "$code"
