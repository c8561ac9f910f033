"""Documentation pages: the navigation has every page of docs/, relative links resolve to a file and heading, and YAML parses."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from tests.scripts.shell import ROOT
from tests.scripts.test_locks import pins

docs_links: Any = importlib.import_module("scripts.docs_links")
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("docker/*.md"), *ROOT.glob(".github/*.md")])
LINK = re.compile(r"\]\((?!\w+:)([^)\s#]*)(?:#([^)\s]+))?\)")  # relative: no scheme
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
YAML_BLOCK = re.compile(r"^```ya?ml\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors that forges and mkdocs give the headings of ``page``."""
    headings = re.findall(r"^#+ +(.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def dead(page: Path, text: str) -> Iterator[str]:
    """Yield the links in ``text`` of ``page`` that do not resolve."""
    for target, anchor in LINK.findall(FENCED.sub("", text)):
        to = Path(os.path.normpath(page.parent / target)) if target else page
        if not to.exists() or (anchor and to.suffix == ".md" and anchor not in anchors(to)):
            yield f"{target}#{anchor}" if anchor else target


def in_navigation(entries: list[Any]) -> Iterator[str]:
    """Yield the pages below ``entries`` of ``nav``."""
    for entry in entries:
        if isinstance(entry, str):
            yield entry
        else:
            for below in entry.values():
                yield from in_navigation(below if isinstance(below, list) else [below])


def test_every_page_is_in_the_navigation_once() -> None:
    nav = list(in_navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(nav) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")), "see nav in mkdocs.yml"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    assert list(dead(page, page.read_text())) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_blocks_of_yaml_can_be_parsed(page: Path) -> None:
    for block in YAML_BLOCK.findall(page.read_text()):
        yaml.safe_load(block)


def test_a_dead_link_is_detected() -> None:
    text = "[a](faults.md) [b](fault.md) [c](architecture.md#state) [d](architecture.md#stat) [e](#x) [f](https://a/b)"
    assert list(dead(DOCS / "guard.md", text)) == ["fault.md", "architecture.md#stat", "#x"]


def test_the_site_links_to_pages_and_names_other_files(caplog: pytest.LogCaptureFixture) -> None:
    text = "[one](../../slime_like/loop.py), [two](../guard.md), [three](../../slime_like/none.py)"
    page: Any = SimpleNamespace(file=SimpleNamespace(abs_src_path=str(DOCS / "measurements" / "gdn.md")))
    assert docs_links.on_page_markdown(text, page=page) == "one, [two](../guard.md), three"
    assert [record.getMessage().split(" links to ")[1] for record in caplog.records] == [
        "../../slime_like/none.py, which does not exist"
    ]


def test_the_docs_extra_allows_the_locked_version() -> None:
    extra = re.search(r'"docs": \["(.+?)"\]', (ROOT / "setup.py").read_text())
    assert extra is not None
    assert pins("docs")["mkdocs-material"] in Requirement(extra[1]).specifier
