// Buffers in GPU memory, as far as the daemon keeps books of them: who may register what, and that
// nobody else gets it.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "shm/gpu/memory.h"
#include "tests/daemon/control/job_run.h"

namespace mk::daemon::test {
namespace {

using testing::Contains;
using testing::HasSubstr;

std::vector<std::byte> blob_of(const gpu::MemoryKey& key) {
  std::vector<std::byte> bytes(sizeof key);
  std::memcpy(bytes.data(), &key, sizeof key);
  return bytes;
}

class DeviceBuffers : public testing::Test {
 protected:
  static gpu::MemoryKey key_of(std::uint64_t bytes) {
    gpu::MemoryKey key;
    key.process.pid = 1234;
    key.bytes = bytes;
    return key;
  }
  /// The handle, or 0 and the error.
  static std::uint16_t register_device(TestNode& node, ClientId client, std::uint64_t bytes,
                                       const std::vector<std::byte>& key, shm::ErrorReply& error) {
    node.send(client, shm::RegisterDeviceBuffer{bytes, "workspace", key});
    if (const auto reply = node.take<shm::RegisterBufferReply>(client)) return reply->handle;
    const auto refused = node.take<shm::ErrorReply>(client);
    EXPECT_TRUE(refused);
    if (refused) error = *refused;
    return shm::kNoHandle;
  }
  shm::ErrorReply error_;
};

TEST_F(DeviceBuffers, InAJobOfOneNodeAnyFabricWillDo) {
  TestNode node({.nodes = 1}, std::make_shared<FakeMemory>(), std::make_shared<std::uint64_t>(1));
  node.nic->refuse_register = "";
  const ClientId client = node.attach(rank_of("job", 1, 1, 0));
  ASSERT_TRUE(node.take<shm::JobUp>(client));
  const std::uint16_t handle =
      register_device(node, client, 3'000'000, blob_of(key_of(4 << 20)), error_);
  ASSERT_NE(handle, shm::kNoHandle) << error_.message;
  // It is not lent as a memory file.
  node.send(client, shm::OpenPeerBuffer{0, handle});
  const auto refused = node.take<shm::ErrorReply>(client);
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->code, ErrorCode::kNotFound);
  EXPECT_THAT(refused->message, HasSubstr("GPU memory"));
  node.send(client, shm::DeregisterBuffer{handle});
  node.step();
  EXPECT_TRUE(node.take<shm::Done>(client));
  // A client that dies with one leaves nothing behind.
  ASSERT_NE(register_device(node, client, 4096, blob_of(key_of(4096)), error_), shm::kNoHandle);
  node.hang_up(client);
  node.step();
  node.expect_nothing_left();
}

TEST_F(DeviceBuffers, OverSeveralNodesTheFabricMustReachThem) {
  TestCluster cluster(2);
  JobRun job = attached_job(cluster, 2, 1);
  ASSERT_TRUE(job.all_up());
  EXPECT_EQ(register_device(job.node_of(0), job.client(0), 4096, blob_of(key_of(4096)), error_),
            shm::kNoHandle);
  EXPECT_EQ(error_.code, ErrorCode::kUnsupported);
  EXPECT_THAT(error_.message, HasSubstr("does not reach GPU memory"));
  // The job goes on.
  EXPECT_NE(job.node_of(0).register_buffer(job.client(0)), shm::kNoHandle);
  job.detach_all();
  cluster.expect_nothing_left();
}

TEST_F(DeviceBuffers, ADmabufReachesTheNetworkAndStaysNoLongerThanTheCall) {
  TestCluster cluster(2, {.device_memory = true});
  JobRun job = attached_job(cluster, 2, 1);
  ASSERT_TRUE(job.all_up());
  TestNode& node = job.node_of(0);
  node.nic->gpu_path = "by dmabuf";
  node.nic->gpu_path_why.clear();
  const int before = node.nic->local_regions;
  std::vector<UniqueFd> fds;
  fds.emplace_back(::memfd_create("dmabuf", MFD_CLOEXEC));
  const int file = fds.front().get();
  node.send(job.client(0),
            shm::RegisterDmabuf{{3'000'000, "workspace", blob_of(key_of(4 << 20))}, 8192},
            std::move(fds));
  const auto reply = node.take<shm::RegisterBufferReply>(job.client(0));
  ASSERT_TRUE(reply);
  ASSERT_TRUE(node.nic->gpu_memory);
  EXPECT_EQ(node.nic->gpu_memory->bytes, 3'000'000u);
  EXPECT_EQ(node.nic->gpu_memory->dmabuf, file);
  EXPECT_EQ(node.nic->gpu_memory->dmabuf_offset, 8192u);
  EXPECT_EQ(::fcntl(file, F_GETFD), -1) << "who keeps the file keeps the memory";
  EXPECT_EQ(node.nic->local_regions, before + 1);
  EXPECT_THAT(node.logged, Contains(HasSubstr("GPU buffer 'workspace' of 3000000 bytes goes by "
                                              "dmabuf")));
  const auto links = node.plane->snapshot().links;
  ASSERT_FALSE(links.empty());
  EXPECT_THAT(links.front().fabric, HasSubstr("GPU memory by dmabuf"));
  // The client dies: its memory would live as long as it is registered.
  job.hang_up(0);
  cluster.settle();
  EXPECT_LE(node.nic->local_regions, before - 1) << "nor are its flags";
  job.hang_up(1);
  cluster.settle();
  cluster.expect_nothing_left();
}

TEST_F(DeviceBuffers, WithoutADmabufTheLogSaysWhyItIsStaged) {
  TestCluster cluster(2, {.device_memory = true});
  JobRun job = attached_job(cluster, 2, 1);
  ASSERT_TRUE(job.all_up());
  TestNode& node = job.node_of(0);
  ASSERT_NE(register_device(node, job.client(0), 4096, blob_of(key_of(4096)), error_),
            shm::kNoHandle);
  EXPECT_EQ(node.nic->gpu_memory->dmabuf, -1);
  EXPECT_THAT(node.logged, Contains(HasSubstr("goes staged through host memory: the fake NIC "
                                              "reaches no GPU")));
  job.detach_all();
  cluster.expect_nothing_left();
}

TEST_F(DeviceBuffers, AnImageInHostMemoryCountsAsHostMemoryAndGpuMemoryDoesNot) {
  const std::uint64_t most = segment_bytes_of(rank_of("job", 2, 1, 0)) + 2 * 4096;
  TestCluster cluster(2, {.session_memory_bytes_max = most, .device_memory = true});
  JobRun job = attached_job(cluster, 2, 1);
  ASSERT_TRUE(job.all_up());
  TestNode& node = job.node_of(0);
  node.nic->gpu_path = "by dmabuf";
  EXPECT_NE(register_device(node, job.client(0), 1 << 20, blob_of(key_of(1 << 20)), error_),
            shm::kNoHandle)
      << error_.message;
  node.nic->gpu_path = "staged through host memory";
  node.nic->image_bytes = 2 * 4096;
  // Before anything is pinned: the network is told that there is no room.
  EXPECT_EQ(register_device(node, job.client(0), 1 << 20, blob_of(key_of(1 << 20)), error_),
            shm::kNoHandle);
  EXPECT_EQ(error_.code, ErrorCode::kLimitExceeded);
  EXPECT_THAT(error_.message, HasSubstr("limits.registered"));
  EXPECT_NE(register_device(node, job.client(0), 2 * 4096, blob_of(key_of(2 * 4096)), error_),
            shm::kNoHandle)
      << error_.message;
  EXPECT_EQ(node.register_buffer(job.client(0), 4096), shm::kNoHandle) << "the image is counted";
  job.detach_all();
  cluster.expect_nothing_left();
}

TEST_F(DeviceBuffers, WhatTheKeySaysIsChecked) {
  TestNode node({.nodes = 1}, std::make_shared<FakeMemory>(), std::make_shared<std::uint64_t>(1));
  const ClientId client = node.attach(rank_of("job", 1, 1, 0));
  ASSERT_TRUE(node.take<shm::JobUp>(client));
  const auto expect_refused = [&](std::uint64_t bytes, const std::vector<std::byte>& key,
                                  ErrorCode code, const char* text) {
    EXPECT_EQ(register_device(node, client, bytes, key, error_), shm::kNoHandle);
    EXPECT_EQ(error_.code, code) << error_.message;
    EXPECT_THAT(error_.message, HasSubstr(text));
  };
  expect_refused(4096, std::vector<std::byte>(119), ErrorCode::kProtocol, "119 bytes");
  expect_refused(4097, blob_of(key_of(4096)), ErrorCode::kInvalidArgument, "allocation of 4096");
  expect_refused(0, blob_of(key_of(4096)), ErrorCode::kInvalidArgument, "0 bytes");
  // The daemon would use its own memory by the bare address.
  gpu::MemoryKey forged = key_of(4096);
  forged.process = gpu::this_process();
  expect_refused(4096, blob_of(forged), ErrorCode::kPermission, "the daemon's own");
  node.hang_up(client);
  node.step();
  node.expect_nothing_left();
}

}  // namespace
}  // namespace mk::daemon::test
