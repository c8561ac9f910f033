"""Kill nodes of a run on four Ray nodes, and check that every sample is trained on exactly once.

python scripts/soak_nodes.py [--kills 20] [--seed 0] [--limit-s SECONDS] [--folder FOLDER] [--page FILE]

The nodes are namespaces of this machine (``tests/nodes/machine.py``; needs root). The driver and trainer rank 0 are on the
first node, trainer rank 1 is on the second, engines are on the others and, with ``weights.transport=tensor``, also on
the first. Kills come in fours. Three hit nodes with engines, one in each of the phases collect, step and push; the run
continues and moves the engines. The fourth hits the node of rank 1: the run ends, the node starts again, and the same
command resumes the run from its checkpoint, with the other transport unless this kill is the last. Half of the kills are power
failures, about which the peers receive no packet.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from scripts.page import TableFile  # noqa: E402  (found by the line above)
from scripts.soak_nodes_page import SPANS, EngineKill, PlannedKill, TrainerKill, page  # noqa: E402
from slime_like.checkpoint.files import resumable_iteration  # noqa: E402
from slime_like.cluster.run.control import Request, RequestText  # noqa: E402
from slime_like.cluster.run.control_client import send_request  # noqa: E402
from slime_like.data import faults  # noqa: E402
from slime_like.printable import visible  # noqa: E402
from tests.e2e.runs import metrics  # noqa: E402
from tests.nodes.cluster import NodeRun, RayNodes, addresses_of_engines, ray_nodes, start_run  # noqa: E402
from tests.nodes.job import SmallJob, make_job  # noqa: E402
from tests.nodes.machine import missing_permission  # noqa: E402

NUM_NODES = 4
LIMIT_S = 300.0  # for a start, the end of a run, or a recovery
SLOW_LINK = ("40mbit", 100_000)  # rate and queue of the link of a node about to be killed: a push takes longer
SETTINGS = (
    "placement.actor_num_nodes=2",
    "placement.actor_num_gpus_per_node=1",
    f"rollout.batch_size={SmallJob.BATCH * 4}",
    "loop.num_rollout=100000",
    "run.save_interval=4",
    "run.dump_rollouts=true",
)
# Transport -> settings, and number of engines to which the run is then resized.
LAYOUTS = {
    "tensor": (("placement.mode=colocated", "rollout.num_engines=1"), 3),
    "broadcast": (("placement.mode=split", "rollout.num_engines=2"), 2),
}
KILLS_OF_ENGINES = ("collect", "step", "push")  # of one part, in an order drawn from the seed


def plan(num_kills: int, seed: int) -> list[PlannedKill]:
    """Return ``num_kills`` kills in parts of four: three of nodes with engines, then one of a node with a trainer rank.

    The last part may have fewer. ``seed`` determines the order of phases, and which kills cut the cable first.
    """
    rng, kills = random.Random(seed), list[PlannedKill]()
    power = [True, False] * ((num_kills + 1) // 2)
    rng.shuffle(power)
    while len(kills) < num_kills:
        part = len(kills) // (len(KILLS_OF_ENGINES) + 1)
        transport = tuple(LAYOUTS)[part % len(LAYOUTS)]
        phases = rng.sample(KILLS_OF_ENGINES, len(KILLS_OF_ENGINES))[: num_kills - len(kills)]
        kills += [PlannedKill(transport, "engine", phase, power.pop()) for phase in phases]
        if len(kills) < num_kills:
            phase = KILLS_OF_ENGINES[part % len(KILLS_OF_ENGINES)]
            kills.append(PlannedKill(transport, "trainer", phase, power.pop()))
    return kills


@dataclass(slots=True)
class NodeSoak:
    """Run on a cluster, and its kills so far."""

    cluster: RayNodes
    job: SmallJob
    run_dir: Path
    rng: random.Random
    kills: list[EngineKill | TrainerKill] = field(default_factory=list[EngineKill | TrainerKill])

    def start(self, transport: str) -> NodeRun:
        """Start or resume the run; return it once it has logged a step."""
        overrides = self.job.overrides(*SETTINGS, *LAYOUTS[transport][0], f"weights.transport={transport}")
        run = start_run(self.cluster, self.cluster.nodes[0], self.run_dir, *overrides)
        run.wait_until(lambda: re.search(r"^\[\d+/", run.output(), re.M) is not None, LIMIT_S)
        return run

    def add_engines(self, run: NodeRun, transport: str) -> None:
        """Resize the run to the number of engines in the layout of ``transport``, and wait until they serve."""
        settings, num_engines = LAYOUTS[transport]
        if f"rollout.num_engines={num_engines}" in settings:
            return
        send_request(run.run_dir, RequestText(Request.ENGINES, num_engines))
        new_engines = range(1, num_engines)
        run.wait_until(lambda: all(f"engine {i} serves" in run.output() for i in new_engines), LIMIT_S)

    def kill(self, run: NodeRun, kill: PlannedKill, next_transport: str) -> NodeRun:
        """Kill a node, wait for the recovery, start the node again; return the continuing run.

        After the loss of engines, the result is ``run``. After the loss of a trainer rank, it is a new process of train.py, which
        resumes the run with the transport ``next_transport``.
        """
        if kill.role == "engine":
            self.kills.append(self._kill_engine(run, kill))
            return run
        record, resumed_run = self._kill_trainer(run, kill, next_transport)
        self.kills.append(record)
        self.add_engines(resumed_run, next_transport)
        return resumed_run

    def _kill_engine(self, run: NodeRun, kill: PlannedKill) -> EngineKill:
        hosts = addresses_of_engines(run.run_dir, LAYOUTS[kill.transport][1])
        node = self.rng.choice([node for node in self.cluster.nodes[2:] if node.address in hosts])
        lost_engines = [f"engine {i}" for i, host in enumerate(hosts) if host == node.address]
        with node.slow_link(*SLOW_LINK):
            wait_for_phase(run, kill.phase, self.rng)
            step, kill_time = newest_step(run.run_dir), time.time()
            node.kill(power=kill.power)
            run.wait_until(lambda: all(engine in serving_again(run, kill_time) for engine in lost_engines), LIMIT_S)
        recoveries = [recovery for recovery in faults.read(run.run_dir)[1] if recovery.noticed > kill_time]
        self.cluster.start(node)
        run.wait_until(lambda: newest_step(run.run_dir) > step, LIMIT_S)
        return EngineKill(
            kill,
            actual_phase=phase_at(run.run_dir, kill_time),
            num_engines=len(lost_engines),
            num_further=len({recovery.engine for recovery in recoveries} - set(lost_engines)),
            noticed_s=min(recovery.noticed for recovery in recoveries if recovery.engine in lost_engines) - kill_time,
            recovered_s=max(recovery.joined for recovery in recoveries) - kill_time,
            groups=sum(recovery.groups for recovery in recoveries),
            rollouts=newest_step(run.run_dir) - step,
        )

    def _kill_trainer(self, run: NodeRun, kill: PlannedKill, transport: str) -> tuple[TrainerKill, NodeRun]:
        node = self.cluster.nodes[1]
        with node.slow_link(*SLOW_LINK):
            wait_for_phase(run, kill.phase, self.rng)
            kill_time = time.time()
            node.kill(power=kill.power)
            code, output = run.wait(LIMIT_S)
        end_time = time.time()
        cause = next((line for line in output.splitlines() if "trainer rank 1 died" in line), "")
        assert code == 1 and node.address in cause, output[-5000:]
        step, checkpoint = newest_step(run.run_dir), resumable_iteration(run.run_dir / "checkpoints")
        assert checkpoint is not None, output[-5000:]
        self.cluster.start(node)
        resumed_run = self.start(transport)
        record = TrainerKill(
            kill,
            cause=cause.strip(),
            ended_s=end_time - kill_time,
            resumed_s=time.time() - kill_time,
            rollouts=step - checkpoint,
        )
        return record, resumed_run


def newest_rows(run_dir: Path, num_rows: int) -> list[dict[str, Any]]:
    """Return the newest complete rows of metrics.jsonl, at most ``num_rows``, without parsing the whole file."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines[-num_rows - 1 :] if line.endswith(b"\n")][-num_rows:]


