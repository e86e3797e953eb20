/// \file
/// A fabric that does what the test says: how much of a submission it takes, which writes complete,
/// in which order, and what else it reports. Single-threaded.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/fabric/fabric.h"
#include "shm/limits.h"

namespace mk::daemon::test {

class FakeLocalRegion final : public fabric::LocalRegion {
 public:
  fabric::Bytes key() const override { return {}; }
};
class FakeRemoteRegion final : public fabric::RemoteRegion {};

class ScriptedEndpoint : public fabric::Endpoint {
 public:
  struct Submission {
    fabric::LinkId link = 0;
    std::vector<fabric::Write> writes;
  };

  fabric::Capabilities caps{.name = "scripted", .link_depth = 1024};
  std::vector<Submission> submissions;  ///< as taken, in order; empty ones left out
  std::vector<std::size_t> offered;     ///< the size of every offer, taken or not
  std::deque<fabric::Event> events;     ///< what the next polls report
  bool complete_at_once = false;        ///< every taken write completes on the next poll
  std::optional<std::uint64_t> due_ns;  ///< the answer of next_due_ns
  std::function<void()> on_poll;        ///< called by each poll that has something to report
  /// How many of the writes offered on the link are taken; empty: all.
  std::function<std::size_t(fabric::LinkId, std::size_t)> accept;

  void complete(std::uint64_t cookie) {
    events.push_back({.kind = fabric::Event::Kind::kCompleted, .cookie = cookie});
  }
  void fail(std::uint64_t cookie) {
    events.push_back(
        {.kind = fabric::Event::Kind::kFailed, .cookie = cookie, .code = ErrorCode::kLinkDown});
  }
  void arrive(std::uint32_t immediate, fabric::PeerNumber peer = fabric::kAnyPeer) {
    events.push_back({.kind = fabric::Event::Kind::kArrival, .immediate = immediate, .peer = peer});
  }
  void link_down(fabric::LinkId link) {
    events.push_back(
        {.kind = fabric::Event::Kind::kLinkDown, .link = link, .code = ErrorCode::kUnavailable});
  }

  /// Every write taken so far, over all submissions.
  std::vector<fabric::Write> writes() const {
    std::vector<fabric::Write> all;
    for (const auto& submission : submissions)
      all.insert(all.end(), submission.writes.begin(), submission.writes.end());
    return all;
  }

  // -- fabric::Endpoint
  // ----------------------------------------------------------------------------------------------
  const fabric::Capabilities& capabilities() const override { return caps; }
  fabric::Bytes address() const override { return {}; }
  Result<std::unique_ptr<fabric::LocalRegion>> register_memory(
      const fabric::MemoryDescriptor&) override {
    return std::make_unique<FakeLocalRegion>();
  }
  Result<fabric::LinkId> connect(std::span<const std::byte>, const std::string&) override {
    return next_link_++;
  }
  void disconnect(fabric::LinkId) override {}
  Result<std::unique_ptr<fabric::RemoteRegion>> import_region(fabric::LinkId,
                                                              std::span<const std::byte>) override {
    return std::make_unique<FakeRemoteRegion>();
  }
  std::size_t post(fabric::LinkId link, std::span<const fabric::Write> writes) override {
    offered.push_back(writes.size());
    const std::size_t taken =
        accept ? std::min(accept(link, writes.size()), writes.size()) : writes.size();
    if (taken != 0)
      submissions.push_back(
          {link, {writes.begin(), writes.begin() + static_cast<std::ptrdiff_t>(taken)}});
    if (complete_at_once) {
      for (std::size_t i = 0; i < taken; ++i) complete(writes[i].cookie);
    }
    return taken;
  }
  std::size_t poll(std::span<fabric::Event> out) override {
    if (on_poll && !events.empty()) on_poll();
    const std::size_t count = std::min(out.size(), events.size());
    std::copy_n(events.begin(), count, out.begin());
    events.erase(events.begin(), events.begin() + static_cast<std::ptrdiff_t>(count));
    return count;
  }
  std::optional<std::uint64_t> next_due_ns() const override { return due_ns; }

 private:
  fabric::LinkId next_link_ = 0;
};

}  // namespace mk::daemon::test
