"""Compute the number of nodes that a run needs, for the Slurm script or Kubernetes manifest that starts its cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slime_like.cluster.plan.assignment import assign
from slime_like.cluster.plan.machine import described_machine
from slime_like.cluster.plan.planner import Plan, make_plan
from slime_like.cluster.plan.ray_cluster import ClusterNode
from slime_like.cluster.plan.shapes import model_config
from slime_like.config.load.compat import translate
from slime_like.config.load.loader import load_config
from slime_like.config.rules.files import check_model
from slime_like.config.rules.schedule import without_schedule
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError, MissingResources
from slime_like.hardware import GPUS

JOINED = "placement.ray_address=auto"
MAX_NODES = 2000
MAX_GPUS = 999  # per node, in the description of a machine


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """A run and its nodes, each with the same number of GPUs."""

    run_name: str
    arguments: tuple[str, ...]  # arguments of train.py
    num_nodes: int
    gpus_per_node: int
    advice: tuple[str, ...] = ()


def node_layout(arguments: Sequence[str], gpus_per_node: int, gpu: str | None = None) -> NodeLayout:
    """Return the layout of the run that ``arguments`` start, on nodes with ``gpus_per_node`` GPUs each.

    With ``gpu``, the name of a GPU in the planner's table, also check the memory of the GPUs.

    Raises ``ConfigError`` if ``arguments`` are invalid or start no run; if ``gpus_per_node`` is not from 1 to ``MAX_GPUS``; if
    ``gpu`` begins with a digit or x; or if the run does not fit, does not use GPUs, or needs more than ``gpus_per_node`` GPUs
    on a node. Raises ``CheckpointError`` if the model is neither in its folder nor in the planner's table, and either
    error if the model cannot run with the config.
    """
    command = translate(arguments)
    if command.action != "train":
        raise ConfigError(
            f"--{command.action} does not start a run: give the arguments of a run, without --{command.action}"
        )
    cfg = without_schedule(load_config([*arguments, JOINED], files=False, machine=False, code=False))
    if cfg.placement.device == "cpu":
        raise ConfigError(
            "placement.device=cpu: job files are written only for runs on nodes with GPUs; set placement.device=cuda or auto"
        )
    if not 1 <= gpus_per_node <= MAX_GPUS:
        raise ConfigError(f"--gpus-per-node {gpus_per_node} must be from 1 to {MAX_GPUS}")
    if gpu and (gpu[0].isdigit() or gpu[0] == "x"):  # no description of a machine, such as 8xH200, can name it
        raise ConfigError(
            f"--gpu {gpu} is not the name of a GPU: give one of {', '.join(GPUS)}, or no --gpu, and memory is not checked"
        )
    kind = f"x{gpu}" if gpu else ""
    ranks = cfg.placement.actor_num_gpus_per_node
    if ranks is not None and ranks > gpus_per_node:
        raise ConfigError(
            f"placement.actor_num_gpus_per_node={ranks} with --gpus-per-node {gpus_per_node}: set --gpus-per-node to at least "
            f"{ranks}, or lower placement.actor_num_gpus_per_node"
        )
    largest = described_machine(f"{MAX_NODES}x{gpus_per_node}{kind}")
    if (model := model_config(cfg, largest)) is not None:
        check_model(cfg, model)
    num_nodes = _num_nodes(cfg, make_plan(cfg, largest), gpus_per_node, gpu or "")
    plan = make_plan(cfg, described_machine(f"{num_nodes}x{gpus_per_node}{kind}"))
    return NodeLayout(cfg.run.name, tuple(arguments), num_nodes, gpus_per_node, plan.advice)


def _num_nodes(cfg: TrainConfig, plan: Plan, gpus_per_node: int, gpu: str) -> int:
    """Return the smallest number of nodes to which the run's processes can be assigned.

    Raises ``ConfigError`` if they cannot be assigned to any number of such nodes.
    """

    def problem(num_nodes: int) -> ConfigError | None:
        nodes = [
            ClusterNode(f"node-{i}", gpus_per_node, gpus_per_node, 0, gpu, node_id=str(i)) for i in range(num_nodes)
        ]
        try:
            assign(cfg, plan, nodes)
        except ConfigError as error:  # such as an engine that may not span nodes
            return error
        return None

    min_nodes = max(1, -(-plan.num_gpus // gpus_per_node))
    max_nodes = max(min_nodes, plan.num_gpus)  # more nodes than GPUs are of no use
    if (error := problem(min_nodes)) is not None and problem(max_nodes) is not None:
        if isinstance(error, MissingResources):
            raise ConfigError(f"--gpus-per-node {gpus_per_node}: {error}") from error
        raise error
    return next(num_nodes for num_nodes in range(min_nodes, max_nodes + 1) if problem(num_nodes) is None)
