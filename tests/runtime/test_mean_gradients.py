"""Means of gradients: those of DistributedDataParallel, whatever a backward does."""

import contextlib
import copy
import json
import time
import warnings
from functools import partial
from itertools import accumulate
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

import fxpar
from fxpar import _torch
from fxpar.config import Options
from fxpar.errors import GradientError, RankMismatchError
from fxpar.passes.order.hand_over import hand_over, separate_results
from fxpar.runtime.calls import outside_graphs
from fxpar.runtime.ranks import mean_gradients, meeting
from fxpar.runtime.ranks.groups import join
from fxpar.runtime.ranks.mean_gradients import MeanOver
from tests.helpers.patience import given_up
from tests.helpers.spawn import shared_pool

WAYS = ("eager", "graph", "inductor")
QUICK_WAYS = ("eager", "graph", pytest.param("inductor", marks=pytest.mark.slow))


class Parts(nn.Module):
    """Layers that a case calls as it likes; ``which`` in the forward."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 40), nn.Linear(40, 6)
        self.c, self.d = nn.Linear(6, 40), nn.Linear(40, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.unused = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, which="ab"):
        layers = {"ab": (self.a, self.b), "cd": (self.c, self.d)}
        for i in range(0, len(which), 2):
            first, second = layers[which[i : i + 2]]
            x = second(torch.tanh(first(x))) * self.scale
        return x


def parts_of(net):
    return getattr(net, "module", net)


def once(net, x, rank, step):
    net(x).square().mean().backward()


def accumulated(net, x, rank, step):
    for part in x.split(2):
        (net(part).square().mean() / 3).backward()


def other_order(net, x, rank, step):
    net(x, "abcd" if rank else "cdab").square().mean().backward()


def other_branch(net, x, rank, step):
    net(x, "ab" if rank else "cd").square().mean().backward()


def changing(net, x, rank, step):
    net(x, ("ab", "cd", "abcd")[(step + rank) % 3]).square().mean().backward()


def other_sizes(net, x, rank, step):
    net(x[: 2 + rank * 3]).square().sum().backward()


def twice_in_graph(net, x, rank, step):
    net(x, "abab").square().mean().backward()


def two_losses(net, x, rank, step):
    loss = net(x, "ab").square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def zeroed(net, x, rank, step):
    for p in net.parameters():
        if p.grad is not None:
            p.grad.zero_()
    once(net, x, rank, step)


def two_calls(net, x, rank, step):
    (net(x[:3]).square().mean() + net(x[3:], "cd").sum()).backward()


def hooked(net, x, rank, step):
    """The hook of a tensor sees the rank's own gradient."""
    handle = net.scale.register_hook(lambda g: g.clamp(-0.01, 0.02))
    once(net, x, rank, step)
    handle.remove()


def hooked_behind(net, x, rank, step):
    """A user's hook changes what was accumulated."""

    def double(p):
        p.grad.mul_(2)

    handle = parts_of(net).a.weight.register_post_accumulate_grad_hook(double)
    once(net, x, rank, step)
    handle.remove()


def on_one_rank(net, x, rank, step):
    """One rank has a gradient of other parameters alone."""
    net(x, "cd" if rank and step % 2 else "ab").sum().backward()


def eager_part(net, x, rank, step):
    """A penalty on parameters, outside of the forward."""
    (net(x).square().mean() + (rank + 1) * net.b.weight.square().sum()).backward()


def checkpointed(net, x, rank, step, *, reentrant):
    y = checkpoint(net, x.requires_grad_(), use_reentrant=reentrant)
    loss = checkpoint(net, y, "cd", use_reentrant=reentrant).square().mean()
    (loss + net.scale.sum()).backward()


def all_in_checkpoint(net, x, rank, step):
    y = checkpoint(
        net, x.requires_grad_(), "abcd" if rank else "ab", use_reentrant=True
    )
    if rank:
        y = checkpoint(net, y, use_reentrant=True)
    y.sum().backward()


def some_inputs(net, x, rank, step):
    """Backward accumulates into some parameters; ``autograd.grad`` into none."""
    torch.autograd.grad(net(x).sum(), [net.scale, net.a.weight])
    net(x).square().sum().backward(inputs=[net.a.weight, net.scale])


