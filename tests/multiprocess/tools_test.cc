// The programs people type: mkctl, mkbench, mkrun.

#include <bit>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/multiprocess/cluster.h"

namespace mk::test {
namespace {

nlohmann::json read_json(const std::string& path) {
  std::ifstream file(path);
  return nlohmann::json::parse(file, nullptr, false);
}

TEST(Mkctl, ShowsARunningJobAndWhatItMoved) {
  auto daemons = start_daemons(2);
  ASSERT_NE(nullptr, daemons);
  const auto ask = [&](std::vector<std::string> words) {
    words.insert(words.begin(), {MK_TEST_MKCTL, "--address", daemons->admin_address(0)});
    return run_program(words);
  };
  EXPECT_EQ(0, ask({"version"}).status);
  auto ranks = start_ranks(*daemons, "shown", 2, 0);
  for (Process& rank : ranks) ASSERT_EQ("launch 2", read_until(rank, "launch 2"));

  // Launches went over the link, so the peer is there and all is well.
  const auto status = ask({"status"});
  EXPECT_EQ(0, status.status) << status.text;
  const auto sessions = ask({"session", "list"});
  EXPECT_EQ(0, sessions.status);
  EXPECT_NE(std::string::npos, sessions.text.find("shown")) << sessions.text;
  const auto queues = nlohmann::json::parse(ask({"--json", "queue", "list"}).text, nullptr, false);
  ASSERT_FALSE(queues.is_discarded());
  EXPECT_NE(std::string::npos, queues.dump().find("commands"));
  const auto links = ask({"link", "list"});
  EXPECT_EQ(0, links.status);
  EXPECT_NE(std::string::npos, links.text.find("up")) << links.text;
}

TEST(Mkctl, ExitCodesTellWhatIsWrong) {
  EXPECT_EQ(3, run_program({MK_TEST_MKCTL, "--address", "unix:/nowhere/at/all", "status"}).status);
  EXPECT_EQ(2, run_program({MK_TEST_MKCTL, "no-such-command"}).status);
}

TEST(Mkbench, WritesItsReportAndJoinsRunningDaemons) {
  auto daemons = start_daemons(2);
  ASSERT_NE(nullptr, daemons);
  const std::string json = daemons->folder() + "/out.json";
  const auto bench =
      run_program({MK_TEST_MKBENCH, "gemm-ar",
                   "--nodes",       "2",
                   "--local",       "2",
                   "--m",           "70",
                   "--n",           "130",
                   "--k",           "40",
                   "--iters",       "2",
                   "--warmup",      "1",
                   "--join",        daemons->client_socket(0) + "," + daemons->client_socket(1),
                   "--admin",       daemons->admin_address(0) + "," + daemons->admin_address(1),
                   "--json",        json});
  EXPECT_EQ(0, bench.status) << bench.text;
  EXPECT_NE(std::string::npos, bench.text.find("correct")) << bench.text;
  const auto report = read_json(json);
  ASSERT_FALSE(report.is_discarded());
  EXPECT_TRUE(report["correct"].get<bool>());
  EXPECT_EQ(6u, report["verification"]["launches_checked"].get<unsigned>());
  EXPECT_EQ(6u * 70 * 130, report["verification"]["elements_compared"].get<unsigned>());
  EXPECT_EQ(2u, report["fused"]["samples_ms"].size());
  // The owner of half of C sends its bf16 sums once to its one rail peer.
  EXPECT_GT(report["fused"]["network_bytes_per_rank"].get<double>(), 70.0 * 130 * 0.5);
  EXPECT_EQ(2u, report["links"].size());
}

TEST(Mkbench, BadUsageExitsWithTwo) {
  EXPECT_EQ(2, run_program({MK_TEST_MKBENCH, "gemm-ar", "--fabric", "carrier-pigeon"}).status);
  EXPECT_EQ(2, run_program({MK_TEST_MKBENCH, "gemm-ar", "--m", "0"}).status);
  EXPECT_EQ(
      2, run_program({MK_TEST_MKBENCH, "gemm-ar", "--fabric", "ofi", "--link-bandwidth", "1GB/s"})
             .status);
  EXPECT_EQ(2, run_program({MK_TEST_MKBENCH}).status);
}

class Mkrun : public testing::Test {
 protected:
  /// A one-tensor F32 file named "t" with small whole numbers, so that products are exact in bf16's
  /// range of integers.
  std::string write(const std::string& name, std::uint64_t rows, std::uint64_t columns,
                    std::uint64_t modulus) const {
    std::vector<float> values(rows * columns);
    for (std::uint64_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<float>(i * 7 % modulus) - 1;
    const std::uint64_t bytes = values.size() * 4;
    const std::string header = fmt::format(
        R"({{"t":{{"dtype":"F32","shape":[{},{}],"data_offsets":[0,{}]}}}})", rows, columns, bytes);
    const std::uint64_t length = header.size();
    std::ofstream file(path(name), std::ios::binary);
    file.write(reinterpret_cast<const char*>(&length), 8);
    file << header;
    file.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(bytes));
    return path(name) + ":t";
  }
  std::string path(const std::string& name) const { return folder_->path() + "/" + name; }

