// Memory of GPUs at a NIC: what is registered by which file at which offset, in pieces, all or
// nothing; and the reads that flush, against a NIC that only writes down. The registering functions
// of libibverbs are ours here.
#include <gtest/gtest.h>

#include <set>

#include "daemon/fabric/verbs/flusher.h"
#include "tests/daemon/fabric/verbs/fake_nic.h"

namespace {

struct Registered {
  bool dmabuf = false;
  std::uint64_t offset = 0, bytes = 0, address = 0;
  int fd = -1;
  unsigned access = 0;
  bool operator==(const Registered&) const = default;
};
std::vector<Registered> registered;
std::set<ibv_mr*> alive;
std::size_t fail_from = SIZE_MAX;  ///< registrations from this one on

ibv_mr* add(const Registered& one) {
  if (registered.size() >= fail_from) {
    errno = EOPNOTSUPP;
    return nullptr;
  }
  registered.push_back(one);
  auto* const region = new ibv_mr{};
  region->lkey = static_cast<std::uint32_t>(registered.size());
  alive.insert(region);
  return region;
}

}  // namespace

extern "C" {
ibv_mr* ibv_reg_dmabuf_mr(ibv_pd*, std::uint64_t offset, std::size_t bytes, std::uint64_t iova,
                          int fd, int access) {
  return add({true, offset, bytes, iova, fd, static_cast<unsigned>(access)});
}
ibv_mr* ibv_reg_mr_iova2(ibv_pd*, void*, std::size_t bytes, std::uint64_t iova, unsigned access) {
  return add({false, 0, bytes, iova, -1, access});
}
int ibv_dereg_mr(ibv_mr* region) {
  EXPECT_EQ(alive.erase(region), 1u);
  delete region;
  return 0;
}
}

