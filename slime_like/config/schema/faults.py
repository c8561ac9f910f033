"""health.* and chaos.*: recovery of engines that die or stall, and fault injection."""

from __future__ import annotations

import re
from dataclasses import dataclass

from slime_like.config.schema.base import Config, key, positive, within
from slime_like.errors import ConfigError
from slime_like.registry import not_one_of

PHASES = ("collect", "step", "push", "save", "eval")
RECOVERED = {
    "kill_engine": "an engine's processes are killed",
    "stop_engine": "an engine's processes are suspended (SIGSTOP) and never resumed",
    "slow_engine": "an engine's processes are suspended (SIGSTOP) for chaos.slow_s seconds",
    "kill_http_server": "an engine's HTTP server is killed",
    "kill_detokenizer": "an engine's detokenizer is killed",
}
"""Faults that a run survives (health.*)."""
REWARDS = {"reward_down": "the reward server cannot be reached for chaos.slow_s seconds"}
"""Faults that a run survives (reward.remote_retries, reward.fallback)."""
WORKERS = {"kill_reward_worker": "a reward worker is killed"}
"""Faults that a run survives. The pool replaces the process; at worst its sample gets reward.fallback."""
FATAL = {
    "kill_rank": "a trainer rank is killed",
    "stop_rank": "a trainer rank is suspended (SIGSTOP) and never resumed",
    "kill_manager": "a rollout manager is killed",
    "kill_driver": "the driver is killed",
    "interrupt": "Ctrl-C: the driver gets SIGINT",
    "terminate": "the driver gets SIGTERM",
    "hangup": "the driver gets SIGHUP",
    "kill_raylet": "Ray's raylet is killed",
    "stop_raylet": "Ray's raylet is suspended (SIGSTOP) and never resumed",
    "kill_gcs": "Ray's GCS is killed",
    "stop_gcs": "Ray's GCS is suspended (SIGSTOP) and never resumed",
    "kill_dashboard_agent": "the raylet's dashboard agent is killed",
    "kill_runtime_env_agent": "the raylet's runtime-env agent is killed",
}
"""Faults that end a run; the same command resumes it."""
FAULTS = RECOVERED | REWARDS | WORKERS | FATAL


@dataclass(frozen=True, slots=True)
class Fault:
    """Fault injected ``seconds`` into a phase of a rollout, or at the end of the phase if that comes first."""

    kind: str  # one of FAULTS
    phase: str  # one of PHASES
    rollout_id: int
    seconds: float

    def __str__(self) -> str:
        seconds = f"{self.seconds:.3f}".rstrip("0").rstrip(".")  # no exponent, which ``parse_fault`` refuses
        return f"{self.kind}:{self.phase}:{self.rollout_id}:{seconds}"


def parse_fault(text: str) -> Fault:
    """Parse ``fault:phase:rollout[:seconds]``, such as ``kill_engine:collect:3:0.25``; raise ``ConfigError`` on other text."""
    match = re.fullmatch(r"(\w+):(\w+):(\d+)(?::(\d+(?:\.\d+)?))?", text)
    for name, choices in ((match[1], FAULTS), (match[2], PHASES)) if match else ():
        if name not in choices:
            raise ConfigError(f"chaos.faults: {name!r} in {text!r} {not_one_of(name, choices)}")
    if match is None:
        raise ConfigError(
            f"chaos.faults: {text!r} is not fault:phase:rollout or fault:phase:rollout:seconds, as in "
            f"kill_engine:collect:3:0.25; faults are {', '.join(FAULTS)}, phases {', '.join(PHASES)}"
        )
    return Fault(match[1], match[2], int(match[3]), float(match[4] or 0))


@dataclass(kw_only=True)
class HealthConfig(Config):
    """Handling of engines that die or stall during a run (slime: --use-fault-tolerance)."""

    on_dead_engine: str = key(
        "restart",
        "When an engine dies: restart it (other engines continue its groups, and it rejoins at the next push), or stop the run.",
        choices=("restart", "stop"),
    )
    on_stalled_engine: str = key(
        "restart",
        "When an engine fails its health check: restart it, stop the run, or wait until rollout.request_deadline_s.",
        choices=("restart", "stop", "wait"),
    )
    max_restarts: int = key(3, "Maximum restarts of one engine within a rollout; the next failure ends the run.")
    interval_s: float = key(
        30.0, "Seconds between two health checks of an engine (slime: --rollout-health-check-interval)."
    )
    timeout_s: float = key(30.0, "Time limit of a health check (slime: --rollout-health-check-timeout).")
    first_wait_s: float = key(
        300.0,
        "Time after an engine's start during which it is not checked, because kernels may be compiling; its first response ends "
        "this time early (slime: --rollout-health-check-first-wait).",
    )

    def check(self, prefix: str) -> None:
        super().check(prefix)
        positive(prefix, self, "interval_s", "timeout_s")
        within(prefix, self, 0, 1000, "max_restarts")
        within(prefix, self, 0, 1e9, "first_wait_s")


@dataclass(kw_only=True)
class ChaosConfig(Config):
    """Fault injection; the effects are reported at the end of the run."""

    faults: list[str] = key(
        [],
        "Faults to inject, fault:phase:rollout[:seconds into the phase], such as [kill_engine:collect:3:0.25,stop_rank:step:5]; "
        f"faults: {', '.join(FAULTS)}; phases: {', '.join(PHASES)}.",
    )
    random: int = key(0, "Number of additional faults at random rollouts, phases and times.")
    kinds: list[str] = key(["kill_engine", "stop_engine"], "Faults that chaos.random draws from.")
    seed: int = key(0, "Seed of chaos.random and of the choice of engine or rank.")
    within_s: float = key(2.0, "Maximum seconds into a phase at which chaos.random injects a fault.")
    slow_s: float = key(
        5.0, "Seconds for which slow_engine suspends an engine and reward_down makes the reward server unreachable."
    )

    def check(self, prefix: str) -> None:
        super().check(prefix)
        for text in self.faults:
            parse_fault(text)
        for kind in self.kinds:
            if kind not in FAULTS:
                raise ConfigError(f"{prefix}kinds: {kind!r} {not_one_of(kind, FAULTS)}")
        within(prefix, self, 0, 10_000, "random", "within_s")
        positive(prefix, self, "slow_s")
        if self.random and not self.kinds:
            raise ConfigError(f"{prefix}random={self.random} with {prefix}kinds=[]: name the faults to draw from")

    def check_reward_server(self, remote_url: str | None) -> None:
        """Raise ``ConfigError`` on a fault of the reward server in a run that has no reward server."""
        reward_kinds = [f"chaos.kinds: {kind!r}" for kind in self.kinds if self.random and kind in REWARDS]
        reward_faults = [f"chaos.faults: {text!r}" for text in self.faults if parse_fault(text).kind in REWARDS]
        if remote_url is None and (faults := [*reward_faults, *reward_kinds]):
            raise ConfigError(
                f"{faults[0]} makes the reward server unreachable, and this run has none: set reward.remote_url (with "
                "reward.name=remote_rm, or rm_type remote_rm in the rows), or remove the fault"
            )

    def check_rollout_ids(self, num_rollout: int) -> None:
        """Raise ``ConfigError`` on a fault that would be injected after the last rollout."""
        for text in self.faults:
            if parse_fault(text).rollout_id >= num_rollout:
                raise ConfigError(
                    f"chaos.faults: {text!r} is never reached: rollouts count from 0, and the last of "
                    f"loop.num_rollout={num_rollout} is {num_rollout - 1}; name an earlier rollout, or raise loop.num_rollout"
                )
