#include "client/tools/mkrun/safetensors.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>

#include "client/tools/launch/process.h"
#include "client/tools/mkrun/job.h"
#include "client/tools/mkrun/tensors.h"

namespace mk::tools {
namespace {

class Safetensors : public testing::Test {
 protected:
  std::string path(const std::string& name) const { return folder_.path() + "/" + name; }

  std::string write(const std::string& name, const std::string& header,
                    const std::string& data) const {
    std::ofstream file(path(name), std::ios::binary);
    const std::uint64_t length = header.size();
    file.write(reinterpret_cast<const char*>(&length), 8);
    file << header << data;
    return path(name);
  }

  void expect_refused(const std::string& file, const std::string& words) const {
    const auto opened = SafetensorsFile::open(file);
    ASSERT_FALSE(opened);
    EXPECT_NE(std::string::npos, opened.error().message.find(words)) << opened.error().message;
    EXPECT_NE(std::string::npos, opened.error().message.find(file)) << opened.error().message;
  }

  TemporaryFolder folder_ = *TemporaryFolder::create("safetensors-test");
};

constexpr const char* kTwoTensors =
    R"({"__metadata__":{"format":"pt"},"w":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},)"
    R"("x":{"dtype":"F32","shape":[2],"data_offsets":[12,20]}})";

TEST_F(Safetensors, ReadsTensorsAndSkipsMetadata) {
  const auto file = SafetensorsFile::open(write("ok", kTwoTensors, "abcdefghijklmnopqrst"));
  ASSERT_TRUE(file) << file.error().message;
  EXPECT_EQ(2u, file->tensors().size());
  const auto x = file->find("x");
  ASSERT_TRUE(x);
  EXPECT_EQ("F32", x->dtype);
  EXPECT_EQ((std::vector<std::uint64_t>{2}), x->shape);
  const auto data = file->data(*x);
  EXPECT_EQ("mnopqrst", std::string(reinterpret_cast<const char*>(data.data()), data.size()));
}

TEST_F(Safetensors, EveryTruncationIsRefused) {
  write("whole", kTwoTensors, "abcdefghijklmnopqrst");
  std::ifstream whole(path("whole"), std::ios::binary);
  const std::string bytes(std::istreambuf_iterator<char>(whole), {});
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    std::ofstream(path("cut"), std::ios::binary | std::ios::trunc) << bytes.substr(0, length);
    const auto opened = SafetensorsFile::open(path("cut"));
    ASSERT_FALSE(opened) << length;
    EXPECT_EQ(ErrorCode::kInvalidArgument, opened.error().code);
  }
}

TEST_F(Safetensors, SaysWhatIsWrong) {
  EXPECT_FALSE(SafetensorsFile::open(path("absent")));
  expect_refused(write("text", "not json", ""), "not a JSON object");
  expect_refused(write("list", "[1]", ""), "not a JSON object");
  const auto one = [](const std::string& entry) { return R"({"w":)" + entry + "}"; };
  expect_refused(write("a", one("3"), ""), "no dtype");
  expect_refused(write("b", one(R"({"dtype":"F32","shape":[-1],"data_offsets":[0,4]})"), "abcd"),
                 "whole numbers");
  expect_refused(write("c", one(R"({"dtype":"F32","shape":[1],"data_offsets":[4,0]})"), "abcd"),
                 "end before");
  expect_refused(write("d", one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,4]})"), "abcd"),
                 "disagree");
  expect_refused(write("e", one(R"({"dtype":"F32","shape":[1],"data_offsets":[0,8]})"), "abcd"),
                 "truncated");
  expect_refused(
      write("f", one(R"({"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,4]})"),
            "abcd"),
      "overflows");
}

TEST_F(Safetensors, AMissingTensorListsThoseThatAreThere) {
  const auto file = SafetensorsFile::open(write("ok", kTwoTensors, "abcdefghijklmnopqrst"));
  const auto found = file->find("weight");
  ASSERT_FALSE(found);
  EXPECT_EQ("no tensor 'weight'; there are: w, x", found.error().message);
}

