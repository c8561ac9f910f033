"""``report.html`` in a run's folder, at its end or while it goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from slime_like.data.tokenizer import open_tokenizer
from slime_like.report.record import RunRecord, read_record
from slime_like.report.run_page import run_page, tokenizer_folder
from slime_like.report.samples import sampled_rollouts

REPORT = "report.html"


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the report of a run's folder, whole or not at all; returns its path.

    Raises ``DataError`` where the folder is not a run's, or holds what cannot be read.
    """
    record = read_record(run_dir)
    sampled = sampled_rollouts(run_dir / "rollouts")
    html = run_page(record, sampled, decoder(record) if sampled else _numbers)
    path = out or run_dir / REPORT
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(html, encoding="utf-8", errors="backslashreplace")
    partial.replace(path)
    return path


def decoder(record: RunRecord) -> Callable[[Sequence[int]], str]:
    """Token ids -> text by the run's tokenizer; their numbers where it is no longer there."""
    folder = tokenizer_folder(record)
    if folder is None or not Path(folder).is_dir():
        return _numbers
    try:
        return open_tokenizer(folder).decode
    except (OSError, ValueError, KeyError):  # a tokenizer that cannot be opened any more costs the text, not the report
        return _numbers


def _numbers(token_ids: Sequence[int]) -> str:
    return "".join(f"<{token_id}>" for token_id in token_ids)
