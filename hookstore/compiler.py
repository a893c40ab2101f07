"""The compiler: what it is asked to do otherwise while something is recorded, and how recorders hear that it begins."""

from __future__ import annotations

import functools
import logging
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from hookstore.errors import UnsupportedModelError
from hookstore.operators import LAYERS

_log = logging.getLogger("hookstore")


_followers: weakref.WeakSet[Any] = weakref.WeakSet()  # what has a method `pin`


def follow(follower: Any) -> None:
    """Have ``follower.pin()`` called when a compilation begins, as long as it lives."""
    _keep_out()
    _followers.add(follower)
    meet_compiler()


class Settings:
    """What the compiler is asked to do otherwise while something is recorded, and its settings from before.

    It leaves out guards on hooks by default: graphs belong to code, and that of one model would serve its twin. With them blocks of one class that are
    compiled one by one (``for block in blocks: block.compile()``) have each a graph of its own, where without hooks they share one: the compiler must not
    give up as many graphs earlier.
    """

    num_layers = 0
    before: dict[str, Any] = {}  # noqa: RUF012  # there is only one
    set_by_us: dict[str, Any] = {}  # noqa: RUF012

    @classmethod
    def turn(cls, *, num_layers: int) -> None:
        """Have them set for what is compiled from now on while so many layers are recorded, or as they were before where there are none."""
        settings: Any = sys.modules.get("torch._dynamo.config")
        if settings is None or num_layers == cls.num_layers or not hasattr(settings, "skip_nnmodule_hook_guards"):
            return
        cls.num_layers = num_layers
        for name, value in cls.set_by_us.items():
            if getattr(settings, name) == value:  # otherwise the user has set it meanwhile
                setattr(settings, name, cls.before[name])
        cls.set_by_us = {}
        if num_layers:
            cls.set_by_us["skip_nnmodule_hook_guards"] = False
            for name in ("recompile_limit", "accumulated_recompile_limit"):
                cls.set_by_us[name] = getattr(settings, name) * (1 + num_layers)
        cls.before = {name: getattr(settings, name) for name in cls.set_by_us}
        for name, value in cls.set_by_us.items():
            setattr(settings, name, value)


class Traced:
    """Whether any hook has been traced."""

    is_any = False


def compiling_begins(*_arguments: object) -> None:
    """Have all followers make ready, and refuse what cannot be recorded; called when the compiler begins, with whatever it tells."""
    autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    if autograd is not None and Traced.is_any and (autograd.compiled_autograd_enabled or autograd.in_compiled_autograd_region):
        raise UnsupportedModelError(
            "hookstore cannot record a compiled model under compiled_autograd, which would lose its gradients; switch it off, or record without torch.compile"
        )
    for follower in list(_followers):
        follower.pin()


def meet_compiler() -> bool:
    """Look whether the compiler has been imported, and be told then what it does; say whether that is new.

    It is never imported here, since that takes seconds and most who record do not compile.
    """
    callbacks = sys.modules.get("torch._dynamo.callback")
    handler = getattr(callbacks, "callback_handler", None)
    if handler is None:
        return False
    Settings.turn(num_layers=len(LAYERS))
    if compiling_begins in handler.start_callbacks:
        return False
    handler.register_start_callback(compiling_begins)
    return True


@functools.cache
def _keep_out() -> None:
    """Have the compiler leave our code alone where it is no part of a graph: hooks that are called between two graphs run as they are."""
    evaluation = torch._C._dynamo.eval_frame
    if not hasattr(evaluation, "_FrameExecStrategy"):
        return
    as_it_is = evaluation._FrameExecStrategy(evaluation._FrameAction.SKIP, evaluation._FrameAction.SKIP)
    pending = [code for module in _own_modules() for thing in vars(module).values() for code in _codes_of(thing, module)]
    while pending:
        code = pending.pop()
        evaluation.set_code_exec_strategy(code, as_it_is)
        pending += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def _own_modules() -> list[types.ModuleType]:
    return [module for name, module in sys.modules.items() if name.startswith(f"{__package__}.")]


def _codes_of(thing: Any, module: types.ModuleType) -> Iterator[types.CodeType]:
    """Yield the code of a function, or of the methods of a class, of the module's own."""
    if isinstance(thing, type) and thing.__module__ == module.__name__:
        for member in vars(thing).values():
            yield from _codes_of(member, module)
    function = getattr(thing, "fget", None) or getattr(thing, "__func__", thing)
    if isinstance(function, types.FunctionType) and function.__module__ == module.__name__:
        yield function.__code__


def has_compiled() -> bool:
    """Say whether there are graphs that have been compiled."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    if frames is None:
        return False
    entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list
    codes = [reference() for reference in getattr(frames.input_codes, "seen", ())]
    return any(code is not None and entries(code) for code in codes)


def discard() -> None:
    """Have compiled everything again when it is called next, since graphs that are there know nothing of hooks that are new."""
    if has_compiled():
        _log.warning(
            "hookstore: torch._dynamo.reset() is called, since graphs that are compiled know nothing of hooks that came or went later; they are compiled again"
        )
        torch._dynamo.reset()
        meet_compiler()
