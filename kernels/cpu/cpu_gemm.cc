#include "kernels/cpu/cpu_gemm.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <oneapi/dnnl/dnnl.hpp>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/cpu/one_thread.h"
#include "kernels/cpu/ordered_gemm.h"
#include "kernels/cpu/row_math.h"

namespace mk::kernels {
namespace {

using dnnl::memory;

/// K is cut into panels of this length when it goes through fp32, which bounds the widened copies.
constexpr std::uint32_t kDepth = 1024;

/// Primitives kept; a launch needs at most four.
constexpr std::size_t kPrimitivesMax = 512;

/// Rows, columns, depth, and the leading dimensions of A and B.
using Key = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, std::uint64_t, std::uint64_t>;

struct Primitive {
  memory::desc a;
  memory::desc b;
  memory::desc c;
  memory::desc scratch;
  dnnl::matmul matmul;
  std::string implementation;
};

memory::dim dim(std::uint64_t value) { return static_cast<memory::dim>(value); }

/// c (+)= a b; `add` for all panels but the first.
Primitive make_primitive(const dnnl::engine& engine, const Key& key, memory::data_type type,
                         BLayout b_layout, bool add) {
  const auto [rows, columns, depth, lda, ldb] = key;
  Primitive made;
  made.a = memory::desc({dim(rows), dim(depth)}, type, memory::dims{dim(lda), 1});
  made.b = memory::desc(
      {dim(depth), dim(columns)}, type,
      b_layout == BLayout::kKN ? memory::dims{dim(ldb), 1} : memory::dims{1, dim(ldb)});
  made.c = memory::desc({dim(rows), dim(columns)}, memory::data_type::f32,
                        memory::dims{dim(columns), 1});
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (add) {
    dnnl::post_ops sum;
    sum.append_sum(1.0f);
    attributes.set_post_ops(sum);
  }
  OneThreadScope one_thread;
  const dnnl::matmul::primitive_desc description(dnnl::matmul::desc(made.a, made.b, made.c),
                                                 attributes, engine);
  made.scratch = description.scratchpad_desc();
  made.implementation = description.impl_info_str();
  made.matmul = dnnl::matmul(description);
  return made;
}

bool optimised(const Primitive& primitive) {
  return primitive.implementation.find("ref") == std::string::npos;
}

}  // namespace

class CpuGemm::Impl {
 public:
  struct Block {
    dnnl::stream stream;
    std::vector<std::uint8_t> scratch;
    std::vector<float> a_panel;
    std::vector<float> b_panel;
    std::optional<OrderedGemm> ordered;
  };

  Impl(std::uint32_t blocks, TileShape largest, std::uint32_t k, DType dtype, BLayout b_layout)
      : engine_(dnnl::engine::kind::cpu, 0),
        blocks_(blocks),
        largest_(largest),
        k_(k),
        dtype_(dtype),
        b_layout_(b_layout),
        math_(row_math(dtype)) {
    for (Block& block : blocks_) block.stream = dnnl::stream(engine_);
  }

  /// Decides the path; throws dnnl::error.
  void choose(GemmPath asked) {
    if (asked == GemmPath::kOrdered) {
      path_ = asked;
      for (Block& block : blocks_)
        block.ordered.emplace(largest_.rows, largest_.columns, k_, dtype_, b_layout_);
      return;
    }
    path_ = GemmPath::kThroughF32;
    if (dtype_ == DType::kBf16 && asked != GemmPath::kThroughF32) {
      const std::uint64_t ldb = b_layout_ == BLayout::kKN ? largest_.columns : k_;
      try {
        const Primitive trial =
            make_primitive(engine_, Key{largest_.rows, largest_.columns, k_, k_, ldb},
                           memory::data_type::bf16, b_layout_, false);
        if (asked == GemmPath::kNative || optimised(trial)) path_ = GemmPath::kNative;
      } catch (const dnnl::error&) {
        if (asked == GemmPath::kNative) throw;
      }
    } else if (asked == GemmPath::kNative) {
      throw dnnl::error(dnnl_unimplemented, "oneDNN 2 multiplies f16 only through fp32");
    }
    if (path_ == GemmPath::kNative) return;
    const std::size_t panel = std::min(k_, kDepth);
    for (Block& block : blocks_) {
      block.a_panel.resize(largest_.rows * panel);
      block.b_panel.resize(largest_.columns * panel);
    }
  }

  /// Throws dnnl::error.
  void prepare(std::span<const TileShape> shapes, std::span<const std::uint64_t> ldas,
               std::uint64_t ldb) {
    ldb_ = ldb;
    if (path_ == GemmPath::kOrdered) return;
    if (primitives_.size() > kPrimitivesMax) primitives_.clear();
    std::size_t scratch_bytes = 0;
    for (const TileShape& shape : shapes) {
      for (const std::uint64_t lda : ldas) {
        for (std::uint32_t begin = 0; begin < k_; begin += depth_step()) {
          const std::uint32_t depth = std::min(depth_step(), k_ - begin);
          const Primitive& primitive = find_or_make(shape, depth, lda, begin != 0);
          scratch_bytes = std::max(scratch_bytes, primitive.scratch.get_size());
        }
      }
    }
    for (Block& block : blocks_) {
      if (block.scratch.size() < scratch_bytes) block.scratch.resize(scratch_bytes);
    }
  }

