/// \file
/// Which GPU a process has by its number: folders like the driver's, and every form of
/// CUDA_VISIBLE_DEVICES.

#include "client/src/gpu_place.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace mk::client {
namespace {

namespace fs = std::filesystem;

// Four GPUs, as /proc/driver/nvidia/gpus shows them.
class GpuPlace : public testing::Test {
 protected:
  GpuPlace() {
    std::string name = (fs::temp_directory_path() / "mk-gpus-XXXXXX").string();
    if (::mkdtemp(name.data()) != nullptr) folder_ = name;
    add("0000:1b:00.0", "GPU-aaaa1111");
    add("0000:43:00.0", "GPU-aaaa2222");
    add("0000:9D:00.0", "GPU-bbbb3333");
    add("0000:df:00.0", "GPU-cccc4444");
  }
  ~GpuPlace() override { fs::remove_all(folder_); }

  void add(const std::string& address, const std::string& uuid) const {
    fs::create_directory(folder_ / address);
    std::ofstream(folder_ / address / "information")
        << "Model: \t\t NVIDIA H100\nIRQ:   \t\t 77\nGPU UUID: \t " << uuid
        << "\nDMA Size: 52 bits\n";
  }
  std::string gpu(const char* visible, std::uint32_t local_rank) const {
    return gpu_by_number(visible, local_rank, folder_.string());
  }

  fs::path folder_;
};

TEST_F(GpuPlace, IsByLocalRankWhereAllAreSeen) {
  EXPECT_EQ("0000:1b:00.0", gpu(nullptr, 0));
  EXPECT_EQ("0000:9d:00.0", gpu(nullptr, 2));
  EXPECT_EQ("", gpu(nullptr, 4)) << "more ranks than GPUs";
}

TEST_F(GpuPlace, IsTheOnlyOneThatIsSeen) {
  EXPECT_EQ("0000:43:00.0", gpu("1", 0));
  EXPECT_EQ("0000:43:00.0", gpu("1", 3)) << "a launcher that gives each process one GPU";
  EXPECT_EQ("0000:df:00.0", gpu("GPU-cccc4444", 2));
}

TEST_F(GpuPlace, IsInTheOrderOfTheVariable) {
  EXPECT_EQ("0000:df:00.0", gpu("3,0", 0));
  EXPECT_EQ("0000:1b:00.0", gpu("3,0", 1));
  EXPECT_EQ("0000:9d:00.0", gpu("GPU-b,1", 0)) << "the first letters are enough";
  EXPECT_EQ("0000:43:00.0", gpu("GPU-b,1", 1));
}

TEST_F(GpuPlace, EndsAtANumberThatIsNone) {
  EXPECT_EQ("0000:43:00.0", gpu("1,7,0", 0)) << "CUDA sees only what is before it";
  EXPECT_EQ("0000:43:00.0", gpu("1,7,0", 1)) << "which is one";
  EXPECT_EQ("", gpu("7", 0));
  EXPECT_EQ("", gpu("-1", 0));
}

TEST_F(GpuPlace, IsUnknownWhereItCannotBeTold) {
  EXPECT_EQ("", gpu("", 0));
  EXPECT_EQ("", gpu("GPU-aaaa", 0)) << "two GPUs begin so";
  EXPECT_EQ("", gpu("MIG-0f0f", 0));
  EXPECT_EQ("", gpu("nonsense", 0));
  EXPECT_EQ("", gpu_by_number(nullptr, 0, "/nobody/has/this"));
}

TEST_F(GpuPlace, OfAProcessWithoutADriverIsUnknown) {
  if (fs::exists("/proc/driver/nvidia/gpus")) GTEST_SKIP() << "this machine has GPUs";
  EXPECT_EQ("", own_gpu(0));
}

}  // namespace
}  // namespace mk::client
