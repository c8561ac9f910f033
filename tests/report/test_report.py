"""report.html of a run: content, self-containment, and escaping of model text."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_like.data.dump import rollout_path, save_groups
from slime_like.data.token_table import TokenTable, save_table, table_path
from slime_like.errors import DataError
from slime_like.printable import visible
from slime_like.report import token_page
from slime_like.report.attribution import attribute, by_age, slope
from slime_like.report.chart import Series, chart, ticks
from slime_like.report.record import read_record
from slime_like.report.run_page import run_page
from slime_like.report.samples import sampled_rollouts
from slime_like.report.write import write_report
from slime_like.types import Prompt, Reward, Sample, SampleGroup, Source, Span, Status
from tests.hypothesis_examples import num_examples
from tests.report.pages import check_self_contained
from tests.report.test_compare import write_run

ROOT = Path(__file__).parents[2]
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</span></p></body><iframe src='http://evil'>",
    "'\" onmouseover='alert(1)",
    "&lt;b&gt; &amp; ]]> <!-- -->",
    "javascript:alert(1)",
    "\u202etxet esrever\u2066",
    "\x00\x1b[31m\ud800",
)
ROW = {
    "rollout/raw_reward": 0.5,
    "rollout/log_probs": -0.75,
    "rollout/response_len/mean": 37.25,
    "train/kl_loss": 0.0625,
    "train/train_rollout_logprob_abs_diff": 1e-3,
    "train/train_rollout_logprob_abs_diff_p99": 2e-3,
    "train/off_policy_token_ratio": 0.25,
    "probe/logprob_abs_diff_mean": 1e-3,
    "probe/logprob_abs_diff_mean/mlp": 8e-4,
    "probe/logprob_abs_diff_mean/all": 4e-4,
    "perf/train_time": 3.0,
    "perf/train_wait_time": 1.0,
    "perf/tokens_per_gpu_per_sec": 480.0,
    "memory/step": 2.0**31,
    "comm/dp/all_reduce/calls": 100,
    "comm/dp/all_reduce/bytes": 2.0**22,
    "comm/dp/all_reduce/time": 0.25,
    "comm/dp/all_reduce/checks": 3,
    "comm/dp/all_reduce/check_time": 2.5e-4,
    "comm/dp/all_reduce/clears": 1,
    "comm/dp/all_reduce/freed_bytes": 2.0**26,
    "guard/time": 5e-4,
    "perf/step_time": 2.0,
    "eval/sums": 0.5,
    "eval/sums-pass@k": 0.75,
}


def sample(sample_id: int, spans: tuple[Span, ...], text: str = "4", reward: float = 1.0) -> Sample:
    count = spans[-1].stop
    logprobs = np.full(count, np.nan, dtype=np.float32)
    for span in spans:
        if span.source is Source.MODEL:
            logprobs[span.start : span.stop] = -0.25
    ids = np.arange(count, dtype=np.int32) % len(HOSTILE)
    return Sample(0, sample_id, sample_id, 0, ids, logprobs, spans, Status.COMPLETED, text, Reward(reward))


def table_of(source: Sample, version: int, trainer: float = -0.5) -> TokenTable:
    count = len(source.token_ids)
    sampled = ~np.isnan(source.logprobs)
    return TokenTable(
        version=version,
        sample_ids=np.array([source.sample_id], dtype=np.int64),
        cu_seqlens=np.array([0, count], dtype=np.int32),
        token_ids=source.token_ids,
        versions=np.where(sampled, version, -1).astype(np.int32),
        rollout_logprobs=source.logprobs,
        trainer_logprobs=np.where(sampled, trainer, np.nan).astype(np.float32),
        loss_weight=np.where(sampled, 0.125, 0).astype(np.float32),
        advantages=np.where(sampled, 1.5, np.nan).astype(np.float32),
    )


SPANS = (Span(0, 3, Source.PROMPT), Span(3, 5, Source.MODEL, 6), Span(5, 6, Source.TOOL), Span(6, 9, Source.MODEL, 7))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Write a run whose texts are all hostile."""
    config = {"run": {"name": HOSTILE[0]}, "data": {"train": HOSTILE[1]}, "rollout": {"temperature": 1.0}}
    folder = write_run(tmp_path / "run", [ROW | {HOSTILE[2]: 1.0}] * 4, json.dumps(config))
    for rollout_id in range(5):
        rollout_sample = sample(rollout_id, SPANS, HOSTILE[3])
        prompt = Prompt(0, rollout_sample.token_ids[:3], HOSTILE[0], HOSTILE[4], None)
        save_groups(rollout_path(folder / "rollouts", rollout_id), [SampleGroup(rollout_id, prompt, (rollout_sample,))])
        save_table(table_path(folder / "rollouts", rollout_id), table_of(rollout_sample, 7))
    return folder


