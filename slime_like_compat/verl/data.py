"""Translation of a verl job's keys for data files and evaluation to keys of slime_like."""

from __future__ import annotations

import re
from itertools import chain, count
from pathlib import Path

from slime_like_compat.verl.defaults import ROLLOUT
from slime_like_compat.verl.job import Job

_COMMON_NAMES = ("test", "val", "valid", "validation", "dev", "eval", "train", "data")


def map_data(job: Job) -> None:
    """Set ``run.seed`` and the keys of data files, columns, shuffling, chat templates and the handling of unusable rows."""
    train = job.texts("data.train_files") if job.sets("data.train_files") else []
    if len(train) == 1:
        job.set("data.train", train[0], "data.train_files")
    else:
        reason = (
            "only one file is read: write all rows into one file" if train else "must be given: name a file of rows"
        )
        job.refuse("data.train_files", reason, ("data.train",))
    job.set("data.input_key", job.text("data.prompt_key"), "data.prompt_key")
    job.set("data.label_key", "reward_model.ground_truth", "reward_model.ground_truth (column)")
    job.set("data.metadata_key", "extra_info", "extra_info (column)")
    job.set("data.shuffle", job.switch("data.shuffle"), "data.shuffle")
    if job.value("data.seed") is not None:
        job.set("run.seed", job.integer("data.seed"), "data.seed")
    job.leave_out("the run has one seed, run.seed", "data.seed")
    for key in [key for key in job.settings if key.startswith("data.apply_chat_template_kwargs.")]:
        if job.has(key):
            job.set(f"data.chat_template_kwargs.{key.rpartition('.')[2]}", job.value(key), key)
    truncation, skip_overlong = "data.truncation", "data.filter_overlong_prompts"
    if job.switch(skip_overlong):
        job.set(
            "data.on_bad_row",
            "skip",
            skip_overlong,
            "longer prompts are left out and counted, as are rows that cannot be used",
        )
        job.leave_out("longer prompts are left out", truncation)
        return
    note = "a longer prompt ends the run when data is read"
    if job.value(truncation) == "error":
        job.report(truncation, "mapped", note, "data.on_bad_row")
    else:
        job.refuse(
            truncation,
            "prompts are not truncated: filter_overlong_prompts=True leaves longer ones out",
            ("data.on_bad_row",),
        )
    job.report(skip_overlong, "mapped", note, "data.on_bad_row")


def map_evaluation(job: Job) -> None:
    """Set the keys of evaluation if the job evaluates.

    As in verl, the settings of val_kwargs give its sampling; those of training have no effect on it.
    """
    files = job.texts("data.val_files") if job.sets("data.val_files") else []
    interval, before_train = job.integer("trainer.test_freq"), job.switch("trainer.val_before_train")
    sampling = {"n_samples_per_prompt": "n", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k"}
    keys = [f"{ROLLOUT}.val_kwargs.{name}" for name in sampling.values()]
    greedy = f"{ROLLOUT}.val_kwargs.do_sample"
    job.leave_out("verl's own loop does not read it; val_kwargs.temperature=0 is greedy", greedy)
    if not files or (interval <= 0 and not before_train):
        reason = "nothing is evaluated: no data.val_files, or test_freq and val_before_train are off"
        job.leave_out(reason, "data.val_files", "trainer.test_freq", "trainer.val_before_train", *keys)
        return
    for name, path in _paths_by_name(files).items():
        job.set(f"evaluation.datasets.{name}", path, "data.val_files")
    if interval > 0:
        job.set("evaluation.interval", interval, "trainer.test_freq")
    job.report("trainer.test_freq", "mapped", "slime_like also evaluates after the last rollout", "evaluation.interval")
    job.set("evaluation.before_train", before_train, "trainer.val_before_train")
    for (our_key, _), key in zip(sampling.items(), keys, strict=True):
        read_value = job.integer if our_key in ("n_samples_per_prompt", "top_k") else job.number
        number = read_value(key)
        job.set(f"evaluation.{our_key}", number if read_value == job.integer else float(number), key)


def _paths_by_name(paths: list[str]) -> dict[str, str]:
    """Return ``paths`` in a dict, with a name for each as the key.

    A path is named by its file. If the file has a common name such as test, the nearest folder above with an uncommon name gives
    the name; without such a folder, the file does. A name that is taken gets a number.
    """
    paths_by_name: dict[str, str] = {}
    for path in paths:
        parts = [part for part in Path(path.partition("@")[0].rpartition(".")[0] or "val").parts if part != "/"]
        stem = next(
            (part for part in reversed(parts) if part.lower() not in _COMMON_NAMES), parts[-1] if parts else "val"
        )
        name = re.sub(r"\W+", "_", stem).strip("_").lower() or "val"
        numbered_names = (f"{name}_{number}" for number in count(len(paths_by_name)))
        free_name = next(text for text in chain((name,), numbered_names) if text not in paths_by_name)
        paths_by_name[free_name] = path
    return paths_by_name