def own_backward(net, x, rank, step):
    """A gradient of one rank's own, added to under ``fxpar.alone``."""
    with fxpar.alone():
        net(x, "cd").sum().backward()
    net(x, "abcd").sum().backward()


def unreduced_at_first(net, x, rank, step):
    """Parameters that ranks use inside ``unreduced`` differ, by step the last backward
    uses others."""
    with mean_gradients.unreduced(net.parameters()):
        net(x[:2], "ab" if rank else "cd").square().sum().backward()
        net(x[2:], "abab").square().sum().backward()
    net(x, "cd" if step % 2 else "ab").square().sum().backward()


def partly_unreduced(net, x, rank, step):
    """One layer waits while others of its buckets are reduced."""
    with mean_gradients.unreduced(net.a.parameters()):
        for part in x.split(2):
            net(part, "abcd").square().sum().backward()
    net(x).square().sum().backward()


CASES = [
    once,
    accumulated,
    other_order,
    other_branch,
    changing,
    other_sizes,
    twice_in_graph,
    hooked_behind,
    on_one_rank,
    zeroed,
]
# DDP refuses these, or reduces what comes before a forward alone.
BY_HAND = [
    two_losses,
    two_calls,
    hooked,
    eager_part,
    partial(checkpointed, reentrant=False),
    partial(checkpointed, reentrant=True),
    all_in_checkpoint,
    some_inputs,
    own_backward,
    unreduced_at_first,
    partly_unreduced,
]


def backend(way):
    """Compiles as fxpar does: gradients of parameters are handed over."""

    def compile_graph(gm, examples):
        inputs = gm.graph.find_nodes(op="placeholder")
        kinds = [node.meta.get("example_value") for node in inputs]
        positions = {i: i for i, x in enumerate(kinds) if isinstance(x, nn.Parameter)}

        def lower(graph, which, generate):
            if which == "backward":
                hand_over(graph, positions)
            return generate(None)

        def run_op_by_op(gm, _):
            return _torch.inductor.make_boxed(gm.forward)

        compiled = _torch.aot.compile_fx(
            gm,
            examples,
            joint_pass=lambda _: None,
            lower=lower,
            inner=run_op_by_op if way == "graph" else None,
        )
        served = []

        def call(*args):
            outputs = compiled(*args)
            if not served and torch.is_grad_enabled():
                mean_gradients.serve_backward(args, outputs)
                served.append(True)
            return outputs

        return call

    return compile_graph


def over_all():
    return MeanOver(dist.group.WORLD.group_name, dist.get_world_size())


def watched(module, way):
    mean_gradients.watch("model", {"": module}, over_all())
    if way == "eager":
        return module
    torch._dynamo.reset()
    return torch.compile(module, backend=backend(way), dynamic=False)


def gradients(module):
    return {
        n: None if p.grad is None else p.grad.clone()
        for n, p in module.named_parameters()
    }


def far(ours, theirs):
    """Names of gradients that differ."""
    names = []
    for name, mine in ours.items():
        other = theirs[name]
        if (mine is None) != (other is None):
            names.append(f"{name}: {mine is None} {other is None}")
        elif mine is not None:
            apart = (mine - other).abs().max() / other.abs().max().clamp(min=1)
            if apart > 1e-12:
                names.append(f"{name}: {apart}")
    return names


@contextlib.contextmanager
def small_buckets():
    sizes = mean_gradients.FIRST_BUCKET, mean_gradients.BUCKET
    mean_gradients.FIRST_BUCKET, mean_gradients.BUCKET = 500, 2500
    try:
        yield
    finally:
        mean_gradients.FIRST_BUCKET, mean_gradients.BUCKET = sizes


def averaged(module):
    """Gradients become means, by hand."""
    for p in module.parameters():
        has = torch.tensor(p.grad is not None, dtype=torch.float64)
        dist.all_reduce(has)
        if has:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def unlike(case, way, steps=4):
    """What differs from the reference, step by step."""
    torch.manual_seed(7)
    rank, model = dist.get_rank(), Parts().double()
    other = reference = copy.deepcopy(model)
    if case in CASES:
        reference = DistributedDataParallel(other, find_unused_parameters=True)
    nets, modules = [watched(model, way), reference], [model, other]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in modules]
    torch.manual_seed(rank)
    wrong = []
    with small_buckets():
        for step in range(steps):
            x = torch.randn(6, 6, dtype=torch.float64)
            for net, optimizer in zip(nets, optimizers, strict=True):
                optimizer.zero_grad(set_to_none=case is not zeroed)
                with contextlib.nullcontext() if net is nets[0] else fxpar.alone():
                    case(net, x.detach().clone(), rank, step)
            if case not in CASES:
                averaged(other)
            wrong += [(step, each) for each in far(*map(gradients, modules))]
            for optimizer in optimizers:
                optimizer.step()
    return wrong


