/// \file
/// One link of the loopback fabric: a bounded ring of transfers and the model that says when each
/// may be copied, may be completed and must be seen. Knows neither sockets nor threads; the time
/// comes from outside, so that tests own it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "daemon/fabric/link_table.h"
#include "daemon/fabric/loopback/connection.h"
#include "daemon/fabric/loopback/region.h"

namespace mk::fabric::loopback {

/// Bytes one poll may copy, over all links: what bounds the time a poll takes (about 0.1 ms).
inline constexpr std::uint64_t kPollBytesMax = 1 << 20;
/// Handing a copy of any size over to a GPU takes about as long as copying so many bytes.
inline constexpr std::uint64_t kHandOverBytes = 1 << 16;

/// A GPU copies writes that lie one behind the other, in one source and in one target, at once. No
/// copy crosses from one allocation into another: CUDA refuses that, and most are neighbours.
/// Handing a copy over costs the driver as much as half a megabyte of a fast link's time, and more
/// when several links of a process do it. It may begin so long before the model's start, since
/// nobody is shown the bytes before the model says so, with all that starts so long after it.
inline constexpr std::uint64_t kGpuAheadNs = 20'000;
inline constexpr std::uint64_t kGpuRunNs = 50'000;
inline constexpr std::uint64_t kGpuRunBytesMax = 8 << 20;

/// When a write leaves, is gone and arrives. Reservations follow each other on the model's own
/// clock, whatever the times at which somebody looks: a late poll makes a transfer late, never the
/// ones behind it.
class LinkSchedule {
 public:
  struct Times {
    std::uint64_t start_ns;    ///< its data may be copied
    std::uint64_t end_ns;      ///< its last byte has left: the source is free
    std::uint64_t arrival_ns;  ///< its flag shows
  };
  explicit LinkSchedule(const LinkModel& model) : model_(model) {}
  Times reserve(std::uint64_t now_ns, std::uint64_t bytes);

 private:
  LinkModel model_;
  std::uint64_t free_ns_ = 0;
  double rest_ns_ = 0;  ///< the fraction of a nanosecond that rounding `free_ns_` left, so that
                        ///< small writes do not drift
};

/// The proxy thread's side of a link; see LinkBase for what else touches it.
class TransferQueue {
 public:
  /// `gpu` outlives it.
  TransferQueue(const LinkModel& model, std::uint32_t depth, GpuCopier& gpu);

  /// Takes a write; false when `depth` are in flight.
  bool post(const Write& write, std::uint64_t now_ns);
  /// Copies at most `budget` bytes (and reduces it), hands copies over to the GPU, and shows the
  /// flags that are due.
  void advance(std::uint64_t now_ns, std::uint64_t& budget);
  /// Reports what has completed or failed.
  std::size_t report(LinkId link, std::uint64_t now_ns, std::span<Event> events);
  /// Nothing more is copied; what is outstanding and later posts fail with `code`, those that a GPU
  /// copies when it is done with them. With `show`, flags of writes that were reported as completed
  /// are shown at once.
  void fail_all(ErrorCode code, bool show);
  /// When `advance` or `report` next have something to do; nullopt when nothing is in flight.
  std::optional<std::uint64_t> next_due_ns() const;
  bool empty() const { return posted_ == reported_ && posted_ == shown_; }
  /// Of the transfers taken, in their order: those reported, and those whose flags show.
  std::uint64_t reported() const { return reported_; }
  std::uint64_t shown() const { return shown_; }
  bool failed() const { return broken_ != ErrorCode::kOk; }

 private:
  struct Transfer {
    const std::byte* source = nullptr;
    std::shared_ptr<const Region> from;  ///< whose that is, of a GPU: it stays while one copies
    std::shared_ptr<Target> target;
    std::shared_ptr<Target> flags;
    std::uint64_t offset = 0;
    std::uint64_t cookie = 0;
    LinkSchedule::Times times{};
    std::uint32_t bytes = 0;
    std::uint32_t copied = 0;
    std::uint32_t flag_index = 0;
    std::uint32_t epoch = 0;
    ErrorCode code = ErrorCode::kOk;
    std::uint32_t gpu_slot = kGpuSlotsMax;  ///< whose memory the source is
    GpuTicket ticket;                       ///< a GPU copies, or has not been seen to be done
    bool leads = false;                     ///< the first of those that were handed over together
  };
  Transfer& at(std::uint64_t index) { return ring_[index % ring_.size()]; }
  const Transfer& at(std::uint64_t index) const { return ring_[index % ring_.size()]; }
  void show(Transfer& transfer);
  /// Copies what the budget allows of it; false when something is left.
  static bool copy(Transfer& transfer, std::uint64_t& budget);
  /// The next transfer, with those behind it that may go with it; how many.
  std::uint64_t hand_over(std::uint64_t now_ns);
  /// When its data may be copied.
  static std::uint64_t copy_from_ns(const Transfer& transfer);
  /// Whether no GPU works on it any more.
  bool settled(Transfer& transfer, std::uint64_t now_ns);

  // Counters of transfers: copied_ (or handed over to a GPU) <= posted_; reported_ and shown_
  // follow copied_, each at its own time, and not before a GPU is done.
  LinkSchedule schedule_;
  GpuCopier& gpu_;
  std::vector<Transfer> ring_;
  std::uint64_t posted_ = 0;
  std::uint64_t copied_ = 0;
  std::uint64_t reported_ = 0;
  std::uint64_t shown_ = 0;
  ErrorCode broken_ = ErrorCode::kOk;
};

/// A link: the queue, and the connection by which the control thread asks for regions and death is
/// noticed.
struct Link : LinkBase {
  Link(const LinkModel& model, std::uint32_t depth, GpuCopier& gpu) : queue(model, depth, gpu) {}

  /// Control thread: whether `import_region` may still ask.
  bool up() const {
    return !peer_gone.load(std::memory_order_acquire) && !given_up.load(std::memory_order_relaxed);
  }

  TransferQueue queue;                 ///< proxy thread
  bool down_reported = false;          ///< proxy thread
  std::atomic<bool> peer_gone{false};  ///< service or control thread -> proxy
  std::atomic<bool> given_up{false};   ///< control thread -> proxy: the peer cannot be relied upon
  std::string given_up_reason;         ///< control thread
  /// Control thread; the service thread watches it for hang-up. None within one process.
  std::optional<Connection> connection;
  std::uint64_t watch = 0;  ///< control thread: the service's watch of `connection`
  std::unique_ptr<ProcessRegistry::Watch> within_process;  ///< control thread: instead of both
  Token peer{};
  std::string peer_name;
};

}  // namespace mk::fabric::loopback
