"""A user's own script for the command line: run it whole, or take one call from it."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from typing import Any

from fxpar.errors import OptionError


def run(path: str, arguments: Sequence[str]) -> None:
    """Run a script as ``python path *arguments`` would.

    The script sees its own ``sys.argv`` and directory; both are put back after.
    """
    argv, search = sys.argv[:], sys.path[:]
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    try:
        runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv, sys.path = argv, search


def load(target: str) -> tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]:
    """(function or module, args, kwargs) that ``file.py:function`` returns.

    The function takes nothing; args and kwargs may be left out. Raises OptionError if
    the target cannot be read so.
    """
    path, colon, name = target.rpartition(":")
    form = "give file.py:function; it returns (module, args, kwargs)"
    if not colon or not os.path.isfile(path):
        raise OptionError(f"there is no script {path or target!r}", fix=form)
    search = sys.path[:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    try:
        names = runpy.run_path(path, run_name="fxpar_target")
    finally:
        sys.path = search
    if not callable(names.get(name)):
        raise OptionError(f"{path} has no function {name!r}", fix=form)
    made = names[name]()
    parts = made if isinstance(made, tuple) else (made,)
    if not parts or len(parts) > 3 or not callable(parts[0]):
        raise OptionError(f"{target} returned {type(made).__name__}", fix=form)
    args = parts[1] if len(parts) > 1 else ()
    return parts[0], args, parts[2] if len(parts) > 2 else {}
