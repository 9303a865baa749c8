"""Random training loops for ``as_ddp``: ``loop("rows/7")`` and ``loop("ops/7")``.

``rows``: programs of what a batch is used for (statistics over rows, halves, chunks,
counts, pairs of rows, buffers), whose ranks have other numbers of rows, other branches
and graph breaks. ``ops``: those of ``random_programs`` and ``random_cuts``, cut at
random, with a rank's own values as arguments.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch
from torch import nn

from tests.helpers.as_ddp import Loop, Side
from tests.helpers.random_cuts import CutsCase
from tests.helpers.random_programs import Case, module_of

BREAK = "torch._dynamo.graph_break()"

# Expressions by the kind of value: "m" is a matrix of rows, "v" has a value for each
# column, "r" one for each row, "s" is a number. ``n`` is the number of rows, ``p`` a
# matrix and ``q`` a vector of new parameters.
EXPRESSIONS = [
    ("m", "m @ p"),
    ("m", "torch.tanh(m @ p + q)"),
    ("m", "m + v"),
    ("m", "m * torch.tanh(v)"),
    ("m", "m * r.tanh().unsqueeze(1)"),
    ("m", "m - m.mean(0)"),
    ("m", "m.softmax(0) * q"),
    ("m", "F.layer_norm(m, (4,), q)"),
    ("m", "F.normalize(m, dim=0)"),
    ("m", "m.cumsum(0) / n"),
    ("m", "m.roll(1, 0) * q"),
    ("m", "m.flip(0) - m"),
    ("m", "m[m[:, 0].argsort()]"),
    ("m", "m[ids] * q"),
    ("m", "torch.cat([m[n // 2 :], m[: n // 2]]) + q"),
    ("m", "(m @ m.T).softmax(-1) @ m"),
    ("m", "m @ (m.T @ m).tanh() / n"),
    ("m", "m * torch.arange(n).unsqueeze(1) / n"),
    ("m", "m.masked_fill((m > 0.5) & (m.amax(0) > 1), 0.1)"),
    ("m", "torch.stack([row.tanh() for row in (m @ p).split(1)]).squeeze(1)"),
    ("m", "self.eager(m)"),
    ("m", "checkpoint(lambda x: (x @ p).tanh(), m, use_reentrant=False)"),
    ("v", "m.mean(0) * q"),
    ("v", "m.sum(0)"),
    ("v", "m.amax(0) + q"),
    ("v", "m.var(0, correction=0)"),
    ("v", "m[0] - m[-1]"),
    ("v", "r @ m / n"),
    ("v", "sum(m[i : i + 2].logsumexp(0) for i in range(0, n, 2))"),
    ("v", "(m[: n // 2].sum(0) - m[n // 2 :].sum(0)) * q"),
    ("r", "m.logsumexp(1)"),
    ("r", "m @ v"),
    ("r", "(m * q).norm(dim=1)"),
    ("r", "F.cross_entropy(m @ p, ids % 4, reduction='none')"),
    ("r", "r - r.mean()"),
    ("r", "r.cumsum(0) / torch.arange(1, n + 1)"),
    ("s", "r.mean()"),
    ("s", "r.sum() / n"),
    ("s", "r.sum() / max(n - 1, 1)"),
    ("s", "r.logsumexp(0)"),
    ("s", "F.cross_entropy(m @ m.T, torch.arange(n))"),
    ("s", "F.cross_entropy(m, ids % 4, ignore_index=0, reduction='sum')"),
    ("s", "v.square().mean().sqrt()"),
    ("s", "m.norm()"),
    ("s", "r[: n // 2].mean() * r[n // 2 :].sum()"),
    ("s", "s * s.tanh()"),
    ("s", "q.square().sum()"),
]
# Statements that write a buffer ``b`` and give its value.
WRITES = [
    "self.b.mul_(0.9).add_(0.1 * v.detach())",
    "self.b.copy_((self.b + v.detach()).tanh())",
    "self.b = 0.9 * self.b + 0.1 * v.detach()",
    "self.b[ids[0] % 4] = m.detach().mean()",
]
HEAD = [
    "n = x.shape[0]",
    "m0 = self.first(x)",
    "v0 = x.mean(0)",
    "r0 = m0.sum(1)",
    "s0 = r0.logsumexp(0)",
]
IMPORTS = "from torch.utils.checkpoint import checkpoint"


class RandomRows:
    """One program, and the way a loop calls it. ``str()`` is the reproduction."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.parameters: dict[str, torch.Tensor] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self.values = {kind: [f"{kind}0"] for kind in "mvrs"}
        self.lines: list[str] = []
        for _ in range(self.rng.randint(4, 10)):
            self._statement()
        self.rows = self.rng.choice(["alike", "by rank", "by step"])
        self.way = self.rng.choice(["once", "once", "twice", "two forwards", "counted"])

    def source(self) -> str:
        results = f"{self.loss()}, m0.amax(0), {self.values['r'][-1]}.detach(), n"
        lines = [IMPORTS, *HEAD, *self.lines, f"return {results}"]
        return "\n".join(["def forward(self, x, ids):", *(f"    {s}" for s in lines)])

    def loss(self) -> str:
        """Of all values, each with a slope of its own."""
        forms = {
            "m": "{}.tanh().square().mean()",
            "v": "0.3 * {}.tanh().sum()",
            "r": "{}.tanh().mean()",
            "s": "{}.tanh()",
        }
        values = [(k, name) for k, names in self.values.items() for name in names]
        return " + ".join(forms[kind].format(name) for kind, name in values)

    def __str__(self) -> str:
        return f"{self.source()}\n# rows {self.rows}, {self.way}"

    def program(self) -> nn.Module:
        module = module_of(self.source(), self.parameters, self.buffers)
        module.first = nn.Linear(4, 4)
        module.eager = torch.compiler.disable(nn.Linear(4, 4))
        return module

    def _statement(self) -> None:
        if self.rng.random() < 0.15:
            self.lines.append(BREAK)
        if self.rng.random() < 0.12:
            self.lines += ["if self.turned:", f"    {BREAK}"]
        if self.rng.random() < 0.15:
            name = f"b{len(self.buffers)}"
            self.buffers[name] = torch.zeros(4, dtype=torch.float64)
            write = self._filled(self.rng.choice(WRITES)).replace(
                "self.b", f"self.{name}"
            )
            self.lines.append(write)
            self._value("v", f"self.{name}.clone()")
            return
        kind, text = self.rng.choice(EXPRESSIONS)
        old = self.values[kind][-1]
        new = self._value(kind, self._filled(text))
        if self.rng.random() < 0.12:
            line = self.lines.pop()
            self.lines += [f"{new} = {old}", "if self.turned:", f"    {line}"]

    def _value(self, kind: str, text: str) -> str:
        name = f"{kind}{len(self.values[kind])}"
        self.values[kind].append(name)
        self.lines.append(f"{name} = {text}")
        return name

    def _filled(self, text: str) -> str:
        """An expression of values and parameters, for one of kinds."""
        words = {kind: self._pick(kind) for kind in "mvrs"}
        shapes = {"p": (4, 4), "q": (4,)}
        tokens = _words(text)
        for letter, shape in shapes.items():
            if letter in tokens:
                name = f"p{len(self.parameters)}"
                generator = torch.Generator().manual_seed(len(self.parameters))
                value = torch.randn(*shape, generator=generator, dtype=torch.float64)
                self.parameters[name] = value * 0.7
                words[letter] = f"self.{name}"
        return "".join(words.get(token, token) for token in tokens)

    def _pick(self, kind: str) -> str:
        names = self.values[kind]
        return names[-1] if self.rng.random() < 0.7 else self.rng.choice(names)


