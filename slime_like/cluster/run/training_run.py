"""A launched run: rollout, trainer and sync of the loop, with logging, evaluation, checkpoints and control."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from slime_like.batch import TrainBatch
from slime_like.checkpoint.files import iteration_folder
from slime_like.cluster.run.chaos import Chaos
from slime_like.cluster.run.checkpoints import Checkpoints
from slime_like.cluster.run.control import Control, Request
from slime_like.cluster.run.eval_files import answers_path, write_answers
from slime_like.cluster.run.full_disk import tolerate_full_disk
from slime_like.cluster.run.rollouts import RolloutSource
from slime_like.cluster.run.stop import StopRequest
from slime_like.cluster.run.sync import Sync
from slime_like.cluster.supervise.reporting import try_report
from slime_like.config.schema.root import TrainConfig
from slime_like.data.assemble import AssembleSpec, assemble
from slime_like.data.dump import rollout_path, save_groups
from slime_like.data.group_metrics import group_metrics
from slime_like.data.token_table import TokenTable, choose_samples, save_table, table_path, token_table, with_advantages
from slime_like.errors import ConfigError
from slime_like.interfaces import Trainer
from slime_like.metrics.drift import DriftWatch
from slime_like.metrics.sinks import SinkGroup
from slime_like.metrics.spans import Spans
from slime_like.metrics.types import Last, Metric, RunWarning, reduce_metrics
from slime_like.metrics.view import evaluations
from slime_like.printable import visible
from slime_like.rollout.selection import CollectedRollout
from slime_like.types import StepStats
from slime_like.util.counted import counted

PHASES = {"train_wait": "collect", "train": "step", "update_weights": "push"}  # phase of chaos.faults by timer


@dataclass(slots=True)
class Run:
    """A launched run, yielded by ``launch``."""

    cfg: TrainConfig
    run_dir: Path
    trainer: Trainer
    rollout: RolloutSource
    sync: Sync
    assembly: AssembleSpec
    sink: SinkGroup
    spans: Spans
    stop: StopRequest
    control: Control
    first_rollout: int
    engine_ranks: int  # 0 if nothing is generated
    checkpoints: Checkpoints
    chaos: Chaos
    drift: DriftWatch
    rollout_id: int = field(default=-1)  # current rollout; -1 before the first
    token_table: TokenTable | None = None  # trainer log-probabilities of some samples, dumped with the rollout
    num_empty: int = 0  # empty rollouts since the start or resume

    def start(self) -> None:
        """Push the initial or resumed weights; evaluate if the run is new and ``evaluation.before_train`` is set."""
        with self.timer("update_weights"):
            metrics = self.sync.push(self.trainer.version)
        if self.cfg.evaluation.before_train and self.first_rollout == 0:
            self._log(0, [*metrics, *self._evaluate(0)])
        else:
            self.spans.drain()

    def rollout_ids(self) -> Iterator[int]:
        """Yield the remaining rollout ids, then save a checkpoint.

        If all rollouts are trained and ``run.save_hf`` is set, finally export the weights. A stop request ends the loop
        after the current rollout. Raises ``KeyboardInterrupt`` after the save if rollouts remain.
        """
        num_trained = self.first_rollout
        for rollout_id in range(self.first_rollout, self.cfg.loop.num_rollout):
            if self.stop.requested:
                break
            self.rollout_id = rollout_id
            self.trainer.release_communicators()
            yield rollout_id
            num_trained = rollout_id + 1
        with self.timer("save"):
            self.checkpoints.save(num_trained, final=True)
        if self.num_empty:
            collected = counted(num_trained - self.first_rollout, "rollout")
            verb = "was" if self.num_empty == 1 else "were"
            sys.stderr.write(visible(f"warning: {self.num_empty} of {collected} {verb} empty and trained nothing\n"))
        if num_trained < self.cfg.loop.num_rollout:
            raise KeyboardInterrupt(
                f"stopped after {counted(num_trained, 'rollout')}; continue with the same command (run.resume=auto)"
            )
        if self.cfg.run.save_hf:
            self.trainer.export_hf(self.run_dir / "hf")

    @contextmanager
    def timer(self, name: str) -> Generator[None]:
        """Time a phase (``perf/<name>_time`` and a span in metrics.jsonl) and inject the faults of ``chaos.*`` in this phase."""
        with self.spans(name), self.chaos(PHASES.get(name, name), self.rollout_id):
            yield

    def assemble(self, rollout_id: int, collected: CollectedRollout) -> TrainBatch:
        """Record losses and recoveries of the rollout's engines and reward server, and assemble its train batch.

        With ``run.dump_rollouts`` in a run with a trainer, also score some samples with the weights before the step, for
        the token table that is dumped later.
        """
        self.chaos.record_recoveries(collected.recoveries)  # before this rollout's step or push, which may end the run
        batch = assemble(collected.groups, self.assembly, rollout_id)
        self.token_table = None
        if self.cfg.run.dump_rollouts and self.cfg.run.mode != "rollout_only":
            with self.timer("dump"):
                samples = choose_samples(batch, collected.groups, self.assembly.max_tokens_per_rank)
                if samples is not None:
                    self.token_table = token_table(samples, self.trainer.score(samples), self.trainer.version)
        return batch

    def finish_rollout(
        self, rollout_id: int, collected: CollectedRollout, stats: StepStats, probe_metrics: tuple[Metric, ...]
    ) -> None:
        """Finish a rollout after its push: dump it, evaluate and save a checkpoint if due, log metrics, and handle requests."""
        if rollout_id == self.first_rollout:
            self._print_kernels()
        self.spans.add("rollout", collected.started, collected.stopped)
        if self.cfg.run.dump_rollouts:
            self._dump(rollout_id, collected)
        num_trained = rollout_id + 1
        for warning in (*collected.warnings, *map(RunWarning, self.drift.warnings(reduce_metrics(stats.metrics)))):
            sys.stderr.write(visible(f"warning: {warning}\n"))
            self.sink.warn(num_trained, warning)
        self.num_empty += not collected.groups
        metrics = [
            *group_metrics(collected.groups, stats.version - 1),
            *collected.metrics,
            *stats.metrics,
            *probe_metrics,
        ]
        if self.assembly.overlong is not None:
            metrics += self.assembly.overlong.metrics(collected.groups)
        if self.engine_ranks:
            tokens = sum(sample.num_response_tokens for group in collected.groups for sample in group.samples)
            seconds = max(collected.stopped - collected.started, 1e-9)
            metrics.append(Last("perf/tokens_per_gpu_per_sec", tokens / seconds / self.engine_ranks))
        requests = self.control.read(num_trained)
        try:
            if self._is_eval_due(num_trained) or Request.EVAL in requests:
                eval_metrics = self._evaluate(num_trained)
                metrics += eval_metrics
                if Request.EVAL in requests:
                    self._answer_eval(eval_metrics)
        finally:  # a failed evaluation must not lose the metrics and checkpoint of the trained step
            self._log(num_trained, metrics)
            self._save_if_due(num_trained)
        self._handle_requests(requests, num_trained)

    def _print_kernels(self) -> None:
        """Print the kernels used in the first rollout."""
        if self.cfg.metrics.console != "off":
            for line in self.trainer.kernels():
                sys.stdout.write(visible(f"{self.cfg.run.name}: {line}\n"))

    def _dump(self, rollout_id: int, collected: CollectedRollout) -> None:
        """Write the rollout's groups and, if there is one, the token table of some samples with their advantages."""
        folder = self.run_dir / "rollouts"
        with tolerate_full_disk(path := rollout_path(folder, rollout_id), self.cfg.run):
            save_groups(path, collected.groups)
        if self.token_table is not None:
            advantages = self.trainer.token_advantages(self.token_table.sample_ids.tolist())
            with tolerate_full_disk(path := table_path(folder, rollout_id), self.cfg.run):
                save_table(path, with_advantages(self.token_table, advantages))

    def _answer_eval(self, metrics: tuple[Metric, ...]) -> None:
        """Reply to an evaluation request with the scores, or with an error if there are none."""
        scores = ", ".join(f"{name} {value:.3f}" for name, value in evaluations(reduce_metrics(metrics)).items())
        self.control.answer(Request.EVAL, scores or "no engines or no evaluation.datasets", failed=not scores)

    def _handle_requests(self, requests: tuple[Request, ...], num_trained: int) -> None:
        """Handle requests to save, report, change the number of engines, or stop. A save ends before this returns."""
        if Request.SAVE in requests:
            with self.timer("save"):
                complete = self.checkpoints.save(num_trained, wait=True)
            name = iteration_folder(self.checkpoints.folder, num_trained).relative_to(self.run_dir)
            no_checkpoint = (
                "nothing was written" if self.checkpoints.enabled else "a run without a trainer has nothing to save"
            )
            self.control.answer(Request.SAVE, str(name) if complete else no_checkpoint, failed=not complete)
        if Request.REPORT in requests:
            path, problem = try_report(self.run_dir)
            self.control.answer(Request.REPORT, problem if path is None else path.name, failed=path is None)
        if Request.ENGINES in requests:
            self._resize_engines(self.control.num_engines)
        if Request.STOP in requests:
            self._handle_stop(num_trained)

    def _resize_engines(self, num_engines: int) -> None:
        """Change the number of engines, if it can be changed, and reply; added engines start in the background."""
        try:
            change = self.rollout.resize(num_engines)
        except ConfigError as error:
            self.control.answer(Request.ENGINES, str(error), failed=True)
            return
        self.engine_ranks = num_engines * self.cfg.rollout.tp
        self.control.answer(Request.ENGINES, change)

    def _handle_stop(self, num_trained: int) -> None:
        """Stop after this rollout. Save the checkpoint before replying, so that the caller can safely shut the machine down."""
        self.stop.requested = True
        with self.timer("save"):
            complete = self.checkpoints.save(num_trained, wait=True)
        saves = self.checkpoints.enabled
        checkpoint_text = (
            ", with a checkpoint" if complete else "; its checkpoint could not be written" if saves else ""
        )
        self.control.answer(
            Request.STOP,
            f"the run ends after {counted(num_trained, 'rollout')}{checkpoint_text}",
            failed=saves and not complete,
        )

    def _save_if_due(self, num_trained: int) -> None:
        """Save a checkpoint and export the weights, each if due; mark a pending checkpoint as the latest if it is complete."""
        run = self.cfg.run
        with self.timer("save"):
            if run.save_interval is not None and num_trained % run.save_interval == 0:
                self.checkpoints.save(num_trained)
            else:
                self.checkpoints.poll()
            if run.save_hf_interval is not None and num_trained % run.save_hf_interval == 0:
                with tolerate_full_disk(folder := hf_folder(self.run_dir, num_trained), self.cfg.run):
                    self.trainer.export_hf(folder)

    def _is_eval_due(self, num_trained: int) -> bool:
        interval = self.cfg.evaluation.interval
        return num_trained == self.cfg.loop.num_rollout or (interval is not None and num_trained % interval == 0)

    def _evaluate(self, num_trained: int) -> tuple[Metric, ...]:
        """Evaluate after ``num_trained`` rollouts, write any responses to a file and return the metrics.

        If the file cannot be written, only print a warning.
        """
        self.trainer.release_communicators()
        with self.timer("eval"):
            eval_result = self.rollout.evaluate()
        if eval_result.answers:
            path = answers_path(self.run_dir, num_trained)
            try:
                write_answers(path, num_trained, eval_result.answers)
            except OSError as error:  # a full disk; the metrics are still logged
                sys.stderr.write(
                    visible(f"warning: {path}: the evaluation's answers were not written ({error.strerror})\n")
                )
        return eval_result.metrics

    def _log(self, num_trained: int, metrics: list[Metric]) -> None:
        spans = self.spans.drain()
        metrics += [Last(f"perf/{name}_time", stop - start) for name, (start, stop) in spans.items()]
        # The rollout's span is left out, because its generation may have begun in an earlier step.
        loop_spans = [span for name, span in spans.items() if name != "rollout"]
        if loop_spans:
            metrics.append(
                Last("perf/step_time", max(stop for _, stop in loop_spans) - min(start for start, _ in loop_spans))
            )
        self.sink.log(num_trained, reduce_metrics(metrics), spans)


def hf_folder(run_dir: Path, num_trained: int) -> Path:
    """Return the folder of the HF export after ``num_trained`` rollouts (``run.save_hf_interval``)."""
    return run_dir / f"hf_iter_{num_trained:07d}"
