"""Checks of user functions, named by an import path or a name in a table, before any process starts."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime_like.config.schema.policy import AlgoConfig
from slime_like.config.schema.role_algo import PpoConfig
from slime_like.errors import ConfigError
from slime_like.registry import is_shipped, resolve
from slime_like.util.returned import may_be_filter_result, returns_of
from slime_like.util.user_code import check_signature, describe, location


@dataclass(frozen=True, slots=True)
class FunctionSignature:
    """Required signature of a key's function, of the object that it returns, or of a method of that object."""

    call: str  # signature as a user writes it
    num_args: int
    is_async: bool = False


SIGNATURES = {
    "rollout.generate": FunctionSignature("async def generate(prompt, engine, seeds, context)", 4, is_async=True),
    "rollout.filters": FunctionSignature("filter(group) -> None or a reason", 1),
    "data.source": FunctionSignature("source(config, context)", 2),
    "metrics.sinks": FunctionSignature("sink(config, context)", 2),
    "run.prepare": FunctionSignature("prepare(config)", 1),
    "algo.loss": FunctionSignature("loss(config)", 1),
    "algo.token_advantage": FunctionSignature("advantage(config)", 1),
    "algo.group_advantage": FunctionSignature("advantage(rewards_G) -> advantages_G", 1),
    "algo.off_policy": FunctionSignature(
        "correction(config, old_logprobs, rollout_logprobs, sequences) -> Correction", 4
    ),
    "algo.kl_loss_type": FunctionSignature("estimator(logprobs_T, ref_logprobs_T) -> kl_T", 2),
    "algo.kl_reward_type": FunctionSignature("estimator(logprobs_T, ref_logprobs_T) -> kl_T", 2),
}
METHODS = {
    "data.source": (
        FunctionSignature("__len__()", 0),
        FunctionSignature("next(num_prompts)", 1),
        FunctionSignature("metrics()", 0),
        FunctionSignature("state()", 0),
        FunctionSignature("load_state(state)", 1),
    ),
    "metrics.sinks": (FunctionSignature("log(step, values, spans)", 3), FunctionSignature("close()", 0)),
}
"""Methods of the object that a key's function returns."""
BOUND = {
    "algo.loss": FunctionSignature("loss(config)(view) -> LossOutput", 1),
    "algo.token_advantage": FunctionSignature("advantage(config)(views, reduce) -> [advantages_T of each view]", 2),
}
"""Signature of the object that a key's function returns for the algorithm's config."""
# Rewards and agents are checked when they are loaded, in reward.check and config.rules.agents.


def check_function(key: str, name: str, table: dict[str, str]) -> None:
    """Raise ``ConfigError`` unless ``name`` is a function or class with the signature in ``SIGNATURES`` for ``key``, if any.

    ``name`` is an import path or a name registered in ``table``. A name registered for code of this project is not
    imported, because a loss imports torch. If a coroutine function is expected and ``name`` is a class, the run constructs
    it with the config group and calls the instance, which must have an async ``__call__``. Any other class must have the
    methods in ``METHODS``. A function is also refused if its source shows that its result is of no use.
    """
    if is_shipped(name, table):
        return
    function = resolve(key, name, table)
    if not callable(function):
        raise ConfigError(
            f"{key}={name!r} is not callable, but of type {type(function).__name__}: name a function or class"
        )
    signature = SIGNATURES.get(key)
    if signature is None:
        return
    if inspect.isclass(function) and signature.is_async:
        check_signature(key, name, function, f"{function.__name__}(config)", 1)
        if not any("__call__" in vars(base) for base in function.__mro__):  # the class's own type has one, too
            raise ConfigError(
                f"{key}={name!r}: its instances cannot be called: add a method __call__ with the signature {signature.call}"
                f"{location(function)}"
            )
        function = function.__call__  # the method of instances
        signature = FunctionSignature(f"{signature.call} of its instances", signature.num_args + 1, is_async=True)
    if inspect.isclass(function):
        check_methods(key, name, function)
    _check(key, name, function, signature)
    _check_returns(key, name, function)


