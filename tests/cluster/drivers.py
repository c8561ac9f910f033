"""Misbehaving drivers, each under the real supervisor: ``python -m tests.cluster.drivers CASE RUN_DIR``."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from slime_like.cluster.supervise import driver_link, process_tree, ray_watch, supervisor
from slime_like.util.deadline import Deadline

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
DEAF = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; time.sleep(600)"
SEES_STOP = """
import pathlib, sys, time
while pathlib.Path(f"/proc/{sys.argv[1]}/stat").read_text().rpartition(")")[2].split()[0] != "T":
    time.sleep(0.01)
pathlib.Path(sys.argv[2]).touch()
"""
DETACHED = f"import os, subprocess; os.setsid(); subprocess.Popen({SLEEP!r}, start_new_session=True)"


def start(run_dir: Path, *command: str) -> subprocess.Popen[bytes]:
    """Start ``command`` and append its process id to ``pids`` for the test."""
    process = subprocess.Popen(command)
    with (run_dir / "pids").open("a") as file:
        file.write(f"{process.pid}\n")
    return process


def ignore() -> None:
    """Ignore signals, like a main thread inside a library call that runs no handler."""
    for number in supervisor.STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def detaches(run_dir: Path) -> int:
    """Start a process that leaves session and parent, as a reward function may."""
    before = set(os.listdir("/proc"))
    subprocess.run([sys.executable, "-c", DETACHED], check=True)
    (run_dir / "pids").write_text("".join(f"{pid}\n" for pid in set(os.listdir("/proc")) - before if is_sleeper(pid)))
    return 0


def is_sleeper(pid: str) -> bool:
    try:
        return pid.isdigit() and Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[2] == SLEEP[2].encode()
    except (OSError, IndexError):
        return False


def killed(run_dir: Path) -> int:
    """Kill the driver without a message, as the kernel's OOM killer does."""
    start(run_dir, *SLEEP)
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def killed_with_ray(run_dir: Path) -> int:
    """Kill the raylet and the driver at the same time."""
    raylet = start(run_dir, *SLEEP)
    driver_link.report_ray({"raylet": raylet.pid}, None)
    subprocess.Popen(["kill", "-KILL", str(raylet.pid), str(os.getpid())])
    os.kill(os.getpid(), signal.SIGSTOP)  # resumes only to be killed
    return 0


def ended_by_ray(run_dir: Path) -> int:
    """Exit with code 1 and without cleanup, as Ray ends its driver."""
    start(run_dir, *SLEEP)
    os._exit(1)


def raylet_dies(run_dir: Path) -> int:
    """Sleep on after the raylet died, like a driver that continues training."""
    raylet = start(run_dir, *SLEEP)
    start(run_dir, sys.executable, "-c", SEES_STOP, str(os.getpid()), str(run_dir / "stopped"))
    driver_link.report_ray({"raylet": raylet.pid}, None)
    raylet.kill()
    time.sleep(600)
    return 0


def raylet_dies_first(run_dir: Path) -> int:
    """Call ``confirm_ray``, as after the loss of an actor, just before the raylet dies.

    If it returns, the driver would blame the actor, which is misleading.
    """
    raylet = start(run_dir, *SLEEP)
    driver_link.report_ray({"raylet": raylet.pid}, None)
    subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -KILL {raylet.pid}"])
    driver_link.confirm_ray()
    (run_dir / "blamed").touch()
    return 1


def ray_lives(run_dir: Path) -> int:
    """Call ``confirm_ray``, as after the loss of an actor, while the raylet is alive; exit with code 42."""
    raylet = start(run_dir, *SLEEP)
    driver_link.report_ray({"raylet": raylet.pid}, None)
    driver_link.confirm_ray()
    return 42


def raylet_stops(run_dir: Path) -> int:
    """Wait for a raylet that is suspended (SIGSTOP)."""
    raylet = start(run_dir, *SLEEP)
    driver_link.report_ray({"raylet": raylet.pid}, None)
    raylet.send_signal(signal.SIGSTOP)
    raylet.wait()
    return 0


