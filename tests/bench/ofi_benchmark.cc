// Bandwidth of the ofi fabric's endpoint against a bare loop of libfabric's fi_writedata, between
// two processes, taking turns within one run. The clock stops when the receiver has seen every
// arrival.
//
//   ofi_benchmark [--provider tcp] [--bind 127.0.0.1] [--bytes 262144] [--count 2000] [--window 16]
//   [--rounds 15]
//                 [--json out.json]
#include <fcntl.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "daemon/fabric/fabric.h"

extern char** environ;

namespace mk::fabric {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::uint32_t kSlots = 16;  // the window of memory that is written over and over

struct Options {
  std::string provider = "tcp";
  std::string bind = "127.0.0.1";
  std::uint32_t bytes = 256 * 1024;
  std::uint64_t count = 2000;
  std::uint64_t window = 16;
  int rounds = 15;
  std::string json;
};

void check(bool ok, const std::string& what) {
  if (!ok) throw std::runtime_error(what);
}

std::string to_hex(const void* data, std::size_t bytes) {
  std::string text;
  for (std::size_t i = 0; i < bytes; ++i)
    text += fmt::format("{:02x}", static_cast<const unsigned char*>(data)[i]);
  return text;
}
Bytes from_hex(const std::string& text) {
  Bytes bytes;
  for (std::size_t i = 0; i + 1 < text.size(); i += 2) {
    bytes.push_back(static_cast<std::byte>(std::stoul(text.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

/// One way to send and to receive; both are driven by the same loops.
class Side {
 public:
  virtual ~Side() = default;
  virtual std::vector<std::string> describe() const = 0;  ///< what the other process needs
  virtual void connect(const std::vector<std::string>& description) = 0;
  virtual std::size_t send(std::uint64_t first,
                           std::size_t count) = 0;  ///< posts; how many were taken
  virtual std::size_t completions() = 0;
  virtual std::size_t arrivals() = 0;
};

class EndpointSide final : public Side {
 public:
  explicit EndpointSide(const Options& options)
      : bytes_(options.bytes), memory_(std::size_t{options.bytes} * kSlots) {
    EndpointConfig config;
    config.fabric = "ofi";
    config.provider = options.provider;
    config.bind_address = options.bind;
    auto endpoint = open_endpoint(config);
    check(endpoint.has_value(), endpoint ? "" : endpoint.error().message);
    endpoint_ = std::move(*endpoint);
    auto region = endpoint_->register_memory({memory_.data(), memory_.size(), -1, 0});
    check(region.has_value(), region ? "" : region.error().message);
    region_ = std::move(*region);
  }
  std::vector<std::string> describe() const override {
    const Bytes address = endpoint_->address();
    const Bytes key = region_->key();
    return {to_hex(address.data(), address.size()), to_hex(key.data(), key.size())};
  }
  void connect(const std::vector<std::string>& description) override {
    auto link = endpoint_->connect(from_hex(description[0]), "the receiver");
    check(link.has_value(), link ? "" : link.error().message);
    link_ = *link;
    auto remote = endpoint_->import_region(link_, from_hex(description[1]));
    check(remote.has_value(), remote ? "" : remote.error().message);
    remote_ = std::move(*remote);
  }
  std::size_t send(std::uint64_t first, std::size_t count) override {
    std::array<Write, 8> writes;
    count = std::min(count, writes.size());
    for (std::size_t i = 0; i < count; ++i) {
      Write& write = writes[i];
      write.src = region_.get();
      write.dst = remote_.get();
      write.src_offset = write.dst_offset = (first + i) % kSlots * bytes_;
      write.bytes = bytes_;
      write.immediate = static_cast<std::uint32_t>(first + i);
      write.cookie = first + i;
    }
    return endpoint_->post(link_, std::span(writes).first(count));
  }
  std::size_t completions() override { return poll(Event::Kind::kCompleted); }
  std::size_t arrivals() override { return poll(Event::Kind::kArrival); }

 private:
  std::size_t poll(Event::Kind wanted) {
    std::array<Event, 64> events;
    const std::size_t count = endpoint_->poll(events);
    std::size_t found = 0;
    for (std::size_t i = 0; i < count; ++i) {
      check(events[i].kind == wanted, "unexpected event: " + endpoint_->link_reason(link_));
      ++found;
    }
    return found;
  }
  std::uint32_t bytes_;
  std::vector<std::byte> memory_;
  std::unique_ptr<Endpoint> endpoint_;
  std::unique_ptr<LocalRegion> region_;
  std::unique_ptr<RemoteRegion> remote_;
  LinkId link_ = 0;
};

/// libfabric as its manual shows it, nothing around it. Lives until the process ends, so it frees
/// nothing.
class BareSide final : public Side {
 public:
  explicit BareSide(const Options& options)
      : bytes_(options.bytes), memory_(std::size_t{options.bytes} * kSlots) {
    fi_info* hints = ::fi_allocinfo();
    hints->caps = FI_RMA | FI_WRITE | FI_REMOTE_WRITE;
    hints->mode = FI_CONTEXT;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->fabric_attr->prov_name = ::strdup(options.provider.c_str());
    ok(::fi_getinfo(FI_VERSION(1, 17), options.bind.empty() ? nullptr : options.bind.c_str(),
                    nullptr, options.bind.empty() ? 0 : FI_SOURCE, hints, &info_),
       "fi_getinfo");
    ok(::fi_fabric(info_->fabric_attr, &fabric_, nullptr), "fi_fabric");
    ok(::fi_domain(fabric_, info_, &domain_, nullptr), "fi_domain");
    fi_cq_attr queue{};
    queue.size = 1024;
    queue.format = FI_CQ_FORMAT_DATA;
    ok(::fi_cq_open(domain_, &queue, &cq_, nullptr), "fi_cq_open");
    fi_av_attr addresses{};
    ok(::fi_av_open(domain_, &addresses, &av_, nullptr), "fi_av_open");
    ok(::fi_endpoint(domain_, info_, &endpoint_, nullptr), "fi_endpoint");
    ok(::fi_ep_bind(endpoint_, &av_->fid, 0), "fi_ep_bind");
    ok(::fi_ep_bind(endpoint_, &cq_->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind");
    ok(::fi_enable(endpoint_), "fi_enable");
    ok(::fi_mr_reg(domain_, memory_.data(), memory_.size(), FI_WRITE | FI_REMOTE_WRITE, 0, 4711, 0,
                   &region_, nullptr),
       "fi_mr_reg");
  }
  std::vector<std::string> describe() const override {
    char name[256];
    std::size_t bytes = sizeof(name);
    ok(::fi_getname(&endpoint_->fid, name, &bytes), "fi_getname");
    const bool virtual_addresses = (info_->domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0;
    const std::uint64_t target[2] = {
        ::fi_mr_key(region_),
        virtual_addresses ? reinterpret_cast<std::uintptr_t>(memory_.data()) : 0};
    return {to_hex(name, bytes), to_hex(target, sizeof(target))};
  }
  void connect(const std::vector<std::string>& description) override {
    const Bytes name = from_hex(description[0]);
    check(::fi_av_insert(av_, name.data(), 1, &peer_, 0, nullptr) == 1, "fi_av_insert");
    std::memcpy(target_, from_hex(description[1]).data(), sizeof(target_));
  }
  std::size_t send(std::uint64_t first, std::size_t count) override {
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t at = (first + i) % kSlots * bytes_;
      const ssize_t rc = ::fi_writedata(endpoint_, memory_.data() + at, bytes_,
                                        ::fi_mr_desc(region_), first + i, peer_, target_[1] + at,
                                        target_[0], &contexts_[(first + i) % contexts_.size()]);
      if (rc == -FI_EAGAIN) return i;
      ok(static_cast<int>(rc), "fi_writedata");
    }
    return count;
  }
  std::size_t completions() override { return poll(); }
  std::size_t arrivals() override { return poll(); }

 private:
  static void ok(int rc, const char* what) {
    check(rc == 0, std::string(what) + ": " + ::fi_strerror(-rc));
  }
  std::size_t poll() {
    std::array<fi_cq_data_entry, 64> entries;
    const ssize_t count = ::fi_cq_read(cq_, entries.data(), entries.size());
    check(count >= 0 || count == -FI_EAGAIN, "fi_cq_read");
    return count > 0 ? static_cast<std::size_t>(count) : 0;
  }
  std::uint32_t bytes_;
  std::vector<std::byte> memory_;
  std::vector<fi_context2> contexts_ = std::vector<fi_context2>(1024);
  fi_info* info_ = nullptr;
  fid_fabric* fabric_ = nullptr;
  fid_domain* domain_ = nullptr;
  fid_cq* cq_ = nullptr;
  fid_av* av_ = nullptr;
  fid_ep* endpoint_ = nullptr;
  fid_mr* region_ = nullptr;
  fi_addr_t peer_ = 0;
  std::uint64_t target_[2] = {};
};

std::unique_ptr<Side> make_side(const std::string& kind, const Options& options) {
  if (kind == "bare") return std::make_unique<BareSide>(options);
  return std::make_unique<EndpointSide>(options);
}

/// The receiving process: says where it is, then says when the warm-up and when everything has
/// arrived.
int run_receiver(const std::string& kind, const Options& options) {
  const auto side = make_side(kind, options);
  for (const std::string& line : side->describe()) std::cout << line << '\n';
  std::cout << std::flush;
  for (const std::uint64_t goal : {options.window, options.count}) {
    std::uint64_t seen = 0;
    const auto deadline = Clock::now() + std::chrono::seconds(60);
    while (seen < goal) {
      seen += side->arrivals();
      check(Clock::now() < deadline, "the sender went away");
    }
    std::cout << "arrived" << std::endl;
  }
  // The last writes may still have to be acknowledged. The sender ends this process.
  const auto deadline = Clock::now() + std::chrono::seconds(60);
  while (Clock::now() < deadline) side->arrivals();
  return 0;
}

/// Sends `count` writes with at most `window` outstanding and waits for the completions.
void send_all(Side& side, std::uint64_t count, std::uint64_t window) {
  std::uint64_t posted = 0;
  std::uint64_t completed = 0;
  const auto deadline = Clock::now() + std::chrono::seconds(60);
  while (completed < count) {
    const std::uint64_t room = std::min(window - (posted - completed), count - posted);
    if (room > 0) posted += side.send(posted, room);
    completed += side.completions();
    check(Clock::now() < deadline, "the receiver went away");
  }
}

/// One timed transfer; bytes per second.
double measure(const std::string& kind, const Options& options) {
  int out[2];
  check(::pipe2(out, O_CLOEXEC) == 0, "pipe2");
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
  std::vector<std::string> words = {"ofi_benchmark",
                                    "--peer",
                                    kind,
                                    "--provider",
                                    options.provider,
                                    "--bind",
                                    options.bind,
                                    "--bytes",
                                    std::to_string(options.bytes),
                                    "--count",
                                    std::to_string(options.count),
                                    "--window",
                                    std::to_string(options.window)};
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  pid_t child = -1;
  check(::posix_spawn(&child, "/proc/self/exe", &actions, nullptr, arguments.data(), environ) == 0,
        "posix_spawn");
  ::posix_spawn_file_actions_destroy(&actions);
  ::close(out[1]);
  std::FILE* const from = ::fdopen(out[0], "r");
  const auto line = [&] {
    std::string text;
    for (int c = std::fgetc(from); c != EOF && c != '\n'; c = std::fgetc(from))
      text += static_cast<char>(c);
    return text;
  };
  const auto side = make_side(kind, options);
  side->connect({line(), line()});
  send_all(*side, options.window, options.window);  // connects, faults pages in
  check(line() == "arrived", "the warm-up did not arrive");
  const auto start = Clock::now();
  send_all(*side, options.count, options.window);
  check(line() == "arrived", "the writes did not arrive");
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  ::fclose(from);
  return static_cast<double>(options.count) * options.bytes / seconds;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

int run(int argc, char** argv) {
  Options options;
  std::string peer;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    const std::string value = argv[i + 1];
    if (name == "--peer")
      peer = value;
    else if (name == "--provider")
      options.provider = value;
    else if (name == "--bind")
      options.bind = value;
    else if (name == "--bytes")
      options.bytes = static_cast<std::uint32_t>(std::stoul(value));
    else if (name == "--count")
      options.count = std::stoul(value);
    else if (name == "--window")
      options.window = std::stoul(value);
    else if (name == "--rounds")
      options.rounds = std::stoi(value);
    else if (name == "--json")
      options.json = value;
    else
      throw std::runtime_error("unknown option " + name);
  }
  if (!peer.empty()) return run_receiver(peer, options);

  std::vector<double> endpoint;
  std::vector<double> bare;
  std::vector<double> ratio;
  for (int round = 0; round < options.rounds; ++round) {
    // In turn, each first every other time: what else the machine does meets both alike.
    const bool endpoint_first = round % 2 == 0;
    if (endpoint_first) endpoint.push_back(measure("endpoint", options));
    bare.push_back(measure("bare", options));
    if (!endpoint_first) endpoint.push_back(measure("endpoint", options));
    ratio.push_back(endpoint.back() / bare.back());
    std::cerr << fmt::format("round {:2}: endpoint {:.2f} GB/s, bare {:.2f} GB/s, ratio {:.3f}\n",
                             round + 1, endpoint.back() / 1e9, bare.back() / 1e9, ratio.back());
  }
  nlohmann::json report;
  const std::uint32_t version = ::fi_version();
  report["benchmark"] = "ofi_benchmark";
  report["libfabric"] = fmt::format("{}.{}", FI_MAJOR(version), FI_MINOR(version));
  report["provider"] = options.provider;
  report["bind"] = options.bind;
  report["bytes_per_write"] = options.bytes;
  report["writes"] = options.count;
  report["window"] = options.window;
  report["rounds"] = options.rounds;
  report["endpoint_bytes_per_second"] = {{"median", median(endpoint)}, {"all", endpoint}};
  report["bare_bytes_per_second"] = {{"median", median(bare)}, {"all", bare}};
  report["ratio_of_medians"] = median(endpoint) / median(bare);
  report["median_of_ratios"] = median(ratio);
  if (!options.json.empty()) std::ofstream(options.json) << report.dump(2) << '\n';
  std::cout << report.dump(2) << std::endl;
  return 0;
}

}  // namespace
}  // namespace mk::fabric

int main(int argc, char** argv) {
  try {
    return mk::fabric::run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "ofi_benchmark: " << error.what() << '\n';
    return 1;
  }
}
