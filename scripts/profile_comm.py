"""Measure the memory that collectives allocate at first use and in later calls, and write a guard policy from it.

python scripts/profile_comm.py [--steps N] [--out DIR] [--name NAME] ARGUMENTS OF train.py  profile the run, N rollouts
python scripts/profile_comm.py --sweep RANKS [--out DIR] [--name NAME]                      profile common ops, without a run
python scripts/profile_comm.py --read RUN_DIR [--out DIR] [--name NAME]                     read a profiled run, even a failed one

It prints a table and writes DIR/guard/NAME.yaml with a reason for each op. Memory is in MiB, the maximum over ranks.
"Allocator drop" is the growth of the process's device memory, "driver drop" the decrease of the device's free memory; on a
CPU they are the growth of resident memory, and the decrease of free memory of the host and its control groups. First use is
the first call and every call with more bytes than any before; all other calls are the steady state. Use the policy with
``--config-dir DIR guard=NAME``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "plugins")]

from slime_like.cli import main as train_main  # noqa: E402
from slime_like.cluster.plan.guard import profile_folder  # noqa: E402
from slime_like.config.load.loader import load_config  # noqa: E402
from slime_like.distributed.guard import advice  # noqa: E402
from slime_like.errors import ConfigError, SlimeLikeError  # noqa: E402
from slime_like.printable import complaint, visible  # noqa: E402
from slime_like.util.reading import reason  # noqa: E402

SIZES = (2**10, 2**16, 2**22)  # bytes
REPEATS = 5


def main(argv: Sequence[str]) -> int:
    """Measure, or read measurements, and write the policy.

    Return the exit code: 0 on success; that of train.py if it failed; 1 if there are no measurements. Raises ``ConfigError``
    before it measures if the policy cannot be written.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="rollouts of the profiled run")
    parser.add_argument(
        "--sweep", type=int, metavar="RANKS", help="run no training; profile common ops on this many ranks"
    )
    parser.add_argument(
        "--read",
        type=Path,
        metavar="RUN_DIR",
        help="run no training; read the profile of this run, which may have failed",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("measured"),
        help="folder of configs; the policy is written to its guard/NAME.yaml",
    )
    parser.add_argument("--name", default="measured")
    args, overrides = parser.parse_known_args(argv)
    path = args.out / "guard" / f"{args.name}.yaml"
    check_writable(path)
    with tempfile.TemporaryDirectory() as scratch:
        if args.sweep is not None:
            folder, origin = Path(scratch), f"a sweep over {args.sweep} ranks"
            sweep(args.sweep, folder)
        elif args.read is not None:
            folder, origin = profile_folder(str(args.read)), f"the run of {args.read}"
        else:
            code, folder = run(overrides, args.steps)
            if code:
                return code
            origin = " ".join([f"{args.steps} rollouts of train.py", *overrides])
        ranks = advice.read_rows(folder)
        if not any(ranks.values()):
            sys.stderr.write("no rank issued a collective: profile a run with several trainer ranks, or --sweep 2\n")
            return 1
        for line in advice.table(ranks):
            sys.stdout.write(visible(line + "\n"))
        path.write_text(advice.to_yaml(ranks, origin))
        sys.stdout.write(
            visible(f"\n{path}; use it with --config-dir {args.out} guard={args.name}\n\n{path.read_text()}")
        )
    return 0


def check_writable(path: Path) -> None:
    """Create the folder of ``path``. Raises ``ConfigError`` if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.open("r+b").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({reason(error)}): choose another --out or --name") from error


def run(overrides: Sequence[str], steps: int) -> tuple[int, Path]:
    """Profile train.py; return its exit code and the folder with the measurements of its ranks.

    If the run succeeds, older measurements in the folder are removed. If the arguments are invalid, the folder is ``Path()``.
    """
    short = [
        f"loop.num_rollout={steps}",
        "loop.num_epoch=null",
        "optim.warmup_steps=0",
        "optim.warmup_fraction=null",
    ]  # the schedule does not affect the profile
    argv = [*overrides, *short, "guard=auto", "guard.profile=true"]
    try:
        folder = profile_folder(load_config(argv, files=False).run.dir)
    except SlimeLikeError:
        return train_main(argv), Path()  # reports the error
    started_ns = time.time_ns()
    code = train_main(argv)
    for path in folder.glob("*.json"):
        if code == 0 and path.stat().st_mtime_ns < started_ns:  # written by an earlier run, perhaps with more ranks
            path.unlink()
    return code, folder


def sweep(ranks: int, folder: Path) -> None:
    """Run common ops in several sizes, on ``ranks`` processes of this machine, which write measurements to ``folder``."""
    from torch import multiprocessing

    spawn = getattr(multiprocessing, "spawn")  # noqa: B009 (untyped)
    spawn(_rank, args=(ranks, str(folder)), nprocs=ranks)


def _rank(rank: int, size: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    from slime_like.config.schema.guard_policy import GuardSpec
    from slime_like.distributed.wrapper import install

    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    install.install(GuardSpec(wrap=True, profile=folder), device, rank)
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=size)
    measure(device)
    dist.barrier()
    dist.destroy_process_group()


def measure(device: Any) -> None:
    """Run common ops in the sizes ``SIZES`` in the current process group. Collective.

    Call it after ``install.install`` with a ``GuardSpec`` whose ``profile`` names the folder for the measurements.
    """
    import torch.distributed as dist

    from slime_like.distributed.wrapper import install

    size = dist.get_world_size()
    for num_bytes in SIZES:
        for _ in range(REPEATS):
            _every_op(device, num_bytes // 4 // size * size)
    install.drain()


def _every_op(device: Any, num_floats: int) -> None:
    """Run common ops, with ``num_floats`` floats per rank. Collective. A single rank skips the sends."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    size, rank = dist.get_world_size(), dist.get_rank()
    source = torch.ones(num_floats, device=device)
    part, gathered = source[: num_floats // size].clone(), source.repeat(size)
    gather, scatter = getattr(dist, "all_gather_into_tensor"), getattr(dist, "reduce_scatter_tensor")  # noqa: B009
    dist.all_reduce(source)
    dist.broadcast(source, 0)
    gather(gathered, source)
    scatter(part, source)
    dist.all_to_all_single(torch.empty_like(source), source)
    dist.barrier()
    with c10d._coalescing_manager(async_ops=True) as works:  # pyright: ignore[reportPrivateUsage]  as megatron does
        for _ in range(2):
            gather(gathered, source)
    works.wait()
    dist.broadcast_object_list([rank], src=0)
    if size > 1:
        peers = (rank + 1) % size, (rank - 1) % size
        batch = [dist.P2POp(dist.isend, source, peers[0]), dist.P2POp(dist.irecv, torch.empty_like(source), peers[1])]
        for work in dist.batch_isend_irecv(batch):
            work.wait()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SlimeLikeError as error:
        sys.exit(complaint(error).rstrip())
