/// \file
/// A child process that never outlives its parent. It is started with an argument vector,
/// optionally with a pipe on which it reports line by line, waited for with a deadline, and killed
/// when its object goes.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "shm/host/result.h"
#include "shm/host/unique_fd.h"

namespace mk::tools {

struct ProcessOptions {
  std::string name;                      ///< for messages: "mkerneld of node 1", "rank 3"
  std::vector<std::string> arguments;    ///< [0] is the program's path
  std::vector<std::string> environment;  ///< "NAME=value", added to this process's own
  std::string output_path;               ///< where its stdout and stderr go; empty: inherited
  bool report = false;                   ///< give it a pipe as descriptor kReportFd
  std::vector<int> inherited;            ///< descriptors it keeps, each above kReportFd
};

/// The child's descriptor number of the report pipe.
inline constexpr int kReportFd = 3;

/// The child's side: writes `line` and a newline to `fd`, normally kReportFd.
Status report_line(int fd, const std::string& line);

class Process {
 public:
  static Result<Process> start(const ProcessOptions& options);
  Process(Process&& other) noexcept;
  Process& operator=(Process&&) = delete;
  /// Kills the child if it still runs, and reaps it.
  ~Process();

  /// The next report line, without its newline; nullopt at the end of the stream (the child closed
  /// it or died). kTimeout after `deadline`.
  Result<std::optional<std::string>> read_line(std::chrono::steady_clock::time_point deadline);

  /// Waits for the child's end. Ok only for exit status 0; the error names the child, its status or
  /// signal, and the last lines of its output file. kTimeout when it still runs at `deadline`.
  Status wait(std::chrono::steady_clock::time_point deadline);
  /// Whether it has ended (and was reaped).
  bool ended();
  void signal(int number) const;
  /// Its exit status once it has ended; -1 while it runs or when a signal killed it.
  int exit_status() const;

  const std::string& name() const { return options_.name; }
  pid_t pid() const { return pid_; }

 private:
  Process(ProcessOptions options, pid_t pid, UniqueFd report);
  bool reap(bool block);
  std::string describe_end() const;

  ProcessOptions options_;
  pid_t pid_ = -1;
  int wait_status_ = 0;
  bool reaped_ = false;
  UniqueFd report_;
  std::string buffered_;
};

/// From now on signals that ask a program to end (SIGINT, SIGTERM, SIGHUP and the like) make
/// `read_line` and `wait` return kAborted, so that it unwinds: its children die and its folders go.
/// Call once, early in main.
void unwind_on_interrupt();

/// The folder of the running program, and a program beside it or in one of the build tree's folders
/// `relative`; kNotFound lists where it looked.
std::string program_folder();
Result<std::string> find_program(const std::string& name, const std::vector<std::string>& relative);

/// The last `lines` lines of a text file, indented; empty when it can't be read.
std::string tail_of(const std::string& path, std::size_t lines);

/// A private folder that is removed with everything in it.
class TemporaryFolder {
 public:
  static Result<TemporaryFolder> create(const std::string& prefix);
  TemporaryFolder(TemporaryFolder&& other) noexcept;
  TemporaryFolder& operator=(TemporaryFolder&&) = delete;
  ~TemporaryFolder();
  const std::string& path() const { return path_; }
  /// Leaves the folder where it is (to look at logs after a failure).
  void keep() { kept_ = true; }

 private:
  explicit TemporaryFolder(std::string path) : path_(std::move(path)) {}
  std::string path_;
  bool kept_ = false;
};

}  // namespace mk::tools
