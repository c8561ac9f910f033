"""Config -> a running cluster, and back to nothing: what ``launch`` starts, it stops, however the run ends."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

from slime_like.cluster.checkpoints import remove_leftovers
from slime_like.cluster.control import Control
from slime_like.cluster.crash import one_line, write_bundle
from slime_like.cluster.folder import claimed
from slime_like.cluster.inputs import load_inputs
from slime_like.cluster.plan import make_plan, probe_machine
from slime_like.cluster.plan_guard import ring_folder
from slime_like.cluster.progress import Progress
from slime_like.cluster.reporting import NOTHING_LOGGED, try_report
from slime_like.cluster.resume import first_rollout
from slime_like.cluster.run import Run
from slime_like.cluster.stacks import dump_stacks_on_signal
from slime_like.cluster.started import Cluster
from slime_like.cluster.stop import StopRequest
from slime_like.config.root import TrainConfig
from slime_like.distributed import forensics
from slime_like.errors import DeadlineExceeded, EngineError, SlimeLikeError, WorkerError
from slime_like.metrics.sinks import open_sinks


@contextmanager
def launch(cfg: TrainConfig) -> Generator[Run]:
    """Check all inputs, start the processes of ``cfg``, yield the run, tear everything down.

    An error leaves a crash bundle in ``run.dir`` and goes on with the bundle's path in its message.
    """
    plan = make_plan(cfg, probe_machine())
    run_dir = Path(cfg.run.dir).resolve()
    first = first_rollout(cfg, run_dir)
    inputs = load_inputs(cfg, plan)
    with claimed(cfg, run_dir):
        remove_leftovers(run_dir)
        shutil.rmtree(ring_folder(cfg.run.dir), ignore_errors=True)  # of a part of this run that was killed
        sink = open_sinks(cfg.metrics, run_dir, first_step=first, num_steps=cfg.loop.num_rollout, settings=asdict(cfg))
        stop, control = StopRequest(), Control(run_dir, sink.note)
        cluster = Cluster(cfg, plan, run_dir, Progress(partial(_say, cfg)), partial(_say, cfg))
        stop.install()
        try:
            dump_stacks_on_signal(run_dir / "stacks", "driver")
            control.open(first, cfg.loop.num_rollout)
            _say(cfg, f"{plan.summary}; everything goes to {run_dir}")
            run = cluster.start(inputs, first, sink, stop, control)
            cluster.progress.ready("ready")
            yield run
        except Exception as error:
            deaths = cluster.causes_of_death(suspected=isinstance(error, EngineError))
            who = (
                forensics.report(ring_folder(cfg.run.dir)) if isinstance(error, (WorkerError, DeadlineExceeded)) else ""
            )
            raise _with_context(error, deaths, who, _bundle(run_dir, error, deaths, cluster.log_dir)) from error
        finally:
            stop.hold()
            with ExitStack() as teardown:  # each happens, whatever becomes of the others; processes first
                teardown.callback(stop.restore)  # last of all: a further signal must not cut any of the rest short
                teardown.callback(_report, cfg, run_dir)
                teardown.callback(sink.close)
                teardown.callback(control.close)
                teardown.callback(shutil.rmtree, ring_folder(cfg.run.dir), ignore_errors=True)
                teardown.callback(cluster.close)
                teardown.callback(cluster.report_faults)


def _report(cfg: TrainConfig, run_dir: Path) -> None:
    """Write report.html; a run that has ended well is not undone by a report that could not be written."""
    path, why = try_report(run_dir)
    if path is not None:
        _say(cfg, f"report: {path}")
    elif why != NOTHING_LOGGED:
        sys.stderr.write(f"{cfg.run.name}: no report: {why}\n")


def _say(cfg: TrainConfig, text: str) -> None:
    if cfg.metrics.console != "off":
        sys.stdout.write(f"{cfg.run.name}: {text}\n")
        sys.stdout.flush()


def _bundle(run_dir: Path, error: Exception, deaths: list[str], ray_logs: Path | None) -> str:
    """Path of the crash bundle, or why there is none: a full disk, or a fault in what reads the evidence, must not hide the cause."""
    try:
        return str(write_bundle(run_dir, error, deaths, ray_logs))
    except Exception as failure:  # noqa: BLE001  the fault boundary of the evidence
        return f"could not be written ({type(failure).__name__}: {failure})"


def _with_context(error: Exception, deaths: list[str], who: str, bundle: str) -> Exception:
    """The same error, its message completed by dead engines, who waited in which collective, and the bundle's path."""
    kind = type(error) if isinstance(error, SlimeLikeError) else SlimeLikeError
    text = str(error) if isinstance(error, SlimeLikeError) else one_line(error)
    if deaths and isinstance(error, (EngineError, DeadlineExceeded, WorkerError)):
        kind, text = EngineError, f"{text}\n" + "\n".join(deaths)
    return kind("\n".join(part for part in (text, who, f"crash bundle: {bundle}") if part))