def never_connected(run_dir: Path) -> int:
    """Wait in a library call that does not return and ignores signals, before the run has started."""
    ignore()
    with driver_link.bounded_call(
        Deadline("driver", "placement", float(os.environ["LIMIT_S"])), "the cluster", at_once=True
    ):
        (run_dir / "ready").touch()
        start(run_dir, sys.executable, "-c", DEAF).wait()
    return 0


def joins_silence(run_dir: Path) -> int:
    """Join a Ray cluster at a port whose listener is not Ray.

    The listener accepts connections on all addresses, because Ray connects to the machine's outward one.
    """
    from slime_like.cluster.start import local_ray

    local_ray.JOIN_S = float(os.environ["LIMIT_S"])
    with socket.create_server(("", 0)) as server:
        (run_dir / "ready").touch()
        local_ray.join(f"127.0.0.1:{server.getsockname()[1]}", "test")
    return 0


def teardown_waits(run_dir: Path) -> int:
    """Wait during teardown for a child that is suspended (SIGSTOP), which is a bug; the run has failed before."""
    child = start(run_dir, *SLEEP)
    child.send_signal(signal.SIGSTOP)
    driver_link.report_teardown(1)
    with driver_link.bounded_call(Deadline("driver", "teardown", 0.2), "Ray"):
        child.wait()
    (run_dir / "torn_down").touch()
    return 1


def teardown_hangs(run_dir: Path) -> int:
    """Hang during teardown without a child: killing the children does not end the wait."""
    driver_link.report_teardown(0)
    with driver_link.bounded_call(Deadline("driver", "teardown", 0.2), "Ray"):
        time.sleep(600)
    return 0


def deaf(run_dir: Path) -> int:
    """Ignore all stop signals."""
    ignore()
    start(run_dir, sys.executable, "-c", DEAF)
    (run_dir / "ready").touch()
    time.sleep(600)
    return 0


def counts(run_dir: Path) -> int:
    """Exit half a second after the first signal, with 40 + the number of signals received."""
    received: list[int] = []
    for number in supervisor.STOP_SIGNALS:
        signal.signal(number, lambda number, _: received.append(number))
    (run_dir / "ready").touch()
    while not received:
        time.sleep(0.05)
    time.sleep(0.5)
    return 40 + len(received)


def raises(run_dir: Path) -> int:
    """Raise an unexpected error."""
    raise ValueError(f"a bug in {run_dir.name}")


def exits(run_dir: Path) -> int:
    """Exit with a message, as a user module may do on import."""
    sys.exit("set MY_KEY first")


def exits_well(run_dir: Path) -> int:
    """Exit by ``sys.exit()`` without a code, which means success."""
    sys.exit()


def reads_terminal(_run_dir: Path) -> int:
    """Read from stdin, as a debugger does; exit with code 1 if there is text."""
    return int(sys.stdin.read() != "")


CASES: dict[str, Callable[[Path], int]] = {
    f.__name__: f
    for f in (
        *(
            detaches,
            killed,
            killed_with_ray,
            ended_by_ray,
            raylet_dies,
            raylet_dies_first,
            ray_lives,
            raylet_stops,
            never_connected,
            joins_silence,
            teardown_waits,
            teardown_hangs,
        ),
        *(deaf, counts, raises, exits, exits_well, reads_terminal),
    )
}


def main(case: str, run_dir: Path) -> int:
    """Run ``case`` under the supervisor in the run folder ``run_dir``, and return the exit code."""

    def drive() -> int:
        rings = run_dir / "rings"
        rings.mkdir()
        driver_link.report_run_dir(run_dir, rings)
        return CASES[case](run_dir)

    supervisor.TOGETHER_S = 3.0 if case.startswith("raylet_dies") else supervisor.TOGETHER_S
    ray_watch.STOPPED_S = supervisor.ALONE_S = supervisor.UNWIND_S = 0.5
    if case != "detaches":
        return supervisor.supervise(drive)
    bystander = subprocess.Popen(["sleep", "600"])  # started by the program, not by its run
    try:
        code = supervisor.supervise(drive)
        assert bystander.poll() is None, "only what the run has started ends with it"
        assert not process_tree.adopt(), "the program adopts no orphans of its own afterwards"
        return code
    finally:
        bystander.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
