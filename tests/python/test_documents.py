"""The programs in the documents that need NumPy alone run, and print what they should."""
import os
import pathlib
import re
import subprocess
import sys

import mkernel

PACKAGE = pathlib.Path(mkernel.__file__).resolve().parents[1]
PAGE = pathlib.Path(__file__).resolve().parents[2] / "deploy/docs/api/python.md"


def test_the_page_s_program_without_a_daemon_runs(tmp_path):
    (program,) = [block for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S) if "__main__" in block]
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(PACKAGE)}, capture_output=True,
                          text=True, timeout=120)
    # 32 products of each rank's number with 1, over the ranks 0 to 3.
    assert done.returncode == 0 and re.findall(r"\d+\.\d*", done.stdout) == ["192.0"] * 4, done.stdout + done.stderr
