"""Ray on this machine alone, for one run: on loopback, and started again where a busy machine made it late. Ray of any
kind: without its hold on SIGTERM, from its start to its end.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import ray
from ray._private import ray_constants
from ray._private import utils as ray_utils
from ray._private import worker as ray_worker
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay

from slime_like.deadline import Deadline

SECONDS = 90
LATE = "timed out during startup"  # of a plain Exception: Ray gives its own node 30 seconds, which no setting changes


def start(namespace: str) -> None:
    """Raises ``DeadlineExceeded`` where Ray's node did not come up in any of the tries that the deadline left time for."""
    _stay_on_loopback()
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 lets anything else on the machine starve the run
    # An actor that ends otherwise kills what it started, before that has removed its shared memory (rollout.server does).
    os.environ.setdefault("RAY_kill_child_processes_on_worker_exit", "0")
    deadline = Deadline("driver", "placement", SECONDS)
    tries = Retrying(
        retry=retry_if_exception(_is_late), stop=stop_after_delay(deadline.limit), before_sleep=_clear, reraise=True
    )
    try:
        with keep_sigterm():
            tries(
                ray.init,
                address="local",
                namespace=namespace,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except Exception as error:
        shutdown()
        if _is_late(error):
            raise deadline.exceeded("the node of Ray that it started") from error
        raise


@contextmanager
def keep_sigterm() -> Generator[None]:
    """In it ``ray.init`` may be called, and SIGTERM stays what it was.

    Ray 2.60 makes it ``sys.exit``, and has a handler in C before that which prints a stack: the run would end in the midst of
    a rollout, without its checkpoint. Goes when ``ray.init`` leaves signals alone.
    """
    assert hasattr(ray_utils, "set_sigterm_handler"), "ray moved set_sigterm_handler: find what takes SIGTERM now"
    handler, taken = signal.getsignal(signal.SIGTERM), ray_utils.set_sigterm_handler
    ray_utils.set_sigterm_handler = lambda _: None
    try:
        yield
    finally:
        ray_utils.set_sigterm_handler = taken
        signal.signal(signal.SIGTERM, handler)  # the handler in C goes by this


def shutdown() -> None:
    """``ray.shutdown``, and SIGTERM stays what it was.

    Ray 2.60 gives it the default action as its core goes, and only then takes its processes down, for a second or more: another
    SIGTERM would end the driver before it has done so. About a millisecond is left until the handler is back. Goes when
    ``ray.shutdown`` leaves signals alone.
    """
    assert hasattr(ray_worker, "_global_node"), "ray moved _global_node: find what it calls once its core is gone"
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


def _is_late(error: BaseException) -> bool:
    return LATE in str(error)


def _clear(_: RetryCallState) -> None:
    shutdown()


def _stay_on_loopback() -> None:
    """Make Ray's own servers bind to 127.0.0.1.

    Ray 2.60 replaces a loopback address given to ``ray.init`` by the machine's outward one and then listens on every
    interface. Its constant for machines without clusters is what keeps it on loopback; the environment variable tells
    Ray's daemons the same. Goes when ``ray.init(_node_ip_address="127.0.0.1")`` is honoured.
    """
    assert hasattr(ray_constants, "ENABLE_RAY_CLUSTER"), (
        "ray moved ENABLE_RAY_CLUSTER: find how it binds to loopback now"
    )
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
