"""Runs the command line, ``python -m fxpar``: each command is a few calls.

In: the arguments of a process. Out: text, files that were asked for, an exit status.
Never: an algorithm.
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fxpar.errors import FxparError, OptionError

if TYPE_CHECKING:
    from fxpar.explain.script import PlanTarget
    from fxpar.sharding.plan import Plan

ABOUT = "Try fxpar, plan for any mesh without devices, see what a run planned."


def parser() -> argparse.ArgumentParser:
    """Return the parser; each command's function is its default ``run``."""
    top = argparse.ArgumentParser(prog="python -m fxpar", description=ABOUT)
    commands = top.add_subparsers(required=True, metavar="command")

    one = commands.add_parser(
        "demo", help="train on one device and on a mesh, compare the losses"
    )
    one.add_argument("script", nargs="?", help="default: examples/train_llama.py")
    one.add_argument("--mesh", default="dp=2,tp=2")
    one.add_argument("--codegen", choices=["inductor", "eager"])
    one.add_argument("--steps", type=int, default=5)
    one.add_argument("--timeout", type=float, default=600.0, help="seconds per run")
    one.set_defaults(run=_demo)

    one = commands.add_parser(
        "plan", help="plan for a mesh in this process, or show a saved plan"
    )
    one.add_argument(
        "target",
        help="file.py:function or module.path:function, which returns (module, args, "
        "kwargs); a script, which is run up to the first call of what it compiles with "
        "fxpar; or a file of plan.save()",
    )
    one.add_argument("--args", default="", help='of a script, such as "--steps 2"')
    one.add_argument("--mesh", default=os.environ.get("FXPAR_MESH"))
    one.add_argument(
        "--mode", help="propagate, search, replicate or a file; default: FXPAR_PLAN"
    )
    one.add_argument("--hints", metavar="FILE", help="TOML, as FXPAR_HINTS")
    one.add_argument(
        "--hardware", help="h100, ..., or a file of calibrate; default: FXPAR_HARDWARE"
    )
    one.add_argument(
        "--memory",
        type=_nbytes,
        metavar="SIZE",
        help="memory of a rank, such as 80GB; default: the hardware's",
    )
    one.add_argument(
        "--shard",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="shard parameters at rest as the plan does, as after fxpar.shard; else "
        "every rank holds them whole, as under torch.compile alone",
    )
    one.add_argument("--grad", action="store_true", help="plan the backward too")
    one.add_argument("--why", metavar="NAME", help="why a value has its spec")
    one.add_argument(
        "--layers", action="store_true", help="print memory and time by layer, too"
    )
    one.add_argument("--html", metavar="FILE", help="write the plan as a page")
    one.add_argument(
        "--json", "--save", metavar="FILE", help="write the plan, to load or to run"
    )
    one.add_argument(
        "--text", action="store_true", help="print every op instead of a summary"
    )
    one.set_defaults(run=_plan)

    one = commands.add_parser(
        "calibrate",
        help="measure this machine, for FXPAR_HARDWARE; under torchrun, too",
    )
    one.add_argument("--mesh", help="axes to measure; default: all ranks as one")
    one.add_argument(
        "--ranks",
        type=_at_least(1, int),
        help="start so many on CPU; default: the mesh",
    )
    one.add_argument("--out", metavar="FILE", default="hardware.json")
    one.add_argument("--quick", action="store_true", help="few sizes, nothing compiled")
    one.add_argument(
        "--limit",
        type=_at_least(0, float),
        default=300.0,
        help="seconds to measure in",
    )
    one.set_defaults(run=_calibrate)

    one = commands.add_parser(
        "run", help="run a script (under torchrun, too), then print its plans"
    )
    one.add_argument("script")
    one.add_argument("arguments", nargs=argparse.REMAINDER)
    one.set_defaults(run=_run)
    return top


def _at_least(least: int, kind: Callable[[str], float]) -> Callable[[str], float]:
    """Reads a number from the command line."""

    def number(text: str) -> float:
        value = kind(text)
        if not least <= value < math.inf:
            raise ValueError
        return value

    number.__name__ = f"number of at least {least}"  # as argparse says it
    return number


_SIZE = re.compile(r"([\d.]+(?:e\d+)?) *(?:([kmgt])(i?))?b?", re.IGNORECASE)


def _nbytes(text: str) -> int:
    """Reads bytes from the command line: 80GB, 64 GiB, 1e9."""
    size = _SIZE.fullmatch(text.strip())
    try:
        number, letter, binary = size.groups("") if size else ("", "", "")
        power = "kmgt".index(letter.lower()) + 1 if letter else 0
        return int(float(number) * (1024 if binary else 1000) ** power)
    except (ValueError, OverflowError):
        what = f"{text!r} is no size of memory: give one such as 80GB or 64GiB"
        raise argparse.ArgumentTypeError(what) from None


