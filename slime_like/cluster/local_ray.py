"""Ray on this machine alone, for one run: on loopback, and started again where a busy machine made it late."""

from __future__ import annotations

import logging
import os

import ray
from ray._private import ray_constants
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay

from slime_like.deadline import Deadline

SECONDS = 90
LATE = "timed out during startup"  # of a plain Exception: Ray gives its own node 30 seconds, which no setting changes


def start(namespace: str) -> None:
    """Raises ``DeadlineExceeded`` where Ray's node did not come up in any of the tries that the deadline left time for."""
    _stay_on_loopback()
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 lets anything else on the machine starve the run
    deadline = Deadline("driver", "placement", SECONDS)
    tries = Retrying(
        retry=retry_if_exception(_is_late), stop=stop_after_delay(deadline.limit), before_sleep=_clear, reraise=True
    )
    try:
        tries(
            ray.init,
            address="local",
            namespace=namespace,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:
        ray.shutdown()
        if _is_late(error):
            raise deadline.exceeded("the node of Ray that it started") from error
        raise


def _is_late(error: BaseException) -> bool:
    return LATE in str(error)


def _clear(_: RetryCallState) -> None:
    ray.shutdown()


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
