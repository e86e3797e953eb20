/// \file
/// An endpoint that hands every call on to another one: what tests' NICs that differ in a few calls
/// begin with.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "daemon/fabric/fabric.h"

namespace mk::fabric {

class ForwardingNic : public Endpoint {
 public:
  explicit ForwardingNic(std::unique_ptr<Endpoint> inner) : inner_(std::move(inner)) {}

  const Capabilities& capabilities() const override { return inner_->capabilities(); }
  Bytes address() const override { return inner_->address(); }
  Result<std::unique_ptr<LocalRegion>> register_memory(const MemoryDescriptor& memory) override {
    return inner_->register_memory(memory);
  }
  Result<LinkId> connect(std::span<const std::byte> address, const std::string& name) override {
    return inner_->connect(address, name);
  }
  Bytes personal(Bytes address, PeerNumber peer) const override {
    return inner_->personal(std::move(address), peer);
  }
  Result<LinkId> connect_peer(PeerNumber peer, std::span<const std::byte> address,
                              const std::string& name) override {
    return inner_->connect_peer(peer, address, name);
  }
  void disconnect(LinkId link) override { inner_->disconnect(link); }
  Result<std::unique_ptr<RemoteRegion>> import_region(LinkId link,
                                                      std::span<const std::byte> key) override {
    return inner_->import_region(link, key);
  }
  std::string link_reason(LinkId link) const override { return inner_->link_reason(link); }
  std::size_t post(LinkId link, std::span<const Write> writes) override {
    return inner_->post(link, writes);
  }
  std::size_t poll(std::span<Event> events) override { return inner_->poll(events); }

 protected:
  Endpoint& inner() { return *inner_; }

 private:
  const std::unique_ptr<Endpoint> inner_;
};

}  // namespace mk::fabric
