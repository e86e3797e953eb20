#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "mkernel/mkernel.h"

namespace mk {
namespace {

using Variables = std::map<std::string, std::string>;

const char* const kPrefixes[] = {"MKERNEL_", "OMPI_", "PMI",    "MPI_LOCAL",
                                 "PALS_",    "FLUX_", "SLURM_", "TORCHELASTIC_"};
const char* const kTorchrunNames[] = {
    "RANK",       "WORLD_SIZE",       "LOCAL_RANK", "LOCAL_WORLD_SIZE",
    "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_PORT"};

/// Leaves none of the launchers' variables, those of this test's caller included.
void clear_environment() {
  std::vector<std::string> names(std::begin(kTorchrunNames), std::end(kTorchrunNames));
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    for (const char* prefix : kPrefixes) {
      if (text.starts_with(prefix)) names.push_back(text.substr(0, text.find('=')));
    }
  }
  for (const std::string& name : names) ::unsetenv(name.c_str());
}

Result<AttachOptions> options_in(const Variables& variables) {
  clear_environment();
  for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
  auto options = AttachOptions::from_environment();
  clear_environment();
  return options;
}

void expect_error(const Variables& variables, const std::vector<std::string>& words) {
  const auto options = options_in(variables);
  ASSERT_FALSE(options);
  EXPECT_EQ(ErrorCode::kInvalidArgument, options.error().code);
  for (const std::string& word : words) {
    EXPECT_NE(std::string::npos, options.error().message.find(word))
        << word << " is not in: " << options.error().message;
  }
}

Variables with(Variables variables, const Variables& others) {
  for (const auto& [name, value] : others) variables[name] = value;
  return variables;
}

struct At {
  std::uint32_t nodes = 2, local_size = 4, rank = 5;

