"""Fault injection: faults are drawn from a seed and injected once, in their phase, also across resumes."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from slime_like.cluster.run import chaos as chaos_module
from slime_like.cluster.run.chaos import Chaos, planned_faults, report_lines
from slime_like.cluster.run.rollouts import ManagerGroup
from slime_like.cluster.supervise import process_tree
from slime_like.cluster.supervise.stacks import start_time
from slime_like.config.schema.faults import ChaosConfig, parse_fault
from slime_like.data.faults import InjectedFault, Recovery, append, outcomes, read
from slime_like.errors import DataError


class EngineHandle:
    """Fake Ray handle of an engine's actor."""

    def __init__(self) -> None:
        self.signals: list[str] = []
        self.inject_fault = self

    def remote(self, name: str, part: str = "") -> None:
        self.signals.append(f"{name} {part}".strip())


def chaos(folder: Path, *faults: str) -> tuple[Chaos, EngineHandle]:
    engine = EngineHandle()
    injector = Chaos(ChaosConfig(faults=list(faults)), folder, {"engine 0": cast(Any, engine)})
    injector.plan(10)
    return injector, engine


def test_the_same_seed_draws_the_same_faults() -> None:
    def drawn(seed: int) -> list[str]:
        return [str(fault) for fault in planned_faults(ChaosConfig(random=20, seed=seed, kinds=["kill_engine"]), 7)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert len(set(drawn(1))) > 15
    assert all(fault.rollout_id < 7 and fault.seconds <= 2 for fault in planned_faults(ChaosConfig(random=50), 7))


@pytest.mark.parametrize("seconds", ["0.25", "1000", "123456789", "0.001", "0"])
def test_the_text_of_a_fault_is_parsed_to_the_same_fault(seconds: str) -> None:
    fault = parse_fault(f"kill_engine:collect:3:{seconds}")
    assert str(fault) == f"kill_engine:collect:3:{seconds}" and parse_fault(str(fault)) == fault


def test_a_fault_is_injected_once_by_the_end_of_its_phase(tmp_path: Path) -> None:
    injector, engine = chaos(tmp_path, "kill_engine:step:3:1000", "stop_engine:collect:3:1000")
    with injector("step", 2), injector("collect", 2), injector("push", 3):
        pass
    assert engine.signals == []
    for num_faults in range(2):
        with injector("step", 3):
            assert engine.signals == ["SIGKILL"] * num_faults
    assert engine.signals == ["SIGKILL"]
    resumed, engine = chaos(tmp_path, "kill_engine:step:3:1000", "stop_engine:collect:3:1000")
    with resumed("collect", 3), resumed("step", 3):
        pass
    assert engine.signals == ["SIGSTOP"], "faults of an earlier part of the run are not injected again"


def test_a_phase_that_fails_gets_no_fault_at_its_end(tmp_path: Path) -> None:
    injector, engine = chaos(tmp_path, "kill_engine:step:3:1000")
    with pytest.raises(ValueError, match="failed"), injector("step", 3):
        raise ValueError("failed")
    assert engine.signals == []


def test_a_fault_that_cannot_be_recorded_is_not_injected(tmp_path: Path) -> None:
    injector, engine = chaos(tmp_path, "kill_engine:step:3:0")
    (tmp_path / "faults.jsonl").symlink_to("/dev/full")
    (fault,) = injector.pending
    injector._inject_early(fault)
    assert injector.pending == [fault]
    with pytest.raises(DataError, match=r"faults\.jsonl cannot be written"), injector("step", 3):
        pass
    assert engine.signals == []
    assert report_lines(injector.injections, [], injector.pending)[1:] == [
        "  kill_engine:step:3:0 was not injected in this part of the run"
    ]


def test_a_slow_engine_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    class Timer:
        """Timer that fires immediately."""

        def __init__(self, seconds: float, work: Callable[..., None], arguments: tuple[object, ...]) -> None:
            waits.append(seconds)
            self.start = lambda: work(*arguments)

    injector, engine = chaos(tmp_path, "slow_engine:step:3:0")
    monkeypatch.setattr(chaos_module.threading, "Timer", Timer)
    injector._inject(injector.pending[0])
    assert (engine.signals, waits) == (["SIGSTOP", "SIGCONT"], [injector.config.slow_s])


def test_reward_down_blocks_the_reward_server_for_slow_s(tmp_path: Path) -> None:
    outages: list[float] = []

    class ManagerHandle:
        """Fake Ray handle of the rollout manager."""

        block_reward_server = type("Verb", (), {"remote": staticmethod(outages.append)})

    injector, engine = chaos(tmp_path, "reward_down:collect:3:1000")
    injector.managers = ManagerGroup((cast(Any, ManagerHandle),) * 2)
    with injector("collect", 3):
        pass
    assert (outages, engine.signals) == ([injector.config.slow_s] * 2, []), "every manager has a client of the server"
    ((injection,), _) = read(tmp_path)
    assert (injection.fault, injection.target) == ("reward_down:collect:3:1000", "reward server")
    lines = report_lines([injection], [Recovery("reward server", "down: refused", injection.time + 1, groups=4)])
    assert lines[0] == "faults: 1 injected, 0 engines lost, 0 of them serving again"
    assert "noticed after 1.0 s (down: refused), has not answered since, 4 samples without its score" in lines[1]
    answered = Recovery("reward server", "down: refused", injection.time + 2, up=injection.time + 9, groups=3)
    silent = Recovery("reward server", "down: refused", injection.time + 1, groups=4)
    for records, words in (
        ((answered, replace(silent, up=injection.time + 7)), "answers again after 9.0 s, 7 samples"),
        ((answered, silent), "has not answered since, 7 samples"),
    ):
        (_, line) = report_lines([injection], records)  # one line, although each manager has a record
        assert "noticed after 1.0 s" in line and words in line
    without_server, _ = chaos(tmp_path / "other", "reward_down:collect:3")
    (tmp_path / "other").mkdir()
    with without_server("collect", 3):
        pass
    assert without_server.injections[0].note == "the run has no reward server"


@pytest.mark.parametrize(("kind", "part"), [("kill_http_server", "http server"), ("kill_detokenizer", "detokenizer")])
def test_a_single_process_of_an_engine_is_signalled(tmp_path: Path, kind: str, part: str) -> None:
    injector, engine = chaos(tmp_path, f"{kind}:step:3")
    with injector("step", 3):
        pass
    assert engine.signals == [f"SIGKILL {part}"]


@pytest.mark.parametrize(
    ("kind", "victim", "number"),
    [
        ("kill_raylet", "raylet", signal.SIGKILL),
        ("stop_gcs", "gcs_server", signal.SIGSTOP),
        ("kill_dashboard_agent", "dashboard agent", signal.SIGKILL),
        ("kill_runtime_env_agent", "runtime-env agent", signal.SIGKILL),
    ],
)
def test_processes_of_ray_are_signalled_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, victim: str, number: signal.Signals
) -> None:
    names = ("raylet", "gcs_server", "dashboard agent", "runtime-env agent")
    signalled: list[tuple[int, int]] = []
    monkeypatch.setattr(process_tree, "ray_processes", lambda: {name: index for index, name in enumerate(names)})
    monkeypatch.setattr(os, "kill", lambda pid, signal_number: signalled.append((pid, signal_number)))
    injector, _ = chaos(tmp_path, f"{kind}:step:3")
    with injector("step", 3):
        pass
    assert signalled == [(names.index(victim), number)]
    assert injector.injections[0].target == victim


