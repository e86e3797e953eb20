// One plan per job: what a rank takes for its own files, and what all ranks then plan by.
#include "client/src/job_plan.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include "kernels/plan/choose.h"
#include "shm/host/result.h"
#include "shm/limits.h"

namespace mk {
namespace {

namespace plan = kernels::plan;

plan::Machine machine(const char* name) { return plan::shipped_machine(name).value(); }

plan::TunedEntry entry_of(std::uint32_t nodes, std::uint32_t locals) {
  plan::TunedEntry entry;
  entry.machine = "H100";
  entry.nodes = nodes;
  entry.locals = locals;
  entry.bucket = plan::bucket_of({4096, 4096, 4096});
  entry.candidate.tiling = {128, 256, 1 << 17, 0, 0};
  entry.candidate.stream_warpgroups = 33;
  entry.measured_us = 100;
  return entry;
}

class JobPlan : public testing::Test {
 protected:
  void SetUp() override {
    unsetenv("MKERNEL_MACHINE");
    unsetenv("MKERNEL_TUNED");
    folder_ =
        std::filesystem::temp_directory_path() / ("mk_job_plan_" + std::to_string(::getpid()));
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override {
    std::filesystem::remove_all(folder_);
    unsetenv("MKERNEL_MACHINE");
    unsetenv("MKERNEL_TUNED");
  }
  std::string file(const std::string& name, const std::string& text) {
    const std::string path = folder_ / name;
    std::ofstream(path) << text;
    return path;
  }
  std::filesystem::path folder_;
};

/// Ranks one after the other: what each exchanges is known beforehand, as all of them are asked
/// for their blobs in the same order. `own` of each rank; the answers of all.
struct Ranks {
  explicit Ranks(std::vector<Result<plan::JobPlan>> plans)
      : own(std::move(plans)), seen(own.size()) {}

  std::vector<Result<AgreedPlan>> agree(const std::vector<kernels::Shape>& shapes) {
    std::vector<Result<AgreedPlan>> answers;
    blobs.clear();
    // A first pass gathers what each rank sends, as far as it gets; until nobody sends more.
    for (std::size_t known = 0;; known = blobs.size()) {
      answers.clear();
      std::vector<JobPlanSeen> tried = seen;
      for (std::size_t rank = 0; rank < own.size(); ++rank) {
        PlanExchange exchange;
        exchange.world = static_cast<std::uint32_t>(own.size());
        std::size_t round = 0;
        exchange.exchange = [&, rank](std::string_view kind, std::span<const std::byte> blob,
                                      bool) -> Result<std::vector<std::vector<std::byte>>> {
          EXPECT_LE(blob.size(),
                    shm::exchange_blob_bytes_max(static_cast<std::uint32_t>(own.size())));
          const std::size_t at = round++;
          if (at == blobs.size()) blobs.emplace_back(own.size());
          blobs[at][rank].assign(blob.begin(), blob.end());
          kinds[at] = std::string(kind);
          if (at >= known) return fail(ErrorCode::kTimeout, "not all have sent yet");
          return blobs[at];
        };
        answers.push_back(agree_plan(exchange, tried[rank], shapes[rank], own[rank]));
      }
      if (blobs.size() == known) {
        seen = tried;
        return answers;
      }
    }
  }

