/// \file
/// Sending GPU memory over one link. Each write is copied into the buffer's image, unless the NIC
/// reads the buffer itself. Then it goes to the peer's image or buffer and, as a record, beside it.
/// A ring of writes, reported in the order in which they were taken. Proxy thread, but for what
/// LinkBase says of links.
#pragma once

#include <string>
#include <vector>

#include "daemon/fabric/link_table.h"
#include "daemon/fabric/staged/region.h"

namespace mk::fabric::staged {

class Link {
 public:
  /// `carrier` outlives it; `over`: its link to the peer's. `records`: room for `depth` of them,
  /// registered with it as `records_region`.
  Link(LinkId outer, Endpoint& carrier, LinkId over, Bytes peer, std::uint32_t depth,
       shm::BufferFile records, std::unique_ptr<LocalRegion> records_region)
      : id(outer),
        over_(over),
        peer_(std::move(peer)),
        carrier_(carrier),
        records_(std::move(records)),
        records_region_(std::move(records_region)),
        ring_(depth) {}

  const LinkId id;                   ///< as the engine knows it
  std::atomic<bool> closing{false};  ///< control -> proxy: report what is outstanding, then let go
  std::atomic<bool> closed{false};   ///< proxy -> control: never touched again by the proxy
  bool down_reported = false;

  /// Control thread: the carrier's link, and the address it leads to.
  LinkId over() const { return over_; }
  const Bytes& peer() const { return peer_; }

  /// Takes writes while there is room, and hands their copies over to the GPU.
  std::size_t post(std::span<const Write> writes, GpuCopier& copier, std::uint8_t& nonce);
  /// Sends what has been copied.
  void progress(GpuCopier& copier, std::uint64_t now_ns);
  /// The carrier is done with one half of a write.
  void on_carried(std::uint64_t cookie, bool failed, ErrorCode code);
  std::size_t report(std::span<Event> events);
  /// Nothing more is sent, and later writes fail. What the carrier has, it reports.
  void fail(ErrorCode code);
  bool failed() const { return broken_ != ErrorCode::kOk; }
  bool empty() const { return taken_ == reported_; }
  /// Once the GPUs have stopped: lets go of what they copied.
  void drop_copies();

 private:
  struct Transfer {
    Write write;
    GpuTicket ticket;
    std::uint64_t copied_ns = 0;
    std::uint8_t nonce = 0;
    std::uint8_t sent = 0;     ///< halves the carrier has taken: 0 to 2
    std::uint8_t carried = 0;  ///< and is done with
    ErrorCode code = ErrorCode::kOk;
  };
  Transfer& at(std::uint64_t number) { return ring_[number % ring_.size()]; }
  bool begin(Transfer& transfer, GpuCopier& copier);
  /// Whether no GPU reads its source any more.
  static bool settled(Transfer& transfer, GpuCopier& copier, std::uint64_t now_ns);
  static void end_copy(Transfer& transfer);
  Write half(std::uint64_t number, bool record);

  const LinkId over_;
  const Bytes peer_;
  Endpoint& carrier_;
  shm::BufferFile records_;
  std::unique_ptr<LocalRegion> records_region_;
  std::vector<Transfer> ring_;
  // Free-running: reported_ <= sent_ <= taken_.
  std::uint64_t taken_ = 0;
  std::uint64_t sent_ = 0;  ///< both halves are the carrier's, or it failed
  std::uint64_t reported_ = 0;
  ErrorCode broken_ = ErrorCode::kOk;
};

}  // namespace mk::fabric::staged