  std::uint32_t world() const { return nodes * local_size; }
  std::uint32_t node() const { return rank / local_size; }
  std::uint32_t local() const { return rank % local_size; }
};

/// What a launcher tells a rank, written from its documentation.
struct Launcher {
  const char* name;
  std::function<Variables(const At&)> variables;
  const char* job;
};

std::string text(std::uint32_t value) { return std::to_string(value); }

Variables own(const At& at) {
  return {{"MKERNEL_RANK", text(at.rank)},
          {"MKERNEL_WORLD_SIZE", text(at.world())},
          {"MKERNEL_LOCAL_RANK", text(at.local())},
          {"MKERNEL_LOCAL_SIZE", text(at.local_size)},
          {"MKERNEL_JOB", "mine"}};
}
Variables torchrun(const At& at) {
  return {{"RANK", text(at.rank)},          {"WORLD_SIZE", text(at.world())},
          {"LOCAL_RANK", text(at.local())}, {"LOCAL_WORLD_SIZE", text(at.local_size)},
          {"GROUP_RANK", text(at.node())},  {"GROUP_WORLD_SIZE", text(at.nodes)},
          {"TORCHELASTIC_RUN_ID", "abc"}};
}
Variables open_mpi(const At& at) {
  return {{"OMPI_COMM_WORLD_RANK", text(at.rank)},
          {"OMPI_COMM_WORLD_SIZE", text(at.world())},
          {"OMPI_COMM_WORLD_LOCAL_RANK", text(at.local())},
          {"OMPI_COMM_WORLD_LOCAL_SIZE", text(at.local_size)},
          {"OMPI_COMM_WORLD_NODE_RANK", text(at.local())},
          {"PMIX_RANK", text(at.rank)},
          {"PMIX_NAMESPACE", "prterun-host-77@1"}};
}
Variables hydra(const At& at) {
  return {{"PMI_RANK", text(at.rank)},
          {"PMI_SIZE", text(at.world())},
          {"MPI_LOCALRANKID", text(at.local())},
          {"MPI_LOCALNRANKS", text(at.local_size)},
          {"PMI_FD", "9"}};
}
Variables pals(const At& at) {
  return {{"PMI_RANK", text(at.rank)},
          {"PMI_SIZE", text(at.world())},
          {"PMI_LOCAL_RANK", text(at.local())},
          {"PMI_LOCAL_SIZE", text(at.local_size)},
          {"PALS_RANKID", text(at.rank)},
          {"PALS_NODEID", text(at.node())},
          {"PALS_APID", "6e1b-apid"}};
}
Variables flux(const At& at) {
  return {{"FLUX_TASK_RANK", text(at.rank)},
          {"FLUX_JOB_SIZE", text(at.world())},
          {"FLUX_TASK_LOCAL_ID", text(at.local())},
          {"FLUX_JOB_NNODES", text(at.nodes)},
          {"FLUX_JOB_ID", "\xc6\x92iFkbMhFM"},
          {"PMI_RANK", text(at.rank)},
          {"PMI_SIZE", text(at.world())}};
}
Variables slurm(const At& at) {
  const std::string list =
      at.nodes == 1 ? text(at.local_size) : text(at.local_size) + "(x" + text(at.nodes) + ")";
  return {{"SLURM_PROCID", text(at.rank)},
          {"SLURM_NTASKS", text(at.world())},
          {"SLURM_NPROCS", text(at.world())},
          {"SLURM_STEP_NUM_TASKS", text(at.world())},
          {"SLURM_LOCALID", text(at.local())},
          {"SLURM_NODEID", text(at.node())},
          {"SLURM_NNODES", text(at.nodes)},
          {"SLURM_STEP_NUM_NODES", text(at.nodes)},
          {"SLURM_TASKS_PER_NODE", list},
          {"SLURM_STEP_TASKS_PER_NODE", list},
          {"SLURM_NTASKS_PER_NODE", text(at.local_size)},
          {"SLURM_JOB_ID", "77"},
          {"SLURM_STEP_ID", "3"}};
}
Variables pmix(const At& at) {
  return {{"PMIX_RANK", text(at.rank)},
          {"PMIX_NAMESPACE", "ns.5"},
          {"MKERNEL_WORLD_SIZE", text(at.world())},
          {"MKERNEL_LOCAL_RANK", text(at.local())},
          {"MKERNEL_LOCAL_SIZE", text(at.local_size)}};
}

const Launcher kLaunchers[] = {{"own", own, "mine"},
                               {"torchrun", torchrun, "abc"},
                               {"open_mpi", open_mpi, "prterun-host-77@1"},
                               {"hydra", hydra, "default"},
                               {"pals", pals, "6e1b-apid"},
                               {"flux", flux, "fiFkbMhFM"},
                               {"slurm", slurm, "77.3"},
                               {"pmix", pmix, "ns.5"}};

const At kAt{};

void expect_at(const At& at, const Result<AttachOptions>& options, const std::string& job) {
  ASSERT_TRUE(options) << options.error().message;
  EXPECT_EQ(at.rank, options->rank);
  EXPECT_EQ(at.world(), options->world);
  EXPECT_EQ(at.nodes, options->nodes);
  EXPECT_EQ(at.node(), options->node_rank);
  EXPECT_EQ(at.local_size, options->local_size);
  EXPECT_EQ(at.local(), options->local_rank);
  EXPECT_EQ(job, options->job);
}

class EveryLauncher : public testing::TestWithParam<Launcher> {};

TEST_P(EveryLauncher, PlacesEveryRankOfEverySmallWorld) {
  for (std::uint32_t nodes = 1; nodes <= 4; ++nodes) {
    for (std::uint32_t local_size = 1; local_size <= 4; ++local_size) {
      for (std::uint32_t rank = 0; rank < nodes * local_size; ++rank) {
        const At at{nodes, local_size, rank};
        expect_at(at, options_in(GetParam().variables(at)), GetParam().job);
      }
    }
  }
}

/// Whatever number one variable says instead: either the launcher would say all of that to the rank
/// of the place that comes out, or the error names the variable with its value.
TEST_P(EveryLauncher, AVariableThatContradictsTheOthersIsNamedWithItsValue) {
  std::mt19937 random(4711);
  int refused = 0;
  for (const auto& [name, value] : GetParam().variables(kAt)) {
    if (value.find_first_not_of("0123456789") != std::string::npos || name == "SLURM_JOB_ID" ||
        name == "SLURM_STEP_ID" || name == "PMI_FD" || name == "OMPI_COMM_WORLD_NODE_RANK") {
      continue;
    }
    for (int round = 0; round < 20; ++round) {
      const std::string other = text(static_cast<std::uint32_t>(random() % 12));
      if (other == value) continue;
      const Variables changed = with(GetParam().variables(kAt), {{name, other}});
      const auto options = options_in(changed);
      if (options) {
        const At at{options->nodes, options->local_size, options->rank};
        EXPECT_EQ(changed, GetParam().variables(at)) << name << "=" << other;
        continue;
      }
      ++refused;
      EXPECT_EQ(ErrorCode::kInvalidArgument, options.error().code);
      EXPECT_NE(std::string::npos, options.error().message.find(name + "=" + other))
          << name << "=" << other << " is not in: " << options.error().message;
    }
  }
  EXPECT_GT(refused, 40);
}

TEST_P(EveryLauncher, NumbersAreChecked) {
  for (const auto& [name, value] : GetParam().variables(kAt)) {
    if (!name.ends_with("RANK") || name == "OMPI_COMM_WORLD_NODE_RANK") continue;
    for (const char* bad : {"x", "-1", "1.5", "4294967296", "1 "}) {
      expect_error(with(GetParam().variables(kAt), {{name, bad}}), {name + "='" + bad + "'"});
    }
  }
}

TEST_P(EveryLauncher, AJobNameOfOnesOwnWins) {
  expect_at(kAt, options_in(with(GetParam().variables(kAt), {{"MKERNEL_JOB", "chosen"}})),
            "chosen");
}

INSTANTIATE_TEST_SUITE_P(Launchers, EveryLauncher, testing::ValuesIn(kLaunchers),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(LauncherEnvironment, OwnVariablesWinOverTheLaunchers) {
  expect_at(kAt, options_in(with(with(slurm(kAt), {{"SLURM_PROCID", "0"}}), own(kAt))), "mine");
}

TEST(LauncherEnvironment, WhoStartsProcessesInsideAnotherLaunchersWins) {
  // The outer launcher started one process per node, which started the ranks.
  const At agent{2, 1, 1};
  expect_at(kAt, options_in(with(slurm(agent), torchrun(kAt))), "abc");
  expect_at(kAt, options_in(with(slurm(agent), open_mpi(kAt))), "prterun-host-77@1");
  expect_at(kAt, options_in(with(slurm(agent), hydra(kAt))), "default");
  expect_at(kAt, options_in(with(flux(agent), hydra(kAt))), "default");
  expect_at(kAt, options_in(with(open_mpi(agent), torchrun(kAt))), "abc");
}

TEST(LauncherEnvironment, SlurmBesidePmiIsSlurm) {
  expect_at(kAt, options_in(with(slurm(kAt), {{"PMI_RANK", "5"}, {"PMI_SIZE", "8"}})), "77.3");
  expect_at(kAt, options_in(with(slurm(kAt), {{"PMIX_RANK", "5"}, {"PMIX_NAMESPACE", "ns"}})),
            "77.3");
  expect_error(with(slurm(kAt), {{"PMI_RANK", "4"}}), {"SLURM_PROCID=5", "PMI_RANK=4"});
  expect_error(with(slurm(kAt), {{"PMIX_RANK", "4"}}), {"SLURM_PROCID=5", "PMIX_RANK=4"});
}

TEST(LauncherEnvironment, WhatALauncherDoesNotSayOnesOwnVariablesMay) {
  const Variables bare = {{"PMI_RANK", "5"}, {"PMI_SIZE", "8"}};
  expect_error(bare, {"PMI_RANK=5", "MKERNEL_LOCAL_RANK is missing"});
  expect_error(with(bare, {{"MKERNEL_LOCAL_RANK", "1"}}), {"MKERNEL_LOCAL_SIZE"});
  expect_at(kAt, options_in(with(bare, {{"MKERNEL_LOCAL_RANK", "1"}, {"MKERNEL_LOCAL_SIZE", "4"}})),
            "default");
  expect_error({{"PMIX_RANK", "5"}}, {"PMIX_RANK=5", "MKERNEL_WORLD_SIZE is missing"});
  expect_error(with(torchrun(kAt), {{"MKERNEL_LOCAL_SIZE", "2"}}),
               {"LOCAL_WORLD_SIZE=4", "MKERNEL_LOCAL_SIZE=2"});
}

TEST(LauncherEnvironment, TorchrunWithoutAnIdIsKnownByItsPort) {
  expect_at(
      kAt,
      options_in(with(torchrun(kAt), {{"TORCHELASTIC_RUN_ID", "none"}, {"MASTER_PORT", "29511"}})),
      "29511");
}

TEST(LauncherEnvironment, ANameThatNoJobMayHaveIsRefusedWithItsVariable) {
  for (const std::string& name : {std::string("my run"), std::string("caf\xe9"),
                                  std::string(129, 'x'), std::string("line\nbreak")}) {
    expect_error(with(torchrun(kAt), {{"TORCHELASTIC_RUN_ID", name}}),
                 {"TORCHELASTIC_RUN_ID='", "set MKERNEL_JOB"});
  }
  expect_at(kAt, options_in(with(torchrun(kAt), {{"TORCHELASTIC_RUN_ID", std::string(128, 'x')}})),
            std::string(128, 'x'));
}

TEST(LauncherEnvironment, NothingThereSaysHowToStart) {
  expect_error({}, {"torchrun, srun, mpirun or flux run"});
}

TEST(LauncherEnvironment, EveryMissingVariableIsNamed) {
  for (const char* name : {"WORLD_SIZE", "LOCAL_RANK"}) {
    Variables cut = torchrun(kAt);
    cut.erase(name);
    expect_error(cut, {std::string(name) + " or MKERNEL_" + name + " is missing"});
  }
  expect_error({{"SLURM_PROCID", "5"}, {"SLURM_NTASKS", "8"}, {"SLURM_LOCALID", "1"}},
               {"set SLURM_NTASKS_PER_NODE"});
}

TEST(LauncherEnvironment, ARankBeyondTheWorldIsRefused) {
  expect_error({{"RANK", "5"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "4"}},
               {"RANK=5", "WORLD_SIZE=4"});
  expect_error({{"RANK", "5"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "1"}},
               {"RANK=5", "WORLD_SIZE=4"});
}

TEST(LauncherEnvironment, UnevenNodesAreRefusedInWords) {
  expect_error(with(torchrun(kAt), {{"LOCAL_WORLD_SIZE", "3"}}),
               {"same number of ranks", "LOCAL_WORLD_SIZE=3", "WORLD_SIZE=8"});
  for (const char* list : {"4,2", "4(x2),2", "2,4", "1(x3),2(x2)"}) {
    for (const char* name : {"SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"}) {
      const Variables uneven = {{"SLURM_PROCID", "0"},  {"SLURM_NTASKS", "6"},
                                {"SLURM_LOCALID", "0"}, {"SLURM_NODEID", "0"},
                                {"SLURM_NNODES", "2"},  {name, list}};
      expect_error(uneven, {std::string(name) + "=" + list, "same number of ranks"});
    }
  }
  // Of Flux only the sizes are known: they do not divide.
  expect_error(with(flux({3, 2, 0}), {{"FLUX_JOB_NNODES", "4"}}),
               {"same number of ranks", "FLUX_JOB_SIZE=6", "FLUX_JOB_NNODES=4"});
}

TEST(LauncherEnvironment, AStaleVariableOfTheAllocationIsNamedBesideTheSteps) {
  expect_error(with(slurm(kAt), {{"SLURM_NTASKS_PER_NODE", "8"}}),
               {"SLURM_NTASKS_PER_NODE=8", "SLURM_STEP_TASKS_PER_NODE=4(x2)"});
  expect_error(with(slurm(kAt), {{"SLURM_NTASKS", "16"}}),
               {"SLURM_NTASKS=16", "SLURM_STEP_NUM_TASKS=8"});
  expect_error(with(slurm(kAt), {{"SLURM_TASKS_PER_NODE", "8(x2)"}}),
               {"SLURM_TASKS_PER_NODE=8(x2)", "=4"});
}

TEST(LauncherEnvironment, ListsOfRanksPerNodeAreRead) {
  for (const char* list : {"4(x2)", "4,4", "4(x1),4"}) {
    const Variables lean = {{"SLURM_PROCID", "5"},
                            {"SLURM_NTASKS", "8"},
                            {"SLURM_LOCALID", "1"},
                            {"SLURM_STEP_TASKS_PER_NODE", list}};
    expect_at(kAt, options_in(lean), "default");
  }
  for (const char* list :
       {"x", "4(x)", "4(x0)", "4(2)", "4(x2", "4,,4", "(x2)", "4(x2)1", "4(x4294967295),4(x2)"}) {
    expect_error(with(slurm(kAt), {{"SLURM_STEP_TASKS_PER_NODE", list}}),
                 {"SLURM_STEP_TASKS_PER_NODE=", list});
  }
}

TEST(LauncherEnvironment, CyclicPlacementIsRefusedWithAdvice) {
  expect_error(with(slurm(kAt), {{"SLURM_PROCID", "3"}}),
               {"--distribution=block", "SLURM_PROCID=3"});
}

}  // namespace
}  // namespace mk
