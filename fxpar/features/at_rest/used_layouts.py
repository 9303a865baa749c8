"""Lay out parameters as the plan of a sample's call, or of the first graph, uses them.

In: a traced graph whose parameters may have any layout. Out of ``decided``: its plan;
of ``uses_of``: the specs of its parameters. ``settle`` does both for a Dynamo graph
that is the first to read parameters which ``fxpar.shard`` split by default: rank 0
plans, all ranks reshard the parameters, and Dynamo traces again. They stay the same
objects, with other placements and local tensors; so do their gradients, the optimizer's
state, copies of the model, and tensors that share memory with one of these. Never: a
reshard of a parameter that a compiled program has read, or of a tensor whose local
tensor a user may hold.
"""

from __future__ import annotations

import fnmatch
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.tensor import DTensor

from fxpar import _torch, cache_files
from fxpar.choose_plan import planned, searched
from fxpar.config import Options, nearest
from fxpar.errors import HintError, MeshError, RankMismatchError
from fxpar.features.at_rest.crossings import layout_of, part_of
from fxpar.features.at_rest.dtensor_ops import gathered
from fxpar.features.at_rest.dynamo_graphs import fake_of, globally
from fxpar.features.at_rest.sharded_modules import (
    AT_REST,
    Home,
    ParameterAtRest,
    live_homes,
)
from fxpar.runtime.caches import known_programs
from fxpar.runtime.calls.call_variants import CompileJob
from fxpar.runtime.ranks import meeting, presence
from fxpar.runtime.ranks.groups import HOME, Ranks, coming_graph
from fxpar.runtime.stage_times import LAYOUT, stage
from fxpar.runtime.steps.pipeline_state import JointState
from fxpar.runtime.tracing import TracedCall, read_signature
from fxpar.sharding.decide import Decision
from fxpar.sharding.hints import Entries, Hint, axes_of, check, check_chunks, load, read
from fxpar.sharding.mesh import Mesh, parts_among
from fxpar.sharding.pipeline_axis import pipeline_axis, without_stages
from fxpar.sharding.plan import Plan
from fxpar.sharding.plan_request import (
    Mode,
    Request,
    plan_mode,
)
from fxpar.sharding.program import Input, Output
from fxpar.sharding.propagate.at_rest import FEW, at_rest, is_worth_chunks
from fxpar.sharding.propagate.conventions import batch_axes
from fxpar.sharding.rest_over_stages import split_over_stages
from fxpar.sharding.spec import Spec
from fxpar.units import digest

Key = TypeVar("Key")

# A sample plan: parameter name -> the spec it is used in.
Uses = Mapping[str, Spec]


def with_parts(mesh: Mesh, table: Mapping[str, Entries], uses: Uses) -> Mesh:
    """Return the mesh refined to the parts of axes that hints and the sample's plan
    name. Raises HintError for parts that the mesh does not have."""
    for spec in uses.values():
        mesh = mesh.refined(spec.axes)
    for pattern, hint in table.items():
        what = f"hint {pattern!r}"
        try:
            mesh = mesh.refined(parts_among(axes_of(hint, what)))
        except MeshError as error:
            raise HintError(f"{what}: {error.what}", fix=error.fix) from error
    return mesh


