"""Fault injection (chaos.*): faults in chosen phases of the loop, each recorded before it is injected."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from ray.actor import ActorHandle

from slime_like.cluster.run.rollouts import ManagerGroup
from slime_like.cluster.supervise import process_tree
from slime_like.cluster.supervise.stacks import live_processes
from slime_like.cluster.workers.calls import call
from slime_like.cluster.workers.engine_actor import EngineActor
from slime_like.config.schema.faults import FATAL, RECOVERED, REWARDS, WORKERS, ChaosConfig, Fault, parse_fault
from slime_like.data import faults
from slime_like.data.faults import REWARD_SERVER, InjectedFault, Recovery
from slime_like.errors import DataError
from slime_like.printable import visible
from slime_like.rollout.manager import RolloutManager
from slime_like.util.counted import counted

DRAWN_PHASES = ("collect", "step", "push")
SIGNALS = {
    "slow_engine": "SIGSTOP",
    "interrupt": "SIGINT",
    "terminate": "SIGTERM",
    "hangup": "SIGHUP",
}
VERBS = {"kill": "SIGKILL", "stop": "SIGSTOP"}  # signals of the other kinds, by prefix, such as kill in kill_rank
# Kinds that affect one process of an engine; the other kinds affect all its processes.
ENGINE_PARTS = {
    "kill_http_server": "http server",
    "kill_detokenizer": "detokenizer",
}
RAY = ("raylet", "gcs", "dashboard_agent", "runtime_env_agent")
NAMES = {"rank": "trainer_rank", "manager": "rollout_manager"}  # name prefixes of processes that register for stacks


def planned_faults(config: ChaosConfig, num_rollout: int) -> list[Fault]:
    """Return the faults of a run of ``num_rollout`` rollouts: the configured ones, then those drawn with ``chaos.seed``."""
    rng = Random(f"chaos {config.seed}")
    drawn_faults = [
        Fault(
            rng.choice(config.kinds),
            rng.choice(DRAWN_PHASES),
            rng.randrange(num_rollout),
            round(rng.uniform(0, config.within_s), 3),
        )
        for _ in range(config.random)
    ]
    return [*map(parse_fault, config.faults), *drawn_faults]


@dataclass(slots=True)
class Chaos:
    """Injector of faults in named phases of the loop. Faults injected before a resume are not repeated.

    Ranks, managers, reward workers and Ray's processes are signalled only on the driver's node; engines can be on any node.
    """

    config: ChaosConfig
    run_dir: Path
    engines: Mapping[str, ActorHandle[EngineActor]]
    managers: ManagerGroup | None = None
    pending: list[Fault] = field(default_factory=list[Fault])
    injections: list[InjectedFault] = field(default_factory=list[InjectedFault])
    recoveries: list[Recovery] = field(default_factory=list[Recovery])  # after injected and real faults
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def plan(self, num_rollout: int) -> None:
        """Schedule every fault that faults.jsonl does not record yet. Raises ``DataError`` if the file cannot be read."""
        scheduled = planned_faults(self.config, num_rollout)
        injected_faults = {injection.fault for injection in faults.read(self.run_dir)[0]} if scheduled else set[str]()
        self.pending = [fault for fault in scheduled if str(fault) not in injected_faults]

    @contextmanager
    def __call__(self, phase: str, rollout_id: int) -> Generator[None]:
        """Inject the faults of a phase of the loop, each after its delay or at the end of the phase, whichever comes first.

        If the phase raises an error, its faults that are still pending are not injected. A fault that cannot be recorded
        stays pending, and the end of the phase raises ``DataError``.
        """
        phase_faults = [fault for fault in self.pending if (fault.phase, fault.rollout_id) == (phase, rollout_id)]
        timers = [threading.Timer(fault.seconds, self._inject_early, (fault,)) for fault in phase_faults]
        for timer in timers:
            timer.daemon = True
            timer.start()
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()
        for fault in phase_faults:
            self._inject(fault)

    def record_recoveries(self, recoveries: Sequence[Recovery]) -> None:
        """Record losses and recoveries of engines and of the reward server in faults.jsonl, or warn if it cannot be written."""
        self.recoveries = faults.newest([*self.recoveries, *recoveries])
        try:
            faults.append(self.run_dir, *recoveries)
        except DataError as error:  # a full disk; the final report includes them
            sys.stderr.write(visible(f"warning: {error}\n"))

    def _inject_early(self, fault: Fault) -> None:
        """Inject a fault before the end of its phase, from a timer's thread."""
        with suppress(DataError):  # a full disk; the end of the phase tries again and raises the error
            self._inject(fault)

    def _inject(self, fault: Fault) -> None:
        """Inject a fault once. A second caller waits for the first, so that the phase cannot end before the fault."""
        with self._lock:
            if fault not in self.pending:
                return
            rng = Random(f"{self.config.seed} {fault}")
            if fault.kind in RECOVERED:
                self._signal_engine(fault, rng)
            elif fault.kind in REWARDS:
                self._block_reward_server(fault)
            else:
                self._signal_process(fault, rng)

    def _signal_engine(self, fault: Fault, rng: Random) -> None:
        if not self.engines:
            self._record(fault, "", "the run has no engine")
            return
        name = rng.choice(sorted(self.engines))
        self._record(fault, name)
        engine = self.engines[name]
        call(engine, EngineActor.inject_fault, _signal_of(fault), ENGINE_PARTS.get(fault.kind, ""))
        if fault.kind == "slow_engine":
            resume = threading.Timer(self.config.slow_s, call, (engine, EngineActor.inject_fault, "SIGCONT"))
            resume.daemon = True
            resume.start()

    def _block_reward_server(self, fault: Fault) -> None:
        if self.managers is None:
            self._record(fault, "", "the run has no reward server")
            return
        self._record(fault, REWARD_SERVER)
        self.managers.start_each(lambda actor, _: call(actor, RolloutManager.block_reward_server, self.config.slow_s))

    def _signal_process(self, fault: Fault, rng: Random) -> None:
        assert fault.kind in FATAL | WORKERS
        victim = fault.kind.partition("_")[2]
        processes = {"driver": os.getpid()}
        if victim in RAY:
            process_name = victim.replace("_", " ").replace("gcs", "gcs_server")
            processes = {
                name: pid
                for name, pid in process_tree.ray_processes().items()
                if name.replace("-", " ") == process_name
            }
        elif victim == "reward_worker":
            processes = {f"reward worker {pid}": pid for pid in process_tree.reward_workers()}
        elif (prefix := NAMES.get(victim)) is not None:
            processes = {
                name: pid for name, pid in live_processes(self.run_dir / "stacks").items() if name.startswith(prefix)
            }
        if not processes:
            self._record(fault, "", "no such process on the driver's node")
            return
        name = rng.choice(sorted(processes))
        self._record(fault, name)
        try:
            os.kill(processes[name], signal.Signals[_signal_of(fault)])
        except OSError as error:  # it has just ended, or belongs to another user
            note = f"{name} got no signal ({error.strerror})"
            self.injections[-1] = replace(self.injections[-1], target="", note=note)
            try:
                faults.append(self.run_dir, self.injections[-1])
            except DataError as error:  # a full disk; the final report includes the note
                sys.stderr.write(visible(f"warning: {error}\n"))

    def _record(self, fault: Fault, target: str, note: str = "") -> None:
        """Record a fault as injected or, with a ``note``, as failed; it is no longer pending.

        If ``DataError`` is raised, it stays pending.
        """
        injection = InjectedFault(str(fault), target, time.time(), note)
        faults.append(self.run_dir, injection)
        self.injections.append(injection)
        self.pending.remove(fault)


def _signal_of(fault: Fault) -> str:
    return SIGNALS.get(fault.kind) or VERBS[fault.kind.partition("_")[0]]


def report_lines(
    injections: Sequence[InjectedFault], recoveries: Sequence[Recovery], uninjected_faults: Sequence[Fault] = ()
) -> list[str]:
    """Return the recovery report: a summary, then a line for each fault and each loss that no fault explains.

    Without faults and losses, there are no lines. ``uninjected_faults`` are those of the schedule that were not injected.
    """
    outcomes = faults.outcomes(injections, recoveries)
    if not (outcomes or uninjected_faults):
        return []
    engines = [recovery for recovery in recoveries if recovery.engine != REWARD_SERVER]
    num_serving = sum(bool(recovery.joined) for recovery in engines)
    num_injected = sum(not injection.note for injection in injections)
    head = (
        f"faults: {num_injected} injected, {counted(len(engines), 'engine')} lost, {num_serving} of them serving again"
    )
    results = [f"  {outcome.fault} on {outcome.target or 'nothing'}: {outcome.result}" for outcome in outcomes]
    return [
        head,
        *results,
        *(f"  {fault} was not injected in this part of the run" for fault in uninjected_faults),
    ]
