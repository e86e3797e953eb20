#!/usr/bin/env python3
"""Where there is no GPU, a benchmark says in a sentence why it measures nothing: it neither crashes nor claims to have measured.

    benches_start_test.py PROGRAM...
"""
import os
import pathlib
import subprocess
import sys
import unittest


class WithoutGpus(unittest.TestCase):
    def test_each_says_why_it_measures_nothing(self):
        for program in programs:
            with self.subTest(pathlib.Path(program).name):
                ran = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False,
                                     env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
                self.assertGreater(ran.returncode, 0, ran.stderr)  # Below it: a signal's.
                self.assertRegex(ran.stdout + ran.stderr, r"\w+ \w+")


if __name__ == "__main__":
    programs = sys.argv[1:]
    assert programs, __doc__
    unittest.main(argv=sys.argv[:1])
