"""Clusters that several tests share. MKERNEL_LIBRARY and MKERNEL_BIN say what is tested; else this checkout's build.

With MKERNEL_INSTALLED the package is the one that is installed, and all that it brought along.
"""
import os
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
if not os.environ.get("MKERNEL_INSTALLED"):
    sys.path.insert(0, str(ROOT / "client/python"))

import mkernel  # noqa: E402


@pytest.fixture(scope="session")
def cluster():
    """Two nodes with two ranks each."""
    with mkernel.local_cluster(nodes=2, local=2) as started:
        yield started


@pytest.fixture(scope="session", params=[(1, 1), (1, 3), (2, 1)], ids=lambda shape: f"{shape[0]}x{shape[1]}")
def other_cluster(request):
    """Clusters of other shapes."""
    with mkernel.local_cluster(*request.param) as started:
        yield started
