/// \file
/// The blocks of the CPU executor: threads that live as long as the operator and sleep between
/// launches.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "shm/host/result.h"

namespace mk::kernels {

/// What a block runs in a launch: `block` is its index in the pool. Must not throw.
class BlockWork {
 public:
  virtual void run_block(std::uint32_t block) = 0;

 protected:
  ~BlockWork() = default;
};

class BlockPool {
 public:
  /// Starts `blocks` threads. kSystem when the system refuses one; then none is left behind.
  static Result<std::unique_ptr<BlockPool>> start(std::uint32_t blocks);
  /// Ends the threads; none may be in `run`.
  ~BlockPool();
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  /// Runs `work` once on every block, all at the same time, and returns when all are done. What the
  /// caller stored before is visible to the blocks, and what they stored to the caller afterwards.
  /// One caller at a time.
  void run(BlockWork& work);

  std::uint32_t blocks() const { return static_cast<std::uint32_t>(threads_.size()); }

 private:
  BlockPool() = default;
  void serve(std::uint32_t block);

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  std::uint64_t round_ = 0;    ///< guarded by mutex_
  std::uint32_t running_ = 0;  ///< guarded by mutex_
  bool quit_ = false;          ///< guarded by mutex_
  BlockWork* work_ = nullptr;  ///< guarded by mutex_
  std::vector<std::thread> threads_;
};

}  // namespace mk::kernels
