// What mkbench asks the planner about, and the search for a quicker choice.
#include "tests/bench/mkbench/planned_shapes.h"

#include <gtest/gtest.h>

#include "kernels/plan/choose.h"

namespace mk::bench {
namespace {

namespace plan = kernels::plan;

plan::Problem problem() {
  plan::Problem of;
  of.op = plan::Op::kGemmRs;
  of.locals = 4;
  of.shape = {4096, 4096, 512};
  return of;
}

TEST(PlannedShapes, AShapeIsThreeSides) {
  const auto shape = parse_shape("4096x7168x2048");
  ASSERT_TRUE(shape) << shape.error().message;
  EXPECT_EQ(*shape, (kernels::Shape{4096, 7168, 2048}));
  for (const char* wrong : {"", "64", "64x64", "64x64x", "64x64x64x64", "64x0x64", "-1x8x8",
                            "64 x64x64", "4096x7168x2048 ", "99999999999x8x8"}) {
    EXPECT_EQ(parse_shape(wrong).error().code, ErrorCode::kInvalidArgument) << wrong;
  }
  EXPECT_EQ(*planned_op("gemm-rs"), plan::Op::kGemmRs);
  EXPECT_FALSE(planned_op("attention"));
}

// Another GPU's times would be taken for theirs.
TEST(PlannedShapes, ATunedChoiceIsOfTheGpusThatMeasure) {
  for (const char* name : {"H100", "H200"}) {
    const std::string gpus = std::string("8 x NVIDIA ") + name + " 80GB HBM3";
    for (const char* asked : {"", name}) {
      const auto machine = machine_to_tune(asked, gpus);
      ASSERT_TRUE(machine) << machine.error().message;
      EXPECT_EQ(*machine, machine_named(name).value());
    }
    const std::string other = name == std::string("H100") ? "H200" : "H100";
    for (const std::string& asked : {other, std::string("CPU")}) {
      const auto refused = machine_to_tune(asked, gpus);
      ASSERT_FALSE(refused) << asked << " on " << gpus;
      EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
      EXPECT_NE(refused.error().message.find(gpus), std::string::npos) << refused.error().message;
    }
  }
  for (const char* gpus : {"2 x NVIDIA H20", "1 x NVIDIA B300"}) {
    for (const char* asked : {"", "H100", "H200"})
      EXPECT_EQ(machine_to_tune(asked, gpus).error().code, ErrorCode::kInvalidArgument) << gpus;
  }
  for (const char* asked : {"", "CPU"})
    EXPECT_EQ(machine_to_tune(asked, "none").error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(machine_to_tune("H200", "none")->name, "H200");
  EXPECT_EQ(machine_to_tune("nowhere.json", "8 x NVIDIA H200").error().code, ErrorCode::kNotFound);
}

TEST(PlannedShapes, CandidatesAreTriedFromTheModelsChoiceOn) {
  const plan::Machine machine = machine_named("H100").value();
  const auto near = candidates_to_try(problem(), machine, 1.03);
  plan::Problem fused = problem();
  fused.named.form = kernels::Mode::kFused;
  EXPECT_EQ(near.front(), plan::choose(fused, machine)->candidate);
  double before = 0;
  for (const plan::Candidate& candidate : near) {
    const double us = plan::predict(fused, machine, candidate).total;
    EXPECT_GE(us, before);
    before = us;
  }
  EXPECT_LE(before, 1.03 * plan::predict(fused, machine, near.front()).total);
  EXPECT_GT(candidates_to_try(problem(), machine, 100).size(), near.size());
}

TEST(PlannedShapes, TheQuickestOfThoseThatRanIsAnswered) {
  const plan::Machine machine = machine_named("H100").value();
  const auto candidates = candidates_to_try(problem(), machine, 2);
  ASSERT_GT(candidates.size(), 8u);
  std::size_t asked = 0;
  std::vector<std::string> told;
  // The third cannot run, the sixth is the quickest, and time is up after eight.
  const auto trials = try_candidates(
      candidates,
      [&](const plan::Candidate& candidate) -> Result<double> {
        EXPECT_EQ(candidate, candidates[asked]);
        ++asked;
        if (asked == 3) return fail(ErrorCode::kUnavailable, "no such GPU");
        return asked == 6 ? 50.0 : 100.0 - static_cast<double>(asked);
      },
      [&] { return asked < 8; }, [&](const std::string& reason) { told.push_back(reason); });
  ASSERT_TRUE(trials) << trials.error().message;
  EXPECT_EQ(asked, 8u);
  EXPECT_EQ(trials->size(), 7u);
  EXPECT_EQ(trials->front().candidate, candidates[5]);
  EXPECT_DOUBLE_EQ(trials->front().us, 50);
  EXPECT_EQ(told, std::vector<std::string>{"no such GPU"});
  // One is tried however little time there is; and an error says why none could be.
  const auto none = try_candidates(
      candidates,
      [](const plan::Candidate&) -> Result<double> { return fail(ErrorCode::kSystem, "why"); },
      [] { return false; }, [](const std::string&) {});
  ASSERT_FALSE(none);
  EXPECT_NE(none.error().message.find("why"), std::string::npos);
}

}  // namespace
}  // namespace mk::bench
