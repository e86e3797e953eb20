#include "daemon/control/exchange.h"

#include <algorithm>

#include "daemon/control/ranks.h"
#include "shm/limits.h"

namespace mk::daemon::control {

namespace {

/// Remote ranks may run ahead of what we have seen complete: by their own window, counted from a
/// round that is complete there, and that is at most our ranks' window ahead of ours.
constexpr std::uint64_t kRemoteRoundsMax = 2 * kExchangeRoundsMax + 1;

}  // namespace

ExchangeTable::ExchangeTable(std::uint32_t world, std::uint32_t local_size)
    : world_(world), local_size_(local_size), next_(world, 0) {}

std::size_t ExchangeTable::blob_bytes_max(std::uint32_t world) {
  return shm::exchange_blob_bytes_max(world);
}

Result<std::uint64_t> ExchangeTable::put_local(std::uint32_t rank, const std::string& tag,
                                               Blob blob, std::uint64_t request,
                                               std::uint64_t deadline_ns,
                                               std::uint32_t timeout_ms) {
  if (blob.size() > blob_bytes_max(world_)) {
    return fail(ErrorCode::kLimitExceeded,
                "exchange '{}': rank {} put {} bytes; a rank of a world of {} may put {}", tag,
                rank, blob.size(), world_, blob_bytes_max(world_));
  }
  for (std::size_t i = 0; i < rounds_.size(); ++i) {
    for (const Waiter& waiter : rounds_[i].waiters) {
      if (waiter.rank != rank) continue;
      return fail(ErrorCode::kInvalidArgument,
                  "exchange '{}': rank {} still waits for its exchange '{}'; one at a time", tag,
                  rank, rounds_[i].tag);
    }
  }
  const std::uint64_t number = next_[rank];
  if (number - first_ >= kExchangeRoundsMax) {
    return fail(ErrorCode::kLimitExceeded,
                "exchange '{}': rank {} has given up on {} exchanges that are still incomplete; "
                "detach and start the job again",
                tag, rank, number - first_);
  }
  put(rank, tag, std::move(blob)).waiters.push_back({rank, request, deadline_ns, timeout_ms});
  return number;
}

Status ExchangeTable::check_remote(std::uint32_t rank, std::uint64_t round, std::uint64_t due,
                                   std::size_t bytes) const {
  if (round != due) {
    return fail(ErrorCode::kProtocol, "rank {} sent exchange {}, but its next one is {}", rank,
                round, due);
  }
  if (bytes > blob_bytes_max(world_)) {
    return fail(ErrorCode::kProtocol, "rank {} put {} bytes into an exchange; at most {}", rank,
                bytes, blob_bytes_max(world_));
  }
  if (round - first_ >= kRemoteRoundsMax) {
    return fail(ErrorCode::kProtocol, "rank {} is at exchange {} while {} is incomplete", rank,
                round, first_);
  }
  return {};
}

Status ExchangeTable::put_remote(std::uint32_t rank, std::uint64_t round, const std::string& tag,
                                 Blob blob) {
  MK_RETURN_IF_ERROR(check_remote(rank, round, next_[rank], blob.size()));
  put(rank, tag, std::move(blob));
  return {};
}

ExchangeTable::Round& ExchangeTable::put(std::uint32_t rank, const std::string& tag, Blob blob) {
  // A rank's next round is never below first_: a round leaves only when all ranks have put.
  const std::uint64_t number = next_[rank]++;
  while (rounds_.size() <= number - first_) rounds_.emplace_back().blobs.resize(world_);
  Round& round = rounds_[number - first_];
  if (round.count == 0) {
    round.tag = tag;
    round.tag_rank = rank;
  } else if (tag != round.tag && !round.error) {
    round.error = Error{ErrorCode::kInvalidArgument,
                        fmt::format("exchange {}: rank {} is at '{}' while rank {} is at '{}'; all "
                                    "ranks must make the same exchanges in the same order; if they "
                                    "have different releases of libmkclient, install the same one",
                                    number, rank, tag, round.tag_rank, round.tag)};
  }
  round.blobs[rank] = std::move(blob);
  ++round.count;
  return round;
}

std::vector<ExchangeTable::Answer> ExchangeTable::take_due(std::uint64_t now_ns) {
  std::vector<Answer> answers;
  for (std::size_t i = 0; i < rounds_.size(); ++i) {
    Round& round = rounds_[i];
    if (round.waiters.empty()) continue;
    if (round.error) {
      for (const Waiter& waiter : round.waiters) {
        answers.push_back({waiter.rank, waiter.request, tl::unexpected<Error>(*round.error)});
      }
      round.waiters.clear();
    } else if (round.count == world_) {
      auto reply = std::make_shared<shm::ExchangeReply>();
      for (auto& blob : round.blobs) reply->blobs.push_back(std::move(*blob));
      for (const Waiter& waiter : round.waiters) {
        answers.push_back({waiter.rank, waiter.request, reply});
      }
      round.waiters.clear();
    } else {
      std::erase_if(round.waiters, [&](const Waiter& waiter) {
        if (now_ns < waiter.deadline_ns) return false;
        answers.push_back(
            {waiter.rank, waiter.request,
             tl::unexpected<Error>(timeout_error(round, first_ + i, waiter.timeout_ms))});
        return true;
      });
    }
  }
  while (!rounds_.empty() && rounds_.front().count == world_ && rounds_.front().waiters.empty()) {
    rounds_.pop_front();
    ++first_;
  }
  return answers;
}

std::optional<std::uint64_t> ExchangeTable::take_waiting(std::uint32_t rank) {
  for (Round& round : rounds_) {
    const auto waiter = std::ranges::find(round.waiters, rank, &Waiter::rank);
    if (waiter == round.waiters.end()) continue;
    const std::uint64_t request = waiter->request;
    round.waiters.erase(waiter);
    return request;
  }
  return std::nullopt;
}

std::optional<ExchangeWait> ExchangeTable::awaited_by(std::uint32_t rank) const {
  for (const Round& round : rounds_) {
    if (std::ranges::find(round.waiters, rank, &Waiter::rank) == round.waiters.end()) continue;
    const auto missing = std::find(round.blobs.begin(), round.blobs.end(), std::nullopt);
    if (missing == round.blobs.end()) return std::nullopt;
    return ExchangeWait{round.tag, static_cast<std::uint32_t>(missing - round.blobs.begin())};
  }
  return std::nullopt;
}

const std::string* ExchangeTable::round_without(std::uint32_t rank) const {
  const std::uint64_t index = next_[rank] - first_;
  return index < rounds_.size() ? &rounds_[index].tag : nullptr;
}

Error ExchangeTable::timeout_error(const Round& round, std::uint64_t number,
                                   std::uint32_t timeout_ms) const {
  std::vector<std::uint32_t> missing;
  for (std::uint32_t rank = 0; rank < world_; ++rank) {
    if (!round.blobs[rank]) missing.push_back(rank);
  }
  return Error{
      ErrorCode::kTimeout,
      fmt::format("exchange '{}' (number {}): not all ranks came within {} ms; missing: {}",
                  round.tag, number, timeout_ms, describe_ranks(missing, local_size_))};
}

}  // namespace mk::daemon::control
