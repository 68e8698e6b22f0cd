"""Which devices the tests of this folder run on: the simulated one, and a real GPU where there is one."""

from __future__ import annotations

import pytest
import torch

from tests.rank_processes import REAL, SIMULATED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test of a worker builds the device, or waits for the other that does."""
    for item in items:
        if "tests/device/" in item.nodeid:
            item.add_marker(pytest.mark.timeout(240))


@pytest.fixture(params=[SIMULATED, REAL])
def device(request: pytest.FixtureRequest) -> str:
    """Each device there is."""
    if request.param == SIMULATED:
        return str(request.getfixturevalue("simulated"))
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return REAL
