#include "tests/bench/mkbench/gemm_case.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <iterator>

#include "client/tools/numeric/gemm_reference.h"
#include "tests/bench/mkbench/at_least_one.h"

namespace mk::bench {
namespace {

/// By Activation.
constexpr const char* kActivations[] = {"none", "relu", "gelu", "silu", "gated-silu"};

}  // namespace

void GemmCase::add_gemm_options(CLI::App& command, const Help& help) {
  add_positive(command, "--m", options_.m, help.m);
  add_positive(command, "--n", options_.n, help.n);
  add_positive(command, "--k", options_.k, help.k);
  options_.add_to(command);
  command.add_option("--activation", options_.activation, "of each element of the whole sum")
      ->check(
          CLI::IsMember(std::vector<std::string>(std::begin(kActivations), std::end(kActivations))))
      ->capture_default_str();
  command.add_flag("--bias", options_.bias, "add a bias of n elements before that");
}

void GemmCase::add_partials_option(CLI::App& command) {
  command.add_option("--partials", options_.partials, "in which type partial sums travel")
      ->check(CLI::IsMember(std::vector<std::string>{"element", "f32"}))
      ->capture_default_str();
}

std::string GemmCase::describe_finish() const {
  std::string text;
  if (options_.activation != kActivations[0]) text += ", " + options_.activation;
  if (options_.bias) text += ", bias";
  if (options_.partials == "f32") text += ", partial sums in fp32";
  return text;
}

Activation activation_of(const GemmOptions& options) {
  const auto* const found =
      std::find(std::begin(kActivations), std::end(kActivations), options.activation);
  return static_cast<Activation>(found - std::begin(kActivations));
}

kernels::plan::Problem GemmCase::problem(kernels::plan::Op op, const BenchSpec& spec) const {
  const GemmOptions& o = options_;
  kernels::plan::Problem problem = planned_problem(op, spec);
  problem.shape = {static_cast<std::uint32_t>(o.m), static_cast<std::uint32_t>(o.n),
                   static_cast<std::uint32_t>(o.k)};
  problem.result.epilogue = {static_cast<kernels::Activation>(activation_of(o)), o.bias};
  if (o.partials == "f32") problem.result.partials = kernels::Partials::kF32;
  o.name_in(problem);
  return problem;
}

void GemmRank::upload(Output* gathered) {
  const auto keep = [this](const Status& status) {
    if (!status && upload_) upload_ = status;
  };
  if (!there_) {
    auto made = tools::ExecutorMatrices::create(spec_.executor == "cuda");
    if (!made) return keep(propagate(made));
    there_ = std::move(*made);
  }
  const auto put_output = [this, &keep](Place place, Output* output) {
    if (output == nullptr) return;
    output->poison();
    keep(there_->put(place, output->whole()));
  };
  keep(there_->put(kA, std::as_bytes(std::span(a_))));
  keep(there_->put(kB, std::as_bytes(std::span(b_))));
  bias_ = bias_of(bias_rank());
  keep(there_->put(kBias, std::as_bytes(std::span(bias_))));
  put_output(kC, &c_);
  put_output(kGathered, gathered);
  if (spec_.lead == 0) return;
  // Other values: what those launches leave behind must not pass for this launch's.
  const Elements other(a_.rbegin(), a_.rend());
  keep(there_->put(kLeadA, std::as_bytes(std::span(other))));
  put_output(kLeadC, &c_);
  put_output(kLeadGathered, gathered);
}

Result<LaunchStats> GemmRank::launch_with(
    const std::function<Result<LaunchStats>(const GemmArguments& arguments)>& launch,
    Output* gathered) {
  MK_RETURN_IF_ERROR(upload_);
  const auto contents = [this](Place place, Output* output) -> void* {
    return output != nullptr ? there_->at(place) + Output::guard_bytes() : nullptr;
  };
  GemmArguments arguments;
  arguments.a = there_->at(leading_ ? kLeadA : kA);
  arguments.b = there_->at(kB);
  arguments.c = contents(leading_ ? kLeadC : kC, &c_);
  arguments.m = m_;
  arguments.bias = options_.bias ? there_->at(kBias) : nullptr;
  arguments.gathered = contents(leading_ ? kLeadGathered : kGathered, gathered);
  if (leading_) return launch(arguments);
  MK_ASSIGN_OR_RETURN(const LaunchStats stats, launch(arguments));
  MK_RETURN_IF_ERROR(there_->get(kC, c_.whole()));
  if (gathered != nullptr) MK_RETURN_IF_ERROR(there_->get(kGathered, gathered->whole()));
  return stats;
}

Status GemmRank::lead(LaunchMode mode, std::uint32_t launches) {
  leading_ = true;
  Status status;
  for (std::uint32_t done = 0; done < launches && status; ++done)
    if (const auto stats = launch(mode); !stats) status = propagate(stats);
  leading_ = false;
  return status;
}

Elements GemmRank::bias_of(std::uint32_t rank) const {
  if (!options_.bias) return {};
  return rows_of(input_matrix(spec_, launch_, rank, 2, options_.n), 0, 1);
}

tools::Comparison GemmRank::compare_sum(const RankShare& rows, const std::uint16_t* c) const {
  tools::GemmReference reference(rows.count, options_.n, spec_.nodes, spec_.local,
                                 data_type_of(spec_),
                                 options_.partials == "f32" ? Partials::kF32 : Partials::kElement);
  reference.random_inputs();
  reference.finish(activation_of(options_), bias_of(0));
  reference.use_threads(tools::share_of_cores(spec_.world()));
  for (std::uint32_t rank = 0; rank < spec_.world(); ++rank) {
    reference.add_rank(rows_of(matrix_a(rank), rows.first, rows.count).data(),
                       rows_of(matrix_b(rank), 0, options_.k).data(), options_.k, 1, 1);
  }
  return reference.compare(c);
}

}  // namespace mk::bench
