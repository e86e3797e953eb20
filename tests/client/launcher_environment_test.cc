#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <string>

#include "mkernel/mkernel.h"

namespace mk {
namespace {

using Variables = std::map<std::string, std::string>;

const char* const kAll[] = {"MKERNEL_RANK",
                            "MKERNEL_WORLD_SIZE",
                            "MKERNEL_LOCAL_RANK",
                            "MKERNEL_LOCAL_SIZE",
                            "MKERNEL_NODE_RANK",
                            "MKERNEL_JOB",
                            "RANK",
                            "WORLD_SIZE",
                            "LOCAL_RANK",
                            "LOCAL_WORLD_SIZE",
                            "GROUP_RANK",
                            "TORCHELASTIC_RUN_ID",
                            "OMPI_COMM_WORLD_RANK",
                            "OMPI_COMM_WORLD_SIZE",
                            "OMPI_COMM_WORLD_LOCAL_RANK",
                            "OMPI_COMM_WORLD_LOCAL_SIZE",
                            "PMIX_NAMESPACE",
                            "SLURM_PROCID",
                            "SLURM_NTASKS",
                            "SLURM_LOCALID",
                            "SLURM_NTASKS_PER_NODE",
                            "SLURM_NODEID",
                            "SLURM_NNODES",
                            "SLURM_JOB_ID",
                            "SLURM_STEP_ID",
                            "MASTER_PORT"};

Result<AttachOptions> options_in(const Variables& variables) {
  for (const char* name : kAll) ::unsetenv(name);
  for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
  auto options = AttachOptions::from_environment();
  for (const char* name : kAll) ::unsetenv(name);
  return options;
}

void expect_error(const Variables& variables, const std::string& words) {
  const auto options = options_in(variables);
  ASSERT_FALSE(options);
  EXPECT_EQ(ErrorCode::kInvalidArgument, options.error().code);
  EXPECT_NE(std::string::npos, options.error().message.find(words)) << options.error().message;
}

// Rank 5 of 2 nodes x 4.
void expect_rank_five(const Result<AttachOptions>& options, const std::string& job) {
  ASSERT_TRUE(options) << options.error().message;
  EXPECT_EQ(5u, options->rank);
  EXPECT_EQ(8u, options->world);
  EXPECT_EQ(2u, options->nodes);
  EXPECT_EQ(1u, options->node_rank);
  EXPECT_EQ(4u, options->local_size);
  EXPECT_EQ(1u, options->local_rank);
  EXPECT_EQ(job, options->job);
}

const Variables kTorchrun = {{"RANK", "5"},       {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "4"},
                             {"GROUP_RANK", "1"}, {"TORCHELASTIC_RUN_ID", "abc"}};
const Variables kSlurm = {{"SLURM_PROCID", "5"}, {"SLURM_NTASKS", "8"}, {"SLURM_LOCALID", "1"},
                          {"SLURM_NODEID", "1"}, {"SLURM_NNODES", "2"}, {"SLURM_JOB_ID", "77"},
                          {"SLURM_STEP_ID", "3"}};
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "5"},
                            {"OMPI_COMM_WORLD_SIZE", "8"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                            {"PMIX_NAMESPACE", "ns1"}};
const Variables kOwn = {{"MKERNEL_RANK", "5"},
                        {"MKERNEL_WORLD_SIZE", "8"},
                        {"MKERNEL_LOCAL_RANK", "1"},
                        {"MKERNEL_LOCAL_SIZE", "4"},
                        {"MKERNEL_JOB", "mine"}};

TEST(LauncherEnvironment, Torchrun) { expect_rank_five(options_in(kTorchrun), "abc"); }
TEST(LauncherEnvironment, Slurm) { expect_rank_five(options_in(kSlurm), "77.3"); }
TEST(LauncherEnvironment, OpenMpi) { expect_rank_five(options_in(kOpenMpi), "ns1"); }
TEST(LauncherEnvironment, OwnVariables) { expect_rank_five(options_in(kOwn), "mine"); }

TEST(LauncherEnvironment, OwnVariablesWinOverTheLaunchers) {
  Variables both = kSlurm;
  both["SLURM_PROCID"] = "0";
  both.insert(kOwn.begin(), kOwn.end());
  expect_rank_five(options_in(both), "mine");
}

TEST(LauncherEnvironment, OpenMpiUnderSlurmIsOpenMpi) {
  Variables both = kSlurm;
  both["SLURM_PROCID"] = "1";  // of mpirun's own daemon
  both.insert(kOpenMpi.begin(), kOpenMpi.end());
  expect_rank_five(options_in(both), "ns1");
}

TEST(LauncherEnvironment, AJobNameOfOnesOwn) {
  Variables named = kTorchrun;
  named["MKERNEL_JOB"] = "chosen";
  expect_rank_five(options_in(named), "chosen");
}

TEST(LauncherEnvironment, TorchrunWithoutAnIdIsKnownByItsPort) {
  Variables none = kTorchrun;
  none["TORCHELASTIC_RUN_ID"] = "none";
  none["MASTER_PORT"] = "29511";
  expect_rank_five(options_in(none), "29511");
}

TEST(LauncherEnvironment, NothingThereSaysHowToStart) {
  expect_error({}, "torchrun, srun or mpirun");
}

TEST(LauncherEnvironment, EveryMissingVariableIsNamed) {
  for (const char* name : {"WORLD_SIZE", "LOCAL_RANK"}) {
    Variables cut = kTorchrun;
    cut.erase(name);
    expect_error(cut, std::string(name) + " is missing");
  }
  Variables cut = kSlurm;
  cut.erase("SLURM_NNODES");
  expect_error(cut, "set SLURM_NTASKS_PER_NODE");
}

TEST(LauncherEnvironment, NumbersAreChecked) {
  for (const char* value : {"x", "-1", "1.5", "4294967296", "1 "}) {
    Variables bad = kTorchrun;
    bad["RANK"] = value;
    expect_error(bad, "RANK='");
  }
}

TEST(LauncherEnvironment, UnevenNodesAreRefused) {
  Variables uneven = kTorchrun;
  uneven["LOCAL_WORLD_SIZE"] = "3";
  expect_error(uneven, "same number of ranks");
}

TEST(LauncherEnvironment, CyclicPlacementIsRefusedWithAdvice) {
  Variables cyclic = kSlurm;
  cyclic["SLURM_PROCID"] = "3";
  expect_error(cyclic, "--distribution=block");
}

}  // namespace
}  // namespace mk
