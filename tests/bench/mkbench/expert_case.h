/// \file
/// What the cases of expert parallelism share: tokens, experts and routing.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

#include "tests/bench/mkbench/at_least_one.h"
#include "tests/bench/mkbench/inputs.h"
#include "tests/bench/mkbench/moe_routing.h"
#include "tests/bench/mkbench/operator_case.h"
#include "tests/bench/mkbench/tuning_options.h"

namespace mk::bench {

struct ExpertOptions : TuningOptions {
  std::uint64_t tokens = 0, hidden = 0, features = 0;
  std::uint32_t experts = 16, top_k = 2;
  std::string routing = "uniform";
};

/// `Options`: ExpertOptions, and perhaps more.
template <class Options>
class ExpertCase : public CaseWithOptions<Options> {
 public:
  void add_options(CLI::App& command) override {
    ExpertOptions& o = this->options_;
    add_positive(command, "--tokens", o.tokens, "of each rank");
    add_positive(command, "--hidden", o.hidden, "elements of a token");
    add_positive(command, "--features", o.features, features_help());
    add_positive(command, "--experts", o.experts, "over all ranks");
    add_positive(command, "--top-k", o.top_k, "experts of a token");
    command.add_option("--routing", o.routing, MoeRouting::kHelp)
        ->check(CLI::IsMember(MoeRouting::names()))
        ->capture_default_str();
    o.add_to(command);
  }
  bool outputs_are_equal() const override { return false; }
  /// As many experts per rank.
  void keep_work_per_rank(std::uint32_t nodes) override { this->options_.experts *= nodes; }

 protected:
  virtual const char* features_help() const = 0;
  /// All ranks' tokens times an expert's weights [k, n].
  kernels::plan::Problem problem(kernels::plan::Op op, const BenchSpec& spec, std::uint64_t n,
                                 std::uint64_t k) const {
    const ExpertOptions& o = this->options_;
    kernels::plan::Problem problem = planned_problem(op, spec);
    problem.shape = {static_cast<std::uint32_t>(o.tokens * spec.world()),
                     static_cast<std::uint32_t>(n), static_cast<std::uint32_t>(k)};
    problem.experts = {o.experts, o.top_k};
    o.name_in(problem);
    return problem;
  }
  Status check_top_k() const {
    const ExpertOptions& o = this->options_;
    if (o.top_k <= o.experts) return {};
    return fail(ErrorCode::kInvalidArgument, "top {} of {} experts cannot all be different",
                o.top_k, o.experts);
  }
};

}  // namespace mk::bench
