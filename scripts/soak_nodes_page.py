"""Records of the kills of ``soak_nodes.py``, the check of the run's samples, and the page about the run."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

import psutil

from scripts.page import commit
from slime_like.checkpoint.files import latest_iteration
from slime_like.data.dump import load_groups, rollout_path
from slime_like.util.deadline import FACTOR_VARIABLE
from slime_like.util.reading import InputFile
from tests.e2e.runs import metrics

SPANS = {"collect": "train_wait", "step": "train", "push": "update_weights"}  # phase -> span in metrics.jsonl


@dataclass(frozen=True, slots=True)
class PlannedKill:
    """Kill of a node at a phase of a rollout."""

    transport: str  # weights.transport of the part of the run
    role: str  # engine | trainer: process on the node
    phase: str  # one of SPANS
    power: bool  # the node's cable is cut first, so its peers receive no packet

    @property
    def kind(self) -> str:
        """Kind of the kill, as a table names it."""
        return "power" if self.power else "kill"


@dataclass(frozen=True, slots=True)
class EngineKill:
    """Kill of a node with engines, and the recovery during the run; times are seconds since the kill."""

    plan: PlannedKill
    actual_phase: str  # by the spans of the rollout; empty between two phases
    num_engines: int  # on the node
    num_further: int  # engines of other nodes that were lost as a consequence
    noticed_s: float  # until the first loss was noticed
    recovered_s: float  # until all engines served again
    groups: int  # continued on another engine, or waited for one
    rollouts: int  # trained meanwhile


@dataclass(frozen=True, slots=True)
class TrainerKill:
    """Kill of a trainer rank's node, and the resume of the run; times are seconds since the kill."""

    plan: PlannedKill
    cause: str  # line of the output that names the rank
    ended_s: float  # until the run had ended
    resumed_s: float  # until the resumed run had trained a rollout
    rollouts: int  # after the checkpoint: collected and trained again from its weights


@dataclass(frozen=True, slots=True)
class SampleCount:
    """Counts from ``check_samples``, and the largest difference between engine and trainer log-probabilities in the probes."""

    num_rollouts: int
    num_samples: int
    max_probe_difference: float


def check_samples(run_dir: Path, *, is_ended: bool) -> SampleCount:
    """Count the samples of a run. Raises ``AssertionError`` unless they are complete, as follows.

    Each step must be logged once, group ids must be consecutive over all rollouts, no sample id may occur twice in a group,
    the groups of a rollout must be equally large, and rollout ``i`` must be sampled with weights of version ``i``. If
    ``is_ended``, the newest checkpoint must be that of the last rollout, with a data cursor just past the last group.
    """
    rows = metrics(run_dir)
    num_rollouts = int(rows[-1]["step"])
    assert [row["step"] for row in rows] == list(range(num_rollouts + 1)), "a step is missing, or was logged twice"
    num_groups = num_samples = 0
    for i in range(num_rollouts):
        groups = load_groups(rollout_path(run_dir / "rollouts", i))
        ids = [group.group_id for group in groups]
        assert ids == list(range(num_groups, num_groups + len(groups))), f"rollout {i} has groups {ids}"
        samples = [sample for group in groups for sample in group.samples]
        keys = {(sample.group_id, sample.sample_id) for sample in samples}
        assert len(keys) == len(samples), f"rollout {i}: a sample was doubled"
        sizes = {len(group.samples) for group in groups}
        assert len(sizes) == 1, f"rollout {i}: groups of {sizes} samples"
        versions = {int(token_version) for sample in samples for token_version in sample.versions}
        assert versions == {i}, f"rollout {i} was sampled with weights {versions}"
        num_groups, num_samples = num_groups + len(groups), num_samples + len(samples)
    if is_ended:
        checkpoints = run_dir / "checkpoints"
        assert latest_iteration(checkpoints) == num_rollouts, "the checkpoint is not that of the last rollout"
        file = InputFile(checkpoints / "rollout" / f"state_{num_rollouts}.json", fix="run the soak again")
        cursor = file.json()["cursor"]
        assert cursor["epoch"] * cursor["rows"] + cursor["offset"] == num_groups, f"the data cursor is at {cursor}"
    return SampleCount(num_rollouts, num_samples, max(row["probe/logprob_abs_diff_max"] for row in rows[1:]))


