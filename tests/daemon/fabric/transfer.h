/// \file
/// Writes over a link of their own: whether two nodes still reach each other, and what is under way
/// when they do not.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "tests/daemon/fabric/fabric_fixture.h"

namespace mk::fabric {

/// Joins `a` to `b`, writes at odd offsets, compares every byte, and takes the link away.
inline void expect_transfer(Node& a, Node& b, std::uint32_t epoch) {
  const TestLink link = join(a, b);
  const Memory source = a.memory(100'000);
  const Memory target = b.memory(100'000);
  const auto remote = import(a, link, target);
  fill_random({source.data(), source.bytes()}, epoch);
  const Write write = make_write(link, 1, epoch, epoch, source, 1, *remote, 3, 99'000);
  ASSERT_TRUE(post_all(a, link.id, {&write, 1}, {&a, &b}));
  ASSERT_TRUE(pump({&a, &b}, [&] { return b.flag(1) == epoch && a.completed.contains(epoch); }));
  ASSERT_EQ(0, std::memcmp(source.data() + 1, target.data() + 3, 99'000));
  a.endpoint->disconnect(link.id);
  for (int i = 0; i < 4; ++i) a.poll();
}

/// Eight writes of 1 MiB, posted over a link of their own: what is under way when trouble comes.
struct EightWrites {
  EightWrites(Node& a, Node& b)
      : link(join(a, b)),
        source(a.memory(8 << 20)),
        target(b.memory(8 << 20)),
        remote(import(a, link, target)) {
    std::vector<Write> writes;
    for (std::uint32_t i = 0; i < 8; ++i)
      writes.push_back(
          make_write(link, 10 + i, 1, 100 + i, source, i << 20, *remote, i << 20, 1 << 20));
    posted = post_all(a, link.id, writes, {&a, &b});
  }

  const TestLink link;
  const Memory source, target;
  const std::unique_ptr<RemoteRegion> remote;  ///< named by the writes until all are reported
  bool posted = false;
};

}  // namespace mk::fabric
