"""Run train.py as a job of a Ray cluster: submit and follow it, list jobs, stop one with a checkpoint.

python scripts/submit.py run [options] +recipe=qwen3_30b_a3b optim.lr=2e-6     arguments of train.py
python scripts/submit.py nodes [--wait-for N]
python scripts/submit.py list
python scripts/submit.py follow JOB
python scripts/submit.py stop JOB [--wait SECONDS] [--now]

The cluster's token is read as Ray reads it, for example from RAY_AUTH_TOKEN. Ctrl-C leaves the job running. docs/cluster_jobs.md
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from slime_like.cluster.jobs.address import ADDRESS_VARIABLE, DEFAULT_ADDRESS, TOKEN_VARIABLE, server_address
from slime_like.cluster.jobs.code_archive import make_package
from slime_like.cluster.jobs.follow import follow, wait_for_nodes
from slime_like.cluster.jobs.job import PYTHON, RUN_DIR, RUN_NAME, STOPPED_CODE, USER, ClusterJob
from slime_like.cluster.jobs.planning import plan_job
from slime_like.cluster.jobs.server import JobServer
from slime_like.cluster.jobs.stopping import stop_job
from slime_like.cluster.jobs.submission import NodePaths, check_no_secrets, job_request, make_submission
from slime_like.cluster.plan.ray_cluster import ClusterNode
from slime_like.errors import ConfigError, SlimeLikeError, exit_code
from slime_like.printable import complaint, visible

REPOSITORY = Path(__file__).resolve().parents[1]
NO_PROGRAM_CODES = (126, 127)  # of a shell that cannot run a program
STOP_WAIT_S = 3600.0  # for the current rollout and the checkpoint
INTERRUPTED = {
    "run": "interrupted; a job that was submitted keeps running (scripts/submit.py list)",
    "follow": "stopped following; the job keeps running (scripts/submit.py list)",
    "stop": "stopped waiting; a stop request that was sent remains in effect (scripts/submit.py list)",
}
"""Command that submits, follows or stops a job -> message after Ctrl-C."""


def main(argv: list[str]) -> int:
    """Return the exit code: the job's if it was followed, else 0; 2 for bad input; 1 for other failures; 130 after Ctrl-C."""
    args = _parser().parse_args(argv)
    try:
        return asyncio.run(_dispatch(args))
    except KeyboardInterrupt:
        sys.stderr.write(visible(f"{INTERRUPTED.get(args.command, 'interrupted')}\n"))
        return STOPPED_CODE
    except SlimeLikeError as error:
        sys.stderr.write(complaint(error))
        return exit_code(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--address",
        help=f"job server: http://HOST:PORT of the head's dashboard ({ADDRESS_VARIABLE}, or {DEFAULT_ADDRESS})",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="submit train.py and follow it", allow_abbrev=False)
    run.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="environment of the job; no secrets"
    )
    run.add_argument("--code", default=str(REPOSITORY), help="checkout on every node (default: this path)")
    run.add_argument("--python", help="Python on every node (default: .venv/bin/python of --code)")
    run.add_argument("--upload", action="store_true", help="run this checkout's code instead of that of --code")
    run.add_argument("--detach", action="store_true", help="do not follow the job")
    run.add_argument(
        "--grows",
        action="store_true",
        help="submit even if the cluster lacks nodes; the run waits until they have joined",
    )
    run.add_argument("--open-cluster", action="store_true", help="submit even if the cluster requires no token")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of train.py, after the options")
    nodes = commands.add_parser("nodes", help="list the cluster's nodes, or wait until they have joined")
    nodes.add_argument("--wait-for", type=int, default=0, metavar="N", help="wait until N nodes have joined")
    nodes.add_argument("--within", type=float, default=600.0, metavar="SECONDS", help="wait at most this long")
    commands.add_parser("list", help="list the jobs that this script submitted")
    commands.add_parser("follow", help="write a job's log until it ends").add_argument("job")
    stop = commands.add_parser("stop", help="end a job after its current rollout, with a checkpoint")
    stop.add_argument("job")
    stop.add_argument("--wait", type=float, default=STOP_WAIT_S, metavar="SECONDS", help="wait at most this long")
    stop.add_argument("--now", action="store_true", help="send SIGTERM, for a run that does not answer stop requests")
    return parser


