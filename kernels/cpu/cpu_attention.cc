#include "kernels/cpu/cpu_attention.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <numbers>

namespace mk::kernels {
namespace {

constexpr std::align_val_t kAlignment{64};

}  // namespace

void CpuAttention::Free::operator()(float* memory) const { ::operator delete(memory, kAlignment); }

CpuAttention::CpuAttention(const CpuAttentionShape& shape, const AttentionMath& math)
    : shape_(shape), math_(math), row_math_(row_math(shape.dtype)) {
  assert(shape.head_dim % kPanel == 0);
  key_panel_ = std::size_t{shape.key_rows} * kPanel;
  const std::size_t columns = round_up_to(std::size_t{shape.query_rows} * shape.group, kPanel);
  const std::size_t key_floats = std::size_t{shape.key_rows} * shape.head_dim;
  const struct {
    float** place;
    std::size_t floats;
  } parts[] = {{&query_panels_, columns * shape.head_dim},
               {&keys_, key_floats},
               {&values_, key_floats},
               {&scores_, columns * shape.key_rows},
               {&out_, columns * shape.head_dim},
               {&max_, columns},
               {&sum_, columns},
               {&alpha_, columns}};
  std::size_t floats = 0;
  for (const auto& part : parts) floats += round_up_to(part.floats, kPanel);
  memory_.reset(static_cast<float*>(::operator new(floats * sizeof(float), kAlignment)));
  float* next = memory_.get();
  for (const auto& part : parts) {
    *part.place = next;
    next += round_up_to(part.floats, kPanel);
  }
  seen_.resize(columns);
}

void CpuAttention::begin(AttentionRows queries, std::uint32_t rows, double scale) {
  assert(rows <= shape_.query_rows);
  rows_ = rows;
  const auto factor = static_cast<float>(scale * std::numbers::log2e);
  const std::uint32_t columns = query_panels() * kPanel;
  // Widened into out_, whose turn comes afterwards; padding is zero.
  const std::size_t row_floats = std::size_t{shape_.group} * shape_.head_dim;
  for (std::uint32_t row = 0; row < rows; ++row) {
    row_math_.widen(queries.first + row * queries.stride, out_ + row * row_floats, row_floats);
  }
  const std::size_t used = rows * row_floats;
  std::fill(out_ + used, out_ + std::size_t{columns} * shape_.head_dim, 0.0f);
  for (std::uint32_t panel = 0; panel < query_panels(); ++panel) {
    float* const to = query_panels_ + std::size_t{panel} * kPanel * shape_.head_dim;
    const float* const from = out_ + std::size_t{panel} * kPanel * shape_.head_dim;
    for (std::uint32_t i = 0; i < shape_.head_dim; ++i) {
      for (std::uint32_t column = 0; column < kPanel; ++column) {
        to[i * kPanel + column] = factor * from[std::size_t{column} * shape_.head_dim + i];
      }
    }
  }
  std::fill(out_, out_ + used, 0.0f);
  std::fill(max_, max_ + columns, kNoScore);
  std::fill(sum_, sum_ + columns, 0.0f);
}

/// Gives -infinity to the scores that the diagonal forbids: in key j's row of each panel a prefix.
void CpuAttention::hide(std::uint32_t keys, std::int64_t diagonal) {
  for (std::uint32_t key = 0; key < keys; ++key) {
    const std::int64_t hidden_rows = std::int64_t{key} - diagonal;
    if (hidden_rows <= 0) continue;
    std::uint64_t hidden =
        std::min<std::uint64_t>(static_cast<std::uint64_t>(hidden_rows) * shape_.group, queries());
    float* row = scores_ + std::size_t{key} * kPanel;
    for (; hidden > 0; row += key_panel_) {
      const std::uint64_t here = std::min<std::uint64_t>(hidden, kPanel);
      std::fill(row, row + here, -std::numeric_limits<float>::infinity());
      hidden -= here;
    }
  }
}

/// Notes how many keys each query sees; whether any sees fewer than all `keys`.
bool CpuAttention::count_seen(std::uint32_t keys, std::int64_t diagonal) {
  const auto seen_by = [&](std::uint32_t row) {
    return static_cast<std::uint32_t>(
        std::clamp<std::int64_t>(std::int64_t{row} + diagonal + 1, 0, keys));
  };
  if (seen_by(0) == keys) return false;
  for (std::uint32_t row = 0; row < rows_; ++row) {
    std::fill_n(seen_.begin() + row * shape_.group, shape_.group, seen_by(row));
  }
  return true;
}

void CpuAttention::attend(AttentionRows keys, AttentionRows values, std::uint32_t rows,
                          std::int64_t diagonal) {
  assert(rows <= shape_.key_rows);
  // Keys after the last one that the tile's last row sees are nobody's.
  const std::int64_t seen = std::min<std::int64_t>(rows, std::int64_t{rows_} + diagonal);
  if (seen <= 0) return;
  const auto count = static_cast<std::uint32_t>(seen);
  const std::uint32_t dim = shape_.head_dim;
  for (std::uint32_t row = 0; row < count; ++row) {
    row_math_.widen(keys.first + row * keys.stride, keys_ + std::size_t{row} * dim, dim);
    const std::uint16_t* const value = values.first + row * values.stride;
    for (std::uint32_t panel = 0; panel < dim / kPanel; ++panel) {
      row_math_.widen(value + panel * kPanel,
                      values_ + panel * key_panel_ + std::size_t{row} * kPanel, kPanel);
    }
  }

  AttentionProduct scores;
  scores.a = keys_;
  scores.a_row = dim;
  scores.a_step = 1;
  scores.b = query_panels_;
  scores.b_panel = std::size_t{dim} * kPanel;
  scores.c = scores_;
  scores.c_row = kPanel;
  scores.c_panel = key_panel_;
  scores.rows = count;
  scores.panels = query_panels();
  scores.depth = dim;
  math_.multiply(scores);

  hide(count, diagonal);
  math_.softmax({scores_, key_panel_, max_, sum_, alpha_, count, query_panels()});

  AttentionProduct out;
  out.a_row = 1;
  out.a_step = kPanel;
  out.b = values_;
  out.b_panel = key_panel_;
  out.c_row = dim;
  out.c_panel = kPanel;
  out.panels = dim / kPanel;
  out.depth = count;
  const bool some_hidden = count_seen(count, diagonal);
  for (std::uint32_t panel = 0; panel < query_panels(); ++panel) {
    const std::uint32_t first = panel * kPanel;
    out.a = scores_ + panel * key_panel_;
    out.c = out_ + std::size_t{first} * dim;
    out.factor = alpha_ + first;
    out.depths = some_hidden ? seen_.data() + first : nullptr;
    out.rows = std::min(queries() - first, kPanel);
    math_.multiply(out);
  }
}

void CpuAttention::save(float* state) const {
  const std::size_t floats = std::size_t{queries()} * shape_.head_dim;
  std::memcpy(state, out_, floats * sizeof(float));
  std::memcpy(state + floats, max_, queries() * sizeof(float));
  std::memcpy(state + floats + queries(), sum_, queries() * sizeof(float));
}

void CpuAttention::resume(const float* state) {
  const std::size_t floats = std::size_t{queries()} * shape_.head_dim;
  std::memcpy(out_, state, floats * sizeof(float));
  std::memcpy(max_, state + floats, queries() * sizeof(float));
  std::memcpy(sum_, state + floats + queries(), queries() * sizeof(float));
}

void CpuAttention::finish(std::uint16_t* out, std::uint64_t out_stride, float* lse,
                          std::uint64_t lse_stride) {
  const std::uint32_t dim = shape_.head_dim;
  for (std::uint32_t row = 0; row < rows_; ++row) {
    float* const first = out_ + std::size_t{row} * shape_.group * dim;
    for (std::uint32_t head = 0; head < shape_.group; ++head) {
      const std::uint32_t query = row * shape_.group + head;
      const float inverse = 1.0f / sum_[query];
      float* const o = first + std::size_t{head} * dim;
      for (std::uint32_t i = 0; i < dim; ++i) o[i] *= inverse;
      if (lse != nullptr) {
        // In double: the maximum may be large beside the logarithm, and it is one per query.
        const double bits = double{max_[query]} + std::log2(double{sum_[query]});
        lse[row * lse_stride + head] = static_cast<float>(bits * std::numbers::ln2);
      }
    }
    row_math_.narrow(first, out + row * out_stride, std::size_t{shape_.group} * dim);
  }
}

}  // namespace mk::kernels