# A backward that differs by rank and step, what DDP refuses, checkpoints, hooks.
QUICK = [changing, twice_in_graph, on_one_rank, eager_part, BY_HAND[5], some_inputs]
QUICK += [unreduced_at_first, partly_unreduced]


def every_case(way, quick):
    cases = [hooked_behind, *QUICK] if way == "eager" else QUICK
    return {
        str(case): wrong
        for case in (cases if quick else [*CASES, *BY_HAND])
        if (wrong := unlike(case, way, steps=2 if quick else 4))
    }


@pytest.mark.parametrize(
    ("way", "quick"),
    [
        ("eager", True),
        pytest.param("graph", True, marks=pytest.mark.slow),
        *(pytest.param(way, False, marks=pytest.mark.slow) for way in WAYS),
    ],
)
def test_gradients_are_means(way, quick):
    pool = shared_pool(2)
    pool.renew()  # what others watch in a group is averaged with each backward
    for result in pool.run(every_case, way, quick):
        assert not result, result


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(9, 4, sparse=True)

    def forward(self, x):
        return self.rows(x)


def train_sparse():
    model = Rows()
    mean_gradients.watch("rows", {"": model}, over_all())
    model(torch.tensor([dist.get_rank()])).sum().backward()


def test_a_sparse_gradient_is_refused():
    errors = shared_pool(2).errors(train_sparse)
    assert any(isinstance(e, GradientError) for e in errors)
    assert all("sparse" in str(e) or "its backward" in str(e) for e in errors), errors


def skip_a_backward(then):
    join(Options.read({"inputs": "local"}))  # reads FXPAR_TIMEOUT
    torch.manual_seed(7)
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    mean_gradients.watch("model", {"": model}, over_all())
    for _ in range(3 - dist.get_rank()):
        model(torch.randn(2, 3)).sum().backward()
    if dist.get_rank() and then == "sleeps":
        while not given_up():
            time.sleep(0.1)
    elif then == "watches":
        mean_gradients.watch("other", {"": other}, over_all())
    elif then == "calls":
        outside_graphs._take_buffers("other", [torch.ones(3)])


@pytest.mark.parametrize("then", ["sleeps", "watches", "calls"])
def test_a_rank_that_runs_fewer_backwards_is_named(then):
    begin = time.monotonic()
    env = {"FXPAR_TIMEOUT": "1", "FXPAR_LATE_TIMEOUT": "60"}
    if then == "sleeps":
        env["FXPAR_LATE_TIMEOUT"] = "2"
    errors = shared_pool(2).errors(skip_a_backward, then, env=env)
    assert time.monotonic() - begin < 20
    assert isinstance(errors[0], RankMismatchError)
    text = str(errors[0])
    assert "the end of a backward" in text
    assert "rank 1" in text
    assert "test_mean_gradients.py" in text
    if then != "sleeps":
        assert isinstance(errors[1], RankMismatchError)
        assert "other" in str(errors[1])
    shared_pool(2).renew()


def fail_on_one_rank():
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    mean_gradients.watch("model", {"": model}, over_all())

    def fail(_):
        raise ValueError("no such row")

    y = model[0](torch.randn(2, 3))
    if dist.get_rank():
        y.register_hook(fail)
    model[1](y).sum().backward()


def test_a_backward_that_fails_ends_the_others():
    errors = shared_pool(2).errors(fail_on_one_rank)
    assert isinstance(errors[1], ValueError)
    assert isinstance(errors[0], RankMismatchError)
    assert "rank 1 failed" in str(errors[0])
    shared_pool(2).renew()


