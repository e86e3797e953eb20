#include "tests/sim/operators/virtual_threads.h"

#include <algorithm>
#include <utility>

namespace mk::sim {
namespace {

constexpr std::size_t kStackBytes = 128 * 1024;
/// Longer than any deadline of a wait.
constexpr double kFarAheadUs = 1e12;

}  // namespace

void VirtualThreads::add(std::uint32_t group, std::function<void()> body) {
  auto thread = std::make_unique<Thread>();
  thread->group = group;
  thread->body = std::move(body);
  thread->stack.reset(new char[kStackBytes]);
  getcontext(&thread->context);
  thread->context.uc_stack.ss_sp = thread->stack.get();
  thread->context.uc_stack.ss_size = kStackBytes;
  thread->context.uc_link = nullptr;
  // makecontext passes ints: the pointer goes in two halves.
  const auto self = reinterpret_cast<std::uintptr_t>(this);
  makecontext(&thread->context, reinterpret_cast<void (*)()>(&VirtualThreads::enter), 2,
              static_cast<unsigned>(self >> 32), static_cast<unsigned>(self & 0xffffffffu));
  ready_.push_back(thread.get());
  ++running_;
  threads_.push_back(std::move(thread));
}

void VirtualThreads::enter(unsigned high, unsigned low) {
  auto* self = reinterpret_cast<VirtualThreads*>(std::uintptr_t{high} << 32 | low);
  self->current_->body();
  self->current_->done = true;
  --self->running_;
  self->wake(self->current_->group);
  self->leave();
}

void VirtualThreads::resume(Thread& thread) {
  current_ = &thread;
  swapcontext(&scheduler_, &thread.context);
  current_ = nullptr;
  if (thread.done) thread.stack.reset();
  if (ran_) ran_(thread.group);
}

void VirtualThreads::leave() { swapcontext(&current_->context, &scheduler_); }

void VirtualThreads::at(double time_us, std::function<void()> action) {
  queue_.push({std::max(time_us, now_us_), events_++, nullptr, std::move(action)});
}

void VirtualThreads::wake(std::uint32_t group) {
  auto& waiting = waiting_[group];
  ready_.insert(ready_.end(), waiting.begin(), waiting.end());
  waiting.clear();
}

void VirtualThreads::sleep_until(double time_us) {
  if (time_us <= now_us_) return;
  queue_.push({time_us, events_++, current_, nullptr});
  leave();
}

void VirtualThreads::wait() {
  waiting_[current_->group].push_back(current_);
  leave();
}

/// False: nobody can go on.
bool VirtualThreads::step() {
  if (!ready_.empty()) {
    Thread* const next = ready_.front();
    ready_.pop_front();
    resume(*next);
    return true;
  }
  if (queue_.empty()) return false;
  const Event event = queue_.top();
  queue_.pop();
  now_us_ = event.time_us;
  if (event.thread != nullptr) {
    resume(*event.thread);
  } else {
    event.action();
  }
  return true;
}

bool VirtualThreads::run() {
  while (running_ != 0) {
    if (step()) continue;
    stuck_ = true;
    now_us_ += kFarAheadUs;
    for (std::uint32_t group = 0; group < waiting_.size(); ++group) wake(group);
  }
  // Commands may still be on their way when all have ended.
  while (step()) {
  }
  return !stuck_;
}

}  // namespace mk::sim
