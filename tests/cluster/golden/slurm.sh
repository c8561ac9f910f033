#!/bin/bash
#SBATCH --job-name=qwen3_235b_a22b
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --partition=gpu
#SBATCH --account=a_b
#SBATCH --signal=B:TERM@900
#SBATCH --output=%x-%j.log
# The first node runs the head of Ray and train.py, every node one Ray node. Files of the run: run.dir, on a shared file system.
# WANDB_API_KEY and other keys: export them before `sbatch`, which passes its environment on.
set -euo pipefail
cd '/shared/slime like'
head=$({ hostname --ip-address; hostname --all-ip-addresses; true; } 2>/dev/null | awk -v RS="[ \n]+" "/^[0-9.]+\$/ && !/^127[.]/ && !n++")
[ -n "$head" ] || { echo "$(hostname) has no IPv4 address other than loopback" >&2; exit 1; }
token=$(.venv/bin/python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$token RAY_USAGE_STATS_ENABLED=0 HEAD=$head
export RAY_API_SERVER_ADDRESS=http://127.0.0.1:8265

# A step does not inherit --cpus-per-task, and a cluster may bind each task to its number of CPUs.
srun --cpus-per-task=64 --kill-on-bad-exit=1 bash -c '
    ip=$({ hostname --ip-address; hostname --all-ip-addresses; true; } 2>/dev/null | awk -v RS="[ \n]+" "/^[0-9.]+\$/ && !/^127[.]/ && !n++")
    if [ "$SLURM_NODEID" = 0 ]; then
        exec .venv/bin/ray start --head --node-ip-address="$ip" --port=6379 --dashboard-host=127.0.0.1 --block
    fi
    until (exec 3<>"/dev/tcp/$HEAD/6379") 2>/dev/null; do
        [ "$SECONDS" -lt 600 ] || { echo "$ip: no head at $HEAD:6379 after 600 s" >&2; exit 1; }
        sleep 2
    done
    exec .venv/bin/ray start --address="$HEAD:6379" --node-ip-address="$ip" --block
' &
ray_step=$!
trap 'kill "$ray_step" 2>/dev/null; wait "$ray_step" || true' EXIT

.venv/bin/python scripts/submit.py nodes --wait-for 8 --within 600
.venv/bin/python train.py +recipe=qwen3_235b_a22b 'run.dir=/shared/it'"'"'s' placement.ray_address="$head:6379" &
run=$!
trap 'kill -TERM "$run" 2>/dev/null' TERM # sent by Slurm before the time limit: the run saves a checkpoint and ends
while kill -0 "$run" 2>/dev/null; do wait "$run" || true; done # the signal ends a wait, not the run
code=0
wait "$run" || code=$?
exit "$code"
