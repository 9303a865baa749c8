"""Trace a plain call to one ATen graph, on one process, with fake tensors.

In: a function and the arguments of a call. Out: a ``TracedCall``, which knows how the
arguments and results map to the flat tensors of the graph: parameters and buffers of
every module the function uses are graph inputs; with ``grad`` the graph is forward and
backward in one. Nodes carry the user's lines. ``read_signature`` reads the kinds of its
inputs and outputs from AOTAutograd's descriptors. Never: computed values.

Functions of torch that break a graph, or cannot be split, are replaced in a trace, here
(``AsOneGraph``) and in Dynamo's once this module is imported: ``gaussian_nll_loss``,
which checks values, and ``ctc_loss``, which has an op whose sizes depend on data.
``fxpar::ctc(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)``
gives the unreduced loss of each sequence; torch's own op also returns its table of
alignments, as long as the longest target: here the backward computes that table again.
Attention with dropout becomes products, a softmax and a mask of random numbers: kernels
of CUDA draw their masks by the index within the rank's shard, so that each would run
whole on every rank; numbers drawn by global index can be split like any others. On the
CPU, which has no such kernel, torch does the same. Never: a result of data-dependent
size; other numbers or other errors than torch's; a change to attention without dropout.
"""

from __future__ import annotations

import contextlib
import inspect
import linecache
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.distributed.tensor import DTensor
from torch.fx.traceback import (
    get_current_meta,
    preserve_node_meta,
    set_stack_trace,
)
from torch.library import register_autograd
from torch.overrides import TorchFunctionMode

from fxpar import _torch
from fxpar._torch.objects import define_op
from fxpar.errors import PlanError, is_library, warn
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.plan_facts import module_path
from fxpar.sharding.program import Input, Output, Signature, user_line
from fxpar.sharding.spec import Spec

TENSOR = object()  # takes the place of a tensor among the leaves of a result


@dataclass(frozen=True)
class Outcome:
    """Holds what a run of a traced program returns."""

    # As the callable returns it.
    result: Any
    # By parameter or argument name.
    gradients: dict[str, torch.Tensor]
    # New values of buffers, and of arguments changed in place.
    mutations: dict[str, torch.Tensor]


# Features of a program that cannot be in one graph, and one fix for each.
_REFUSED = {
    "value": (
        "reads the value of a tensor in Python",
        "keep it a tensor (no item(), no branch on it: torch.where chooses), or pass "
        "the number as an argument",
    ),
    "shape": (
        "makes a tensor whose shape depends on values",
        "use an op of fixed shape (torch.where and a mask for nonzero), or compute it "
        "before and pass the tensor",
    ),
    "constant": (
        "closes over a tensor that an op of it is computed in",
        "pass the tensor as an argument, or register it as a buffer of a module",
    ),
    "list": (
        "calls an op that changes lists of tensors in place, which cannot be traced",
        "use the op for single tensors: an optimizer with foreach=False, fused=False",
    ),
    "gradient": (
        "accumulates gradients in .grad (it calls backward())",
        "compute them with torch.autograd.grad and return them, an autograd.Function "
        "for parameters it takes as arguments",
    ),
    "grad mode": (
        "asks in a reentrant checkpoint whether gradients are taken, which is no at "
        "first and yes when it is computed again",
        "checkpoint with use_reentrant=False",
    ),
    "sparse": (
        "has a sparse tensor in rows or blocks, which cannot be traced",
        "use dense tensors",
    ),
}


def _users(frames: Iterable[tuple[FrameType, int]]) -> Iterator[tuple[str, int, str]]:
    """Yield file, line and function of the frames of the user's code."""
    for frame, number in frames:
        path = frame.f_code.co_filename
        if not (path.startswith("<") or is_library(path)):  # "<": made from text
            yield path, number, frame.f_code.co_name


def raised_at(error: BaseException) -> str | None:
    """Return the innermost line of the user's code that an error came through."""
    lines = [_line(x, n) for x, n, _ in _users(traceback.walk_tb(error.__traceback__))]
    return lines[-1] if lines else None


