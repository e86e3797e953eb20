/// \file
/// The all-gather of small blobs over a job's ranks, as one node sees it: rounds in which every
/// rank puts one blob, and local ranks that wait for a round to be full. Pure bookkeeping: no
/// clock, no messages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "daemon/control/progress_watch.h"
#include "shm/host/protocol.h"
#include "shm/host/result.h"

namespace mk::daemon::control {

/// Rounds a rank may begin while an earlier one (that it gave up waiting for) is not full.
inline constexpr std::uint64_t kExchangeRoundsMax = 8;

class ExchangeTable {
 public:
  using Blob = std::vector<std::byte>;

  /// The answer to a waiting local rank.
  struct Answer {
    std::uint32_t rank = 0;
    std::uint64_t request = 0;
    /// Every rank's blob (shared by all local ranks), or why there is none.
    Result<std::shared_ptr<const shm::ExchangeReply>> outcome;
  };

  ExchangeTable(std::uint32_t world, std::uint32_t local_size);

  /// The longest blob a rank may put, so that the reply with all of them fits a message.
  static std::size_t blob_bytes_max(std::uint32_t world);

  /// A local rank puts its blob and waits until `deadline_ns`. Returns the round's number. Refuses,
  /// with nothing changed, a blob that is too long, a rank that waits already, and one too far
  /// ahead.
  Result<std::uint64_t> put_local(std::uint32_t rank, const std::string& tag, Blob blob,
                                  std::uint64_t request, std::uint64_t deadline_ns,
                                  std::uint32_t timeout_ms);
  /// Whether a remote rank may put this when `due` is its next round. An error is a fault of the
  /// daemon that sent it.
  Status check_remote(std::uint32_t rank, std::uint64_t round, std::uint64_t due,
                      std::size_t bytes) const;
  /// A remote rank's blob, checked so.
  Status put_remote(std::uint32_t rank, std::uint64_t round, const std::string& tag, Blob blob);

  /// Takes the answers that are due now: rounds that are full or broken, ranks whose time is up.
  std::vector<Answer> take_due(std::uint64_t now_ns);
  /// Takes the request of a rank that waits, if it does: its session has ended.
  std::optional<std::uint64_t> take_waiting(std::uint32_t rank);

  /// What a local rank waits for now; nullopt: it does not wait.
  std::optional<ExchangeWait> awaited_by(std::uint32_t rank) const;
  /// The tag of a round that others have begun and `rank` has not put a blob in; null: none.
  const std::string* round_without(std::uint32_t rank) const;

  std::size_t open_rounds() const { return rounds_.size(); }

 private:
  struct Waiter {
    std::uint32_t rank;
    std::uint64_t request;
    std::uint64_t deadline_ns;
    std::uint32_t timeout_ms;
  };
  struct Round {
    std::string tag;
    std::uint32_t tag_rank = 0;  ///< who set the tag
    std::vector<std::optional<Blob>> blobs;
    std::uint32_t count = 0;
    std::optional<Error> error;
    std::vector<Waiter> waiters;
  };

  Round& put(std::uint32_t rank, const std::string& tag, Blob blob);
  Error timeout_error(const Round& round, std::uint64_t number, std::uint32_t timeout_ms) const;

  const std::uint32_t world_;
  const std::uint32_t local_size_;
  std::uint64_t first_ = 0;          ///< number of the front of `rounds_`
  std::deque<Round> rounds_;         ///< those not yet full and answered
  std::vector<std::uint64_t> next_;  ///< by rank: the number of its next round
};

}  // namespace mk::daemon::control
