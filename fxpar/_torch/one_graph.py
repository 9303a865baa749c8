"""Lets Dynamo trace a function as one graph, and reads why it could not.

In: a function and a backend, or an error of Dynamo. Out: the compiled function, or a
reason and a line. Never: a graph break in what is compiled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from fxpar._torch.dynamo import line_in
from fxpar._torch.layer_regions import serve


def compile_as_one(fn: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    """Compile a function into one graph by ``torch.compile``, with a code object of its
    own: Dynamo counts recompilations per code object. Python's floats are constants of
    the graph, and guarded, since otherwise they are read back inside it. Calls of
    loggers are left out of it, since they would break it."""
    import logging
    import types

    from torch._dynamo import config

    own = types.FunctionType(
        fn.__code__.replace(),
        fn.__globals__,
        fn.__name__,
        fn.__defaults__,
        fn.__closure__,
    )
    serve(backend)
    compiled = torch.compile(own, backend=backend, fullgraph=True)

    names = ("debug", "info", "warning", "warning_once", "error", "critical", "log")

    def call(*args: Any, **kwargs: Any) -> Any:
        # Libraries add methods to loggers when they are imported.
        methods = {getattr(logging.Logger, name, None) for name in names} - {None}
        ignored = config.ignore_logging_functions | methods
        settings = {"specialize_float": True, "ignore_logging_functions": ignored}
        with config.patch(settings), _settings_unwritten():
            return compiled(*args, **kwargs)

    return call


def _settings_unwritten() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which Dynamo notes no settings among its metrics: 2.11 sorts
    the functions that it is to ignore, fails, and logs that at length."""
    from torch._dynamo import utils

    if torch.__version__ >= "2.13":
        return contextlib.nullcontext()
    return mock.patch.object(utils, "_get_dynamo_config_for_logging", lambda: None)


def why_not_one_graph(error: BaseException) -> tuple[str, str | None] | None:
    """Return what Dynamo could not trace, by its error, and at which of the user's
    lines; None for other errors."""
    from torch._dynamo import exc

    if not isinstance(error, (exc.Unsupported, exc.UserError)):
        return None
    stack = getattr(error, "real_stack", None) or ()
    return str(error).splitlines()[0], line_in(stack)
