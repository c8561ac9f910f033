"""Write a batch script for Slurm or a RayJob for KubeRay that runs train.py on the nodes that its plan needs.

python scripts/make_job_files.py slurm --gpu H200 +recipe=qwen3_235b_a22b run.dir=/shared/runs/a > job.sh && sbatch job.sh
python scripts/make_job_files.py kubernetes --gpu H100 --image IMAGE --claim CLAIM +recipe=qwen3_30b_a3b > job.yaml

The files contain no secrets. docs/cluster_jobs.md
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slime_like.cluster.jobs.kubernetes import KubernetesOptions, manifest
from slime_like.cluster.jobs.layout import NodeLayout, node_layout
from slime_like.cluster.jobs.slurm import SlurmOptions, slurm_script
from slime_like.cluster.jobs.submission import check_no_secrets
from slime_like.errors import SlimeLikeError, exit_code
from slime_like.printable import complaint, print_output, visible

REPOSITORY = Path(__file__).resolve().parents[1]


def main(argv: list[str]) -> int:
    """Print the job file. Return 0 on success; 2 if an option or the run is invalid; 1 if the file cannot be printed."""
    args = _parser().parse_args(argv)
    arguments = args.arguments[1:] if args.arguments[:1] == ["--"] else args.arguments
    try:
        check_no_secrets(arguments, {})
        layout = node_layout(arguments, args.gpus_per_node, args.gpu)
        text = _slurm(layout, args) if args.target == "slurm" else _kubernetes(layout, args)
    except SlimeLikeError as error:
        sys.stderr.write(complaint(error))
        return exit_code(error)
    for line in layout.advice:
        sys.stderr.write(visible(f"warning: {line}\n"))
    return print_output(text)


def _slurm(layout: NodeLayout, args: argparse.Namespace) -> str:
    options = SlurmOptions(args.code, args.time, args.cpus, args.partition, args.account, args.save_s)
    return slurm_script(layout, options)


def _kubernetes(layout: NodeLayout, args: argparse.Namespace) -> str:
    options = KubernetesOptions(
        args.image, args.claim, args.mount, args.cpus, args.memory, args.shm, args.secret, args.hours
    )
    return manifest(layout, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    targets = parser.add_subparsers(dest="target", required=True)
    slurm = targets.add_parser("slurm", help="a batch script", allow_abbrev=False)
    kubernetes = targets.add_parser("kubernetes", help="a RayJob", allow_abbrev=False)
    for target in (slurm, kubernetes):
        target.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="GPUs of a node (8)")
        target.add_argument("--gpu", help="kind of GPU, whose memory is then checked, such as H200")
        target.add_argument("--cpus", type=int, default=64, metavar="N", help="CPUs of a node (64)")
    slurm.add_argument("--code", default=str(REPOSITORY), help="checkout on every node (default: this path)")
    slurm.add_argument("--time", default="24:00:00", help="time limit (24:00:00)")
    slurm.add_argument("--partition")
    slurm.add_argument("--account")
    slurm.add_argument("--save-s", type=int, default=900, metavar="SECONDS", help="to save before the limit")
    kubernetes.add_argument("--image", required=True, help="image of docker/Dockerfile, as the nodes pull it")
    kubernetes.add_argument("--claim", required=True, help="PersistentVolumeClaim for models, data and run.dir")
    kubernetes.add_argument("--mount", default="/shared", help="path of the claim in a pod (/shared)")
    kubernetes.add_argument("--memory", default="512Gi", help="main memory of a pod (512Gi)")
    kubernetes.add_argument("--shm", default="64Gi", help="/dev/shm of a pod (64Gi)")
    kubernetes.add_argument("--secret", help="secret whose entries become variables, such as WANDB_API_KEY")
    kubernetes.add_argument("--hours", type=int, default=24, help="time limit (24)")
    for target in (slurm, kubernetes):
        target.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of train.py, after the options")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
