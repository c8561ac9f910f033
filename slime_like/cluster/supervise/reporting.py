"""Write report.html at the end of a run; a failure does not fail the run."""

from __future__ import annotations

from pathlib import Path

from slime_like.cluster.supervise.crash import one_line
from slime_like.report.record import METRICS

NOTHING_LOGGED = "nothing was logged yet"


def try_report(run_dir: Path) -> tuple[Path | None, str]:
    """Write the report; return its path and an empty text, or None and the reason why there is none.

    The report's modules are imported here, because importing them takes half as long as the whole start of a driver.
    """
    if not (run_dir / METRICS).is_file() or not (run_dir / METRICS).stat().st_size:
        return None, NOTHING_LOGGED
    try:
        from slime_like.report.write import write_report

        return write_report(run_dir), ""
    except Exception as error:  # noqa: BLE001  fault boundary: keeps the run's own result
        return None, one_line(error)
