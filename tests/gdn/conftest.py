"""Fixtures shared with the configuration tests."""

from tests.config.conftest import argv, data, model

__all__ = ["argv", "data", "model"]
