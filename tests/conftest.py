"""What all tests share: options have their defaults unless a test says otherwise, but
ranks plan with built-in figures, not with what a busy machine measures.

A search leaves small programs whole, since splitting them does not pay. A test of what
happens when they are split uses the fixture ``propagated``.

``--part 2/8`` runs one of eight parts of the tests, which together are all of them.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator

import pytest

from tests.helpers import interpreter, processes

os.environ["FXPAR_MEASURE"] = "0"


@pytest.fixture(scope="module")
def propagated() -> Iterator[None]:
    """Plans of a module's tests are propagated and run as they are, on ranks too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FXPAR_PLAN", "propagate")
        patch.setenv("FXPAR_SCHEDULE", "none")
        yield


@pytest.fixture(scope="module", autouse=True)
def _plans_of_a_module() -> Iterator[None]:
    """No module's plans and graphs are kept for the next, so that Python has less to
    look through; nor do its ranks look around while others have none."""
    yield
    processes.forget_plans()
    processes.rest()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="N/OF", help="run part N of so many")
    parser.addoption("--failures", metavar="FILE", help="append failures as they come")


# Long files at the end of the order of folders come first: while the last of them ran,
# other workers would have nothing to do.
LONGEST = ("test_docs.py", "test_imports.py", "test_scripts_by_default.py")


def in_part(test: str, part: str) -> bool:
    """Whether a test, by its id, is in a part such as "2/8"."""
    number, of = map(int, part.split("/"))
    if not 1 <= number <= of:
        raise pytest.UsageError(f"--part {part}: the first is 1/{of}")
    return zlib.crc32(test.encode()) % of == number - 1


class Failures:
    """Writes each failure to a file at once, since a run may be cut off."""

    def __init__(self, path: str) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        with open(self.path, "a") as file:
            if report.failed:
                file.write(f"FAILED {report.nodeid}\n{report.longreprtext}\n\n")
            elif report.when == "call":
                file.write(
                    f"{report.outcome} {report.nodeid} {report.duration:.1f} s\n"
                )


def pytest_configure(config: pytest.Config) -> None:
    processes.collect_rarely()
    path = config.getoption("--failures")
    if path and not hasattr(config, "workerinput"):  # one process writes for all
        config.pluginmanager.register(Failures(path))


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)
    part = config.getoption("--part")
    if part:
        others = [item for item in items if not in_part(item.nodeid, part)]
        items[:] = [item for item in items if in_part(item.nodeid, part)]
        config.hook.pytest_deselected(items=others)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Tests marked ``interpreted`` run where Triton is an interpreter."""
    if pyfuncitem.get_closest_marker("interpreted") is None:
        return None
    interpreter.call(pyfuncitem)
    return True


def pytest_runtest_setup(item: pytest.Item) -> None:
    if interpreter.is_interpreter() and not item.get_closest_marker("interpreted"):
        pytest.skip("Triton is an interpreter here")
