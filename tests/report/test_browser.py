"""Pages in a real browser, if the machine has one: no console message, no request."""

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

__all__ = ["run"]  # fixture: a run whose texts are all hostile
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def browser() -> Path:
    path = find_browser()
    if path is None:
        pytest.skip(
            f"no browser on PATH, none of Playwright's, no {VARIABLE}; test_report.py reads the pages without one"
        )
    return path


def test_the_report_has_no_console_message_and_no_request(browser: Path, run: Path) -> None:
    visit = look(browser, write_report(run))
    assert (visit.complaints, visit.loaded_urls) == ((), ())
    assert visit.png.startswith(PNG) and visit.height > 2000
    assert look(browser, run / "report.html", at="Sampled tokens").png != visit.png


def test_a_comparison_has_no_console_message_and_no_request(browser: Path, run: Path, tmp_path: Path) -> None:
    other_run = write_run(tmp_path / "other", [{"rollout/raw_reward": 0.25}] * 3)
    page = tmp_path / "compare.html"
    page.write_text(html_page(compare(read_record(run), read_record(other_run), relative=0.0, absolute=0.0), []))
    visit = look(browser, page)
    assert (visit.complaints, visit.loaded_urls) == ((), ())


def test_a_bad_page_is_detected(browser: Path, tmp_path: Path) -> None:
    """The page has a request and script errors."""
    page = tmp_path / "bad.html"
    page.write_text("<img src='http://127.0.0.1:9/x.png'><script>console.error('oh'); nowhere()</script>")
    visit = look(browser, page)
    assert visit.loaded_urls == ("http://127.0.0.1:9/x.png",)
    assert "oh" in visit.complaints and any("Uncaught" in text for text in visit.complaints)
