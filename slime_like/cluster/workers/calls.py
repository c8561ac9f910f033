"""Typed calls of Ray actors, and ``ray.get`` with deadlines.

``call(actor, EngineActor.inject_fault, "SIGKILL")`` is equivalent to ``actor.inject_fault.remote("SIGKILL")``, except that a
type checker knows the method, its arguments and its result, and an editor finds its definition.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Concatenate, cast, overload

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import ActorUnschedulableError, GetTimeoutError, RayActorError, RayTaskError

from slime_like.cluster.supervise import driver_link
from slime_like.cluster.supervise.crash import one_line
from slime_like.cluster.workers.lost_node import DECLARED_S, describe_node
from slime_like.errors import CollectiveError, EngineLost, SlimeLikeError, WorkerError
from slime_like.util.deadline import Deadline, scale

FIRST_POLL_S = 0.01
POLL_S = 1.0  # the longest wait
SETTLE_S = 20.0  # for the other calls to end after an error that ends the run
GRACE_S = 2.0  # for peers of a failed process to report their errors
NODES_S = 30.0  # for Ray to list its nodes
STORE_S = 600.0  # for Ray's object store to take an argument


def start_actor[**P, T](actor_class: Callable[P, T], **options: Any) -> Callable[P, ActorHandle[T]]:
    """Return a function that takes the arguments of ``actor_class`` and starts such an actor with Ray's ``options``."""
    return cast(Any, ray.remote)(actor_class).options(**options).remote