def check_methods(key: str, name: str, target: object) -> None:
    """Raise ``ConfigError`` unless ``target``, an object or its class, has the methods in ``METHODS`` with their signatures."""
    for signature in METHODS.get(key, ()):
        method = getattr(target, signature.call.partition("(")[0], None)
        if not callable(method):
            raise ConfigError(f"{key}={name!r} has no method {signature.call}: add it{location(target)}")
        check_signature(key, name, method, signature.call, signature.num_args + inspect.isclass(target))


def check_bound(key: str, name: str, table: dict[str, str], config: AlgoConfig) -> None:
    """Raise ``ConfigError`` unless the function ``name`` can be called as a component of the algorithm.

    As in ``check_function``, a name registered for code of this project is not imported. A loss or a token advantage is
    constructed from ``config``, as on each rank. A loss must have the bool ``needs_entropy``, and under algo=ppo a token
    advantage must have the method ``returns``.
    """
    check_function(key, name, table)
    if (signature := BOUND.get(key)) is None or is_shipped(name, table):
        return
    function = resolve(key, name, table)
    try:
        constructed = function(config)
    except Exception as error:  # user code may raise anything
        raise ConfigError(
            f"{key}={name!r}: {SIGNATURES[key].call} raised {describe(error)}: correct that line; {SIGNATURES[key].call} must "
            f"return a function, which is called as {signature.call}"
        ) from error
    if not callable(constructed):
        raise ConfigError(
            f"{key}={name!r} returned a {type(constructed).__name__} for {SIGNATURES[key].call}: it must return a callable "
            f"{signature.call}{location(function)}"
        )
    _check(key, name, constructed, signature)
    if key == "algo.loss" and not isinstance(getattr(constructed, "needs_entropy", None), bool):
        raise ConfigError(
            f"{key}={name!r} has no needs_entropy: add a bool of this name to the object that {SIGNATURES[key].call} returns, "
            f"True if the loss reads view.entropy{location(function)}"
        )
    if key == "algo.token_advantage" and isinstance(config, PpoConfig) and not hasattr(constructed, "returns"):
        raise ConfigError(
            f"{key}={name!r} under algo=ppo has no method returns(views), from which the critic learns: add it, or choose "
            f"an algorithm without a critic{location(function)}"
        )


def _check_returns(key: str, name: str, function: Any) -> None:
    """Raise ``ConfigError`` if the source of ``function`` shows that its result is of no use.

    A filter must return None or a word. A function of a key in ``METHODS`` must return an object, so it is refused if it
    returns only None. Functions of other keys are not checked.
    """
    if (returns := returns_of(function)) is None:
        return
    if key == "rollout.filters":
        for line, value in returns.statements:
            if not may_be_filter_result(value):
                raise ConfigError(
                    f"{key}={name!r} returns {ast.unparse(value) if value else None} ({returns.file}:{line}): a filter returns "
                    "None to keep a group, or a word that names the reason for dropping it"
                )
    elif key in METHODS and returns.always_none:
        methods = ", ".join(signature.call for signature in METHODS[key])
        raise ConfigError(
            f"{key}={name!r} returns None: {SIGNATURES[key].call} must return an object with the methods {methods}"
            f"{location(function)}"
        )


def _check(key: str, name: str, function: Callable[..., Any], signature: FunctionSignature) -> None:
    instance_call = getattr(function, "__call__", None)  # noqa: B004  of an instance with an async __call__
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(instance_call)
    if is_async != signature.is_async:
        problem = "is not a coroutine function" if signature.is_async else "is a coroutine function, but is not awaited"
        raise ConfigError(f"{key}={name!r} {problem}: it must be {signature.call}{location(function)}")
    check_signature(key, name, function, signature.call, signature.num_args)
