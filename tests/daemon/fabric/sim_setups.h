/// \file
/// The simulator's network as one more fabric: simulated time goes on while endpoints are polled,
/// by a few things that happen each time.
#pragma once

#include <mutex>
#include <set>

#include "tests/daemon/fabric/fabric_fixture.h"
#include "tests/sim/network.h"

namespace mk::fabric {

/// One simulated network for all endpoints that are opened on it.
class SimFabric : public std::enable_shared_from_this<SimFabric> {
 public:
  SimFabric(DeliveryContract contract, std::uint64_t seed)
      : world_(seed, false), network_(world_, plan(contract), watch_) {}

  Result<std::unique_ptr<Endpoint>> open() {
    const std::lock_guard lock(mutex_);
    const sim::NodeId node = next_node_++;
    watch_.living.insert(node);
    return std::make_unique<Port>(shared_from_this(), network_.open(node, 0, [] {}), node);
  }

  /// All links fail, and for a while of simulated time none can be made.
  void break_links() {
    constexpr std::uint64_t kDownNs = 2 * sim::kMillisecond;
    const std::lock_guard lock(mutex_);
    for (const sim::NodeId node : watch_.living) network_.flap(node, 0, kDownNs);
    world_.after(kDownNs, [] {});
  }

 private:
  static sim::NetworkPlan plan(DeliveryContract contract) {
    sim::NetworkPlan made;
    made.contract = contract;
    made.link_depth = 256;
    made.short_posts = 200'000;
    made.late_arrivals = 500'000;
    return made;
  }

  /// Links break only as tests ask for it. Nobody may lose touch with a node that lives.
  struct Watch final : sim::NetworkWatch {
    void on_data(const sim::Landing&) override {}
    void on_flag(sim::FileId) override {}
    void on_trouble(sim::NodeId, sim::NodeId, std::uint64_t) override {}
    bool may_have_lost_touch(sim::NodeId, sim::NodeId owner) override {
      return !living.contains(owner);
    }
    std::set<sim::NodeId> living;
  };

  /// An endpoint, by one thread at a time: the simulator knows only one.
  class Port final : public Endpoint {
   public:
    Port(std::shared_ptr<SimFabric> fabric, std::unique_ptr<Endpoint> inner, sim::NodeId node)
        : fabric_(std::move(fabric)), inner_(std::move(inner)), node_(node) {}
    /// Its node dies, and the others notice.
    ~Port() override {
      const std::lock_guard lock(fabric_->mutex_);
      fabric_->network_.kill(node_);
      fabric_->watch_.living.erase(node_);
      inner_.reset();
    }
    const Capabilities& capabilities() const override { return inner_->capabilities(); }
    Bytes address() const override { return inner_->address(); }
    Result<std::unique_ptr<LocalRegion>> register_memory(const MemoryDescriptor& memory) override {
      const std::lock_guard lock(fabric_->mutex_);
      MK_ASSIGN_OR_RETURN(auto region, inner_->register_memory(memory));
      return std::make_unique<OwnedLocal>(fabric_, std::move(region));
    }
    Result<LinkId> connect(std::span<const std::byte> address, const std::string& name) override {
      const std::lock_guard lock(fabric_->mutex_);
      return inner_->connect(address, name);
    }
    void disconnect(LinkId link) override {
      const std::lock_guard lock(fabric_->mutex_);
      inner_->disconnect(link);
    }
    std::string link_reason(LinkId link) const override {
      const std::lock_guard lock(fabric_->mutex_);
      return inner_->link_reason(link);
    }
    Result<std::unique_ptr<RemoteRegion>> import_region(LinkId link,
                                                        std::span<const std::byte> key) override {
      const std::lock_guard lock(fabric_->mutex_);
      MK_ASSIGN_OR_RETURN(auto region, inner_->import_region(link, key));
      return std::make_unique<Owned<RemoteRegion>>(fabric_, std::move(region));
    }
    std::size_t post(LinkId link, std::span<const Write> writes) override {
      const std::lock_guard lock(fabric_->mutex_);
      std::vector<Write> own(writes.begin(), writes.end());
      for (Write& write : own) {
        write.src = inner_of<LocalRegion>(write.src);
        write.dst = inner_of<RemoteRegion>(write.dst);
        write.flags = inner_of<RemoteRegion>(write.flags);
      }
      return inner_->post(link, own);
    }
    std::size_t poll(std::span<Event> events) override {
      const std::lock_guard lock(fabric_->mutex_);
      for (std::uint64_t steps = fabric_->world_.random.below(8); steps > 0; --steps)
        fabric_->world_.step();
      const auto& violation = fabric_->world_.violation();
      EXPECT_FALSE(violation) << *violation;
      return inner_->poll(events);
    }

   private:
    /// A region that goes while nobody else is in the simulator.
    template <class Region>
    struct Owned : Region {
      Owned(std::shared_ptr<SimFabric> of, std::unique_ptr<Region> region)
          : fabric(std::move(of)), inner(std::move(region)) {}
      ~Owned() override {
        const std::lock_guard lock(fabric->mutex_);
        inner.reset();
      }
      std::shared_ptr<SimFabric> fabric;
      std::unique_ptr<Region> inner;
    };
    struct OwnedLocal final : Owned<LocalRegion> {
      using Owned::Owned;
      Bytes key() const override { return inner->key(); }
    };
    template <class Region>
    static const Region* inner_of(const Region* region) {
      return region == nullptr ? nullptr : static_cast<const Owned<Region>*>(region)->inner.get();
    }

    const std::shared_ptr<SimFabric> fabric_;
    std::unique_ptr<Endpoint> inner_;
    const sim::NodeId node_;
  };

  std::mutex mutex_;
  sim::World world_;
  Watch watch_;
  sim::Network network_;
  sim::NodeId next_node_ = 0;
};

/// Both contracts, and staging over the one without order.
inline std::vector<FabricSetup> sim_setups() {
  const auto one = [](const char* name, DeliveryContract contract, std::uint64_t seed) {
    const auto fabric = std::make_shared<SimFabric>(contract, seed);
    FabricSetup setup;
    setup.name = name;
    setup.opener = [fabric] { return fabric->open(); };
    setup.may_take_fewer = true;
    setup.break_links = [fabric] { fabric->break_links(); };
    return setup;
  };
  std::vector<FabricSetup> setups{one("sim_ordered", DeliveryContract::kOrdered, 1),
                                  one("sim_unordered", DeliveryContract::kUnordered, 2)};
  const FabricSetup plain = one("", DeliveryContract::kUnordered, 3);
  const FabricSetup carrier = one("", DeliveryContract::kUnordered, 4);
  setups.push_back(with_gpus("sim_staged", plain, carrier));
  setups.back().break_links = [plain, carrier] {
    plain.break_links();
    carrier.break_links();
  };
  return setups;
}

}  // namespace mk::fabric