def page_of(folder: Path) -> str:
    sampled = sampled_rollouts(folder / "rollouts")
    return run_page(read_record(folder), sampled, lambda ids: HOSTILE[ids[0] % len(HOSTILE)])


def test_charts_of_an_evaluation_set_are_together(tmp_path: Path) -> None:
    sets = {
        name: [f"eval/{name}{suffix}" for suffix in ("", "-truncated_ratio", "-pass@1", "/response_len/mean")]
        for name in ("sums", "aime")
    }
    names = [name for pair in zip(*sets.values(), strict=True) for name in pair]
    html = page_of(write_run(tmp_path / "run", [{"rollout/raw_reward": 0.5} | dict.fromkeys(names, 0.5)] * 2, "{}"))
    charts = html.partition("<h2>Evaluation</h2>")[2].partition("<h2>")[0]
    titles = re.findall(r"<figcaption>([^<]*)", charts)
    assert [title.split()[0] for title in titles] == [
        name.removeprefix("eval/") for group in sets.values() for name in group
    ]


def test_hostile_text_stays_text(run: Path) -> None:
    html = page_of(run)
    page = check_self_contained(html)
    text = "".join(page.text)
    for hostile in HOSTILE[:6]:
        assert hostile in text, "shown verbatim"
    assert "\\u202e" in text and "\u202e" not in html and "\x00" not in html and "\x1b" not in html
    assert not re.search(r"https?://", html.replace("http://evil", "")), "no external URL"
    html.encode()


@settings(max_examples=num_examples(150), deadline=None)
@given(st.text(alphabet=st.characters(), max_size=40))
def test_any_text_of_a_model_stays_text(text: str) -> None:
    html = chart(text, [Series(text, [(0, 1.0)])], note=text)
    visible_text = visible(text)
    visible_text.encode()
    from html import escape

    page = f'<html><head><meta content="default-src \'none\'"><style></style></head><p title="{escape(visible_text)}">{escape(visible_text)}</p>{html}</html>'
    parsed_page = check_self_contained(page)
    assert parsed_page.tags.count("p") == (2 if text else 1)


def test_every_token_shows_its_values(run: Path) -> None:
    text = "\n".join(check_self_contained(page_of(run)).text)
    cells = re.findall(r"\n(-?[\d.]*)\n", text)
    for value in ("-0.25", "-0.5", "1.5", "0.125", "6", "7"):
        assert value in cells or f"\n{value}\n" in text
    html = page_of(run)
    titles = re.findall(r'<span class="t (\w+) d(\d)" title="([^"]*)"', html)
    assert len(titles) == 9 * 3, "first, middle and last rollout"
    sources = [source for source, _, _ in titles[:9]]
    assert sources == ["prompt"] * 3 + ["model"] * 2 + ["tool"] + ["model"] * 3
    assert "version 6" in titles[3][2] and "version 7" in titles[8][2] and "advantage 1.5" in titles[3][2]
    assert titles[3][1] == "2" and titles[0][1] == "0", "0.25 nats apart is the second colour"


