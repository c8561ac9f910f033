"""The fixtures of the configuration's tests serve the selector's as well."""

from tests.config.conftest import argv, data, model

__all__ = ["argv", "data", "model"]
