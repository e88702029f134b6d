"""The program in which a reward function runs apart from the trainer.

Started as ``python -m grpox.rollout.rewards.worker``.
It builds the function from a `RewardSpec`, then answers each `RewardRequest` with a `Reply`, until the trainer
ends.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import pkgutil
import sys
from typing import Any

from grpox.data.reward_signature import Signature
from grpox.errors import ConfigError, Problem, describe, traceback_of
from grpox.plugins.component import BoundComponent
from grpox.plugins.component_state import NotPlain, attribute_hashes, plain_state
from grpox.plugins.discovery import PluginSet
from grpox.plugins.load_object import load_object
from grpox.plugins.optional_methods import is_stateless, methods_of, statistics_of
from grpox.plugins.registry import Registry
from grpox.rollout.rewards.call import CallFailed, called, defined_at, failure_by
from grpox.rollout.rewards.lists import ListShape
from grpox.rollout.rewards.messages import ATTRIBUTES, WHERE, Ready, Reply, RewardRequest, RewardSpec
from grpox.runtime.setup import seed_libraries
from grpox.runtime.workers import flush_output, serving_parent


def main() -> None:
    """Build, then answer. The first argument is the file descriptor that stacks are written to."""
    own, stacks = os.getpid(), int(sys.argv[1])
    with serving_parent() as trainer:
        faulthandler.enable(stacks, all_threads=False)
        faulthandler.register(WHERE, stacks, all_threads=False)
        function, ready = _built(trainer.recv())
        trainer.send(ready)
        while function is not None:
            message = _answer(function, trainer.recv())
            if os.getpid() != own:  # the function forked, and this is the child
                os._exit(0)
            flush_output()
            trainer.send_bytes(message)


def _built(blueprint: RewardSpec) -> tuple[Any, Ready]:
    """Build the function; return it, or None with the problems."""
    sys.path[:] = blueprint.import_path
    try:
        load = load_object if blueprint.from_file else pkgutil.resolve_name
        target = load(blueprint.target)
        config = pickle.loads(blueprint.config)
        bound = BoundComponent("reward", blueprint.label, blueprint.key, lambda: target, config)
        function = Registry(PluginSet()).build(bound)
        _use_device(blueprint.device)
    except ConfigError as error:
        return None, Ready(tuple(error.problems))
    except BaseException as error:  # noqa: BLE001 - whatever the user's module raises is reported
        what = f"reward '{blueprint.label}' cannot be built: {describe(error)}"
        return None, Ready((Problem(what, blueprint.key),))
    try:
        lists = ListShape.of(function)
    except ValueError as error:
        return None, Ready((Problem(f"reward '{blueprint.label}' {error}", blueprint.key),))
    return function, Ready(
        (),
        Signature.of(function),
        defined_at(function),
        methods_of(function),
        statistics_of(function),
        is_stateless(function),
        lists,
    )


def _answer(function: Any, request: RewardRequest) -> bytes:
    """Make a call; return its outcome, pickled."""
    try:
        reply = Reply(_value(function, request))
    except CallFailed as error:
        reply = Reply(failure=str(error), trace=traceback_of(error.__cause__) if error.__cause__ else "")
    except NotPlain as error:
        reply = Reply(failure=str(error))
    except BaseException as error:  # noqa: BLE001 - whatever the user's method raises is reported
        reply = Reply(failure=f"raised {describe(error)} in {request.method}", trace=traceback_of(error))
    try:
        return pickle.dumps(reply)
    except BaseException as error:  # noqa: BLE001 - whatever a user's object raises
        what = f"logged by log_extra what cannot be pickled ({describe(error)}), as its own process needs"
        return pickle.dumps(Reply(failure=what))


def _value(function: Any, request: RewardRequest) -> Any:
    if request.method == ATTRIBUTES:
        return attribute_hashes(function)
    if request.method:
        value = getattr(function, request.method)(*request.arguments)
        return plain_state(value) if request.method == "state_dict" else None
    seed_libraries(request.seed)
    try:
        return called(function, request.arguments, request.count, request.lengths)
    except KeyboardInterrupt as error:  # the function's own: this process is in no terminal's foreground
        raise failure_by(error, function, request.arguments) from error


def _use_device(index: int | None) -> None:
    """Make the rank's GPU the current one once the function first uses CUDA.

    Setting it now would allocate CUDA's context, about half a GiB of the GPU, also for a function that never
    uses it.
    """
    torch = sys.modules.get("torch")  # where the function has not imported it, it needs no device
    if index is not None and torch is not None:
        torch.cuda._lazy_call(lambda: torch.cuda.set_device(index))


if __name__ == "__main__":
    main()