def launched_early(way):
    """How many buckets a rank launched before the end of each backward."""
    torch.manual_seed(7)
    model = Parts().double()
    net, launched, plain = watched(model, way), [], meeting.meet

    def meet(place, word, *args, **kwargs):
        if place == mean_gradients.END:
            launched.append(json.loads(word)[0])
        return plain(place, word, *args, **kwargs)

    with mock.patch.object(meeting, "meet", meet), small_buckets():
        for _ in range(3):
            model.zero_grad()
            net(torch.randn(2, 6, dtype=torch.float64), "abcd").sum().backward()
    pairs = [(p.grad, p.grad.untyped_storage()) for p in model.c.parameters()]
    return launched, [memory.nbytes() > x.nbytes for x, memory in pairs]


@pytest.mark.parametrize("way", QUICK_WAYS)
def test_buckets_are_launched_in_the_backward(way):
    for launched, views in shared_pool(2).run(launched_early, way):
        assert launched[0] == 0
        assert launched[1] == launched[2] >= 2
        assert views == [way != "eager"] * 2


def most_held(way):
    """MiB that the third backward allocates at most, beyond what the second left."""
    layers = (nn.Linear(1024, 1024, bias=False) for _ in range(6))  # of 4 MiB
    net = watched(nn.Sequential(*layers), way)
    for _ in range(3):
        net.zero_grad()
        loss = net(torch.ones(2, 1024)).sum()
        with profile(profile_memory=True) as profiled:
            loss.backward()
    events = profiled.profiler.kineto_results.events()
    sizes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    return max(accumulate(size for _, size in sorted(sizes))) / 2**20


@pytest.mark.parametrize("way", ["graph", "inductor"])
def test_gradients_that_were_handed_over_are_freed(way):
    assert max(shared_pool(2).run(most_held, way)) < 10


class OneMemory(nn.Module):
    """Of ``a`` and ``b`` one gradient is a view of the other; that of ``c`` is read for
    the one of ``d``."""

    def __init__(self):
        super().__init__()
        for name in "abcd":
            setattr(self, name, nn.Parameter(torch.randn(4, 4)))

    def forward(self, x):
        return (x @ (self.a.t() + self.b) @ (self.c * 2 + self.d.sin())).square().sum()


def gradients_in_one_memory(way):
    torch.manual_seed(3)
    model = OneMemory().double()
    twin, net = copy.deepcopy(model), watched(model, way)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        x = torch.randn(3, 4, dtype=torch.float64)
        for each in (net, twin):
            each.zero_grad()
            with contextlib.nullcontext() if each is net else fxpar.alone():
                each(x).backward()
        averaged(twin)
    return far(gradients(model), gradients(twin))


@pytest.mark.parametrize("way", ["graph", "inductor"])
def test_gradients_that_others_read_are_not_freed(way):
    assert shared_pool(2).run(gradients_in_one_memory, way) == [[], []]


def accumulates(way):
    """How many memories buckets have after backwards that accumulate, whether each
    gradient stays where it was, and whether one that no backward adds to stays as a
    rank set it."""
    torch.manual_seed(7)
    model, rank = Parts().double(), dist.get_rank()
    net = watched(model, way)

    def backward(which="abcd"):
        net(torch.ones(2, 6, dtype=torch.float64), which).sum().backward()

    for _ in range(2):
        model.zero_grad()
        backward()
    first = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    backward()
    model.c.weight.grad.mul_(1 / 3 + rank)  # as no other rank has it
    before = model.c.weight.grad.clone()
    backward("abab")
    reducer = mean_gradients._REDUCERS[dist.group.WORLD]
    ours = {id(p) for p in model.parameters()}
    buckets = [b for b in reducer.buckets if id(b.members[0].ref()) in ours]
    last = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return (
        {len(bucket.memories) for bucket in buckets},
        all(last[name] is gradient for name, gradient in first.items()),
        torch.equal(before, model.c.weight.grad),
    )


@pytest.mark.parametrize("way", QUICK_WAYS)
def test_gradients_accumulate_where_they_are(way):
    for result in shared_pool(2).run(accumulates, way):
        assert result == ({1}, True, True)


def replaced_meanwhile():
    """A hook drops a gradient that the running backward has added to."""
    torch.manual_seed(7)
    model = Parts().double()
    net = watched(model, "graph")
    for step in range(4):
        if step < 2:
            model.zero_grad()
        x = model.unused.bias.new_ones(6, 3) * model.unused.bias
        x = x.repeat(1, 2)
        if step == 3:

            def drop(_):
                model.a.weight.grad = None

            x.register_hook(drop)
        net(x).sum().backward()


