"""Checks of self-contained pages: well nested, no external resource, no script."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "link", "br", "hr", "input"}
LOADING = {"script", "img", "iframe", "object", "embed", "link", "base", "form", "video", "audio", "source"}


class ParsedPage(HTMLParser):
    """Tags, attributes and text of a page. Asserts that every tag is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def check_self_contained(html: str) -> ParsedPage:
    """Assert that ``html`` loads nothing and runs nothing; return the parsed page."""
    page = ParsedPage(html)
    assert not LOADING & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "style", "srcset")]
    assert not [value for name, value in page.attributes if name == "href" and not value.startswith("#")]
    assert "default-src 'none'" in dict(page.attributes).get("content", "") or any(
        "default-src 'none'" in value for _, value in page.attributes
    )
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style and "@import" not in style
    return page
