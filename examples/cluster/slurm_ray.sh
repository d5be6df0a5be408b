#!/bin/bash
# Two hosts of 8 GPUs as a Ray cluster for the time of this job: a Ray node per host, and the driver on the first.
# From the root of the repository, with Python, alpa-lite and a shared home on all hosts: sbatch examples/cluster/slurm_ray.sh
# Without Ray, for plans on one mesh: slurm_jax.sh.
#SBATCH --job-name=alpa_lite
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=01:00:00
set -euo pipefail

checkpoints=${CHECKPOINTS:-$HOME/checkpoints/$SLURM_JOB_NAME} # in a folder that all hosts share

# The token of this job's cluster: in a file that only its owner reads, not on a command line, which others on the host see.
umask 077
token_file=$(mktemp "$HOME/.ray_token_XXXXXX")
python -c 'import secrets; print(secrets.token_hex(32), end="")' > "$token_file"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$token_file
unset RAY_AUTH_TOKEN RAY_ADDRESS

pids=()
clean_up() {
    for pid in "${pids[@]}"; do kill "$pid" 2> /dev/null || true; done # srun passes it on to the Ray nodes
    wait
    rm -f "$token_file"
}
trap clean_up EXIT

# This script runs on the first host. If that has several networks, name the address of the fast one here.
head_host=$(hostname)
head_ip=${HEAD_IP:-$(hostname -I | awk '{print $1}')}
port=$((20000 + SLURM_JOB_ID % 10000)) # so that jobs on one host do not meet
export RAY_ADDRESS=$head_ip:$port

# Of a host, Ray takes what Slurm gave to this job. --block: the node ends when Slurm ends the step.
gpus=${SLURM_GPUS_PER_NODE##*:} # "8" or "h100:8"
node=(--block --disable-usage-stats --num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="$gpus")
step=(--ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --gpus-per-node="$gpus")
srun --nodes=1 --ntasks=1 --nodelist="$head_host" "${step[@]}" \
    ray start --head --node-ip-address="$head_ip" --port="$port" --include-dashboard=false \
    --temp-dir="/tmp/ray_$SLURM_JOB_ID" "${node[@]}" &
pids+=($!)
for _ in $(seq 60); do ray health-check --address "$RAY_ADDRESS" > /dev/null 2>&1 && break; sleep 2; done
if ((SLURM_JOB_NUM_NODES > 1)); then
    others=$((SLURM_JOB_NUM_NODES - 1))
    srun --nodes="$others" --ntasks="$others" --exclude="$head_host" "${step[@]}" \
        ray start --address="$RAY_ADDRESS" "${node[@]}" &
    pids+=($!)
fi

# All hosts must be there before a plan is placed on them.
python - "$SLURM_JOB_NUM_NODES" << 'END'
import sys, time
import ray

ray.init(log_to_driver=False)
end = time.monotonic() + 300
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[1]):
    if time.monotonic() > end:
        sys.exit("not all Ray nodes have started within 300 s")
    time.sleep(1)
END

alpa-lite run examples/gpt_linen.py:base --executor ray --address "$RAY_ADDRESS" --cluster "${CLUSTER:-2x8:h100-sxm}" \
    --steps 1000 --checkpoint "$checkpoints"
