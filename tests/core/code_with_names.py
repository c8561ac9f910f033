"""Functions and classes whose code ``test_code_names`` searches."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime_like.algo import loss as losses
from slime_like.algo.loss import policy_gradient
from slime_like.config.schema.policy import PolicyConfig
from tests.core import code_with_other_names
from tests.core.code_with_other_names import read_gamma, read_tau

KEYS = ("alpha", "beta")
READERS = {"tau": read_tau}


class Base:
    """Base class that reads delta in a property."""

    config: Any

    @property
    def delta(self) -> float:
        """Return a key."""
        return self.config.delta_coef


@dataclass
class Loss(Base):
    """Loss with a helper method."""

    config: PolicyConfig

    def __call__(self, view: Any) -> Any:
        return self._weight() + self.delta

    def _weight(self) -> float:
        return self.config.eps_clip


def reads_attribute(config: Any) -> Any:
    """Read an attribute in a nested function."""

    def loss(view: Any) -> Any:
        return config.alpha * view

    return loss


def reads_by_name(config: Any) -> list[Any]:
    """Read attributes by constants of the module and of the function."""
    return [getattr(config, name) for name in (*KEYS, "zeta")]


def calls_functions(config: Any) -> Any:
    """Call functions of another module of the user."""
    return read_gamma(config) + code_with_other_names.read_theta(config) + READERS["tau"](config)


def calls_policy_gradient(config: Any) -> Any:
    """Wrap a loss of this project."""
    return policy_gradient(config)


def calls_by_module(config: Any) -> Any:
    """Wrap a loss of this project by its module."""
    return losses.cispo(config)


def imports_late(config: Any) -> Any:
    """Import a loss of this project when it is called."""
    from slime_like.algo.loss import gspo

    return gspo(config)


def reads_all(config: Any) -> Any:
    """Read every field."""
    return dataclasses.asdict(config)


def of_closure(key: str) -> Callable[[Any], Any]:
    """Return a function with a captured constant."""

    def read(config: Any) -> Any:
        return getattr(config, key)

    return read


def annotates(config: Any) -> bool:
    """Read nothing, but name the class of the config, and a function of the standard library."""
    return isinstance(config, PolicyConfig) and bool(json.dumps(""))


@functools.cache
def read_cached(config: Any) -> Any:
    """Read an attribute once."""
    return config.iota


class CachedReader:
    """Object with a cached method."""

    @functools.lru_cache(maxsize=1)  # noqa: B019  one instance
    def __call__(self, config: Any) -> Any:
        return config.lambda_


def calls_cached(config: Any) -> Any:
    """Call cached functions."""
    return read_cached(config) + CachedReader()(config)


captured = of_closure("kappa")
partly = functools.partial(reads_by_name)


class AlphaReader:
    """Object that reads in its ``__call__``."""

    def __call__(self, config: Any) -> Any:
        return config.alpha


instance = AlphaReader()