def page(run_dir: Path, kills: Sequence[EngineKill | TrainerKill], command: str, *, is_ended: bool) -> str:
    """Return the page about a run. Raises ``AssertionError`` as ``check_samples`` does."""
    sample_counts = check_samples(run_dir, is_ended=is_ended)
    of_engines = [kill for kill in kills if isinstance(kill, EngineKill)]
    of_trainers = [kill for kill in kills if isinstance(kill, TrainerKill)]
    lines = [
        "# Soak of killed nodes",
        "",
        _setting(command),
        "",
        "The nodes are network namespaces of one machine with a raylet each. The driver and trainer rank 0 are on node 1, trainer "
        "rank 1 is on node 2. The run consists of parts, one call of train.py each, with `weights.transport=broadcast` or `tensor` in "
        "turn. With `broadcast` two engines start on nodes 3 and 4; with `tensor` one is on node 1 "
        "and gets weights through shared memory, and two start on nodes 3 and 4 and get them in requests. An engine that was lost "
        "starts on another node. All processes of a node "
        'are ended by SIGKILL; if the kind of the kill is "power", the node\'s network link is cut first, so its peers receive no packet '
        "about its end. Before each kill, the link of the node is limited to 40 Mbit/s, so that a push takes longer. Ray "
        "declares a node dead within about 3 s (`tests/nodes/cluster.py`). Engines do not depend on this: an engine counts as "
        "lost when a connection to it breaks, or when it has not responded for `health.timeout_s`, here 4 s times "
        f"{FACTOR_VARIABLE}.",
        "",
        f"{len(kills)} kills, {sample_counts.num_rollouts} rollouts, {sample_counts.num_samples} samples: none lost, none trained on "
        "twice. (A resumed run goes back to its newest checkpoint. Rollouts after it are trained again; their first training is lost with "
        "its weights and does not count.) The group ids of all rollouts are consecutive, every group is complete, and every "
        "token of a rollout was sampled with that rollout's weights. "
        f"Largest |engine - trainer| log-probability difference in a probe: {sample_counts.max_probe_difference:.1e}."
        + (
            " At the end the checkpoint was that of the last rollout, with the data cursor just past its last group."
            if is_ended
            else " The soak did not reach its end."
        ),
        "",
        "## Nodes of engines",
        "",
        "The run continued after each kill. The phase is the one that the run was in at the kill, by its timings in metrics.jsonl.",
        "",
        *_engine_table(kills),
        "",
        f"From the kill until all engines served again: {_range([kill.recovered_s for kill in of_engines])}. From the kill until the loss was noticed: "
        f"{_range([kill.noticed_s for kill in of_engines])}.",
        "",
        "## Nodes of a trainer rank",
        "",
        "The run ended with exit code 1 after each kill, and its message named the rank and the node's address. The node was started "
        "again, and the same command resumed the run from its newest checkpoint (one every four rollouts), each time with the other "
        "transport, but after the last kill with the same one. The phase is the one at which the kill was planned.",
        "",
        *_trainer_table(kills),
        "",
        f"From the kill until the run had ended: {_range([kill.ended_s for kill in of_trainers])}. From the kill until the resumed run had trained a rollout, "
        f"including the start of the node: {_range([kill.resumed_s for kill in of_trainers])}.",
        "",
    ]
    return "\n".join(lines)


def _engine_table(kills: Sequence[EngineKill | TrainerKill]) -> list[str]:
    rows = [
        "| kill | transport | phase | kind | engines on the node | further engines lost | noticed after (s) | all serve after (s) | "
        "groups that moved to another engine or waited for one | rollouts meanwhile |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for number, kill in enumerate(kills, 1):
        if isinstance(kill, EngineKill):
            counts = f"{kill.num_engines} | {kill.num_further} | {kill.noticed_s:.1f} | {kill.recovered_s:.1f}"
            phase = kill.actual_phase or "between two phases"
            rows.append(
                f"| {number} | {kill.plan.transport} | {phase} | {kill.plan.kind} | {counts} | {kill.groups} | {kill.rollouts} |"
            )
    return rows


def _trainer_table(kills: Sequence[EngineKill | TrainerKill]) -> list[str]:
    rows = [
        "| kill | transport | phase | kind | run ended after (s) | resumed run trained after (s) | rollouts trained again | cause |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for number, kill in enumerate(kills, 1):
        if isinstance(kill, TrainerKill):
            times = f"{kill.ended_s:.1f} | {kill.resumed_s:.1f}"
            cause = kill.cause.replace("|", "/")
            rows.append(
                f"| {number} | {kill.plan.transport} | {kill.plan.phase} | {kill.plan.kind} | {times} | {kill.rollouts} | {cause} |"
            )
    return rows


def _range(seconds: Sequence[float]) -> str:
    if not seconds:
        return "no kill"
    return f"median {median(seconds):.1f} s, {min(seconds):.1f} to {max(seconds):.1f} s"


def _setting(command: str) -> str:
    """Return the command, versions and machine of the soak."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "sglang", "megatron-core", "ray"))
    return (
        f"Command: `{command}`, with SLIME_LIKE_DEADLINE_FACTOR={os.environ.get(FACTOR_VARIABLE, '1')}. Commit {commit()}. "
        f"Versions: {packages}, Python {platform.python_version()}. Machine: {os.cpu_count()} cores, "
        f"{psutil.virtual_memory().total / 2**30:.0f} GB, no GPU; load average {os.getloadavg()[2]:.0f} in the last 15 minutes."
    )
