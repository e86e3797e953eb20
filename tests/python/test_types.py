"""The package's type hints, for every Python that it says it runs on; where mypy is installed."""
import pathlib
import subprocess
import sys

import pytest

import mkernel

PACKAGE = pathlib.Path(mkernel.__file__).resolve().parent


@pytest.mark.parametrize("version", ["3.10", "3.14"])
def test_mypy_finds_nothing(version, tmp_path):
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--python-version", version, "--ignore-missing-imports", "--cache-dir", tmp_path, PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
