"""Send a request to a running run, or print its status. The run handles requests at the end of its current rollout.

python scripts/control.py runs/quickstart status
python scripts/control.py runs/quickstart save|eval|report|engines=N|stop [--wait SECONDS]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from slime_like.cluster.run.control import FORMS, Request, RequestText, parse_request
from slime_like.cluster.run.control_client import read_live_status, send_request, wait_for_answer
from slime_like.cluster.run.status import DONE, STATUS, ControlReply, read_status
from slime_like.errors import DataError, SlimeLikeError
from slime_like.printable import complaint, visible
from slime_like.util.deadline import Deadline

ACTIONS = {
    Request.EVAL: "evaluate",
    Request.SAVE: "write a checkpoint",
    Request.REPORT: "write report.html",
    Request.ENGINES: "run N engines from now on",
    Request.STOP: "end, with a checkpoint from which the same command continues",
}


def main(argv: list[str]) -> int:
    """Return the exit code: 0, or 1 if a request with ``--wait`` failed, was dropped or got no answer in time.

    The code is 2 if the folder has no run or, for a request, no active one; if ``status.json`` is invalid; if the request
    cannot be written; or if the run ends before it answers.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run.dir of the run")
    words = "; ".join(f"{form}: {ACTIONS[request]}" for form, request in zip(FORMS, Request, strict=True))
    parser.add_argument("request", help=f"{words}; status: progress, and the requests so far")
    parser.add_argument("--wait", type=float, metavar="SECONDS", help="wait for the answer, at most this long")
    args = parser.parse_args(argv)
    if args.wait is not None and not args.wait >= 0:
        parser.error(f"--wait {args.wait}: a time is 0 or more")
    action = parse_request(args.request)
    if action is None and args.request != "status":
        parser.error(f"request {args.request!r}: choose one of {', '.join((*FORMS, 'status'))}, N from 1 to 9999")
    try:
        return show(args.run) if action is None else request(args.run, action, args.wait)
    except SlimeLikeError as error:
        sys.stderr.write(complaint(error))
        return 2 if isinstance(error, DataError) else 1


def request(run_dir: Path, action: RequestText, wait: float | None) -> int:
    """Send the request; with ``wait``, block at most ``wait`` seconds for the answer and print it. Return the exit code.

    Raises ``DataError`` if no run is active, ``status.json`` is invalid, the request cannot be written or the run ends without
    an answer, and ``DeadlineExceeded`` if there is no answer in time.
    """
    status = read_live_status(run_dir)
    request_id = send_request(run_dir, action)
    if wait is None:
        print(
            visible(
                f"asked the run to {ACTIONS[action.request].replace('N', str(action.num_engines))}; the run is at rollout {status.step + 1} of {status.num_steps}"
            )
        )
        return 0
    answer = wait_for_answer(run_dir, action, request_id, Deadline("scripts/control.py", "wait", wait))
    print(visible(line(answer)))
    return 0 if answer.state == DONE else 1


def show(run_dir: Path) -> int:
    """Print ``status.json`` in readable form. Raises ``DataError`` if the file is missing or invalid."""
    status = read_status(run_dir)
    if status is None:
        raise DataError(f"{run_dir} has no {STATUS}: give run.dir of a run that has been started")
    process = f"process {status.pid} on {status.host}"
    state = "runs" if status.alive else "has ended" if not status.running else "has died: see its logs"
    age = time.time() - status.time
    print(
        visible(f"{run_dir} {state} ({process}): {status.step} of {status.num_steps} rollouts, as of {age:.0f} s ago")
    )
    for answer in status.requests:
        print(visible(f"  {line(answer)}"))
    return 0


def line(answer: ControlReply) -> str:
    """Return a line with one request and its outcome."""
    at = time.strftime("%H:%M:%S", time.localtime(answer.requested_at))
    by = f" by {answer.by}" if answer.by else ""
    detail = f": {answer.detail}" if answer.detail else ""
    return f"{answer.request}, requested at {at}{by}, {answer.state} after rollout {answer.step}{detail}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