def layouts_of(
    model: nn.Module,
    mesh: Mesh,
    table: Mapping[str, Entries],
    uses: Uses,
    *,
    strict: bool,
) -> dict[nn.Parameter, ParameterAtRest]:
    """Choose the layout of each parameter: as the last hint on it says, else as a
    sample's plan uses it, else split over all axes that no hint names. ``strict``: each
    hint must match some parameter. Raises HintError."""
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(p, []).append(name)
    # Along axes that hints name a parameter is whole where they do not split it, as in
    # tensor parallelism, and not split for memory.
    named, hinted = set[str](), dict[nn.Parameter, tuple[str, Entries]]()
    for pattern, entry in table.items():
        own = [p for p, names in names_of.items() if fnmatch.filter(names, pattern)]
        if own:
            named |= {*axes_of(entry, f"hint {pattern!r}")}
        elif strict:
            first_names = [names[0] for names in names_of.values()]
            such = f"names are such as {', '.join(first_names[:4])}"
            fix = nearest(pattern, first_names) or such
            raise HintError(f"hint {pattern!r} matches no parameter", fix=fix)
        hinted |= dict.fromkeys(own, (pattern, entry))
    stages, inner = pipeline_axis(mesh), without_stages(mesh)
    decided = {*mesh.parts(filter(mesh.has, named))}
    arguments: dict[nn.Parameter, tuple[Any, ...]] = {}  # arguments of ``at_rest``
    hints: dict[nn.Parameter, str] = {}
    used: dict[nn.Parameter, tuple[str, Sequence[int], Spec | None]] = {}
    for p, names in names_of.items():
        shape, hint = tuple(p.shape), Hint((), (), ())
        if p in hinted:
            hint = _in_axes(*hinted[p], names[0], shape, mesh)
        else:
            use = next((uses[name] for name in names if name in uses), None)
            used[p] = pattern_of(names[0]), shape, use and use.refined(mesh)
        arguments[p] = shape, inner, hint.dims, hint.closed, {*decided, *hint.whole}
        hints[p] = ",".join(hint.words)
    even = stages is not None or not is_worth_chunks(arguments.values())
    specs = {p: at_rest(*args, even=even) for p, args in arguments.items()}
    specs |= layouts_as_used(used, inner, decided, even=even)
    if stages is not None:
        for p, spec in specs.items():
            specs[p] = split_over_stages(spec, p.shape, mesh, stages)
    return {
        p: ParameterAtRest(tuple(p.shape), str(specs[p]), hints[p], names[0])
        for p, names in names_of.items()
    }


