"""Faster imports: what is switched off comes back, and package names are answered as before."""

from __future__ import annotations

import gc
import importlib.metadata

import pytest

from slime_like.imports import Distributions, heavy_imports


def test_collector_and_metadata_are_as_before_afterwards() -> None:
    before = importlib.metadata.packages_distributions
    with pytest.raises(KeyError), heavy_imports():
        assert not gc.isenabled()
        raise KeyError("an import that fails")
    assert gc.isenabled()
    assert importlib.metadata.packages_distributions is before
    gc.unfreeze()


def test_names_are_answered_as_the_whole_mapping_would() -> None:
    whole, reads = importlib.metadata.packages_distributions(), list[int]()

    def read() -> dict[str, list[str]]:
        reads.append(1)
        return dict(whole)

    found = Distributions(read)
    for name in ("torch", "transformers", "numpy"):
        assert name in found.get(name, [])
    assert not reads, "a name that is its own distribution needs no reading of every package"
    assert found.get("yaml", []) == whole["yaml"] != ["yaml"]
    assert found.get("no_such_module", []) == []
    assert len(reads) == 1