TEST_F(Safetensors, WrittenFilesComeBackAndAppearOnlyWhenComplete) {
  const TensorInfo info{"F16", {2, 2}, 0, 8};
  const std::string half = "1234";
  const auto part_of = [&](const SafetensorsWriter& writer) {
    return SafetensorsPart::open(UniqueFd(::dup(writer.fd())), path("out"));
  };
  {
    auto writer = SafetensorsWriter::create(path("out"), "y", info, {});
    ASSERT_TRUE(writer) << writer.error().message;
    auto part = part_of(*writer);
    ASSERT_TRUE(part) << part.error().message;
    ASSERT_TRUE(part->write(0, std::as_bytes(std::span(half))));
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path())) << "nobody published it";
  EXPECT_FALSE(SafetensorsPart::open(UniqueFd(), path("out")));
  auto writer = SafetensorsWriter::create(path("out"), "y", info, {});
  const std::string data = "12345678";
  auto part = part_of(*writer);
  ASSERT_TRUE(part->write(4, std::as_bytes(std::span(data).subspan(4))));
  ASSERT_TRUE(part->write(0, std::as_bytes(std::span(half))));
  EXPECT_FALSE(part->write(5, std::as_bytes(std::span(half)))) << "beyond the end";
  ASSERT_TRUE(writer->publish());
  const auto file = SafetensorsFile::open(path("out"));
  ASSERT_TRUE(file) << file.error().message;
  const auto bytes = file->data(*file->find("y"));
  EXPECT_EQ(data, std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
}

// A file of ours with one tensor may be replaced. One that others wrote, or put a tensor into, may
// not: it would be lost.
TEST_F(Safetensors, OnlyFilesOfTheWritersOwnAreReplaced) {
  const TensorInfo info{"F16", {2, 2}, 0, 8};
  const auto written = [&](const std::string& name) {
    auto writer = SafetensorsWriter::create(path(name), "y", info, {});
    return writer && writer->publish();
  };
  EXPECT_TRUE(written("own"));
  EXPECT_TRUE(written("own")) << "again";
  const std::string tensor = R"({"dtype":"F16","shape":[0],"data_offsets":[0,0]})";
  const std::string mark = R"("__metadata__":{"made_by":"mkrun"})";
  write("two", fmt::format(R"({{{},"y":{},"w":{}}})", mark, tensor, tensor), "");
  write("theirs", fmt::format(R"({{"__metadata__":{{"made_by":"them"}},"y":{}}})", tensor), "");
  write("plain", fmt::format(R"({{"y":{}}})", tensor), "");
  write("none", "{" + mark + "}", "");
  write("odd", fmt::format(R"({{"__metadata__":"mkrun","y":{}}})", tensor), "");
  std::ofstream(path("short")) << "1234";
  std::ofstream(path("text")) << "no safetensors at all, but long enough";
  for (const char* name : {"two", "theirs", "plain", "none", "odd", "short", "text"}) {
    const auto before = std::filesystem::file_size(path(name));
    EXPECT_FALSE(written(name)) << name;
    EXPECT_EQ(before, std::filesystem::file_size(path(name))) << name;
  }
  EXPECT_TRUE(SafetensorsFile::open(path("two"))) << "what we write and refuse, we read";
}

