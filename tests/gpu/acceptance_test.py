#!/usr/bin/env python3
"""acceptance.sh over programs that only say what they were asked: which steps run them, and what it makes of their ends."""
import os
import pathlib
import subprocess
import tarfile
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parent / "acceptance.sh"


class Acceptance(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = pathlib.Path(holder.name)
        (self.folder / "build/tests/gpu").mkdir(parents=True)

    def program(self, name, script):
        path = self.folder / "build/tests/gpu" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        path.chmod(0o755)

    def call(self, *arguments, devices="2"):
        ended = subprocess.run(["bash", *map(str, arguments)], env={**os.environ, "MK_DEVICES": devices}, timeout=60,
                               capture_output=True, text=True, check=False)
        return ended.returncode, ended.stdout + ended.stderr

    def run_steps(self, *steps, devices="2", how="run"):
        self.assertEqual(self.call(SCRIPT, "pack", self.folder / "build", self.folder / "packed")[0], 0)
        return self.call(self.folder / "packed/acceptance.sh", how, self.folder / "out", *steps, devices=devices)

    def test_a_step_passes_and_counts_its_cases(self):
        self.program("dma_queue_test", 'echo "[       OK ] DmaQueues.E (1 ms)"')
        self.program("operators_gpu_test",
                     'echo "asked $*"; echo "[       OK ] Worlds/A.B/c_on_2 (1 ms)"; echo "[       OK ] Worlds/A.D/c_on_2 (1 ms)"')
        status, text = self.run_steps("cases")
        self.assertEqual(status, 0, text)
        self.assertRegex(text, r"cases +ok +\d+ s  3 passed, 0 failed")
        self.assertIn("*_on_2:", (self.folder / "out/cases.log").read_text(encoding="utf-8"))

    def test_a_failing_step_fails_all_and_the_next_runs(self):
        self.program("client_gpu_test", 'echo "[  FAILED  ] ClientGpu.Some (5 ms)"; exit 1')
        self.program("gpu_fabric_test", 'echo "[       OK ] Gpu.Fabric (1 ms)"')
        status, text = self.run_steps("client", "fabric")
        self.assertEqual(status, 1)
        self.assertRegex(text, r"client +FAILED \(1\) +\d+ s  0 passed, 1 failed")
        self.assertRegex(text, r"fabric +ok ")

    def test_collectives_and_the_cases_of_batch_invariant(self):
        for name in ("collectives_gpu_test", "client_gpu_test"):
            self.program(name, f'echo "{name} asked $*"; echo "[       OK ] {name}.A (1 ms)"')
        status, text = self.run_steps("collectives")
        self.assertEqual(status, 0, text)
        self.assertRegex(text, r"collectives +ok +\d+ s  2 passed, 0 failed")
        self.assertIn("client_gpu_test asked --gtest_filter=*BatchInvariance*", (self.folder / "out/collectives.log").read_text(encoding="utf-8"))

    def test_figures_of_collectives_are_of_the_shapes_that_nccl_has(self):
        self.program("../bench/mkbench/mkbench", 'echo "mkbench $*"')
        self.assertEqual(self.call(SCRIPT, "pack", self.folder / "build", self.folder / "packed")[0], 0)
        (self.folder / "packed/collectives_baseline.py").write_text("import sys; print('nccl', *sys.argv[1:])\n", encoding="utf-8")
        status, text = self.call(self.folder / "packed/acceptance.sh", "run", self.folder / "out", "collective_figures", "collective_two_nodes")
        self.assertEqual(status, 0, text)
        log = (self.folder / "out/collective_figures.log").read_text(encoding="utf-8")
        for name in ("all-gather", "reduce-scatter"):
            self.assertIn(f"mkbench {name} --nodes 1 --local 2 --executor cuda --m 1030", log)
            self.assertRegex(log, rf"mkbench {name} --nodes 1 --local 2 --executor cuda --m 4096 --n 8192 .*_1x2_4096x8192.json")
        self.assertIn("nccl --devices 2 --shape=1024x8192 --shape=4096x8192 --shape=16384x8192 --json", log)
        log = (self.folder / "out/collective_two_nodes.log").read_text(encoding="utf-8")
        self.assertIn("mkbench reduce-scatter --nodes 2 --local 1 --executor cuda --link-bandwidth 50GB/s --m 1030", log)

    def test_a_step_is_cut_off_at_its_time(self):
        self.program("client_gpu_test", "sleep 30")
        status, text = self.run_steps("client=1")
        self.assertEqual(status, 1)
        self.assertIn("cut off after 1 s", text)

    def test_a_step_whose_cases_are_all_skipped_fails(self):
        self.program("client_gpu_test", 'echo "[  SKIPPED ] ClientGpu.Some (0 ms)"')
        status, text = self.run_steps("client")
        self.assertEqual(status, 1)
        self.assertRegex(text, r"client +LOOKED AT NOTHING +\d+ s  nothing")

    def test_a_program_that_fails_into_a_pipe_fails(self):
        self.program("client_gpu_test", "true")  # something to pack
        self.assertEqual(self.call(SCRIPT, "pack", self.folder / "build", self.folder / "packed")[0], 0)
        (self.folder / "packed/torch_async_tp.py").write_text("raise SystemExit(3)\n", encoding="utf-8")
        status, text = self.call(self.folder / "packed/acceptance.sh", "run", self.folder / "out", "torch")
        self.assertEqual(status, 1)
        self.assertRegex(text, r"torch +FAILED \(3\)")

    def test_each_step_has_a_gpu_of_its_own(self):
        # Ends only when as many steps as there are GPUs have begun.
        together = (f'touch {self.folder}/$CUDA_VISIBLE_DEVICES.$$; while [ "$(ls {self.folder}/*.* | wc -l)" -lt 2 ]; do sleep 0.05; done; '
                    'echo "gpu $CUDA_VISIBLE_DEVICES asked $*"; echo "[       OK ] A.B (1 ms)"')
        for program in ("moe_gpu_test", "combine_gpu_test", "ring_attention_gpu_test"):
            self.program(program, together)
        self.program("attention_test", 'echo "[  FAILED  ] A.B (5 ms)"; exit 1')
        status, text = self.run_steps("moe=20", "combine=20", "ring=20", how="each")
        self.assertEqual(status, 0, text)
        logs = [(self.folder / f"out/{name}.log").read_text(encoding="utf-8") for name in ("moe", "combine")]
        self.assertEqual({log.split()[1] for log in logs}, {"0", "1"})
        self.assertIn("*_on_1:", logs[0])
        self.assertEqual([line.split()[0] for line in text.splitlines()], ["moe", "combine", "ring"])
        self.assertEqual(self.run_steps("moe=20", "attention", "combine=20", how="each")[0], 1)

    def test_a_library_that_lacks_what_scripts_call_is_named(self):
        source = "void mk_world_create(void) {} __attribute__((visibility(\"hidden\"))) void mk_grouped_create(void) {}"
        library = self.folder / "build/tests/gpu/libmoe_abi.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=source, text=True, check=True)
        status, text = self.call(SCRIPT, "pack", self.folder / "build", self.folder / "packed")
        self.assertEqual(status, 0)
        self.assertIn("libmoe_abi.so shows no mk_grouped_create: ", text)
        self.assertNotIn("mk_world_create", text)

    def test_an_archive_holds_what_was_packed(self):
        self.program("moe_gpu_test", "true")
        self.program("../../daemon/mkctl/mkctl", "true")
        self.assertEqual(self.call(SCRIPT, "pack", self.folder / "build", self.folder / "packed")[0], 0)
        self.assertEqual(self.call(SCRIPT, "archive", self.folder / "packed")[0], 0)
        with tarfile.open(self.folder / "packed.tar.xz") as archive:
            self.assertLessEqual({"packed/moe_gpu_test", "packed/mkctl", "packed/acceptance.sh", "packed/ring_bench.py"}, set(archive.getnames()))

    def test_wrong_elements_are_counted(self):
        self.program("operators_bench", 'echo "ag_gemm | 0 wrong, 0.9 of bound"; echo "gemm_rs | 7 wrong, 2.0 of bound"; exit 1')
        status, text = self.run_steps("across", devices="4")
        self.assertEqual(status, 1)
        self.assertIn("2 rows, 7 wrong elements", text)

    def test_sides_alone_are_judged_too(self):
        self.program("operators_bench", 'echo "asked $*"; echo "ag_gemm | 0 wrong, 0.9 of bound"')
        status, text = self.run_steps("alone")
        self.assertEqual(status, 0, text)
        self.assertIn("1 rows, 0 wrong elements", text)
        asked = (self.folder / "out/alone.log").read_text(encoding="utf-8")
        self.assertRegex(asked, r"--alone 0\.\d+ --check-up-to 32768 ")
        self.program("operators_bench", "true")
        self.assertRegex(self.run_steps("alone")[1], "alone +LOOKED AT NOTHING")

    def test_what_cannot_be_run_is_said_before_anything_runs(self):
        self.program("client_gpu_test", f"touch {self.folder}/ran")
        status, text = self.run_steps("client", "clients")
        self.assertEqual((status, (self.folder / "ran").exists()), (2, False))
        self.assertIn("no step 'clients'; there are: cases ", text)
        status, text = self.run_steps("client", devices="0")
        self.assertEqual((status, (self.folder / "ran").exists()), (2, False))
        self.assertIn("lists no GPU here", text)

    def test_an_empty_build_is_refused(self):
        status, text = self.call(SCRIPT, "pack", self.folder / "build", self.folder / "packed")
        self.assertEqual(status, 2)
        self.assertIn("name a build folder", text)

    def test_without_a_command_it_says_how(self):
        status, text = self.call(SCRIPT)
        self.assertEqual(status, 2)
        self.assertIn("sweep_one, sweep_two", text)
        self.assertIn("NVLink multicast stays off", text)
        self.assertNotIn("set -u", text)


if __name__ == "__main__":
    unittest.main()
