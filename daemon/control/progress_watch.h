/// \file
/// What a rank does now, as its progress words say (shm/progress.h), and since when.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "shm/host/progress_sizes.h"

namespace mk::daemon {

/// A rank in or between its launches. The words are the client's: they decide about nothing.
struct RankProgress {
  std::string op;           ///< of the launch, or of the last one; empty: not told
  std::uint32_t epoch = 0;  ///< the operator's launches so far
  std::uint64_t tag = 0;
  std::uint32_t m = 0;
  shm::ProgressSizes sizes{};  ///< shm::kProgressSizeNames
  std::uint32_t tiles = 0, tiles_done = 0, chunks = 0, chunks_done = 0;
  /// The role that works, or whose wait is nearest to its cause; kExchangePhase; "": none.
  std::string phase;
  std::string waits_for;             ///< what that wait is for; empty: something of the rank works
  std::int32_t waits_for_rank = -1;  ///< whom for; -1: nobody
  std::uint64_t phase_for_ns = 0;    ///< how long these three have been seen
  std::uint64_t still_for_ns = 0;    ///< how long no tile and no chunk has been done
  /// Looks at the rank since it attached, and of those: in a launch, waiting.
  std::uint64_t looks = 0, looks_in_launch = 0, looks_waiting = 0;
};

/// The phase of a rank that waits for others in an exchange, between its launches.
inline constexpr std::string_view kExchangePhase = "exchange";

namespace control {

/// What a rank waits for in an exchange (a barrier, or the creation of an operator).
struct ExchangeWait {
  std::string tag;
  std::uint32_t rank = 0;  ///< the first one that has not come
};

/// Not thread-safe.
class ProgressWatch {
 public:
  explicit ProgressWatch(std::uint32_t rank) : rank_(rank) {}

  /// Reads the words. `in_launch`: of SegmentHeader::launches. `exchange`: where it waits if not
  /// there.
  void look(const shm::Progress& words, bool in_launch, std::uint64_t now_ns,
            const std::optional<ExchangeWait>& exchange = std::nullopt);
  /// Durations are up to `now_ns`.
  RankProgress seen(std::uint64_t now_ns) const;

 private:
  void find_phase(const shm::Progress& words, RankProgress& now) const;

  const std::uint32_t rank_;
  RankProgress last_;
  std::uint64_t phase_since_ns_ = 0;
  std::uint64_t still_since_ns_ = 0;
};

}  // namespace control
}  // namespace mk::daemon
