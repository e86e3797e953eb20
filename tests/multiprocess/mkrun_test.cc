// mkrun, from tensors in files to tensors in files.

#include <signal.h>

#include <bit>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "tests/multiprocess/cluster.h"

namespace mk::test {
namespace {

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

// What every rank got of the others' rows is the tensor again.
TEST_F(Mkrun, GathersTheUsersRows) {
  const std::string x = write_numbers("x", {7, 12}, 200);
  const auto run = run_program(
      {MK_TEST_MKRUN, "all-gather", "--x", x, "--out", path("all"), "--rows", "3", "--check"});
  ASSERT_EQ(0, run.status) << run.text;
  EXPECT_EQ(numbers({7, 12}, 200), read("all", {7, 12}));
}

// The sums of what four ranks bring, one rank's rows after the other's.
TEST_F(Mkrun, AddsUpTheUsersRows) {
  const std::string x = write_numbers("x", {28, 12}, 50);
  const auto all = numbers({28, 12}, 50);
  for (const char* partials : {"element", "f32"}) {
    const auto run =
        run_program({MK_TEST_MKRUN, "reduce-scatter", "--x", x, "--out", path(partials), "--rows",
                     "3", "--partials", partials, "--check"});
    ASSERT_EQ(0, run.status) << run.text;
    const auto sums = read(partials, {7, 12});
    for (std::uint64_t i = 0; i < sums.size(); ++i) {
      const float expected = all[i] + all[84 + i] + all[168 + i] + all[252 + i];
      EXPECT_EQ(expected, sums[i]) << i;
    }
  }
  const auto odd = run_program({MK_TEST_MKRUN, "reduce-scatter", "--x",
                                write_numbers("odd", {7, 12}, 50), "--out", path("none")});
  EXPECT_NE(0, odd.status);
  EXPECT_NE(std::string::npos, odd.text.find("--x has 7 rows, which are not a multiple of 4"))
      << odd.text;
}

// C = relu(A B + bias), over whole numbers; and gated SiLU by its own check. A wrong bias is named.
TEST_F(Mkrun, FinishesProducts) {
  const std::string a = write_numbers("a", {5, 12}, 4);
  const std::string b = write_numbers("b", {12, 8}, 3);
  const std::string bias =
      write("bias", "F32", {8}, std::vector<float>{-9, 9, -8, 8, -7, 7, -6, 6});
  const auto left = numbers({5, 12}, 4);
  const auto right = numbers({12, 8}, 3);
  for (const char* op : {"gemm-ar", "gemm-rs", "ag-gemm"}) {
    const auto run = [&](const std::string& out, const std::vector<std::string>& more) {
      std::vector<std::string> line = {MK_TEST_MKRUN, op,   "--a",    a,   "--b",   b,
                                       "--bias",      bias, "--rows", "3", "--out", path(out),
                                       "--check"};
      line.insert(line.end(), more.begin(), more.end());
      return run_program(line);
    };
    const auto relu = run(op, {"--activation", "relu"});
    ASSERT_EQ(0, relu.status) << relu.text;
    const auto values = read(op, {5, 8});
    for (std::uint64_t i = 0; i < 5; ++i) {
      for (std::uint64_t j = 0; j < 8; ++j) {
        float expected = static_cast<float>(j % 2 == 0 ? -9 + static_cast<int>(j) / 2
                                                       : 9 - static_cast<int>(j) / 2);
        for (std::uint64_t x = 0; x < 12; ++x) expected += left[i * 12 + x] * right[x * 8 + j];
        EXPECT_EQ(std::max(expected, 0.0f), values[i * 8 + j]) << op << " " << i << " " << j;
      }
    }
    std::vector<std::string> gated = {"--activation", "gated-silu"};
    if (std::string(op) != "ag-gemm") gated.insert(gated.end(), {"--partials", "f32"});
    const auto finished = run(std::string(op) + "-gated", gated);
    ASSERT_EQ(0, finished.status) << finished.text;
    read(std::string(op) + "-gated", {5, 4});
  }
  const auto wrong = run_program({MK_TEST_MKRUN, "gemm-ar", "--a", a, "--b", b, "--bias",
                                  write_numbers("short", {7}, 3), "--out", path("none")});
  EXPECT_EQ(2, wrong.status);
  EXPECT_NE(std::string::npos, wrong.text.find("--bias has 7 elements, but B has 8 columns"))
      << wrong.text;
}

TEST_F(Mkrun, SendsTokensToTheirExperts) {
  const Shape tokens = {7, 8};
  const Shape experts = {5, 16, 8};  // transposed
  std::vector<std::int64_t> ids;
  for (std::int64_t i = 0; i < 14; ++i) ids.push_back(i * 3 % 6 - 1);
  const auto run = [&](const std::string& out, const std::vector<std::string>& more) {
    std::vector<std::string> line = {MK_TEST_MKRUN,
                                     "moe",
                                     "--tokens",
                                     write_numbers("x", tokens, 4),
                                     "--ids",
                                     write("i", "I64", {7, 2}, ids),
                                     "--experts",
                                     write_numbers("w", experts, 3),
                                     "--experts-transposed",
                                     "--out",
                                     path(out),
                                     "--rows",
                                     "4",
                                     "--check"};
    line.insert(line.end(), more.begin(), more.end());
    return run_program(line);
  };
  const std::string bias = write_numbers("b", {5, 16}, 6);
  const auto x = numbers(tokens, 4);
  const auto w = numbers(experts, 3);
  const auto b = numbers({5, 16}, 6);
  for (const bool with_bias : {false, true}) {
    const std::string out = with_bias ? "y_bias" : "y";
    const auto ended =
        run(out, with_bias ? std::vector<std::string>{"--bias", bias} : std::vector<std::string>{});
    ASSERT_EQ(0, ended.status) << ended.text;
    const auto values = read(out, {7, 2, 16});
    for (std::uint64_t i = 0; i < 14; ++i) {
      const auto expert = static_cast<std::uint64_t>(ids[i]);
      for (std::uint64_t f = 0; f < 16; ++f) {
        float expected = ids[i] >= 0 && with_bias ? b[expert * 16 + f] : 0;
        for (std::uint64_t h = 0; h < 8 && ids[i] >= 0; ++h)
          expected += x[i / 2 * 8 + h] * w[(expert * 16 + f) * 8 + h];
        EXPECT_EQ(expected, values[i * 16 + f]) << "token " << i / 2 << " slot " << i % 2;
      }
    }
  }
  const auto wrong = run("none", {"--bias", write_numbers("short", {5, 8}, 6)});
  EXPECT_EQ(2, wrong.status);
  EXPECT_NE(std::string::npos, wrong.text.find("--bias is [5, 8], but --experts give [5, 16]"))
      << wrong.text;
}

// A gate of 32 lets everything through: silu(32) is 32 in bf16. Up and down projections pick and
// scale one element.
TEST_F(Mkrun, BringsTokensThroughTheirExpertsAndHome) {
  constexpr std::uint64_t kTokens = 7, kModel = 8, kInner = 16, kExperts = 5;
  const auto x = numbers({kTokens, kModel}, 4);
  std::vector<std::int64_t> ids;
  std::vector<float> weights;
  for (std::int64_t i = 0; i < 14; ++i) {
    ids.push_back(i * 3 % 6 - 1);
    weights.push_back(static_cast<float>(i % 4) / 4);
  }
  // Expert e: the gate is 32 where the token's first element is 1, the up projection copies element
  // e to inner element e. The down projection brings that to element 7.
  std::vector<float> tokens(x.begin(), x.end());
  for (std::uint64_t t = 0; t < kTokens; ++t) tokens[t * kModel] = 1;
  for (const bool interleaved : {false, true}) {
    std::vector<float> gate_up(kExperts * kModel * 2 * kInner, 0);
    std::vector<float> down(kExperts * kInner * kModel, 0);
    for (std::uint64_t e = 0; e < kExperts; ++e) {
      const auto at = [&](std::uint64_t row, std::uint64_t column, bool up) -> float& {
        const std::uint64_t there = interleaved ? 2 * column + up : column + (up ? kInner : 0);
        return gate_up[(e * kModel + row) * 2 * kInner + there];
      };
      at(0, e, false) = 32;
      at(e + 1, e, true) = 1;
      down[(e * kInner + e) * kModel + 7] = 0.125f;
    }
    std::vector<std::string> command = {
        MK_TEST_MKRUN, "moe-layer",
        "--tokens",    write("x", "F32", {kTokens, kModel}, tokens),
        "--ids",       write("i", "I64", {kTokens, 2}, ids),
        "--weights",   write("r", "F32", {kTokens, 2}, weights),
        "--gate-up",   write("g", "F32", {kExperts, kModel, 2 * kInner}, gate_up),
        "--down",      write("d", "F32", {kExperts, kInner, kModel}, down),
        "--out",       path(interleaved ? "z" : "y"),
        "--rows",      "4",
        "--check"};
    if (interleaved) command.emplace_back("--interleaved");
    const auto run = run_program(command);
    ASSERT_EQ(0, run.status) << run.text;
    const auto values = read(interleaved ? "z" : "y", {kTokens, kModel});
    for (std::uint64_t t = 0; t < kTokens; ++t) {
      float expected = 0;
      for (std::uint64_t i = 2 * t; i < 2 * t + 2; ++i) {
        if (ids[i] >= 0)
          expected += weights[i] * 4 * tokens[t * kModel + static_cast<std::uint64_t>(ids[i]) + 1];
      }
      for (std::uint64_t c = 0; c < kModel; ++c)
        EXPECT_EQ(c == 7 ? expected : 0, values[t * kModel + c]) << "token " << t << " " << c;
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

// Three rows on four ranks: one has none.
TEST_F(Mkrun, AttendsOverFewerRowsThanRanks) {
  for (const char* mask : {"--causal", "--check"}) {
    const auto run =
        run_program({MK_TEST_MKRUN, "ring", "--q", write_numbers("q", {3, 2, 64}, 5), "--k",
                     write_numbers("k", {3, 1, 64}, 6), "--v", write_numbers("v", {3, 1, 64}, 7),
                     mask, "--out", path("y"), "--overwrite", "--check"});
    ASSERT_EQ(0, run.status) << run.text;
    EXPECT_THAT(run.text, testing::HasSubstr("check: 0 of 390 elements"));  // with 6 of the LSE
  }
}

// The same of sequences of different lengths, whose means begin anew. One is empty, one has a row.
TEST_F(Mkrun, AttendsWithinEachOfSeveralSequences) {
  const Shape shape = {16, 2, 64};
  const Shape keys = {16, 1, 64};
  std::vector<float> v(elements_of(keys));
  for (std::uint64_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i / 64);
  std::vector<std::string> command = {
      MK_TEST_MKRUN, "ring",
      "--q",         write_numbers("q", shape, 5),
      "--k",         write("k", "F32", keys, std::vector<float>(v.size(), 0.5f)),
      "--v",         write("v", "F32", keys, v),
      "--causal",    "--out",
      path("y"),     "--check",
      "--lengths",   "10,0,1,5"};
  const auto run = run_program(command);
  ASSERT_EQ(0, run.status) << run.text;
  const auto values = read("y", shape);
  for (std::uint64_t i = 0; i < values.size(); ++i) {
    const std::uint64_t position = i / 128;
    const std::uint64_t first = position < 10 ? 0 : position < 11 ? 10 : 11;
    const double mean = static_cast<double>(first + position) / 2;
    EXPECT_NEAR(mean, values[i], mean / 256 + 1e-6) << "position " << position;
  }
  command.back() = "10,5";
  const auto refused = run_program(command);
  EXPECT_EQ(2, refused.status);
  EXPECT_NE(std::string::npos, refused.text.find("--lengths are of 15 rows in all"))
      << refused.text;
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

// NaNs and infinities of the inputs are in the result where they belong, and the check knows it.
TEST_F(Mkrun, ChecksWhatInfinitiesAndNaNsMakeOfTheResult) {
  const Shape shape = {6, 8};
  auto a = numbers(shape, 5);
  auto b = numbers({8, 8}, 5);
  a[8 + 3] = HUGE_VALF;          // row 1
  a[2 * 8 + 7] = std::nanf("");  // row 2
  b[5 * 8 + 6] = -HUGE_VALF;     // column 6
  for (const char* op : {"gemm-ar", "gemm-rs", "ag-gemm"}) {
    const auto run = run_program({MK_TEST_MKRUN, op, "--a", write("a", "F32", shape, a), "--b",
                                  write("b", "F32", {8, 8}, b), "--out", path(op), "--check"});
    ASSERT_EQ(0, run.status) << run.text;
    EXPECT_NE(std::string::npos, run.text.find("0 of 48 elements")) << run.text;
    const auto values = read(op, shape);
    for (std::uint64_t i = 0; i < values.size(); ++i) {
      const bool finite = i / 8 != 1 && i / 8 != 2 && i % 8 != 6;
      EXPECT_EQ(finite, std::isfinite(values[i])) << op << " " << i;
    }
  }
  // The last value of a causal sequence reaches its own row alone.
  const Shape rows = {16, 1, 64};
  auto v = numbers(rows, 5);
  std::fill(v.end() - 64, v.end(), HUGE_VALF);
  const auto run = run_program({MK_TEST_MKRUN, "ring", "--q", write_numbers("q", rows, 5), "--k",
                                write_numbers("k", rows, 5), "--v", write("v", "F32", rows, v),
                                "--causal", "--out", path("y"), "--check"});
  ASSERT_EQ(0, run.status) << run.text;
  const auto values = read("y", rows);
  for (std::uint64_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(i < 15 * 64, std::isfinite(values[i])) << i;
  }
}

// Partial sums that overflow f16 are the operator's rule, told, and no wrong result.
TEST_F(Mkrun, SaysThatPartialSumsOverflowed) {
  std::vector<float> a(4 * 8, 40000);
  for (std::uint64_t i = 0; i < a.size(); ++i) a[i] = i % 8 < 4 ? 40000 : -40000;
  const std::vector<std::string> run = {
      MK_TEST_MKRUN, "gemm-ar",
      "--a",         write("a", "F32", {4, 8}, a),
      "--b",         write("b", "F32", {8, 8}, std::vector<float>(64, 1)),
      "--out",       path("y"),
      "--check"};
  const auto bf16 = run_program(run);
  EXPECT_EQ(0, bf16.status) << bf16.text;
  EXPECT_EQ(std::string::npos, bf16.text.find("note:")) << bf16.text;
  auto in_f16 = run;
  in_f16.insert(in_f16.end(), {"--dtype", "f16"});
  const auto f16 = run_program(in_f16);
  EXPECT_EQ(0, f16.status) << f16.text;
  EXPECT_NE(std::string::npos, f16.text.find("elements of partial sums were not finite in f16"))
      << f16.text;
  EXPECT_NE(std::string::npos, f16.text.find("0 of 32 elements outside")) << f16.text;
}

TEST_F(Mkrun, RefusesValuesThatWouldBecomeInfinite) {
  auto values = numbers({4, 8}, 3);
  values[11] = 70000;
  const auto run =
      run_program({MK_TEST_MKRUN, "gemm-ar", "--a", write("a", "F32", {4, 8}, values), "--b",
                   write_numbers("b", {8, 8}, 3), "--dtype", "f16", "--out", path("y")});
  EXPECT_EQ(2, run.status);
  EXPECT_NE(std::string::npos, run.text.find("1 of its elements are beyond the range of f16"))
      << run.text;
  EXPECT_NE(std::string::npos, run.text.find("[1, 3] = 70000")) << run.text;
  EXPECT_FALSE(std::filesystem::exists(path("y")));
}

TEST_F(Mkrun, WritesOverNothingThatIsNotItsOwn) {
  const std::string a = write_numbers("a", {4, 8}, 3);
  const std::string b = write_numbers("b", {8, 8}, 3);
  const auto run = [&](const std::string& out, std::vector<std::string> more = {}) {
    more.insert(more.begin(), {MK_TEST_MKRUN, "gemm-ar", "--a", a, "--b", b, "--nodes", "1",
                               "--local", "1", "--out", out});
    return run_program(more);
  };
  std::filesystem::create_hard_link(path("a"), path("hard"));
  std::filesystem::create_symlink(path("a"), path("soft"));
  write_numbers("other", {4, 8}, 3);
  const auto content = [&](const char* name) {
    std::ifstream file(path(name), std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const std::string input = content("a");
  const std::string other = content("other");
  for (const std::string& out : {path("a"), path("hard"), path("soft"), std::string("/dev/null")}) {
    EXPECT_EQ(2, run(out, {"--overwrite"}).status) << out;
  }
  EXPECT_EQ(2, run(path("other")).status);
  EXPECT_EQ(input, content("a"));
  EXPECT_EQ(other, content("other"));
  EXPECT_EQ(0, run(path("y")).status);
  EXPECT_EQ(0, run(path("y")).status) << "its own";
  EXPECT_EQ(0, run(path("other"), {"--overwrite"}).status);
  EXPECT_EQ(content("y"), content("other"));
}

// Whatever ends it, and whenever: nothing is left beside the inputs but, if it was quick, all of
// the result.
TEST_F(Mkrun, LeavesNothingWhenItIsKilled) {
  const std::string a = write_numbers("a", {64, 8}, 3);
  const std::string b = write_numbers("b", {8, 8}, 3);
  for (const int number : {SIGKILL, SIGHUP, SIGTERM, SIGINT, SIGQUIT, SIGPIPE}) {
    std::filesystem::remove(path("y"));
    tools::ProcessOptions options;
    options.name = "mkrun";
    options.output_path = path("log");
    options.arguments = {MK_TEST_MKRUN, "gemm-ar", "--a", a,        "--b", b,       "--nodes",
                         "1",           "--local", "2",   "--rows", "1",   "--out", path("y")};
    auto process = Process::start(options);
    ASSERT_TRUE(process);
    std::this_thread::sleep_for(std::chrono::milliseconds{100 + number * 20});
    process->signal(number);
    (void)process->wait(patience());
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_->path()))
      names.insert(entry.path().filename());
    names.erase("y");
    EXPECT_EQ((std::set<std::string>{"a", "b", "log"}), names) << "signal " << number;
    if (std::filesystem::exists(path("y"))) read("y", {64, 8});
  }
}

}  // namespace
}  // namespace mk::test
