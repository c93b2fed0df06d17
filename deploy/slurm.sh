#!/bin/bash
# A run on Slurm: every GPU of every node samples its share of the units, then trains on its share of the packs.
#
#     sbatch --nodes=4 deploy/slurm.sh recipe.toml [SECTION.FIELD=VALUE]...
#
# The recipe, its data, the model and run.output_dir are on a file system that all nodes share. A rank that dies is
# started again with the others by torchrun; a job that was requeued goes on with the run that is in the folder. Set
# COVEY_ENV to a file that is to be sourced on the first node, such as a virtual environment's bin/activate.

#SBATCH --job-name=covey
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append

set -euo pipefail

if [[ $# -lt 1 ]]; then
    echo "usage: sbatch $0 RECIPE [SECTION.FIELD=VALUE]..." >&2
    exit 2
fi
if [[ -n "${COVEY_ENV:-}" ]]; then
    # shellcheck source=/dev/null
    source "$COVEY_ENV"
fi

ranks=${SLURM_GPUS_ON_NODE:-1}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# the numbers of a run depend on the threads of a rank: the same on each
export OMP_NUM_THREADS=$((${SLURM_CPUS_PER_TASK:-1} / ranks > 0 ? ${SLURM_CPUS_PER_TASK:-1} / ranks : 1))
# two jobs on one node must not meet
port=$((29400 + SLURM_JOB_ID % 1000))

exec srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$ranks" \
    --rdzv-backend c10d --rdzv-endpoint "$first:$port" --rdzv-id "$SLURM_JOB_ID" \
    --max-restarts 3 -m covey train "$@"