def test_a_gradient_that_is_replaced_in_a_backward_is_refused():
    errors = shared_pool(2).errors(replaced_meanwhile)
    assert all(isinstance(e, GradientError) for e in errors), errors
    assert all("a.weight was replaced while" in str(e) for e in errors), errors
    shared_pool(2).renew()


def test_results_that_show_one_memory_are_copied():
    def show(x):
        rows, whole = x + 1, x * 2
        first, second = rows.unbind(0)
        return first, second, first.view(2, 2), whole, whole.t(), whole.t()

    x = torch.randn(2, 4)
    apart_from_whole = {3: "whole", 4: "another", 5: "whole"}
    for own, copies in ((None, 3), ({}, 0), (apart_from_whole, 1)):
        module = make_fx(show, tracing_mode="fake")(x)
        separate_results(module.graph, own)
        module.recompile()
        results = module(x)
        assert all(map(torch.equal, results, show(x)))
        kept = torch.ops.fxpar.kept.default
        found = module.graph.find_nodes(op="call_function", target=kept)
        assert len(found) == copies
        assert len({y.data_ptr() for y in results}) == len(results) - 3 + copies


def holders_of(fn):
    """The number with the gradient that a backward hands over first."""
    graph = make_fx(fn, tracing_mode="fake")(torch.randn(4, 4)).graph
    hand_over(graph, {0: 0})
    (call,) = graph.find_nodes(
        op="call_function", target=torch.ops.fxpar.hand_over.default
    )
    return call.args[2]


def test_what_may_share_the_memory_of_a_gradient():
    assert holders_of(lambda x: (x @ x.t(), x + 1)) == [1]
    assert holders_of(lambda x: ((x @ x.t()).t(), x + 1)) == [2]

    def copied(x):
        return torch.ops.aten.constant_pad_nd(x, [0, 0])

    assert holders_of(lambda x: (copied(x @ x.t()), x + 1)) == [1]

    def copy_of_what_others_read(x):
        product = x @ x.t()
        return copied(product), product + 1

    def read_by_others(x):
        product = x @ x.t()
        return product, product + 1

    def view_of_what_others_read(x):
        product = x @ x.t()
        return product.t(), product + 1

    for fn in (copy_of_what_others_read, read_by_others, view_of_what_others_read):
        assert holders_of(fn) == [0], fn
    assert holders_of(lambda x: (copied(x), x + 1)) == [0], "the copy of an input"


def reductions_unreduced():
    """How many all-reduces each of four backwards launched."""
    torch.manual_seed(7)
    model, counts = Parts().double(), []
    net, plain = watched(model, "graph"), mean_gradients.launch_sum

    def launch(*args):
        counts[-1] += 1
        return plain(*args)

    with mock.patch.object(mean_gradients, "launch_sum", launch):
        for step in range(4):
            counts.append(0)
            x = torch.randn(2, 6, dtype=torch.float64)
            waits = mean_gradients.unreduced(net.parameters())
            with contextlib.nullcontext() if step % 2 else waits:
                net(x).sum().backward()
    return counts


def test_nothing_is_sent_while_gradients_wait():
    assert shared_pool(2).run(reductions_unreduced) == [[0, 1, 0, 1]] * 2


def with_arguments():
    """Parameters that functions take, and those under what a graph takes."""
    rank = dist.get_rank()
    torch.manual_seed(7)
    w, v = (nn.Parameter(torch.randn(4, 4, dtype=torch.float64)) for _ in "wv")
    model = nn.Linear(4, 4).double()
    twins = copy.deepcopy([w, v, *model.parameters()])
    torch.manual_seed(rank)
    wrong = []
    for step in range(3):
        x = torch.randn(2, 4, dtype=torch.float64)
        # The same functions, in another order.
        for name, p in (("w", w), ("v", v))[:: -1 if rank else 1]:
            mean_gradients.note("fn", {name: p}, over_all())
        y = model(x) @ w
        leaves = {str(i): p for i, p in enumerate(mean_gradients.leaves_under(y))}
        mean_gradients.note("loss", leaves, over_all(), early=False)
        if rank == 0 or step:
            y = y @ v
        y.square().sum().backward()
        with fxpar.alone():
            y = nn.functional.linear(x, *twins[2:]) @ twins[0]
            if rank == 0 or step:
                y = y @ twins[1]
            y.square().sum().backward()
        for p, twin in zip([w, v, *model.parameters()], twins, strict=True):
            grad = torch.zeros_like(twin) if twin.grad is None else twin.grad
            dist.all_reduce(grad)
            if not torch.allclose(p.grad, grad / 2, rtol=1e-12, atol=1e-12):
                wrong.append((step, list(p.shape)))
            p.grad = twin.grad = None
    return wrong