def users_line() -> str | None:
    """Return the innermost line of the user's code that is running."""
    places = _users(traceback.walk_stack(sys._getframe(1)))
    return next((_line(path, number) for path, number, _ in places), None)


def _line(path: str, number: int) -> str:
    """Return a line of code with its file and number."""
    return f"{path}:{number}: {linecache.getline(path, number).strip()}"


def _refused(error: BaseException, fn: Callable[..., Any]) -> PlanError | None:
    """Return the error for a program that is not one graph; None for other errors."""
    kind = _torch.aot.untraceable(error)
    if kind is None:
        return None
    what, fix = _REFUSED[kind]
    where = raised_at(error)
    code = getattr(fn, "__code__", None)
    if kind == "constant" and code is not None:  # raised once all is traced
        where = _line(code.co_filename, code.co_firstlineno)
    return PlanError(f"the program {what}", where=where, fix=fix)


# The code of a call of a module.
_CALL = nn.Module.__call__.__code__


class UserLines(TorchFunctionMode):
    """Gives every traced node the user's line that called the torch function, and the
    path of the innermost module in which it was called. ``paths``: those of modules."""

    def __init__(self, paths: dict[nn.Module, str]) -> None:
        super().__init__()
        self.paths = paths

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if torch.compiler.is_dynamo_compiling():  # Dynamo gives the lines of a body
            return func(*args, **(kwargs or {}))
        frames = list(traceback.walk_stack(sys._getframe(1)))
        lines = [
            f'  File "{path}", line {number}, in {name}\n'
            f"    {linecache.getline(path, number).strip()}\n"
            for path, number, name in islice(_users(frames), 8)
        ]
        set_stack_trace(lines[::-1])
        calls = (frame.f_locals["self"] for frame, _ in frames if frame.f_code is _CALL)
        modules = ({"": (self.paths[x], type(x))} for x in calls if x in self.paths)
        get_current_meta()["nn_module_stack"] = next(modules, {})
        return func(*args, **(kwargs or {}))


def modules_of(fn: Callable[..., Any]) -> dict[str, nn.Module]:
    """Return modules a callable is, belongs to, or closes over, by the name it uses."""
    if isinstance(fn, nn.Module):
        return {"": fn}
    modules: dict[str, nn.Module] = {}
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, nn.Module):
        modules[""] = owner
    code = getattr(fn, "__code__", None)
    if code is not None:
        cells = zip(code.co_freevars, fn.__closure__ or (), strict=False)
        names = {name: cell.cell_contents for name, cell in cells}
        scope = fn.__globals__
        names |= {n: scope[n] for n in code.co_names if n in scope}
        modules |= {n: m for n, m in names.items() if isinstance(m, nn.Module)}
    return modules


