"""Keeps Inductor from making texts that nothing reads.

In: Inductor as it is imported, and as it compiles. Out: the same code, in less time.
Never: leaves out a text that is logged or traced.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import fx

from fxpar._fast.switch import shortcut


@shortcut
@contextlib.contextmanager
def unread_texts() -> Iterator[None]:
    """Write no graphs down for traces (``TORCH_TRACE``) inside if none is taken: torch
    (2.13) writes the texts first, and only then asks whether one is. Logs, which ask
    first, and files for compilations that fail are unchanged."""
    from torch._dynamo import config
    from torch._logging._internal import trace_log

    write = fx.GraphModule.print_readable

    def print_readable(self: Any, *args: Any, **kwargs: Any) -> str:
        # The options that only the texts for traces are made with.
        for_traces = kwargs.keys() & {"expanded_def", "fast_sympy_print"}
        is_shown = kwargs.get("print_output", True)
        return "" if for_traces and not is_shown else write(self, *args, **kwargs)

    if trace_log.handlers:
        yield
        return
    with contextlib.ExitStack() as stack:
        patch = mock.patch.object
        stack.enter_context(patch(fx.GraphModule, "print_readable", print_readable))
        repro = sys.modules.get("torch._dynamo.repro.after_aot")
        if repro is not None and not config.repro_after:
            stack.enter_context(patch(repro, "save_graph_repro"))
        yield


@shortcut
def late_templates() -> contextlib.AbstractContextManager[Any]:
    """Return a context for an import of Inductor in which templates of kernels are made
    from their text when they are first read: torch (2.13) makes all at once, for GPUs
    alone, which is half of the time of the import."""
    from torch._inductor.codegen.common import KernelTemplate

    name = "_template_from_string"
    late = functools.partial(_LateTemplate, getattr(KernelTemplate, name))
    return mock.patch.object(KernelTemplate, name, staticmethod(late))


class _LateTemplate:
    """Is a template that is made from its text when something of it is read."""

    def __init__(self, make: Callable[[str], Any], source: str) -> None:
        self._make, self._source = make, source

    @functools.cached_property
    def _template(self) -> Any:
        return self._make(self._source)

    def __bool__(self) -> bool:
        return bool(self._template)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._template, name)
