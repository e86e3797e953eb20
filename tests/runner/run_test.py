#!/usr/bin/env python3
"""tests/run.sh over a small tree with the real steps (tests/stages) and programs made by hand: what fails, what is missing and what is
too late shows in the counts, in the summary and in the exit status; and what may not run beside each other does not."""
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

TESTS = pathlib.Path(__file__).resolve().parent.parent

CMAKE = """
cmake_minimum_required(VERSION 3.25)
project(small LANGUAGES NONE)
if(EXISTS ${PROJECT_SOURCE_DIR}/no-configure)
  message(FATAL_ERROR "the library x is missing")
endif()
get_filename_component(preset ${PROJECT_BINARY_DIR} NAME)
add_custom_target(all_of_it ALL COMMAND bash ${PROJECT_SOURCE_DIR}/stub.sh build-${preset})
add_custom_target(package COMMAND bash ${PROJECT_SOURCE_DIR}/stub.sh package)
enable_testing()
foreach(label unit ops cuda)
  add_test(NAME ${label}_test COMMAND bash ${PROJECT_SOURCE_DIR}/stub.sh ${label}-of-${preset})
  set_tests_properties(${label}_test PROPERTIES LABELS ${label} SKIP_RETURN_CODE 77)
endforeach()
"""

# Does what the test wrote into <name>.does, between two lines of the file `events`.
STUB = """
cd {folder}
echo "begin $1" >>events
sleep 0.02
status=0
if [ -e "$1.does" ]; then bash "$1.does" || status=$?; fi
echo "end $1" >>events
exit $status
"""

SCRIPTS = {
    "tests/check_style.sh": "layout", "tests/check_format.sh": "format", "tests/check_tidy.sh": "tidy", "tests/fuzz/run.sh": "fuzz",
    "tests/rdma/run.sh": "rdma", "tests/model/check_model.sh": "model", "tests/deploy/check_packages.sh": "packages",
    "tests/deploy/check_image.sh": "image", "deploy/install-deps.sh": "install", "build/dev/tests/sim/mksim": "sim"}