class _Program(nn.Module):
    """Is the traced callable as a module of flat tensors: tensor arguments in, tensor
    results out, and after them new tensors that it gave buffers. Parameters and buffers
    of all modules it uses are its own, each once, so that a tied weight is one input
    with one gradient."""

    def __init__(self, call: TracedCall, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        self.call = call
        # By the name by which the callable reaches it; "" for the callable itself.
        self.used = modules
        self.names: dict[str, str] = {}
        self.paths: dict[nn.Module, str] = {}
        self.swapped = contextlib.ExitStack()
        for prefix, module in modules.items():
            for name, part in module.named_modules():
                self.paths.setdefault(part, _full(prefix, name))
            for name, parameter in module.named_parameters():
                self.register_parameter(self._key(_full(prefix, name)), parameter)
            for name, buffer in module.named_buffers():
                self.register_buffer(self._key(_full(prefix, name)), buffer)

    def _key(self, name: str) -> str:
        key = f"t{len(self.names)}"
        self.names[key] = name
        return key

    def forward(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        """Run the callable on the traced tensors, and return its tensor results and the
        new tensors of buffers."""
        args, kwargs = self.call.unflatten(tensors)
        self._swap_tensors()
        with UserLines(self.paths):
            result = self.call.fn(*args, **kwargs)
        get_current_meta().pop("nn_module_stack", None)
        leaves, self.call.out_tree = _torch.fake.tree_flatten(result)
        self.call.out_leaves = [
            TENSOR if isinstance(x, torch.Tensor) else x for x in leaves
        ]
        results = [x for x in leaves if isinstance(x, torch.Tensor)]
        reassigned = self._reassigned()
        self.call.reassigned = [*reassigned]
        results += [x.detach() for x in reassigned.values()]
        if self.call.grad:
            results = _as_separate_tensors(results, [*tensors, *self.parameters()])
        return tuple(results)

    def _reassigned(self) -> dict[str, torch.Tensor]:
        """Return the tensors that took the place of buffers in modules, by name."""
        keys = {name: key for key, name in self.names.items()}
        named = (
            (_full(prefix, name), x)
            for prefix, module in self.used.items()
            for name, x in module.named_buffers()
        )
        return {
            name: x
            for name, x in named
            if name in keys and x is not getattr(self, keys[name])
        }

    def _swap_tensors(self) -> None:
        """Put the traced tensors into the modules, until ``swapped`` is closed: the
        backward, which is traced after ``forward`` returns, may call modules too. What
        the program sets in modules is undone then."""
        self.swapped.close()
        for module in self.used.values():
            self.swapped.enter_context(_torch.aot.attributes_kept(module))
        keys = {name: key for key, name in self.names.items()}
        for prefix, module in self.used.items():
            substitutes = {
                name: getattr(self, keys[_full(prefix, name)])
                for name, _ in (*module.named_parameters(), *module.named_buffers())
            }
            self.swapped.enter_context(_torch.aot.reparametrize(module, substitutes))


def _full(prefix: str, name: str) -> str:
    """Return a parameter's name as the user knows it."""
    return f"{prefix}.{name}" if prefix else name


def _as_separate_tensors(
    results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return results as separate tensors, so that each has a gradient of its own: those
    that are views of an input or of an earlier result are copied."""

    def base(x: torch.Tensor) -> int:
        return id(_torch.objects.base_of(x))

    seen = {base(x) for x in inputs}
    separate = []
    for x in results:
        separate.append(x.clone() if base(x) in seen else x)
        seen.add(base(x))
    return separate


class TracedCall:
    """Maps a call's arguments and results to the flat tensors of its graph."""

    def __init__(
        self, fn: Callable[..., Any], args: tuple, kwargs: dict, grad: bool
    ) -> None:
        self.fn, self.grad = fn, grad
        self.leaves, self.tree = _torch.fake.tree_flatten((args, kwargs))
        self.places = [
            i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)
        ]
        self.names = self._argument_names(args, kwargs)
        self.program = _Program(self, modules_of(fn))
        self.out_tree: Any = None
        self.out_leaves: list[Any] = []
        # Names of buffers that the program gives new tensors.
        self.reassigned: list[str] = []
        self.feeds: list[tuple[str, Any, Any]] = []

    @property
    def count(self) -> int:
        """Return the number of tensor arguments."""
        return len(self.places)

    @property
    def result_count(self) -> int:
        """Return the number of tensor results."""
        return sum(leaf is TENSOR for leaf in self.out_leaves)

    def _argument_names(self, args: tuple, kwargs: dict) -> list[str]:
        """Return a name for each tensor argument, from the parameter it is bound to."""
        try:
            fn = self.fn.forward if isinstance(self.fn, nn.Module) else self.fn
            bound = inspect.signature(fn).bind(*args, **kwargs).arguments
        except (TypeError, ValueError):
            bound = {f"arg{i}": a for i, a in enumerate(args)} | kwargs
        name_of: dict[int, str] = {}
        for name, value in bound.items():
            tensors = [
                t for t in _torch.fake.tree_leaves(value) if isinstance(t, torch.Tensor)
            ]
            for i, tensor in enumerate(tensors):
                name_of.setdefault(
                    id(tensor), name if len(tensors) == 1 else f"{name}_{i}"
                )
        return [
            name_of.get(id(self.leaves[i]), f"arg{k}")
            for k, i in enumerate(self.places)
        ]

    def unflatten(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple, dict]:
        """Return args and kwargs of a call, with ``tensors`` in place of its own."""
        leaves = list(self.leaves)
        for i, tensor in zip(self.places, tensors, strict=True):
            leaves[i] = tensor
        return _torch.fake.tree_unflatten(leaves, self.tree)

    def trace(self) -> tuple[fx.GraphModule, Any]:
        """Return the traced graph on fake tensors, flat in and out, and their mode.

        Raises PlanError where the program is not one graph of fixed shapes, or has no
        tensors.
        """
        mode = _torch.fake.fake_mode_of(self.leaves)
        mode = mode or _torch.fake.new_fake_mode(symbols=True)
        tensors = [self.leaves[i] for i in self.places]
        state = dict(self.program.named_parameters())
        any_grad = any(t.requires_grad for t in [*tensors, *state.values()])

        def fake(x: torch.Tensor, needs_grad: bool) -> torch.Tensor:
            if isinstance(x, DTensor):  # the global value, as programs read it
                fake_tensor = torch.empty_strided(
                    x.shape, x.stride(), dtype=x.dtype, device=x.device
                )
            else:
                fake_tensor = _torch.fake.as_fake(x, mode)
            differs = x.is_floating_point() or x.is_complex()
            return fake_tensor.requires_grad_(needs_grad and differs)

        with contextlib.ExitStack() as stack:
            stack.enter_context(mode)
            arguments = tuple(
                fake(t, self.grad and (t.requires_grad or not any_grad))
                for t in tensors
            )
            fakes: dict[str, torch.Tensor] = {
                name: nn.Parameter(fake(p, False), p.requires_grad and self.grad)
                for name, p in state.items()
            }
            for name, buffer in self.program.named_buffers():
                fakes[name] = fake(buffer, False)
            stack.enter_context(_torch.aot.reparametrize(self.program, fakes))
            stack.enter_context(preserve_node_meta())
            stack.enter_context(_torch.aot.as_compiling())
            stack.enter_context(_torch.loops.steps_looked_up(mode))
            stack.enter_context(AsOneGraph())
            stack.enter_context(_torch.aot.refusing_accumulation())
            stack.enter_context(_torch.checkpoints.checkpoints_tagged())
            stack.callback(self.program.swapped.close)
            try:
                module = _torch.aot.export_joint(
                    stack, self.program, arguments, grad=self.grad
                )
            except Exception as error:
                refused = _refused(error, self.fn)
                if refused is None:
                    raise
                raise refused from error
            _torch.inductor.replace_random(module, mode)
        if not any("val" in node.meta for node in module.graph.nodes):
            raise PlanError(
                "the program has no tensors, so that there is nothing to plan",
                fix="give tensors for the arguments of the call: fxpar.plan(model, x, "
                "mesh=...)",
            )
        module.graph.set_codegen(fx.graph.CodeGen())
        module.recompile()
        return module, mode

    def declare(
        self, kind: str, payload: Any, node: fx.Node, specs: Sequence[Spec | None]
    ) -> Input:
        """Return the Input of the next placeholder, and remember what to feed it."""
        value = node.meta.get("val")
        self.feeds.append((kind, payload, value))
        if kind == "input":
            return Input(self.names[payload], kind, specs[payload], use=specs[payload])
        if kind in ("parameter", "buffer"):
            return Input(self.program.names[payload], kind)
        return Input(f"{kind}_{len(self.feeds)}", kind)

    def inputs(self, args: tuple, kwargs: dict) -> list[Any]:
        """Return the values of all placeholders for a call; tangents of results are
        ones, those of inputs that the program writes are zeros.

        Raises PlanError if structure, shapes or dtypes of arguments differ from those
        traced.
        """
        leaves, tree = _torch.fake.tree_flatten((args, kwargs))
        if tree != self.tree:
            raise PlanError(
                "the arguments have another structure than those planned with"
            )
        state = {
            **dict(self.program.named_parameters()),
            **dict(self.program.named_buffers()),
        }
        values: list[Any] = []
        for kind, payload, value in self.feeds:
            if kind == "input":
                argument = leaves[self.places[payload]]
                if argument.shape != value.shape or argument.dtype != value.dtype:
                    raise PlanError(
                        f"argument {self.names[payload]} is {argument.dtype} "
                        f"{list(argument.shape)}, planned with {value.dtype} "
                        f"{list(value.shape)}",
                        fix="plan again for these shapes",
                    )
                values.append(argument.detach())
            elif kind in ("parameter", "buffer"):
                if isinstance(state[payload], DTensor):
                    raise PlanError(
                        f"no rank has all of parameter {self.program.names[payload]}",
                        fix="run a plan of the model made before fxpar.shard",
                    )
                values.append(state[payload].detach())
            elif kind == "state" and payload == "token":
                values.append(torch.empty_like(value, device="cpu"))
            elif kind == "tangent":
                tangent = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=value.device
                )
                of, _ = _torch.aot.descriptor(payload)
                values.append(tangent.fill_(int(of == "output")))
            else:
                raise PlanError(f"cannot run a graph with an input of kind {kind!r}")
        return values

    def outcome(self, signature: Signature, values: Sequence[Any]) -> Outcome:
        """Return flat graph outputs as the user's result, gradients and new buffers."""
        tensors, gradients, mutations, count = {}, {}, {}, self.result_count
        for declared, value in zip(signature.outputs, values, strict=True):
            if declared.kind == "output":
                k = int(declared.name.removeprefix("output_"))
                if k < count:
                    tensors[k] = value
                else:
                    mutations[self.reassigned[k - count]] = value
            elif value is None or declared.of is None:
                continue
            elif declared.kind == "gradient":
                gradients[declared.name] = value
            elif declared.kind == "mutation":
                mutations[declared.name] = value
        flat = iter(tensors[i] for i in sorted(tensors))
        leaves = [next(flat) if leaf is TENSOR else leaf for leaf in self.out_leaves]
        result = _torch.fake.tree_unflatten(leaves, self.out_tree)
        return Outcome(result, gradients, mutations)


aten = torch.ops.aten


# Of ctc: log-probabilities ``[time, batch, classes]``, targets, both lengths, ``blank``
# and ``zero_infinity``.
_CTC = (
    "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, "
    "SymInt blank, bool zero_infinity) -> Tensor"
)


def _table(log_probs: torch.Tensor, targets: torch.Tensor, *how: Any) -> tuple:
    """Return (targets on the device and in the dtype that torch's kernel wants, its
    losses and table)."""
    targets = targets.to(log_probs.device, torch.long)
    return targets, aten._ctc_loss.Tensor(log_probs, targets, *how)


def _ctc(log_probs: torch.Tensor, *how: Any) -> torch.Tensor:
    if not log_probs.shape[1]:
        return log_probs.new_empty(0)
    _, (costs, _) = _table(log_probs, *how)
    return costs


def _ctc_backward(
    grad: torch.Tensor, log_probs: torch.Tensor, targets: torch.Tensor, *how: Any
) -> torch.Tensor:
    if not log_probs.shape[1]:
        return log_probs.new_empty(log_probs.shape)
    targets, table = _table(log_probs, targets, *how)
    *lengths, blank, zero_infinity = how
    return aten._ctc_loss_backward.Tensor(
        grad, log_probs, targets, *lengths, *table, blank, zero_infinity
    ).contiguous()


def _ctc_context(ctx, inputs, output) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)


