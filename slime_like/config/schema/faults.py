"""health.* and chaos.*: what becomes of an engine that dies or stalls, and faults planted to see it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from slime_like.config.schema.base import Config, key, positive, within
from slime_like.errors import ConfigError
from slime_like.registry import nearest

PHASES = ("collect", "step", "push", "save", "eval")
RECOVERED = {
    "kill_engine": "an engine's processes are killed",
    "stop_engine": "an engine's processes are stopped, for good",
    "slow_engine": "an engine's processes are stopped for chaos.slow_s seconds",
    "kill_http_server": "an engine's HTTP server is killed",
    "kill_detokenizer": "an engine's detokenizer is killed",
}
"""Faults that a run goes on from (health.*)."""
REWARDS = {"reward_down": "the reward server cannot be reached for chaos.slow_s seconds"}
"""Faults that a run goes on from (reward.remote_retries, reward.fallback)."""
WORKERS = {"kill_reward_worker": "a reward worker is killed"}
"""Faults that a run goes on from: the pool replaces the process, and what it scored costs reward.fallback at most."""
FATAL = {
    "kill_rank": "a trainer rank is killed",
    "stop_rank": "a trainer rank is stopped, for good",
    "kill_manager": "the rollout manager is killed",
    "kill_driver": "the driver is killed",
    "interrupt": "Ctrl-C: the driver gets SIGINT",
    "terminate": "the driver gets SIGTERM",
    "hangup": "the driver gets SIGHUP",
    "kill_raylet": "Ray's raylet is killed",
    "stop_raylet": "Ray's raylet is stopped, for good",
    "kill_gcs": "Ray's GCS is killed",
    "stop_gcs": "Ray's GCS is stopped, for good",
    "kill_dashboard_agent": "the raylet's dashboard agent is killed",
    "kill_runtime_env_agent": "the raylet's runtime-env agent is killed",
}
"""Faults that end a run, which is resumed by the same command."""
FAULTS = RECOVERED | REWARDS | WORKERS | FATAL


@dataclass(frozen=True, slots=True)
class Fault:
    """``kind`` strikes ``seconds`` into a phase of a rollout, or at the phase's end when that comes first."""

    kind: str  # of FAULTS
    phase: str  # of PHASES
    rollout_id: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.kind}:{self.phase}:{self.rollout_id}:{self.seconds:.3g}"


def parse_fault(text: str) -> Fault:
    """``kill_engine:collect:3`` or ``kill_engine:collect:3:0.25``. Raises ``ConfigError`` on anything else."""
    found = re.fullmatch(r"(\w+):(\w+):(\d+)(?::(\d+(?:\.\d+)?))?", text)
    for name, known in ((found[1], FAULTS), (found[2], PHASES)) if found else ():
        if name not in known:
            raise ConfigError(
                f"chaos.faults: {name!r} in {text!r} is not one of {', '.join(known)}: {nearest(name, known)}"
            )
    if found is None:
        raise ConfigError(
            f"chaos.faults: {text!r} is not fault:phase:rollout or fault:phase:rollout:seconds, as in "
            f"kill_engine:collect:3:0.25; faults are {', '.join(FAULTS)}, phases {', '.join(PHASES)}"
        )
    return Fault(found[1], found[2], int(found[3]), float(found[4] or 0))


@dataclass(kw_only=True)
class HealthConfig(Config):
    """Engines that die or stall while the run goes on (slime: --use-fault-tolerance)."""

    on_dead_engine: str = key(
        "restart",
        "An engine that died: restart it (its groups go on elsewhere, and it joins at the next push), or stop the run.",
        choices=("restart", "stop"),
    )
    on_stalled_engine: str = key(
        "restart",
        "An engine that fails its health check: restart it, stop the run, or wait until rollout.request_deadline_s.",
        choices=("restart", "stop", "wait"),
    )
    max_restarts: int = key(3, "Restarts of one engine within a rollout; what fails then ends the run.")
    interval_s: float = key(30.0, "Between two health checks of an engine (slime: --rollout-health-check-interval).")
    timeout_s: float = key(30.0, "Longest wait for a health check's answer (slime: --rollout-health-check-timeout).")
    first_wait_s: float = key(
        300.0,
        "No check this long after an engine's start, or until its first answer: kernels may be compiled then (slime: "
        "--rollout-health-check-first-wait).",
    )

    def check(self, prefix: str) -> None:
        super().check(prefix)
        positive(prefix, self, "interval_s", "timeout_s")
        within(prefix, self, 0, 1000, "max_restarts")
        within(prefix, self, 0, 1e9, "first_wait_s")


@dataclass(kw_only=True)
class ChaosConfig(Config):
    """Faults planted on purpose; what came of them is reported at the end of the run."""

    faults: list[str] = key(
        [],
        "Faults to plant, fault:phase:rollout[:seconds into the phase], as [kill_engine:collect:3:0.25,stop_rank:step:5]; "
        f"faults: {', '.join(FAULTS)}; phases: {', '.join(PHASES)}.",
    )
    random: int = key(0, "Further faults, at rollouts, phases and moments that chaos.seed draws.")
    kinds: list[str] = key(["kill_engine", "stop_engine"], "Faults that chaos.random draws from.")
    seed: int = key(0, "Seed of chaos.random, and of which engine or rank a fault strikes.")
    within_s: float = key(2.0, "Seconds into a phase at which chaos.random strikes at the latest.")
    slow_s: float = key(5.0, "How long slow_engine stops an engine, and reward_down takes the reward server away.")

    def check(self, prefix: str) -> None:
        super().check(prefix)
        for text in self.faults:
            parse_fault(text)
        for kind in self.kinds:
            if kind not in FAULTS:
                raise ConfigError(f"{prefix}kinds: {kind!r} is not one of {', '.join(FAULTS)}: {nearest(kind, FAULTS)}")
        within(prefix, self, 0, 10_000, "random", "within_s")
        positive(prefix, self, "slow_s")
        if self.random and not self.kinds:
            raise ConfigError(f"{prefix}random={self.random} with {prefix}kinds=[]: name the faults to draw from")

    def check_asked(self, remote_url: str | None) -> None:
        """Raises ``ConfigError`` where a fault takes a reward server away that no sample asks."""
        drawn = [f"chaos.kinds: {kind!r}" for kind in self.kinds if self.random and kind in REWARDS]
        named = [f"chaos.faults: {text!r}" for text in self.faults if parse_fault(text).kind in REWARDS]
        if remote_url is None and (found := [*named, *drawn]):
            raise ConfigError(
                f"{found[0]} takes the reward server away, and this run has none: set reward.remote_url (with "
                "reward.name=remote_rm, or rm_type remote_rm in the rows), or remove the fault"
            )

    def check_reached(self, num_rollout: int) -> None:
        """Raises ``ConfigError`` where a fault is planted behind the last of so many rollouts."""
        for text in self.faults:
            if parse_fault(text).rollout_id >= num_rollout:
                raise ConfigError(
                    f"chaos.faults: {text!r} is never reached: rollouts count from 0, and the last of "
                    f"loop.num_rollout={num_rollout} is {num_rollout - 1}"
                )
