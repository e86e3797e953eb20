#include "tests/bench/mkbench/rank_loop.h"

#include <algorithm>
#include <chrono>
#include <set>
#include <thread>
#include <utility>

#include "client/tools/executor_matrices.h"
#include "client/tools/launch/process.h"
#include "client/tools/numeric/hash.h"
#include "client/tools/numeric/random_matrix.h"
#include "mkernel/mkernel.h"
#include "tests/bench/mkbench/operator_case.h"
#include "tests/bench/mkbench/trace.h"

namespace mk::bench {
namespace {

/// Spoils an exponent of the first element there is.
void tamper(RankCase& rank_case) {
  for (Output* output : rank_case.outputs()) {
    if (output->bytes() < 2) continue;
    output->contents()[1] ^= std::byte{0x40};
    return;
  }
}

class RankLoop {
 public:
  RankLoop(const BenchSpec& spec, std::uint32_t rank) : spec_(spec), rank_(rank) {}
  Status run(const std::string& socket, const std::string& job, int report_fd);

 private:
  struct Turn {
    std::uint32_t number;
    LaunchMode mode;
    bool timed;
    bool traced;
  };
  Result<LaunchReport> launch(Session& session, RankCase& rank_case, const Turn& turn);
  /// All ranks, unless launches are to follow each other without a pause.
  Status meet(Session& session) const;
  void start_late(std::uint32_t launch) const;
  bool wants_check(LaunchMode asked, bool fused);

  const BenchSpec& spec_;
  const std::uint32_t rank_;
  std::set<LaunchMode> checked_;  ///< as asked for, and as they ran
};

Status RankLoop::run(const std::string& socket, const std::string& job, int report_fd) {
  MK_ASSIGN_OR_RETURN(const auto operation, case_of(spec_));
  std::shared_ptr<gpu::Driver> driver;
  if (spec_.executor == "cuda") {
    MK_ASSIGN_OR_RETURN(driver, tools::choose_gpu(rank_));
  }
  auto attach = AttachOptions::of_rank(job, rank_, spec_.nodes, spec_.local);
  attach.socket = socket;
  attach.timeout = std::chrono::milliseconds{spec_.timeout_ms};
  MK_ASSIGN_OR_RETURN(auto session, Session::attach(attach));
  {
    MK_ASSIGN_OR_RETURN(const auto rank_case, operation->start(session, spec_, rank_));
    std::uint32_t number = 0;
    for (std::uint32_t round = 0; round < spec_.rounds(); ++round) {
      const bool traced = round >= spec_.warmup + spec_.iterations;
      rank_case->set_trace(traced);
      // Which mode goes first alternates, so that neither always finds the machine as the other
      // left it.
      for (std::uint32_t half = 0; half < 2; ++half) {
        auto mode = (round + half) % 2 == 0 ? LaunchMode::kFused : LaunchMode::kUnfused;
        if (spec_.modes == "auto") {
          if (half != 0) continue;
          mode = LaunchMode::kAuto;
        } else if (spec_.modes != "both" &&
                   (spec_.modes == "fused") != (mode == LaunchMode::kFused)) {
          continue;
        }
        MK_ASSIGN_OR_RETURN(const LaunchReport report,
                            launch(session, *rank_case,
                                   {number++, mode, round >= spec_.warmup && !traced, traced}));
        MK_RETURN_IF_ERROR(tools::report_line(report_fd, nlohmann::json(report).dump()));
      }
    }
    MK_RETURN_IF_ERROR(session.barrier(attach.timeout));
  }
  return session.detach();
}

Result<LaunchReport> RankLoop::launch(Session& session, RankCase& rank_case, const Turn& turn) {
  rank_case.make_inputs(turn.number);
  for (Output* output : rank_case.outputs()) output->poison();
  MK_RETURN_IF_ERROR(meet(session));
  if (turn.timed && spec_.lead != 0) {
    MK_RETURN_IF_ERROR(rank_case.lead(turn.mode, spec_.lead));
    // The leads end together on GPUs. A barrier's answers reach the ranks further apart than that.
    if (spec_.executor != "cuda") MK_RETURN_IF_ERROR(meet(session));
  }
  start_late(turn.number);
  MK_ASSIGN_OR_RETURN(const LaunchStats stats, rank_case.launch(turn.mode));
  if (turn.mode != LaunchMode::kAuto && stats.mode != turn.mode) {
    return fail(ErrorCode::kInternal, "launch {} was asked to run {} and says it did not",
                turn.number, turn.mode == LaunchMode::kFused ? "fused" : "unfused");
  }
  if (turn.number == spec_.tamper_at && rank_ == 0) {
    tamper(rank_case);
  }
  LaunchReport report;
  report.launch = turn.number;
  report.fabric = session.fabric();
  report.fused = stats.mode == LaunchMode::kFused;
  report.timed = turn.timed;
  report.total_ns = stats.total_ns;
  report.compute_ns = stats.compute_ns - std::min(stats.compute_ns, stats.compute_wait_ns);
  if (turn.timed && report.fused && spec_.executor == "cuda") {
    MK_ASSIGN_OR_RETURN(report.core_ns, rank_case.core_ns());
  }
  report.network_bytes = stats.network_bytes;
  report.network_commands = stats.network_commands;
  report.estimated_fused_ns = stats.estimated_fused_ns;
  report.estimated_unfused_ns = stats.estimated_unfused_ns;
  report.work = rank_case.work();
  if (turn.traced) report.trace = json_of_spans(rank_case.trace());
  for (Output* output : rank_case.outputs()) {
    if (!output->guards_intact()) {
      return fail(ErrorCode::kInternal, "launch {} wrote beyond the end of an output of {} bytes",
                  turn.number, output->bytes());
    }
    report.output_hash = tools::hash_of(output->contents(), report.output_hash);
  }
  if (wants_check(turn.mode, report.fused)) {
    const tools::Comparison comparison = rank_case.verify();
    report.verified = true;
    report.wrong = comparison.wrong;
    report.compared = comparison.compared;
    report.worst_ratio = std::min(comparison.worst_ratio, 1e30);  // JSON has no infinity
    report.max_error = std::min(comparison.max_error, 1e300);
  }
  return report;
}

Status RankLoop::meet(Session& session) const {
  return spec_.barrier ? session.barrier(std::chrono::milliseconds{spec_.timeout_ms}) : Status{};
}

void RankLoop::start_late(std::uint32_t launch) const {
  if (spec_.skew_ms == 0) return;
  const std::uint64_t drawn =
      tools::mix64(spec_.seed + (std::uint64_t{launch} << 32 | (rank_ + 1) << 8));
  std::this_thread::sleep_for(std::chrono::microseconds{drawn % (spec_.skew_ms * 1000 + 1)});
}

// Ranks may run one launch in different forms. All check the first one that is asked for.
bool RankLoop::wants_check(LaunchMode asked, bool fused) {
  if (spec_.verify == "none") return false;
  const bool first_asked = checked_.insert(asked).second;
  const bool first = checked_.insert(fused ? LaunchMode::kFused : LaunchMode::kUnfused).second;
  return spec_.verify == "all" || first_asked || first;
}

}  // namespace

Status run_rank(const BenchSpec& spec, std::uint32_t rank, const std::string& socket,
                const std::string& job, int report_fd) {
  return RankLoop(spec, rank).run(socket, job, report_fd);
}

}  // namespace mk::bench
