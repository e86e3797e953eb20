#include "client/tools/mkrun/safetensors.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "client/tools/launch/process.h"
#include "client/tools/mkrun/job.h"

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
  {
    auto writer = SafetensorsWriter::create(path("out"), "y", info);
    ASSERT_TRUE(writer);
    const std::string half = "1234";
    ASSERT_TRUE(writer->append(std::as_bytes(std::span(half))));
    EXPECT_FALSE(writer->finish());
    EXPECT_FALSE(std::filesystem::exists(path("out")));
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
  auto writer = SafetensorsWriter::create(path("out"), "y", info);
  const std::string data = "12345678";
  ASSERT_TRUE(writer->append(std::as_bytes(std::span(data))));
  EXPECT_FALSE(writer->append(std::as_bytes(std::span(data))));
  ASSERT_TRUE(writer->finish());
  EXPECT_FALSE(std::filesystem::exists(path("out")));
  ASSERT_TRUE(SafetensorsWriter::publish(path("out")));
  const auto file = SafetensorsFile::open(path("out"));
  ASSERT_TRUE(file) << file.error().message;
  const auto bytes = file->data(*file->find("y"));
  EXPECT_EQ(data, std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
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
  GemmArJobOptions options(const std::string& a, const std::string& b) const {
    GemmArJobOptions options;
    options.a = a;
    options.b = b;
    options.out = path("y");
    return options;
  }
  void expect_error(const GemmArJobOptions& o, const std::string& words) const {
    const auto job = plan_gemm_ar_job(o);
    ASSERT_FALSE(job);
    EXPECT_NE(std::string::npos, job.error().message.find(words)) << job.error().message;
  }
};

TEST_F(Planning, SplitsTheInnerDimensionWithoutGapOrOverlap) {
  for (std::uint64_t k = 4; k < 40; ++k) {
    const auto job = plan_gemm_ar_job(options(matrix("a", "BF16", 3, k), matrix("b", "F32", k, 5)));
    ASSERT_TRUE(job) << job.error().message;
    EXPECT_EQ("bf16", job->dtype);
    std::uint64_t next = 0;
    for (std::uint32_t rank = 0; rank < job->world(); ++rank) {
      EXPECT_EQ(next, job->k_first(rank));
      EXPECT_GT(job->k_last(rank), next);
      next = job->k_last(rank);
    }
    EXPECT_EQ(k, next);
  }
}

TEST_F(Planning, StaysInF16WhenBothInputsAre) {
  EXPECT_EQ("f16",
            plan_gemm_ar_job(options(matrix("a", "F16", 3, 8), matrix("b", "F16", 8, 5)))->dtype);
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

}  // namespace
}  // namespace mk::tools
