// Machine files and tuned.json: what is written is read back; what is wrong is named.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

#include "kernels/plan/choose.h"
#include "kernels/plan/job_plan.h"
#include "kernels/plan/machine.h"
#include "kernels/plan/tuned.h"

namespace mk::kernels::plan {
namespace {

std::string replaced(std::string text, const std::string& what, const std::string& with) {
  const std::size_t at = text.find(what);
  EXPECT_NE(at, std::string::npos) << what;
  return text.replace(at, what.size(), with);
}

// Each entry is of a machine that is shipped, too, and runs there: the model is not asked for it.
TEST(TunedFile, ShippedChoicesAreReadAndTaken) {
  const Tuned& tuned = shipped_tuned();
  ASSERT_GT(tuned.entries.size(), 50u);
  EXPECT_EQ(tuned_text(parse_tuned(tuned_text(tuned), "again").value()), tuned_text(tuned));
  for (const TunedEntry& entry : tuned.entries) {
    const auto machine = shipped_machine(entry.machine);
    ASSERT_TRUE(machine) << entry.machine;
    Problem problem;
    problem.op = entry.op;
    problem.nodes = entry.nodes;
    problem.locals = entry.locals;
    problem.shape = {entry.bucket.m, entry.bucket.n, entry.bucket.k};
    const auto choice = choose(problem, *machine, &tuned);
    ASSERT_TRUE(choice);
    EXPECT_TRUE(choice->tuned) << describe(problem, entry.candidate);
  }
}

// Over sockets GPU memory goes through the host's: two H200s' two ranks reached 2.6 GB/s each there
// (tests/bench/results/staged_tcp_h200.json), not a rail's 50.
TEST(MachineFile, AFabricOfSocketsIsAnotherNetwork) {
  const Machine machine = shipped_machine("H200").value();
  for (const char* rail : {"loopback", "verbs", "ofi:efa", "ofi:verbs;ofi_rxm"})
    EXPECT_EQ(machine_on_fabric(machine, rail), machine) << rail;
  for (const char* sockets : {"ofi:tcp;ofi_rxm", "ofi:net", "ofi:sockets"}) {
    const Machine on = machine_on_fabric(machine, sockets);
    EXPECT_DOUBLE_EQ(on.network_gb_s, 2.6) << sockets;
    EXPECT_GT(on.network_latency_us, machine.network_latency_us);
  }
  const Machine cpu = shipped_machine("CPU").value();
  EXPECT_EQ(machine_on_fabric(cpu, "ofi:tcp;ofi_rxm"), cpu) << "its figure is of sockets already";
}

TEST(MachineFile, ShippedOnesAreReadAndWrittenAgain) {
  for (const char* name : {"H100", "H200", "CPU"}) {
    const auto machine = shipped_machine(name);
    ASSERT_TRUE(machine) << machine.error().message;
    EXPECT_EQ(machine->name, name);
    const auto again = parse_machine(machine_text(*machine), "again");
    ASSERT_TRUE(again) << again.error().message;
    EXPECT_EQ(*again, *machine);
  }
  const auto none = shipped_machine("B300");
  ASSERT_FALSE(none);
  EXPECT_NE(none.error().message.find("H200"), std::string::npos) << none.error().message;
}

TEST(MachineFile, WhatIsMissingUnknownOrOutOfRangeIsNamed) {
  const std::string text = machine_text(shipped_machine("H100").value());
  struct Case {
    std::string text;
    const char* named;
  };
  const Case cases[] = {
      {"{", "JSON"},
      {"[]", "object"},
      {replaced(text, "\"hbm_gb_s\"", "\"hbm_gbs\""), "hbm_gb_s"},
      {replaced(text, "\"sms\": 132", "\"sms\": 132.5"), "sms"},
      {replaced(text, "\"sms\": 132", "\"sms\": \"many\""), "sms"},
      {replaced(text, "\"sms\": 132", "\"sms\": 132, \"colour\": 3"), "colour"},
      {replaced(text, "\"sms\": 132", "\"sms\": 132, \"cpu_gflops\": 3"), "cpu_gflops"},
      {replaced(text, "\"kind\": \"gpu\"", "\"kind\": \"tpu\""), "kind"},
      {replaced(text, "\"name\": \"H100\"", "\"name\": \"\""), "name"},
      {replaced(text, "\"link_gb_s\":", "\"link_gb_s\": 0, \"x\":"), "x"},
      {replaced(text, "\"link_gb_s\":", "\"link_gb_s\": -1, \"x\":"), "link_gb_s"},
  };
  for (const Case& wrong : cases) {
    const auto machine = parse_machine(wrong.text, "here.json");
    ASSERT_FALSE(machine) << wrong.named;
    EXPECT_EQ(machine.error().code, ErrorCode::kInvalidArgument);
    EXPECT_NE(machine.error().message.find(wrong.named), std::string::npos)
        << machine.error().message;
    EXPECT_NE(machine.error().message.find("here.json"), std::string::npos);
  }
}

// Being 0 they would be free, or make every time infinite.
TEST(MachineFile, NoRateAndNoExponentIs0) {
  for (const char* name : {"H100", "CPU"}) {
    const auto shipped = nlohmann::json::parse(machine_text(shipped_machine(name).value()));
    std::size_t refused = 0;
    for (const auto& [key, value] : shipped.items()) {
      if (!value.is_number_float()) continue;
      nlohmann::json changed = shipped;
      changed[key] = 0;
      const bool is_rate = key.ends_with("_gb_s") || key.ends_with("gflops");
      const bool is_exponent = key.find("overlap") != std::string::npos || key == "link_sharpness";
      const auto machine = parse_machine(changed.dump(), "here.json");
      if (machine) {
        EXPECT_FALSE(is_rate || is_exponent) << key;
        continue;
      }
      ++refused;
      EXPECT_EQ(ErrorCode::kInvalidArgument, machine.error().code) << key;
      EXPECT_NE(machine.error().message.find("'" + key + "' is 0"), std::string::npos)
          << machine.error().message;
    }
    EXPECT_GE(refused, shipped["kind"] == "gpu" ? 25u : 5u);
  }
}

TEST(MachineFile, AnUnknownGpuGetsADerivedOneAndAWarning) {
  EXPECT_EQ(machine_for_gpu("NVIDIA H100 80GB HBM3", 132).warning, "");
  EXPECT_EQ(machine_for_gpu("NVIDIA H200", 132).machine, shipped_machine("H200").value());
  const DerivedMachine other = machine_for_gpu("NVIDIA H20", 78);
  EXPECT_EQ(other.machine.sms, 78u);
  EXPECT_EQ(other.machine.name, "NVIDIA H20");
  EXPECT_NE(other.warning.find("H20"), std::string::npos);
  EXPECT_FALSE(machine_for_gpu("NVIDIA H100 PCIe", 114).warning.empty());
}

TunedEntry some_entry() {
  TunedEntry entry;
  entry.op = Op::kGemmAr;
  entry.machine = "H200";
  entry.nodes = 2;
  entry.locals = 4;
  entry.bucket = bucket_of({4097, 7168, 512});
  entry.measured_us = 123.5;
  Candidate& candidate = entry.candidate;
  candidate.form = Mode::kUnfused;
  candidate.sums = Sums::kOnce;
  candidate.tiling.tile_m = 128;
  candidate.tiling.tile_n = 256;
  candidate.tiling.chunk_bytes = 262144;
  candidate.stream_warpgroups = 24;
  candidate.receive_warpgroups = 7;
  candidate.send_warpgroups = 1;
  return entry;
}

TEST(TunedFile, BucketsAreQuartersOfPowersOfTwo) {
  EXPECT_EQ(bucket_of({4096, 4097, 5120}), (Bucket{4096, 5120, 5120}));
  EXPECT_EQ(bucket_of({1, 3, 5}), (Bucket{1, 3, 5}));
  for (std::uint32_t side = 1; side < 20000; ++side) {
    const std::uint32_t up = bucket_of({side, 1, 1}).m;
    ASSERT_GE(up, side);
    ASSERT_LE(up, side + side / 4 + 1);
    ASSERT_EQ(bucket_of({up, 1, 1}).m, up) << side;
    ASSERT_GE(bucket_of({side + 1, 1, 1}).m, up) << side;
  }
}

TEST(TunedFile, IsWrittenAndReadBack) {
  const std::string folder = (std::filesystem::temp_directory_path() / "mk_tuned_XXXXXX").string();
  std::string made = folder;
  ASSERT_NE(::mkdtemp(made.data()), nullptr);
  const std::string path = made + "/tuned.json";
  Tuned tuned;
  tuned.put(some_entry());
  TunedEntry other = some_entry();
  other.op = Op::kAgGemm;
  other.candidate.sums = Sums::kWarpgroups;
  other.candidate.engines = true;
  tuned.put(other);
  ASSERT_TRUE(save_tuned(tuned, path));
  const auto read = load_tuned(path);
  ASSERT_TRUE(read) << read.error().message;
  ASSERT_EQ(read->entries.size(), 2u);
  EXPECT_EQ(tuned_text(*read), tuned_text(tuned));
  EXPECT_EQ(read->entries[0].candidate, some_entry().candidate);
  // The same key again replaces.
  other.measured_us = 99;
  tuned.put(other);
  EXPECT_EQ(tuned.entries.size(), 2u);
  // A folder that does not exist leaves the file as it was.
  EXPECT_FALSE(save_tuned(tuned, made + "/none/tuned.json"));
  EXPECT_EQ(load_tuned(made + "/none.json").error().code, ErrorCode::kNotFound);
  std::size_t files = 0;
  for ([[maybe_unused]] const auto& file : std::filesystem::directory_iterator(made)) ++files;
  EXPECT_EQ(files, 1u);
  std::filesystem::remove_all(made);
}

TEST(TunedFile, WhatIsMissingUnknownOrOutOfRangeIsNamed) {
  Tuned tuned;
  tuned.put(some_entry());
  const std::string text = tuned_text(tuned);
  tuned.entries.push_back(some_entry());
  struct Case {
    std::string text;
    const char* named;
  };
  const Case cases[] = {
      {"no", "JSON"},
      {replaced(text, "\"version\": 1", "\"version\": 2"), "version"},
      {replaced(text, "\"version\": 1", "\"version\": 1, \"more\": 1"), "entries"},
      {replaced(text, "\"tile_m\"", "\"tile_rows\""), "tile_m"},
      {replaced(text, "\"tile_m\":128", "\"tile_m\":128, \"also\":1"), "also"},
      {replaced(text, "\"tile_m\":128", "\"tile_m\":1280"), "tile_m"},
      {replaced(text, "\"tile_m\":128", "\"tile_m\":-1"), "tile_m"},
      {replaced(text, "\"tile_m\":128", "\"tile_m\":12.5"), "tile_m"},
      {replaced(text, "\"engines\":false", "\"engines\":0"), "engines"},
      {replaced(text, "\"op\":\"gemm_ar\"", "\"op\":\"gemm\""), "gemm"},
      {replaced(text, "\"form\":\"unfused\"", "\"form\":\"auto\""), "form"},
      {replaced(text, "\"sums\":\"once\"", "\"sums\":\"never\""), "sums"},
      {replaced(text, "\"m\":5120", "\"m\":5000"), "bucket"},
      {replaced(text, "\"measured_us\":123.5", "\"measured_us\":0"), "measured_us"},
      {tuned_text(tuned), "another"},
  };
  for (const Case& wrong : cases) {
    const auto read = parse_tuned(wrong.text, "here.json");
    ASSERT_FALSE(read) << wrong.named;
    EXPECT_EQ(read.error().code, ErrorCode::kInvalidArgument);
    EXPECT_NE(read.error().message.find(wrong.named), std::string::npos) << read.error().message;
  }
}

TEST(JobPlan, AllRanksReadWhatRankZeroWrote) {
  JobPlan plan;
  plan.machine = shipped_machine("H200").value();
  plan.machine.network_gb_s = 12.25;
  plan.tuned.put(some_entry());
  const std::string text = job_plan_text(plan);
  const auto read = parse_job_plan(text);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(read->machine, plan.machine);
  EXPECT_EQ(tuned_text(read->tuned), tuned_text(plan.tuned));
  EXPECT_EQ(job_plan_text(*read), text);
  for (const std::string& wrong :
       {std::string(), std::string("[]"), text.substr(1), replaced(text, "tuned", "toned"),
        replaced(text, "hbm_gb_s", "hbm"), replaced(text, "tile_m", "tile")}) {
    EXPECT_FALSE(parse_job_plan(wrong)) << wrong.substr(0, 60);
  }
}

TEST(JobPlan, AMixedJobIsPlannedForTheSlowerMachine) {
  Machine quick = shipped_machine("H200").value();
  Machine slow = shipped_machine("H100").value();
  slow.step_us_256 = 1.2 * quick.step_us_256;
  EXPECT_EQ(slowest(std::vector{quick, slow}).name, "H100");
  EXPECT_EQ(slowest(std::vector{slow, quick}).name, "H100");
  quick.sms /= 2;
  EXPECT_EQ(slowest(std::vector{quick, slow}).name, "H200");
  EXPECT_EQ(slowest(std::vector{quick, quick}).name, "H200");
}

TEST(JobPlan, ARankWithOtherFilesIsNamed) {
  JobPlan job;
  job.machine = shipped_machine("H100").value();
  JobPlan own = job;
  EXPECT_EQ(difference(job, own, 3), "");
  own.tuned.put(some_entry());
  EXPECT_NE(difference(job, own, 3).find("rank 3's tuned.json"), std::string::npos);
  own = job;
  own.machine.link_gb_s += 1;
  EXPECT_NE(difference(job, own, 3).find("rank 3's machine file"), std::string::npos);
  own.machine = shipped_machine("H200").value();
  const std::string text = difference(job, own, 3);
  EXPECT_NE(text.find("rank 3 has machine 'H200'"), std::string::npos) << text;
  EXPECT_NE(text.find("H100"), std::string::npos) << text;
}

}  // namespace
}  // namespace mk::kernels::plan