def _ctc_gradients(ctx, grad: torch.Tensor):
    of_probs = torch.ops.fxpar.ctc_backward(
        grad, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity
    )
    return of_probs, *[None] * 5


def _no_gradients(ctx, grad: torch.Tensor):
    raise NotImplementedError("ctc_loss has no second derivative")


define_op(f"fxpar::ctc({_CTC}", lambda x, *_: x.new_empty(x.shape[1]), _ctc)
define_op(
    f"fxpar::ctc_backward(Tensor grad, {_CTC}",
    lambda _, x, *__: x.new_empty(x.shape),
    _ctc_backward,
)
register_autograd("fxpar::ctc", _ctc_gradients, setup_context=_ctc_context)
register_autograd("fxpar::ctc_backward", _no_gradients)


def gaussian_nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """Return torch's loss, with the check of the variances as an op of the graph."""
    message = "var has negative entry/entries"
    if not isinstance(var, torch.Tensor):
        if var < 0:
            raise ValueError(message)
        var = var * torch.ones_like(input)
    else:
        _torch.dynamo.assert_in_graph(~torch.any(var < 0), message)
    if var.size() != input.size():
        if input.size()[:-1] == var.size():
            var = torch.unsqueeze(var, -1)
        elif input.ndim != var.ndim or not _is_broadcast(input.size(), var.size()):
            raise ValueError("var is of incorrect size")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(reduction + " is not valid")
    var = var.clone()
    with torch.no_grad():
        var.clamp_(min=eps)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return _reduced(loss, reduction)


