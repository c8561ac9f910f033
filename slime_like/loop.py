"""The training loop.

    Prompt --rollout.collect--> SampleGroup (scored, filtered) --assemble--> TrainBatch
           --trainer.step--> StepStats(version) --sync.push--> the engines serve that version

collect   consumes prompts, produces scored groups; waits for the engines, which begin the rollout with weights at most
          ``loop.max_staleness`` versions older than the trainer's
step      consumes one rollout, produces weights of the next version; waits for the trainer ranks
push      consumes weights, makes the engines serve them; the probe checks that engines and trainer hold the same weights

With ``loop.max_staleness=0`` the three phases take turns. With 1 or more, the rollout managers generate the next rollout
while ``step`` runs, and a push pauses the generation briefly. The loop is the same in both cases.
"""

from __future__ import annotations

from slime_like.cluster.start.launch import launch
from slime_like.config.schema.root import TrainConfig


def train(cfg: TrainConfig) -> None:
    """Train to the last rollout.

    The first Ctrl-C ends the run after the current rollout, with a checkpoint; the second one ends it immediately, without one.
    An error after the checks of ``launch`` writes a crash bundle and ends the run.
    """
    with launch(cfg) as run:
        run.start()
        for rollout_id in run.rollout_ids():
            with run.timer("train_wait"):
                collected = run.rollout.collect(rollout_id)
            with run.timer("train"):
                stats = run.trainer.step(run.assemble(rollout_id, collected))
            with run.timer("update_weights"):
                probe_metrics = run.sync.push(stats.version)
            run.finish_rollout(rollout_id, collected, stats, probe_metrics)
