/// \file
/// Many threads of control over one virtual clock, in one real thread: what each does takes the
/// virtual time that it says, and nothing else does. A run is a pure function of its inputs.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <queue>
#include <vector>

namespace mk::sim {

class VirtualThreads {
 public:
  /// `groups`: of threads that look for the same things, say those of a rank.
  explicit VirtualThreads(std::uint32_t groups) : waiting_(groups) {}

  /// Before run.
  void add(std::uint32_t group, std::function<void()> body);
  /// `ran(group)`: after each stretch of a thread of that group, before time passes.
  void on_switch(std::function<void(std::uint32_t group)> ran) { ran_ = std::move(ran); }
  /// Runs all threads to their ends. False: some wait for what nobody will bring; the clock was set
  /// far ahead then, so that their waits fail.
  bool run();

  double now_us() const { return now_us_; }
  std::uint64_t now_ns() const { return static_cast<std::uint64_t>(now_us_ * 1e3); }
  /// Calls `action` at that time, which is not past.
  void at(double time_us, std::function<void()> action);
  /// Threads of the group that wait look again.
  void wake(std::uint32_t group);

  // From within a thread:
  /// Goes on at that time.
  void sleep_until(double time_us);
  /// This thread found nothing: it goes on after a `wake` of its group.
  void wait();

 private:
  struct Thread {
    std::uint32_t group = 0;
    std::function<void()> body;
    std::unique_ptr<char[]> stack;
    ucontext_t context;
    bool done = false;
  };
  struct Event {
    double time_us;
    std::uint64_t number;  ///< of equal times the first goes first
    Thread* thread;        ///< or
    std::function<void()> action;
    bool operator<(const Event& other) const {
      return time_us != other.time_us ? time_us > other.time_us : number > other.number;
    }
  };

  static void enter(unsigned high, unsigned low);
  void resume(Thread& thread);
  void leave();
  bool step();

  double now_us_ = 0;
  bool stuck_ = false;
  std::uint64_t events_ = 0;
  std::size_t running_ = 0;
  std::priority_queue<Event> queue_;
  std::deque<Thread*> ready_;
  std::vector<std::vector<Thread*>> waiting_;  ///< by group
  std::vector<std::unique_ptr<Thread>> threads_;
  std::function<void(std::uint32_t)> ran_;
  Thread* current_ = nullptr;
  ucontext_t scheduler_;
};

/// A link, or a memory: it serves one at a time, in the order of asking.
class Server {
 public:
  /// When `us` of service are done that begin no sooner than `from_us`.
  double serve(double from_us, double us) {
    free_us_ = (free_us_ > from_us ? free_us_ : from_us) + us;
    return free_us_;
  }

 private:
  double free_us_ = 0;
};

}  // namespace mk::sim
