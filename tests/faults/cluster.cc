#include "tests/faults/cluster.h"

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "tests/faults/job.h"

namespace mk::faults {

using namespace std::chrono_literals;
namespace fs = std::filesystem;

int shell(const std::string& command) {
  const int status = std::system((command + " >/dev/null 2>&1").c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : 255;
}

std::string Holdings::text() const {
  return fmt::format(
      "{} descriptors ({} memory files, {} sockets), {} mappings, {} threads, {} sessions",
      descriptors, memory_files, sockets, mapped_files, threads, sessions);
}

bool Holdings::within(const Holdings& before) const {
  return descriptors <= before.descriptors && memory_files == before.memory_files &&
         sockets <= before.sockets && mapped_files == before.mapped_files &&
         threads == before.threads && sessions == before.sessions;
}

Cluster::Cluster(Programs programs, std::string folder, std::uint32_t nodes, bool namespaces)
    : programs_(std::move(programs)),
      folder_(std::move(folder)),
      namespaces_(namespaces),
      prefix_(fmt::format("mkf{}-", ::getpid())),
      daemons_(nodes) {
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

std::string Cluster::log(std::uint32_t node) const {
  return tools::tail_of(fmt::format("{}/{}.log", folder_, node), 15);
}

Status Cluster::start(std::uint32_t node) {
  tools::ProcessOptions options;
  options.name = fmt::format("mkerneld of node {}", node);
  options.report = true;
  options.output_path = fmt::format("{}/{}.log", folder_, node);
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
  return fail(ErrorCode::kUnavailable, "mkerneld of node {} did not start: {}", node, log(node));
}

void Cluster::signal(std::uint32_t node, int number) { daemons_[node]->signal(number); }

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

Holdings Cluster::holdings(std::uint32_t node) {
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
    const bool pool = name.starts_with("grpc") || name.starts_with("default-exec") ||
                      name.starts_with("resolver-exec") || name.starts_with("event_engine") ||
                      name.starts_with("timer_manager") || name.starts_with("nexting_thread");
    held.threads += pool ? 0 : 1;
  }
  std::ifstream maps(proc + "/maps");
  for (std::string line; std::getline(maps, line);) {
    held.mapped_files += line.find("/memfd:") != std::string::npos ? 1 : 0;
  }
  const auto shown = nlohmann::json::parse(ctl(node, "session list"), nullptr, false);
  held.sessions = shown.is_object() && shown.contains("sessions") ? shown["sessions"].size() : 999;
  return held;
}

std::size_t Cluster::files_in_folder() const {
  return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder_), {}));
}

void Cluster::take_baseline() {
  // What the last job and its connections leave comes to rest first.
  std::uint32_t same = 0;
  eventually(
      [&] {
        std::vector<Holdings> now;
        for (std::uint32_t node = 0; node < size(); ++node) now.push_back(holdings(node));
        same = now == baseline_ ? same + 1 : 0;
        baseline_ = std::move(now);
        std::this_thread::sleep_for(200ms);
        return same >= 3;
      },
      20s);
  files_ = files_in_folder();
}

std::string Cluster::compare_with_baseline() {
  std::vector<Holdings> now(size());
  const bool same = eventually(
      [&] {
        // Our own last question's connection goes first.
        std::this_thread::sleep_for(200ms);
        bool all = files_in_folder() == files_;
        for (std::uint32_t node = 0; node < size(); ++node) {
          now[node] = holdings(node);
          all = all && now[node].within(baseline_[node]);
        }
        return all;
      },
      20s);
  if (same) return "";
  std::string text = fmt::format("{} files, then {}", files_, files_in_folder());
  for (std::uint32_t node = 0; node < size(); ++node) {
    if (now[node].within(baseline_[node])) continue;
    text +=
        fmt::format("; node {} held {}, then {}", node, baseline_[node].text(), now[node].text());
  }
  return text;
}

void Cluster::cut(bool down) {
  shell(fmt::format("ip -n {}0 link set v0 {}", prefix_, down ? "down" : "up"));
}

}  // namespace mk::faults