def test_a_reward_worker_is_killed_and_the_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signalled: list[tuple[int, int]] = []
    monkeypatch.setattr(process_tree, "reward_workers", lambda: [7])
    monkeypatch.setattr(os, "kill", lambda pid, signal_number: signalled.append((pid, signal_number)))
    injector, _ = chaos(tmp_path, "kill_reward_worker:collect:3")
    with injector("collect", 3):
        pass
    assert signalled == [(7, signal.SIGKILL)]
    assert (
        "kill_reward_worker:collect:3:0 on reward worker 7: replaced at the next call"
        in report_lines(injector.injections, [])[1]
    )


def test_a_fault_of_a_process_that_has_just_ended_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = subprocess.Popen(["true"])
    victim.wait()
    monkeypatch.setattr(process_tree, "reward_workers", lambda: [victim.pid])
    injector, _ = chaos(tmp_path, "kill_reward_worker:collect:3")
    with injector("collect", 3):
        pass
    assert read(tmp_path) == (injector.injections, [])
    head, line = report_lines(injector.injections, [])
    assert head == "faults: 0 injected, 0 engines lost, 0 of them serving again"
    assert line.endswith(f" on nothing: reward worker {victim.pid} got no signal (No such process)")
    assert not chaos(tmp_path, "kill_reward_worker:collect:3")[0].pending