async def _dispatch(args: argparse.Namespace) -> int:
    address = server_address(args.address, os.environ)
    async with JobServer(address) as server:
        match args.command:
            case "run":
                return await _run(server, args)
            case "nodes":
                return _print_nodes(await wait_for_nodes(server, args.wait_for, args.within))
            case "list":
                await server.check()
                return _print_jobs(await server.jobs())
            case "follow":
                await server.check()
                return _report(await follow(server, args.job, _write))
            case _:
                if not args.wait >= 0:
                    raise ConfigError(f"--wait {args.wait}: a time is 0 or more")
                await server.check()
                job = await stop_job(server, args.job, wait_s=args.wait, at_once=args.now)
                _report(job)
                return 0


async def _run(server: JobServer, args: argparse.Namespace) -> int:
    """Check, plan and submit a job; follow it and return its exit code, or return 0 with ``--detach``."""
    arguments = args.arguments[1:] if args.arguments[:1] == ["--"] else args.arguments
    environment = _environment(args.env)
    check_no_secrets(arguments, environment)
    await server.check()
    await _check_is_protected(server, args.open_cluster)
    plan = plan_job(arguments, await server.nodes(), grows=args.grows)
    for line in plan.lines:
        print(visible(line))
    for warning in plan.warnings:
        sys.stderr.write(visible(f"warning: {warning}\n"))
    package = make_package(REPOSITORY) if args.upload else None
    uri = None if package is None else await server.upload(package.name, package.content)
    paths = NodePaths(args.code, args.python or f"{args.code}/.venv/bin/python", uri)
    submission = make_submission(arguments, plan.cfg, paths, environment)
    request = job_request(submission)
    await server.submit(request)
    job_id = request.submission_id
    print(visible(f"job {job_id} submitted; run.dir is {submission.run_dir} on the head"), flush=True)
    if args.detach:
        return 0
    return _report(await follow(server, job_id, _write))


async def _check_is_protected(server: JobServer, is_accepted: bool) -> None:
    """Raise ``ConfigError`` if anyone who reaches the cluster can run code on it, unless the user accepts that."""
    if not is_accepted and not await server.requires_token():
        raise ConfigError(
            f"the cluster at {server.address.url} requires no token, so anyone who reaches its ports can run code on it: start "
            f"every node with RAY_AUTH_MODE=token and the same {TOKEN_VARIABLE}, or pass --open-cluster"
        )


def _environment(entries: list[str]) -> Mapping[str, str]:
    pairs = [entry.partition("=") for entry in entries]
    for entry, (_, equals, _) in zip(entries, pairs, strict=True):
        if not equals:
            raise ConfigError(f"--env {entry!r} has no value: write --env NAME=VALUE")
    return {name: value for name, _, value in pairs}


def _write(text: str) -> None:
    sys.stdout.write(visible(text))
    sys.stdout.flush()


def _report(job: ClusterJob) -> int:
    """Write the job's outcome to stderr; return ``job.code``."""
    reason = f": {job.reason}" if job.reason else ""
    sys.stderr.write(visible(f"job {job.id} {job.outcome}{reason}\n"))
    if job.exit_code in NO_PROGRAM_CODES and PYTHON in job.metadata:
        sys.stderr.write(visible(f"the head has no Python at {job.metadata[PYTHON]}: correct --code or --python\n"))
    return job.code


def _print_nodes(nodes: tuple[ClusterNode, ...]) -> int:
    for node in nodes:
        kind = f" ({node.gpu_name})" if node.gpu_name else ""
        memory = f"{node.memory_bytes / 2**30:.0f} GiB"
        print(visible(f"{node.address}  {node.num_gpus} GPUs{kind}  {node.num_cpus} CPUs  {memory}"))
    return 0


def _print_jobs(jobs: tuple[ClusterJob, ...]) -> int:
    """Print the runs that this script submitted among ``jobs``, in the given order. Return 0."""
    for job in jobs:
        if job.is_ours and RUN_NAME in job.metadata:
            start = (
                "-" if job.started_at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.started_at))
            )
            code = "" if job.exit_code is None else f" (exit code {job.exit_code})"
            run_dir, user = job.metadata.get(RUN_DIR, "?"), job.metadata.get(USER, "?")
            print(visible(f"{job.id}  {job.outcome}{code}  {start}  {user}  {run_dir}"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
