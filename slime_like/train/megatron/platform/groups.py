"""Process groups of one trainer rank."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from slime_like.config.schema.resolved import Layout, RankSpec
from slime_like.distributed.gloo_device import share_gloo_device
from slime_like.distributed.rendezvous import join_store, keep_to_interface
from slime_like.distributed.wrapper import install
from slime_like.errors import ConfigError
from slime_like.train.megatron.platform import host
from slime_like.util import deadline
from slime_like.util.ports import RendezvousAddress
from slime_like.util.scheduling import use_batch_scheduling


@dataclass(frozen=True, slots=True)
class RankInfo:
    """This rank's coordinates and process groups in the parallel layout."""

    layout: Layout
    device: torch.device
    tp_rank: int
    pp_rank: int
    cp_rank: int
    dp_rank: int
    tp_group: Any
    pp_group: Any
    cp_group: Any
    dp_group: Any  # ranks with the same part of the model and the same cp_rank
    dp_cp_group: Any  # all ranks with the same part of the model
    ep_rank: int  # index of the range of experts that this rank holds
    etp_rank: int  # index of this rank's shard of each expert in the range
    expert_dp_rank: int  # index of this copy of the range
    expert_group: Any  # ranks that share one copy of all experts: shards of the first range, of the second, and so on
    # Each rank's node address if that node does not share run.dir with the driver's node, else ""; () if all share it.
    separate_nodes: tuple[str, ...] = ()

    def shard(self, *, expert: bool) -> tuple[int, int]:
        """Return the number of shards of a split parameter, and the index of this rank's shard.

        ``expert`` is True for a parameter of a routed expert.
        """
        return (self.layout.etp, self.etp_rank) if expert else (self.layout.tp, self.tp_rank)

    @property
    def is_first(self) -> bool:
        """True on the first pipeline stage, which holds the embedding."""
        return self.pp_rank == 0

    @property
    def is_last(self) -> bool:
        """True on the last pipeline stage, which holds the output layer and computes the losses."""
        return self.pp_rank == self.layout.pp - 1

    @property
    def is_shard_reporter(self) -> bool:
        """True on the rank that returns the per-token results of its data parallel shard: tp and cp rank 0 of the last stage."""
        return self.is_last and self.tp_rank == self.cp_rank == 0

    @property
    def is_reporter(self) -> bool:
        """True on the rank that reports metrics and scores for the world: the shard reporter of data parallel rank 0."""
        return self.is_shard_reporter and self.dp_rank == 0


def check_layout(layout: Layout, world_size: int) -> None:
    """Raise ``ConfigError`` if ``layout`` needs another world size, or if ep * etp does not divide tp * cp * dp."""
    if layout.world_size != world_size:
        sizes = f"tp={layout.tp} pp={layout.pp} cp={layout.cp} dp={layout.dp}"
        raise ConfigError(
            f"parallel.* ({sizes}) needs {layout.world_size} trainer ranks but there are {world_size}: "
            "change parallel.* or placement.actor_num_gpus_per_node"
        )
    stage = layout.tp * layout.cp * layout.dp
    if stage % (layout.ep * layout.etp):
        sizes = f"parallel.ep={layout.ep}" + (f" * parallel.etp={layout.etp}" if layout.etp > 1 else "")
        raise ConfigError(
            f"{sizes} does not divide the {stage} ranks of a pipeline stage (tp {layout.tp} * cp "
            f"{layout.cp} * dp {layout.dp}), over which experts are distributed: set parallel.ep to a divisor of "
            f"{stage // layout.etp if stage % layout.etp == 0 else stage}"
        )


def join_and_make_groups(
    spec: RankSpec, *, rank: int, world_size: int, master: RendezvousAddress, local_rank: int = 0
) -> RankInfo:
    """Join the world (unless already joined) and create megatron's groups. Collective.

    This function runs ``host.install``, so megatron must not have been imported before, unless ``host.install`` ran first.
    Raises ``ConfigError`` as ``check_layout`` does.
    """
    check_layout(spec.layout, world_size)
    if spec.device == "cuda":
        # megatron's overlap depends on the order of kernel launches. Set before the guard creates the CUDA context.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    elif world_size > 1:
        use_batch_scheduling()
    host.install(spec.device)
    share_gloo_device()
    install.install(spec.guard, rank_device(spec, local_rank), rank)
    return make_groups(spec, join_world(spec, rank, world_size, master, local_rank))


def join_world(spec: RankSpec, rank: int, world_size: int, master: RendezvousAddress, local_rank: int) -> torch.device:
    """Join the default process group, unless this process has one, and return this rank's device. Collective."""
    device = rank_device(spec, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        keep_to_interface(master.host)
        timeout = datetime.timedelta(seconds=collective_seconds(spec))
        store = join_store(master, world_size, is_master=rank == 0, timeout=timeout)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return device


def rank_device(spec: RankSpec, local_rank: int) -> torch.device:
    """Return the device on which this rank computes."""
    return torch.device("cuda", local_rank) if spec.device == "cuda" else torch.device("cpu")


def collective_seconds(spec: RankSpec) -> float:
    """Return the timeout of one collective in seconds."""
    seconds = min(spec.deadline_s, spec.guard.deadline_s) if spec.guard.wrap else spec.deadline_s
    return seconds * deadline.scale()


def make_groups(spec: RankSpec, device: torch.device) -> RankInfo:
    """Create megatron's process groups, in place of any earlier ones, and seed the RNGs of torch and megatron. Collective."""
    from megatron.core import parallel_state, tensor_parallel

    layout = spec.layout
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=collective_seconds(spec) / 60,  # pyright: ignore[reportArgumentType]
        create_gloo_process_groups=False,
    )
    torch.manual_seed(spec.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(spec.seed)
    return RankInfo(
        layout=layout,
        device=device,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
        cp_group=parallel_state.get_context_parallel_group(),
        dp_group=parallel_state.get_data_parallel_group(),
        dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        etp_rank=parallel_state.get_expert_tensor_parallel_rank(),  # pyright: ignore[reportArgumentType]  set once groups are made
        expert_dp_rank=parallel_state.get_expert_data_parallel_rank(),
        expert_group=parallel_state.get_expert_tensor_and_model_parallel_group(),
    )
