#include "tests/faults/job.h"

#include <signal.h>

#include <algorithm>

namespace mk::faults {

using namespace std::chrono_literals;

bool eventually(const std::function<bool()>& done, std::chrono::milliseconds patience) {
  const auto until = Clock::now() + patience;
  while (!done()) {
    if (Clock::now() > until) return false;
    std::this_thread::sleep_for(2ms);
  }
  return true;
}

namespace {

tools::Process start(const std::string& program, const std::string& socket, const std::string& job,
                     std::uint32_t nodes, std::uint32_t local, std::uint32_t rank) {
  tools::ProcessOptions options;
  options.name = job + " rank " + std::to_string(rank);
  options.report = true;
  options.arguments = {
      program, socket, job, std::to_string(nodes), std::to_string(local), std::to_string(rank),
      "0"};
  auto started = tools::Process::start(options);
  if (!started) {
    fmt::print(stderr, "fault_run: {}\n", started.error().message);
    std::exit(2);
  }
  return std::move(*started);
}

}  // namespace

Rank::Rank(const std::string& program, const std::string& socket, const std::string& job,
           std::uint32_t nodes, std::uint32_t local, std::uint32_t rank)
    : process_(start(program, socket, job, nodes, local, rank)), reader_([this] { read(); }) {}

Rank::~Rank() {
  stop_ = true;
  process_.signal(SIGKILL);
  reader_.join();
}

void Rank::read() {
  while (!stop_) {
    const auto line = process_.read_line(Clock::now() + 200ms);
    if (!line && line.error().code == ErrorCode::kTimeout) continue;
    if (line && *line && (*line)->starts_with("launch")) {
      ++launches_;
      continue;
    }
    if (line && *line && **line == "attached") continue;
    std::lock_guard lock(mutex_);
    if (line && *line) error_ = **line;
    error_at_ = Clock::now();
    ended_ = true;
    return;
  }
}

std::string Rank::error() const {
  std::lock_guard lock(mutex_);
  return error_;
}

Clock::time_point Rank::error_at() const {
  std::lock_guard lock(mutex_);
  return error_at_;
}

Job::Job(const std::string& program, const std::vector<std::string>& sockets,
         const std::string& name, std::uint32_t local) {
  const auto nodes = static_cast<std::uint32_t>(sockets.size());
  for (std::uint32_t rank = 0; rank < nodes * local; ++rank) {
    ranks_.push_back(
        std::make_unique<Rank>(program, sockets[rank / local], name, nodes, local, rank));
  }
}

bool Job::advance(std::uint64_t launches) {
  std::vector<std::uint64_t> wanted;
  for (const auto& rank : ranks_) wanted.push_back(rank->launches() + launches);
  const auto there = [&] {
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      if (ranks_[i]->launches() < wanted[i]) return false;
    }
    return true;
  };
  return eventually([&] { return there() || any_ended(); }, 120s) && there();
}

bool Job::any_ended() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const auto& rank) { return rank->ended(); });
}

std::uint64_t Job::launches() const {
  std::uint64_t all = 0;
  for (const auto& rank : ranks_) all += rank->launches();
  return all;
}

std::string Job::errors() const {
  std::string all;
  for (const auto& rank : ranks_) {
    if (rank->ended()) all += "[" + rank->error() + "] ";
  }
  return all;
}

}  // namespace mk::faults
