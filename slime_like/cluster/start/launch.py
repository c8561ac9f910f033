"""Launch a run from its config, and stop every process that it started, however the run ends."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from slime_like.cluster.plan.guard import ring_folder
from slime_like.cluster.plan.planner import Plan, make_plan, probe_machine
from slime_like.cluster.plan.user_code import unread_keys
from slime_like.cluster.plan.verify import verify_initial_checkpoints
from slime_like.cluster.run.chaos import planned_faults
from slime_like.cluster.run.checkpoints import remove_leftovers
from slime_like.cluster.run.control import Control
from slime_like.cluster.run.rollout_state import check_cursor, check_num_managers
from slime_like.cluster.run.stop import StopRequest
from slime_like.cluster.run.training_run import Run
from slime_like.cluster.start.folder import claim_folder
from slime_like.cluster.start.identity import run_record
from slime_like.cluster.start.inputs import RunInputs, load_inputs
from slime_like.cluster.start.limits import check_limits
from slime_like.cluster.start.processes import Cluster
from slime_like.cluster.start.progress import Progress
from slime_like.cluster.start.resume import checkpoint_folder, first_rollout
from slime_like.cluster.supervise import driver_link
from slime_like.cluster.supervise.crash import one_line, write_bundle
from slime_like.cluster.supervise.reporting import NOTHING_LOGGED, try_report
from slime_like.cluster.supervise.stacks import dump_stacks_on_signal
from slime_like.config.schema.root import TrainConfig
from slime_like.data import faults
from slime_like.distributed.forensics import report as forensics
from slime_like.errors import DeadlineExceeded, EngineError, SlimeLikeError, WorkerError, exit_code
from slime_like.metrics.sinks import SinkGroup, open_sinks
from slime_like.printable import visible
from slime_like.rollout.engine.plugins import check_entry_points
from slime_like.util.deadline import Deadline

STOPPED = 130  # exit code
SINK_S = 180.0  # for wandb to respond and to accept the remaining data


def _read_inputs(cfg: TrainConfig, plan: Plan, run_dir: Path, first: int) -> RunInputs:
    """Load the inputs; check the record of faults if some are planned and, on resume, the checkpoint's rollout state.

    Without these checks, unusable files would be noticed only after processes have started. Raises ``CheckpointError`` or
    ``DataError`` naming a file that cannot be used, and the errors of ``load_inputs``.
    """
    if first and plan.needs_engines:
        check_num_managers(checkpoint_folder(cfg, run_dir), first, cfg.rollout.num_managers)
    inputs = load_inputs(cfg, plan)
    if first and inputs.source is not None:
        check_cursor(checkpoint_folder(cfg, run_dir), first, inputs.source)
    if planned_faults(cfg.chaos, cfg.loop.num_rollout):
        faults.read(run_dir)
    return inputs


@contextmanager
def launch(cfg: TrainConfig) -> Generator[Run]:
    """Check all inputs, start the processes of ``cfg``, yield the run, tear everything down.

    Call it from the main thread, because it installs signal handlers. After an error in the block or while processes
    start, write a crash bundle to ``run.dir``, then print and raise a ``SlimeLikeError`` with the error's message and the
    bundle's path. An earlier error is raised unchanged.
    """
    plan = _plan_run(cfg)
    run_dir = Path(cfg.run.dir).resolve()
    first, record = _check_checkpoints(cfg, run_dir)
    inputs = _read_inputs(cfg, plan, run_dir, first)
    with claim_folder(cfg, run_dir):
        remove_leftovers(run_dir)
        driver_link.report_run_dir(run_dir, ring_folder(cfg.run.dir))
        sink = _open(cfg, run_dir, first)
        stop, control = StopRequest(), Control(run_dir, sink.note)
        cluster = Cluster(cfg, plan, run_dir, Progress(partial(_say, cfg)), partial(_say, cfg))
        stop.install()
        code = STOPPED
        try:
            dump_stacks_on_signal(run_dir / "stacks", "driver")
            control.open(first, cfg.loop.num_rollout)
            _say(cfg, f"{plan.summary}; everything goes to {run_dir}")
            for line in (*plan.advice, *unread_keys(cfg), *inputs.advice):
                sys.stderr.write(visible(f"warning: {line}\n"))
            run = cluster.start(inputs, first, sink, stop, control, record)
            cluster.progress.ready("ready")
            yield run
            code = 0
        except Exception as error:
            full_error = _error_with_bundle(cfg, run_dir, error, cluster)
            full_error.say()  # before the processes are stopped, which may take long or fail
            code = exit_code(full_error)
            raise full_error from error
        finally:
            driver_link.report_teardown(code)
            stop.ignore_signals()
            with ExitStack() as teardown:  # runs every callback, the last one first, even if another fails
                teardown.callback(stop.restore)  # runs last: another signal must not interrupt the other callbacks
                teardown.callback(_report, cfg, run_dir)
                teardown.callback(_close, sink)
                teardown.callback(control.close)
                teardown.callback(shutil.rmtree, ring_folder(cfg.run.dir), ignore_errors=True)
                teardown.callback(cluster.close)
                teardown.callback(cluster.report_faults)


def _plan_run(cfg: TrainConfig) -> Plan:
    plan = make_plan(cfg, probe_machine())
    check_limits(plan.device)
    if plan.engines:
        check_entry_points()
    return plan


def _error_with_bundle(cfg: TrainConfig, run_dir: Path, error: Exception, cluster: Cluster) -> SlimeLikeError:
    """Write the crash bundle and return the error with details from the processes."""
    if isinstance(error, (WorkerError, EngineError)):
        driver_link.confirm_ray()
    deaths = cluster.causes_of_death(suspected=isinstance(error, EngineError))
    waiting_ranks = (
        forensics.report(ring_folder(cfg.run.dir)) if isinstance(error, (WorkerError, DeadlineExceeded)) else ""
    )
    return _with_context(error, deaths, waiting_ranks, _bundle(run_dir, error, deaths, cluster.log_dir))


def _open(cfg: TrainConfig, run_dir: Path, first: int) -> SinkGroup:
    with driver_link.bounded_call(Deadline("driver", "start", SINK_S), "the destinations of metrics.*", at_once=True):
        return open_sinks(cfg.metrics, run_dir, first_step=first, num_steps=cfg.loop.num_rollout, settings=asdict(cfg))


def _close(sink: SinkGroup) -> None:
    with driver_link.bounded_call(Deadline("driver", "teardown", SINK_S), "the destinations of metrics.*"):
        sink.close()


def _check_checkpoints(cfg: TrainConfig, run_dir: Path) -> tuple[int, dict[str, Any]]:
    """Check every checkpoint that the run reads; return the first rollout, and the ``run_record`` for new checkpoints."""
    record = run_record(cfg)
    first = first_rollout(cfg, run_dir, record)
    verify_initial_checkpoints(cfg)
    return first, record


def _report(cfg: TrainConfig, run_dir: Path) -> None:
    """Write report.html; a failure to write it does not fail the run."""
    path, problem = try_report(run_dir)
    if path is not None:
        _say(cfg, f"report: {path}")
    elif problem != NOTHING_LOGGED:
        sys.stderr.write(visible(f"{cfg.run.name}: no report: {problem}\n"))


def _say(cfg: TrainConfig, text: str) -> None:
    if cfg.metrics.console != "off":
        sys.stdout.write(visible(f"{cfg.run.name}: {text}\n"))
        sys.stdout.flush()


def _bundle(run_dir: Path, error: Exception, deaths: list[str], ray_logs: Path | None) -> str:
    """Write the crash bundle; return its path, or the error that prevented writing it, which must not hide the cause."""
    try:
        return str(write_bundle(run_dir, error, deaths, ray_logs))
    except Exception as failure:  # noqa: BLE001  the fault boundary of the evidence
        return f"could not be written ({type(failure).__name__}: {failure})"


def _with_context(error: Exception, deaths: list[str], waiting_ranks: str, bundle: str) -> SlimeLikeError:
    """Return ``error`` as a ``SlimeLikeError`` that also names any ranks waiting in collectives, and the bundle.

    An error that dead engines may have caused becomes an ``EngineError`` with the causes of their ``deaths``.
    """
    kind = type(error) if isinstance(error, SlimeLikeError) else SlimeLikeError
    text = str(error) if isinstance(error, SlimeLikeError) else one_line(error)
    if deaths and isinstance(error, (EngineError, DeadlineExceeded, WorkerError)):
        kind, text = EngineError, f"{text}\n" + "\n".join(deaths)
    return kind("\n".join(part for part in (text, waiting_ranks, f"crash bundle: {bundle}") if part))