  Result<tools::TemporaryFolder> folder_ = tools::TemporaryFolder::create("mkrun-test");
};

TEST_F(Mkrun, MultipliesTheUsersTensors) {
  const std::string a = write("a", 5, 12, 4);
  const std::string b = write("b", 12, 8, 3);
  const auto run = run_program({MK_TEST_MKRUN, "gemm-ar", "--a", a, "--b", b, "--out",
                                path("y") + ":z", "--rows", "2", "--check"});
  ASSERT_EQ(0, run.status) << run.text;
  // Read the result by the format's definition and compare with the integers' own products.
  std::ifstream file(path("y"), std::ios::binary);
  std::uint64_t length = 0;
  file.read(reinterpret_cast<char*>(&length), 8);
  std::string header(length, ' ');
  file.read(header.data(), static_cast<std::streamsize>(length));
  const auto info = nlohmann::json::parse(header)["z"];
  EXPECT_EQ("BF16", info["dtype"]);
  EXPECT_EQ((std::vector<int>{5, 8}), info["shape"].get<std::vector<int>>());
  for (std::uint64_t i = 0; i < 5; ++i) {
    for (std::uint64_t j = 0; j < 8; ++j) {
      int expected = 0;
      for (std::uint64_t x = 0; x < 12; ++x) {
        expected += (static_cast<int>((i * 12 + x) * 7 % 4) - 1) *
                    (static_cast<int>((x * 8 + j) * 7 % 3) - 1);
      }
      std::uint16_t bits = 0;
      file.read(reinterpret_cast<char*>(&bits), 2);
      EXPECT_EQ(static_cast<float>(expected), std::bit_cast<float>(std::uint32_t{bits} << 16))
          << i << " " << j;
    }
  }
}

TEST_F(Mkrun, BadInputExitsWithTwoAndWritesNothing) {
  const std::string a = write("a", 5, 12, 4);
  const std::string b = write("b", 11, 8, 3);
  const auto mismatch =
      run_program({MK_TEST_MKRUN, "gemm-ar", "--a", a, "--b", b, "--out", path("y")});
  EXPECT_EQ(2, mismatch.status);
  EXPECT_NE(std::string::npos, mismatch.text.find("inner dimensions 12 and 11")) << mismatch.text;
  std::filesystem::resize_file(path("b"), 100);
  const auto truncated =
      run_program({MK_TEST_MKRUN, "gemm-ar", "--a", a, "--b", b, "--out", path("y")});
  EXPECT_EQ(2, truncated.status);
  EXPECT_NE(std::string::npos, truncated.text.find("truncated")) << truncated.text;
  EXPECT_FALSE(std::filesystem::exists(path("y")));
}

}  // namespace
}  // namespace mk::test
