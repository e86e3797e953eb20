// GPU memory by ownership, over a driver of host memory; and the machine's own driver where there
// is none.
#include "shm/gpu/memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include "tests/shm/gpu/fake_driver.h"

namespace mk::gpu {
namespace {

using test::FakeDriver;
using test::FakeMachine;

class GpuMemory : public testing::Test {
 protected:
  const std::shared_ptr<FakeMachine> machine_ = std::make_shared<FakeMachine>();
  const std::shared_ptr<FakeDriver> owner_ = std::make_shared<FakeDriver>(machine_);
  const std::shared_ptr<FakeDriver> other_ = std::make_shared<FakeDriver>(machine_);

  static MemoryKey from_elsewhere(MemoryKey key) {
    key.process.start_time += 1;
    return key;
  }
};

TEST_F(GpuMemory, AnAllocationIsWholeGranulesAndFreedOnce) {
  {
    auto first = Allocation::create(owner_, 1, 1000);
    ASSERT_TRUE(first) << first.error().message;
    EXPECT_EQ(first->key().bytes, kAllocationGranule);
    EXPECT_EQ(first->key().device, FakeMachine::uuid(1));
    EXPECT_EQ(first->key().process, this_process());
    const Allocation moved = std::move(*first);
    EXPECT_EQ(moved.device(), 1);
    EXPECT_EQ(owner_->allocations(), 1u);
  }
  EXPECT_EQ(owner_->allocations(), 0u);
}

TEST_F(GpuMemory, AViewOfAnotherProcessIsOpenedAndClosed) {
  const auto memory = Allocation::create(owner_, 0, 1000);
  ASSERT_TRUE(memory);
  {
    auto view = View::open(other_, 1, from_elsewhere(memory->key()));
    ASSERT_TRUE(view) << view.error().message;
    EXPECT_EQ(other_->views(), 1u);
    view->data()[5] = std::byte{7};
    EXPECT_EQ(memory->data()[5], std::byte{7});
    View moved;
    moved = std::move(*view);
    EXPECT_EQ(other_->views(), 1u);
  }
  EXPECT_EQ(other_->views(), 0u);
}

TEST_F(GpuMemory, AViewWithinTheProcessIsTheOwnersPointer) {
  const auto memory = Allocation::create(owner_, 0, 1000);
  ASSERT_TRUE(memory);
  owner_->fail_open = true;  // as the real driver does with a handle of one's own
  const auto view = View::open(owner_, 0, memory->key());
  ASSERT_TRUE(view) << view.error().message;
  EXPECT_EQ(view->data(), memory->data());
  EXPECT_EQ(owner_->views(), 0u);
}

TEST_F(GpuMemory, AViewBeyondTheAllocationIsRefused) {
  const auto memory = Allocation::create(owner_, 0, 1000);
  ASSERT_TRUE(memory);
  MemoryKey key = from_elsewhere(memory->key());
  key.bytes += 1;
  const auto view = View::open(other_, 0, key);
  ASSERT_FALSE(view);
  EXPECT_EQ(view.error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(other_->views(), 0u);
}

TEST_F(GpuMemory, AViewOfWhatIsGoneOrOfAForeignDeviceIsRefused) {
  MemoryKey key;
  {
    const auto memory = Allocation::create(owner_, 0, 1000);
    ASSERT_TRUE(memory);
    key = memory->key();
  }
  EXPECT_FALSE(View::open(other_, 0, from_elsewhere(key)));
  MemoryKey foreign = key;
  foreign.device.bytes[0] = std::byte{0xff};
  const auto view = View::open(owner_, 0, foreign);
  ASSERT_FALSE(view);
  EXPECT_EQ(view.error().code, ErrorCode::kNotFound);
}

TEST_F(GpuMemory, PagesArePinnedOnceAndReleased) {
  void* const pages =
      ::mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(pages, MAP_FAILED);
  {
    auto pinned = PinnedPages::pin(owner_, 0, pages, 8192);
    ASSERT_TRUE(pinned);
    EXPECT_FALSE(PinnedPages::pin(owner_, 0, pages, 8192));
    const PinnedPages moved = std::move(*pinned);
    auto* const word = static_cast<std::uint32_t*>(pages) + 100;
    EXPECT_EQ(moved.on_device(word), word);
    EXPECT_EQ(owner_->pinned(), 1u);
  }
  EXPECT_EQ(owner_->pinned(), 0u);
  ::munmap(pages, 8192);
}

TEST(GpuDriver, AMachineWithoutOneSaysSo) {
  const auto driver = load_driver();
  if (driver) GTEST_SKIP() << "this machine has a GPU";
  EXPECT_EQ(driver.error().code, ErrorCode::kUnavailable);
  EXPECT_NE(driver.error().message.find("CUDA driver"), std::string::npos)
      << driver.error().message;
}

TEST(GpuUuid, IsWrittenAsTheToolsDo) {
  DeviceUuid uuid;
  for (std::size_t i = 0; i < 16; ++i) uuid.bytes[i] = static_cast<std::byte>(0x11 * i);
  EXPECT_EQ(text_of(uuid), "GPU-00112233-4455-6677-8899-aabbccddeeff");
}

}  // namespace
}  // namespace mk::gpu
