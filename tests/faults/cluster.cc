#include "tests/faults/cluster.h"

#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "shm/host/unix_socket.h"
#include "tests/faults/job.h"
#include "tests/multiprocess/grpc_threads.h"

namespace mk::faults {

using namespace std::chrono_literals;
namespace fs = std::filesystem;

int shell(const std::string& command) {
  const int status = std::system((command + " >/dev/null 2>&1").c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : 255;
}

std::string output_of(const std::string& command) {
  std::string text;
  FILE* const pipe = ::popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return text;
  char chunk[4096];
  for (std::size_t got = 0; (got = std::fread(chunk, 1, sizeof(chunk), pipe)) > 0;) {
    text.append(chunk, got);
  }
  ::pclose(pipe);
  return text;
}

std::string Holdings::text() const {
  return fmt::format("{} descriptors ({} memory files, {} sockets), {} mappings, {} threads",
                     descriptors, memory_files, sockets, mapped_files, threads);
}

bool Holdings::within(const Holdings& before) const {
  return descriptors <= before.descriptors && memory_files == before.memory_files &&
         sockets <= before.sockets && mapped_files == before.mapped_files &&
         threads == before.threads;
}

Cluster::Cluster(Programs programs, std::string folder, std::uint32_t nodes, bool namespaces)
    : programs_(std::move(programs)),
      folder_(std::move(folder)),
      namespaces_(namespaces),
      prefix_(fmt::format("mkf{}-", ::getpid())),
      daemons_(nodes),
      baselines_(nodes) {
  for (std::uint32_t node = 0; node < nodes; ++node) {
    std::ofstream toml(fmt::format("{}/{}.toml", folder_, node));
    toml << "node_id = " << node << "\n";
    if (namespaces_) toml << "insecure = true\n";
    const auto address = [&](std::uint32_t of) {
      return namespaces_ ? fmt::format("10.77.0.{}:7171", of + 1)
                         : fmt::format("unix:{}/{}.peer", folder_, of);
    };
    toml << "listen = '" << address(node) << "'\n[socket]\npath = '" << socket(node) << "'\n";
    for (std::uint32_t peer = 0; peer < nodes; ++peer) {
      if (peer == node) continue;
      toml << "[[peer]]\nid = " << peer << "\naddress = '" << address(peer) << "'\n";
    }
    if (namespaces_) {
      toml << "[fabric]\nname = 'ofi'\n[fabric.ofi]\nbind = '10.77.0." << node + 1 << "'\n";
    }
    toml << "[limits]\ndrain = '200ms'\n[log]\nformat = 'text'\n";
  }
  if (!namespaces_) return;
  const std::string a = prefix_ + "0", b = prefix_ + "1";
  shell(fmt::format(
      "ip netns add {0} && ip netns add {1} && ip link add v0 netns {0} type veth peer name v1 "
      "netns {1} && "
      "ip -n {0} addr add 10.77.0.1/24 dev v0 && ip -n {1} addr add 10.77.0.2/24 dev v1 && "
      "for n in {0} {1}; do ip -n $n link set lo up; done && "
      "ip -n {0} link set v0 up && ip -n {1} link set v1 up",
      a, b));
}

Cluster::~Cluster() {
  daemons_.clear();
  if (namespaces_) shell(fmt::format("ip netns del {0}0; ip netns del {0}1", prefix_));
}

std::string Cluster::socket(std::uint32_t node) const {
  return fmt::format("{}/{}.sock", folder_, node);
}

std::string Cluster::log_path(std::uint32_t node) const {
  return fmt::format("{}/{}.log", folder_, node);
}

std::string Cluster::logs() const {
  std::string all;
  for (std::uint32_t node = 0; node < size(); ++node) {
    all += fmt::format("log of node {}:\n{}\n", node, tools::tail_of(log_path(node), 25));
  }
  return all;
}

std::optional<Clock::time_point> Cluster::logged(std::uint32_t node, const std::string& text,
                                                 Clock::time_point since) const {
  using System = std::chrono::system_clock;
  const auto ahead = System::now().time_since_epoch() - Clock::now().time_since_epoch();
  std::ifstream file(log_path(node));
  for (std::string line; std::getline(file, line);) {
    std::tm parts{};
    const char* const rest = ::strptime(line.c_str(), "%Y-%m-%dT%H:%M:%S", &parts);
    if (rest == nullptr || line.find(text) == std::string::npos) continue;
    const auto whole = System::from_time_t(::timegm(&parts)).time_since_epoch();
    const std::chrono::duration<double> fraction(*rest == '.' ? std::strtod(rest, nullptr) : 0.0);
    const Clock::time_point at(
        std::chrono::duration_cast<Clock::duration>(whole + fraction - ahead));
    if (at >= since - 1ms) return at;  // a line's time is cut to milliseconds
  }
  return std::nullopt;
}

Status Cluster::start(std::uint32_t node) {
  tools::ProcessOptions options;
  options.name = fmt::format("mkerneld of node {}", node);
  options.report = true;
  options.output_path = log_path(node);
  if (namespaces_)
    options.arguments = {"/usr/sbin/ip", "netns", "exec", prefix_ + std::to_string(node)};
  for (const std::string& argument :
       {programs_.mkerneld, std::string("--config"), fmt::format("{}/{}.toml", folder_, node),
        std::string("--ready-fd"), std::to_string(tools::kReportFd)}) {
    options.arguments.push_back(argument);
  }
  MK_ASSIGN_OR_RETURN(auto process, tools::Process::start(options));
  daemons_[node].emplace(std::move(process));
  MK_ASSIGN_OR_RETURN(const auto ready, daemons_[node]->read_line(Clock::now() + 60s));
  if (ready) return {};
  return fail(ErrorCode::kUnavailable, "mkerneld of node {} did not start: {}", node,
              tools::tail_of(log_path(node), 15));
}

void Cluster::signal(std::uint32_t node, int number) { daemons_[node]->signal(number); }

Clock::time_point Cluster::kill(std::uint32_t node) {
  auto witness = shm::FrameSocket::connect(socket(node), 10s);
  signal(node, SIGKILL);
  pollfd hang_up{witness ? witness->fd() : -1, POLLIN | POLLRDHUP, 0};
  if (witness) ::poll(&hang_up, 1, 60'000);
  return Clock::now();
}

bool Cluster::gone(std::uint32_t node) {
  return eventually([&] { return daemons_[node]->ended(); });
}

bool Cluster::running(std::uint32_t node) { return daemons_[node] && !daemons_[node]->ended(); }

std::string Cluster::ctl(std::uint32_t node, const std::string& arguments) {
  const std::string out = fmt::format("{}/{}.ctl", folder_, node);
  shell(fmt::format(
      "{} --address unix:{}/{}-admin.sock --timeout 20s --json {} >{} 2>/dev/null; true #",
      programs_.mkctl, folder_, node, arguments, out));
  std::ifstream file(out);
  return {std::istreambuf_iterator<char>(file), {}};
}

bool Cluster::connected() {
  for (std::uint32_t node = 0; node < size(); ++node) {
    if (!running(node)) continue;
    const auto status = nlohmann::json::parse(ctl(node, "status"), nullptr, false);
    if (!status.is_object() || !status.contains("peers")) return false;
    for (const auto& peer : status["peers"]) {
      if (running(peer.value("node", 0u)) && peer.value("state", "") != "up") return false;
    }
  }
  return true;
}

std::optional<std::size_t> Cluster::sessions(std::uint32_t node) {
  const auto shown = nlohmann::json::parse(ctl(node, "session list"), nullptr, false);
  if (!shown.is_object() || !shown.contains("sessions")) return std::nullopt;
  return shown["sessions"].size();
}

Holdings Cluster::holdings(std::uint32_t node) const {
  Holdings held;
  const std::string proc = fmt::format("/proc/{}", pid(node));
  std::error_code changed;  // entries come and go while we look
  for (const auto& entry : fs::directory_iterator(proc + "/fd", changed)) {
    ++held.descriptors;
    const std::string target = fs::read_symlink(entry.path(), changed).string();
    held.memory_files += target.starts_with("/memfd:") ? 1 : 0;
    held.sockets += target.starts_with("socket:") ? 1 : 0;
  }
  for (const auto& entry : fs::directory_iterator(proc + "/task", changed)) {
    std::string name;
    std::getline(std::ifstream(entry.path() / "comm"), name);
    held.threads += test::is_grpc_thread(name) ? 0 : 1;
  }
  std::ifstream maps(proc + "/maps");
  for (std::string line; std::getline(maps, line);) {
    held.mapped_files += line.find("/memfd:") != std::string::npos ? 1 : 0;
  }
  return held;
}

std::size_t Cluster::files_in_folder() const {
  return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder_), {}));
}

