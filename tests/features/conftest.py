import pytest


@pytest.fixture(scope="module", autouse=True)
def _each_module(propagated: None) -> None: ...
