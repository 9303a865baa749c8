"""Tells Inductor how to generate code for ops that are fxpar's own.

In: ops that torch.library knows. Out: rows in Inductor's table of lowerings, for ops
that compute (``inductor_lowering``), collectives, sums that may be
written over, calls of torch's own ops, and a rank's part of a value. Never: generates
code itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

OpOverload = torch._ops.OpOverload


def inductor_lowering() -> tuple[Any, Any, Any]:
    """Return Inductor's (register_lowering, Pointwise, ops), which lowerings are made
    of."""
    from torch._inductor.ir import Pointwise
    from torch._inductor.lowering import register_lowering
    from torch._inductor.virtualized import ops

    return register_lowering, Pointwise, ops


def lower_collective(launch: OpOverload) -> None:
    """Let Inductor treat an op that starts a collective like those of its own: until
    the wait it neither frees, reuses nor writes the operand's buffer, and nothing reads
    the result."""
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering
    from torch._inductor.virtualized import V

    @register_lowering(launch, type_promotion_kind=None)
    def lower_launch(x: Any, *args: Any) -> Any:
        # Readers of the result would get a copy in that layout, taken before the wait.
        V.graph.nodes_prefer_channels_last.discard(V.graph.current_node)
        x = ir.ExternKernel.require_contiguous(x)
        collective: Any = ir._CollectiveKernel.create_out_of_place(launch, x, *args)
        return ir.TensorBox.create(collective)


def lower_over_first(op: OpOverload, over: OpOverload, runs: OpOverload) -> None:
    """Let Inductor replace ``op(total, *others)``, where nothing reads the total later,
    by ``over``, which gives the total: a call of ``runs``, which writes over it."""
    from torch._inductor import ir
    from torch._inductor.fx_passes.reinplace import InplaceableOp, inplaceable_ops
    from torch._inductor.lowering import register_lowering
    from torch._inductor.virtualized import V
    from torch.utils._ordered_set import OrderedSet

    class WrittenOver(ir.ExternKernel):
        def __init__(self, total: Any, others: Sequence[Any]) -> None:
            layout = ir.NoneLayout(device=total.get_device())
            super().__init__(None, layout, [total, *others])
            V.graph.mark_buffer_mutated(total.get_name())
            self.name = V.graph.register_buffer(self)
            V.graph.register_operation(self)

        def codegen(self, wrapper: Any) -> None:
            inputs: Any = self.inputs
            operands = ", ".join(x.codegen_reference() for x in inputs)
            wrapper.writeline(f"torch.ops.{runs}({operands})")

        def should_allocate(self) -> bool:
            return False

        def get_mutation_names(self) -> Sequence[str]:
            return [self.input_name(0)]

        def get_unbacked_symbol_defs(self) -> Any:
            return OrderedSet()

    @register_lowering(over, type_promotion_kind=None)
    def lower(total: Any, *others: Any) -> Any:
        total, *summands = map(ir.ExternKernel.realize_input, (total, *others))
        WrittenOver(total, summands)
        return ir.TensorBox(total)

    inplaceable_ops[op] = InplaceableOp(over, 0)


def lower_as_call(op: OpOverload, runs: OpOverload) -> None:
    """Let Inductor turn ``op`` into a call of ``runs``, for which it generates no
    code."""
    from torch._inductor.lowering import fallback_handler, register_lowering

    call = fallback_handler(runs, add_to_fallback_set=False)
    register_lowering(op, type_promotion_kind=None)(call)


def lower_as_copy(op: OpOverload) -> None:
    """Let Inductor compute copies of numbers, made by ``op``, in memory of their own;
    larger copies are calls of the op."""
    from torch._inductor import lowering

    call = lowering.fallback_handler(op, add_to_fallback_set=False)

    @lowering.register_lowering(op, type_promotion_kind=None)
    def lower(x: Any) -> Any:
        if x.get_size():
            return call(x)
        copy = lowering.clone(x)
        copy.realize()
        return copy


def lower_own_shard(
    part: OpOverload, place: OpOverload, count: Callable[[str, str], int], module: str
) -> None:
    """Let Inductor compile ``part(x, dim, size, mesh, axes, stride, base)``, a slice of
    ``size`` rows, and ``place(mesh, axes, stride, base, device)``, a number, that begin
    at ``base + stride * i``: i is what ``own_shard(mesh, axes)`` of ``module`` returns
    when the code runs, less than ``count(mesh, axes)``."""
    import sympy
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering
    from torch._inductor.virtualized import V, ops
    from torch.utils._ordered_set import OrderedSet

    class OwnShard(ir.ExternKernel):
        """Computes a symbol: the shard that this rank holds."""

        def __init__(self, symbol: Any, call: str) -> None:
            layout = ir.NoneLayout(device=torch.device("cpu"))
            super().__init__(None, layout, [])
            self.symbol, self.call = symbol, call

        def get_reads(self) -> Any:
            return OrderedSet()

        def should_allocate(self) -> bool:
            return False

        def get_unbacked_symbol_defs(self) -> Any:
            return OrderedSet([self.symbol])

        def codegen(self, wrapper: Any) -> None:
            wrapper.add_import_once(f"from {module} import own_shard")
            wrapper.writeline(f"{self.symbol} = {self.call}")
            wrapper.unbacked_symbol_decls.add(str(self.symbol))

    def shard(mesh: str, axes: str) -> Any:
        symbols: dict[Any, Any] = V.graph.__dict__.setdefault("_fxpar_shards", {})
        if (mesh, axes) not in symbols:
            environment = V.graph.sizevars.shape_env
            with environment.ignore_fresh_unbacked_symbols():
                symbol = environment.create_unbacked_symint().node.expr
            environment.constrain_symbol_range(symbol, 0, count(mesh, axes) - 1)
            kernel = OwnShard(symbol, f"own_shard({mesh!r}, {axes!r})")
            kernel.name = V.graph.register_buffer(kernel)
            V.graph.register_operation(kernel)
            symbols[mesh, axes] = symbol
        return symbols[mesh, axes]

    @register_lowering(part, type_promotion_kind=None)
    def lower_part(
        x: Any, dim: int, size: int, mesh: str, axes: str, stride: int, base: int
    ) -> Any:
        start = base + stride * shard(mesh, axes)
        view = ir.SliceView.create(x.data, dim, start, start + size, clamp=False)
        return ir.TensorBox(view)

    @register_lowering(place, type_promotion_kind=None)
    def lower_place(mesh: str, axes: str, stride: int, base: int, device: Any) -> Any:
        at = sympy.sympify(base + stride * shard(mesh, axes))
        return ir.Pointwise.create(
            device=device,
            dtype=torch.int64,
            inner_fn=lambda _: inductor_integer(ops, at, torch.int64),
            ranges=[],
        )


def inductor_integer(ops: Any, value: Any, dtype: torch.dtype) -> Any:
    """Return a value of Inductor's for an integer that is known when it compiles."""
    from torch._inductor.ops_handler import OpsHandler

    # 2.11 has one op for both; in 2.13 that for indices may give it fewer bits.
    name = "value_expr" if hasattr(OpsHandler, "value_expr") else "index_expr"
    return getattr(ops, name)(value, dtype)