def test_parameters_that_are_seen_in_arguments():
    assert shared_pool(2).run(with_arguments) == [[], []]


def train_unknown():
    torch.manual_seed(7)
    w = nn.Parameter(torch.randn(3))
    mean_gradients.note("fn", {"wv"[dist.get_rank()]: w}, over_all())
    w.sum().backward()


def test_a_parameter_that_another_rank_does_not_know():
    for error in shared_pool(2).errors(train_unknown):
        assert isinstance(error, RankMismatchError)
        assert "fn: w: is not known" in str(error)


def inside_ddp():
    """DDP wraps what is watched, before or after."""
    torch.manual_seed(7)
    wrong = []
    for early in (False, True):
        model = nn.Linear(3, 3).double()
        twin = copy.deepcopy(model)
        if early:
            mean_gradients.watch("model", {"": model}, over_all())
        ddp, own = map(DistributedDataParallel, (model, twin))
        mean_gradients.leave(ddp.parameters())
        if not early:
            mean_gradients.watch("model", {"": model}, over_all())
        for _ in range(2):
            x = torch.randn(2, 3, dtype=torch.float64) * (1 + dist.get_rank())
            ddp(x).square().sum().backward()
            own(x).square().sum().backward()
            wrong += far(gradients(model), gradients(twin))
    return wrong


def test_what_ddp_reduces_is_left_to_it():
    assert shared_pool(2).run(inside_ddp) == [[], []]


def unequal_values():
    torch.manual_seed(dist.get_rank())
    model = nn.BatchNorm1d(3)
    model.weight.data.normal_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mean_gradients.watch("model", {"": model}, over_all())
    model.running_mean += 1 + dist.get_rank()
    model.num_batches_tracked += dist.get_rank()
    outside_graphs._take_buffers("model", list(model.buffers()))
    state = {k: x.tolist() for k, x in model.state_dict().items()}
    return state, [str(each.message) for each in caught]


def test_parameters_and_buffers_become_those_of_rank_0():
    (first, said), (second, nothing) = shared_pool(2).run(unequal_values)
    assert first == second
    assert first["running_mean"] == [1, 1, 1]
    assert any("taken from rank 0: weight" in text for text in said), said
    assert not nothing


def grow_and_shrink():
    """Models come and go; each is averaged."""
    torch.manual_seed(dist.get_rank())
    wrong = 0
    for i in range(6):
        model = nn.Linear(3, 2 + i).double()
        mean_gradients.watch(f"model {i}", {"": model}, over_all())
        for _ in range(2):
            x = torch.randn(2, 3, dtype=torch.float64)
            (own,) = torch.autograd.grad(model(x).square().sum(), [model.weight])
            dist.all_reduce(own)
            model.zero_grad()
            model(x).square().sum().backward()
            wrong += not torch.allclose(model.weight.grad, own / 2, rtol=1e-12)
    reducer = mean_gradients._REDUCERS[dist.group.WORLD]
    memories = sum(len(bucket.memories) for bucket in reducer.buckets)
    return wrong, memories


def test_models_come_and_go():
    for wrong, memories in shared_pool(2).run(grow_and_shrink):
        assert not wrong
        assert memories <= 6


def end_of_group():
    """A backward once the process group is gone."""
    p = nn.Parameter(torch.ones(3))
    mean_gradients.watch("model", {"": nn.ParameterList([p])}, over_all())
    group = _torch.distributed.default_group()
    with mock.patch.object(_torch.distributed, "default_group", lambda: None):
        p.square().sum().backward()
        assert not mean_gradients.is_watched(p)
    assert group is _torch.distributed.default_group()
    return p.grad.tolist()


def test_a_backward_after_the_group_is_the_ranks_own():
    assert shared_pool(2).run(end_of_group) == [[2.0] * 3] * 2
