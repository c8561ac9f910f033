"""What a self-contained page must be: well nested, nothing loaded, nothing executed."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "link", "br", "hr", "input"}
LOADING = {"script", "img", "iframe", "object", "embed", "link", "base", "form", "video", "audio", "source"}


class Page(HTMLParser):
    """Tags, attributes and text of a page; a tag that does not close raises."""

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


def check_self_contained(html: str) -> Page:
    """Assert that ``html`` loads nothing and runs nothing."""
    found = Page(html)
    assert not LOADING & set(found.tags)
    assert not [name for name, _ in found.attributes if name.startswith("on") or name in ("src", "style", "srcset")]
    assert not [value for name, value in found.attributes if name == "href" and not value.startswith("#")]
    assert "default-src 'none'" in dict(found.attributes).get("content", "") or any(
        "default-src 'none'" in value for _, value in found.attributes
    )
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style and "@import" not in style
    return found
