"""Metadata of the installed package: license and its text."""

from __future__ import annotations

from importlib.metadata import distribution

from tests.scripts.shell import ROOT


def test_the_package_is_licensed_under_apache_2() -> None:
    package = distribution("slime-like")
    assert package.metadata["License-Expression"] == "Apache-2.0"
    assert package.metadata["License-File"] == "LICENSE"
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License\n" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text
    assert package.metadata["Author"] and package.metadata["Description-Content-Type"] == "text/markdown"
