#!/bin/bash
# Two hosts of 8 GPUs, one process per GPU, which is how JAX takes up a Slurm job.
# From the root of the repository: sbatch examples/cluster/slurm_jax.sh
#SBATCH --job-name=alpa_lite
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00

# --kill-on-bad-exit: processes of a job wait for each other, so one that failed should end all.
# --cluster: says that 8 processes share a host, and what links them.
srun --kill-on-bad-exit=1 python examples/cluster/train.py --size base --steps 100 --cluster 2x8:h100-sxm
