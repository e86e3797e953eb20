#include "kernels/cpu/block_pool.h"

#include <pthread.h>
#include <sys/prctl.h>

#include <system_error>

#include "kernels/cpu/one_thread.h"

namespace mk::kernels {

Result<std::unique_ptr<BlockPool>> BlockPool::start(std::uint32_t blocks) {
  std::unique_ptr<BlockPool> pool(new BlockPool);
  pool->threads_.reserve(blocks);
  for (std::uint32_t block = 0; block < blocks; ++block) {
    try {
      pool->threads_.emplace_back([raw = pool.get(), block] { raw->serve(block); });
    } catch (const std::system_error& error) {
      return fail_errno(error.code().value(), "cannot start block thread {} of {}", block, blocks);
    }
  }
  return pool;
}

BlockPool::~BlockPool() {
  {
    std::lock_guard lock(mutex_);
    quit_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void BlockPool::run(BlockWork& work) {
  std::unique_lock lock(mutex_);
  work_ = &work;
  running_ = blocks();
  ++round_;
  wake_.notify_all();
  done_.wait(lock, [&] { return running_ == 0; });
}

void BlockPool::serve(std::uint32_t block) {
  pthread_setname_np(pthread_self(), "mk-block");
  // Sleeps of 20 µs shall take 20 µs, not the default slack of 50 more. Best effort.
  prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);
  use_one_thread();
  std::uint64_t seen = 0;
  for (;;) {
    BlockWork* work = nullptr;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return quit_ || round_ != seen; });
      if (quit_) return;
      seen = round_;
      work = work_;
    }
    work->run_block(block);
    std::lock_guard lock(mutex_);
    if (--running_ == 0) done_.notify_one();
  }
}

}  // namespace mk::kernels