  std::vector<Result<plan::JobPlan>> own;
  std::vector<JobPlanSeen> seen;
  std::vector<std::vector<std::vector<std::byte>>> blobs;  ///< by round and rank
  std::map<std::size_t, std::string> kinds;
};

std::vector<kernels::Shape> same_shapes(std::size_t ranks) {
  return std::vector<kernels::Shape>(ranks, {4096, 4096, 4096});
}

TEST_F(JobPlan, ARanksOwnFilesAreThoseItNamesThenTheEnvironmentsThenTheShippedOnes) {
  const plan::Machine here = machine("H200");
  const auto shipped = own_plan(1, 4, {"loopback"}, {}, {}, here);
  ASSERT_TRUE(shipped) << shipped.error().message;
  EXPECT_EQ(shipped->machine, here);
  EXPECT_FALSE(shipped->tuned.entries.empty());
  for (const plan::TunedEntry& entry : shipped->tuned.entries) {
    EXPECT_TRUE(entry.nodes == 1 && entry.locals == 4) << "another world's";
  }

  plan::Tuned tuned;
  tuned.put(entry_of(1, 4));
  tuned.put(entry_of(2, 4));
  setenv("MKERNEL_MACHINE", "H100", 1);
  setenv("MKERNEL_TUNED", file("tuned.json", plan::tuned_text(tuned)).c_str(), 1);
  const auto by_environment = own_plan(1, 4, {"loopback"}, {}, {}, here);
  ASSERT_TRUE(by_environment) << by_environment.error().message;
  EXPECT_EQ(by_environment->machine, machine("H100"));
  EXPECT_EQ(by_environment->tuned.entries.size(), 1u);

  plan::Machine mine = machine("H100");
  mine.name = "mine";
  Tuning tuning;
  tuning.machine_file = file("mine.json", plan::machine_text(mine));
  tuning.tuned_file = file("none.json", plan::tuned_text({}));
  kernels::MachineRates rates;
  rates.network_bytes_per_s = 3e9;
  const auto named = own_plan(1, 4, {"loopback"}, tuning, rates, here);
  ASSERT_TRUE(named) << named.error().message;
  EXPECT_EQ(named->machine.name, "mine");
  EXPECT_DOUBLE_EQ(named->machine.network_gb_s, 3) << "a caller's rates count more";
  EXPECT_TRUE(named->tuned.entries.empty());

  // Over sockets the network is another one.
  EXPECT_DOUBLE_EQ(own_plan(1, 4, {"ofi:tcp;ofi_rxm"}, {}, {}, here)->machine.network_gb_s,
                   machine("H100").sockets_gb_s);
  EXPECT_DOUBLE_EQ(own_plan(1, 4, {"ofi:tcp;ofi_rxm"}, tuning, rates, here)->machine.network_gb_s,
                   3);

  tuning.machine_file = folder_ / "nowhere.json";
  EXPECT_EQ(own_plan(1, 4, {"loopback"}, tuning, {}, here).error().code, ErrorCode::kNotFound);
  tuning.machine_file = "CPU";
  EXPECT_EQ(own_plan(1, 4, {"loopback"}, tuning, {}, here).error().code,
            ErrorCode::kInvalidArgument);
}

TEST_F(JobPlan, AllRanksPlanByRankZerosFilesAndTheLargestShape) {
  plan::JobPlan zero{machine("H100"), {}};
  zero.tuned.put(entry_of(1, 3));
  plan::JobPlan other{machine("H100"), {}};
  other.machine.copy_gb_s *= 2;
  Ranks ranks({zero, other, zero});
  testing::internal::CaptureStderr();
  const auto agreed = ranks.agree({{64, 128, 256}, {64, 512, 256}, {64, 128, 1024}});
  testing::internal::GetCapturedStderr();
  for (const auto& answer : agreed) {
    ASSERT_TRUE(answer) << answer.error().message;
    EXPECT_EQ(answer->job->machine, zero.machine);
    EXPECT_EQ(plan::tuned_text(answer->job->tuned), plan::tuned_text(zero.tuned));
    EXPECT_EQ(answer->shape.n, 512u);
    EXPECT_EQ(answer->shape.k, 1024u);
  }
}

// As many pieces as the longest text takes; and none where nothing is new.
TEST_F(JobPlan, TextsGoRoundOnceInPiecesThatAnExchangeTakes) {
  plan::JobPlan zero{machine("H100"), {}};
  for (std::uint32_t locals = 1; locals <= 500; ++locals) zero.tuned.put(entry_of(1, locals));
  const std::size_t bytes = plan::job_plan_text(zero).size();
  const std::size_t most = shm::exchange_blob_bytes_max(2);
  ASSERT_GT(bytes, 2 * most);
  Ranks ranks({zero, plan::JobPlan{machine("H100"), {}}});
  testing::internal::CaptureStderr();
  auto agreed = ranks.agree(same_shapes(2));
  testing::internal::GetCapturedStderr();
  ASSERT_TRUE(agreed[0] && agreed[1]);
  EXPECT_EQ(agreed[1]->job->tuned.entries.size(), 500u);
  EXPECT_EQ(ranks.blobs.size(), 1 + (bytes + most - 1) / most);
  agreed = ranks.agree(same_shapes(2));
  ASSERT_TRUE(agreed[0] && agreed[1]);
  EXPECT_EQ(ranks.blobs.size(), 1u);
  EXPECT_EQ(agreed[1]->job->tuned.entries.size(), 500u);
}

TEST_F(JobPlan, AJobOnSeveralKindsIsPlannedForTheSlowerAndSaysSo) {
  plan::JobPlan quick{machine("H200"), {}};
  plan::JobPlan slow{machine("H100"), {}};
  slow.machine.step_us_256 *= 1.1;
  for (const bool slow_first : {false, true}) {
    Ranks ranks(slow_first ? std::vector<Result<plan::JobPlan>>{slow, quick}
                           : std::vector<Result<plan::JobPlan>>{quick, slow});
    const auto agreed = ranks.agree(same_shapes(2));
    for (const auto& answer : agreed) {
      ASSERT_TRUE(answer) << answer.error().message;
      EXPECT_EQ(answer->job->machine, slow.machine);
    }
  }
  // Rank 0 says it.
  PlanExchange first;
  first.is_first = true;
  Ranks ranks({quick, slow});
  (void)ranks.agree(same_shapes(2));
  std::size_t round = 0;
  first.exchange = [&](std::string_view, std::span<const std::byte>,
                       bool) -> Result<std::vector<std::vector<std::byte>>> {
    return ranks.blobs[round++];
  };
  JobPlanSeen seen;
  testing::internal::CaptureStderr();
  ASSERT_TRUE(agree_plan(first, seen, {4096, 4096, 4096}, ranks.own[0]));
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("rank 0 has machine 'H200', but the job is planned for 'H100'"),
            std::string::npos)
      << said;
}

TEST_F(JobPlan, ARankWithoutFilesIsNamedToAll) {
  Ranks ranks({plan::JobPlan{machine("H100"), {}},
               fail(ErrorCode::kNotFound, "machine file x cannot be opened")});
  const auto agreed = ranks.agree(same_shapes(2));
  ASSERT_FALSE(agreed[0]);
  EXPECT_EQ(agreed[0].error().code, ErrorCode::kNotFound);
  EXPECT_NE(agreed[0].error().message.find("rank 1: machine file x"), std::string::npos);
  EXPECT_EQ(agreed[1].error().code, ErrorCode::kNotFound);
}

// The others hear the beginning of a long reason: as much as an exchange of that world takes.
TEST_F(JobPlan, ALongRefusalIsCut) {
  const std::string reason = "machine file x: 'copy_gb_s' is " + std::string(70'000, '7');
  for (const std::uint32_t world : {2u, 64u, 1024u}) {
    std::vector<Result<plan::JobPlan>> plans(world, plan::JobPlan{machine("H100"), {}});
    plans[1] = fail(ErrorCode::kInvalidArgument, "{}", reason);
    Ranks ranks(std::move(plans));
    const std::vector<Result<AgreedPlan>> agreed = ranks.agree(same_shapes(world));
    const std::string begins = reason.substr(0, shm::exchange_blob_bytes_max(world) - 100);
    for (std::uint32_t rank = 0; rank < world; ++rank) {
      ASSERT_FALSE(agreed[rank]) << rank;
      const Error& error = agreed[rank].error();
      EXPECT_EQ(error.code, ErrorCode::kInvalidArgument) << rank;
      EXPECT_TRUE(error.message.starts_with(rank == 1 ? begins : "rank 1: " + begins)) << rank;
    }
  }
}

TEST_F(JobPlan, BeforeAnyOperatorTheOwnFilesAreExpected) {
  const plan::JobPlan own{machine("H100"), {}};
  JobPlanSeen seen;
  EXPECT_EQ(expected_plan(seen, {1, 8, 8}, own)->job->machine, own.machine);
  seen.job = std::make_shared<const plan::JobPlan>(plan::JobPlan{machine("H200"), {}});
  EXPECT_EQ(expected_plan(seen, {1, 8, 8}, own)->job->machine.name, "H200");
}

}  // namespace
}  // namespace mk
