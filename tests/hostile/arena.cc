#include "tests/hostile/arena.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "tests/multiprocess/grpc_threads.h"

namespace mk::test {

// --- Holdings ---

Holdings Holdings::of(pid_t pid) {
  const std::string proc = "/proc/" + std::to_string(pid);
  Holdings holdings;
  std::error_code gone;  // entries come and go while we look
  for (const auto& entry : std::filesystem::directory_iterator(proc + "/fd", gone)) {
    ++holdings.descriptors;
    const auto target = std::filesystem::read_symlink(entry.path(), gone);
    if (target.string().starts_with("/memfd:")) ++holdings.memory_files;
  }
  for (const auto& entry : std::filesystem::directory_iterator(proc + "/task", gone)) {
    std::string name;
    std::getline(std::ifstream(entry.path() / "comm"), name);
    if (!is_grpc_thread(name)) ++holdings.threads;
  }
  std::ifstream maps(proc + "/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("/memfd:") != std::string::npos) ++holdings.mapped_files;
  }
  return holdings;
}

std::ostream& operator<<(std::ostream& out, const Holdings& holdings) {
  return out << holdings.descriptors << " descriptors, " << holdings.memory_files
             << " of memory files, " << holdings.mapped_files << " mappings of them, "
             << holdings.threads << " threads";
}

// --- HealthyJob ---

HealthyJob::HealthyJob(const tools::DaemonSet& daemons) {
  for (std::uint32_t rank = 0; rank < daemons.size(); ++rank) {
    ranks_.push_back(std::make_unique<Rank>(start_rank(daemons, "healthy", 1, rank, 0)));
    Rank& started = *ranks_.back();
    started.reader = std::thread([this, &started] { read(started); });
  }
}

HealthyJob::~HealthyJob() {
  stop_ = true;
  for (auto& rank : ranks_) rank->process.signal(SIGKILL);
  for (auto& rank : ranks_) rank->reader.join();
}

void HealthyJob::read(Rank& rank) {
  while (!stop_) {
    const auto line = rank.process.read_line(std::chrono::steady_clock::now() + 200ms);
    if (!line && line.error().code == ErrorCode::kTimeout) continue;
    if (line && *line && (*line)->starts_with("launch")) {
      ++rank.launches;
      continue;
    }
    if (line && *line && **line == "attached") continue;
    std::lock_guard lock(rank.mutex);
    rank.error = !line   ? line.error().message
                 : *line ? **line
                         : rank.process.name() + " of the healthy job has ended";
    return;
  }
}

bool HealthyJob::expect_launches() {
  bool goes_on = true;
  for (auto& rank : ranks_) {
    // The launch under way may have begun before: the next two have not.
    const std::uint64_t wanted = rank->launches + 2;
    for (const auto deadline = patience(); rank->launches < wanted && rank->trouble().empty() &&
                                           std::chrono::steady_clock::now() < deadline;) {
      std::this_thread::sleep_for(2ms);
    }
    EXPECT_EQ("", rank->trouble());
    EXPECT_GE(rank->launches, wanted) << "the healthy job does not go on";
    goes_on = goes_on && rank->trouble().empty() && rank->launches >= wanted;
  }
  return goes_on;
}

// --- HostileTest ---

std::unique_ptr<tools::DaemonSet> HostileTest::daemons_;
std::unique_ptr<HealthyJob> HostileTest::healthy_;
std::vector<Holdings> HostileTest::at_rest_;

void HostileTest::SetUpTestSuite() {
  daemons_ = start_daemons(2);
  ASSERT_NE(nullptr, daemons_);
  // Other users, too, get to the sockets.
  ASSERT_EQ(0, ::chmod(daemons_->folder().c_str(), 0711));
  // Whatever gRPC and the first job make once and keep is no leak.
  expect_job_works(*daemons_, "first", 1, 1);
  for (std::uint32_t node = 0; node < 2; ++node) sessions_shown(node);
  ASSERT_TRUE(eventually([] {
    const auto shown = nlohmann::json::parse(sessions_shown(), nullptr, false);
    return shown.is_object() && shown["sessions"].empty();
  }));
  at_rest_ = holdings();
  healthy_ = std::make_unique<HealthyJob>(*daemons_);
  healthy_->expect_launches();
}

void HostileTest::TearDownTestSuite() {
  if (daemons_ == nullptr) return;
  healthy_.reset();
  // Nothing is left of anybody.
  EXPECT_TRUE(eventually([] { return holdings() == at_rest_; }))
      << "node 0 held " << at_rest_[0] << "; now " << holdings()[0];
  const Status stopped = daemons_->stop(60s);
  EXPECT_TRUE(stopped) << stopped.error().message;
  daemons_.reset();
  figures_.write();
}

void HostileTest::SetUp() {
  ASSERT_NE(nullptr, healthy_);
  before_ = holdings();
}

void HostileTest::TearDown() {
  if (healthy_ == nullptr) return;
  const Status up = daemons_->check();
  EXPECT_TRUE(up) << up.error().message;
  const bool goes_on = healthy_->expect_launches();
  const bool nothing_left = eventually([this] { return holdings() == before_; });
  EXPECT_TRUE(nothing_left) << "before: " << before_[0] << "; " << before_[1]
                            << "\nafter: " << holdings()[0] << "; " << holdings()[1];
  figures_.daemons_lost += up ? 0 : 1;
  figures_.healthy_jobs_lost += goes_on ? 0 : 1;
  figures_.resources_lost += nothing_left ? 0 : 1;
}

HostileTest::Figures HostileTest::figures_;

void HostileTest::tried(std::uint64_t inputs) {
  const auto* const test = testing::UnitTest::GetInstance()->current_test_info();
  figures_.inputs[fmt::format("{}.{}", test->test_suite_name(), test->name())] += inputs;
}

void HostileTest::Figures::write() const {
  const char* const path = std::getenv("MK_HOSTILE_JSON");
  if (path == nullptr) return;
  nlohmann::json out;
  std::uint64_t all = 0;
  for (const auto& [name, count] : inputs) {
    out["inputs"][name] = count;
    all += count;
  }
  out["inputs_tried"] = all;
  out["daemons_lost"] = daemons_lost;
  out["healthy_jobs_lost"] = healthy_jobs_lost;
  out["cases_that_left_something_behind"] = resources_lost;
  std::ofstream(path) << out.dump(2) << "\n";
}

std::string HostileTest::sessions_shown(std::uint32_t node) {
  return run_program({MK_TEST_MKCTL, "--address", daemons_->admin_address(node), "--timeout", "60s",
                      "--json", "session", "list"})
      .text;
}

bool HostileTest::shown_as_failed(const std::string& job, const std::string& text,
                                  std::uint32_t node) {
  return eventually([&] {
    const auto shown = nlohmann::json::parse(sessions_shown(node), nullptr, false);
    if (!shown.is_object() || !shown.contains("recent_failures")) return false;
    for (const auto& session : shown["recent_failures"]) {
      if (session.value("job", "") == job &&
          session.value("reason", "").find(text) != std::string::npos) {
        return true;
      }
    }
    return false;
  });
}

void HostileTest::expect_all_well() {
  const Status up = daemons_->check();
  EXPECT_TRUE(up) << up.error().message;
  for (std::uint32_t node = 0; node < daemons_->size(); ++node) {
    const auto ask = [&](std::vector<std::string> words) {
      words.insert(words.begin(), {MK_TEST_MKCTL, "--address", daemons_->admin_address(node),
                                   "--timeout", "60s", "--json"});
      const std::string text = run_program(words).text;
      const auto shown = nlohmann::json::parse(text, nullptr, false);
      EXPECT_TRUE(shown.is_object()) << text;
      return shown;
    };
    EXPECT_TRUE(ask({"session", "list"}).contains("sessions"));
    const auto status = ask({"status"});
    ASSERT_TRUE(status.contains("peers")) << status.dump();
    for (const auto& peer : status["peers"]) {
      const auto breaks = peer.value("breaks", nlohmann::json(0));
      EXPECT_TRUE(breaks == 0 || breaks == "0") << peer.dump();
    }
  }
  EXPECT_TRUE(healthy_->expect_launches());
}

std::vector<Holdings> HostileTest::holdings() {
  std::vector<Holdings> all;
  for (std::uint32_t node = 0; node < daemons_->size(); ++node) {
    all.push_back(Holdings::of(daemons_->process(node).pid()));
  }
  return all;
}

bool HostileTest::eventually(const std::function<bool()>& done) {
  for (const auto deadline = patience(); std::chrono::steady_clock::now() < deadline;) {
    if (done()) return true;
    std::this_thread::sleep_for(20ms);
  }
  return done();
}

}  // namespace mk::test