void Cluster::take_baseline(std::uint32_t node) {
  Baseline& baseline = baselines_[node];
  baseline.sessions = sessions(node);
  // What the last job and its connections leave comes to rest first.
  std::uint32_t same = 0;
  eventually(
      [&] {
        std::this_thread::sleep_for(200ms);
        const Holdings now = holdings(node);
        same = now == baseline.holdings ? same + 1 : 0;
        baseline.holdings = now;
        return same >= 4;
      },
      20s);
}

void Cluster::take_baselines() {
  for (std::uint32_t node = 0; node < size(); ++node) take_baseline(node);
  files_ = files_in_folder();
}

std::string Cluster::compare_with_baselines() {
  const auto same = [&](std::uint32_t node) {
    return holdings(node).within(baselines_[node].holdings) &&
           sessions(node) == baselines_[node].sessions;
  };
  std::string text;
  if (!eventually([&] { return files_in_folder() == files_; }, 20s)) {
    text = fmt::format("{} files, then {}\n", files_, files_in_folder());
  }
  for (std::uint32_t node = 0; node < size(); ++node) {
    if (eventually([&] { return same(node); }, 20s)) continue;
    text += fmt::format("node {} held {} with {} sessions, then {} with {}\n{}{}", node,
                        baselines_[node].holdings.text(), baselines_[node].sessions.value_or(999),
                        holdings(node).text(), sessions(node).value_or(999),
                        output_of(fmt::format("ls -l /proc/{}/fd", pid(node))),
                        output_of(fmt::format("ss -xapn | grep pid={},", pid(node))));
  }
  return text;
}

void Cluster::cut(bool down) {
  shell(fmt::format("ip -n {}0 link set v0 {}", prefix_, down ? "down" : "up"));
}

}  // namespace mk::faults
