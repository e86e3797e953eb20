// A ring whose memory a hostile client wrote: whatever the consumer takes and the checks accept
// lies within what the session may name. Whatever they refuse can be described.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "daemon/proxy/command_validation.h"
#include "shm/ring.h"

namespace mk::daemon {
namespace {

constexpr std::uint32_t kSlotsLog2 = 4;
constexpr std::uint64_t kSourceBytes = 10'000, kDestinationBytes = 8'000;
constexpr std::uint32_t kFlags = 128;

class Local final : public fabric::LocalRegion {
 public:
  std::vector<std::byte> key() const override { return {}; }
};
class Remote final : public fabric::RemoteRegion {};

void require(bool holds) {
  if (!holds) std::abort();
}

void run(const std::uint8_t* data, std::size_t bytes) {
  static const Local source, huge_source;
  static const Remote destination, huge_destination;
  Bindings bindings(shm::kWorldMax, shm::kNodesMax);
  bindings.buffers.bind(1, &source, kSourceBytes);
  bindings.buffers.bind(2, &huge_source, shm::kBufferBytesMax);
  auto made = std::make_unique<Peer>();
  made->rank = 1;
  made->flag_count = kFlags;
  made->buffers.bind(1, &destination, kDestinationBytes);
  made->buffers.bind(2, &huge_destination, shm::kBufferBytesMax);
  bindings.bind_peer(std::move(made));

  shm::CommandSlot slots[1 << kSlotsLog2] = {};
  shm::LaneControl control = {};
  shm::RingConsumer consumer{{slots, &control, kSlotsLog2}};
  // The input is lap after lap of slots. Commit words keep their fields but for what would only end
  // the run: the client can always show the right parity and sequence.
  while (bytes != 0) {
    const std::size_t part = std::min(bytes, sizeof slots);
    std::memcpy(slots, data, part);
    data += part;
    bytes -= part;
    for (std::uint64_t i = 0; i < (1u << kSlotsLog2); ++i) {
      const std::uint64_t sequence = consumer.consumed + i;
      std::uint64_t& commit = consumer.ring.slot(sequence).words[shm::kCommitWord];
      if ((commit & 1) == 0) commit = shm::commit_word(sequence, kSlotsLog2);
    }
    std::uint64_t words[shm::kCommandWords];
    while (consumer.try_take(words)) {
      const std::uint64_t sequence = consumer.consumed - 1;
      AcceptedCommand accepted;
      const Flaw flaw = check_command(words, sequence, bindings, accepted);
      if (flaw != Flaw::kNone) {
        require(!describe_flaw(flaw, 0, sequence, words, bindings).empty());
        return;  // the session ends
      }
      const shm::Command& c = accepted.command;
      require(accepted.peer != nullptr && accepted.peer->rank == 1 && c.flag_index < kFlags);
      if (c.opcode == shm::Opcode::kWriteFlag) {
        require(accepted.src == nullptr && accepted.dst == nullptr && c.bytes == 0);
        continue;
      }
      const std::uint64_t source_limit =
          accepted.src == &source ? kSourceBytes : shm::kBufferBytesMax;
      const std::uint64_t target_limit =
          accepted.dst == &destination ? kDestinationBytes : shm::kBufferBytesMax;
      require(c.bytes != 0 && c.bytes <= source_limit && c.src_offset <= source_limit - c.bytes);
      require(c.bytes <= target_limit && c.dst_offset <= target_limit - c.bytes);
    }
    consumer.publish_consumed();
    require(shm::load_acquire(&control.consumed) == consumer.consumed);
  }
}

}  // namespace
}  // namespace mk::daemon

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes);
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  mk::daemon::run(data, bytes);
  return 0;
}
