"""Stop a job by a request through the run's control files, so that the run saves a checkpoint before it ends."""

from __future__ import annotations

from contextlib import suppress

from slime_like.cluster.jobs.follow import wait_for_end
from slime_like.cluster.jobs.job import MARK, ClusterJob
from slime_like.cluster.jobs.server import JobServer
from slime_like.cluster.jobs.submission import control_request
from slime_like.errors import DataError, ProcessLost, SlimeLikeError, WorkerError
from slime_like.util.deadline import Deadline

HELPER_S = 60.0  # for Ray to start and end a helper job, in addition to the wait for the run


async def stop_job(server: JobServer, job_id: str, *, wait_s: float, at_once: bool = False) -> ClusterJob:
    """Stop a job that this project submitted, and return it once it has ended.

    A helper job on the head node, where the run's driver is, sends the request; the run then finishes its current
    rollout, saves a checkpoint and ends. With ``at_once``, Ray sends SIGTERM instead, which also works if the run has
    not begun or its files are gone. Raises ``DataError`` if the job is unknown, was submitted by another program or,
    without ``at_once``, is not a run; ``WorkerError`` if the run does not confirm the request within ``wait_s`` seconds; and
    ``DeadlineExceeded`` if the job has not ended after ``wait_s + HELPER_S`` seconds or the server does not answer.
    """
    job = await server.job(job_id)
    if not job.is_ours:
        raise DataError(
            f"job {job_id} has no {MARK!r} in its metadata: scripts/submit.py stops only jobs that it submitted"
        )
    if job.has_ended:
        return job
    deadline = Deadline("scripts/submit.py", "stop", wait_s + HELPER_S)
    if at_once:
        await server.stop(job_id)
    else:
        await _request_stop(server, job, wait_s)
    return await wait_for_end(server, job_id, deadline)


async def _request_stop(server: JobServer, job: ClusterJob, wait_s: float) -> None:
    """Run a helper job that requests the stop, and remove the helper when it has ended.

    Raises ``DataError`` if ``job`` is not a run, ``DeadlineExceeded`` if the helper has not ended after ``wait_s + HELPER_S``
    seconds or the server does not answer, and ``WorkerError`` with the last line of the helper's output if it fails while
    ``job`` still runs.
    """
    request = control_request(job.id, job.metadata, "stop", wait_s)
    await server.submit(request)
    try:
        deadline = Deadline("scripts/submit.py", "stop", wait_s + HELPER_S)
        helper = await wait_for_end(server, request.submission_id, deadline)
        if helper.code and not (await server.job(job.id)).has_ended:
            output = (await server.output(request.submission_id)).strip()
            raise WorkerError(
                f"the run of job {job.id} did not confirm the request to stop: {output.splitlines()[-1] if output else helper.reason}; "
                f"try again, or stop it with `scripts/submit.py stop {job.id} --now`"
            )
    finally:
        with suppress(ProcessLost, SlimeLikeError):
            await server.remove(request.submission_id)
