"""This module reads the options of a compilation.

The fields of ``Options`` are the one table of them: each has its variable, the values
it takes and what it does. An entry of ``options=`` beats the variable, the variable the
default. An empty variable, and an entry that is None, count as not given.

In: an ``options=`` mapping and FXPAR_* variables. Out: an ``Options``. Never: an
unknown name, or a value that an option cannot take, without an OptionError.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from fxpar import _torch
from fxpar.errors import OptionError

PREFIX = "FXPAR_"

# Takes what the user wrote, text or not, and returns the value; raises ValueError.
Reader = Callable[[Any], Any]


def nearest(word: str, words: Iterable[str]) -> str:
    """Return the known word most like ``word``, as ``did you mean 'mesh'?``, or ""."""
    close = difflib.get_close_matches(word, list(words), n=1)
    return f"did you mean {close[0]!r}?" if close else ""


def read_name(names: Sequence[str], value: Any) -> str:
    """Read one of the names."""
    if value in names:
        return str(value)
    hint = nearest(str(value), names)
    raise ValueError(f"{hint} use {' or '.join(names)}".strip())


def read_switch(value: Any) -> bool:
    """Read whether something is on."""
    words = {"1": True, "true": True, "yes": True, "on": True}
    words |= {"0": False, "false": False, "no": False, "off": False}
    try:
        return words[str(value).lower()]
    except KeyError:
        raise ValueError("use 1 or 0") from None


def read_passes(value: Any) -> frozenset[str]:
    """Read names of steps that may be left out, separated by commas or in a list."""
    from fxpar.pipeline import STEPS

    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple, set, frozenset)) or not all(
        isinstance(part, str) for part in parts
    ):
        raise ValueError("use names separated by commas")
    names = [part.strip() for part in parts if part.strip()]
    every = dict.fromkeys(step.name for step in STEPS if step.optional)
    for name in names:
        if name not in every:
            hint = nearest(name, every)
            raise ValueError(f"{hint} passes are {', '.join(every)}".strip())
    return frozenset(names)


def read_text(value: Any) -> str:
    """Read text, or a path."""
    if isinstance(value, (str, os.PathLike)):
        return os.fspath(value)
    raise ValueError("use text")


def read_file(value: Any) -> str:
    """Read the path of a file that is there."""
    path = read_text(value)
    if not Path(path).is_file():
        raise ValueError("there is no such file")
    return path


def read_hints(value: Any) -> Any:
    """Read hints in a mapping, or the path of a file of them."""
    return value if isinstance(value, Mapping) else read_file(value)


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


def read_inductor(value: Any) -> tuple[tuple[str, Any], ...]:
    """Read settings of Inductor by name: those of a mode, or each as it is given."""
    if isinstance(value, str):
        modes = _torch.inductor.modes()
        value = modes[read_name([*modes], value)]
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


def _number(kind: type[float], fits: Callable[[float], bool], use: str) -> Reader:
    """Return the reader of a number; ``use`` says which fit."""

    def read(value: Any) -> float:
        text = str(value)
        with contextlib.suppress(ValueError):
            is_written = kind is float or (text.isascii() and text.isdecimal())
            if is_written and fits(number := kind(text)):
                return number
        raise ValueError(use)

    return read


read_level = _number(int, range(5).__contains__, "use a number from 0 to 4")
read_count = _number(int, lambda n: n >= 1, "use a whole number from 1 on")
read_positive = _number(float, lambda n: 0 < n < math.inf, "use a number above 0")
read_share = _number(
    float, lambda n: 1 <= n < math.inf, "use a number from 1 on, or leave it out"
)


_DTYPES = ("float64", "float32", "bfloat16", "float16")


def read_dtype(value: Any) -> str:
    """Read the name of a floating-point dtype; ``torch.`` may be before it."""
    name = str(value).removeprefix("torch.")
    if name in _DTYPES:
        return name
    hint = nearest(name, _DTYPES)
    raise ValueError(f"{hint} use {', '.join(_DTYPES)}".strip())


def read_mesh(value: Any) -> Any:
    """Read text, a Mesh or a DeviceMesh: both have one of these attributes."""
    if isinstance(value, str) or any(
        hasattr(value, name) for name in ("axes", "mesh_dim_names")
    ):
        return value
    raise ValueError('write axes as "dp=2,tp=4", or pass a DeviceMesh')


def read_plan(value: Any) -> str:
    """Read how to plan, or the path of a saved plan."""
    modes = ("propagate", "replicate", "search")
    word = read_text(value)
    if word in modes or Path(word).exists():
        return word
    hint = nearest(word, modes) or "there is no such file:"
    raise ValueError(f"{hint} use search, propagate, replicate or a saved plan file")


# Variables that no ``options=`` has, since what they say holds for all of a process.
SWITCHES = {
    "FXPAR_FAST": "0: torch is not patched to compile in less time; read once "
    "(default 1)",
}


def _option(
    read: Reader | tuple[str, ...],
    default: Any,
    about: str,
    allowed: str = "0, 1",
    *,
    env: bool = True,
    shared: bool = True,
) -> Any:
    """Return a field of ``Options``. ``read``: its reader, or the names it takes;
    ``allowed``: what it takes, in words. ``shared``: all ranks must have the same
    value."""
    if isinstance(read, tuple):
        allowed, read = ", ".join(read), partial(read_name, read)
    metadata = {"read": read, "values": allowed, "help": about, "env": env}
    metadata["shared"] = shared
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Options:
    """Holds the user's options. ``Options.read`` makes one; ``table`` documents it."""

    mesh: Any = _option(
        read_mesh,
        None,
        "mesh axes and sizes; auto: a search chooses them (4x8: nodes, devices of "
        "each); unset: one axis dp of all ranks",
        "dp=2,tp=4, auto, auto:4x8",
    )
    plan: str = _option(
        read_plan,
        "search",
        "how the sharding is chosen",
        "search, propagate, replicate, file",
    )
    inputs: str = _option(
        ("global", "local"),
        "global",
        "local: each rank feeds its own part of the batch",
    )
    hints: Any = _option(
        read_hints, None, "sharding hints by parameter or value name", "file.toml"
    )
    hardware: str | None = _option(
        read_text,
        None,
        "hardware that costs are computed for: a name, or a file of calibrate; "
        "unset: this device",
        "h100, ..., file",
    )
    measure: bool = _option(
        read_switch,
        True,
        "the first start of several ranks measures their links in two seconds, "
        "where `hardware` is unset; 0: built-in figures",
    )
    schedule: str = _option(
        read_text,
        "auto",
        "edits of compute and collectives after sharding: a schedule's text, or "
        "the file that holds it",
        "auto, none, file",
    )
    tune: bool = _option(
        read_switch,
        False,
        "1: the few best schedules are measured on the mesh, and the fastest is taken; "
        "so are, on GPUs, the ways to run regions of `fuse`",
        env=False,
    )
    microbatches: int | None = _option(
        read_count,
        None,
        "parts that a rank cuts its batch into and computes one after the other; "
        "unset: 1, or with pipeline stages up to 4 for each stage",
        "1, 2, ...",
    )
    pipeline: str = _option(
        (
            "auto",
            "gpipe",
            "1f1b",
            "looped_bfs",
            "interleaved",
            "zero_bubble",
            "interleaved_zero_bubble",
            "zbv",
            "dualpipev",
        ),
        "auto",
        "in which order stages (mesh axis `pp`) compute microbatches; auto: `1f1b` in "
        "a training step, else `gpipe`",
    )
    expert_room: float | None = _option(
        read_share,
        None,
        "rows of experts that a rank has room for, in multiples of its even share; "
        "more are an error; unset: all rows of its group of ranks",
        "1.5, ...",
    )
    expert_exchange: str = _option(
        ("auto", "gather", "all_to_all", "exact"),
        "auto",
        "how tokens reach the experts of other ranks: gather: all tokens are "
        "gathered; all_to_all: each is sent to its expert, into a fixed number "
        "of slots; exact (CPU): each is sent, without empty slots; auto: the "
        "fastest, slots only with expert_room",
    )
    replan: float | None = _option(
        read_share,
        None,
        "where a dynamic size is twice or half of the planned one, plan again, "
        "and take the new plan if it is predicted to be this many times as fast; "
        "unset: never",
        "1.2, ...",
    )
    codegen: str = _option(
        ("inductor", "eager"), "inductor", "eager: run the local graph op by op"
    )
    inductor: tuple[tuple[str, Any], ...] = _option(
        read_inductor,
        (),
        "how Inductor compiles: a mode of `torch.compile`, which `mode=` gives too, or "
        "what its own `options=` takes",
        '"max-autotune", {"max_autotune": True}',
        env=False,
    )
    debug: int = _option(
        read_level,
        0,
        "print 1 the summary, 2 the plan, 3 local graph, 4 all",
        "0 to 4",
        shared=False,
    )
    progress: bool = _option(
        read_switch,
        True,
        "rank 0 prints progress where planning or compiling takes seconds, and "
        "for each graph one line on what it splits and sends; setting "
        "`FXPAR_DEBUG=0` turns both off",
        shared=False,
    )
    dump: str | None = _option(
        read_text,
        None,
        "write every stage of every graph there",
        "directory",
        shared=False,
    )
    disable: frozenset[str] = _option(
        read_passes, frozenset(), "passes to leave out, separated by commas", "names"
    )
    strict: bool = _option(
        read_switch, False, "raise on an op without a rule instead of warning"
    )
    verify: bool = _option(
        read_switch,
        False,
        "simulate all ranks and compare with one device, once per graph; compare "
        "parameters and learning rates of ranks at every call",
    )
    timeout: float = _option(
        read_positive,
        30.0,
        "how long ranks wait for the store, and inside a call for a rank that is idle",
        "seconds",
        shared=False,
    )
    late_timeout: float = _option(
        read_positive,
        600.0,
        "how long ranks wait for a rank that is late for the next call and idle; "
        "after `timeout` one rank prints which rank that is",
        "seconds",
        shared=False,
    )
    param_dtype: str | None = _option(
        read_dtype,
        None,
        "dtype of sharded parameters and inputs in the program, cast before the gather",
        "bfloat16, ...",
        env=False,
    )
    reduce_dtype: str | None = _option(
        read_dtype, None, "dtype gradients are reduced in", "float32, ...", env=False
    )
    reshard_after_forward: bool = _option(
        read_switch, True, "0: gathered parameters are kept for the backward", env=False
    )
    search_seconds: float = _option(
        read_positive,
        30.0,
        "how long a search may solve at most",
        "seconds of work",
        env=False,
    )
    fuse: str = _option(
        ("none", "interpret", "triton"),
        "none",
        "run collectives and the compute around them as one op: by generated "
        "kernels (triton), or op by op to check them (interpret)",
        env=False,
    )
    cache_plans: bool = _option(
        read_switch, True, "0: searched plans are not kept on disk", env=False
    )
    memory: float | None = _option(
        read_positive,
        None,
        "most memory that a searched plan may use on a rank; unset: the "
        "hardware's memory",
        "bytes",
        env=False,
    )
    outputs: str = _option(
        ("global", "dtensor"),
        "global",
        "dtensor: results are DTensors, placed as the plan has them",
        env=False,
    )

    @classmethod
    def read(
        cls,
        options: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> Options:
        """Return the options from an ``options=`` mapping and the environment.

        Raises OptionError on unknown keys, on FXPAR_ variables that do not exist, and
        on values that an option cannot take.
        """
        options_given = {k: v for k, v in (options or {}).items() if v is not None}
        names = [row.name for row in fields(cls)]
        unknown = [key for key in options_given if key not in names]
        if unknown:
            hints = [nearest(str(key), names) for key in unknown]
            raise OptionError(
                f"unknown option {', '.join(map(repr, unknown))}",
                fix=" ".join([*filter(None, hints), f"options are {', '.join(names)}"]),
            )
        _refuse_unknown(environ)
        chosen: dict[str, Any] = {}
        for row in fields(cls):
            variable = _variable(row)
            if row.name in options_given:
                value, where = options_given[row.name], f"option {row.name!r}"
            elif variable and environ.get(variable):
                value, where = environ[variable], variable
            else:
                continue
            try:
                chosen[row.name] = row.metadata["read"](value)
            except ValueError as error:
                raise OptionError(
                    f"{where} cannot be {value!r}", fix=str(error)
                ) from None
        if chosen.get("codegen") == "eager" and chosen.get("inductor"):
            raise OptionError(
                "codegen 'eager' does not run Inductor, and mode= and the option "
                "'inductor' are settings of Inductor",
                fix="leave out mode= or the option 'inductor', or codegen 'eager'",
            )
        if chosen.get("debug") == 0:
            chosen.setdefault("progress", False)
        return cls(**chosen)

    def shared(self) -> dict[str, str]:
        """Return the values that must be equal on all ranks, by name; a file counts by
        its content. The mesh is left out."""
        return {
            row.name: _text_of(getattr(self, row.name))
            for row in fields(self)
            if row.metadata["shared"] and row.name != "mesh"
        }

    def __str__(self) -> str:
        """Return what differs from the defaults, the same text in every process."""
        parts = []
        for row in fields(self):
            value = getattr(self, row.name)
            if value != row.default:
                text = sorted(value) if isinstance(value, frozenset) else value
                parts.append(f"{row.name}={text}")
        return ", ".join(parts)


def variable_of(name: str) -> str | None:
    """Return the variable of an option, or None if it has none."""
    rows = {row.name: row for row in fields(Options)}
    return _variable(rows[name]) if name in rows else None


def _text_of(value: Any) -> str:
    """Return the value of an option, the same text in every process."""
    if isinstance(value, frozenset):
        return ",".join(sorted(value))
    if isinstance(value, str) and os.path.isfile(value):
        with contextlib.suppress(OSError):  # who reads it says so
            content = hashlib.sha256(Path(value).read_bytes()).hexdigest()
            return f"a file ({content[:16]})"
    return str(value)


def _variable(row: Any) -> str | None:
    return PREFIX + row.name.upper() if row.metadata["env"] else None


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    variables = [*map(_variable, fields(Options)), *SWITCHES]
    for name in environ:
        if name.startswith(PREFIX) and name not in variables:
            hint = (
                nearest(name, filter(None, variables))
                or "docs/reference/options.md lists them"
            )
            raise OptionError(f"variable {name} is not one of fxpar's", fix=hint)


def write_dump(path: Path, text: str) -> None:
    """Write a file below the directory of FXPAR_DUMP. Raises OptionError if it cannot
    be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(
            f"{PREFIX}DUMP cannot be written: {error}",
            fix="name a directory that every rank may write to, with room on its disk",
        ) from error


def table() -> str:
    """Return all options as a Markdown table, for the docs."""
    lines = ["| variable | option | values | what it does |", "|---|---|---|---|"]
    for row in fields(Options):
        variable = _variable(row)
        default = row.default
        if isinstance(default, bool):
            default = int(default)
        about = row.metadata["help"]
        if default not in (None, frozenset(), ()):
            about += f" (default {default})"
        cells = [
            f"`{variable}`" if variable else "",
            f"`{row.name}`",
            row.metadata["values"],
            about,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"| `{name}` |  | 0, 1 | {about} |" for name, about in SWITCHES.items()]
    return "\n".join(lines)
