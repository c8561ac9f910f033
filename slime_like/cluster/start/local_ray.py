"""Start Ray for one run on this machine, on loopback, with retries on a busy machine, or join a cluster.

In both cases Ray does not take over SIGTERM, and every wait for Ray has a deadline.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray._private import node as ray_node
from ray._private import ray_constants, services
from ray._private import utils as ray_utils
from ray._private import worker as ray_worker
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray._private.state import available_resources_per_node
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay

from slime_like.cluster.plan.ray_cluster import ClusterNode, cluster_nodes
from slime_like.cluster.start import agent_stand_ins
from slime_like.cluster.supervise import driver_link
from slime_like.errors import ConfigError
from slime_like.util.deadline import Deadline

SECONDS = 90
TRY_S = 60  # per try; the last try may begin just before SECONDS have passed
CONNECT_S = 10.0
JOIN_S = 60.0
ESSENTIAL = ("raylet", "gcs_server")  # Ray stops working if one of these ends, or an agent of the raylet
PREFIX = "slime_like-"
SHORT_FOLDER = "/tmp"  # for Ray's files if TMPDIR is too long for a unix socket
SOCKET_BYTES = 107
ADDED_BYTES = len(f"/{PREFIX}12345678/ray/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store")
REMOVE_S = 5.0  # for Ray processes that still write logs
UNUSED = ("start_monitor", "start_log_monitor", "start_api_server")  # methods of Ray's node
AGENT_COMMAND = "_build_python_executable_command_memory_profileable"  # function of ray._private.services
DEPENDENCIES = "get_dashboard_dependency_error"  # function of ray._private.utils
STAND_INS = Path(agent_stand_ins.__file__).resolve()
CLUSTER_FIX = "start it with `ray start --head`, correct the address, or omit the key to start a Ray for this run"
TIMEOUT_TEXT = "timed out during startup"  # message of a plain Exception: Ray gives its node 30 s, not configurable

_folders: list[Path] = []  # private folders of the Ray that this process has started


def start(namespace: str) -> None:
    """Start Ray's processes, with files and sockets in a private folder.

    If the start of Ray's node times out, try again until a deadline of ``SECONDS``. Raises ``DeadlineExceeded`` if the
    last try times out, ``ConfigError`` if the folder cannot be created, and other errors of ``ray.init`` unchanged.
    """
    _stay_on_loopback()
    folder = _private_folder()
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default 15 lets other processes starve the run
    # Otherwise an exiting actor kills its children before they can remove their shared memory, as rollout.engine.main does.
    os.environ.setdefault("RAY_kill_child_processes_on_worker_exit", "0")
    # Set the token in the environment, which only this user can read: Ray would write it world-readable to ~/.ray/auth_token.
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    deadline = Deadline("driver", "placement", SECONDS)
    retrying = Retrying(
        retry=retry_if_exception(_timed_out),
        stop=stop_after_delay(deadline.limit),
        before_sleep=_end_before_retry,
        reraise=True,
    )
    try:
        within = Deadline("driver", "placement", SECONDS + TRY_S)
        bounded = driver_link.bounded_call(within, "Ray to start on this machine", at_once=True)
        with keep_sigterm(), without_unused_processes(), bounded:
            retrying(
                ray.init,
                address="local",
                namespace=namespace,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=str(folder),
            )
    except Exception as error:
        with driver_link.bounded_call(
            Deadline("driver", "placement", TRY_S), "the processes of Ray to end", at_once=True
        ):
            _end()
        if _timed_out(error):
            raise deadline.exceeded("the node of Ray that it started") from error
        raise
    node: Any = ray_worker._global_node  # pyright: ignore[reportPrivateUsage]
    if node is not None:
        pids = {
            name: info.process.pid for name, infos in node.all_processes.items() if name in ESSENTIAL for info in infos
        }
        driver_link.report_ray(pids, Path(node.get_logs_dir_path()))


def reach(address: str) -> str:
    """Return host:port of the cluster at ``placement.ray_address``.

    Raises ``ConfigError`` if the address is invalid or no connection to it can be opened.
    """
    at = address
    try:
        at = services.canonicalize_bootstrap_address(address.removeprefix("ray://")) or address
        host, _, port = at.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
        return at
    except (
        OSError,
        ValueError,
    ) as error:  # Ray raises ConnectionError if "auto" finds no cluster
        raise ConfigError(
            f"placement.ray_address={address!r}: no Ray cluster answers at {at} ({error}): {CLUSTER_FIX}"
        ) from error


def join(address: str, namespace: str) -> None:
    """Join the cluster that ``placement.ray_address`` names.

    Raises ``ConfigError`` if there is no cluster at that address, or if this process cannot join it.
    """
    at, key = address, f"placement.ray_address={address!r}"
    within = Deadline("driver", "placement", JOIN_S)
    try:
        with keep_sigterm(), driver_link.bounded_call(within, f"the Ray cluster of {key}: {CLUSTER_FIX}", at_once=True):
            at = reach(address)
            ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, TimeoutError) as error:
        token = "or give this process the cluster's RAY_AUTH_TOKEN"  # Ray only prints its reason
        raise ConfigError(f"{key}: the cluster at {at} cannot be joined ({error}): {CLUSTER_FIX}, {token}") from error


def open_cluster_warning(address: str) -> str:
    """Return a warning if this process has joined the cluster without a token; otherwise an empty text."""
    if is_token_auth_enabled():
        return ""
    return (
        f"the Ray cluster at placement.ray_address={address!r} requires no token, so anyone who reaches its ports can run code on its "
        "nodes: start every node with RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN"
    )


def nodes() -> tuple[ClusterNode, ...]:
    """Return the live nodes of the joined cluster with the resources that they report."""
    within = Deadline("driver", "placement", JOIN_S)
    with driver_link.bounded_call(within, "the Ray cluster to list its nodes", at_once=True):
        return cluster_nodes(ray.nodes(), available_resources_per_node())


@contextmanager
def keep_sigterm() -> Generator[None]:
    """Preserve the SIGTERM handler across ``ray.init``.

    Ray 2.60 replaces it with ``sys.exit`` and with a handler in C that prints a stack: the run would end in the middle
    of a rollout, without a checkpoint. Remove this function once ``ray.init`` leaves signals alone.
    """
    assert hasattr(ray_utils, "set_sigterm_handler"), "ray moved set_sigterm_handler: find its new name"
    handler, original = signal.getsignal(signal.SIGTERM), ray_utils.set_sigterm_handler
    ray_utils.set_sigterm_handler = lambda _: None
    try:
        yield
    finally:
        ray_utils.set_sigterm_handler = original
        signal.signal(signal.SIGTERM, handler)  # also removes the handler in C


@contextmanager
def without_unused_processes() -> Generator[None]:
    """Make Ray start its node without autoscaler, log monitor, API server and agents, which no run uses.

    They take 6 s of CPU time, and ``ray.init`` waits for the API server and the agents. It starts the API server even
    with ``include_dashboard=False``, and has no option for the others. Remove this function once it has such options.

    The raylet ends if one of its agents ends, so stand-ins replace the agents. Ray's check for the dashboard's
    dependencies, which imports them into the driver, is replaced too.
    """
    replaced: dict[tuple[Any, str], Callable[..., Any]] = {
        (ray_node.Node, name): lambda *_, **__: None for name in UNUSED
    }
    replaced[services, AGENT_COMMAND] = _agent_command(getattr(services, AGENT_COMMAND, None))
    replaced[ray_utils, DEPENDENCIES] = lambda: ImportError("slime_like starts no dashboard")
    missing = [name for owner, name in replaced if not hasattr(owner, name)]
    assert not missing, f"ray moved {missing}: find how it starts these processes now"
    originals = {target: getattr(*target) for target in replaced}
    for target, function in replaced.items():
        setattr(*target, function)
    try:
        yield
    finally:
        for target, original in originals.items():
            setattr(*target, original)


def _agent_command(original: Any) -> Callable[..., list[str]]:
    """Wrap ``original``, Ray's function that returns the first words of the command line of a process of the node.

    For an agent, the wrapper returns a command that starts a stand-in (``agent_stand_ins``) instead.
    """

    def command(component: str, *arguments: Any, **options: Any) -> list[str]:
        if component in (ray_constants.PROCESS_TYPE_DASHBOARD_AGENT, ray_constants.PROCESS_TYPE_RUNTIME_ENV_AGENT):
            return [sys.executable, "-I", "-S", str(STAND_INS)]
        return original(component, *arguments, **options)

    return command


def log_dir() -> Path | None:
    """Return Ray's log folder on this node, even after a failed start; None if there is none."""
    node: Any = ray_worker._global_node  # pyright: ignore[reportPrivateUsage]
    if node is not None:
        return Path(node.get_logs_dir_path())
    return max((logs for folder in _folders for logs in folder.glob("ray/session_2*/logs")), default=None)