  /// Throws dnnl::error.
  void multiply(Block& block, TileShape shape, const std::uint16_t* a, std::uint64_t lda,
                const std::uint16_t* b, float* target) {
    if (block.ordered) {
      block.ordered->multiply(shape.rows, shape.columns, a, lda, b, ldb_, target);
      return;
    }
    for (std::uint32_t begin = 0; begin < k_; begin += depth_step()) {
      const std::uint32_t depth = std::min(depth_step(), k_ - begin);
      const Primitive& primitive = primitives_.at({key(shape, depth, lda), begin != 0});
      if (path_ == GemmPath::kNative) {
        execute(block, primitive, a, b, target);
        continue;
      }
      for (std::uint32_t row = 0; row < shape.rows; ++row) {
        math_.widen(a + row * lda + begin, block.a_panel.data() + std::size_t{row} * depth, depth);
      }
      // The widened panel keeps B's layout.
      const bool kn = b_layout_ == BLayout::kKN;
      const std::uint32_t lines = kn ? depth : shape.columns;
      const std::uint32_t length = kn ? shape.columns : depth;
      const std::uint16_t* const first = kn ? b + begin * ldb_ : b + begin;
      for (std::uint32_t line = 0; line < lines; ++line) {
        math_.widen(first + line * ldb_, block.b_panel.data() + std::size_t{line} * length, length);
      }
      execute(block, primitive, block.a_panel.data(), block.b_panel.data(), target);
    }
  }

  Block& block(std::uint32_t index) { return blocks_[index]; }
  GemmPath path() const { return path_; }

  void note_failure(const std::string& text) {
    std::lock_guard lock(failure_mutex_);
    if (failure_.empty()) failure_ = text;
  }
  Status failure() const {
    std::lock_guard lock(failure_mutex_);
    if (failure_.empty()) return {};
    return fail(ErrorCode::kInternal, "oneDNN failed to multiply a tile: {}", failure_);
  }

 private:
  std::uint32_t depth_step() const { return path_ == GemmPath::kNative ? k_ : kDepth; }

  Key key(TileShape shape, std::uint32_t depth, std::uint64_t lda) const {
    if (path_ == GemmPath::kNative) return {shape.rows, shape.columns, depth, lda, ldb_};
    return {shape.rows, shape.columns, depth, depth,
            b_layout_ == BLayout::kKN ? shape.columns : depth};
  }

  const Primitive& find_or_make(TileShape shape, std::uint32_t depth, std::uint64_t lda, bool add) {
    const std::pair<Key, bool> full_key{key(shape, depth, lda), add};
    const auto found = primitives_.find(full_key);
    if (found != primitives_.end()) return found->second;
    const auto type = path_ == GemmPath::kNative ? memory::data_type::bf16 : memory::data_type::f32;
    return primitives_
        .emplace(full_key, make_primitive(engine_, full_key.first, type, b_layout_, add))
        .first->second;
  }

  void execute(Block& block, const Primitive& primitive, const void* a, const void* b,
               float* target) {
    // oneDNN takes inputs as void*; it does not write to them.
    primitive.matmul.execute(
        block.stream,
        {{DNNL_ARG_SRC, memory(primitive.a, engine_, const_cast<void*>(a))},
         {DNNL_ARG_WEIGHTS, memory(primitive.b, engine_, const_cast<void*>(b))},
         {DNNL_ARG_DST, memory(primitive.c, engine_, target)},
         {DNNL_ARG_SCRATCHPAD, memory(primitive.scratch, engine_, block.scratch.data())}});
    block.stream.wait();
  }

  dnnl::engine engine_;
  std::vector<Block> blocks_;
  TileShape largest_;
  std::uint32_t k_;
  DType dtype_;
  BLayout b_layout_;
  const RowMath& math_;
  GemmPath path_ = GemmPath::kThroughF32;
  std::uint64_t ldb_ = 0;
  std::map<std::pair<Key, bool>, Primitive> primitives_;
  mutable std::mutex failure_mutex_;
  std::string failure_;
};

CpuGemm::CpuGemm(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CpuGemm::~CpuGemm() = default;

Result<std::unique_ptr<CpuGemm>> CpuGemm::create(std::uint32_t blocks, TileShape largest,
                                                 std::uint32_t k, DType dtype, BLayout b_layout,
                                                 GemmPath path) {
  try {
    auto impl = std::make_unique<Impl>(blocks, largest, k, dtype, b_layout);
    impl->choose(path);
    return std::unique_ptr<CpuGemm>(new CpuGemm(std::move(impl)));
  } catch (const dnnl::error& error) {
    return fail(ErrorCode::kUnsupported,
                "oneDNN cannot multiply {} tiles of {} x {} with k = {} here: {}", name_of(dtype),
                largest.rows, largest.columns, k, error.what());
  }
}

Status CpuGemm::prepare(std::span<const TileShape> shapes, std::span<const std::uint64_t> ldas,
                        std::uint64_t ldb) {
  try {
    impl_->prepare(shapes, ldas, ldb);
    return {};
  } catch (const dnnl::error& error) {
    return fail(ErrorCode::kInternal,
                "oneDNN cannot prepare tiles with leading dimensions {} and {}: {}",
                fmt::join(ldas, " or "), ldb, error.what());
  }
}

bool CpuGemm::multiply(std::uint32_t block, TileShape shape, const std::uint16_t* a,
                       std::uint64_t lda, const std::uint16_t* b, float* target) {
  try {
    impl_->multiply(impl_->block(block), shape, a, lda, b, target);
    return true;
  } catch (const std::exception& error) {
    impl_->note_failure(error.what());
    return false;
  }
}

Status CpuGemm::error() const { return impl_->failure(); }
GemmPath CpuGemm::path() const { return impl_->path(); }

}  // namespace mk::kernels
