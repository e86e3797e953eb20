/// \file
/// A network for single-threaded tests: endpoints of one process that copy at once, count
/// everything they hand out, and refuse or fail on demand.
#pragma once

#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "daemon/fabric/fabric.h"
#include "shm/flag.h"
#include "shm/host/result.h"

namespace mk::daemon::test {

/// What all endpoints of a test share: who may be written to.
struct FakeMemory {
  struct Range {
    std::byte* address;
    std::uint64_t bytes;
  };
  std::map<std::uint64_t, Range> ranges;  ///< by key
  std::uint64_t next_key = 1;
};

/// One endpoint's switches and counts, for the test.
struct FakeNic {
  fabric::DeliveryContract contract = fabric::DeliveryContract::kOrdered;
  std::string name = "fake";
  fabric::Bytes address = {std::byte{7}};
  std::string refuse_register;  ///< the error's text; empty: registers
  ErrorCode refuse_code = ErrorCode::kSystem;
  bool refuse_connect = false;
  bool device_memory = false;         ///< before the endpoint is made
  std::uint32_t gpu_regions_max = 0;  ///< as above
  std::string gpu_path = "staged through host memory";
  std::string gpu_path_why = "the fake NIC reaches no GPU";
  std::uint64_t image_bytes = 0;      ///< of GPU memory that is staged; 0: it is not
  std::function<void()> on_register;  ///< called by register_memory; may throw
  bool refuse_import = false;
  bool hold_completions = false;
  std::function<void()> on_connect;      ///< called by connect; may block
  std::deque<std::uint32_t> arrivals;    ///< immediates that the next polls report
  std::function<void()> on_import;       ///< called by import_region; may block
  std::set<fabric::LinkId> break_links;  ///< reported as down by the next poll

  int local_regions = 0;
  int remote_regions = 0;
  int links = 0;
  int connects = 0;
  int writes = 0;
  std::optional<fabric::MemoryDescriptor> gpu_memory;  ///< registered last
  std::vector<fabric::LinkId> connected;               ///< every link ever, in order
  std::vector<fabric::Bytes> connected_to;             ///< every try's address, in order
};

class FakeEndpoint final : public fabric::Endpoint {
 public:
  FakeEndpoint(std::shared_ptr<FakeMemory> memory, std::shared_ptr<FakeNic> nic)
      : memory_(std::move(memory)), nic_(std::move(nic)) {
    capabilities_.name = nic_->name;
    capabilities_.contract = nic_->contract;
    capabilities_.link_depth = 64;
    capabilities_.device_memory = nic_->device_memory;
    capabilities_.gpu_regions_max = nic_->gpu_regions_max;
  }

  const fabric::Capabilities& capabilities() const override { return capabilities_; }
  fabric::Bytes address() const override { return nic_->address; }

  Result<std::unique_ptr<fabric::LocalRegion>> register_memory(
      const fabric::MemoryDescriptor& memory) override {
    if (!nic_->refuse_register.empty()) {
      return tl::unexpected<Error>(Error{nic_->refuse_code, nic_->refuse_register});
    }
    if (nic_->on_register) nic_->on_register();
    if (memory.device && nic_->image_bytes != 0 && !memory.no_image.empty()) {
      return fail(ErrorCode::kLimitExceeded, "{}", memory.no_image);
    }
    if (memory.device && nic_->gpu_regions_max != 0 && gpu_regions_ == nic_->gpu_regions_max)
      return fail(ErrorCode::kLimitExceeded, "this rail is full");
    auto region = std::make_unique<Local>(*this, memory);
    if (memory.device) {
      region->image_bytes = nic_->image_bytes;
      nic_->gpu_memory = memory;
      gpu_path_ = region->gpu_path = nic_->gpu_path;
      region->gpu_path_why = nic_->gpu_path_why;
    }
    return region;
  }
  Result<fabric::LinkId> connect(std::span<const std::byte> address,
                                 const std::string& peer) override {
    ++nic_->connects;
    if (nic_->on_connect) nic_->on_connect();
    nic_->connected_to.emplace_back(address.begin(), address.end());
    if (nic_->refuse_connect) return fail(ErrorCode::kUnavailable, "no route to {}", peer);
    ++nic_->links;
    nic_->connected.push_back(next_link_);
    return next_link_++;
  }
  void disconnect(fabric::LinkId) override { --nic_->links; }
  std::string gpu_path() const override { return gpu_path_; }
  Result<std::unique_ptr<fabric::RemoteRegion>> import_region(
      fabric::LinkId, std::span<const std::byte> key) override {
    if (nic_->on_import) nic_->on_import();
    std::uint64_t number = 0;
    if (key.size() != sizeof number || nic_->refuse_import) {
      return fail(ErrorCode::kUnavailable, "no such region");
    }
    std::memcpy(&number, key.data(), sizeof number);
    return std::make_unique<Remote>(*this, number);
  }

