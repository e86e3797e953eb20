/// \file
/// Attention of one tile of queries over tile after tile of keys and values, on one core: online
/// softmax with everything between input and output in fp32.
///
/// All query heads that share a key head go together: a tile of `rows` sequence rows has rows x
/// group **queries**, query (row, head) being number row * group + head. With sequence-major
/// tensors ([row][head][head_dim]) a row's queries are then contiguous in memory.
///
/// Scores are computed transposed, keys by queries: the softmax works down the columns, whole
/// vectors of queries at a time. Neither keys nor values are ever transposed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/comm/types.h"
#include "kernels/cpu/attention_math.h"
#include "kernels/cpu/row_math.h"

namespace mk::kernels {

/// Sizes of the tiles of one CpuAttention.
struct CpuAttentionShape {
  std::uint32_t head_dim = 0;    ///< a multiple of kPanel
  std::uint32_t group = 1;       ///< query heads per key head
  std::uint32_t query_rows = 0;  ///< of a tile, at most
  std::uint32_t key_rows = 0;    ///< of a tile, at most
  DType dtype = DType::kBf16;
};

/// Keys or values of one head: `rows` rows of head_dim elements, `stride` elements apart.
struct AttentionRows {
  const std::uint16_t* first = nullptr;
  std::uint64_t stride = 0;
};

/// A block's scratch memory and the state of its current tile. One thread. After construction it
/// allocates nothing.
class CpuAttention {
 public:
  explicit CpuAttention(const CpuAttentionShape& shape,
                        const AttentionMath& math = attention_math());

  /// A new tile: `rows` ≤ query_rows rows of group x head_dim contiguous elements. Scores are
  /// scale * q k.
  void begin(AttentionRows queries, std::uint32_t rows, double scale);

  /// Takes in a tile of `rows` ≤ key_rows keys. Query row i sees key j if j <= i + diagonal. A key
  /// that it does not see, and its value, change no bit of its result, whatever they are.
  void attend(AttentionRows keys, AttentionRows values, std::uint32_t rows, std::int64_t diagonal);
  /// The diagonal of a tile whose every key is seen.
  static constexpr std::int64_t kSeesAll = 1ll << 32;

  /// The tile's state, to go on with it later: after `begin` with the same queries, `resume`. Both
  /// are exact, so a result does not depend on where it was interrupted.
  void save(float* state) const;
  void resume(const float* state);
  /// Floats of a saved state of a tile of `rows` rows.
  static std::size_t state_floats(const CpuAttentionShape& shape, std::uint32_t rows) {
    return std::size_t{rows} * shape.group * (shape.head_dim + 2);
  }

  /// Stores the result like the queries, and, unless null, each query's log-sum-exp (natural):
  /// `group` floats per row, lse_stride floats from row to row. Each query must have seen a key.
  void finish(std::uint16_t* out, std::uint64_t out_stride, float* lse, std::uint64_t lse_stride);

 private:
  struct Free {
    void operator()(float* memory) const;
  };
  std::uint32_t queries() const { return rows_ * shape_.group; }
  std::uint32_t query_panels() const { return div_up(queries(), kPanel); }
  void hide(std::uint32_t keys, std::int64_t diagonal);
  bool count_seen(std::uint32_t keys, std::int64_t diagonal);

  const CpuAttentionShape shape_;
  const AttentionMath& math_;
  const RowMath& row_math_;
  std::uint32_t rows_ = 0;     ///< of the current tile
  std::size_t key_panel_ = 0;  ///< floats of a panel of key_rows rows
  std::unique_ptr<float, Free> memory_;
  // All in memory_. Queries are padded to whole panels.
  float* query_panels_ = nullptr;  ///< [panel][head_dim][kPanel]: queries times scale times log2(e)
  float* keys_ = nullptr;          ///< [key][head_dim]
  float* values_ = nullptr;        ///< [panel of head_dim][key][kPanel]
  float* scores_ = nullptr;        ///< [panel of queries][key][kPanel]
  float* out_ = nullptr;           ///< [query][head_dim]
  float* max_ = nullptr;           ///< [query], and so on
  float* sum_ = nullptr;
  float* alpha_ = nullptr;
  std::vector<std::uint32_t> seen_;  ///< [query]: keys of the tile that it sees
};

}  // namespace mk::kernels