def shutdown() -> None:
    """Shut Ray down, and remove the folder of the Ray that this process started, if any."""
    _end()
    end = time.monotonic() + REMOVE_S
    while _folders:
        shutil.rmtree(_folders[-1], ignore_errors=True)
        if not _folders[-1].exists() or time.monotonic() > end:
            _folders.pop()


def _private_folder() -> Path:
    """Create a private folder in the first of Ray's locations with a short enough path; return Ray's subfolder.

    Ray opens its folder and sockets to every user of the machine; the private parent folder prevents access. Raises
    ``ConfigError`` if the folder cannot be created.
    """
    locations = (os.environ.get("RAY_TMPDIR"), tempfile.gettempdir(), SHORT_FOLDER)
    location = next((p for p in locations if p and len(os.fsencode(p)) + ADDED_BYTES <= SOCKET_BYTES), SHORT_FOLDER)
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=location))
    except OSError as error:
        raise ConfigError(
            f"Ray's files cannot be stored in {location} ({error.strerror}): set TMPDIR to a folder that you may write to"
        ) from error
    _folders.append(folder)
    driver_link.report_folder(folder)
    return folder / "ray"


def _end() -> None:
    """Call ``ray.shutdown`` and preserve the SIGTERM handler.

    When its core stops, Ray 2.60 restores the default action of SIGTERM, and only then ends its processes, which takes
    a second or more; another SIGTERM in that time would kill the driver. Here, the handler is restored after about a
    millisecond. Remove this function once ``ray.shutdown`` leaves signals alone.
    """
    assert hasattr(ray_worker, "_global_node"), (
        "ray moved _global_node: find the function that it calls once its core is gone"
    )
    handler, node = signal.getsignal(signal.SIGTERM), ray_worker._global_node  # pyright: ignore[reportPrivateUsage]
    if node is not None:
        take_down = node.kill_all_processes

        def kill_all_processes(*arguments: Any, **options: Any) -> None:
            signal.signal(signal.SIGTERM, handler)
            take_down(*arguments, **options)

        node.kill_all_processes = kill_all_processes
    try:
        ray.shutdown()
    finally:
        signal.signal(signal.SIGTERM, handler)


def _timed_out(error: BaseException) -> bool:
    return TIMEOUT_TEXT in str(error)


def _end_before_retry(_: RetryCallState) -> None:
    _end()


def _stay_on_loopback() -> None:
    """Make Ray's servers bind to 127.0.0.1.

    Ray 2.60 replaces a loopback address given to ``ray.init`` with the machine's external one and listens on every
    interface. To prevent this, clear a constant that Ray itself clears on platforms without clusters; an environment
    variable does the same for Ray's daemons. Remove this function once ``ray.init(_node_ip_address="127.0.0.1")`` is honoured.
    """
    assert hasattr(ray_constants, "ENABLE_RAY_CLUSTER"), (
        "ray moved ENABLE_RAY_CLUSTER: find how it binds to loopback now"
    )
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