class Planning : public Safetensors {
 protected:
  std::string matrix(const std::string& name, const std::string& dtype, std::uint64_t rows,
                     std::uint64_t columns) const {
    const std::uint64_t bytes = rows * columns * dtype_bytes(dtype);
    write(name,
          fmt::format(R"({{"t":{{"dtype":"{}","shape":[{},{}],"data_offsets":[0,{}]}}}})", dtype,
                      rows, columns, bytes),
          std::string(bytes, 'x'));
    return path(name) + ":t";
  }
  JobOptions options(const std::string& a, const std::string& b) const {
    JobOptions options;
    options.op = "gemm-ar";
    options.inputs = {{"a", a}, {"b", b}};
    options.out = path("y");
    return options;
  }
  std::string tensor(const std::string& name, const std::string& dtype,
                     const std::vector<std::uint64_t>& shape, const std::string& data = {}) const {
    std::uint64_t bytes = dtype_bytes(dtype);
    for (const std::uint64_t side : shape) bytes *= side;
    write(name,
          fmt::format(R"({{"t":{{"dtype":"{}","shape":[{}],"data_offsets":[0,{}]}}}})", dtype,
                      fmt::join(shape, ","), bytes),
          data.empty() ? std::string(bytes, '\0') : data);
    return path(name) + ":t";
  }
  void expect_error(const JobOptions& o, const std::string& words) const {
    const auto job = plan_job(o);
    ASSERT_FALSE(job);
    EXPECT_NE(std::string::npos, job.error().message.find(words)) << job.error().message;
  }
};

TEST_F(Planning, StaysInF16WhenBothInputsAre) {
  EXPECT_EQ("f16", plan_job(options(matrix("a", "F16", 3, 8), matrix("b", "F16", 8, 5)))->dtype);
}

TEST_F(Planning, RefusesWhatDoesNotFitAndNamesTheOption) {
  const std::string a = matrix("a", "BF16", 3, 8);
  expect_error(options(a, matrix("b", "BF16", 5, 8)), "with --b-transposed they fit");
  expect_error(options(a, matrix("b", "BF16", 7, 5)), "inner dimensions 8 and 7 differ");
  expect_error(options(matrix("s", "BF16", 3, 3), matrix("b", "BF16", 3, 5)),
               "can't be split over 4 ranks");
  expect_error(options(path("a"), a), "--a");
  expect_error(options(a, path("absent") + ":t"), "absent");
  expect_error(options(a, path("a") + ":u"), "no tensor 'u'");
  write("i", R"({"t":{"dtype":"I64","shape":[8,5],"data_offsets":[0,320]}})",
        std::string(320, 'x'));
  expect_error(options(a, path("i") + ":t"), "I64");
  write("v", R"({"t":{"dtype":"F16","shape":[8],"data_offsets":[0,16]}})", std::string(16, 'x'));
  expect_error(options(a, path("v") + ":t"), "shape [8]");
}

TEST_F(Planning, EveryOperatorSaysWhatItMakesOfTheTensors) {
  const auto plan = [&](const char* op, std::map<std::string, std::string> inputs) {
    JobOptions options;
    options.op = op;
    options.inputs = std::move(inputs);
    options.out = path("y");
    const auto job = plan_job(options);
    EXPECT_TRUE(job) << job.error().message;
    return job ? *job : Job{};
  };
  using Shape = std::vector<std::uint64_t>;
  const std::string a = tensor("a", "BF16", {3, 8});
  const std::string b = tensor("b", "BF16", {8, 5});
  for (const char* op : {"ag-gemm", "gemm-rs", "gemm-ar"}) {
    EXPECT_EQ((Shape{3, 5}), plan(op, {{"a", a}, {"b", b}}).out_shape) << op;
  }
  const Job moe = plan("moe", {{"tokens", tensor("x", "F32", {9, 16})},
                               {"ids", tensor("i", "I32", {9, 2})},
                               {"experts", tensor("w", "F32", {4, 16, 24})}});
  EXPECT_EQ((Shape{9, 2, 24}), moe.out_shape);
  EXPECT_EQ(9u, moe.rows);
  const Job ring = plan("ring", {{"q", tensor("q", "F16", {20, 4, 64})},
                                 {"k", tensor("k", "F16", {20, 2, 64})},
                                 {"v", tensor("v", "F16", {20, 2, 64})}});
  EXPECT_EQ((Shape{20, 4, 64}), ring.out_shape);
  EXPECT_EQ("f16", ring.dtype);
  EXPECT_EQ(20u, ring.rows_per_launch) << "the whole sequence at once";
}

