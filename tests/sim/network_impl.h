/// \file
/// The inside of Network: endpoints, links, and writes in flight.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "tests/sim/network.h"

namespace mk::sim {

class SimEndpoint;

/// A registered range. Its number is its key; numbers are never used again.
struct SimRegion {
  std::uint64_t number = 0;
  NodeId node = 0;
  fabric::MemoryDescriptor memory;
  FileId file = 0;
  std::uint32_t uses = 0;  ///< writes in flight that read it
};

/// One write between `post` and the poll that reports its end.
struct Flight {
  fabric::Write write;
  NodeId target = 0;
  std::shared_ptr<SimRegion> src;  ///< null: no payload
  std::uint64_t dst = 0;           ///< the region's number
  std::uint64_t flags = 0;
  std::shared_ptr<std::uint32_t> dst_uses;
  std::shared_ptr<std::uint32_t> flags_uses;
  bool ended = false;      ///< no payload of it lands any more
  bool completed = false;  ///< it ended well: its arrival may still be to come
};

struct SimLink {
  fabric::LinkId id = 0;
  std::uint64_t target = 0;  ///< the endpoint's number
  NodeId target_node = 0;
  bool up = true;
  std::string reason;
  InOrder flags;
  std::vector<std::shared_ptr<Flight>> flights;  ///< not yet reported
};

class Network::Impl {
 public:
  Impl(World& the_world, const NetworkPlan& the_plan, NetworkWatch& the_watch)
      : world(the_world), plan(the_plan), watch(the_watch) {}

  std::uint64_t delay() { return world.random.scaled(plan.delay_ns_min, plan.delay_ns_max); }
  SimEndpoint* endpoint(std::uint64_t number) const {
    const auto found = endpoints.find(number);
    return found == endpoints.end() ? nullptr : found->second;
  }

  World& world;
  const NetworkPlan plan;
  NetworkWatch& watch;
  std::map<std::uint64_t, SimEndpoint*> endpoints;              ///< by number
  std::map<std::uint64_t, std::shared_ptr<SimRegion>> regions;  ///< the living, by number
  std::uint64_t next_number = 1;
};

class SimEndpoint final : public fabric::Endpoint {
 public:
  SimEndpoint(Network::Impl& network, NodeId node, std::uint32_t rail, std::function<void()> wake);
  ~SimEndpoint() override;

  const fabric::Capabilities& capabilities() const override { return capabilities_; }
  fabric::Bytes address() const override;
  Result<std::unique_ptr<fabric::LocalRegion>> register_memory(
      const fabric::MemoryDescriptor& memory) override;
  Result<fabric::LinkId> connect(std::span<const std::byte> address,
                                 const std::string& peer_name) override;
  void disconnect(fabric::LinkId link) override;
  Result<std::unique_ptr<fabric::RemoteRegion>> import_region(
      fabric::LinkId link, std::span<const std::byte> key) override;
  std::string link_reason(fabric::LinkId link) const override;
  std::size_t post(fabric::LinkId link, std::span<const fabric::Write> writes) override;
  std::size_t poll(std::span<fabric::Event> events) override;

  /// From now on it does nothing more, and nobody minds what becomes of its memory.
  void kill();
  /// The link is in error from now on.
  void fail_link(SimLink& link, ErrorCode code, const std::string& reason);
  void fail_links_to(std::uint64_t target, const std::string& reason);
  void fail_links_to_node(NodeId target, const std::string& reason);
  /// Reports the event at the next poll.
  void report(const fabric::Event& event);

  const NodeId node;
  const std::uint32_t rail;
  const std::uint64_t number;
  bool dead = false;
  std::uint64_t flaps_until_ns = 0;
  std::uint64_t storms_until_ns = 0;
  std::size_t local_regions = 0;
  std::size_t remote_regions = 0;

  std::size_t link_count() const { return links_.size(); }
  std::size_t flight_count() const;

 private:
  struct Reported {
    fabric::Event event;
    std::shared_ptr<Flight> flight;  ///< that ends with it; may be null
  };

  void launch(SimLink& link, const fabric::Write& write);
  void land(const std::shared_ptr<Flight>& flight, std::uint64_t begin, std::uint64_t end);
  void show_flag(const std::shared_ptr<Flight>& flight);
  void reach_nothing(const std::shared_ptr<Flight>& flight, std::uint64_t key);
  void end(const std::shared_ptr<Flight>& flight, const fabric::Event& event);
  void let_go(Flight& flight);
  SimLink* find(fabric::LinkId link);

  Network::Impl& network_;
  World& world_;
  const std::function<void()> wake_;
  fabric::Capabilities capabilities_;
  std::map<fabric::LinkId, std::unique_ptr<SimLink>> links_;
  fabric::LinkId next_link_ = 0;
  std::deque<Reported> reported_;
  /// What closures hold: they find nothing when it is gone.
  std::shared_ptr<SimEndpoint*> self_ = std::make_shared<SimEndpoint*>(this);
};

}  // namespace mk::sim