  std::size_t post(fabric::LinkId link, std::span<const fabric::Write> writes) override {
    for (const fabric::Write& write : writes) {
      ++nic_->writes;
      if (write.bytes != 0) {
        const auto* from = static_cast<const Local*>(write.src);
        std::byte* to = remote_address(write.dst);
        if (to != nullptr) {
          std::memcpy(to + write.dst_offset, from->memory.address + write.src_offset, write.bytes);
        }
      }
      if (write.flags != nullptr) {
        if (auto* flags = reinterpret_cast<std::uint32_t*>(remote_address(write.flags))) {
          shm::flag_publish(flags + write.flag_index, write.epoch);
        }
      }
      done_.push_back({fabric::Event::Kind::kCompleted, link, write.cookie, 0, ErrorCode::kOk});
    }
    return writes.size();
  }
  std::size_t poll(std::span<fabric::Event> events) override {
    std::size_t count = 0;
    for (const fabric::LinkId link : std::exchange(nic_->break_links, {})) {
      if (count == events.size()) break;
      events[count++] = {fabric::Event::Kind::kLinkDown, link, 0, 0, ErrorCode::kLinkDown};
    }
    while (!nic_->arrivals.empty() && count < events.size()) {
      events[count++] = {.kind = fabric::Event::Kind::kArrival,
                         .immediate = nic_->arrivals.front()};
      nic_->arrivals.pop_front();
    }
    while (!nic_->hold_completions && !done_.empty() && count < events.size()) {
      events[count++] = done_.front();
      done_.pop_front();
    }
    return count;
  }

 private:
  struct Local final : fabric::LocalRegion {
    Local(FakeEndpoint& endpoint, const fabric::MemoryDescriptor& described)
        : owner(endpoint), memory(described), number(endpoint.memory_->next_key++) {
      owner.memory_->ranges[number] = {memory.address, memory.bytes};
      ++owner.nic_->local_regions;
      if (memory.device) ++owner.gpu_regions_;
    }
    ~Local() override {
      owner.memory_->ranges.erase(number);
      --owner.nic_->local_regions;
      if (memory.device) --owner.gpu_regions_;
    }
    fabric::Bytes key() const override {
      fabric::Bytes bytes(sizeof number);
      std::memcpy(bytes.data(), &number, sizeof number);
      return bytes;
    }
    FakeEndpoint& owner;
    const fabric::MemoryDescriptor memory;
    const std::uint64_t number;
  };
  struct Remote final : fabric::RemoteRegion {
    Remote(FakeEndpoint& endpoint, std::uint64_t key) : owner(endpoint), number(key) {
      ++owner.nic_->remote_regions;
    }
    ~Remote() override { --owner.nic_->remote_regions; }
    FakeEndpoint& owner;
    const std::uint64_t number;
  };

  std::byte* remote_address(const fabric::RemoteRegion* region) const {
    const auto found = memory_->ranges.find(static_cast<const Remote*>(region)->number);
    return found == memory_->ranges.end() ? nullptr : found->second.address;
  }

  std::shared_ptr<FakeMemory> memory_;
  std::shared_ptr<FakeNic> nic_;
  fabric::Capabilities capabilities_;
  std::string gpu_path_;
  std::uint32_t gpu_regions_ = 0;
  fabric::LinkId next_link_ = 1;
  std::deque<fabric::Event> done_;
};

}  // namespace mk::daemon::test
