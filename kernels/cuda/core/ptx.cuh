/// \file
/// The few sm_90a instructions that CuTe's atoms lack or wrap without a deadline: mbarriers whose
/// waits end, bulk-store waits, proxy fences, register reallocation, flags. Everything else (wgmma,
/// TMA, stmatrix, cluster barriers) comes from cute/arch. Each function is one instruction, or a
/// loop around one.
#pragma once

#include <cstdint>

namespace mk::kernels::cuda::ptx {

/// The 32-bit address of a shared-memory object, as the instructions below take it.
__device__ __forceinline__ std::uint32_t shared_address(const void* object) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(object));
}

/// Nanoseconds of the GPU-wide timer. It ticks coarsely (about a microsecond): for deadlines, not
/// for measuring.
__device__ __forceinline__ std::uint64_t now_ns() {
  std::uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

/// Where another's wait depends on this thread. A build that tests the waits defines
/// MK_CUDA_DAWDLE_NS: then one time in eight it is held up here, for up to so long.
__device__ __forceinline__ void may_dawdle() {
#if defined(MK_CUDA_DAWDLE_NS)
  std::uint32_t dice = static_cast<std::uint32_t>(clock64()) * 2654435761u ^ blockIdx.x * 40503u;
  dice = (dice ^ dice >> 15) * 2246822519u;
  dice ^= dice >> 13;
  if (dice % 8 != 0) return;
  const std::uint64_t end_ns = now_ns() + dice / 8 % (MK_CUDA_DAWDLE_NS);
  while (now_ns() < end_ns) __nanosleep(500);
#endif
}

// ---- mbarriers ----------------------------------------------------------------------------------

/// After this long in one wait, a barrier between the warps of a block or cluster counts as our own
/// bug: the kernel traps rather than hang. Waits for other ranks are a readiness gate's, whose own
/// deadline must be shorter and does not trap.
inline constexpr std::uint64_t kBlockDeadlineNs = 15ull * 60 * 1000 * 1000 * 1000;

__device__ __forceinline__ void mbarrier_init(std::uint64_t* barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

/// The barrier's memory may be used for something else.
__device__ __forceinline__ void mbarrier_invalidate(std::uint64_t* barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

/// Makes initialised barriers visible to the copy engine and to the other blocks of the cluster.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

/// Arrives at the same barrier in block `rank` of the cluster (which may be this one). Orders no
/// memory beyond the block: it announces finished reads. A release at cluster scope would cost a
/// fence of the whole GPU (a third of the kernel's speed).
__device__ __forceinline__ void mbarrier_arrive_at(std::uint64_t* barrier, std::uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}

/// Arrives, and makes the phase wait for `bytes` more from the copy engine.
__device__ __forceinline__ void mbarrier_arrive_expect(std::uint64_t* barrier,
                                                       std::uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait(std::uint64_t* barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

/// Waits for the end of the phase with this parity; traps after kBlockDeadlineNs.
__device__ __forceinline__ void mbarrier_wait(std::uint64_t* barrier, std::uint32_t parity) {
  constexpr std::uint32_t kTriesPerLook = 1u << 16;
  std::uint64_t deadline_ns = 0;
  for (std::uint32_t tries = 1; !mbarrier_try_wait(barrier, parity); ++tries) {
    if (tries % kTriesPerLook != 0) continue;
    const std::uint64_t now = now_ns();
    if (deadline_ns == 0) deadline_ns = now + kBlockDeadlineNs;
    if (now > deadline_ns) __trap();
  }
}

/// A count in shared memory, where a phase's parity would not tell it from the one before the last.
__device__ __forceinline__ void count_release_shared(std::uint32_t* count) {
  asm volatile("red.release.cta.shared::cta.add.u32 [%0], 1;" ::"r"(shared_address(count))
               : "memory");
}
__device__ __forceinline__ std::uint32_t count_acquire_shared(const std::uint32_t* count) {
  std::uint32_t value;
  asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];"
               : "=r"(value)
               : "r"(shared_address(count))
               : "memory");
  return value;
}

// ---- words that only this GPU's threads use -----------------------------------------------------
// A release to the whole system takes two microseconds, one to the GPU a third of that.

__device__ __forceinline__ void store_release_gpu(std::uint32_t* word, std::uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
/// Adds, and does not wait for the answer.
__device__ __forceinline__ void add_release_gpu(std::uint32_t* word, std::uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
// None of these orders anything, nor waits for an answer. (An atomic of 64 bits that might be in
// shared memory, for all the compiler knows, waits for one.)
__device__ __forceinline__ void add_relaxed_gpu(std::uint32_t* word, std::uint32_t value) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
__device__ __forceinline__ void add_relaxed_gpu(std::uint64_t* word, std::uint64_t value) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
__device__ __forceinline__ void max_relaxed_gpu(std::uint64_t* word, std::uint64_t value) {
  asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
/// Begins to bring a run of bytes, a multiple of 16 of them, not none, at such an address, into L2.
/// One thread.
__device__ __forceinline__ void prefetch_run(const void* run, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(run), "r"(bytes) : "memory");
}
/// Begins to bring a word of global memory into this SM's cache, where an ordinary load finds it.
__device__ __forceinline__ void prefetch_word(const std::uint64_t* word) {
  asm volatile("{\n.reg .b64 unused;\nld.global.ca.b64 unused, [%0];\n}" ::"l"(word) : "memory");
}
/// Reads 16 bytes past this SM's cache, for the last time: L2 gives them up before others.
__device__ __forceinline__ uint4 load_last(const uint4* from) {
  constexpr std::uint64_t kEvictFirst = 0x12f0000000000000;  // as createpolicy.fractional makes it
  uint4 value;
  asm volatile("ld.global.cg.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from), "l"(kEvictFirst));
  return value;
}
/// Acquires and releases; answers the old value.
__device__ __forceinline__ std::uint32_t fetch_add_gpu(std::uint32_t* word, std::uint32_t value) {
  std::uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(word), "r"(value)
               : "memory");
  return before;
}

// ---- shared memory of a cluster -----------------------------------------------------------------

/// What lies at this shared-memory address in block `rank` of the cluster.
__device__ __forceinline__ std::uint32_t shared_address_at(std::uint32_t address, int rank) {
  std::uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
/// Stores 16 bytes in a block of the cluster; the barrier there counts them when they are visible.
__device__ __forceinline__ void store_async(std::uint32_t to, float x, float y, float z, float w,
                                            std::uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to),
      "f"(x), "f"(y), "f"(z), "f"(w), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ float4 load_shared(std::uint32_t address) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

// ---- bulk stores and proxies --------------------------------------------------------------------

/// Brings `bytes` bytes (addresses and size multiples of 16) from global to shared memory; the
/// barrier's phase has been told to expect them.
__device__ __forceinline__ void bulk_load(void* to, const void* from, std::uint32_t bytes,
                                          std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

/// Brings `bytes` bytes (the same) from shared to global memory, also a peer's, as part of the open
/// group.
__device__ __forceinline__ void bulk_store(void* to, const void* from, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}

/// Closes the group of bulk stores this thread issued since the last one.
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/// Waits until at most `kPending` groups of this thread still read shared memory: the others'
/// source is free again.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

/// Waits until at most `kPending` groups of this thread are incomplete. The others' writes are
/// visible to this thread, and may be released to others, also when they went to a peer GPU.
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Orders this thread's ordinary shared-memory stores before later reads by the copy engine or the
/// tensor cores.
__device__ __forceinline__ void fence_shared_to_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Orders what this thread has acquired (global memory written by others) before its later TMA
/// loads.
__device__ __forceinline__ void fence_acquired_to_async() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

/// Stores two words to an address of shared memory that is a multiple of 8.
__device__ __forceinline__ void store_two(std::uint32_t address, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(first), "f"(second)
               : "memory");
}

/// stmatrix.x4: stores four 8x8 matrices of two-byte elements, two elements of each in a register.
/// Lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(std::uint32_t row_address, std::uint32_t m0,
                                               std::uint32_t m1, std::uint32_t m2,
                                               std::uint32_t m3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
      "r"(m0), "r"(m1), "r"(m2), "r"(m3)
      : "memory");
}

__device__ __forceinline__ void prefetch_tensor_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// ---- registers ----------------------------------------------------------------------------------

/// Gives registers back to the block's pool until each thread of the warpgroup has `kRegisters`.
template <int kRegisters>
__device__ __forceinline__ void registers_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// Takes registers from the block's pool, waiting for them, until each thread of the warpgroup has
/// `kRegisters`.
template <int kRegisters>
__device__ __forceinline__ void registers_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace mk::kernels::cuda::ptx