TEST_F(Planning, EveryOperatorRefusesWhatDoesNotFit) {
  JobOptions o = options(tensor("a", "BF16", {3, 8}), tensor("b", "BF16", {8, 3}));
  o.op = "ag-gemm";
  expect_error(o, "the columns of C, 3 can't be split over 4 ranks");
  o.op = "fft";
  expect_error(o, "no operator 'fft'");

  o = options("", "");
  o.op = "moe";
  const std::string x = tensor("x", "F32", {2, 16});
  const std::string w = tensor("w", "F32", {4, 16, 24});
  const auto with_ids = [&](const std::vector<std::int32_t>& ids) {
    const std::string data(reinterpret_cast<const char*>(ids.data()), ids.size() * 4);
    o.inputs = {{"tokens", x}, {"ids", tensor("i", "I32", {2, ids.size() / 2}, data)}};
    o.inputs["experts"] = w;
    return o;
  };
  expect_error(with_ids({0, 3, -1, 4}), "token 1, slot 1 goes to expert 4; allowed are 0 to 3");
  expect_error(with_ids({0, 3, -2, 1}), "goes to expert -2");
  expect_error(with_ids(std::vector<std::int32_t>(10, 0)), "there are only 4");
  o.inputs["ids"] = tensor("f", "F32", {2, 2});
  expect_error(o, "mkrun takes I32 and I64 here");
  o.inputs["ids"] = tensor("i", "I32", {3, 2});
  expect_error(o, "--ids has 3 rows for 2 tokens");
  o.inputs["experts"] = tensor("w", "F32", {4, 24, 16});
  expect_error(o, "with --experts-transposed they fit");

  o = options("", "");
  o.op = "ring";
  o.inputs = {{"q", tensor("q", "F16", {7, 3, 64})}};
  o.inputs["k"] = o.inputs["v"] = tensor("k", "F16", {7, 1, 64});
  o.causal = true;
  EXPECT_EQ((std::vector<std::uint32_t>{7}), plan_job(o)->lengths);
  o.inputs["q"] = tensor("q", "F16", {8, 3, 64});
  expect_error(o, "k and v must be alike, and like q");
  o.inputs["k"] = o.inputs["v"] = tensor("k", "F16", {8, 2, 64});
  expect_error(o, "3 query heads cannot share 2 key heads");
}

TEST_F(Planning, RefusesValuesBeyondTheRangeOfTheResultsType) {
  const auto floats = [&](const std::string& name, std::vector<float> values) {
    const std::string data(reinterpret_cast<const char*>(values.data()), values.size() * 4);
    return tensor(name, "F32", {values.size() / 4, 4}, data);
  };
  const auto halves = [&](const std::string& name, const char* dtype,
                          std::vector<std::uint16_t> values) {
    const std::string data(reinterpret_cast<const char*>(values.data()), values.size() * 2);
    return tensor(name, dtype, {values.size() / 4, 4}, data);
  };
  const float nan = std::nanf("");
  const std::string b = floats("b", std::vector<float>(16, 1));
  JobOptions o = options(floats("a", {1, 2, 3, 4, 5, 70000, 65519.9f, -65520}), b);
  EXPECT_TRUE(plan_job(o)) << "bf16 holds them";
  o.dtype = "f16";
  expect_error(
      o, "--a '" + path("a") +
             ":t': 2 of its elements are beyond the range of f16 (at "
             "most 65504 in magnitude) and would become infinite; the first is [1, 1] = 70000");
  expect_error(o, "--dtype bf16");
  // What is infinite or a NaN by itself stays so.
  o.inputs["a"] = floats("a", {HUGE_VALF, -HUGE_VALF, nan, 65519.9f});
  EXPECT_TRUE(plan_job(o));
  o.inputs["a"] = halves("a", "BF16", {0x7f7f, 0, 0, 0xff80});
  expect_error(o, "1 of its elements are beyond the range of f16");
  o.dtype = "bf16";
  EXPECT_TRUE(plan_job(o));
  o.inputs["a"] = halves("a", "F16", {0x7bff, 0xfbff, 0x7c00, 0x7e00});
  EXPECT_TRUE(plan_job(o));
  const float beyond = std::numeric_limits<float>::max();
  o.inputs["a"] = floats("a", {0, 0, beyond, 0});
  expect_error(o, "beyond the range of bf16");
  expect_error(o, "[0, 2] = 3.40282e+38. Scale the tensor");
}

