"""Groups of tests that share a process of pytest-xdist, and the scheduler that distributes them."""

from __future__ import annotations

import contextlib
from typing import Any

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

# Files that share a fixture of the session: the engine of tests/engine/conftest.py, and the ranks of
# tests/train/conftest.py and tests/distributed/conftest.py.
ENGINE = tuple(
    f"tests/engine/test_{name}.py"
    for name in (
        "agent",
        "generate",
        "manager",
        "memory",
        "partial",
        "same_rollouts",
        "seeds",
        "tools",
        "weights",
    )
)
RANKS = ("tests/train/",)
NODES = ("tests/nodes/",)  # share a cluster of three nodes
RANKS_OF_WRAPPER = tuple(f"tests/distributed/test_{name}.py" for name in ("forensics", "reload", "wrapper"))
# Files that share the fork servers of tests/engine/forked_engines.py and tests/e2e/worker_server.py, in groups that run side by
# side. The start of the first server takes as long as the start of an engine.
FORKED_ENGINES = tuple(
    f"tests/engine/test_{name}.py"
    for name in (
        "dcp",
        "cpu_decode",
        "exact",
        "failed_starts",
        "families",
        "faults",
        "hybrid",
        "kv_capacity",
        "latent",
    )
)
MORE_FORKED_ENGINES = tuple(
    f"tests/engine/test_{name}.py" for name in ("remote_experts", "flow_mla_engine", "servers_by_hand")
)
FORKED_RUNS = tuple(
    f"tests/e2e/test_{name}.py" for name in ("same_run", "roles", "library", "worker_server", "rollout_only")
)
MORE_FORKED_RUNS = tuple(
    f"tests/e2e/test_{name}.py" for name in ("split", "colocated", "hybrid", "hang", "ended_by_faults", "latent")
)
PHANTOM_RANKS = ("tests/phantom/test_trace.py", "tests/phantom/test_trainer.py")  # share a process that forks ranks
GROUPS = (
    *(ENGINE, RANKS, NODES, RANKS_OF_WRAPPER, PHANTOM_RANKS),
    *(FORKED_ENGINES, MORE_FORKED_ENGINES, FORKED_RUNS, MORE_FORKED_RUNS),
)
# Files that import SGLang, megatron-core or transformers, which takes seconds: in one process if no engine is started.
HEAVY_IMPORTS = (
    "tests/engine/",
    "tests/damage/",
    "tests/data/",
    "tests/benchmarks/test_flow_mla.py",
    "tests/benchmarks/test_gdn.py",
    "tests/benchmarks/test_gpu_step.py",
    "tests/cluster/test_inputs.py",
    "tests/config/test_flow_mla_config.py",
    "tests/config/test_foreign_code.py",
    "tests/metrics/test_flops.py",
    "tests/quickstart/test_prepare.py",
    "tests/quickstart/test_tool.py",
    "tests/rollout/test_agent_requests.py",
    "tests/scripts/test_gpu_evidence.py",
    "tests/scripts/test_prepare_data.py",
    "tests/train/",
)
# Files whose tests spend most of their time waiting: in one process if no engine is started, while the other processes compute.
WAITING = (
    *("tests/cluster/test_engine_restart.py", "tests/cluster/test_stacks.py", "tests/cluster/test_supervisor.py"),
    *("tests/power/", "tests/reward/test_reward_pool.py", "tests/rollout/test_event_loop_monitor.py"),
)
# Files that take minutes, longest first: a long one that starts last would leave the other processes idle.
LONGEST = (
    *(*FORKED_ENGINES, *RANKS, *NODES),
    *(*FORKED_RUNS, *MORE_FORKED_RUNS),
    *(*RANKS_OF_WRAPPER, *ENGINE, *MORE_FORKED_ENGINES),
    "tests/scripts/test_clean_root.py",
    *(f"tests/phantom/test_{name}.py" for name in ("gpu_tests", "trace", "trainer", "engine", "compiled_kernels")),
    *("tests/e2e/", "tests/engine/", "tests/gdn/", "tests/upstream/", "tests/cluster/test_supervisor.py"),
    *("tests/reward/", "tests/distributed/", "tests/config/", "tests/convert/"),
)


def group_of(nodeid: str, *, starts_engines: bool = True) -> str:
    """Return the group of a test: its file, or one name for all files that run in one process."""
    file = nodeid.partition("::")[0]
    groups = GROUPS if starts_engines else (HEAVY_IMPORTS, WAITING)
    return next((shared[0] for shared in groups if file.startswith(shared)), file)


class GroupScheduling(LoadScopeScheduling):
    """Scheduler that runs the tests of a group in one process, and survives the death of a process.

    ``remove_node`` of xdist 3.8 also gives the completed groups of a dead process to another one, which never reports
    a test of them and so receives no further group: the session would wait forever. Remove the method here once xdist drops
    completed groups.
    """

    def __init__(self, config: Any, log: Any, *, starts_engines: bool) -> None:
        super().__init__(config, log)
        self.starts_engines = starts_engines

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid, starts_engines=self.starts_engines)

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Assign the next group.

        The last process takes groups from the end of the queue, where the short ones are: groups that start engines or ranks
        slow each other down.

        If the process has died and xdist does not know it yet, ``remove_node`` reassigns the group.
        """
        if self.starts_engines and len(self.nodes) > 1 and node is self.nodes[-1]:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        with contextlib.suppress(OSError):
            super()._assign_work_unit(node)

    def remove_node(self, node: WorkerController) -> str | None:
        """Return the test that a dead process was running, if any, and give its other tests to the remaining processes."""
        groups = self.assigned_work.pop(node)
        unfinished = {
            group: {test: False for test, completed in tests.items() if not completed}
            for group, tests in groups.items()
        }
        crashed = next((test for tests in unfinished.values() for test in tests), None)
        if crashed is None:
            return None
        for group, tests in unfinished.items():
            tests.pop(crashed, None)
            if tests:
                self.workqueue[group] = tests
        for other_work in self.assigned_work:
            self._reschedule(other_work)
        return crashed