def newest_step(run_dir: Path) -> int:
    """Return the newest step logged, -1 before the first."""
    rows = newest_rows(run_dir, 1)
    return int(rows[0]["step"]) if rows else -1


def serving_again(run: NodeRun, since: float) -> set[str]:
    """Return the engines that serve again and whose loss was noticed after ``since``."""
    newest = {recovery.engine: recovery for recovery in faults.read(run.run_dir)[1] if recovery.noticed > since}
    return {engine for engine, recovery in newest.items() if recovery.joined}


def wait_for_phase(run: NodeRun, phase: str, rng: random.Random) -> None:
    """Wait until two more rollouts have ended, then until a random moment in ``phase`` of the rollout after them.

    The moment is estimated from the times of the second rollout.
    """
    step = newest_step(run.run_dir)
    run.wait_until(lambda: newest_step(run.run_dir) > step + 1, LIMIT_S)
    before, row = newest_rows(run.run_dir, 2)
    begin, end = row["spans"][SPANS[phase]]
    moment = row["time"] + rng.uniform(begin, end) - before["time"]
    time.sleep(max(0.0, moment - time.time()))


def phase_at(run_dir: Path, moment: float) -> str:
    """Return the phase that ran at ``moment``; empty if no phase of a completed rollout did."""
    phases = {span: phase for phase, span in SPANS.items()}
    for row in metrics(run_dir):
        for name, (begin, end) in row["spans"].items():
            if name in phases and begin <= moment <= end:
                return phases[name]
    return ""


