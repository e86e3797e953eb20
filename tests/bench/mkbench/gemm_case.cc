#include "tests/bench/mkbench/gemm_case.h"

#include <CLI/CLI.hpp>

#include "client/tools/numeric/gemm_reference.h"
#include "tests/bench/mkbench/at_least_one.h"

namespace mk::bench {

void GemmCase::add_gemm_options(CLI::App& command, const Help& help) {
  const auto size = [&](const char* flag, std::uint64_t& value, const char* text) {
    command.add_option(flag, value, text)->check(at_least_one())->capture_default_str();
  };
  size("--m", options_.m, help.m);
  size("--n", options_.n, help.n);
  size("--k", options_.k, help.k);
  command.add_option("--tile-m", options_.tile_m);
  command.add_option("--tile-n", options_.tile_n);
  command.add_option("--chunk-bytes", options_.chunk_bytes, "payload of a network command");
  command.add_option("--compute-blocks", options_.compute_blocks, "compute threads of a rank");
}

Tuning GemmCase::tuning(const BenchSpec& spec) const {
  Tuning tuning;
  tuning.tile_m = options_.tile_m;
  tuning.tile_n = options_.tile_n;
  tuning.chunk_bytes = options_.chunk_bytes;
  tuning.compute_blocks = options_.compute_blocks;
  tuning.wait_timeout = std::chrono::milliseconds{spec.timeout_ms};
  if (spec.executor == "cuda") tuning.executor = Executor::kCuda;
  return tuning;
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
    const std::function<Result<LaunchStats>(const void* a, const void* b, void* c, void* gathered)>&
        launch,
    Output* gathered) {
  MK_RETURN_IF_ERROR(upload_);
  const auto contents = [this](Place place, Output* output) -> void* {
    return output != nullptr ? there_->at(place) + Output::guard_bytes() : nullptr;
  };
  if (leading_) {
    return launch(there_->at(kLeadA), there_->at(kB), contents(kLeadC, &c_),
                  contents(kLeadGathered, gathered));
  }
  MK_ASSIGN_OR_RETURN(
      const LaunchStats stats,
      launch(there_->at(kA), there_->at(kB), contents(kC, &c_), contents(kGathered, gathered)));
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

tools::Comparison GemmRank::compare_sum(const RankShare& rows, const std::uint16_t* c) const {
  tools::GemmReference reference(rows.count, options_.n, spec_.nodes, spec_.local,
                                 data_type_of(spec_));
  reference.use_threads(tools::share_of_cores(spec_.world()));
  for (std::uint32_t rank = 0; rank < spec_.world(); ++rank) {
    reference.add_rank(rows_of(matrix_a(rank), rows.first, rows.count).data(),
                       rows_of(matrix_b(rank), 0, options_.k).data(), options_.k, 1, 1);
  }
  return reference.compare(c);
}

}  // namespace mk::bench