// Elements of the result's type keep their bits; others are rounded, and a NaN stays one.
TEST_F(Planning, ConversionsKeepNaNsAndInfinities) {
  const std::uint16_t bits[] = {0x7fc1, 0xff81, 0x7f80, 0xff80, 0x8000, 0x0001, 0x7d01, 0xfe01};
  const std::string data(reinterpret_cast<const char*>(bits), sizeof(bits));
  for (const char* dtype : {"BF16", "F16"}) {
    tensor("x", dtype, {1, 8}, data);
    const auto opened = Tensor::open(path("x"), "t");
    ASSERT_TRUE(opened);
    for (const DataType type : {DataType::kBf16, DataType::kF16}) {
      const DataType own = std::string(dtype) == "F16" ? DataType::kF16 : DataType::kBf16;
      const Elements elements = opened->rows(0, 1, type);
      for (std::size_t i = 0; i < std::size(bits); ++i) {
        const float was = to_float(own, bits[i]);
        const float is = to_float(type, elements[i]);
        if (type == own) {
          EXPECT_EQ(bits[i], elements[i]);
        }
        EXPECT_EQ(std::isnan(was), std::isnan(is)) << i;
        EXPECT_TRUE(!std::isinf(was) || std::isinf(is)) << i;
        EXPECT_TRUE(std::isnan(was) || std::signbit(was) == std::signbit(is)) << i;
      }
    }
  }
  const float floats[] = {std::bit_cast<float>(0x7f800001u), std::bit_cast<float>(0xffffffffu),
                          HUGE_VALF, -HUGE_VALF};
  tensor("f", "F32", {1, 4}, {reinterpret_cast<const char*>(floats), sizeof(floats)});
  const auto opened = Tensor::open(path("f"), "t");
  for (const DataType type : {DataType::kBf16, DataType::kF16}) {
    const Elements elements = opened->rows(0, 1, type);
    EXPECT_TRUE(std::isnan(to_float(type, elements[0])) && std::isnan(to_float(type, elements[1])));
    EXPECT_EQ(HUGE_VALF, to_float(type, elements[2]));
    EXPECT_EQ(-HUGE_VALF, to_float(type, elements[3]));
    EXPECT_EQ(0, largest(elements, type)) << "of those that are finite";
  }
}

TEST_F(Planning, TheOutputIsNoInputAndNoFileOfOthers) {
  const std::string a = matrix("a", "BF16", 8, 8);
  JobOptions o = options(a, matrix("b", "BF16", 8, 5));
  const auto expect_refused = [&](const std::string& out, const std::string& words) {
    o.out = out;
    const auto job = plan_job(o);
    ASSERT_TRUE(job);
    const auto opened = open_output(o, *job);
    ASSERT_FALSE(opened) << out;
    EXPECT_EQ(ErrorCode::kInvalidArgument, opened.error().code);
    EXPECT_NE(std::string::npos, opened.error().message.find(words)) << opened.error().message;
  };
  std::filesystem::create_hard_link(path("a"), path("hard"));
  std::filesystem::create_symlink(path("a"), path("soft"));
  matrix("c", "BF16", 8, 5);
  for (const bool overwrite : {false, true}) {
    o.overwrite = overwrite;
    expect_refused(path("a") + ":y", "is the input");
    expect_refused(path("hard"), "is the input");
    expect_refused(path("soft"), "symbolic link");
    expect_refused("/dev/null", "a device");
    expect_refused(folder_.path(), "a folder");
  }
  o.inputs["a"] = path("soft") + ":t";
  expect_refused(path("a"), "is the input");
  o.overwrite = false;
  expect_refused(path("c"), "--overwrite");
  o.overwrite = true;
  EXPECT_TRUE(open_output(o, *plan_job(o)));
}

}  // namespace
}  // namespace mk::tools
