"""Options: one table, read from options= and the environment."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from fxpar import config
from fxpar.config import Options
from fxpar.errors import OptionError
from fxpar.sharding.mesh import Mesh


def test_defaults() -> None:
    options = Options.read(None, {})
    assert options == Options()
    assert (options.plan, options.inputs, options.outputs) == (
        "search",
        "global",
        "global",
    )
    assert str(options) == ""


def test_every_variable_is_read(tmp_path: Path) -> None:
    hints = tmp_path / "hints.toml"
    hints.write_text("")
    environ = {
        "FXPAR_MESH": "dp=2",
        "FXPAR_PLAN": "replicate",
        "FXPAR_INPUTS": "local",
        "FXPAR_HINTS": str(hints),
        "FXPAR_HARDWARE": "h100",
        "FXPAR_MEASURE": "0",
        "FXPAR_SCHEDULE": "none",
        "FXPAR_MICROBATCHES": "4",
        "FXPAR_PIPELINE": "1f1b",
        "FXPAR_EXPERT_ROOM": "1.5",
        "FXPAR_EXPERT_EXCHANGE": "gather",
        "FXPAR_REPLAN": "1.2",
        "FXPAR_CODEGEN": "eager",
        "FXPAR_DEBUG": "3",
        "FXPAR_PROGRESS": "0",
        "FXPAR_DUMP": "somewhere",
        "FXPAR_DISABLE": "bucket, delay",
        "FXPAR_STRICT": "1",
        "FXPAR_VERIFY": "yes",
        "FXPAR_TIMEOUT": "7",
        "FXPAR_LATE_TIMEOUT": "90",
    }
    read = Options.read({}, environ)
    assert read == Options(
        mesh="dp=2",
        plan="replicate",
        inputs="local",
        hints=str(hints),
        hardware="h100",
        measure=False,
        schedule="none",
        microbatches=4,
        pipeline="1f1b",
        expert_room=1.5,
        expert_exchange="gather",
        replan=1.2,
        codegen="eager",
        debug=3,
        progress=False,
        dump="somewhere",
        disable=frozenset({"bucket", "delay"}),
        strict=True,
        verify=True,
        timeout=7.0,
        late_timeout=90.0,
    )
    named = {row.name for row in fields(Options) if row.metadata["env"]}
    assert {"FXPAR_" + name.upper() for name in named} == set(environ)
    without = {"outputs", "param_dtype", "reduce_dtype", "reshard_after_forward"}
    without |= {"cache_plans", "fuse", "inductor", "memory", "search_seconds", "tune"}
    assert named == {row.name for row in fields(Options)} - without


def test_options_beat_variables_and_empty_is_not_given() -> None:
    environ = {"FXPAR_DEBUG": "1", "FXPAR_CODEGEN": "eager", "FXPAR_PLAN": ""}
    options = Options.read({"debug": 2, "codegen": None}, environ)
    assert (options.debug, options.codegen, options.plan) == (2, "eager", "search")


def test_the_environment_is_read_at_call_time(monkeypatch) -> None:
    monkeypatch.setenv("FXPAR_DEBUG", "2")
    assert Options.read().debug == 2


def test_typed_values() -> None:
    mesh = Mesh.parse("dp=2")
    options = Options.read(
        {
            "mesh": mesh,
            "strict": True,
            "disable": ["drain", "bucket"],
            "hints": {"x": ["dp"]},
        },
        {},
    )
    assert options.mesh is mesh and options.strict and options.hints == {"x": ["dp"]}
    assert "disable=['bucket', 'drain']" in str(options)


def test_settings_of_inductor() -> None:
    """The same text in every process, in whatever order they stand."""
    options = Options.read({"inductor": {"max_autotune": True, "cpp.threads": 2}}, {})
    assert options.inductor == (("cpp.threads", 2), ("max_autotune", True))
    assert "inductor=(('cpp.threads', 2), ('max_autotune', True))" in str(options)
    mode = Options.read({"inductor": "max-autotune-no-cudagraphs"}, {}).inductor
    assert dict(mode) == {"coordinate_descent_tuning": True, "max_autotune": True}
    assert Options.read({"inductor": "default", "codegen": "eager"}, {}).inductor == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mehs": "dp=2"}, "unknown option 'mehs'\n  fix: did you mean 'mesh'"),
        ({"zzz": 1, "plam": 2}, "unknown option 'zzz', 'plam'.*did you mean 'plan'"),
        ({"plan": "replcate"}, "did you mean 'replicate'"),
        ({"plan": "/no/such/plan.json"}, "no such file"),
        ({"inputs": "globl"}, "did you mean 'global'.*use global or local"),
        ({"debug": 5}, "option 'debug' cannot be 5\n  fix: use a number from 0 to 4"),
        ({"debug": True}, "from 0 to 4"),
        ({"strict": "maybe"}, "use 1 or 0"),
        ({"disable": 3}, "separated by commas"),
        (
            {"disable": "bucket,prefech"},
            "did you mean 'prefetch'.*passes are share_by",
        ),
        ({"hints": "/no/such/hints.toml"}, "no such file"),
        ({"mesh": 4}, "dp=2,tp=4"),
        ({"outputs": "local"}, "use global or dtensor"),
        ({"timeout": "nan"}, "use a number above 0"),
        ({"search_seconds": float("inf")}, "use a number above 0"),
        ({"memory": "inf"}, "use a number above 0"),
        ({"microbatches": "\u00b2"}, "use a whole number from 1 on"),
        ({"inductor": "max-autotun"}, "did you mean 'max-autotune'"),
        ({"inductor": "lite"}, "fxpar needs fallback_by_default=False"),
        ({"inductor": {"max_autotun": True}}, "did you mean 'max_autotune'"),
        ({"inductor": {"max_autotune": 1}}, "'max_autotune' takes a bool"),
        ({"inductor": {"joint_custom_pre_pass": print}}, "needs joint_custom_pre_pass"),
        ({"inductor": {"post_grad_custom_pre_pass": print}}, "takes a number, a text"),
        ({"inductor": {"freezing": True}}, "needs freezing=False"),
        ({"inductor": 3}, "a mode of torch.compile, or a mapping"),
        (
            {"inductor": "max-autotune", "codegen": "eager"},
            "codegen 'eager' does not run Inductor",
        ),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(OptionError, match=f"(?s){message}"):
        Options.read(options, {})


def test_bad_variables_are_named() -> None:
    with pytest.raises(OptionError, match="FXPAR_CODEGEN cannot be 'triton'"):
        Options.read(None, {"FXPAR_CODEGEN": "triton"})
    with pytest.raises(OptionError, match="FXPAR_MEHS.*\n.*'FXPAR_MESH'"):
        Options.read(None, {"FXPAR_MEHS": "dp=2"})


def test_table_has_a_row_for_each_option() -> None:
    rows = config.table().splitlines()[2:]
    names = [row.name for row in fields(Options)]
    assert [row.split("|")[2].strip(" `") for row in rows] == [
        *names,
        *("" for _ in config.SWITCHES),
    ]
