/// \file
/// What ranks do in the tests of operators' and sessions' ends, wherever their daemons run: in this
/// process or as their own.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/client/any_operator.h"

namespace mk::test {

/// Waits a random time below `most`, or, half of the time, not at all.
inline void dawdle(std::mt19937& random, std::chrono::microseconds most) {
  const auto draw = static_cast<std::int64_t>(random());
  if (draw % 2 == 0 || most.count() == 0) return;
  std::this_thread::sleep_for(std::chrono::microseconds(draw % most.count()));
}

/// One rank's whole life: attaches as `place` says, creates, waits for at most `pause`, so that
/// daemons' threads may sleep, launches, destroys and detaches, each at once or a little later.
inline void live_once(const AttachOptions& place, Kind kind, std::uint32_t round,
                      std::chrono::microseconds pause) {
  std::mt19937 random(round * 100 + place.rank);
  constexpr std::chrono::microseconds kShort{3000};
  auto session = Session::attach(place);
  ASSERT_TRUE(session) << session.error().message;
  auto made = AnyOperator::create(*session, kind, round);
  ASSERT_TRUE(made) << made.error().message;
  std::optional<AnyOperator> op(std::move(*made));
  dawdle(random, pause);
  const Status launched = op->launch(1 + round % 4);
  EXPECT_TRUE(launched) << "round " << round << ", rank " << place.rank << ": "
                        << launched.error().message;
  dawdle(random, random() % 2 == 0 ? kShort : kShort * 0);
  op.reset();
  dawdle(random, random() % 2 == 0 ? kShort : kShort * 0);
  const Status left = session->detach();
  EXPECT_TRUE(left) << "round " << round << ", rank " << place.rank << ": " << left.error().message;
}

/// Creates `rounds` operators of all kinds and many shapes, a few alive at a time, destroyed in
/// whatever order this rank likes. What a former one left behind in flags or memory would make a
/// launch wrong, or end it early. `look(round)` after each.
inline void come_and_go(Session& session, std::uint32_t rounds,
                        const std::function<void(std::uint32_t)>& look = {}) {
  std::mt19937 agreed(7);  // the same on all ranks
  std::mt19937 own(100 + session.options().rank);
  const auto draw = [&](std::size_t below) { return static_cast<std::uint32_t>(agreed() % below); };
  std::vector<AnyOperator> alive;
  for (std::uint32_t round = 0; round < rounds; ++round) {
    const Kind kind = kKinds[draw(kKinds.size())];
    const std::uint32_t size = draw(35);
    const std::uint32_t value = 1 + draw(4);
    auto op = AnyOperator::create(session, kind, size);
    ASSERT_TRUE(op) << "round " << round << ": " << op.error().message;
    const Status first = op->launch(value);
    ASSERT_TRUE(first) << "round " << round << ": " << first.error().message;
    if (!alive.empty()) {
      // An older one, between the other's launches.
      const Status older = alive[draw(alive.size())].launch(value);
      ASSERT_TRUE(older) << "round " << round << ": " << older.error().message;
    }
    if (own() % 4 == 0) dawdle(own, std::chrono::microseconds(2000));
    alive.push_back(std::move(*op));
    if (alive.size() == 3) {
      // All but one go, in this rank's own order.
      std::swap(alive.front(), alive[draw(alive.size())]);
      std::shuffle(alive.begin() + 1, alive.end(), own);
      while (alive.size() > 1) alive.pop_back();
    }
    if (look) look(round);
  }
  alive.clear();
  const Status together = session.barrier();
  EXPECT_TRUE(together) << together.error().message;
}

}  // namespace mk::test
