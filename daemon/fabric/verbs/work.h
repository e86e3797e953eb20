/// \file
/// What a write becomes on a send queue, and how a chain of that is handed to the NIC with one
/// doorbell. No state.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <cstdint>
#include <span>

#include "daemon/fabric/fabric.h"
#include "shm/limits.h"

namespace mk::fabric::verbs {

/// One work request, before the interface is chosen.
struct WorkRequest {
  enum class Kind : std::uint8_t {
    kData,       ///< RDMA write of `bytes` at `local`
    kFlag,       ///< RDMA write of the four bytes of `word`, inline
    kImmediate,  ///< RDMA write of `bytes` (perhaps none) at `local`, with `word` as immediate
  };
  Kind kind = Kind::kData;
  bool signaled = false;
  std::uint32_t word = 0;
  std::uint32_t bytes = 0;
  std::uint32_t local_key = 0;
  std::uint32_t remote_key = 0;
  std::uint64_t local = 0;
  std::uint64_t remote = 0;
  std::uint64_t id = 0;
};

/// Work requests of one write, unless it crosses from one registration into another or is longer
/// than the port's messages.
inline constexpr std::uint32_t kRequestsPerWrite = 2;

/// Up to one batch's work requests for one queue, in order.
class Chain {
 public:
  void clear() { count_ = 0; }
  bool empty() const { return count_ == 0; }
  bool full() const { return count_ == requests_.size(); }
  void push(const WorkRequest& request) { requests_[count_++] = request; }
  WorkRequest& back() { return requests_[count_ - 1]; }
  std::span<WorkRequest> requests() { return {requests_.data(), count_}; }

 private:
  std::array<WorkRequest, std::size_t{kRequestsPerWrite} * shm::kBatchMax> requests_;
  std::size_t count_ = 0;
};

/// Whether `write` stays within its regions. The proxy has checked that; the NIC would answer a
/// mistake by ending the connection.
bool in_bounds(const Write& write, DeliveryContract contract);
/// Of the port, at which the memory that `write` sends from is registered.
std::uint32_t opening_of(const Write& write);

/// What a write becomes: ordered, its data, then its flag; unordered, its data, with an immediate.
/// The data is one request, or several where it crosses from one registration into another, at
/// either end, or is longer than `message_bytes_max`. An immediate then goes with the last.
class WorkMaker {
 public:
  WorkMaker(const Write& write, DeliveryContract contract, std::uint64_t message_bytes_max)
      : write_(write), contract_(contract), message_bytes_max_(message_bytes_max) {}
  /// How many requests there are.
  std::uint32_t count() const;
  /// The next one, without its id; false when there is none left.
  bool next(WorkRequest& request);

 private:
  std::uint32_t part_bytes(std::uint64_t from) const;

  const Write& write_;
  const DeliveryContract contract_;
  const std::uint64_t message_bytes_max_;
  std::uint64_t done_ = 0;
  bool ended_ = false;
};

/// Which of a link's queues carries a flag's writes: always the same one, so that the epochs of one
/// flag stay in order; and the flags of a batch's consecutive chunks together.
constexpr std::uint32_t queue_of(std::uint32_t flag_index, std::uint32_t queues) {
  return queues == 1 ? 0 : flag_index / shm::kBatchMax % queues;
}

/// Hands `requests` over as one submission. Returns 0, or an errno value; `posted` says how many
/// from the front the NIC has.
int submit_extended(ibv_qp_ex* queue, std::span<WorkRequest> requests, std::size_t& posted);
int submit_classic(ibv_qp* queue, std::span<WorkRequest> requests, std::size_t& posted);

}  // namespace mk::fabric::verbs