# Options that say how to plan a program.
_HOW = ("args", "mesh", "mode", "hints", "hardware", "memory", "shard", "grad")

# The exit status if a plan needs more memory than a rank has.
TOO_LARGE = 3


def _demo(args: argparse.Namespace) -> int:
    from fxpar.explain.demo import demo

    return demo(
        args.script,
        args.mesh,
        codegen=args.codegen,
        steps=args.steps,
        timeout=args.timeout,
    )


def _plan(args: argparse.Namespace) -> int:
    plan = _planned(args)
    if args.why:
        print(plan.why(args.why))
    elif args.text or not (args.html or args.json or args.layers):
        print(plan)
    else:
        print(plan.summary())
    if args.layers:
        print(plan.layers())
    for path, write in ((args.html, plan.to_html), (args.json, plan.save)):
        if path:
            write(path)
            print(f"wrote {path}")
    return 0 if plan.fits else TOO_LARGE


def _planned(args: argparse.Namespace) -> Plan:
    from fxpar.explain.script import PlanTarget, first_call, load
    from fxpar.planning import plan_call
    from fxpar.sharding.plan import Plan

    if args.target.endswith(".json"):
        plain = vars(parser().parse_args(["plan", args.target]))
        options = [x for x in _HOW if vars(args)[x] != plain[x]]
        if options:
            what = f"a saved plan is shown as it is, without --{', --'.join(options)}"
            fix = f"name the program, and --mode {args.target} to plan as it does"
            raise OptionError(what, fix=fix)
        return Plan.load(args.target)
    if not args.mesh:
        raise OptionError("there is no mesh to plan for", fix="add --mesh dp=2,tp=4")
    if args.target.endswith(".py"):
        call = first_call(args.target, shlex.split(args.args))
    else:
        call = PlanTarget(*load(args.target))
    grad = args.grad or (call.grad and _has_gradients(call))
    flags = {"hardware": args.hardware, "memory": args.memory}
    return plan_call(
        call.function,
        call.args,
        call.kwargs,
        {name: x for name, x in flags.items() if x is not None},
        mesh=args.mesh,
        hints=args.hints,
        mode=args.mode,
        grad=grad,
        shard=args.shard,
    )


def _has_gradients(call: PlanTarget) -> bool:
    from fxpar._torch.fake import tree_leaves
    from fxpar.runtime.tracing import modules_of

    parameters = (p for m in modules_of(call.function).values() for p in m.parameters())
    leaves = [*parameters, *tree_leaves((call.args, call.kwargs))]
    return any(getattr(x, "requires_grad", False) for x in leaves)


def _calibrate(args: argparse.Namespace) -> int:
    from fxpar.runtime.calibrate.measure import calibrate, describe, spawn
    from fxpar.runtime.ranks.groups import is_launched
    from fxpar.sharding.mesh import Mesh

    mesh = Mesh.parse(args.mesh) if args.mesh else None
    writes = os.environ.get("RANK", "0") == "0"
    folder = os.path.dirname(os.path.abspath(args.out))
    if writes and not os.access(folder, os.W_OK):
        what = f"{folder!r} does not exist or is not writable"
        raise OptionError(what, fix="name a file in another folder: --out FILE")
    ranks = args.ranks or (mesh.size if mesh else 1)
    if ranks > 1 and not is_launched(os.environ):
        options = ["--out", args.out, "--limit", str(args.limit)]
        options += ["--mesh", args.mesh] if args.mesh else []
        options += ["--quick"] if args.quick else []
        return spawn(ranks, options, timeout=2 * args.limit + 120.0)
    # Should another rank be gone, this one waits in a collective.
    last = 2 * args.limit + 60.0
    faulthandler.dump_traceback_later(last, exit=True, file=2)  # stderr
    try:
        hardware = calibrate(mesh, quick=args.quick, limit=args.limit)
    finally:
        faulthandler.cancel_dump_traceback_later()
    if writes:
        hardware.save(args.out)
        print(f"{describe(hardware)}\nFXPAR_HARDWARE={args.out}", flush=True)
    return 0


def _run(args: argparse.Namespace) -> int:
    import fxpar
    from fxpar.explain.script import run

    run(args.script, args.arguments)
    if os.environ.get("RANK", "0") == "0":
        for plan in fxpar.plans():
            print(plan.summary(), flush=True)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    args = parser().parse_args(arguments)
    try:
        return args.run(args)
    except FxparError as error:
        print(f"fxpar: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
