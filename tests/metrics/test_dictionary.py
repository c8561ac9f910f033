"""Metric dictionary: patterns, the generated page, and remedies for unhealthy metrics."""

from __future__ import annotations

import re
from pathlib import Path

from slime_like.config.schema.known import known_keys
from slime_like.metrics import dictionary
from slime_like.metrics.remedies import REMEDIES

ROOT = Path(__file__).resolve().parents[2]
GROUPS = {key.split(".")[0] for key in known_keys()}


def test_the_dictionary_knows_patterns_and_the_page_is_current() -> None:
    names = ["eval/gsm8k", "eval/gsm8k-pass@16", "eval/gsm8k/response_len/max", "rollout/dropped_groups/nonzero_std"]
    assert dictionary.unknown_names(names) == []
    assert dictionary.unknown_names(["train/los", "eval/a/b"]) == ["eval/a/b", "train/los"]
    assert (ROOT / "docs" / "metrics.md").read_text() == dictionary.render(), "run scripts/make_metric_docs.py"


def test_every_metric_is_listed_once() -> None:
    names = [entry.name for entry in dictionary.ENTRIES]
    assert sorted(names) == sorted(set(names))
    assert all(entry.meaning for entry in dictionary.ENTRIES)


def test_every_metric_with_a_healthy_range_has_a_remedy() -> None:
    healthy = {entry.name for entry in dictionary.ENTRIES if entry.healthy}
    assert healthy - set(REMEDIES) == set(), "add a line to slime_like/metrics/remedies.py"
    assert set(REMEDIES) - healthy == set(), "remedies for unknown metrics, or for metrics without a healthy range"


def test_remedies_name_keys_and_metrics_that_exist() -> None:
    for name, text in REMEDIES.items():
        for key in re.findall(r"\b([a-z_]+(?:\.[a-z_0-9]+)+)\b", text):
            nested = key.startswith(("rollout.sglang.", "model.megatron."))
            file = key.endswith((".html", ".py", ".log"))
            assert nested or file or key.split(".")[0] not in GROUPS or key in known_keys(), f"{name}: {key}"
        for metric in re.findall(r"\b((?:train|rollout|reward|guard|perf|probe|eval|memory)/\w+)", text):
            assert any(entry.name.startswith(metric) for entry in dictionary.ENTRIES), f"{name}: {metric}"
