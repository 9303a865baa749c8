"""Identify the program of a Dynamo graph, and name its inputs as the user does.

In: a Dynamo graph and examples of its inputs. Dynamo may trace one piece of code again
for sizes that change, for one sample, for a slice that begins elsewhere, and does so on
each rank by itself. Out: ``program_text`` is what these graphs have in common, and what
ranks compare; ``content`` is all that compiling depends on, so that a graph of equal
content needs no compilation of its own; ``name_inputs`` names inputs from where Dynamo
found them. Never: a value of a tensor.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from fxpar import _torch
from fxpar._torch.dynamo import example_of
from fxpar.graph.graph_bodies import attribute_at
from fxpar.sharding.program import Input, user_line

_PART = re.compile(r"_(modules|parameters|buffers)\['([^']+)'\]")
_KEY = re.compile(r"\['([^']+)'\]|\[(\d+)\]")


def _source(node: fx.Node) -> str:
    """Return the Python text by which Dynamo found an input."""
    grapharg = node.meta.get("grapharg")
    source = getattr(grapharg, "source", None)
    if source is None:
        return node.name
    name = source.name
    return name() if callable(name) else str(name)


def _name_input(source: str, example: Any) -> Input:
    """Return the name and kind of an input, from the text by which Dynamo found it."""
    parts = _PART.findall(source)
    if parts:
        name = ".".join(key for _, key in parts)
        kind = {"parameters": "parameter", "buffers": "buffer"}.get(parts[-1][0])
        if kind is None:  # an attribute of a module, neither parameter nor buffer
            name = f"{name}.{source.rsplit('.', 1)[-1]}"
            kind = "buffer"
    else:
        keys = [a or b for a, b in _KEY.findall(source)]
        words = [key for key in keys if not key.isdigit()]
        name = keys[-1] if keys else source
        if name.isdigit() and words:
            name = f"{words[-1]}_{name}"
        tail = source.rsplit("]", 1)[-1]
        name = f"{name}{tail}"
        kind = "input"
    if isinstance(example, nn.Parameter):
        kind = "parameter"
    return Input(name, kind)


def name_inputs(graph: fx.Graph, examples: Sequence[Any]) -> list[Input]:
    """Return one Input per placeholder of a Dynamo graph, names unique."""
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    inputs = [
        _name_input(_source(node), example)
        for node, example in zip(nodes, examples, strict=True)
    ]
    total = Counter(entry.name for entry in inputs)
    seen: Counter[str] = Counter()
    unique = []
    for entry in inputs:
        name = entry.name
        if total[name] > 1:
            seen[name] += 1
            if seen[name] > 1:
                name = f"{name}#{seen[name]}"
        unique.append(replace(entry, name=name))
    return unique


_NUMBERS = (int, torch.SymInt)

# Text for the storage offset of an input inside a larger tensor, which Dynamo hands on
# to bodies.
BEGINS = "begins inside a larger tensor"

# Types whose text is the same in every process.
_PRINTED = (
    *(str, float, bool, type(None), complex),
    *(torch.dtype, torch.device, torch.memory_format, torch.layout),
)


def placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    """Return the placeholders of a graph, in order."""
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def lean_graph(
    gm: fx.GraphModule, examples: Sequence[Any]
) -> tuple[fx.GraphModule, list[int], set[int]]:
    """Return a copy without the numbers among its inputs that nothing reads (where in
    its memory a slice begins), the positions of the inputs that are left, and those of
    them that Dynamo feeds as tensors where the user has numbers, which the copy takes:
    each value of such a number has a program of its own. Floats that tensors are only
    added to, multiplied by and the like stay tensors in the copy."""
    lean = _torch.dynamo.copy_graph(gm)
    numbers = {
        i for i, x in enumerate(placeholders(lean)) if _is_read_as_number(x, lean)
    }
    positions = []
    pairs = zip(placeholders(lean), examples, strict=True)
    for i, (node, x) in enumerate(pairs):
        if node.users or isinstance(x, torch.Tensor):
            positions.append(i)
        else:
            lean.graph.erase_node(node)
    lean.recompile()
    return lean, positions, numbers


def _is_read_as_number(node: fx.Node, gm: fx.GraphModule) -> bool:
    """Return whether an input is a tensor of which only its one number is read, which
    Dynamo made of a float; if so, let its readers, also in bodies, read the input
    itself. It stays a tensor, and is no number, if they can take one."""
    value = example_of(node)
    if not isinstance(value, torch.Tensor) or value.dim():
        return False
    backwards: dict[fx.Node, fx.GraphModule] = {}
    readers = _readers_of_number(node, backwards)
    items = [x for users in readers.values() for x in users]
    if not items:
        return False
    computing = dict[fx.Node, None]()
    stays = value.dtype is torch.float64 and all(
        _takes_tensor(item, backwards, computing) for item in items
    )
    tensors = (x for x in map(example_of, computing) if isinstance(x, torch.Tensor))
    device = next((x.device for x in tensors), value.device)
    for place, users in readers.items():
        place.meta["example_value"] = value if stays else example_of(items[0])
        for user in users:
            read = _converted(place, user, device, value.dtype) if stays else place
            user.replace_all_uses_with(read)
    for reader in computing if stays else ():
        _compute_by_tensor(reader, value.to(device))
    for item in items:
        item.graph.erase_node(item)
    for body in (gm, *gm.modules()) if stays else ():
        if isinstance(body, fx.GraphModule):
            body.recompile()
    return not stays


# Ops that run bodies, and how many; operands, which come after these, are those of the
# first body.
_APPLY = "higher_order::autograd_function_apply"
_RUNS = {_torch.aot.CHECKPOINT: 1, _APPLY: 2}


def _readers_of_number(
    node: fx.Node, backwards: dict[fx.Node, fx.GraphModule]
) -> dict[fx.Node, list[fx.Node]]:
    """Return the calls of ``item`` that read an input, by the placeholder they read:
    that input, and those that checkpointed regions and functions of autograd have for
    it. Empty if anything else reads it. ``backwards``: gets the backward of each
    function, by the output of its forward."""
    readers: dict[fx.Node, list[fx.Node]] = {node: []}
    for user in node.users:
        if user.op == "call_method" and user.target == "item":
            readers[node].append(user)
        elif (places := _places_in_body(node, user, backwards)) is not None:
            for inner in places:
                further = _readers_of_number(inner, backwards)
                if inner.users and not further:
                    return {}
                readers |= further if inner.users else {inner: []}
        else:
            return {}
    return readers


def _places_in_body(
    node: fx.Node, user: fx.Node, backwards: dict[fx.Node, fx.GraphModule]
) -> list[fx.Node] | None:
    """Return the placeholders for ``node`` in the body that ``user`` runs; None if it
    runs none. ``backwards``: as of ``_readers_of_number``."""
    count = _RUNS.get(_torch.aot.higher_order_name(user.target) or "")
    if count is None:
        return None
    gm = user.graph.owning_module
    body, *others = (attribute_at(gm, str(x.target)) for x in user.args[:count])
    places, operands = placeholders(body), user.args[count:]
    if len(places) != len(operands):
        return None
    backwards |= {body.graph.output_node(): other for other in others}
    pairs = zip(places, operands, strict=True)
    return [place for place, x in pairs if x is node]


_ARITHMETIC = {operator.add, operator.sub, operator.mul, operator.truediv}
# What a float64 tensor without dims does to a floating-point tensor as a float does.
_ALIKE = {
    *_ARITHMETIC,
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv),
    *(torch.add, torch.sub, torch.mul, torch.div),
    *("add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_"),
}
_HALVES = (torch.float16, torch.bfloat16)


def _takes_tensor(
    number: fx.Node,
    backwards: dict[fx.Node, fx.GraphModule],
    computing: dict[fx.Node, None],
) -> bool:
    """Return whether all readers of a number compute the same from a tensor of it;
    ``computing`` gets them, and places of backwards that it is handed to."""
    for user in number.users:
        value, nodes = example_of(user), list[fx.Node]()
        if user in computing:
            continue
        if user in backwards:
            # ((results), (what the backward takes after their gradients))
            saved = list(user.args[0][1])
            ends = placeholders(backwards[user])[-len(saved) :]
            nodes = [end for end, x in zip(ends, saved, strict=True) if x is number]
        elif isinstance(value, torch.SymFloat) and user.target in _ARITHMETIC:
            numbers = (x for x in user.args if isinstance(x, fx.Node))
            if not all(isinstance(example_of(x), torch.SymFloat) for x in numbers):
                return False
            nodes = [user]
        elif (places := _places_in_body(number, user, backwards)) is not None:
            nodes = places  # torch 2.15 reads it before them
        elif not _is_alike(user, value):
            return False
        else:
            computing[user] = None
        computing |= dict.fromkeys(nodes)
        if not all(_takes_tensor(node, backwards, computing) for node in nodes):
            return False
    return True


def _is_alike(user: fx.Node, value: Any) -> bool:
    """Return whether a node computes a floating-point tensor from one and a number as
    it would from a tensor of that number."""
    if user.target not in _ALIKE or user.kwargs or len(user.args) != 2:
        return False
    tensors = [
        x
        for arg in user.args
        if isinstance(arg, fx.Node)
        and isinstance(x := example_of(arg), torch.Tensor)
        and x.dtype.is_floating_point
    ]
    is_one = isinstance(value, torch.Tensor) and len(tensors) == 1
    name = str(getattr(user.target, "__name__", user.target))
    is_in_place = name.endswith("_") or name.startswith("i")
    return is_one and not (is_in_place and value.dtype in _HALVES)


def _compute_by_tensor(node: fx.Node, number: torch.Tensor) -> None:
    """Let a node that takes a number compute from a tensor of it, in the dtype that it
    computes in with a number: that of its operand, float32 for half precision."""
    value, graph = example_of(node), node.graph
    if not isinstance(value, torch.Tensor):
        node.meta["example_value"] = number
        return
    is_half = value.dtype in _HALVES
    wide = torch.float32 if is_half else value.dtype
    for arg in node.all_input_nodes:
        converted = _converted(arg, node, value.device, wide)
        if converted is not arg:
            node.replace_input_with(arg, converted)
    if is_half:
        with graph.inserting_after(node):
            narrow = graph.call_method("to", (node, value.dtype))
        node.replace_all_uses_with(narrow, lambda user: user is not narrow)
        narrow.meta = dict(node.meta)
        node.meta["example_value"] = value.float()


def _converted(
    x: fx.Node, reader: fx.Node, device: torch.device, dtype: torch.dtype
) -> fx.Node:
    """Return a node before ``reader`` with the tensor ``x`` on a device, in a dtype."""
    value = example_of(x)
    if (value.device, value.dtype) == (device, dtype):
        return x
    with x.graph.inserting_before(reader):
        node = x.graph.call_method("to", (x, device, dtype))
    node.meta = {**reader.meta, "example_value": value.to(device, dtype)}
    return node


def program_text(gm: fx.GraphModule, inputs: Sequence[Input]) -> str:
    """Return the program, a line for each op, sizes left out. ``inputs``: of the
    program; the body of a region has none with names."""
    lines, places = [], dict[fx.Node, str]()
    pairs = zip(placeholders(gm), inputs, strict=True) if inputs else ()
    for node, name in pairs:
        value = example_of(node)
        if isinstance(value, torch.Tensor):
            places[node] = name.name
            dtype = str(value.dtype).removeprefix("torch.")
            wants = ", requires grad" if value.requires_grad else ""
            lines.append(
                f"{name.kind} {name.name}: {dtype} of {value.dim()} dims{wants}"
            )

    starts = _starts(places)
    to_bodies = dict[str, str]()  # by number, its text in the call that is written

    def text_of(x: Any) -> str:
        if isinstance(x, fx.Node):
            return places.get(x) or to_bodies.get(str(example_of(x)), "n")
        if isinstance(x, (tuple, list)):
            return f"({', '.join(map(text_of, x))})"
        if isinstance(x, dict):
            return ", ".join(f"{key}={text_of(value)}" for key, value in x.items())
        if isinstance(x, slice):
            return text_of((x.start, x.stop, x.step))
        if isinstance(x, _NUMBERS) and not isinstance(x, bool):
            return "n"
        return repr(x) if isinstance(x, _PRINTED) else type(x).__name__

    for node in gm.graph.nodes:
        if node.op == "placeholder" or _is_about_sizes(node):
            continue
        if node.op == "output":
            results = [x for x in _flat(node.args) if not _is_number(x)]
            lines.append(f"return {text_of(results)}")
            continue
        places[node] = f"%{len(places)}"
        target = node.target
        target = getattr(target, "__name__", None) or str(target).split(" at 0x")[0]
        line = user_line(node)
        to_bodies = starts if _torch.aot.higher_order_name(node.target) else {}
        call = f"{target}{text_of(node.args)} {text_of(node.kwargs)}".rstrip()
        lines.append(
            f"{places[node]} = {call}"
            + (f"  # {line.rsplit('/', 1)[-1]}" if line else "")
        )
        body = node.op == "get_attr" and attribute_at(gm, str(node.target))
        if isinstance(body, fx.GraphModule):
            lines += [f"  {each}" for each in program_text(body, ()).splitlines()]
    lines.append(f"gradients {'on' if torch.is_grad_enabled() else 'off'}")
    return "\n".join(lines)


def content(
    gm: fx.GraphModule, inputs: Sequence[Input], examples: Sequence[Any]
) -> str:
    """Return all that compiling a graph depends on in this process, without sizes."""
    objects = (str(id(x)) for x in _objects(gm))
    return "\n".join([_text(gm, inputs, examples), *objects])


def _objects(gm: fx.GraphModule) -> Iterator[Any]:
    """Yield objects that a graph and its bodies call or hold; they may share a name."""
    yield from _torch.node_texts.unknown_functions(gm.graph)
    yield gm.meta.get(_torch.aot.CHOOSES_SAVED)
    for node in gm.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            attribute = attribute_at(gm, str(node.target))
            if isinstance(attribute, fx.GraphModule):
                yield from _objects(attribute)
            else:
                yield attribute


def _text(gm: fx.GraphModule, inputs: Sequence[Input], examples: Sequence[Any]) -> str:
    """Return the nodes of a graph and its bodies, and the forms of inputs but sizes."""
    lines = [node.format_node() or "" for node in gm.graph.nodes]
    for node in gm.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            attribute = attribute_at(gm, str(node.target))
            if isinstance(attribute, fx.GraphModule):
                lines.append(_text(attribute, [], []))
    for name, x in zip(inputs, examples, strict=True):
        lines.append(f"{name} {type(x)}")
        if isinstance(x, torch.Tensor):
            strides = _torch.symbols.hint_shape(x.stride())
            order = sorted(range(x.dim()), key=lambda d: (-strides[d], d))
            flat = [d for d in range(x.dim()) if not strides[d]]
            sizes, steps = (
                [n if isinstance(n, int) else "?" for n in each]
                for each in (x.shape, x.stride())
            )
            is_fed = name.kind == "input"  # another layout is copied at a call
            lines.append(
                f"{x.dtype} {x.device} {x.requires_grad} "
                f"{x.is_conj()} {x.is_neg()} {x.is_inference()} "
                f"{(order, flat) if is_fed else steps} "
                f"{len(sizes) if is_fed else sizes} "
                f"{getattr(x, 'placements', '')}"
            )
    modes = (  # Dynamo traces again for each
        *_torch.traced_values.modes(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
    )
    return "\n".join([*lines, str(modes)])


def fixed_content(
    gm: fx.GraphModule, inputs: Sequence[Input], examples: Sequence[Any]
) -> str | None:
    """Return all that compiling a graph depends on for these sizes, open ones as they
    were traced, the same text in every process; None for a graph that holds more than
    other graphs, or calls code that its text does not say."""
    if not _is_complete(gm):
        return None
    lines = [_text(gm, inputs, examples)]
    for x in examples:
        if isinstance(x, torch.Tensor):
            lines.append(f"{list(x.shape)} {list(x.stride())} {x.is_leaf}")
        elif isinstance(x, _torch.symbols.SYMBOLIC):
            lines.append(f"{x} {_torch.symbols.hint_of(x)}")
        elif isinstance(x, (int, float, str, type(None))):
            lines.append(repr(x))
        else:
            return None
    text = "\n".join(lines)
    return None if " at 0x" in text else text


def _is_complete(gm: fx.GraphModule) -> bool:
    """Return whether the text of a graph and its bodies says all that they compute."""
    bodies = [
        attribute_at(gm, str(node.target))
        for node in gm.graph.find_nodes(op="get_attr")
    ]
    return (
        not gm.graph.find_nodes(op="call_module")
        and _torch.aot.CHOOSES_SAVED not in gm.meta
        and _torch.node_texts.is_complete(gm.graph)
        and all(isinstance(x, fx.GraphModule) and _is_complete(x) for x in bodies)
    )


def _starts(inputs: Mapping[fx.Node, str]) -> dict[str, str]:
    """Return the texts of open storage offsets of inputs, by symbol."""
    starts = [
        (example_of(node).storage_offset(), name) for node, name in inputs.items()
    ]
    return {
        str(start): f"{name} {BEGINS}"
        for start, name in starts
        if isinstance(start, torch.SymInt)
    }


def _is_about_sizes(node: fx.Node) -> bool:
    """Return whether a node computes or checks a size, which Dynamo does for sizes that
    it keeps open, and has done already for others."""
    value = example_of(node)
    if node.op == "output":
        return False
    if value is None:
        name = str(getattr(node.target, "__name__", node.target))
        return not node.users and ("_check" in name or "_assert" in name)
    return _is_number(node) or isinstance(value, torch.Size)


def _is_number(x: Any) -> bool:
    if isinstance(x, fx.Node):
        x = example_of(x)
    numbers = (*_NUMBERS, torch.SymBool)
    return isinstance(x, numbers) and not isinstance(x, bool)


def _flat(x: Any) -> list[Any]:
    if isinstance(x, (tuple, list)):
        return [each for part in x for each in _flat(part)]
    return [x]