def _is_broadcast(one: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether sizes differ in a dim of one row, by torch's own test."""
    return sum(y for x, y in zip(one, other, strict=True) if x != y) == 1


def _reduced(loss: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction == "mean":
        return loss.mean()
    return loss.sum() if reduction == "sum" else loss


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Return torch's loss, from an op whose results have fixed sizes."""
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(reduction + " is not a valid value for reduction")
    is_batch = log_probs.dim() == 3
    if not is_batch:
        log_probs = log_probs.unsqueeze(1)
    if log_probs.dtype in (torch.float16, torch.bfloat16):
        log_probs = log_probs.float()
    steps, labels = (
        torch.as_tensor(lengths).reshape(-1)
        for lengths in (input_lengths, target_lengths)
    )
    losses = torch.ops.fxpar.ctc(
        log_probs, targets, steps, labels, blank, zero_infinity
    )
    if zero_infinity:
        losses = torch.where(losses == math.inf, torch.zeros_like(losses), losses)
    if reduction == "mean":
        counts = labels.to(losses.device, losses.dtype).clamp_min(1)
        losses = losses / counts
    return _reduced(losses if is_batch else losses.squeeze(0), reduction)


_INSTEAD: dict[Any, Any] = {
    F.gaussian_nll_loss: gaussian_nll_loss,
    F.ctc_loss: ctc_loss,
}
for _original, _instead in _INSTEAD.items():
    _torch.dynamo.trace_instead(_original, _instead)


_READS = (torch.Tensor.item, torch.Tensor.__bool__)


class AsOneGraph(TorchFunctionMode):
    """Is a mode inside which these losses are those of this module, attention with
    dropout uses no kernel, and a check that all elements of a tensor hold
    (``torch._check_tensor_all``, validation of ``torch.distributions``) is an assertion
    in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.checks: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _torch.dynamo.IS_ALL_TRUE:
            self.checks.append(torch.all(*args))
            return self.checks[-1]
        if func in _READS and any(args[0] is check for check in self.checks):
            _torch.dynamo.assert_in_graph(args[0], "a check of values does not hold")
            return True
        if func is _ATTEND and _has_dropout(args, kwargs or {}):
            func = attend_by_products
        return _INSTEAD.get(func, func)(*args, **(kwargs or {}))


_ATTEND = torch.nn.functional.scaled_dot_product_attention
# Position of ``dropout_p`` among the arguments.
_PLACE = 4


def attend_by_products(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Return ``scaled_dot_product_attention``, computed without its kernels."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        return _ATTEND(*args, **kwargs)


def without_kernels(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a Dynamo graph whose attentions with dropout use no kernel,
    those in bodies included; ``gm`` itself if there are none."""
    if not any(map(_calls, _graphs(gm))):
        return gm
    copy = _torch.dynamo.copy_graph(gm)
    copy.meta = dict(gm.meta)
    for module in _graphs(copy):
        for node in _calls(module):
            node.target = attend_by_products
        module.recompile()
    return copy


def warn_of_products(gm: fx.GraphModule, device_types: Iterable[str]) -> None:
    """Warn that attention of a graph from ``without_kernels`` uses no kernel, where its
    device has some. ``device_types``: of the graph's inputs."""
    nodes = [
        node
        for module in _graphs(gm)
        for node in module.graph.find_nodes(
            op="call_function", target=attend_by_products
        )
    ]
    if not nodes or "cuda" not in device_types:
        return
    warn(
        "attention with dropout is computed by matrix products, not by a fused "
        f"kernel ({len(nodes)} calls): its memory grows with the square of the "
        "sequence, and its random mask differs from that of the kernel on one "
        "device",
        where=user_line(nodes[0]),
        fix="set the dropout of attention to 0 (attn_pdrop, "
        "attention_probs_dropout_prob, attention_dropout), which uses the kernels",
    )


def _graphs(gm: fx.GraphModule) -> list[fx.GraphModule]:
    return [module for module in gm.modules() if isinstance(module, fx.GraphModule)]


def _calls(gm: fx.GraphModule) -> list[fx.Node]:
    nodes = gm.graph.find_nodes(op="call_function", target=_ATTEND)
    return [node for node in nodes if _has_dropout(node.args, node.kwargs)]


def _has_dropout(args: Any, kwargs: Any) -> bool:
    chance = args[_PLACE] if len(args) > _PLACE else kwargs.get("dropout_p", 0.0)
    return not isinstance(chance, (int, float)) or chance > 0


# The signature of a traced graph

# (kind, payload of the descriptor, node) -> Input; the caller gives its spec at rest.
MakeInput = Callable[[str, Any, fx.Node], Input]
# (kind, name, position of its input) -> Output
MakeOutput = Callable[[str, str, int | None], Output]


def read_signature(
    graph: fx.Graph,
    make_input: MakeInput,
    make_output: MakeOutput = lambda kind, name, of: Output(name, kind, of),
) -> Signature:
    """Return the Signature of a graph whose placeholders and output carry
    ``meta["desc"]``.

    ``make_input(kind, payload, node)`` gives an input its name and its spec at rest;
    ``make_output(kind, name, of)`` does so for an output. Raises PlanError for a graph
    with sparse tensors.
    """
    inputs: list[Input] = []
    index_of: dict[Any, int] = {}
    tangent_of: list[tuple[int, Any]] = []
    output: fx.Node | None = None
    for node in graph.nodes:
        _refuse_sparse(node)
        if node.op == "placeholder":
            desc = node.meta.get("desc")
            kind, payload = _torch.aot.descriptor(desc)
            if kind == "tangent":
                tangent_of.append((len(inputs), payload))
            index_of[_torch.aot.bare(desc)] = len(inputs)
            inputs.append(make_input(kind, payload, node))
        elif node.op == "output":
            output = node
    assert output is not None
    outputs: list[Output] = []
    position_of: dict[Any, int] = {}
    descs = output.meta.get("desc") or [None] * len(output.args[0])
    for k, desc in enumerate(descs):
        kind, payload = _torch.aot.descriptor(desc)
        position_of[_torch.aot.bare(desc)] = k
        of = index_of.get(payload) if kind in ("gradient", "mutation") else None
        name = inputs[of].name if of is not None else f"output_{payload}"
        outputs.append(make_output(kind, name, of))
    tangents = tuple(
        (i, position_of[desc]) for i, desc in tangent_of if desc in position_of
    )
    return Signature(tuple(inputs), tuple(outputs), tangents)


def _refuse_sparse(node: fx.Node) -> None:
    value = node.meta.get("val")
    layout = value.layout if isinstance(value, torch.Tensor) else torch.strided
    if layout is not torch.strided:
        module = ".".join(module_path(node) or ())
        raise PlanError(
            f"{node.name}{f' of module {module!r}' if module else ''} is sparse "
            f"({layout}), as are the gradients of sparse=True; sparse tensors "
            "have no sharding rules",
            where=_nearest_line(node),
            fix="use sparse=False and dense tensors, or leave this code out of the "
            "graph with torch.compiler.disable",
        )


def _nearest_line(node: fx.Node) -> str | None:
    """Return the user's line of a node, or of the nearest node it is computed from."""
    nodes = [node]
    for each in nodes:
        if line := user_line(each):
            return line
        nodes += [n for n in each.all_input_nodes if n not in nodes]
    return None


# Returns the mesh that code is traced for; None while it is not traced for one.
MESH: ContextVar[Callable[[], Mesh | None] | None] = ContextVar(
    "fxpar_traced_mesh", default=None
)


@contextlib.contextmanager
def traced_for(mesh: Callable[[], Mesh | None]) -> Iterator[None]:
    """Trace the code inside for this mesh; None: for one rank, or an unknown mesh."""
    token = MESH.set(mesh)
    try:
        yield
    finally:
        MESH.reset(token)
