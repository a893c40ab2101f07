"""The compiler: what it is asked to do otherwise while something is recorded, and how recorders hear that it begins."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import types
import weakref
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from hookstore.errors import UnsupportedModelError
from hookstore.operators import LAYERS

_log = logging.getLogger("hookstore")
_GUARDS = "skip_nnmodule_hook_guards"


_followers: weakref.WeakSet[Any] = weakref.WeakSet()  # what has a method `pin`


def follow(follower: Any) -> None:
    """Have ``follower.pin()`` called when a compilation begins, as long as it lives."""
    _keep_out()
    _followers.add(follower)
    meet_compiler()


class _Changes(NamedTuple):
    """What has been changed of the compiler's settings: for how many layers, and whether for edits; what they were, and what they are."""

    num_layers: int = 0
    has_edits: bool = False
    before: Mapping[str, Any] = MappingProxyType({})
    by_us: Mapping[str, Any] = MappingProxyType({})


_UNCHANGED = _Changes()


class Settings:
    """What the compiler is asked to do otherwise while something is recorded or edited, and its settings from before.

    It leaves out guards on hooks by default: graphs belong to code, and that of one model would serve its twin. With them blocks of one class that are
    compiled one by one (``for block in blocks: block.compile()``) have each a graph of its own, where without hooks they share one: the compiler must not
    give up as many graphs earlier.

    Torch keeps what is set for each thread by itself, earlier versions for all of them, and what has been changed is noted likewise. A thread that records
    and edits nothing itself is met when it begins to compile, and has its own settings back when it does so after the end.
    """

    _edits: weakref.WeakSet[Any] = weakref.WeakSet()  # noqa: RUF012  # there is only one
    _of_thread: ContextVar[_Changes] = ContextVar("hookstore.compiler.Settings", default=_UNCHANGED)
    _of_all = _UNCHANGED

    @classmethod
    def turn(cls) -> None:
        """Have them set, on this thread, for what is recorded and edited now."""
        settings: Any = sys.modules.get("torch._dynamo.config")
        if settings is None or not hasattr(settings, _GUARDS):
            return
        is_of_thread = isinstance(getattr(settings._config.get(_GUARDS), "user_override", None), ContextVar)
        changes = cls._of_thread.get() if is_of_thread else cls._of_all
        num_layers, has_edits = len(LAYERS), bool(cls._edits)
        if (num_layers, has_edits) == changes[:2]:
            return
        for name, value in changes.by_us.items():
            if getattr(settings, name) == value:  # otherwise the user has set it meanwhile
                setattr(settings, name, changes.before[name])
        by_us: dict[str, Any] = {_GUARDS: False} if num_layers or has_edits else {}
        if num_layers:
            by_us |= {name: getattr(settings, name) * (1 + num_layers) for name in ("recompile_limit", "accumulated_recompile_limit")}
        changes = _Changes(num_layers, has_edits, {name: getattr(settings, name) for name in by_us}, by_us)
        for name, value in by_us.items():
            setattr(settings, name, value)
        if is_of_thread:
            cls._of_thread.set(changes)
        else:
            cls._of_all = changes

    @classmethod
    def begin_edit(cls, edit: Any) -> None:
        """Have guards as long as there is this edit; imports the compiler, which takes a second, since none may be missing in what it compiles first."""
        importlib.import_module("torch._dynamo.config")
        _keep_out()
        weakref.finalize(edit, cls.turn).atexit = False  # (before the set hears of it: the last one told is called first)
        cls._edits.add(edit)
        meet_compiler()

    @classmethod
    def end_edit(cls, edit: Any) -> None:
        """Have no guards for this edit any more."""
        cls._edits.discard(edit)
        cls.turn()


class Traced:
    """Whether any hook has been traced."""

    is_any = False


def compiling_begins(*_arguments: object) -> None:
    """Have all followers make ready, and refuse what cannot be recorded; called when the compiler begins, with whatever it tells."""
    Settings.turn()
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
    Settings.turn()
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
