/// \file
/// Two nodes with a buffer of a GPU each, for the tests of GPU memory over a network.
#pragma once

#include "tests/daemon/fabric/fabric_fixture.h"

namespace mk::fabric {

inline FabricSetup ofi(const char* provider) {
  FabricSetup setup;
  setup.config.fabric = "ofi";
  setup.config.provider = provider;
  setup.config.bind_address = "127.0.0.1";
  return setup;
}

/// Two nodes, and a buffer of `bytes` of a GPU at each, one to be written to the other.
struct Pair {
  explicit Pair(const FabricSetup& setup, std::uint64_t bytes = 8192)
      : a(setup), b(setup), link(join(a, b)), source(a.memory(bytes)), target(b.memory(bytes)) {
    remote = import(a, link, target);
    fill_random({source.data(), source.bytes()}, bytes);
  }
  Write write(std::uint32_t flag, std::uint32_t epoch, std::uint64_t cookie, std::uint32_t bytes,
              std::uint64_t from = 0, std::uint64_t to = 0) const {
    return make_write(link, flag, epoch, cookie, source, from, *remote, to, bytes);
  }
  bool post(const Write& write) { return a.endpoint->post(link.id, {&write, 1}) == 1; }
  bool arrived(std::uint32_t bytes, std::uint64_t from = 0, std::uint64_t to = 0) const {
    return std::memcmp(target.data() + to, source.data() + from, bytes) == 0;
  }

  /// Before the memory: copies of it may be under way.
  ~Pair() {
    a.endpoint.reset();
    b.endpoint.reset();
  }

  Node a, b;
  TestLink link;
  Memory source, target;
  std::unique_ptr<RemoteRegion> remote;
};

}  // namespace mk::fabric
