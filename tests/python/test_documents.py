"""What the documents and docstrings show is run."""
import doctest
import os
import pathlib
import subprocess
import sys

import pytest

import mkernel
from mkernel import arrays

PACKAGE = pathlib.Path(mkernel.__file__).resolve().parents[1]
CHECKOUT = pathlib.Path(__file__).resolve().parents[2] / "client/python"
NUMPY_EXAMPLES = ["two_layers_numpy.py"]


@pytest.mark.parametrize("module", [mkernel, arrays], ids=lambda module: module.__name__)
def test_docstrings(module):
    failed, tried = doctest.testmod(module)
    assert tried > 0 and failed == 0


@pytest.mark.parametrize("name", NUMPY_EXAMPLES)
def test_examples_that_need_numpy_alone(name):
    done = subprocess.run([sys.executable, CHECKOUT / "examples" / name], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "PYTHONPATH": str(PACKAGE)})
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout


def test_the_package_is_typed_and_names_what_it_offers():
    assert (PACKAGE / "mkernel/py.typed").exists()
    for name in mkernel.__all__:
        assert hasattr(mkernel, name)


def test_the_version_is_the_librarys():
    from mkernel import _c

    assert mkernel.__version__ == _c.version()


def test_an_old_pytorch_is_refused_in_words(monkeypatch):
    import types

    old = types.ModuleType("torch")
    old.library, old.__version__ = types.SimpleNamespace(), "1.13.0"
    monkeypatch.setitem(sys.modules, "torch", old)
    for name in [name for name in sys.modules if name.startswith("mkernel.torch")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match="2.4 or later, and this is 1.13.0"):
        import mkernel.torch  # noqa: F401
