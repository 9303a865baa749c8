"""Reads and checks the values of options as a user wrote them.

In: an entry of ``options=``, or the text of a variable. Out: the value, or a ValueError
that says what to write instead. Never: knows which option it reads; ``config`` does.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fxpar import _torch

# Takes what the user wrote, text or not, and returns the value; raises ValueError.
Reader = Callable[[Any], Any]


def nearest(word: str, words: Iterable[str]) -> str:
    """Return the known word most like ``word``, as ``did you mean 'mesh'?``, or ""."""
    close = difflib.get_close_matches(word, list(words), n=1)
    return f"did you mean {close[0]!r}?" if close else ""


def choice(*names: str) -> Reader:
    """Return a reader of one of the names."""

    def read(value: Any) -> str:
        if value in names:
            return value
        hint = nearest(str(value), names)
        raise ValueError(f"{hint} use {' or '.join(names)}".strip())

    return read


def level(value: Any) -> int:
    """Read a number from 0 to 4."""
    if str(value) in ("0", "1", "2", "3", "4") and not isinstance(value, bool):
        return int(value)
    raise ValueError("use a number from 0 to 4")


def switch(value: Any) -> bool:
    """Read whether something is on."""
    words = {"1": True, "true": True, "yes": True, "on": True}
    words |= {"0": False, "false": False, "no": False, "off": False}
    try:
        return words[str(value).lower()]
    except KeyError:
        raise ValueError("use 1 or 0") from None


def passes(*every: str) -> Reader:
    """Return a reader of names among ``every``, separated by commas or in a list."""

    def read(value: Any) -> frozenset[str]:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, (list, tuple, set, frozenset)) or not all(
            isinstance(part, str) for part in parts
        ):
            raise ValueError("use names separated by commas")
        names = [part.strip() for part in parts if part.strip()]
        for name in names:
            if name not in every:
                hint = nearest(name, every)
                raise ValueError(f"{hint} passes are {', '.join(every)}".strip())
        return frozenset(names)

    return read


def text(value: Any) -> str:
    """Read text, or a path."""
    if isinstance(value, (str, os.PathLike)):
        return os.fspath(value)
    raise ValueError("use text")


def file(value: Any) -> str:
    """Read the path of a file that is there."""
    path = text(value)
    if not Path(path).is_file():
        raise ValueError("there is no such file")
    return path


def hints(value: Any) -> Any:
    """Read hints in a mapping, or the path of a file of them."""
    return value if isinstance(value, Mapping) else file(value)


# Settings of Inductor that fxpar itself sets, or its passes need, and to what.
_SET_BY_FXPAR = {
    "fallback_by_default": False,
    "freezing": False,
    "joint_custom_pre_pass": None,
    "reorder_for_locality": False,
    "reorder_for_peak_memory": False,
    "selective_decompose": False,
    "use_joint_graph_passes": True,
}


def inductor(value: Any) -> tuple[tuple[str, Any], ...]:
    """Read settings of Inductor by name: those of a mode, or each as it is given."""
    if isinstance(value, str):
        value = choice(*_torch.inductor.modes())(value)
        value = _torch.inductor.modes()[value]
    if not isinstance(value, Mapping):
        raise ValueError("use a mode of torch.compile, or a mapping of settings")
    types, chosen = _torch.inductor.setting_types(), {}
    for written, setting in value.items():
        name = str(written).replace("-", "_")
        if name not in types:
            hint = nearest(name, types) or "torch._inductor.list_options() has them"
            raise ValueError(f"Inductor has no setting {name!r}: {hint}")
        if _SET_BY_FXPAR.get(name, setting) != setting:
            raise ValueError(
                f"fxpar needs {name}={_SET_BY_FXPAR[name]!r}: leave it out"
            )
        if not isinstance(setting, (bool, int, float, str, type(None))):
            raise ValueError(
                f"{name!r} takes a number, a text, True, False or None here"
            )
        if isinstance(types[name], type) and not isinstance(setting, types[name]):
            raise ValueError(f"{name!r} takes a {types[name].__name__}")
        chosen[name] = setting
    return tuple(sorted(chosen.items()))


def positive(value: Any) -> float:
    """Read a number above 0."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if not 0 < number < math.inf:  # nor is NaN
        raise ValueError("use a number above 0")
    return number


def count(value: Any) -> int:
    """Read a whole number from 1 on."""
    digits = str(value)
    if isinstance(value, bool) or not digits.isdecimal() or int(digits) < 1:
        raise ValueError("use a whole number from 1 on")
    return int(digits)


def share(value: Any) -> float:
    """Read a number from 1 on."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if not 1 <= number < math.inf:
        raise ValueError("use a number from 1 on, or leave it out")
    return number


_DTYPES = ("float64", "float32", "bfloat16", "float16")


def dtype(value: Any) -> str:
    """Read the name of a floating-point dtype; ``torch.`` may be before it."""
    name = str(value).removeprefix("torch.")
    if name in _DTYPES:
        return name
    hint = nearest(name, _DTYPES)
    raise ValueError(f"{hint} use {', '.join(_DTYPES)}".strip())


def mesh(value: Any) -> Any:
    """Read text, a Mesh or a DeviceMesh: both have one of these attributes."""
    if isinstance(value, str) or any(
        hasattr(value, name) for name in ("axes", "mesh_dim_names")
    ):
        return value
    raise ValueError('write axes as "dp=2,tp=4", or pass a DeviceMesh')


def plan(value: Any) -> str:
    """Read how to plan, or the path of a saved plan."""
    modes = ("propagate", "replicate", "search")
    word = text(value)
    if word in modes or Path(word).exists():
        return word
    hint = nearest(word, modes) or "there is no such file:"
    raise ValueError(f"{hint} use search, propagate, replicate or a saved plan file")