HEADINGS = [
    *("Reward", "KL and entropy", "Lengths", "Evaluation", "Trainer and engine", "Causes of the difference"),
    *("Time", "Memory", "Sampled tokens", "All metrics", "Configuration"),
]
CURVES = {  # title of a chart -> label of its last point
    "reward": "raw_reward at 3: 0.5",
    "KL to the reference": "kl_loss at 3: 0.0625",
    "entropy": "entropy at 3: 0.75",
    "response length": "response_len/mean at 3: 37.25",
    "sums": "sums at 3: 0.5",
    "|trainer - engine|, mean": "train_rollout_logprob_abs_diff at 3: 0.001",
    "time of each phase": "train at 3: 3.0",
    "sampled tokens of the groups trained on, per second and engine rank": "tokens_per_gpu_per_sec at 3: 480",
    "peak of the reporting trainer rank by phase": "step at 3: 2.0",
}


def test_every_part_has_its_heading_and_every_curve_its_line(run: Path) -> None:
    html = page_of(run)
    assert [title for title in re.findall(r"<h[23]>(.*?)</h[23]>", html) if title in HEADINGS] == HEADINGS
    figures = {
        re.sub(" <small>.*", "", title): figure
        for figure, title in re.findall(r"<figure>(<figcaption>(.*?)</figcaption>.*?)</figure>", html)
    }
    assert {title: end in figures[title] for title, end in CURVES.items()} == dict.fromkeys(CURVES, True)


def test_the_page_has_curves_time_memory_and_attribution(run: Path) -> None:
    text = " ".join(check_self_contained(page_of(run)).text)
    for words in (
        "sums-pass@k",
        "75.0%",
        "highest peak, GiB",
        "2.000",
        "staleness",
        "temperature",
        "precision",
        "kernel",
    ):
        assert words in text
    assert "minus the mean log-probability of sampled tokens" in text, "without an entropy loss"
    assert "entropy at 0: 0.75" in page_of(run)
    assert "the trainer's rounding causes 0.0006 of 0.001 nats" in text
    assert "Rollout 0" in text and "Rollout 2" in text and "Rollout 4" in text and "Rollout 1 " not in text


def test_the_page_has_collective_counts(run: Path, tmp_path: Path) -> None:
    text = " ".join(check_self_contained(page_of(run)).text)
    assert "dp all_reduce 400 16.00 1.000 12 1.00 4 256.0" in " ".join(text.split())
    assert "The memory guard took 2.00 ms, 0.0250% of the time of all steps" in text
    single_run = write_run(tmp_path / "alone", [{"train/loss": 1.0}], "{}")
    assert "the run counted no collective: it had one trainer rank, or guard=off" in page_of(single_run)


def test_a_run_without_samples_says_how_to_keep_them(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [{"train/loss": math.nan, "guard/free_bytes": 1e9}] * 2)
    html = page_of(folder)
    assert "run.dump_rollouts=true" in html and "no value" in html
    check_self_contained(html)
    assert write_report(folder) == folder / "report.html"
    (folder / "rollouts").mkdir()
    (folder / "rollouts" / "rollout_0000000.npz").write_bytes(b"PK")
    with pytest.raises(DataError, match=r"rollout_0000000\.npz"):
        write_report(folder)