@overload
def call[T, **P, R](
    actor: ActorHandle[T],
    method: Callable[Concatenate[T, P], Coroutine[Any, Any, R]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> ObjectRef[R]: ...


@overload
def call[T, **P, R](
    actor: ActorHandle[T], method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs
) -> ObjectRef[R]: ...


def call(actor: ActorHandle[Any], method: Callable[..., Any], *args: Any, **kwargs: Any) -> ObjectRef[Any]:
    """Start ``method`` of the actor's class on the actor; return the pending result."""
    return getattr(actor, method.__name__).remote(*args, **kwargs)


def put[T](value: T) -> T:
    """Store ``value``, an argument of several calls, once in Ray's object store.

    The returned reference is typed as ``value``, because Ray passes the value itself to the called methods.
    The supervisor ends the run if this takes longer than ``STORE_S`` times the deadline factor.
    """
    with driver_link.bounded_call(Deadline("driver", "put", STORE_S), "Ray's object store"):
        return cast(T, ray.put(value))


def wait_all[R](
    refs: Mapping[str, ObjectRef[R]], deadline: Deadline, waiting: Callable[[str], None] | None = None
) -> dict[str, R]:
    """Return the results of all ``refs`` by name.

    Poll Ray; after each poll without a result, call ``waiting`` with the pending names. Raises the ``SlimeLikeError`` of a remote
    call with its type, ``WorkerError`` if the call raised another error or its process died, and ``DeadlineExceeded``
    naming the processes that have not responded in time. An error is noticed within ``POLL_S``, even while other calls
    are pending, but raised only after ``_root_cause``, which may wait for a more specific one. Each poll collects all
    available results, and polls become longer, so that their number does not depend on the number of ``refs``.
    """
    pending_refs = {ref: name for name, ref in refs.items()}
    results: dict[str, R] = {}
    seconds = FIRST_POLL_S
    while pending_refs:
        ready_refs, _ = ray.wait(
            list(pending_refs),
            num_returns=len(pending_refs),
            timeout=min(seconds, _remaining_seconds(deadline, pending_refs)),
        )
        if waiting is not None and not ready_refs:
            waiting(_names(pending_refs))
        errors: list[SlimeLikeError] = []
        for ref in ready_refs:
            name = pending_refs.pop(ref)
            try:
                results[name] = _get(name, ref, deadline)
            except SlimeLikeError as error:
                errors.append(error)
        if errors:
            raise _root_cause(errors, pending_refs, deadline)
        seconds = min(2 * seconds, POLL_S)
    return {name: results[name] for name in refs}


def _names(pending_refs: Mapping[ObjectRef[Any], str]) -> str:
    return ", ".join(sorted(pending_refs.values()))


def _remaining_seconds(deadline: Deadline, pending_refs: Mapping[ObjectRef[Any], str]) -> float:
    seconds = deadline.limit - deadline.elapsed()
    if seconds <= 0:
        raise deadline.exceeded(_names(pending_refs))
    return seconds


def _root_cause(
    errors: Sequence[SlimeLikeError], pending_refs: Mapping[ObjectRef[Any], str], deadline: Deadline
) -> SlimeLikeError:
    """Return the most likely root cause among ``errors`` and errors of ``pending_refs`` that follow soon.

    The most likely cause is the death of a process, then an error that no death can cause, then a ``CollectiveError``. The
    failure of one rank breaks its peers' connections, so their errors arrive too. If ``errors`` may all be consequences, wait
    for the death of a process with a pending call. Ray reports a dead process immediately, but the processes of a lost node
    only once Ray has declared the node dead.
    """
    if not any(_died(error) or _is_specific(error) for error in errors):
        waiting_refs, waited_s = dict(pending_refs), 0.0
        is_collective = any(isinstance(error, CollectiveError) for error in errors)
        limit = DECLARED_S if waiting_refs and is_collective and _has_several_nodes() else GRACE_S
        # The deadline may pass during this wait, but is not the cause then.
        extended_deadline = replace(deadline, seconds=deadline.seconds + DECLARED_S)
        while waiting_refs and waited_s < limit and not any(map(_died, errors)):
            ready_refs, _ = ray.wait(list(waiting_refs), num_returns=len(waiting_refs), timeout=POLL_S)
            errors = [*errors, *_errors(ready_refs, waiting_refs, extended_deadline)]
            waiting_refs = {ref: name for ref, name in waiting_refs.items() if ref not in set(ready_refs)}
            waited_s += POLL_S
    return min(errors, key=lambda error: (not _died(error), not _is_specific(error), isinstance(error, WorkerError)))


def _died(error: SlimeLikeError) -> bool:
    return isinstance(error, WorkerError) and error.died


def _is_specific(error: SlimeLikeError) -> bool:
    """Return False if the error may be the consequence of a peer's death."""
    return not isinstance(error, (WorkerError, CollectiveError))


def _has_several_nodes() -> bool:
    with driver_link.bounded_call(Deadline("driver", "post mortem", NODES_S), "the Ray cluster to list its nodes"):
        return len(ray.nodes()) > 1


def _errors(
    ready_refs: Sequence[ObjectRef[Any]], names: Mapping[ObjectRef[Any], str], deadline: Deadline
) -> Generator[SlimeLikeError]:
    for ref in ready_refs:
        try:
            _get(names[ref], ref, deadline)
        except SlimeLikeError as error:
            yield error


def wait_first[R](
    refs: Mapping[str, ObjectRef[R]], optional_refs: Mapping[str, ObjectRef[R]], deadline: Deadline
) -> tuple[str, R]:
    """Return the name and result of the first ready ref. If several are ready, ``refs`` come before ``optional_refs``.

    If that call failed, its error is raised with the same type as in ``wait_all``, without a search for the root cause.
    Raises ``DeadlineExceeded`` if no ref is ready in time. The message does not name ``optional_refs``, because they may stay
    pending until the end of the run.
    """
    pending_refs = {ref: name for name, ref in refs.items()}
    names = pending_refs | {ref: name for name, ref in optional_refs.items()}
    ready_refs, _ = ray.wait(list(names), num_returns=1, timeout=_remaining_seconds(deadline, pending_refs))
    if not ready_refs:
        raise deadline.exceeded(_names(pending_refs))
    ref = next(ref for ref in names if ref in ready_refs)
    return names[ref], _get(names[ref], ref, deadline)


def wait_settled[R](refs: Mapping[str, ObjectRef[R]], deadline: Deadline) -> dict[str, R]:
    """Return the results of all ``refs`` by name.

    The death of a process is raised at once, another error only after a wait for the other calls. ``EngineLost`` is
    raised when no call is pending any more, so that the calls can be repeated; if a call is still pending at the
    deadline, ``DeadlineExceeded`` is raised instead. Any other error is raised once no call is pending any more, no call
    has ended for ``SETTLE_S`` times the deadline factor, or the deadline has passed. Errors have the same types as in
    ``wait_all``.
    """
    pending_refs = {ref: name for name, ref in refs.items()}
    results: dict[str, R] = {}
    errors: list[SlimeLikeError] = []
    while pending_refs:
        timeout = deadline.limit - deadline.elapsed() if errors else _remaining_seconds(deadline, pending_refs)
        is_fatal = any(not isinstance(error, EngineLost) for error in errors)
        if is_fatal:
            timeout = min(timeout, SETTLE_S * scale())
        ready_refs, _ = ray.wait(list(pending_refs), num_returns=1, timeout=max(timeout, 0.0))
        if not ready_refs and is_fatal:
            break
        if not ready_refs and errors:
            raise deadline.exceeded(_names(pending_refs)) from errors[0]
        for ref in ready_refs:
            name = pending_refs.pop(ref)
            try:
                results[name] = _get(name, ref, deadline)
            except SlimeLikeError as error:
                if _died(error):
                    raise
                errors.append(error)
    if errors:
        raise min(errors, key=lambda error: isinstance(error, EngineLost))
    return {name: results[name] for name in refs}


def is_ready(ref: ObjectRef[Any]) -> bool:
    """Return True if the result or error of a call is available."""
    return bool(ray.wait([ref], timeout=0)[0])


def wait_one[R](name: str, ref: ObjectRef[R], deadline: Deadline) -> R:
    """Return the result of one call. Raises the same errors as ``wait_all``."""
    return wait_all({name: ref}, deadline)[name]


def _get[R](name: str, ref: ObjectRef[R], deadline: Deadline) -> R:
    try:
        return ray.get(ref, timeout=deadline.remaining(name))
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, SlimeLikeError):
            raise type(cause)(str(cause)) from error
        raise WorkerError(f"{name} failed in phase '{deadline.phase}': {one_line(cause)}") from error
    # An actor cannot be scheduled if it may only run on a node that was lost.
    except (RayActorError, ActorUnschedulableError) as error:
        text = f"{name} died in phase '{deadline.phase}'{describe_node(error)}: {one_line(error)}"
        raise WorkerError(text, died=True) from error
    except GetTimeoutError as error:
        raise deadline.exceeded(name) from error
