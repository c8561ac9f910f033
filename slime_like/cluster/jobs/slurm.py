"""A batch script for Slurm: Ray on the job's nodes, ``train.py`` on the first, and a checkpoint before the time limit."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from slime_like.cluster.jobs.layout import NodeLayout
from slime_like.errors import ConfigError

TIME = re.compile(r"(\d+-)?\d{1,2}:\d{2}:\d{2}|\d+-\d{1,2}|\d+(:\d{2})?")  # as in sbatch(1)
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,/-]*")
GCS_PORT = 6379
MAX_SAVE_S = 65535  # the maximum of sbatch's --signal
NODES_S = 600  # for all nodes to join
# Command that prints a node's first IPv4 address other than loopback: some systems map their own host name to loopback.
# It calls hostname twice, because some versions do not list all addresses.
ADDRESS = (
    "{ hostname --ip-address; hostname --all-ip-addresses; true; } 2>/dev/null"
    ' | awk -v RS="[ \\n]+" "/^[0-9.]+\\$/ && !/^127[.]/ && !n++"'
)
BODY = """\
# The first node runs the head of Ray and train.py, every node one Ray node. Files of the run: run.dir, on a shared file system.
# WANDB_API_KEY and other keys: export them before `sbatch`, which passes its environment on.
set -euo pipefail
cd {code}
head=$({address})
[ -n "$head" ] || {{ echo "$(hostname) has no IPv4 address other than loopback" >&2; exit 1; }}
token=$({python} -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$token RAY_USAGE_STATS_ENABLED=0 HEAD=$head
export RAY_API_SERVER_ADDRESS=http://127.0.0.1:8265

# A step does not inherit --cpus-per-task, and a cluster may bind each task to its number of CPUs.
srun --cpus-per-task={cpus} --kill-on-bad-exit=1 bash -c '
    ip=$({address})
    if [ "$SLURM_NODEID" = 0 ]; then
        exec {ray} start --head --node-ip-address="$ip" --port={port} --dashboard-host=127.0.0.1 --block
    fi
    until (exec 3<>"/dev/tcp/$HEAD/{port}") 2>/dev/null; do
        [ "$SECONDS" -lt {nodes_s} ] || {{ echo "$ip: no head at $HEAD:{port} after {nodes_s} s" >&2; exit 1; }}
        sleep 2
    done
    exec {ray} start --address="$HEAD:{port}" --node-ip-address="$ip" --block
' &
ray_step=$!
trap 'kill "$ray_step" 2>/dev/null; wait "$ray_step" || true' EXIT

{python} scripts/submit.py nodes --wait-for {num_nodes} --within {nodes_s}
{command} placement.ray_address="$head:{port}" &
run=$!
trap 'kill -TERM "$run" 2>/dev/null' TERM # sent by Slurm before the time limit: the run saves a checkpoint and ends
while kill -0 "$run" 2>/dev/null; do wait "$run" || true; done # the signal ends a wait, not the run
code=0
wait "$run" || code=$?
exit "$code"
"""


@dataclass(frozen=True, slots=True)
class SlurmOptions:
    """Options of a batch job beyond its nodes and GPUs."""

    code: str  # checkout on every node
    time: str = "24:00:00"
    cpus_per_node: int = 64
    partition: str | None = None
    account: str | None = None
    save_s: int = 900  # between the signal and the time limit, for the current rollout and the checkpoint


def slurm_script(layout: NodeLayout, options: SlurmOptions) -> str:
    """Return the batch script. Raises ``ConfigError`` naming an option that is invalid."""
    if not TIME.fullmatch(options.time):
        raise ConfigError(f"--time {options.time!r} is not a time limit of sbatch: write e.g. 24:00:00 or 2-00:00:00")
    if not 1 <= options.save_s <= MAX_SAVE_S:
        raise ConfigError(
            f"--save-s {options.save_s} is not a number of seconds before the time limit that sbatch accepts: give 1 to {MAX_SAVE_S}"
        )
    for flag, value in (("--partition", options.partition), ("--account", options.account)):
        if value is not None and not NAME.fullmatch(value):
            raise ConfigError(f"{flag} {value!r} is not a Slurm name: use letters, digits, _ . , / and -")
    if options.cpus_per_node < layout.gpus_per_node:
        raise ConfigError(
            f"--cpus {options.cpus_per_node} is below --gpus-per-node {layout.gpus_per_node}: a rank needs a CPU; raise --cpus"
        )
    directives = {
        "job-name": re.sub(r"[^A-Za-z0-9_.-]+", "-", layout.run_name),
        "nodes": layout.num_nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": layout.gpus_per_node,
        "cpus-per-task": options.cpus_per_node,
        "exclusive": None,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "signal": f"B:TERM@{options.save_s}",
        "output": "%x-%j.log",
    }
    flags = {"exclusive"}
    lines = [
        f"#SBATCH --{name}" if name in flags else f"#SBATCH --{name}={value}"
        for name, value in directives.items()
        if value is not None or name in flags
    ]
    body = BODY.format(
        address=ADDRESS,
        code=shlex.quote(options.code),
        cpus=options.cpus_per_node,
        python=".venv/bin/python",
        ray=".venv/bin/ray",
        port=GCS_PORT,
        nodes_s=NODES_S,
        num_nodes=layout.num_nodes,
        command=shlex.join([".venv/bin/python", "train.py", *layout.arguments]),
    )
    return "\n".join(["#!/bin/bash", *lines, body])
