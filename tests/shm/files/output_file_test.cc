// A file that a program writes: under its name whole or not at all, and in nobody else's place.
#include "shm/files/output_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <thread>

namespace mk {
namespace {

namespace fs = std::filesystem;

/// Once with a draft that has no name, once as on file systems that know none.
class AnOutputFile : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "output-file-XXXXXX").string();
    ASSERT_NE(nullptr, ::mkdtemp(pattern.data()));
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(path(name)) << text;
    return path(name);
  }
  std::string read(const std::string& name) const {
    std::ifstream file(path(name));
    return {std::istreambuf_iterator<char>(file), {}};
  }
  std::size_t files() const {
    return static_cast<std::size_t>(
        std::distance(fs::directory_iterator(folder_), fs::directory_iterator{}));
  }
  static OutputRules rules() {
    OutputRules rules;
    rules.option = "--out";
    rules.without_tmpfile = GetParam();
    rules.is_earlier_output = [](int fd) { return begins_with(fd, "ours:"); };
    return rules;
  }
  static OutputRules overwriting() {
    OutputRules given = rules();
    given.overwrite = true;
    return given;
  }
  Status write_through(const std::string& name, OutputRules given) const {
    auto file = OutputFile::create(path(name), std::move(given));
    if (!file) return propagate(file);
    MK_RETURN_IF_ERROR(file->write("ours: new"));
    return file->publish();
  }
  void expect_refused(const std::string& name, OutputRules given, const std::string& words) const {
    const auto file = OutputFile::create(path(name), std::move(given));
    ASSERT_FALSE(file) << name;
    EXPECT_EQ(ErrorCode::kInvalidArgument, file.error().code);
    for (const std::string& part : {words, std::string("--out"), path(name)}) {
      EXPECT_NE(std::string::npos, file.error().message.find(part)) << file.error().message;
    }
  }

  fs::path folder_;
};
INSTANTIATE_TEST_SUITE_P(Drafts, AnOutputFile, testing::Values(false, true), [](const auto& test) {
  return std::string(test.param ? "Unlinked" : "Nameless");
});

TEST_P(AnOutputFile, AppearsWhenPublishedAndNotBefore) {
  {
    auto file = OutputFile::create(path("y"), rules());
    ASSERT_TRUE(file) << file.error().message;
    EXPECT_GE(file->fd(), 10);
    ASSERT_TRUE(file->write("ours: half"));
    EXPECT_EQ(0u, files());
  }
  EXPECT_EQ(0u, files()) << "nobody published it";
  ASSERT_TRUE(write_through("y", rules()));
  EXPECT_EQ("ours: new", read("y"));
  EXPECT_EQ(1u, files());
}

TEST_P(AnOutputFile, ReplacesOnlyAnEarlierOutputUnlessTold) {
  write("y", "ours: old");
  ::chmod(path("y").c_str(), 0640);
  ASSERT_TRUE(write_through("y", rules()));
  EXPECT_EQ("ours: new", read("y"));
  struct stat info {};
  ASSERT_EQ(0, ::stat(path("y").c_str(), &info));
  EXPECT_EQ(0640u, info.st_mode & 07777);
  write("other", "a model's weights");
  expect_refused("other", rules(), "--overwrite");
  EXPECT_EQ("a model's weights", read("other"));
  write("empty", "");
  expect_refused("empty", rules(), "--overwrite");
  ASSERT_TRUE(write_through("other", overwriting()));
  EXPECT_EQ("ours: new", read("other"));
  EXPECT_EQ(3u, files());
}

TEST_P(AnOutputFile, IsNeverOtherThanARegularFile) {
  fs::create_directory(path("folder"));
  ASSERT_EQ(0, ::mkfifo(path("pipe").c_str(), 0600));
  write("target", "ours: not to be touched");
  fs::create_symlink("target", path("link"));
  fs::create_symlink("nowhere", path("dangling"));
  fs::create_symlink("/dev/null", path("null"));
  expect_refused("folder", overwriting(), "a folder");
  expect_refused("pipe", overwriting(), "a pipe");
  for (const char* link : {"link", "dangling", "null"}) {
    expect_refused(link, overwriting(), "a symbolic link");
  }
  const auto device = OutputFile::create("/dev/null", overwriting());
  ASSERT_FALSE(device);
  EXPECT_NE(std::string::npos, device.error().message.find("a device")) << device.error().message;
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  EXPECT_EQ("ours: not to be touched", read("target"));
  EXPECT_FALSE(fs::exists(path("nowhere")));
  expect_refused("", overwriting(), "names no file");
  expect_refused("folder/..", overwriting(), "names no file");
  const auto lost = OutputFile::create(path("absent/y"), rules());
  ASSERT_FALSE(lost);
  EXPECT_EQ(ErrorCode::kSystem, lost.error().code);
}

