"""Campaigns: a quick form of each test by default, all of it with `--full`."""

import pytest


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run the campaigns in full")


@pytest.fixture
def full(request) -> bool:
    """Whether the whole campaign runs."""
    return request.config.getoption("--full", default=False)