namespace mk::fabric::verbs {
namespace {

constexpr std::uint64_t kMiB = 1 << 20;
constexpr unsigned kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
                             IBV_ACCESS_REMOTE_READ | IBV_ACCESS_RELAXED_ORDERING;

class GpuRegistration : public testing::Test {
 protected:
  GpuRegistration() {
    registered.clear();
    fail_from = SIZE_MAX;
  }
  ~GpuRegistration() override { EXPECT_TRUE(alive.empty()); }
  static MemoryDescriptor dmabuf() {
    MemoryDescriptor memory;
    memory.address = reinterpret_cast<std::byte*>(std::uintptr_t{0x7f0000203000});
    memory.bytes = 5 * kMiB + 4096;
    memory.dmabuf = 17;
    memory.dmabuf_offset = 0x3000;
    memory.direct = GpuWindow::kDmabuf;
    return memory;
  }
};

TEST_F(GpuRegistration, ADmabufIsRegisteredInPiecesFromItsOffset) {
  const auto pieces = register_pieces(nullptr, "mlx5_0:1", dmabuf(), 21, kAccess);
  ASSERT_TRUE(pieces) << pieces.error().message;
  EXPECT_EQ(registered,
            (std::vector<Registered>{
                {true, 0x3000, 2 * kMiB, 0x7f0000203000, 17, kAccess},
                {true, 0x3000 + 2 * kMiB, 2 * kMiB, 0x7f0000203000 + 2 * kMiB, 17, kAccess},
                {true, 0x3000 + 4 * kMiB, kMiB + 4096, 0x7f0000203000 + 4 * kMiB, 17, kAccess}}));
  for (const Registered& one : registered)
    EXPECT_EQ(one.offset % 4096, one.address % 4096) << "the kernel refuses anything else";
  EXPECT_EQ(alive.size(), 3u);
}

TEST_F(GpuRegistration, APieceThatFailsUndoesAll) {
  fail_from = 2;
  const auto pieces = register_pieces(nullptr, "mlx5_0:1", dmabuf(), 21, kAccess);
  ASSERT_FALSE(pieces);
  EXPECT_NE(pieces.error().message.find("mlx5_0:1 does not register"), std::string::npos)
      << pieces.error().message;
  EXPECT_NE(pieces.error().message.find("GPU memory"), std::string::npos);
  EXPECT_EQ(registered.size(), 2u);
  EXPECT_TRUE(alive.empty());
}

TEST_F(GpuRegistration, ThePeerMemoryModuleGetsThePlainAddress) {
  MemoryDescriptor memory = dmabuf();
  memory.direct = GpuWindow::kPeerMemory;
  memory.bytes = kMiB;
  const auto pieces = register_pieces(nullptr, "mlx5_0:1", memory, 31, kAccess);
  ASSERT_TRUE(pieces);
  EXPECT_EQ(registered, (std::vector<Registered>{{false, 0, kMiB, 0x7f0000203000, -1, kAccess}}));
}

class FlushTest : public testing::Test {
 protected:
  std::vector<std::pair<std::uint64_t, ErrorCode>> ended() {
    std::array<Event, 3> events;
    std::vector<std::pair<std::uint64_t, ErrorCode>> all;
    for (std::size_t count = 0; (count = queue_.poll(events)) > 0;) {
      for (std::size_t i = 0; i < count; ++i) {
        EXPECT_EQ(events[i].kind, Event::Kind::kFlushed);
        all.emplace_back(events[i].cookie, events[i].code);
      }
    }
    return all;
  }
  FakeNic nic_{1};
  FakeMemory memory_;
  VerbsLocalRegion region_{FakeMemory::key(0x900000, 1 << 20, 44), {43}, 0, nullptr};
  FlushQueue queue_{nic_.references(false)[0].classic, nic_.completions(), {0x5000, 9}};
};

TEST_F(FlushTest, ReadsOneByteOfTheRegionAndEndsWithItsCompletion) {
  ASSERT_TRUE(queue_.flush(region_, 70));
  EXPECT_EQ(nic_.queue().seen, (std::vector<Seen>{{.signaled = true,
                                                   .id = 0,
                                                   .remote = 0x900000,
                                                   .remote_key = 44,
                                                   .local = 0x5000,
                                                   .bytes = 1,
                                                   .local_key = 9,
                                                   .read = true}}));
  EXPECT_TRUE(ended().empty()) << "the read is under way";
  ASSERT_TRUE(queue_.flush(region_, 71));
  nic_.complete(0);
  EXPECT_EQ(ended(), (std::vector<std::pair<std::uint64_t, ErrorCode>>{{70, ErrorCode::kOk}}));
  nic_.complete(1);
  EXPECT_EQ(ended(), (std::vector<std::pair<std::uint64_t, ErrorCode>>{{71, ErrorCode::kOk}}));
  EXPECT_TRUE(queue_.empty());
}

TEST_F(FlushTest, NoMoreThanItsDepthAreUnderWay) {
  std::uint64_t cookie = 0;
  while (queue_.flush(region_, cookie)) ++cookie;
  EXPECT_EQ(cookie, FlushQueue::kDepth);
  EXPECT_FALSE(queue_.broken());
  nic_.complete(0);
  EXPECT_EQ(ended().size(), 1u);
  EXPECT_TRUE(queue_.flush(region_, cookie));
  EXPECT_FALSE(queue_.flush(region_, cookie + 1));
}

TEST_F(FlushTest, AReadThatFailsFailsAllAfterItAndNoneBefore) {
  for (std::uint64_t cookie = 0; cookie < 6; ++cookie) ASSERT_TRUE(queue_.flush(region_, cookie));
  nic_.complete(0);
  nic_.complete(1);
  nic_.complete(2, IBV_WC_RETRY_EXC_ERR);
  for (std::uint64_t id = 3; id < 6; ++id) nic_.complete(id, IBV_WC_WR_FLUSH_ERR);
  const auto all = ended();
  ASSERT_EQ(all.size(), 6u);
  for (std::uint64_t cookie = 0; cookie < 6; ++cookie) {
    EXPECT_EQ(all[cookie].first, cookie);
    EXPECT_EQ(all[cookie].second, cookie < 2 ? ErrorCode::kOk : ErrorCode::kLinkDown);
  }
  EXPECT_TRUE(queue_.broken());
  EXPECT_TRUE(queue_.empty());
  EXPECT_FALSE(queue_.flush(region_, 9));
}

TEST_F(FlushTest, ANicThatTakesNoReadBreaksTheQueue) {
  ASSERT_TRUE(queue_.flush(region_, 1));
  nic_.queue().error = ENOMEM;
  EXPECT_FALSE(queue_.flush(region_, 2));
  EXPECT_TRUE(queue_.broken());
  EXPECT_EQ(ended(), (std::vector<std::pair<std::uint64_t, ErrorCode>>{{1, ErrorCode::kLinkDown}}));
}

}  // namespace
}  // namespace mk::fabric::verbs
