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

/// Daemons that were told no network: what they chose and said, and that a job runs over it.
void expect_chooses(const std::vector<std::string>& arguments, const std::string& said,
                    const std::string& shown) {
  tools::DaemonSetOptions options;
  options.fabric.clear();
  options.arguments = arguments;
  options.program = MK_TEST_MKERNELD;
  options.start_timeout = 120s;
  auto daemons = tools::DaemonSet::start(options);
  ASSERT_TRUE(daemons) << daemons.error().message;
  expect_job_works(*daemons, "anywhere", 1);
  for (std::uint32_t node = 0; node < 2; ++node) {
    std::ifstream file(daemons->log_path(node));
    const std::string log(std::istreambuf_iterator<char>(file), {});
    EXPECT_NE(std::string::npos, log.find("auto\\\" is " + said)) << log;  // in JSON
    const auto links =
        run_program({MK_TEST_MKCTL, "--address", daemons->admin_address(node), "link", "show"});
    EXPECT_EQ(0, links.status);
    EXPECT_NE(std::string::npos, links.text.find(shown)) << links.text;
  }
}

TEST(Mkerneld, UsesTheLoopbackByItselfWhileEverybodyIsHere) {
  expect_chooses({}, "loopback: all daemons of the configuration are on this machine", "loopback");
}

TEST(Mkerneld, FindsANetworkByItselfWhereSomebodyIsElsewhere) {
  // An address that documentation may use and nobody has.
  std::error_code none;
  const std::filesystem::directory_iterator ports("/sys/class/infiniband", none), end;
  const std::string found = ports == end ? "ofi" : "verbs";
  expect_chooses({"--insecure", "--peer", "2=192.0.2.1:7171"}, found, found);
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
  using Shape = std::vector<std::uint64_t>;
  static std::uint64_t elements_of(const Shape& shape) {
    std::uint64_t count = 1;
    for (const std::uint64_t side : shape) count *= side;
    return count;
  }
  /// A one-tensor file, of elements that are small whole numbers or fractions exact in bf16.
  template <class T>
  std::string write(const std::string& name, const char* dtype, const Shape& shape,
                    const std::vector<T>& values) const {
    EXPECT_EQ(elements_of(shape), values.size());
    const std::uint64_t bytes = values.size() * sizeof(T);
    const std::string header =
        fmt::format(R"({{"t":{{"dtype":"{}","shape":[{}],"data_offsets":[0,{}]}}}})", dtype,
                    fmt::join(shape, ","), bytes);
    const std::uint64_t length = header.size();
    std::ofstream file(path(name), std::ios::binary);
    file.write(reinterpret_cast<const char*>(&length), 8);
    file << header;
    file.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(bytes));
    return path(name) + ":t";
  }
  /// Whole numbers from -1 to modulus - 2.
  static std::vector<float> numbers(const Shape& shape, std::uint64_t modulus) {
    std::vector<float> values(elements_of(shape));
    for (std::uint64_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<float>(i * 7 % modulus) - 1;
    return values;
  }
  std::string write_numbers(const std::string& name, const Shape& shape,
                            std::uint64_t modulus) const {
    return write(name, "F32", shape, numbers(shape, modulus));
  }
  /// The file's tensor 'y', bf16 of that shape, read by the format's definition.
  std::vector<float> read(const std::string& name, const Shape& shape) const {
    std::ifstream file(path(name), std::ios::binary);
    std::uint64_t length = 0;
    file.read(reinterpret_cast<char*>(&length), 8);
    std::string header(length, ' ');
    file.read(header.data(), static_cast<std::streamsize>(length));
    const auto info = nlohmann::json::parse(header)["y"];
    EXPECT_EQ("BF16", info["dtype"]);
    EXPECT_EQ(shape, info["shape"].get<Shape>());
    std::vector<float> values(elements_of(shape));
    for (float& value : values) {
      std::uint16_t bits = 0;
      file.read(reinterpret_cast<char*>(&bits), 2);
      value = std::bit_cast<float>(std::uint32_t{bits} << 16);
    }
    EXPECT_TRUE(file.good());
    return values;
  }
  std::string path(const std::string& name) const { return folder_->path() + "/" + name; }

  Result<tools::TemporaryFolder> folder_ = tools::TemporaryFolder::create("mkrun-test");
};

