#include "tests/bench/mkbench/gemm_ar_rank.h"

#include <algorithm>
#include <vector>

#include "client/tools/launch/process.h"
#include "client/tools/numeric/gemm_reference.h"
#include "client/tools/numeric/random_matrix.h"
#include "mkernel/mkernel.h"

namespace mk::bench {
namespace {

constexpr std::uint16_t kPoison = 0xffff;  // a NaN in both types

std::uint64_t hash_of(const std::vector<std::uint16_t>& values) {
  std::uint64_t hash = values.size();
  for (const std::uint16_t value : values) hash = tools::mix64(hash ^ value);
  return hash;
}

class Rank {
 public:
  Rank(const GemmArSpec& spec, std::uint32_t rank)
      : spec_(spec), rank_(rank), type_(spec.dtype == "f16" ? DataType::kF16 : DataType::kBf16) {}

  Status run(const std::string& socket, const std::string& job, int report_fd);

 private:
  tools::RandomMatrix matrix_a(std::uint32_t launch, std::uint32_t rank) const {
    return {spec_.seed, std::uint64_t{launch} * 65536 + rank * 2, spec_.k, type_};
  }
  tools::RandomMatrix matrix_b(std::uint32_t launch, std::uint32_t rank) const {
    return {spec_.seed, std::uint64_t{launch} * 65536 + rank * 2 + 1, spec_.n, type_};
  }
  Result<LaunchReport> launch(Session& session, GemmAllReduce& op, std::uint32_t launch, bool fused,
                              bool warmup);
  void verify(LaunchReport& report) const;
  bool wants_check(const LaunchReport& report);

  const GemmArSpec& spec_;
  std::uint32_t rank_;
  DataType type_;
  std::vector<std::uint16_t> a_, b_, c_;
  bool checked_[2] = {false, false};  ///< by mode
};

Status Rank::run(const std::string& socket, const std::string& job, int report_fd) {
  AttachOptions attach;
  attach.socket = socket;
  attach.job = job;
  attach.rank = rank_;
  attach.world = spec_.nodes * spec_.local;
  attach.nodes = spec_.nodes;
  attach.local_size = spec_.local;
  attach.node_rank = rank_ / spec_.local;
  attach.local_rank = rank_ % spec_.local;
  attach.timeout = std::chrono::milliseconds{spec_.timeout_ms};
  MK_ASSIGN_OR_RETURN(auto session, Session::attach(attach));

  GemmAllReduce::Tuning tuning;
  tuning.tile_m = spec_.tile_m;
  tuning.tile_n = spec_.tile_n;
  tuning.chunk_bytes = spec_.chunk_bytes;
  tuning.compute_blocks = spec_.compute_blocks;
  tuning.wait_timeout = std::chrono::milliseconds{spec_.timeout_ms};
  MK_ASSIGN_OR_RETURN(auto op,
                      GemmAllReduce::create(session, {spec_.m, spec_.n, spec_.k, type_}, tuning));

  a_.resize(spec_.m * spec_.k);
  b_.resize(spec_.k * spec_.n);
  c_.resize(spec_.m * spec_.n);
  std::uint32_t number = 0;
  for (std::uint32_t iteration = 0; iteration < spec_.warmup + spec_.iterations; ++iteration) {
    // Which mode goes first alternates, so that neither always finds the machine as the other left
    // it.
    for (std::uint32_t half = 0; half < 2; ++half) {
      const bool fused = (iteration + half) % 2 == 0;
      if (spec_.modes != "both" && (spec_.modes == "fused") != fused) continue;
      MK_ASSIGN_OR_RETURN(const LaunchReport report,
                          launch(session, op, number++, fused, iteration < spec_.warmup));
      MK_RETURN_IF_ERROR(tools::report_line(report_fd, nlohmann::json(report).dump()));
    }
  }
  MK_RETURN_IF_ERROR(session.barrier());
  return session.detach();
}

Result<LaunchReport> Rank::launch(Session& session, GemmAllReduce& op, std::uint32_t launch,
                                  bool fused, bool warmup) {
  matrix_a(launch, rank_).rows(0, spec_.m, a_.data());
  matrix_b(launch, rank_).rows(0, spec_.k, b_.data());
  std::fill(c_.begin(), c_.end(), kPoison);
  MK_RETURN_IF_ERROR(session.barrier());
  MK_ASSIGN_OR_RETURN(const LaunchStats stats,
                      op.launch(a_.data(), b_.data(), c_.data(), spec_.m,
                                fused ? LaunchMode::kFused : LaunchMode::kUnfused));
  LaunchReport report;
  report.launch = launch;
  report.fabric = session.fabric();
  report.fused = fused;
  report.warmup = warmup;
  report.total_ns = stats.total_ns;
  report.compute_ns = stats.compute_ns;
  report.network_bytes = stats.network_bytes;
  report.network_commands = stats.network_commands;
  report.output_hash = hash_of(c_);
  if (wants_check(report)) verify(report);
  return report;
}

bool Rank::wants_check(const LaunchReport& report) {
  if (spec_.verify == "none") return false;
  const bool seen = std::exchange(checked_[report.fused ? 1 : 0], true);
  return spec_.verify == "all" || !seen;
}

void Rank::verify(LaunchReport& report) const {
  const std::uint32_t world = spec_.nodes * spec_.local;
  const std::uint64_t first = spec_.m * rank_ / world;
  const std::uint64_t rows = spec_.m * (rank_ + 1) / world - first;
  tools::GemmReference reference(rows, spec_.n, spec_.nodes, spec_.local, type_);
  std::vector<std::uint16_t> a(rows * spec_.k);
  std::vector<std::uint16_t> b(spec_.k * spec_.n);
  for (std::uint32_t rank = 0; rank < world; ++rank) {
    matrix_a(report.launch, rank).rows(first, rows, a.data());
    matrix_b(report.launch, rank).rows(0, spec_.k, b.data());
    reference.add_rank(a.data(), b.data(), spec_.k, 1, 1);
  }
  const auto comparison = reference.compare(c_.data() + first * spec_.n);
  report.verified = true;
  report.wrong = comparison.wrong;
  report.compared = rows * spec_.n;
  report.worst_ratio = std::min(comparison.worst_ratio, 1e30);  // JSON has no infinity
  report.max_error = comparison.max_error;
}

}  // namespace

Status run_gemm_ar_rank(const GemmArSpec& spec, std::uint32_t rank, const std::string& socket,
                        const std::string& job, int report_fd) {
  return Rank(spec, rank).run(socket, job, report_fd);
}

}  // namespace mk::bench
