"""Makes Inductor's templates of kernels late.

In: Inductor as it is imported. Out: the same templates, each made when it is read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from fxpar._fast.switch import shortcut


@shortcut
def late_templates() -> AbstractContextManager[Any]:
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