def pattern_of(name: str) -> str:
    """Return the name of a parameter, which equal ones of repeated layers share."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def layouts_as_used(
    parameters: Mapping[Key, tuple[Any, Sequence[int], Spec | None]],
    mesh: Mesh,
    decided: Collection[str] = (),
    *,
    even: bool,
) -> dict[Key, Spec]:
    """Choose the layouts of parameters from the kind of each, its shape and the spec in
    which a program uses it, if it does; none for kinds that it does not use. They are
    split as most of a kind are used along axes that do not split the batch, and further
    by all other axes but ``decided``, along the dim of that spec if it has them too (as
    one that a search chose, whose price is right for no other dim). Parameters that are
    used whole along an axis that splits others stay whole along it, the smallest first
    and all of a kind or none, since layers that repeat are one; while a rank holds at
    most 1 / ``FEW`` more. ``even``: all shards must have equal shapes."""
    kinds = {key: (kind, tuple(shape)) for key, (kind, shape, _) in parameters.items()}
    counts, by_kind = Counter(kinds.values()), dict[Any, Counter[Spec]]()
    for key, (_, _, use) in parameters.items():
        if use is not None:
            by_kind.setdefault(kinds[key], Counter()).update([use])
    uses = {kind: every.most_common(1)[0][0] for kind, every in by_kind.items()}
    split = {axis for use in uses.values() for axis in use.sharded_axes} | {*decided}
    specs, more, total = {}, [], 0
    for kind, use in uses.items():
        shape, count = kind[-1], counts[kind]
        dims = use.without(batch_axes(mesh))
        dims = dims.evened(mesh, shape) if even else dims.in_chunks(mesh, shape)
        specs[kind], as_used = (
            at_rest(shape, mesh, dims.dims, (), elsewhere, even=even)
            for elsewhere in (decided, split)
        )
        least, size, own = (
            math.prod(x.local_shape(mesh, shape)) for x in (specs[kind], as_used, use)
        )
        total += count * least
        if own <= least and use.is_even(mesh, shape):
            specs[kind] = use
        more.append((size - least, count, kind, as_used))
    left = total // FEW
    for size, count, kind, as_used in sorted(more, key=lambda x: x[0]):
        left -= count * size
        if left >= 0:
            specs[kind] = as_used
    return {key: specs[kind] for key, kind in kinds.items() if kind in specs}


def _in_axes(
    pattern: str, entry: Entries, name: str, shape: tuple[int, ...], mesh: Mesh
) -> Hint:
    """Return a hint on a parameter, in mesh axes."""
    what = f"hint {pattern!r} on {name}"
    hint = read(entry, len(shape), what)
    check(hint, without_stages(mesh), what)
    dims = tuple(map(mesh.parts, hint.dims))
    check_chunks(dims, shape, mesh, what)
    return replace(hint, dims=dims, whole=mesh.parts(hint.whole))


log = logging.getLogger("fxpar")

FORMAT = "fxpar rests 2"


def decided(
    call: TracedCall,
    declare: Callable[[str, Any, fx.Node], Input],
    ranks: Ranks,
    hints: Mapping[str, Entries],
    options: Options,
    *,
    name: str,
    plan: Callable[..., JointState] = planned,
    ends: Sequence[Callable[[str, str, int | None], Output]] = (),
) -> Decision:
    """Trace and plan a call: by ``planned``, once for all ranks, which must all call;
    by ``searched`` on this rank only. ``declare`` and ``ends``: as ``read_signature``
    takes them. Plan files and "replicate" are ignored."""
    module, fake_mode = call.trace()
    mode: Mode = "propagate"
    if options.plan == "search":
        mode = plan_mode(options.plan, options, ranks.whole.mesh.size)
    request = Request(
        without_stages(ranks.mesh),
        read_signature(module.graph, declare, *ends),
        hints,
        mode,
        microbatches=options.microbatches,
        name=name,
        rank=ranks.rank,
        options=Options(hardware=options.hardware),
    )
    if ranks.open:
        request = request.with_open_mesh(ranks.mesh)
    return plan(module.graph, fake_mode, request).decided


def uses_of(decision: Decision) -> Uses:
    """Return the spec in which a plan uses each parameter, by name."""
    program, mesh = decision.program, decision.mesh
    pairs = zip(program.signature.inputs, program.inputs, strict=True)
    return {
        declared.name: decision.settled[v].joined(mesh)
        for declared, v in pairs
        if v is not None and declared.kind == "parameter"
    }


def settle(gm: fx.GraphModule, examples: Sequence[Any], job: CompileJob) -> None:
    """Reshard parameters that no program has read yet as this Dynamo graph uses them,
    and make Dynamo trace again; return if none changes.

    All ranks must call it. Raises RankMismatchError if a rank does not.
    """
    read = [x for x in examples if isinstance(x, DTensor) and hasattr(x, HOME)]
    homes = list(dict.fromkeys(getattr(x, HOME) for x in read))
    homes = [home for home in homes if home.movable]
    if not homes or job.ranks.open:
        return
    mesh = Mesh.parse(homes[0].mesh)
    # Along axes of the batch parameters are gathered in any case, and stages have their
    # own layout.
    along = {axis for axis, size in mesh.axes if size > 1} - {*batch_axes(mesh)}
    if not along or pipeline_axis(mesh) or job.options.plan == "replicate":
        for home in homes:
            home.movable.clear()
        return
    every = movables(homes)
    ids = {id(x) for x in read}
    # With their equivalents in repeated layers, which could not share one graph else.
    kinds = {_kind(x) for x in every if id(x.parameter) in ids}
    ours = {f"{homes.index(x.home)} {x.name}": x for x in every if _kind(x) in kinds}
    if not ours:
        return
    with meeting.reporting(), stage(LAYOUT):
        twins, texts = twins_of(ours.values()), dict[str, str]()
        if meeting.is_leader():
            with presence.works("plans how to shard parameters"):
                texts = _planned(gm, examples, job, ours)
        moves = _agreed(ours, texts)
        for home in homes:
            own_names = {x.name for x in ours.values() if x.home is home}
            for copy in (ref() for ref in home.copies):
                if copy is not None:
                    copy.movable -= copy.movable if moves is None else own_names
        for key, spec in (moves or {}).items():
            move(ours[key], spec, twins)
    if moves:
        _torch.dynamo.trace_again("fxpar: parameters are sharded as they are used")


def _kind(x: Movable) -> tuple[Any, ...]:
    """Return a key that the parameters of repeated layers share."""
    return x.home, pattern_of(x.name), tuple(x.parameter.shape)


def _agreed(
    ours: Mapping[str, Movable], own_texts: Mapping[str, str]
) -> dict[str, Spec] | None:
    """Return the new specs of parameters to reshard, as rank 0 planned them, without
    those whose tensors a user holds on some rank; None if ranks read different
    parameters.

    ``own_texts``: rank 0's specs as text. Removes from ``ours`` the tensors that go
    with a parameter on some ranks only. Raises RankMismatchError if ranks read other
    models.
    """
    lines = [f"{key}\t{what}" for key, x in ours.items() for what in ("", *x.tensors)]
    key, tag = digest("\n".join(lines)), "layouts of parameters"
    models = sorted({x.home.round for x in ours.values()})
    message = {"digest": key, "rests": own_texts, "models": models}
    messages = meeting.gather_data(tag, message)
    if not set.intersection(*({*message["models"]} for message in messages)):
        raise meeting.as_reported(
            RankMismatchError(
                "ranks call different models of fxpar.shard",
                fix="call models in one order on every rank",
            )
        )
    if any(message["digest"] != key for message in messages):
        every = [{*lines_} for lines_ in meeting.gather_data(tag, lines)]
        common = set.intersection(*every)
        keys = [{x for x in lines_ if x.endswith("\t")} for lines_ in every]
        if any(x != keys[0] for x in keys):
            return None
        for key, movable in ours.items():
            for what in [*movable.tensors]:
                if f"{key}\t{what}" not in common:
                    del movable.tensors[what]
    specs = {key: Spec.parse(text) for key, text in messages[0]["rests"].items()}
    return {
        key: specs[key]
        for key, x in sorted(ours.items())
        if specs.get(key, x.spec) != x.spec and "value" in x.tensors
    }


def _planned(
    gm: fx.GraphModule,
    examples: Sequence[Any],
    job: CompileJob,
    ours: Mapping[str, Movable],
) -> dict[str, str]:
    """Return the planned spec of each parameter as text, from the record of an earlier
    start or from a plan made here; none if planning fails, since compiling the graph
    then says why."""
    call = gm, job.named_inputs, examples, job.options, job.ranks
    text = known_programs.text_of(*call, [*ours])
    key = digest(text or "", 64)
    path = cache_files.folder() / f"{key}.rests.json"
    record = text and cache_files.read_record(path, FORMAT, key, lambda x: x["rests"])
    if record:
        return {str(key): str(Spec.parse(spec)) for key, spec in record.items()}
    try:
        with _torch.dynamo.outside_of_trace():
            uses = _uses(gm, examples, job, ours)
    except Exception:
        log.info("parameters stay sharded as they are", exc_info=True)
        return {}
    pairs = zip(job.named_inputs, examples, strict=True)
    by_parameter = {id(x): uses.get(name.name) for name, x in pairs}
    first = next(iter(ours.values())).home
    mesh, used = Mesh.parse(first.mesh), {}
    for name, x in ours.items():
        use = by_parameter.get(id(x.parameter))
        if use is not None and any(axis not in mesh.sizes for axis in use.axes):
            use = None
        used[name] = _kind(x), tuple(x.parameter.shape), use
    specs = layouts_as_used(used, mesh, even=first.is_even)
    texts = {name: str(spec) for name, spec in specs.items()}
    if text:
        cache_files.write_record(path, FORMAT, key, {"rests": texts})
    return texts


def _uses(
    gm: fx.GraphModule,
    examples: Sequence[Any],
    job: CompileJob,
    ours: Mapping[str, Movable],
) -> Uses:
    """Return the spec in which the graph uses each parameter, by name: from the plan
    file that it follows, else from a plan made here."""
    options, ranks = job.options, job.ranks
    if options.plan not in ("search", "propagate"):
        with ranks.inside():
            size, name = ranks.whole.mesh.size, f"graph{coming_graph()}"
            mode = plan_mode(options.plan, options, size, name)
        assert isinstance(mode, Plan)
        return dict(mode.parameters)
    forward = globally(_torch.dynamo.copy_graph(gm), job.named_inputs, examples)
    fake_mode = _torch.fake.new_fake_mode(symbols=True)
    free = {id(x.parameter) for x in ours.values()}
    fakes = [fake_of(x, fake_mode) for x in examples]
    for fake, x in zip(fakes, examples, strict=True):
        if isinstance(x, torch.Tensor):
            fake.requires_grad_(x.requires_grad)
    grad = torch.is_grad_enabled() and any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in fakes
    )
    call = TracedCall(forward.module, tuple(fakes), {}, grad)
    declared: list[Input] = []

    def declare(kind: str, payload: Any, node: fx.Node) -> Input:
        value, end = node.meta["val"], Input(f"{kind}_{len(declared)}", kind)
        if kind == "input":
            place = call.places[payload]
            end = forward.ends[place]
            if id(examples[place]) in free:
                end = Input(end.name, end.kind, splits=True)
        is_fed = end.kind in ("input", "buffer") and options.inputs == "global"
        if is_fed and end.at_rest is None and isinstance(value, torch.Tensor):
            end = replace(end, at_rest=Spec.whole(value.dim()))
        declared.append(end)
        return end

    def end(kind: str, name: str, of: int | None) -> Output:
        if kind != "gradient" or of is None:
            return Output(name, kind, of, None)
        return Output(name, kind, of, declared[of].at_rest)

    what = call, declare, ranks, load(options.hints), options
    return uses_of(decided(*what, name="the first call", plan=searched, ends=[end]))


@dataclass(frozen=True)
class Movable:
    """Is a parameter that no program has read yet."""

    home: Home  # the Home of its model
    name: str  # its name in the model
    parameter: Any  # the DTensor
    # All tensors to be resharded with it by description; itself as "value".
    tensors: dict[str, Any] = field(default_factory=dict)

    @property
    def spec(self) -> Spec:
        """Return the spec in which the parameter is stored now."""
        return layout_of(self.parameter)[1]


# A place that holds a parameter: its model's Home, the module, the attribute's name.
Holder = tuple[Home, nn.Module, str]


def holders() -> dict[int, list[Holder]]:
    """Return the places that hold each parameter, by the id of the parameter."""
    by_id: dict[int, list[Holder]] = {}
    for home in live_homes():
        for module in list(home.modules.values()):
            own = _torch.objects.own_parameters(module)
            for key in module.__dict__[AT_REST]:
                if isinstance(p := own.get(key), DTensor):
                    by_id.setdefault(id(p), []).append((home, module, key))
    return by_id


def movables(homes: Collection[Home]) -> list[Movable]:
    """Return the movable parameters of models in order of their names, each with the
    tensors to be resharded with it; a parameter that two models hold is left out."""
    by_id = holders()
    by_name: dict[tuple[Home, str], Any] = {}
    for where in by_id.values():
        home, module, key = where[0]
        names = {own.__dict__[AT_REST][name].name for _, own, name in where}
        if (names := names & home.movable) and len({x[0] for x in where}) == 1:
            parameter = _torch.objects.own_parameters(module)[key]
            by_name[home, min(names)] = parameter
    optimizers = sorted(
        _torch.objects.live_optimizers(), key=lambda x: type(x).__name__
    )
    every = []
    for home in homes:
        for name in sorted(home.movable):
            if (parameter := by_name.get((home, name))) is None:
                continue
            movable = Movable(home, name, parameter)
            for i, copy in enumerate(ref() for ref in home.copies):
                if copy is None or (p := by_name.get((copy, name))) is None:
                    continue
                if _torch.dtensor.has_layout_of(p, parameter):
                    which = "" if copy is home else f"copy {i}: "
                    for what, x in _with_state(p, optimizers).items():
                        movable.tensors[f"{which}{what}"] = x
            every.append(movable)
    return every


def _with_state(parameter: Any, optimizers: Iterable[Any]) -> dict[str, Any]:
    """Return a parameter, its gradient and its optimizer state by description; nothing
    if some state is a plain tensor of the local shard, or if two optimizers of one
    class have state for it."""
    tensors = {"value": parameter}
    if _torch.dtensor.has_layout_of(parameter.grad, parameter):
        tensors["gradient"] = parameter.grad
    for optimizer in optimizers:
        for key, x in _state_of(parameter, optimizer).items():
            what = f"{type(optimizer).__name__} {key}"
            if _torch.dtensor.has_layout_of(x, parameter):
                if _memory(x) in map(_memory, tensors.values()):
                    continue  # an optimizer that wraps another, or a twin, has it too
                if what in tensors:
                    return {}
                tensors[what] = x
            elif _is_bare(x):
                return {}
    return tensors


def _state_of(parameter: Any, optimizer: Any) -> dict[str, Any]:
    """Return tensors of an optimizer's state for a parameter; of its other attributes,
    those by the parameter's id and plain tensors that may belong to any parameter."""
    state = getattr(optimizer, "state", {}).get(parameter)
    by_key = dict(state) if isinstance(state, dict) else {"": state}
    if id(parameter) in {*map(id, _torch.objects.parameters_of(optimizer))}:
        for name, x in vars(optimizer).items():
            if name in _torch.objects.OPTIMIZER_ATTRIBUTES:
                continue
            by_key[f"{name}, bare"] = [*filter(_is_bare, _torch.fake.tree_leaves(x))]
            for key in x if isinstance(x, dict) else ():
                if (key if isinstance(key, int) else id(key)) == id(parameter):
                    by_key[name] = x[key]
    return {
        f"{key} {i}": leaf
        for key, x in by_key.items()
        for i, leaf in enumerate(_torch.fake.tree_leaves(x))
    }


