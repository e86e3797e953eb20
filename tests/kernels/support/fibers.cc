#include "tests/kernels/support/fibers.h"

#include <algorithm>

namespace mk::kernels::testing {
namespace {

constexpr std::size_t kStackBytes = 128 * 1024;

}  // namespace

void Fibers::add(std::uint32_t group, std::function<void()> body) {
  auto fiber = std::make_unique<Fiber>();
  fiber->group = group;
  fiber->body = std::move(body);
  fiber->stack.reset(new char[kStackBytes]);
  getcontext(&fiber->context);
  fiber->context.uc_stack.ss_sp = fiber->stack.get();
  fiber->context.uc_stack.ss_size = kStackBytes;
  fiber->context.uc_link = nullptr;
  // makecontext passes ints: the pointer goes in two halves.
  const auto self = reinterpret_cast<std::uintptr_t>(this);
  makecontext(&fiber->context, reinterpret_cast<void (*)()>(&Fibers::enter), 2,
              static_cast<unsigned>(self >> 32), static_cast<unsigned>(self & 0xffffffffu));
  fibers_.push_back(std::move(fiber));
}

void Fibers::enter(unsigned high, unsigned low) {
  auto* self = reinterpret_cast<Fibers*>(std::uintptr_t{high} << 32 | low);
  self->current_->body();
  self->current_->done = true;
  self->changed();
  self->leave();
}

void Fibers::resume(Fiber& fiber) {
  current_ = &fiber;
  swapcontext(&scheduler_, &fiber.context);
  current_ = nullptr;
}

void Fibers::leave() { swapcontext(&current_->context, &scheduler_); }

void Fibers::poll() {
  current_->polled_at = changes_;
  leave();
}

void Fibers::maybe_yield() {
  if (random_() % 4 == 0) leave();
}

Fibers::Fiber* Fibers::choose(bool outside_can) {
  ready_.clear();
  for (const auto& fiber : fibers_) {
    if (!fiber->done && fiber->polled_at != changes_) ready_.push_back(fiber.get());
  }
  if (ready_.empty()) return nullptr;
  switch (order_) {
    case Order::kRandom:
      if (outside_can && random_() % 4 == 0) return nullptr;
      break;
    case Order::kOutsideFirst:
      if (outside_can) return nullptr;
      break;
    case Order::kOutsideLast:
      break;
    case Order::kOneByOne:
      return ready_.front();
    case Order::kLastByLast:
      return ready_.back();
    case Order::kStarveOne: {
      const auto others =
          std::stable_partition(ready_.begin(), ready_.end(),
                                [&](const Fiber* fiber) { return fiber->group != starved_; });
      if (others == ready_.begin()) return outside_can ? nullptr : ready_.front();
      ready_.erase(others, ready_.end());
      if (outside_can && random_() % 2 == 0) return nullptr;
      break;
    }
  }
  return ready_[random_() % ready_.size()];
}

void Fibers::run(const std::function<bool()>& outside_can, const std::function<void()>& outside,
                 const std::function<void()>& stuck) {
  for (;;) {
    if (std::all_of(fibers_.begin(), fibers_.end(), [](const auto& fiber) { return fiber->done; }))
      return;
    const bool can = outside_can();
    Fiber* next = choose(can);
    if (next != nullptr) {
      resume(*next);
    } else if (can) {
      outside();
      changed();
    } else {
      stuck();
      changed();
    }
  }
}

}  // namespace mk::kernels::testing
