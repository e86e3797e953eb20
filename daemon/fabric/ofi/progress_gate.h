/// \file
/// Keeps changes of the provider's table of registrations apart from its progress, for a provider
/// that does not do so itself. One such: `net` of libfabric 1.17 puts regions in and takes them out
/// without the lock under which a poll looks for the target of a write. Another region may then not
/// be found, and the peer's connection is ended. (Mended in 1.18, where the provider is called
/// tcp.)
#pragma once

#include <atomic>
#include <mutex>

namespace mk::fabric::ofi {

class ProgressGate {
 public:
  explicit ProgressGate(bool needed) : needed_(needed) {}

  /// The proxy thread's calls that may make progress. Nothing is called while the table changes:
  /// the next poll is soon enough.
  template <class Call>
  void pass(Call&& call) {
    if (!needed_) return call();
    if (changes_.load(std::memory_order_acquire) != 0) return;
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (lock.owns_lock()) call();
  }

  /// The control thread's registrations and deregistrations. Waits for the call that the proxy is
  /// in, not for more: a thread that polls without pause would else keep the lock for itself.
  template <class Call>
  void change(Call&& call) {
    if (!needed_) return call();
    changes_.fetch_add(1, std::memory_order_acq_rel);
    {
      const std::lock_guard lock(mutex_);
      call();
    }
    changes_.fetch_sub(1, std::memory_order_acq_rel);
  }

 private:
  const bool needed_;
  std::atomic<int> changes_{0};
  std::mutex mutex_;
};

}  // namespace mk::fabric::ofi