def _words(text: str) -> list[str]:
    """A text cut before and behind names, those behind a dot aside."""
    groups = itertools.groupby(text, lambda c: c.isalnum() or c in "_.")
    return [
        part for is_name, letters in groups for part in _head("".join(letters), is_name)
    ]


def _head(text: str, is_name: bool) -> list[str]:
    head, dot, rest = text.partition(".")
    return [head, dot + rest] if is_name else [text]


def run_rows(seed: int, use: Side) -> None:
    case = RandomRows(seed)
    model = use.model(case.program())
    model.turned = use.own(False, True) and not use.cell.sharded
    run = use.wrap(model, find_unused_parameters=True)

    def call(step: int) -> torch.Tensor:
        rows = {"alike": 4, "by rank": use.own(5, 3, 2, 4)}.get(case.rows)
        rows = rows or use.own(3, 2, 4) + step
        loss, *results = run(use.rows(rows, 4), use.ints(rows, rows))
        use.note(loss=loss, results=results)
        return loss

    for step in use.steps(model):
        match case.way:
            case "once":
                call(step).backward()
            case "twice":
                (call(step) / 2).backward()
                use.gradients(model)
                (call(step) / 2).backward()
            case "two forwards":
                (call(step) + call(step).square()).backward()
            case _:
                (call(step) * use.own(2.0, 5.0)).backward()


def is_comparable(case: Case) -> bool:
    """Whether a parameter has a gradient, and the program asks for no mesh and draws
    nothing."""
    if not case.grad or case.draws or "fxpar." in case.source():
        return False
    _, gradients, _ = case.eager()
    return any(name in gradients for name in case.parameters)


def run_ops(seed: int, use: Side) -> None:
    rng = random.Random(seed)
    kind = rng.choice((Case, CutsCase))
    cases = (kind(rng.randrange(10**6)) for _ in itertools.count())
    case = next(c for c in cases if is_comparable(c))
    head, *lines, results = case.source().split("\n")
    for _ in range(rng.choice((0, 0, 1, 2))):
        lines.insert(rng.randint(0, len(lines)), f"    {BREAK}")
    source = "\n".join([head, *lines, results])
    model = use.model(module_of(source, case.parameters, case.buffers))
    run = use.wrap(model, find_unused_parameters=True)
    scale = rng.choice((1.0, 1e-2))
    for _ in use.steps(model, update=lambda optimizer: None):
        arguments = [
            x + 0.1 * use.rows(*x.shape) if x.is_floating_point() else x.clone()
            for x in case.arguments.values()
        ]
        values = run(*arguments)
        use.note(values=values)
        total: Any = sum(x.sum() for x in values if x.requires_grad)
        (total * scale).backward()


def loop(name: str) -> Loop:
    """A random loop by its kind and seed."""
    kind, seed = name.split("/")
    run = {"rows": run_rows, "ops": run_ops}[kind]
    return Loop(lambda use: run(int(seed), use))
