"""Fixtures of several unit tests."""

from pathlib import Path

import pytest

from ddp_nanguard.dump import write_dump
from tests.dump_requests import request


@pytest.fixture
def path(tmp_path):
    """A whole dump of one rank."""
    result = write_dump(request(tmp_path))
    assert result.problems == []
    return Path(result.path)