TEST_P(AnOutputFile, IsNeverAnInputUnderAnyOfItsNames) {
  write("x", "ours: the input");
  fs::create_hard_link(path("x"), path("hard"));
  fs::create_symlink("x", path("soft"));
  for (const char* input : {"x", "soft"}) {
    OutputRules given = overwriting();
    given.inputs = {path(input)};
    expect_refused("x", given, "is the input");
    expect_refused("hard", given, "is the input");
  }
  EXPECT_EQ("ours: the input", read("x"));
}

TEST_P(AnOutputFile, KeepsWhatComesOrChangesMeanwhile) {
  auto fresh = OutputFile::create(path("y"), overwriting());
  ASSERT_TRUE(fresh && fresh->write("ours: new"));
  write("y", "somebody's");
  const Status came = fresh->publish();
  ASSERT_FALSE(came);
  EXPECT_EQ(ErrorCode::kInvalidArgument, came.error().code);
  EXPECT_EQ("somebody's", read("y"));

  auto replacing = OutputFile::create(path("y"), overwriting());
  ASSERT_TRUE(replacing && replacing->write("ours: new"));
  write("z", "another's");
  fs::rename(path("z"), path("y"));
  ASSERT_FALSE(replacing->publish());
  EXPECT_EQ("another's", read("y"));

  auto onto_link = OutputFile::create(path("y"), overwriting());
  ASSERT_TRUE(onto_link && onto_link->write("ours: new"));
  write("target", "a target");
  fs::remove(path("y"));
  fs::create_symlink("target", path("y"));
  ASSERT_FALSE(onto_link->publish());
  EXPECT_TRUE(fs::is_symlink(path("y")));
  EXPECT_EQ("a target", read("target"));

  fs::remove(path("y"));
  write("y", "ours: old");
  auto vanished = OutputFile::create(path("y"), rules());
  ASSERT_TRUE(vanished && vanished->write("ours: new"));
  fs::remove(path("y"));
  ASSERT_TRUE(vanished->publish());
  EXPECT_EQ("ours: new", read("y"));
  EXPECT_EQ(2u, files()) << "no draft may stay";
}

// The folder is the one of the beginning, whatever its path leads to later.
TEST_P(AnOutputFile, StaysInItsFolder) {
  fs::create_directory(path("a"));
  auto file = OutputFile::create(path("a/y"), rules());
  ASSERT_TRUE(file && file->write("ours: new"));
  fs::rename(path("a"), path("b"));
  fs::create_directory(path("c"));
  fs::create_symlink("c", path("a"));
  ASSERT_TRUE(file->publish());
  EXPECT_EQ("ours: new", read("b/y"));
  EXPECT_TRUE(fs::is_empty(path("c")));
}

TEST_P(AnOutputFile, OfManyAtOnceOneTakesAFreeName) {
  for (int round = 0; round < 20; ++round) {
    const std::string name = "y" + std::to_string(round);
    std::atomic<int> ready{0};
    std::atomic<int> published{0};
    std::vector<std::thread> writers;
    for (int i = 0; i < 4; ++i) {
      writers.emplace_back([&] {
        auto file = OutputFile::create(path(name), rules());
        ++ready;
        while (ready < 4) std::this_thread::yield();
        if (file && file->write("ours: new") && file->publish()) ++published;
      });
    }
    for (std::thread& writer : writers) writer.join();
    EXPECT_EQ(1, published);
    EXPECT_EQ("ours: new", read(name));
  }
  EXPECT_EQ(20u, files());
}

// A program that dies with a draft leaves nothing behind, whatever ends it.
TEST_P(AnOutputFile, LeavesNothingWhenItsProgramIsKilled) {
  for (int number = 1; number < SIGRTMIN; ++number) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      const rlimit no_core{0, 0};
      ::setrlimit(RLIMIT_CORE, &no_core);
      ::signal(number, SIG_DFL);
      auto file = OutputFile::create(path("y"), rules());
      if (!file || !file->write("ours: new")) ::_exit(1);
      ::raise(number);
      ::_exit(0);  // of those signals that end nothing
    }
    int status = 0;
    while (::waitpid(child, &status, WUNTRACED) == child && WIFSTOPPED(status)) {
      ::kill(child, SIGKILL);
    }
    EXPECT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == 0) << number;
    EXPECT_EQ(0u, files()) << ::strsignal(number);
  }
}

}  // namespace
}  // namespace mk
