#!/usr/bin/env python3
"""check_docs.py finds what is missing: each test takes one thing out of the documents, or puts one in, and sees the check red."""
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import check_docs  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = "deploy/docs/troubleshooting.md"


class Changed(check_docs.Repository):
    """The repository with other texts of some files, and with further files."""

    def __init__(self, texts=None, more=()):
        super().__init__(ROOT)
        self.texts = texts or {}
        self.files += more

    def text(self, name):
        return self.texts.get(name) or super().text(name)


def without(name, taken):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert taken in text, f"{name} has no {taken}"
    return Changed({name: text.replace(taken, "")}).check()


class CheckDocs(unittest.TestCase):
    def test_the_repository_misses_nothing(self):
        self.assertEqual(check_docs.Repository(ROOT).check(), [])

    def test_an_error_code_without_its_section(self):
        self.assertEqual(without(PAGE, "### peer-lost\n"), [f"{PAGE}: no section of an error code: peer-lost"])

    def test_a_section_of_no_error_code(self):
        text = (ROOT / PAGE).read_text(encoding="utf-8") + "\n### out-of-luck\n"
        self.assertEqual(Changed({PAGE: text}).check(), [f"{PAGE}: section of an error code that does not exist: out-of-luck"])

    def test_a_doctor_check_without_its_row(self):
        self.assertEqual(without(PAGE, "| `limits.memlock` |"), [f"{PAGE}: no row of a doctor check: limits.memlock"])

    def test_a_flag_that_a_wait_names_without_its_row(self):
        self.assertEqual(without(PAGE, "| `launch-record` |"), [f"{PAGE}: no flag of a wait: launch-record"])

    def test_an_alert_without_its_row(self):
        self.assertEqual(without("deploy/docs/operations.md", "| `MkernelPeerDown` |"),
                         ["deploy/docs/operations.md: no row of an alert: MkernelPeerDown"])

    def test_a_metric_without_its_row(self):
        self.assertEqual(without("deploy/docs/operations.md", "`mkernel_draining`, "), ["deploy/docs/operations.md: no row for the metric mkernel_draining"])

    def test_a_public_declaration_without_its_place_in_the_reference(self):
        self.assertEqual(without("deploy/docs/api/cpp.md", ".. doxygenenum:: mk::Activation\n"),
                         ["deploy/docs/api/cpp.md: no directive for: Activation"])

    def test_a_public_name_of_python_without_its_place_on_the_page(self):
        self.assertEqual(without("deploy/docs/api/python.md", "`RankFailed`"), ["deploy/docs/api/python.md: no mention of RankFailed"])

    def test_an_environment_variable_of_python_without_its_place_on_the_page(self):
        self.assertEqual(without("deploy/docs/api/python.md", "`MKERNEL_BIN`"), ["deploy/docs/api/python.md: no mention of MKERNEL_BIN"])

    def test_a_bound_in_the_example_that_the_code_does_not_have(self):
        name = "deploy/mkerneld.toml.example"
        text = (ROOT / name).read_text(encoding="utf-8")
        self.assertEqual(Changed({name: text.replace("0 to 1023", "0 to 127")}).check(), [f"{name}: it does not say: another one, from 0 to 1023."])

    def test_a_block_whose_build_wants_more_than_it_installs(self):
        name = "deploy/docs/tutorials/04_your_model.md"
        self.assertRegex("\n".join(without(name, " -DMK_TESTS=OFF -DMK_BENCH=OFF")), f"^{name}: --build installs no libraries for tests: cmake --preset release -DMK_CUDA=ON$")
        self.assertEqual(without("deploy/install-deps.sh", " python3-venv file\n"),
                         ["deploy/docs/operations.md: --build does not install file: --target package",
                          f"{name}: --build does not install python3-venv: deploy/wheels.sh", f"{name}: --build does not install python3-venv: -m venv"])

    def test_a_header_that_promises_no_bits(self):
        header = "client/include/mkernel/gemm_reduce_scatter.h"
        text = (ROOT / header).read_text(encoding="utf-8")
        self.assertEqual(Changed({header: text.replace("bitwise", "nearly")}).check(),
                         [f"{header}: it does not say which results are bitwise equal"])
        self.assertEqual(Changed({header: text.replace("batch_invariant", "x")}).check(), [f"{header}: it does not promise batch invariance"])

    def test_a_result_that_nothing_uses(self):
        name = "tests/bench/results/" + "_".join(["a", "run", "of", "last", "year"]) + ".json"
        self.assertEqual(Changed(more=[name]).check(), [f"{name}: no document and no program uses it: leave it out"])

    def test_a_line_that_has_moved(self):
        file = "shm/ring.h"
        text = (ROOT / file).read_text(encoding="utf-8")
        breaches = Changed({file: "\n" + text}).check()
        self.assertRegex("\n".join(breaches), r"^kernels/README.md: `commit` is not at line \d+ of shm/ring.h, but at \d+: run check_docs.py --fix$")
        self.assertRegex("\n".join(Changed({file: text.replace("commit", "x")}).check()), r"^kernels/README.md: `commit` is not at line \d+ of shm/ring.h$")

    def test_an_excerpt_of_another_version(self):
        file = "tests/kernels/example/all_to_all.h"
        text = (ROOT / file).read_text(encoding="utf-8")
        self.assertEqual(Changed({file: text.replace("Another node first", "The next node first")}).check(),
                         ["deploy/docs/operator.md: an excerpt is not in ../../tests/kernels/example/all_to_all.h: template <class Executor>"])

    def test_a_decision_record_and_a_readme_that_are_too_long(self):
        record = "kernels/cuda/decisions/measuring.md"
        self.assertEqual(Changed({record: "x\n" * 41, "README.md": "x\n" * 151}).check(),
                         [f"{record}: 41 lines, at most 40", "README.md: 151 lines, at most 150"])

    def test_a_source_that_has_moved(self):
        self.assertTrue(any("has their source moved?" in one for one in Changed({"shm/error_code.h": "\n"}).check()))


if __name__ == "__main__":
    unittest.main()