def _memory(x: DTensor) -> int:
    return _torch.objects.memory_of(_torch.dtensor.local_of(x))


def _is_bare(x: Any) -> bool:
    """Return whether ``x`` is a tensor that does not say which part it is."""
    if isinstance(x, DTensor):
        return not _torch.dtensor.has_plain_local(x)
    return isinstance(x, torch.Tensor) and x.dim() > 0


def twins_of(parameters: Iterable[Movable]) -> dict[int, list[Any]]:
    """Return, by the id of each tensor in ``parameters``, other DTensors that share its
    memory and its layout. Removes a tensor from ``parameters`` if a live object of
    another layout shares its memory: a view, or a local tensor that a user holds."""
    owners: dict[int, tuple[dict[str, Any], str, Any]] = {}
    for movable in parameters:
        for what, x in movable.tensors.items():
            owners[_memory(x)] = movable.tensors, what, x
    twins: dict[int, list[Any]] = {}
    parts, bare = set[int](), []
    for x in _torch.dtensor.live_users_of(owners):
        local = _torch.dtensor.local_of(x) if isinstance(x, DTensor) else x
        tensors, what, owner = owners[_torch.objects.memory_of(local)]
        if x is owner:
            parts.add(id(local))
        elif _torch.dtensor.has_layout_of(x, owner) and not hasattr(x, HOME):
            twins.setdefault(id(owner), []).append(x)
            parts.add(id(local))
        else:
            bare.append((x, tensors, what))
    for x, tensors, what in bare:
        if id(x) not in parts:
            tensors.pop(what, None)
    return twins


@torch.inference_mode(False)
@torch.no_grad()
def move(movable: Movable, spec: Spec, twins: Mapping[int, list[Any]]) -> None:
    """Reshard a parameter, and the tensors that go with it, to ``spec``. All ranks must
    call it. It takes memory for the global value of one tensor at a time."""
    by_id, mesh = holders(), Mesh.from_device_mesh(movable.parameter.device_mesh)
    placements = spec.to_placements(mesh)
    for x in movable.tensors.values():
        part = part_of(gathered(x), spec, mesh, dist.get_rank())
        part = part.clone(memory_format=torch.contiguous_format)
        for twin in (x, *twins.get(id(x), ())):
            _torch.dtensor.lay_out(twin, part, placements)
        for _, module, key in by_id.get(id(x), ()):
            infos = module.__dict__[AT_REST]
            infos[key] = replace(infos[key], spec=str(spec))
