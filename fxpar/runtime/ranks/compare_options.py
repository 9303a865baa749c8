"""This module compares the options of all ranks before anything depends on them.

In: the options of this rank. Out: nothing, or an error on all ranks that names each
option that differs, its values and their ranks. Never: an error for options that change
no program (what is printed, how long ranks wait).
"""

from __future__ import annotations

import json

import torch

from fxpar import _torch
from fxpar.config import Options, variable_of
from fxpar.errors import RankMismatchError
from fxpar.runtime.ranks import consensus, worlds
from fxpar.runtime.ranks.groups import Ranks
from fxpar.sharding.plan_request import read_auto


def options_text(options: Options, ranks: Ranks) -> str:
    """Return options, mesh and versions, which all ranks must share, as JSON."""
    chooses = read_auto(options.mesh) is not None
    shared = options.shared() | {
        "mesh": str(options.mesh if chooses else ranks.whole.mesh),
        "torch": torch.__version__,
        "fxpar": _torch.version.own_version(),
    }
    return json.dumps(shared, sort_keys=True)


def check_options(text: str, what: str) -> None:
    """Raise RankMismatchError on all ranks, which call this together, if one has
    another ``options_text``. ``what``: what this rank is about to do, in words."""
    own = json.dumps({"options": json.loads(text), "what": what})
    every = [json.loads(x) for x in consensus.gather("options", own)]
    lines = []
    for name in dict.fromkeys(name for each in every for name in each["options"]):
        ranks_of: dict[str, list[int]] = {}
        for rank, each in enumerate(every):
            ranks_of.setdefault(each["options"].get(name), []).append(rank)
        if len(ranks_of) > 1:
            values = (f"{x!r} on {consensus.named(r)}" for x, r in ranks_of.items())
            lines.append(f"{variable_of(name) or name} is {', '.join(values)}")
    if not lines:
        return
    doing = {worlds.global_rank(r): each["what"] for r, each in enumerate(every)}
    if len(set(doing.values())) > 1:
        lines += [f"rank {rank} runs {text}" for rank, text in doing.items()]
    raise consensus.as_reported(
        RankMismatchError(
            "options differ between ranks:\n  " + "\n  ".join(lines),
            fix="set the same options and FXPAR_ variables on every rank",
        )
    )
