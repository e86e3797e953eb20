/// \file
/// tuned.json: measured choices that override the model's, by operator, GPU, world and shape
/// bucket. Host only.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/plan/candidate.h"

namespace mk::kernels::plan {

/// Shapes of a bucket share a tuned choice: their sides round up to the same quarter of a power of
/// two (... 4096, 5120, 6144, 7168, 8192, ...).
struct Bucket {
  std::uint32_t m = 0, n = 0, k = 0;
  friend bool operator==(const Bucket&, const Bucket&) = default;
};
Bucket bucket_of(const Shape& shape);

struct TunedEntry {
  Op op = Op::kAgGemm;
  std::string machine;  ///< Machine::name
  std::uint32_t nodes = 1;
  std::uint32_t locals = 1;
  Bucket bucket;
  Candidate candidate;
  double measured_us = 0;  ///< of the shape that was measured
};

/// What a tuned.json holds. No two entries have the same key.
struct Tuned {
  std::vector<TunedEntry> entries;

  /// The entry for the problem's operator, world and bucket on `machine`, or null.
  const TunedEntry* find(const Problem& problem, std::string_view machine) const;
  /// Adds the entry, or replaces that of its key.
  void put(TunedEntry entry);
};

/// kInvalidArgument names the entry and the key that is missing, unknown or out of range.
Result<Tuned> parse_tuned(std::string_view text, std::string_view source);
/// The choices that are shipped: of recorded sweeps.
const Tuned& shipped_tuned();
Result<Tuned> load_tuned(const std::string& path);
std::string tuned_text(const Tuned& tuned);
/// Replaces the file at once, or leaves it as it was.
Status save_tuned(const Tuned& tuned, const std::string& path);

}  // namespace mk::kernels::plan
