"""The pages in a real browser, where the machine has one: nothing on its console, nothing loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_like.report.comparison import compare
from slime_like.report.comparison_view import html_page
from slime_like.report.record import read_record
from slime_like.report.write import write_report
from tests.report.browser import VARIABLE, find_browser, look
from tests.report.test_compare import write_run
from tests.report.test_report import run

__all__ = ["run"]  # the fixture: a run whose every text is hostile
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def browser() -> Path:
    found = find_browser()
    if found is None:
        pytest.skip(
            f"no browser on PATH, none of Playwright's, no {VARIABLE}; test_report.py reads the pages without one"
        )
    return found


def test_the_report_says_nothing_on_the_console_and_loads_nothing(browser: Path, run: Path) -> None:
    seen = look(browser, write_report(run))
    assert (seen.complaints, seen.loaded) == ((), ())
    assert seen.png.startswith(PNG) and seen.height > 2000
    assert look(browser, run / "report.html", at="Sampled tokens").png != seen.png


def test_nor_does_a_comparison(browser: Path, run: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", [{"rollout/raw_reward": 0.25}] * 3)
    page = tmp_path / "compare.html"
    page.write_text(html_page(compare(read_record(run), read_record(other), relative=0.0, absolute=0.0), []))
    seen = look(browser, page)
    assert (seen.complaints, seen.loaded) == ((), ())


def test_a_page_that_loads_or_complains_is_seen_to(browser: Path, tmp_path: Path) -> None:
    """The planted fault."""
    page = tmp_path / "bad.html"
    page.write_text("<img src='http://127.0.0.1:9/x.png'><script>console.error('oh'); nowhere()</script>")
    seen = look(browser, page)
    assert seen.loaded == ("http://127.0.0.1:9/x.png",)
    assert "oh" in seen.complaints and any("Uncaught" in text for text in seen.complaints)