def soak(num_kills: int, seed: int, folder: Path, table: TableFile | None, limit_s: float) -> Iterator[str]:
    """Kill nodes up to ``num_kills`` times; yield a line for each kill, then the page's text.

    After ``limit_s`` seconds, no further kill is begun; a kill that already waits for its phase still takes place. The page is
    also written to ``table`` after each kill of a trainer rank's node and at the end. Raises ``AssertionError`` if the run does
    not end as expected or its samples are wrong, and ``DeadlineExceeded`` if a wait for the run exceeds its limit.
    """
    kills = plan(num_kills, seed)
    limit = "" if limit_s == math.inf else f" --limit-s {limit_s}"
    command = f"python scripts/soak_nodes.py --kills {num_kills} --seed {seed}{limit}"
    start = time.monotonic()
    with ray_nodes(NUM_NODES, folder) as cluster:
        soaking = NodeSoak(cluster, make_job(folder), folder / "run", random.Random(seed))
        run = soaking.start(kills[0].transport)
        soaking.add_engines(run, kills[0].transport)
        for number, kill in enumerate(kills):
            if time.monotonic() - start > limit_s:
                break
            next_transport = kills[number + 1].transport if number + 1 < num_kills else kill.transport
            run = soaking.kill(run, kill, next_transport)
            yield f"{number + 1}: {soaking.kills[-1]}"
            if table is not None and kill.role == "trainer":
                table.write(page(soaking.run_dir, soaking.kills, command, is_ended=False))
        send_request(run.run_dir, Request.STOP)
        code, output = run.wait(LIMIT_S)
        assert code == 130, output[-5000:]
    text = page(folder / "run", soaking.kills, command, is_ended=True)
    if table is not None:
        table.write(text)
    yield text


def main() -> int:
    """Print a line for each kill, then the page. Return 0; raise the errors of ``soak`` if the run is faulty."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=math.inf, help="no further kill after this many seconds")
    parser.add_argument("--folder", type=Path, default=None, help="new folder; default: a temporary one")
    parser.add_argument("--page", type=lambda text: TableFile(Path(text), Path(__file__).name), default=None)
    options = parser.parse_args()
    if options.kills < 1:
        parser.error(f"--kills={options.kills}: at least 1")
    if reason := missing_permission():
        parser.error(reason)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="soak_nodes"))
    folder.mkdir(parents=True, exist_ok=True)
    for line in soak(options.kills, options.seed, folder, options.page, options.limit_s):
        print(visible(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
