/// \file
/// What the parent tells its rank processes, and what a rank reports of each launch, as JSON.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

namespace mk::bench {

struct BenchSpec {
  std::string op = "gemm-ar";  ///< a case's name
  std::uint32_t nodes = 2, local = 2;
  std::string dtype = "bf16";
  std::string executor = "cpu";  ///< "cpu", "cuda": rank r on GPU r modulo their number
  std::uint32_t warmup = 2, iterations = 10;  ///< launches of each mode
  /// On GPUs: as many launches right before each timed one, of other values.
  std::uint32_t lead = 0;
  std::string verify = "all";        ///< "all" launches, "first" of each mode, "none"
  std::string modes = "both";        ///< "both", "fused", "unfused", "auto"
  std::string sizes = "fixed";       ///< "fixed"; "vary": see extent_of()
  bool barrier = true;               ///< before every launch, so that the ranks start together
  std::uint32_t skew_ms = 0;         ///< each rank sleeps up to so long, drawn, before each launch
  std::uint32_t tamper_at = kNever;  ///< spoils one output of rank 0 after this launch: must show
  bool trace = false;                ///< one more launch of each mode at the end, traced
  std::uint64_t seed = 0;
  std::uint32_t timeout_ms = 60'000;
  nlohmann::json operation;  ///< the case's own part

  std::uint32_t world() const { return nodes * local; }
  /// Rounds of one launch of each mode.
  std::uint32_t rounds() const { return warmup + iterations + (trace ? kTracedRounds : 0); }
  std::uint32_t launches() const { return rounds() * (modes == "both" ? 2 : 1); }
  static constexpr std::uint32_t kNever = ~0u;
  static constexpr std::uint32_t kTracedRounds = 5;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(BenchSpec, op, nodes, local, dtype, executor, warmup, iterations,
                                   lead, verify, modes, sizes, barrier, skew_ms, tamper_at, trace,
                                   seed, timeout_ms, operation)

/// The size of launch `launch` where the case's largest is `max`: `max` itself with fixed sizes.
/// Else it takes in turn the edges (max, least, max - 1, least + 1) and sizes drawn in between, the
/// same on every rank.
std::uint64_t extent_of(const BenchSpec& spec, std::uint32_t launch, std::uint64_t least,
                        std::uint64_t max);

/// What a launch has to do on one rank, in any order: no padding, no headers, no second copies.
struct Work {
  double flops = 0;
  double network_bytes = 0;  ///< this rank must send to other nodes
  double link_bytes = 0;     ///< of these, over the link that gets most
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Work, flops, network_bytes, link_bytes)

/// One launch on one rank. Every launch of a run has its own number, so that its inputs are its
/// own.
struct LaunchReport {
  std::uint32_t launch = 0;
  std::string fabric;  ///< as the daemon names it
  bool fused = true;   ///< as it ran
  bool timed = true;   ///< neither for warming up nor traced
  std::uint64_t total_ns = 0;
  std::uint64_t compute_ns = 0;  ///< of the rank's computing threads, waits left out
  std::uint64_t core_ns = 0;     ///< RankCase::core_ns
  std::uint64_t network_bytes = 0, network_commands = 0;
  std::uint64_t estimated_fused_ns = 0,
                estimated_unfused_ns = 0;  ///< what LaunchMode::kAuto goes by
  Work work;
  std::uint64_t output_hash = 0;
  bool verified = false;
  std::uint64_t wrong = 0, compared = 0;
  double worst_ratio = 0, max_error = 0;
  nlohmann::json trace;  ///< null, or trace.h's spans
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(LaunchReport, launch, fabric, fused, timed, total_ns, compute_ns,
                                   core_ns, network_bytes, network_commands, estimated_fused_ns,
                                   estimated_unfused_ns, work, output_hash, verified, wrong,
                                   compared, worst_ratio, max_error, trace)

}  // namespace mk::bench
