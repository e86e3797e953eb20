#!/usr/bin/env python3
"""run_ctest.py over builds made by hand: what is counted, what is run again, what is never run again."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parent / "run_ctest.py"


class RunCtest(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = pathlib.Path(holder.name)
        self.entries = []

    def entry(self, name, script):
        path = self.folder / f"{name}.sh"
        path.write_text(f"cd {self.folder}\n{script}\n", encoding="utf-8")
        self.entries.append(f'add_test({name} sh {path})\nset_tests_properties({name} PROPERTIES SKIP_RETURN_CODE 77)\n')

    def xml(self, name, cases):
        """Shell that writes the XML which GoogleTest would have written; cases: name -> passed."""
        body = "".join(f"<testcase name='{case}' classname='Suite'>{'' if good else '<failure/>'}</testcase>"
                       for case, good in cases.items())
        bad = sum(1 for good in cases.values() if not good)
        return (f"cat >test-results/{name}.xml <<'END'\n<testsuites tests='{len(cases)}' failures='{bad}'>"
                f"<testsuite name='Suite' skipped='0' disabled='0'>{body}</testsuite></testsuites>\nEND\n")

    def run_all(self, *arguments):
        (self.folder / "CTestTestfile.cmake").write_text("".join(self.entries), encoding="utf-8")
        result = self.folder / "result"
        out = subprocess.run([sys.executable, str(SCRIPT), str(self.folder), "plain", str(self.folder), str(result), "2",
                              *arguments], capture_output=True, text=True, check=True)
        lines = result.read_text(encoding="utf-8").splitlines()
        return lines[0], lines[1:], out.stdout

    def times(self, name):
        return len((self.folder / f"{name}.ran").read_text(encoding="utf-8").splitlines())

    def test_counts_cases_and_scripts(self):
        self.entry("cases", self.xml("cases", {"a": True, "b": True, "c": True}))
        self.entry("script", "true")
        self.entry("without_tool", "exit 77")
        counts, said, _ = self.run_all()
        self.assertEqual(counts, "counts 4 0 1")
        self.assertEqual(said, [])

    def test_what_always_fails_is_a_failure_with_its_cases_and_words(self):
        self.entry("cases", "echo ran >>cases.ran\necho it.cc:7: Failure\necho wanted 3\n" +
                   self.xml("cases", {"good": True, "bad": False}) + "exit 1")
        counts, said, out = self.run_all()
        self.assertEqual(counts, "counts 1 1 0")
        self.assertEqual(len(said), 1)
        self.assertTrue(said[0].startswith("failure plain: cases: Suite.bad"), said)
        self.assertIn("wanted 3", out)
        self.assertEqual(self.times("cases"), 2)

    def test_a_crash_after_the_last_case_is_a_failure(self):
        self.entry("cases", self.xml("cases", {"good": True}) + "kill -SEGV $$")
        counts, said, _ = self.run_all()
        self.assertEqual(counts, "counts 1 1 0")
        self.assertTrue(said[0].startswith("failure"))

    def test_what_passes_alone_is_counted_as_passed_and_said(self):
        self.entry("once", "if [ ! -e seen ]; then touch seen\n" + self.xml("once", {"a": True, "b": False}) +
                   "exit 1\nfi\n" + self.xml("once", {"a": True, "b": True}))
        counts, said, out = self.run_all()
        self.assertEqual(counts, "counts 2 0 0")
        self.assertEqual([line.split(":")[0] for line in said], ["unsteady plain"])
        self.assertIn("UNSTEADY  once: Suite.b", out)

    def test_a_finding_of_a_sanitizer_gets_no_second_try(self):
        for number, text in enumerate(("WARNING: ThreadSanitizer: data race", "==7==ERROR: AddressSanitizer: x",
                                       "==7==ERROR: LeakSanitizer: detected", "a.cc:3:4: runtime error: shift")):
            self.entry(f"found{number}", f"echo ran >>found{number}.ran\necho '{text}'\n[ -e again ]")
        for number in range(4):
            counts, said, _ = self.run_all("-R", f"found{number}")
            self.assertEqual(counts, "counts 0 1 0")
            self.assertTrue(said[0].startswith("failure"))
            self.assertEqual(self.times(f"found{number}"), 1)

    def test_when_much_fails_nothing_is_run_again(self):
        for number in range(4):
            self.entry(f"bad{number}", f"echo ran >>bad{number}.ran\nfalse")
        counts, said, _ = self.run_all()
        self.assertEqual(counts, "counts 0 4 0")
        self.assertEqual(len(said), 4)
        self.assertEqual([self.times(f"bad{number}") for number in range(4)], [1, 1, 1, 1])

    def test_no_test_at_all_is_a_failure(self):
        self.entry("one", "true")
        counts, said, _ = self.run_all("-R", "none_such")
        self.assertEqual(counts, "counts 0 1 0")
        self.assertEqual(len(said), 1)


if __name__ == "__main__":
    unittest.main()
