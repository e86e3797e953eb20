/// \file
/// A job of two ranks of the hostile user, whose clients are driven by hand: one on each node, so
/// that what the first writes into its ring really goes somewhere.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>

#include "tests/hostile/arena.h"
#include "tests/hostile/other_user.h"

namespace mk::test {

class HostilePair {
 public:
  static constexpr std::uint32_t kBytes = 3 * 4096;
  static constexpr std::uint32_t kFlags = 128;

  /// Attached, up, each with one buffer of kBytes that the other knows of.
  explicit HostilePair(const tools::DaemonSet& daemons, std::uint32_t lanes = 1)
      : job("hostile-" + std::to_string(next_job_++)),
        guilty(daemons.client_socket(0)),
        other(daemons.client_socket(1)) {
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      shm::Attach attach;
      attach.job = job;
      attach.rank = attach.node_rank = rank;
      attach.world = attach.nodes = 2;
      attach.local_size = 1;
      attach.lane_count = lanes;
      attach.slot_count_log2 = 4;
      attach.flag_count = kFlags;
      attach.timeout_ms = 60'000;
      const Status attached = client(rank).attach(attach);
      EXPECT_TRUE(attached) << attached.error().message;
    }
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      EXPECT_TRUE(client(rank).await<shm::JobUp>());
      handles[rank] = client(rank).add_buffer(kBytes).value_or(0);
      EXPECT_NE(0, handles[rank]);
    }
    // After an exchange, buffers registered before it are known to the other.
    const shm::Exchange exchange{"known", {}, 60'000};
    expect_both<shm::ExchangeReply>(exchange);
  }

  daemon::test::SocketClient& client(std::uint32_t rank) { return rank == 0 ? guilty : other; }

  /// A command that is right in every field.
  shm::Command right() {
    shm::Command command;
    command.opcode = shm::Opcode::kWrite;
    command.peer = 1;
    command.src_handle = handles[0];
    command.dst_handle = handles[1];
    command.bytes = 64;
    command.flag_index = 3;
    command.epoch = ++epoch_;
    return command;
  }
  /// Commits it; the ring must have room.
  void commit(const shm::Command& command) { EXPECT_TRUE(guilty.producer.try_push(command)); }
  /// Whether the guilty side's commands are all completed, soon.
  bool all_completed() {
    return daemon::test::eventually(
        [&] { return guilty.producer.completed() == guilty.producer.produced; });
  }

  /// The guilty session has ended with `code` and a sentence containing `text`. Its segment says so
  /// too; the other rank of its job was told that it is lost.
  void expect_ended(ErrorCode code, const std::string& text) {
    const auto failed = guilty.await<shm::SessionFailed>();
    ASSERT_TRUE(failed) << failed.error().message;
    EXPECT_EQ(failed->code, code) << failed->message;
    EXPECT_NE(failed->message.find(text), std::string::npos) << failed->message;
    EXPECT_NE(0u, shm::load_acquire(&guilty.segment->header().abort_flag));
    EXPECT_EQ(static_cast<std::uint32_t>(code),
              shm::load_acquire(&guilty.segment->header().error_word));
    const auto lost = other.await<shm::SessionFailed>();
    ASSERT_TRUE(lost) << lost.error().message;
    EXPECT_EQ(lost->code, ErrorCode::kPeerLost) << lost->message;
    EXPECT_NE(lost->message.find("rank 0"), std::string::npos) << lost->message;
  }
  /// Both leave in order.
  void expect_detaches() { expect_both<shm::Done>(shm::Detach{}); }

  const std::string job;
  HostileClient guilty, other;
  std::uint16_t handles[2] = {};

 private:
  /// Both ask at once, and both are answered.
  template <class Reply, class Request>
  void expect_both(const Request& request) {
    std::thread first([&] { EXPECT_TRUE(guilty.call<Reply>(request)); });
    EXPECT_TRUE(other.call<Reply>(request));
    first.join();
  }

  static inline std::atomic<int> next_job_{0};
  std::uint32_t epoch_ = 0;
};

}  // namespace mk::test
