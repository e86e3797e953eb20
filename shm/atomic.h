/// \file
/// The only atomic operations of the ABI. All are at system scope: they order memory between a GPU,
/// the CPU threads and other processes alike. Words are plain integers in shared memory, naturally
/// aligned.
#pragma once

#include <cstdint>

#include "shm/platform.h"

#if defined(__CUDACC__)
#include <cuda/atomic>
#else
#include <atomic>
#endif

namespace mk::shm {

#if defined(__CUDACC__)
template <class T>
using SystemAtomicRef = cuda::atomic_ref<T, cuda::thread_scope_system>;
inline constexpr auto kRelaxed = cuda::memory_order_relaxed;
inline constexpr auto kAcquire = cuda::memory_order_acquire;
inline constexpr auto kRelease = cuda::memory_order_release;
inline constexpr auto kAcqRel = cuda::memory_order_acq_rel;
#else
template <class T>
using SystemAtomicRef = std::atomic_ref<T>;
inline constexpr auto kRelaxed = std::memory_order_relaxed;
inline constexpr auto kAcquire = std::memory_order_acquire;
inline constexpr auto kRelease = std::memory_order_release;
inline constexpr auto kAcqRel = std::memory_order_acq_rel;
#endif

/// Reads `word`; everything the writer stored before its matching `store_release` is visible
/// afterwards.
template <class T>
MK_HOST_DEVICE inline T load_acquire(const T* word) {
  // atomic_ref takes no const object before C++26; the load itself writes nothing.
  return SystemAtomicRef<T>(*const_cast<T*>(word)).load(kAcquire);
}

/// Reads `word` without ordering anything else.
template <class T>
MK_HOST_DEVICE inline T load_relaxed(const T* word) {
  return SystemAtomicRef<T>(*const_cast<T*>(word)).load(kRelaxed);
}

/// Writes `word` after all earlier stores of this thread are visible.
template <class T>
MK_HOST_DEVICE inline void store_release(T* word, T value) {
  SystemAtomicRef<T>(*word).store(value, kRelease);
}

/// Writes `word` without ordering anything else (single-writer counters).
template <class T>
MK_HOST_DEVICE inline void store_relaxed(T* word, T value) {
  SystemAtomicRef<T>(*word).store(value, kRelaxed);
}

/// store_release of `value` to words word(0) .. word(count - 1). On a GPU a release costs a fence
/// of the whole system, which waits for this thread's stores to the word before it: one is enough.
template <class T, class Word>
MK_HOST_DEVICE inline void store_release_all(std::uint32_t count, Word&& word, T value) {
#if defined(__CUDA_ARCH__)
  __threadfence_system();
  for (std::uint32_t i = 0; i < count; ++i) store_relaxed(word(i), value);
#else
  for (std::uint32_t i = 0; i < count; ++i) store_release(word(i), value);
#endif
}
/// The same of value(count - 1) .. value(0), in that order; as little code as can be.
template <class Word, class Value>
MK_HOST_DEVICE inline void store_release_back(std::uint64_t count, Word&& word, Value&& value) {
#if defined(__CUDA_ARCH__)
  __threadfence_system();
#pragma unroll 1
  for (std::uint64_t i = count; i-- > 0;) store_relaxed(word(i), value(i));
#else
  for (std::uint64_t i = count; i-- > 0;) store_release(word(i), value(i));
#endif
}

/// Adds to `word` and returns the old value; acquires and releases.
template <class T>
MK_HOST_DEVICE inline T fetch_add(T* word, T value) {
  return SystemAtomicRef<T>(*word).fetch_add(value, kAcqRel);
}

/// Replaces `expected` by `desired` if `word` holds it; returns whether it did. Acquires and
/// releases.
template <class T>
MK_HOST_DEVICE inline bool compare_exchange(T* word, T expected, T desired) {
  return SystemAtomicRef<T>(*word).compare_exchange_strong(expected, desired, kAcqRel, kAcquire);
}

}  // namespace mk::shm