def test_the_command(run: Path, tmp_path: Path) -> None:
    line = [sys.executable, "scripts/report.py", str(run), "--out", str(tmp_path / "x" / "r.html")]
    result = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    check_self_contained((tmp_path / "x" / "r.html").read_text())
    failure = subprocess.run([*line[:2], str(tmp_path / "none")], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (failure.returncode, "is not a folder" in failure.stderr) == (2, True)


def test_another_temperature_shows_as_another_slope() -> None:
    rng = np.random.default_rng(0)
    logits_TV = rng.normal(scale=2.0, size=(400, 50))
    tokens_T = rng.integers(0, 50, 400)

    def logprobs(temperature: float) -> np.ndarray:
        scaled_logits = logits_TV / temperature
        logprobs_TV = scaled_logits - np.log(np.exp(scaled_logits).sum(-1, keepdims=True))
        return logprobs_TV[np.arange(400), tokens_T]

    def table_at(temperature: float) -> TokenTable:
        source = sample(0, (Span(0, 1, Source.PROMPT), Span(1, 401, Source.MODEL, 3)))
        source.logprobs[1:] = logprobs(1.0)
        table = table_of(source, 3)
        table.trainer_logprobs[1:] = logprobs(temperature)
        return table

    equal_slope, other_slope = slope([table_at(1.0)]), slope([table_at(1.3)])
    assert equal_slope is not None and abs(equal_slope[0] - 1) < 1e-6 and equal_slope[1] == 400
    assert other_slope is not None and abs(other_slope[0] - 1) > 0.1
    assert slope([]) is None


def test_the_difference_by_age_of_tokens() -> None:
    source = sample(0, SPANS)
    table = table_of(source, 8)
    table.versions[3:5], table.versions[6:9] = 6, 8
    table.trainer_logprobs[3:5] = -1.25
    ages = by_age([table])
    assert ages == {0: (0.25, 3), 2: (1.0, 2)}


def test_missing_measurements_are_named(tmp_path: Path) -> None:
    parts = {part.cause: part for part in attribute(read_record(write_run(tmp_path / "a", [{"x": 1.0}])), [])}
    assert parts["all causes"].measurement == "not measured"
    assert "weights.probe_sequences" in parts["precision, kernel"].source
    assert parts["staleness"].measurement == "not measured"
    on_policy = [{"train/off_policy_token_ratio": 0.0}]
    parts = {part.cause: part for part in attribute(read_record(write_run(tmp_path / "c", on_policy)), [])}
    assert parts["staleness"].measurement.startswith("none: every token of the last step")
    half = [{"probe/logprob_abs_diff_mean": 1e-3}]
    parts = {part.cause: part for part in attribute(read_record(write_run(tmp_path / "b", half)), [])}
    assert "weights.probe_layers" in parts["precision, kernel"].source


def test_the_last_warnings_are_shown(tmp_path: Path) -> None:
    """The list is cut within step 0, whose last warnings are kept."""
    folder = tmp_path / "a"
    folder.mkdir()
    rows = [
        {"step": 0, "warnings": [f"early {i}." for i in range(40)]},
        {"step": 1, "warnings": [f"late {i}." for i in range(20)]},
    ]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"time": 1.0, "x": 1.0, "spans": {}, **row}) + "\n" for row in rows)
    )
    page = page_of(folder)
    assert "60 warnings of the run, the last 50" in page
    assert re.findall(r"(?:early|late) \d+\.", page) == [f"late {i}." for i in range(20)] + [
        f"early {i}." for i in range(10, 40)
    ]


def test_a_group_that_is_not_a_mapping_is_shown_as_it_is(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [{"x": 1.0}], "{run: 5, rollout: [], model: text}")
    assert "<h1>a</h1>" in page_of(folder) and "rollout.temperature=?" in page_of(folder)


def test_tokens_beyond_the_maximum_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    monkeypatch.setattr(token_page, "MAX_TOKENS", 2)
    group = SampleGroup(0, Prompt(0, np.arange(3, dtype=np.int32), "2+2=", "4", None), (sample(0, SPANS),))
    lines = token_page.group_html(group, None, lambda ids: decoded.extend(ids) or "x", 0)
    assert "7 more tokens not shown" in "".join(lines)
    assert len(decoded) == 2, "the others are not decoded"


@settings(deadline=None)
@given(st.lists(st.floats(), max_size=20), st.floats(-1e300, 1e300), st.floats(-1e300, 1e300))
def test_any_numbers_make_a_chart(values: list[float], a: float, b: float) -> None:
    html = chart("x", [Series("y", list(enumerate(values)))])
    assert "nan" not in re.sub(r"<title>.*?</title>", "", html) and not re.search(r'"-?inf', html)
    low, high = min(a, b), max(a, b)
    assert len(ticks(low, high)) <= 8


def test_a_long_line_is_thinned_without_losing_a_spike() -> None:
    points = [(float(step), 1.0) for step in range(50_000)]
    points[31_415] = (31_415.0, 9.0)
    html = chart("x", [Series("y", points)])
    (line,) = re.findall(r'points="([^"]*)"', html)
    assert len(line.split()) <= 1000
    heights = {float(pair.split(",")[1]) for pair in line.split()}
    assert len(heights) == 2, "the spike is there"
