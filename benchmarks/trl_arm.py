"""TRL's side of ``benchmarks/run.py``: GRPOTrainer on the benchmark's model and rows, run by the Python of TRL's environment.

It writes ``{"ends": [...], "rollout_s": [...], "tokens": [...], "rewards": [...], "versions": {...}}`` to ``--out``:
for each step the unix time of its end, the seconds spent on generation, the number of sampled tokens and the mean
reward; and the versions of TRL, torch and transformers.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import argparse
import importlib.metadata
import json
import time
from pathlib import Path
from typing import Any


def parse() -> argparse.Namespace:
    """Parse the arm's arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "rows", "out", "work"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("steps", "prompts", "samples", "new-tokens", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--lr", type=float, required=True)
    return parser.parse_args()


def configuration(args: argparse.Namespace) -> Any:
    """Return the job as a TRL configuration: one batch per step, on-policy, no KL term."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(args.work),
        use_cpu=True,
        bf16=args.dtype == "bfloat16",
        gradient_checkpointing=False,
        per_device_train_batch_size=args.prompts * args.samples,
        num_generations=args.samples,
        gradient_accumulation_steps=1,
        max_completion_length=args.new_tokens,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        max_steps=args.steps,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
        disable_tqdm=True,
        temperature=1.0,
        beta=0.0,
        seed=0,
    )


def main() -> None:
    """Train and write the record."""
    args = parse()
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from transformers.trainer_callback import PrinterCallback
    from trl import GRPOTrainer

    torch.set_num_threads(args.threads)
    record: dict[str, Any] = {"ends": [], "rollout_s": [], "tokens": [], "rewards": []}
    generate_s = [0.0]  # in the current step

    def digits(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        record["tokens"].append(sum(len(ids) for ids in completion_ids))
        rewards = [min(1.0, sum(c.isdigit() for c in text) / args.new_tokens) for text in completions]
        record["rewards"].append(sum(rewards) / len(rewards))
        return rewards

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            record["ends"].append(time.time())
            record["rollout_s"].append(generate_s[0])
            generate_s[0] = 0.0

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, trust_remote_code=False),
        reward_funcs=digits,
        args=configuration(args),
        train_dataset=Dataset.from_list([json.loads(line) for line in args.rows.read_text().splitlines()]),
        processing_class=AutoTokenizer.from_pretrained(args.model, trust_remote_code=False),
        callbacks=[Clock()],
    )
    trainer.remove_callback(PrinterCallback)
    generate = trainer._generate_single_turn  # all of TRL's generation

    def timed(*positional: Any, **named: Any) -> Any:
        start = time.perf_counter()
        try:
            return generate(*positional, **named)
        finally:
            generate_s[0] += time.perf_counter() - start

    trainer._generate_single_turn = timed
    trainer.train()
    record["versions"] = {name: importlib.metadata.version(name) for name in ("trl", "torch", "transformers")}
    args.out.write_text(json.dumps(record))


if __name__ == "__main__":
    main()
