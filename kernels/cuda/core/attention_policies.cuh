/// \file
/// The policies of the attention core beside its items (attention_items.h): which keys an item
/// meets and where they lie, when they may be loaded, and where O goes. The types here are plain
/// attention's; an operator supplies its own.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/cuda/core/attention_items.h"
#include "kernels/cuda/core/ptx.cuh"

namespace mk::kernels::cuda {

/// **Keys** say which key ranges an item meets, in this order.
///
///     struct Params;                            holds the tensor maps
///     explicit Keys(const Params&);
///     int ranges(const AttentionItem&) const;
///     KeyRange range(const AttentionItem&, int number) const;
///     int first_value(const KeyRange&) const;  row of v's tensor where the range's values begin
///     const CUtensorMap& k(const KeyRange&) const;         and v
///
/// A tensor map is of [batch, head, column, row, 64] elements, its box one tile of keys.
/// HeadKeys: all keys of the item's key head, as one range.
class HeadKeys {
 public:
  struct Params {
    CUtensorMap k;
    CUtensorMap v;
    int length = 0;
    int heads_per_key_head = 1;
    int offset = kNoMask;
  };
  __device__ explicit HeadKeys(const Params& params) : params_(params) {}
  __device__ int ranges(const AttentionItem&) const { return 1; }
  __device__ KeyRange range(const AttentionItem& item, int) const {
    KeyRange range;
    range.batch = item.batch;
    range.head = item.head / params_.heads_per_key_head;
    range.length = params_.length;
    range.offset = params_.offset;
    return range;
  }
  __device__ int first_value(const KeyRange& range) const { return range.first_key; }
  __device__ const CUtensorMap& k(const KeyRange&) const { return params_.k; }
  __device__ const CUtensorMap& v(const KeyRange&) const { return params_.v; }

 private:
  const Params& params_;
};

/// A **gate** holds back the loads of a range until its keys have arrived. The loading thread asks
/// before it loads the range's first tile.
///
///     struct Params;
///     explicit Gate(const Params&);
///     void wait(const AttentionItem&, const KeyRange&, const Keys&);
///
/// It may have `Shared`, `end()` and helpers in the other lanes of its warp, as the product's gates
/// (gemm_policies.cuh). Its Shared lies behind the core's shared memory (gate_shared).
///
/// A gate that waits must have a deadline well under ptx::kBlockDeadlineNs. When it passes, the
/// gate records who waited for what and returns at once from then on. So the block runs to its end
/// on whatever the memory holds. The store must then not
/// announce the result. What it acquired it passes on to the copy engine with
/// ptx::fence_acquired_to_async().
struct KeysAreHere {
  struct Params {};
  __device__ explicit KeysAreHere(const Params&) {}
  template <class Keys>
  __device__ void wait(const AttentionItem&, const KeyRange&, const Keys&) {}
};

/// An **output store** says where a row of O and its log-sum-exp go. Every math warp has one.
///
///     struct Params;
///     explicit Store(const Params&);
///     Element* o(const AttentionItem&, int row) const;   null: nowhere
///     float* lse(const AttentionItem&, int row) const;   null: not wanted
///     void done(const AttentionItem&);                   after this warp's last row of the item
///
/// `row` is the row within the sequence. StoreRows: rows of strided tensors.
template <class Element>
class StoreRows {
 public:
  struct Params {
    Element* o = nullptr;
    std::int64_t batch_stride = 0;  ///< in elements, as all of these
    std::int64_t head_stride = 0;
    std::int64_t row_stride = 0;
    float* lse = nullptr;
    std::int64_t lse_batch_stride = 0;
    std::int64_t lse_head_stride = 0;
    std::int64_t lse_row_stride = 0;
  };
  __device__ explicit StoreRows(const Params& params) : params_(params) {}
  __device__ Element* o(const AttentionItem& item, int row) const {
    if (row >= item.rows_end) return nullptr;
    return params_.o + item.batch * params_.batch_stride + item.head * params_.head_stride +
           row * params_.row_stride;
  }
  __device__ float* lse(const AttentionItem& item, int row) const {
    if (params_.lse == nullptr || row >= item.rows_end) return nullptr;
    return params_.lse + item.batch * params_.lse_batch_stride +
           item.head * params_.lse_head_stride + row * params_.lse_row_stride;
  }
  __device__ void done(const AttentionItem&) {}

 private:
  const Params& params_;
};

/// How items are dealt out to the blocks: each of the first `workers` has one to begin with, and
/// takes the next one when it is free for it. The workers behind them come later, and take theirs
/// like the others. words[0] counts the items taken, words[1] the workers that are through; the
/// last of these sets both to zero again.
class ItemDealer {
 public:
  struct Params {
    std::uint32_t* words = nullptr;  ///< two of them in device memory, zero before the first launch
    int late = 0;                    ///< workers that come later
  };
  __device__ ItemDealer(const Params& params, int worker, int workers)
      : params_(params),
        workers_(workers),
        next_(worker < workers ? worker - workers : kNotAsked) {}

  /// Asks for the next item: not much before it is free for it, as it may be the last one, for
  /// which another block has time.
  __device__ void ask() { next_ = static_cast<int>(atomicAdd(params_.words, 1u)); }
  /// Its number; asks if nobody has.
  __device__ int next() {
    if (next_ == kNotAsked) ask();
    const int number = workers_ + next_;
    next_ = kNotAsked;
    return number;
  }
  /// The loading thread's, when there are no more.
  __device__ void end() {
    __threadfence();
    if (atomicAdd(params_.words + 1, 1u) + 1 ==
        static_cast<std::uint32_t>(workers_ + params_.late)) {
      params_.words[0] = 0;
      params_.words[1] = 0;
    }
  }

 private:
  static constexpr int kNotAsked = -(1 << 30);

  const Params& params_;
  int workers_;
  int next_;  ///< counted from `workers` on
};

}  // namespace mk::kernels::cuda