class Run(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.root = pathlib.Path(holder.name)
        for name in ("run.sh", "runner", "stages"):
            copy = shutil.copytree if (TESTS / name).is_dir() else shutil.copy
            (self.root / "tests").mkdir(exist_ok=True)
            copy(TESTS / name, self.root / "tests" / name)
        shutil.copy(TESTS.parent / "CMakePresets.json", self.root)
        self.file("stub.sh", STUB.format(folder=self.root))
        self.file("CMakeLists.txt", CMAKE)
        self.file("shm/models/models.txt", "# cases\nring.pml whole  pass : safety\nring.pml mutant  assertion : safety -DM\n")
        # With nvcc and without a GPU, wherever this runs.
        for path, status in (("bin/nvcc", 0), ("bin/nvidia-smi", 1)):
            self.file(path, f"#!/bin/sh\nexit {status}\n").chmod(0o755)
        for path, name in SCRIPTS.items():
            self.file(path, f"#!/bin/sh\nexec bash {self.root}/stub.sh {name}\n").chmod(0o755)
        self.file("tests/check_coverage.py", f"import subprocess, sys\nsys.exit(subprocess.call(['bash', '{self.root}/stub.sh', 'coverage']))")

    def file(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return file

    def does(self, name, script):
        self.file(f"{name}.does", script)

    def run_it(self, *arguments, **environment):
        """(exit status, last line, the summary's lines)"""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MK_")}
        out = subprocess.run(["bash", str(self.root / "tests/run.sh"), "--jobs", "2", *arguments], capture_output=True, text=True,
                             check=False, env={**clean, "CUDA_HOME": str(self.root), "PATH": f"{self.root}/bin:{os.environ['PATH']}", **environment})
        lines = out.stdout.splitlines()
        return out.returncode, lines[-1] if lines else "", "\n".join(lines[-25:])

    def events(self):
        file = self.root / "events"
        return [line.split() for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []

    def ran(self):
        return {name for kind, name in self.events() if kind == "begin"}

    def test_every_stage_counts(self):
        # style 2, model 2, fuzz 4, unit, sim, cuda, ops, rdma, asan 2 (its cuda test is left out), coverage, tsan 2, tidy
        self.assertEqual(self.run_it()[:2], (0, "19 passed, 0 failed"))
        self.assertEqual(self.run_it("--stage", "package")[:2], (0, "2 passed, 0 failed"))

    def test_tests_with_deadlines_run_alone(self):
        for name in ("rdma", "install", "unit-of-dev", "ops-of-dev", "cuda-of-dev", "build-dev", "build-asan", "build-tsan"):
            self.does(name, "sleep 0.7")
        self.run_it("--stage", "unit,cuda,ops,rdma,asan,tsan")
        running, seen = set(), []
        for kind, name in self.events():
            if kind == "begin":
                running.add(name)
                seen.append(set(running))
            else:
                running.discard(name)
        quiet = {"rdma", "unit-of-dev", "ops-of-dev", "cuda-of-dev"}
        for together in seen:
            self.assertLessEqual(len(together & quiet), 1, together)
            self.assertFalse(together & (quiet - {"rdma"}) and any(name.startswith("build") for name in together), together)
            self.assertFalse("rdma" in together and any("-of-" in name for name in together), together)
            self.assertFalse("install" in together and any(name.startswith("build") for name in together), together)
            self.assertLessEqual(sum(name.startswith("build") for name in together), 1, together)

    def test_a_build_goes_on_beside_the_virtual_machine(self):
        self.does("rdma", "for i in $(seq 200); do grep -q 'end build-tsan' events && exit 0; sleep 0.1; done; exit 1")
        self.assertEqual(self.run_it("--stage", "unit,rdma,asan,tsan")[:2], (0, "7 passed, 0 failed"))

    def test_a_red_test_is_listed_with_its_log(self):
        self.does("unit-of-dev", "echo it is broken; exit 1")
        status, last, summary = self.run_it("--stage", "style,unit")
        self.assertEqual((status, last), (1, "2 passed, 1 failed"))
        self.assertRegex(summary, r"Failures:\n  unit: unit_test \(log: .*/unit-ctest.log\)")

    def test_an_unsteady_test_passes_and_is_listed(self):
        self.does("unit-of-dev", "[ -e seen ] && exit 0; touch seen; exit 1")
        status, last, summary = self.run_it("--stage", "unit")
        self.assertEqual((status, last), (0, "1 passed, 0 failed"))
        self.assertRegex(summary, r"passed when run again, alone:\n  unit: unit_test")

    def test_a_broken_build_hides_no_test(self):
        self.does("build-dev", "echo 'a.cc:1: error: no such thing'; exit 1")
        status, last, summary = self.run_it("--stage", "unit")
        self.assertEqual((status, last), (1, "1 passed, 1 failed"))
        self.assertRegex(summary, r"Failures:\n  build-dev: \(log: .*/build-dev.log\)")

    def test_without_a_configured_build_its_tests_count_as_failed(self):
        self.file("no-configure", "")
        status, last, summary = self.run_it("--stage", "style,unit,sim")
        self.assertEqual(status, 1)
        self.assertRegex(last, r"^2 passed, [1-9] failed$")
        self.assertIn("configure-dev", summary)

    def test_a_missing_tool_is_skipped_with_its_reason(self):
        self.does("model", "echo no spin: models are not checked; exit 77")
        self.does("rdma", "echo booting; echo run_vm: skipped: no virtual machine here; exit 77")
        status, last, summary = self.run_it("--stage", "style,model,rdma")
        self.assertEqual((status, last), (0, "2 passed, 0 failed"))
        self.assertIn("Stages that could not run here:", summary)
        self.assertIn("  model.ring.whole: no spin: models are not checked\n", summary)
        self.assertIn("  rdma: no virtual machine here\n", summary)
        self.assertIn("skipped 3.", summary)

    def test_what_a_step_left_out_is_named(self):
        self.does("tidy", "echo left out: 7 translation units")
        status, last, summary = self.run_it("--stage", "tidy")
        self.assertEqual((status, last), (0, "1 passed, 0 failed"))
        self.assertIn("  tidy: 7 translation units\n", summary)

    def test_cases_that_a_step_wrote_are_counted(self):
        self.does("rdma", "mkdir -p build/logs/rdma; cat >build/logs/rdma/a.xml <<'END'\n<testsuites><testcase name='a' classname='S'/>"
                  "<testcase name='b' classname='S'><failure/></testcase></testsuites>\nEND\nexit 1")
        status, last, summary = self.run_it("--stage", "rdma")
        self.assertEqual((status, last), (1, "1 passed, 1 failed"))
        self.assertIn("  rdma: S b (log: ", summary)

    def test_packages_that_apt_cannot_install_are_a_failure(self):
        self.does("install", "echo no network; exit 1")
        status, last, summary = self.run_it("--stage", "deps,style")
        self.assertEqual((status, last), (1, "2 passed, 1 failed"))
        self.assertIn("install dependencies", summary)

    def test_without_time_asan_tsan_and_tidy_are_left_out(self):
        status, last, summary = self.run_it(MK_BUDGET_S="-60")
        self.assertEqual((status, last), (0, "13 passed, 0 failed"))
        self.assertRegex(summary, r"  build-asan: it would end too late; by itself: bash tests/run.sh --stage asan\n"
                                  r"(.*\n)*  build-tsan: it would end too late; by itself: bash tests/run.sh --stage tsan\n"
                                  r"(.*\n)?  tidy: it would end too late")
        self.assertFalse({"build-asan", "unit-of-asan", "coverage", "build-tsan", "unit-of-tsan", "tidy"} & self.ran())
        self.assertEqual(self.run_it("--stage", "tidy", MK_BUDGET_S="-60")[:2], (0, "1 passed, 0 failed"))

    def test_a_label_selects_tests_and_leaves_coverage_out(self):
        self.does("coverage", "exit 1")
        self.assertEqual(self.run_it("--stage", "asan", "--label", "^unit$")[:2], (0, "1 passed, 0 failed"))
        self.assertEqual(self.run_it("--stage", "asan", "--label", "^nothing$")[:2], (1, "0 passed, 1 failed"))

    def test_what_is_no_stage_ends_at_once(self):
        for arguments in (("--stage", "unit,none"), ("--stage",), ("--else",)):
            self.assertEqual(self.run_it(*arguments)[0], 2)
        self.assertEqual(self.ran(), set())

    def ends_within_the_script(self, step):
        self.does("layout", step)
        running = subprocess.Popen(["bash", str(self.root / "tests/run.sh"), "--stage", "style"], stdout=subprocess.DEVNULL)
        while "layout" not in self.ran() or not (self.root / "ready").exists():
            self.assertIsNone(running.poll())
        running.terminate()
        running.wait()
        process = int((self.root / "ready").read_text(encoding="utf-8"))
        # What has ended may be a zombie until its parent looks.
        alive = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, check=False, text=True).stdout
        self.assertRegex(alive, "^Z|^$")

    def test_steps_end_with_the_script(self):
        self.ends_within_the_script("echo $$ >ready.new; mv ready.new ready; sleep 60")

    def test_a_step_that_takes_its_time_to_end_ends_with_the_script(self):
        self.ends_within_the_script("trap 'sleep 0.4; exit 1' TERM; echo $$ >ready.new; mv ready.new ready; sleep 60 & wait")

    def test_a_step_that_does_not_end_is_killed(self):
        self.ends_within_the_script("trap '' TERM; echo $$ >ready.new; mv ready.new ready; while :; do sleep 0.1; done")


if __name__ == "__main__":
    unittest.main()