TEST_F(Mkrun, MultipliesTheUsersTensors) {
  const std::string a = write_numbers("a", {5, 12}, 4);
  const std::string b = write_numbers("b", {12, 8}, 3);
  const auto left = numbers({5, 12}, 4);
  const auto right = numbers({12, 8}, 3);
  for (const char* op : {"gemm-ar", "gemm-rs", "ag-gemm"}) {
    const auto run = run_program(
        {MK_TEST_MKRUN, op, "--a", a, "--b", b, "--out", path(op), "--rows", "2", "--check"});
    ASSERT_EQ(0, run.status) << run.text;
    const auto values = read(op, {5, 8});
    for (std::uint64_t i = 0; i < 5; ++i) {
      for (std::uint64_t j = 0; j < 8; ++j) {
        float expected = 0;
        for (std::uint64_t x = 0; x < 12; ++x) expected += left[i * 12 + x] * right[x * 8 + j];
        EXPECT_EQ(expected, values[i * 8 + j]) << op << " " << i << " " << j;
      }
    }
  }
}

TEST_F(Mkrun, SendsTokensToTheirExperts) {
  const Shape tokens = {7, 8};
  const Shape experts = {5, 16, 8};  // transposed
  std::vector<std::int64_t> ids;
  for (std::int64_t i = 0; i < 14; ++i) ids.push_back(i * 3 % 6 - 1);
  const auto run =
      run_program({MK_TEST_MKRUN, "moe", "--tokens", write_numbers("x", tokens, 4), "--ids",
                   write("i", "I64", {7, 2}, ids), "--experts", write_numbers("w", experts, 3),
                   "--experts-transposed", "--out", path("y"), "--rows", "4", "--check"});
  ASSERT_EQ(0, run.status) << run.text;
  const auto x = numbers(tokens, 4);
  const auto w = numbers(experts, 3);
  const auto values = read("y", {7, 2, 16});
  for (std::uint64_t i = 0; i < 14; ++i) {
    for (std::uint64_t f = 0; f < 16; ++f) {
      float expected = 0;
      const auto expert = static_cast<std::uint64_t>(ids[i]);
      for (std::uint64_t h = 0; h < 8 && ids[i] >= 0; ++h)
        expected += x[i / 2 * 8 + h] * w[(expert * 16 + f) * 8 + h];
      EXPECT_EQ(expected, values[i * 16 + f]) << "token " << i / 2 << " slot " << i % 2;
    }
  }
}

// Keys that are all alike weigh the same: a causal position gets the mean of the values so far.
TEST_F(Mkrun, AttendsOverTheWholeSequence) {
  const Shape shape = {16, 2, 64};
  const Shape keys = {16, 1, 64};
  std::vector<float> v(elements_of(keys));
  for (std::uint64_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i / 64);
  const auto run =
      run_program({MK_TEST_MKRUN, "ring", "--q", write_numbers("q", shape, 5), "--k",
                   write("k", "F32", keys, std::vector<float>(v.size(), 0.5f)), "--v",
                   write("v", "F32", keys, v), "--causal", "--out", path("y"), "--check"});
  ASSERT_EQ(0, run.status) << run.text;
  const auto values = read("y", shape);
  for (std::uint64_t i = 0; i < values.size(); ++i) {
    const double mean = static_cast<double>(i / 128) / 2;
    EXPECT_NEAR(mean, values[i], mean / 256 + 1e-6) << "position " << i / 128;
  }
}

TEST_F(Mkrun, BadInputExitsWithTwoAndWritesNothing) {
  const std::string a = write_numbers("a", {5, 12}, 4);
  const std::string b = write_numbers("b", {11, 8}, 3);
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
