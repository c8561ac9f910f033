"""Write ``report.html`` into a run's folder, during or after the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from slime_like.checkpoint.files import replacing
from slime_like.data.tokenizer import open_tokenizer
from slime_like.report.record import RunRecord, read_record
from slime_like.report.run_page import run_page, tokenizer_folder
from slime_like.report.samples import sampled_rollouts

REPORT = "report.html"


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the report of a run's folder atomically to ``out``, by default report.html in the folder. Return its path.

    Raises ``DataError`` as ``read_record``, ``sampled_rollouts`` and ``run_page`` do, and ``OSError`` if the report cannot be
    written.
    """
    record = read_record(run_dir)
    sampled = sampled_rollouts(run_dir / "rollouts")
    html = run_page(record, sampled, decoder(record) if sampled else _ids_as_text)
    path = out or run_dir / REPORT
    with replacing(path) as scratch:
        scratch.write_text(html, encoding="utf-8", errors="backslashreplace")
    return path


def decoder(record: RunRecord) -> Callable[[Sequence[int]], str]:
    """Return the decode function of the run's tokenizer, or one that returns ids as text if the tokenizer cannot be opened."""
    folder = tokenizer_folder(record)
    if folder is None or not Path(folder).is_dir():
        return _ids_as_text
    try:
        return open_tokenizer(folder).decode
    except (OSError, ValueError, KeyError):  # an unreadable tokenizer must not prevent the report
        return _ids_as_text


def _ids_as_text(token_ids: Sequence[int]) -> str:
    return "".join(f"<{token_id}>" for token_id in token_ids)
