"""Helpers of ``code_with_names`` in another module."""

from __future__ import annotations

from typing import Any


def read_gamma(config: Any) -> Any:
    """Read a key, and call a function that calls this one."""
    return config.gamma if config else read_theta(config)


def read_theta(config: Any) -> Any:
    """Read a key."""
    return config.theta if config else read_gamma(config)


def read_tau(config: Any) -> Any:
    """Read a key."""
    return config.tau


def read_omega(config: Any) -> Any:
    """Read a key that no code uses."""
    return config.omega
