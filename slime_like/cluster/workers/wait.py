"""``ray.get`` with deadlines: the first failure is raised immediately, and an expiry names the awaited processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from slime_like.cluster.supervise.crash import one_line
from slime_like.errors import SlimeLikeError, WorkerError
from slime_like.util.deadline import Deadline

POLL_S = 1.0
GRACE_S = 2.0  # for peers of a failed process to report their errors


def wait_all(
    refs: Mapping[str, ray.ObjectRef[Any]], deadline: Deadline, waiting: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Return the results of all ``refs`` by name; call ``waiting`` with the pending names after each second without a result.

    Raises the error of a remote call with its type; ``WorkerError`` naming a process that died; ``DeadlineExceeded``
    naming processes that have not answered.
    """
    pending = {ref: name for name, ref in refs.items()}
    results: dict[str, Any] = {}
    while pending:
        waits_for = ", ".join(sorted(pending.values()))
        ready, _ = ray.wait(list(pending), num_returns=1, timeout=min(POLL_S, deadline.remaining(waits_for)))
        if waiting is not None and not ready:
            waiting(waits_for)
        for ref in ready:
            name = pending.pop(ref)
            try:
                results[name] = _get(name, ref, deadline)
            except WorkerError as error:
                raise _root_cause(error, pending, deadline) from error
    return {name: results[name] for name in refs}


def _root_cause(error: WorkerError, pending: Mapping[ray.ObjectRef[Any], str], deadline: Deadline) -> SlimeLikeError:
    """Return the root cause: one rank's failure breaks its peers' connections, so prefer a death or a specific error."""
    if error.died:
        return error
    ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=GRACE_S) if pending else ([], [])
    errors: list[SlimeLikeError] = [error]
    for ref in ready:
        try:
            _get(pending[ref], ref, deadline)
        except SlimeLikeError as peer_error:
            errors.append(peer_error)
    return next((e for e in errors if not isinstance(e, WorkerError) or e.died), error)


def wait_first(refs: Mapping[str, ray.ObjectRef[Any]], deadline: Deadline) -> tuple[str, Any]:
    """Return name and result of the first ready ref, ties in the order of ``refs``; errors as ``wait_all``."""
    first = next(iter(refs))
    ready, _ = ray.wait(list(refs.values()), num_returns=1, timeout=deadline.remaining(first))
    if not ready:
        raise deadline.exceeded(first)
    name = next(name for name, ref in refs.items() if ref in ready)
    return name, _get(name, refs[name], deadline)


def is_answered(ref: ray.ObjectRef[Any]) -> bool:
    """Return True if the result or error of a call is available."""
    return bool(ray.wait([ref], timeout=0)[0])


def wait_one(name: str, ref: ray.ObjectRef[Any], deadline: Deadline) -> Any:
    """Return the result of one call; errors as ``wait_all``."""
    return wait_all({name: ref}, deadline)[name]


def _get(name: str, ref: ray.ObjectRef[Any], deadline: Deadline) -> Any:
    try:
        return ray.get(ref, timeout=deadline.remaining(name))
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, SlimeLikeError):
            raise type(cause)(str(cause)) from error
        raise WorkerError(f"{name} failed in phase '{deadline.phase}': {one_line(cause)}") from error
    except RayActorError as error:
        raise WorkerError(f"{name} died in phase '{deadline.phase}': {one_line(error)}", died=True) from error
    except GetTimeoutError as error:
        raise deadline.exceeded(name) from error
