#!/usr/bin/env python3
"""run_ctest.py over builds made by hand: what is counted, what is run again, what is never run again."""
import collections
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

from cases import read

SCRIPT = pathlib.Path(__file__).resolve().parent / "run_ctest.py"


class RunCtest(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = pathlib.Path(holder.name)
        self.entries = []
        (self.folder / "logs").mkdir()
        (self.folder / "test-results").mkdir()

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

    def run_all(self, *arguments, **environment):
        (self.folder / "CTestTestfile.cmake").write_text("".join(self.entries), encoding="utf-8")
        out = subprocess.run([sys.executable, str(SCRIPT), "plain", str(self.folder), str(self.folder / "logs"), "2", *arguments],
                             capture_output=True, text=True, check=False, env={**os.environ, "MK_LABEL": "", **environment})
        cases = read(self.folder / "logs" / "plain" / "cases.xml")
        count = collections.Counter(case.outcome for case in cases)
        self.assertEqual(out.returncode, 1 if count["failed"] else 0, out.stdout + out.stderr)
        return dict(count), [case for case in cases if case.outcome in ("failed", "unsteady")], out.stdout

    def times(self, name):
        return len((self.folder / f"{name}.ran").read_text(encoding="utf-8").splitlines())

    def test_counts_cases_and_scripts(self):
        self.entry("cases", self.xml("cases", {"a": True, "b": True, "c": True}))
        self.entry("script", "true")
        self.entry("without_tool", "exit 77")
        count, said, _ = self.run_all()
        self.assertEqual(count, {"passed": 4, "skipped": 1})
        self.assertEqual(said, [])

    def test_a_case_that_skips_itself_is_skipped(self):
        self.entry("cases", "cat >test-results/cases.xml <<'END'\n<testsuites><testsuite name='S'>"
                   "<testcase name='a' classname='S' status='run' result='completed'/>"
                   "<testcase name='b' classname='S' status='run' result='skipped'><skipped message='no GPU'/></testcase>"
                   "<testcase name='c' classname='S' status='notrun' result='suppressed'/></testsuite></testsuites>\nEND\n")
        self.assertEqual(self.run_all()[0], {"passed": 1, "skipped": 2})

    def test_what_always_fails_is_a_failure_with_its_cases_and_words(self):
        self.entry("cases", "echo ran >>cases.ran\necho it.cc:7: Failure\necho wanted 3\n" +
                   self.xml("cases", {"good": True, "bad": False}) + "exit 1")
        count, said, out = self.run_all()
        self.assertEqual(count, {"passed": 1, "failed": 1})
        self.assertEqual([(one.program, one.name) for one in said], [("cases", "Suite.bad")])
        self.assertTrue(said[0].text.endswith("plain-ctest.log"), said)
        self.assertIn("wanted 3", out)
        self.assertEqual(self.times("cases"), 2)

    def test_a_crash_after_the_last_case_is_a_failure(self):
        self.entry("cases", self.xml("cases", {"good": True}) + "kill -SEGV $$")
        count, said, _ = self.run_all()
        self.assertEqual(count, {"passed": 1, "failed": 1})
        self.assertEqual([(one.program, one.name, one.outcome) for one in said], [("cases", "", "failed")])

    def test_cases_of_an_earlier_run_do_not_count(self):
        self.entry("cases", "exit 1")
        old = self.folder / "test-results" / "cases.xml"
        old.write_text("<testsuites><testcase name='a' classname='S'/><testcase name='b' classname='S'/></testsuites>")
        os.utime(old, (1e9, 1e9))
        self.assertEqual(self.run_all()[0], {"failed": 1})

    def test_a_program_that_is_missing_is_a_failure(self):
        self.entries.append("add_test(gone /no/such/program)\n")
        self.entry("script", "true")
        self.assertEqual(self.run_all()[0], {"passed": 1, "failed": 1})

    def test_what_takes_too_long_is_a_failure(self):
        self.entry("slow", "echo ran >>slow.ran\nexec sleep 60")
        self.entries.append("set_tests_properties(slow PROPERTIES TIMEOUT 1)\n")
        self.assertEqual(self.run_all()[0], {"failed": 1})

    def test_what_passes_alone_is_counted_as_passed_and_said(self):
        self.entry("once", "if [ ! -e seen ]; then touch seen\n" + self.xml("once", {"a": True, "b": False}) +
                   "exit 1\nfi\n" + self.xml("once", {"a": True, "b": True}))
        count, said, out = self.run_all()
        self.assertEqual(count, {"passed": 1, "unsteady": 1})
        self.assertEqual([(one.program, one.name) for one in said], [("once", "Suite.b")])
        self.assertIn("UNSTEADY  once", out)

    def test_a_finding_of_a_sanitizer_gets_no_second_try(self):
        for number, text in enumerate(("WARNING: ThreadSanitizer: data race", "==7==ERROR: AddressSanitizer: x",
                                       "==7==ERROR: LeakSanitizer: detected", "a.cc:3:4: runtime error: shift")):
            self.entry(f"found{number}", f"echo ran >>found{number}.ran\necho '{text}'\n[ -e again ]")
        for number in range(4):
            self.assertEqual(self.run_all("-R", f"found{number}")[0], {"failed": 1})
            self.assertEqual(self.times(f"found{number}"), 1)

    def test_when_much_fails_nothing_is_run_again(self):
        for number in range(4):
            self.entry(f"bad{number}", f"echo ran >>bad{number}.ran\nfalse")
        self.assertEqual(self.run_all()[0], {"failed": 4})
        self.assertEqual([self.times(f"bad{number}") for number in range(4)], [1, 1, 1, 1])

    def test_a_label_selects(self):
        self.entry("one", "true")
        self.entry("two", "false")
        self.entries.append("set_tests_properties(one PROPERTIES LABELS chosen)\n")
        self.assertEqual(self.run_all(MK_LABEL="^chosen$")[0], {"passed": 1})

    def test_no_test_at_all_is_a_failure(self):
        self.entry("one", "true")
        count, said, _ = self.run_all("-R", "none_such")
        self.assertEqual(count, {"failed": 1})
        self.assertEqual(said[0].name, "ran no test")


if __name__ == "__main__":
    unittest.main()
