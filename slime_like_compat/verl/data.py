"""Data files and held-out prompts of a verl job in our keys."""

from __future__ import annotations

import re
from pathlib import Path

from slime_like_compat.verl.defaults import ROLLOUT
from slime_like_compat.verl.job import Job

_SETS = ("test", "val", "valid", "validation", "dev", "eval", "train", "data")


def map_data(job: Job) -> None:
    """Set files, columns and templates."""
    train = job.texts("data.train_files") if job.sets("data.train_files") else []
    if len(train) == 1:
        job.set("data.train", train[0], "data.train_files")
    else:
        what = "one file here: write the rows of all into one" if train else "must be given"
        job.refuse("data.train_files", what, ("data.train",))
    job.set("data.input_key", job.text("data.prompt_key"), "data.prompt_key")
    job.set("data.label_key", "reward_model.ground_truth", "reward_model.ground_truth (column)")
    job.set("data.metadata_key", "extra_info", "extra_info (column)")
    job.set("data.shuffle", job.switch("data.shuffle"), "data.shuffle")
    if job.value("data.seed") is not None:
        job.set("run.seed", job.whole("data.seed"), "data.seed")
    job.leave("the run has one seed, run.seed", "data.seed")
    for key in [key for key in job.settings if key.startswith("data.apply_chat_template_kwargs.")]:
        if job.has(key):
            job.set(f"data.chat_template_kwargs.{key.rpartition('.')[2]}", job.value(key), key)
    cut, skipped = "data.truncation", "data.filter_overlong_prompts"
    if job.switch(skipped):
        job.set(
            "data.on_bad_row",
            "skip",
            skipped,
            "longer prompts are left out and counted, as are rows that cannot be used",
        )
        job.leave("longer prompts are left out", cut)
        return
    note = "a longer prompt ends the run when data is read"
    if job.value(cut) == "error":
        job.tell(cut, "mapped", note, "data.on_bad_row")
    else:
        job.refuse(
            cut, "prompts are not cut: filter_overlong_prompts=True leaves longer ones out", ("data.on_bad_row",)
        )
    job.tell(skipped, "mapped", note, "data.on_bad_row")


def map_evaluation(job: Job) -> None:
    """Set held-out prompts, which verl samples by val_kwargs alone."""
    files = job.texts("data.val_files") if job.sets("data.val_files") else []
    every, before_train = job.whole("trainer.test_freq"), job.switch("trainer.val_before_train")
    sampling = {"n_samples_per_prompt": "n", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k"}
    keys = [f"{ROLLOUT}.val_kwargs.{name}" for name in sampling.values()]
    greedy = f"{ROLLOUT}.val_kwargs.do_sample"
    job.leave("verl's own loop reads only val_kwargs.temperature", greedy)
    if not files or (every <= 0 and not before_train):
        reason = "nothing is evaluated: no data.val_files, or test_freq and val_before_train are off"
        job.leave(reason, "data.val_files", "trainer.test_freq", "trainer.val_before_train", *keys)
        return
    for name, path in _named(files).items():
        job.set(f"evaluation.datasets.{name}", path, "data.val_files")
    if every > 0:
        job.set("evaluation.interval", every, "trainer.test_freq")
    job.tell("trainer.test_freq", "mapped", "here always after the last rollout too", "evaluation.interval")
    job.set("evaluation.before_train", before_train, "trainer.val_before_train")
    for (our_key, _), key in zip(sampling.items(), keys, strict=True):
        read = job.whole if our_key in ("n_samples_per_prompt", "top_k") else job.number
        number = read(key)
        job.set(f"evaluation.{our_key}", number if read == job.whole else float(number), key)


def _named(paths: list[str]) -> dict[str, str]:
    """Return files by name: that of the file, or of its folder if the file is called test or the like."""
    named: dict[str, str] = {}
    for path in paths:
        parts = [part for part in Path(path.partition("@")[0].rpartition(".")[0] or "val").parts if part != "/"]
        stem = next((part for part in reversed(parts) if part.lower() not in _SETS), parts[-1] if parts else "val")
        name = re.sub(r"\W+", "_", stem).strip("_").lower() or "val"
        name = name if name not in named else f"{name}_{len(named)}"
        named[name] = path
    return named
