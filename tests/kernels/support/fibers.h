/// \file
/// Many little threads of control in one thread, switched only where they ask for it, in an order
/// the test chooses. So that a run is a pure function of its seed, and "nobody can go on" is a
/// fact, not a time-out.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <vector>

namespace mk::kernels::testing {

/// Who goes next.
enum class Order {
  kRandom,        ///< anyone
  kOutsideFirst,  ///< the outside (the network) whenever it can
  kOutsideLast,   ///< the outside only when no fiber can
  kOneByOne,      ///< the first fiber that can, as long as it can
  kLastByLast,    ///< the same from the end
  kStarveOne,     ///< the fibers of one group only when nothing else can go on
};
inline constexpr Order kOrders[] = {Order::kRandom,   Order::kOutsideFirst, Order::kOutsideLast,
                                    Order::kOneByOne, Order::kLastByLast,   Order::kStarveOne};

class Fibers {
 public:
  Fibers(Order order, std::uint64_t seed) : order_(order), random_(seed) {}

  /// Before run. `group` is what kStarveOne starves.
  void add(std::uint32_t group, std::function<void()> body);

  /// The group kStarveOne starves.
  void starve(std::uint32_t group) { starved_ = group; }

  /// Runs all fibers to their ends. `outside_can` says whether the outside has something to do,
  /// `outside` does some of it. `stuck` is called when nobody can go on. It must change that (by
  /// making waits fail).
  void run(const std::function<bool()>& outside_can, const std::function<void()>& outside,
           const std::function<void()>& stuck);

  // From within a fiber:
  /// What this fiber looked for is not there yet; go on when something has changed.
  void poll();
  /// Something has changed that another fiber may look for.
  void changed() { ++changes_; }
  /// Maybe lets others go on here.
  void maybe_yield();

 private:
  struct Fiber {
    std::uint32_t group = 0;
    std::function<void()> body;
    std::unique_ptr<char[]> stack;
    ucontext_t context;
    std::uint64_t polled_at = 0;  ///< changes_ when it last found nothing
    bool done = false;
  };

  static void enter(unsigned high, unsigned low);
  void resume(Fiber& fiber);
  void leave();
  Fiber* choose(bool outside_can);

  Order order_;
  std::mt19937_64 random_;
  std::uint32_t starved_ = 0;
  std::uint64_t changes_ = 1;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> ready_;  ///< scratch of choose
  Fiber* current_ = nullptr;
  ucontext_t scheduler_;
};

}  // namespace mk::kernels::testing
