"""Run a user's own script for the command line, or take one call from it.

In: a path and its arguments, or the name of a factory. Out: the script's effects, or
the function or module to plan with its arguments. Never: a graph compiled for fxpar
when a call is taken.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fxpar import _torch
from fxpar.errors import OptionError

FORM = "give file.py:function or module.path:function, to return (module, args, kwargs)"


def run(path: str, arguments: Sequence[str]) -> None:
    """Run a script as ``python path *arguments`` would.

    The script sees its own ``sys.argv`` and directory; both are put back after. Raises
    OptionError if there is none.
    """
    if not os.path.isfile(path):
        raise OptionError(f"there is no script {path!r}", fix="name a file of Python")
    argv, search = sys.argv[:], sys.path[:]
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    try:
        runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv, sys.path = argv, search


@dataclass(frozen=True)
class PlanTarget:
    """Is a call that is to be planned."""

    function: Callable[..., Any]  # a function or a module
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    grad: bool = False  # whether the script recorded gradients at the call


def load(target: str) -> tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]:
    """Return (function or module, args, kwargs) that a factory returns.

    ``target`` names it: ``file.py:function`` or ``module.path:function``. It takes no
    arguments; args and kwargs may be left out. Raises OptionError if the target cannot
    be read so; errors of the user's code are passed on.
    """
    place, _, name = target.rpartition(":")
    if not place:
        raise OptionError(f"{target!r} names no function", fix=FORM)
    factory = _names(place).get(name)
    if not callable(factory):
        raise OptionError(f"{place} has no function {name!r}", fix=FORM)
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise OptionError(f"{target} must take nothing: {error}", fix=FORM) from None
    call_parts = factory()
    parts = call_parts if isinstance(call_parts, tuple) else (call_parts,)
    kinds: list[Any] = [Callable, (tuple, list), Mapping]
    fits = (isinstance(*pair) for pair in zip(parts, kinds, strict=False))
    if not 0 < len(parts) <= 3 or not all(fits):
        types = ", ".join(type(part).__name__ for part in parts)
        raise OptionError(f"{target} returned ({types})", fix=FORM)
    call = PlanTarget(*parts)
    return call.function, call.args, call.kwargs


def _names(place: str) -> Mapping[str, Any]:
    """Return what a file or module defines. Raises OptionError if there is none."""
    is_file = place.endswith(".py") or os.path.sep in place
    if is_file and not os.path.isfile(place):
        raise OptionError(f"there is no script {place!r}", fix=FORM)
    search = sys.path[:]
    folder = os.path.dirname(os.path.abspath(place)) if is_file else os.getcwd()
    sys.path.insert(0, folder)
    try:
        if is_file:
            return runpy.run_path(place, run_name="fxpar_target")
        return vars(importlib.import_module(place))
    except ModuleNotFoundError as error:
        if is_file or not f"{place}.".startswith(f"{error.name}."):
            raise  # one that the user's code imports
        raise OptionError(f"there is no module {place!r}", fix=FORM) from None
    finally:
        sys.path = search


class _Stopped(BaseException):  # not an Exception, which the script may catch
    """Ends a script at the call it was run for."""


def first_call(path: str, arguments: Sequence[str]) -> PlanTarget:
    """Run a script up to the first call of what it compiled with backend "fxpar".

    Neither that call nor anything after it is run, and no graph is compiled for fxpar.
    Raises OptionError if there is no such script or no such call, SystemExit if the
    script ends with an error.
    """
    if not os.path.isfile(path):
        raise OptionError(f"there is no script {path!r}", fix=FORM)
    targets: list[PlanTarget] = []
    compile_ = torch.compile

    def catching(function: Callable[..., Any], called: Callable[..., Any]) -> Any:
        @functools.wraps(called)
        def call(*args: Any, **kwargs: Any) -> Any:
            if targets:  # the script has ended, and this is planned
                return called(*args, **kwargs)
            targets.append(PlanTarget(function, args, kwargs, torch.is_grad_enabled()))
            raise _Stopped

        return call

    def compiled(model: Any = None, **options: Any) -> Any:
        if options.get("backend") != "fxpar":
            return compile_(model, **options)
        if model is None:
            return functools.partial(compiled, **options)
        if isinstance(model, nn.Module):
            wrapper: Any = compile_(model, backend="eager")
            wrapper.forward = catching(model, model)
            return wrapper
        # nn.Module.compile hands in a method that is not the user's.
        owner: Any = getattr(model, "__self__", None)
        inplace = isinstance(owner, nn.Module) and model == _torch.objects.inplace_call(
            owner
        )
        return catching(owner if inplace else model, model)

    torch.compile = compiled
    try:
        run(path, arguments)
    except _Stopped:
        pass
    except SystemExit as ended:
        if ended.code:
            raise
    finally:
        torch.compile = compile_
    if not targets:
        what = f'{path} calls nothing that it compiled with backend="fxpar"'
        raise OptionError(what, fix=FORM)
    return targets[0]