@pytest.mark.parametrize("fault", ["kill_rank", "kill_manager", "stop_rank"])
def test_ranks_and_the_manager_are_found_by_their_stack_files(tmp_path: Path, fault: str) -> None:
    names = ("trainer_rank0", "rollout_manager", "engine_0")
    victims = {name: subprocess.Popen(["sleep", "600"]) for name in names}
    (tmp_path / "stacks").mkdir()
    for name, victim in victims.items():
        (tmp_path / "stacks" / f"{name}.{victim.pid}.{start_time(victim.pid)}.txt").touch()
    try:
        injector, _ = chaos(tmp_path, f"{fault}:step:3")
        with injector("step", 3):
            pass
        signalled = victims["trainer_rank0" if fault.endswith("rank") else "rollout_manager"]
        _, status = os.waitpid(signalled.pid, os.WUNTRACED)
        ended = os.WSTOPSIG(status) if os.WIFSTOPPED(status) else os.WTERMSIG(status)
        assert ended == (signal.SIGSTOP if fault == "stop_rank" else signal.SIGKILL)
        assert [name for name, victim in victims.items() if victim.poll() is None and victim is not signalled] == [
            name for name in names if victims[name] is not signalled
        ]
    finally:
        for victim in victims.values():
            victim.kill()
            victim.wait()


def test_the_driver_gets_its_signal(tmp_path: Path) -> None:
    injector, _ = chaos(tmp_path, "terminate:push:1")
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        with injector("push", 1):
            pass
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]


def test_the_report_lists_the_outcome_of_each_fault(tmp_path: Path) -> None:
    injections = [
        InjectedFault("kill_engine:collect:3:0.5", "engine 0", 100.0),
        InjectedFault("stop_engine:step:4:0", "engine 0", 200.0),
        InjectedFault("kill_rank:step:5:0", "trainer_rank0", 300.0),
        InjectedFault("slow_engine:step:6:0", "engine 1", 400.0),
        InjectedFault("kill_engine:step:7:0", "engine 1", 405.0),
        InjectedFault("stop_engine:step:8:0", "engine 1", 410.0),
    ]
    recoveries = [
        Recovery("engine 0", "dead: gone\nlog", 101.0, 110.0, 112.0, 3, 7),
        Recovery("engine 1", "dead: by itself", 150.0, 160.0),
        Recovery("engine 0", "stalled: no answer", 205.0),
        Recovery("engine 1", "dead: again", 405.5, 415.0),
    ]
    append(tmp_path, *injections)
    append(tmp_path, replace(recoveries[0], joined=0.0), *recoveries)
    assert read(tmp_path) == (injections, recoveries)
    assert [(o.fault, o.target, o.result) for o in outcomes(injections, recoveries)] == [
        (
            *("kill_engine:collect:3:0.5", "engine 0"),
            "noticed after 1.0 s (dead: gone), up after 10.0 s, serves version 3 after 12.0 s, 7 groups moved to another "
            "engine",
        ),
        (
            *("stop_engine:step:4:0", "engine 0"),
            "noticed after 5.0 s (stalled: no answer), not up again, 0 groups moved to another engine",
        ),
        ("kill_rank:step:5:0", "trainer_rank0", "ends the run; the same command resumes it"),
        ("slow_engine:step:6:0", "engine 1", "no engine was lost before the next fault was injected"),
        (
            *("kill_engine:step:7:0", "engine 1"),
            "noticed after 0.5 s (dead: again), up after 10.0 s, no push has reached it since, 0 groups moved to another "
            "engine",
        ),
        ("stop_engine:step:8:0", "engine 1", "it was being restarted"),
        (
            "dead: by itself",
            "engine 1",
            "up after 10.0 s, no push has reached it since, 0 groups moved to another engine",
        ),
    ]
    lines = report_lines(injections, recoveries)
    assert lines[0] == "faults: 6 injected, 4 engines lost, 1 of them serving again"
    assert len(lines) == 8
    assert (
        outcomes(injections[3:4], [])[0].result
        == "no engine was lost, or that part of the run ended before it was noticed"
    )
    (head, line) = report_lines([], [Recovery("engine 1", "dead: by itself", 150.0, 160.0, groups=1)])
    assert head == "faults: 0 injected, 1 engine lost, 0 of them serving again"
    assert line.endswith(", 1 group moved to another engine")
    assert report_lines([], []) == []
    assert report_lines([], [], [parse_fault("kill_engine:save:3")])[1:] == [
        "  kill_engine:save:3:0 was not injected in this part of the run"
    ]


def test_a_failed_append_leaves_no_part_of_a_record(tmp_path: Path) -> None:
    fault = InjectedFault("kill_engine:step:3:0", "engine 0", 100.0)
    append(tmp_path, fault)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "faults.jsonl").stat().st_size + 9, limits[1]))
    try:
        with pytest.raises(DataError, match=r"faults\.jsonl cannot be written"):
            append(tmp_path, fault)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    later = replace(fault, time=200.0)
    append(tmp_path, later)
    assert read(tmp_path) == ([fault, later], [])


def test_a_torn_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "faults.jsonl").write_text("{\n")
    with pytest.raises(DataError, match=r"faults\.jsonl:1 "):
        read(tmp_path)
