/// \file
/// The C ABI's operators: what is each one's own, and the functions that all share. A new operator
/// is a Kind of its class, and its line of kernels/ops/registry.h.

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>
#include <type_traits>

#include "client/src/c_operator.h"
#include "kernels/ops/registry.h"
#include "mkernel/mkernel.h"

namespace mk::c_api {

namespace {

/// An operator's own part (c_operator.h), by its C++ class.
template <class Class>
struct Kind;

template <class Class>
constexpr const char* kNameOf = nullptr;
#define MK_NAME(id, name, Class) \
  template <>                    \
  constexpr const char* kNameOf<Class> = name;
MK_OPERATORS(MK_NAME)
#undef MK_NAME

// What the products over all ranks have in common.
template <class Class>
struct GemmKind {
  using Op = Class;
  using Shape = mk_gemm_shape;
  using Arguments = mk_gemm_arguments;
  static constexpr const char* kName = kNameOf<Class>;
  static constexpr const char* kShapeName = "mk_gemm_shape";
  static constexpr const char* kArgumentsName = "mk_gemm_arguments";

  // As of the first release.
  static constexpr std::size_t least_bytes(const Shape*) { return offsetof(Shape, activation); }
  static constexpr std::size_t least_bytes(const Arguments*) { return offsetof(Arguments, bias); }

  static typename Op::Shape shape_of(const Shape& shape) {
    typename Op::Shape wanted{shape.m_max, shape.n, shape.k, static_cast<DataType>(shape.dtype),
                              static_cast<BLayout>(shape.b_layout)};
    wanted.epilogue = {static_cast<Activation>(shape.activation), shape.bias != 0};
    if constexpr (requires { wanted.partials; })
      wanted.partials = static_cast<Partials>(shape.partials);
    return wanted;
  }
  static GemmArguments arguments_of(const Arguments& given) {
    return {given.a,   given.b,   given.c,   given.m,       given.bias,
            given.lda, given.ldb, given.ldc, given.gathered};
  }
};

// Of the products that gather nothing.
template <class Class>
struct GemmSumKind : GemmKind<Class> {
  static Result<LaunchStats> launch(Class& op, const mk_gemm_arguments& given, LaunchMode mode) {
    MK_RETURN_IF_ERROR(check(given));
    return op.launch(GemmKind<Class>::arguments_of(given), {mode, given.tag});
  }
  static Status launch_on(Class& op, CudaStream stream, const mk_gemm_arguments& given,
                          LaunchMode mode) {
    MK_RETURN_IF_ERROR(check(given));
    return op.launch_on(stream, GemmKind<Class>::arguments_of(given), {mode, given.tag});
  }

 private:
  static Status check(const mk_gemm_arguments& given) {
    if (given.gathered == nullptr) return {};
    return fail(ErrorCode::kInvalidArgument,
                "mk_gemm_arguments.gathered is set, but only ag-gemm gathers; set it to null");
  }
};

template <>
struct Kind<AllGatherGemm> : GemmKind<AllGatherGemm> {
  static Result<LaunchStats> launch(Op& op, const Arguments& given, LaunchMode mode) {
    return op.launch(arguments_of(given), {mode, given.tag});
  }
  static Status launch_on(Op& op, CudaStream stream, const Arguments& given, LaunchMode mode) {
    return op.launch_on(stream, arguments_of(given), {mode, given.tag});
  }
  static Result<Found> query(const Op& op, const Shape& shape, const AttachOptions& place,
                             std::uint32_t what) {
    if (what != MK_INPUT) return nothing_of(kName, what);
    const void* const input = op.input();
    if (input == nullptr) return Found{};
    const RowRange rows = Op::rows_of(shape.m_max, place.world, place.rank);
    return Found{input, rows.count * shape.k * bytes_of(static_cast<DataType>(shape.dtype))};
  }
};

template <>
struct Kind<GemmReduceScatter> : GemmSumKind<GemmReduceScatter> {
  static Result<Found> query(const Op&, const Shape&, const AttachOptions&, std::uint32_t what) {
    return nothing_of(kName, what);
  }
};

template <>
struct Kind<GemmAllReduce> : GemmSumKind<GemmAllReduce> {
  static Result<Found> query(const Op& op, const Shape& shape, const AttachOptions&,
                             std::uint32_t what) {
    if (what != MK_OUTPUT) return nothing_of(kName, what);
    const void* const output = op.output();
    if (output == nullptr) return Found{};
    const bool gated = shape.activation == MK_ACTIVATION_GATED_SILU;
    const std::uint64_t columns = gated ? shape.n / 2 : shape.n;
    return Found{output, shape.m_max * columns * bytes_of(static_cast<DataType>(shape.dtype))};
  }
};

template <>
struct Kind<MoeDispatchGemm> {
  using Op = MoeDispatchGemm;
  using Shape = mk_moe_shape;
  using Arguments = mk_moe_arguments;
  // As before there was a bias, and before launches had tags.
  static constexpr std::size_t least_bytes(const Shape*) { return offsetof(Shape, bias); }
  static constexpr std::size_t least_bytes(const Arguments*) { return offsetof(Arguments, tag); }
  static constexpr const char* kName = kNameOf<Op>;
  static constexpr const char* kShapeName = "mk_moe_shape";
  static constexpr const char* kArgumentsName = "mk_moe_arguments";

  static Op::Shape shape_of(const Shape& shape) {
    Op::Shape wanted;
    wanted.tokens_max = shape.tokens_max;
    wanted.hidden = shape.hidden;
    wanted.features = shape.features;
    wanted.experts = shape.experts;
    wanted.top_k = shape.top_k;
    wanted.rows_max = shape.rows_max;
    wanted.dtype = static_cast<DataType>(shape.dtype);
    wanted.b_layout = static_cast<BLayout>(shape.b_layout);
    wanted.epilogue = static_cast<MoeEpilogue>(shape.epilogue);
    wanted.bias = shape.bias != 0;
    return wanted;
  }
  static Result<LaunchStats> launch(Op& op, const Arguments& given, LaunchMode mode) {
    return op.launch(input_of(given), {given.y, given.capacity}, {mode, given.tag});
  }
  static Status launch_on(Op& op, CudaStream stream, const Arguments& given, LaunchMode mode) {
    return op.launch_on(stream, input_of(given), {given.y, given.capacity}, {mode, given.tag});
  }
  static Result<Found> query(const Op& op, const Shape&, const AttachOptions&, std::uint32_t what) {
    // A caller reads the rows where they are.
    static_assert(sizeof(mk_moe_row) == sizeof(MoeRow));
    switch (what) {
      case MK_ROWS:
        return Found{op.rows().data(), op.rows().size()};
      case MK_EXPERT_OFFSETS:
        return Found{op.expert_offsets().data(), op.expert_offsets().size()};
      case MK_FIRST_EXPERT:
        return Found{nullptr, op.first_expert()};
      default:
        return nothing_of(kName, what);
    }
  }

 private:
  static Op::Input input_of(const Arguments& given) {
    return {given.tokens, given.ids, given.weights, given.count, given.expert_weights, given.bias};
  }
};

template <>
struct Kind<GemmCombine> {
  using Op = GemmCombine;
  using Shape = mk_combine_shape;
  using Arguments = mk_combine_arguments;
  // As before launches had tags.
  static constexpr std::size_t least_bytes(const Arguments*) { return offsetof(Arguments, tag); }
  static constexpr const char* kName = kNameOf<Op>;
  static constexpr const char* kShapeName = "mk_combine_shape";
  static constexpr const char* kArgumentsName = "mk_combine_arguments";

  static Op::Shape shape_of(const Shape& shape) {
    return {shape.tokens_max,
            shape.hidden,
            shape.features,
            shape.experts,
            shape.top_k,
            static_cast<DataType>(shape.dtype),
            static_cast<BLayout>(shape.b_layout),
            static_cast<Partials>(shape.partials)};
  }
  static Result<LaunchStats> launch(Op& op, const Arguments& given, LaunchMode mode) {
    MK_ASSIGN_OR_RETURN(const Op::Input input, input_of(given));
    return op.launch(input, given.out, {mode, given.tag});
  }
  static Status launch_on(Op& op, CudaStream stream, const Arguments& given, LaunchMode mode) {
    MK_ASSIGN_OR_RETURN(const Op::Input input, input_of(given));
    return op.launch_on(stream, input, given.out, {mode, given.tag});
  }
  static Result<Found> query(const Op& op, const Shape&, const AttachOptions&, std::uint32_t what) {
    if (what != MK_FIRST_EXPERT) return nothing_of(kName, what);
    return Found{nullptr, op.first_expert()};
  }

 private:
  static Result<Op::Input> input_of(const Arguments& given) {
    if (given.row_count != 0) MK_RETURN_IF_ERROR(check_present(given.rows, "rows"));
    MK_RETURN_IF_ERROR(check_present(given.expert_offsets, "expert_offsets"));
    Op::Input input;
    input.y = given.y;
    input.rows = {reinterpret_cast<const MoeRow*>(given.rows), given.row_count};
    input.expert_offsets = {given.expert_offsets, given.expert_offset_count};
    input.expert_weights = given.expert_weights;
    input.ids = given.ids;
    input.count = given.count;
    input.residual = given.residual;
    return input;
  }
};

template <>
struct Kind<RingAttention> {
  using Op = RingAttention;
  using Shape = mk_ring_shape;
  using Arguments = mk_ring_arguments;
  // As before launches had tags.
  static constexpr std::size_t least_bytes(const Arguments*) { return offsetof(Arguments, tag); }
  static constexpr const char* kName = kNameOf<Op>;
  static constexpr const char* kShapeName = "mk_ring_shape";
  static constexpr const char* kArgumentsName = "mk_ring_arguments";

  static Op::Shape shape_of(const Shape& shape) {
    return {shape.seq_max,
            shape.query_heads,
            shape.key_heads,
            shape.head_dim,
            shape.causal != 0,
            static_cast<DataType>(shape.dtype),
            std::max(1u, shape.batch),
            shape.sequences_max};
  }
  static void tune(Op::Tuning& tuning, const Shape& shape) {
    tuning.remote_passes = shape.remote_passes;
  }
  static Result<LaunchStats> launch(Op& op, const Arguments& given, LaunchMode mode) {
    return op.launch(input_of(given), output_of(given), given.seq, {mode, given.tag});
  }
  static Status launch_on(Op& op, CudaStream stream, const Arguments& given, LaunchMode mode) {
    return op.launch_on(stream, input_of(given), output_of(given), given.seq, {mode, given.tag});
  }
  static Result<Found> query(const Op&, const Shape&, const AttachOptions&, std::uint32_t what) {
    return nothing_of(kName, what);
  }

 private:
  static Op::Input input_of(const Arguments& given) {
    return {given.q,
            given.k,
            given.v,
            given.q_stride,
            given.k_stride,
            given.v_stride,
            given.scale,
            given.q_head_stride,
            given.k_head_stride,
            given.v_head_stride,
            given.q_batch_stride,
            given.k_batch_stride,
            given.v_batch_stride,
            given.sequence_starts,
            static_cast<std::uint32_t>(std::min<std::uint64_t>(given.sequences, ~0u)),
            given.rows};
  }
  static Op::Output output_of(const Arguments& given) {
    return {given.out,
            given.out_stride,
            given.lse,
            given.out_head_stride,
            given.out_batch_stride,
            given.lse_stride,
            given.lse_head_stride,
            given.lse_batch_stride};
  }
};

// Of the operators that multiply nothing.
template <class Class>
requires std::is_base_of_v<Collective, Class>
struct Kind<Class> {
  using Op = Class;
  using Shape = mk_collective_shape;
  using Arguments = mk_collective_arguments;
  static constexpr const char* kName = kNameOf<Class>;
  static constexpr const char* kShapeName = "mk_collective_shape";
  static constexpr const char* kArgumentsName = "mk_collective_arguments";

  static typename Op::Shape shape_of(const Shape& shape) {
    typename Op::Shape wanted{shape.m_max, shape.n, static_cast<DataType>(shape.dtype)};
    if constexpr (requires { wanted.partials; })
      wanted.partials = static_cast<Partials>(shape.partials);
    return wanted;
  }
  static Result<LaunchStats> launch(Op& op, const Arguments& given, LaunchMode mode) {
    return op.launch(given.input, given.output, given.m, {mode, given.tag});
  }
  static Status launch_on(Op& op, CudaStream stream, const Arguments& given, LaunchMode mode) {
    return op.launch_on(stream, given.input, given.output, given.m, {mode, given.tag});
  }
  static Result<Found> query(const Op& op, const Shape& shape, const AttachOptions& place,
                             std::uint32_t what) {
    if constexpr (requires { op.input(); }) {
      if (what == MK_INPUT) {
        const void* const input = op.input();
        if (input == nullptr) return Found{};
        const RowRange rows = Op::rows_of(shape.m_max, place.world, place.rank);
        return Found{input, rows.count * shape.n * bytes_of(static_cast<DataType>(shape.dtype))};
      }
    }
    return nothing_of(kName, what);
  }
};

struct Operator {
  const char* name;
  Result<std::unique_ptr<mk_op>> (*create)(mk_session&, const void* shape);
  Result<std::uint64_t> (*workspace_bytes)(const mk_session&, const void* shape);
};
#define MK_ENTRY(id, name, Class) \
  {name, &COperator<Kind<Class>>::create, &COperator<Kind<Class>>::workspace_bytes},
constexpr Operator kOperators[] = {MK_OPERATORS(MK_ENTRY)};
#undef MK_ENTRY

Result<const Operator*> find_operator(const char* name) {
  MK_RETURN_IF_ERROR(check_present(name, "name"));
  for (const Operator& known : kOperators)
    if (std::strcmp(known.name, name) == 0) return &known;
  std::string names;
  for (const Operator& known : kOperators) {
    names += names.empty() ? "" : ", ";
    names += known.name;
  }
  return fail(ErrorCode::kInvalidArgument, "there is no operator '{:.64}'; there are {}", name,
              names);
}

Result<LaunchMode> checked_mode(std::uint32_t mode) {
  if (mode == MK_FUSED || mode == MK_UNFUSED || mode == MK_AUTO)
    return static_cast<LaunchMode>(mode);
  return fail(ErrorCode::kInvalidArgument, "mode {} is not MK_FUSED, MK_UNFUSED or MK_AUTO", mode);
}

}  // namespace
}  // namespace mk::c_api

using namespace mk::c_api;

extern "C" {

const char* mk_op_name(uint32_t index) {
  return index < std::size(kOperators) ? kOperators[index].name : nullptr;
}

mk_status mk_op_create(mk_session* session, const char* name, const void* shape, mk_op** out) {
  return guarded([&]() -> mk::Status {
    MK_RETURN_IF_ERROR(check_present(session, "session"));
    MK_RETURN_IF_ERROR(check_present(out, "out"));
    MK_ASSIGN_OR_RETURN(const Operator* known, find_operator(name));
    MK_ASSIGN_OR_RETURN(auto op, known->create(*session, shape));
    *out = op.release();
    return {};
  });
}

mk_status mk_op_workspace_bytes(mk_session* session, const char* name, const void* shape,
                                uint64_t* bytes) {
  return guarded([&]() -> mk::Status {
    MK_RETURN_IF_ERROR(check_present(session, "session"));
    MK_RETURN_IF_ERROR(check_present(bytes, "bytes"));
    MK_ASSIGN_OR_RETURN(const Operator* known, find_operator(name));
    MK_ASSIGN_OR_RETURN(*bytes, known->workspace_bytes(*session, shape));
    return {};
  });
}

mk_status mk_op_launch(mk_op* op, const void* arguments, uint32_t mode, mk_launch_stats* stats) {
  return guarded([&]() -> mk::Status {
    MK_RETURN_IF_ERROR(check_present(op, "op"));
    MK_ASSIGN_OR_RETURN(const mk::LaunchMode wanted, checked_mode(mode));
    MK_RETURN_IF_ERROR(check_stats(stats));
    MK_ASSIGN_OR_RETURN(const mk::LaunchStats done, op->launch(arguments, wanted));
    fill(stats, done);
    return {};
  });
}

mk_status mk_op_launch_on(mk_op* op, void* stream, const void* arguments, uint32_t mode) {
  return guarded([&]() -> mk::Status {
    MK_RETURN_IF_ERROR(check_present(op, "op"));
    MK_ASSIGN_OR_RETURN(const mk::LaunchMode wanted, checked_mode(mode));
    return op->launch_on(static_cast<mk::CudaStream>(stream), arguments, wanted);
  });
}

mk_status mk_op_status(const mk_op* op) {
  return guarded([&]() -> mk::Status {
    MK_RETURN_IF_ERROR(check_present(op, "op"));
    return op->status();
  });
}

mk_status mk_op_finish(mk_op* op, void* stream, mk_launch_stats* stats) {
  return guarded([&]() -> mk::Status {
    MK_RETURN_IF_ERROR(check_present(op, "op"));
    MK_RETURN_IF_ERROR(check_stats(stats));
    MK_ASSIGN_OR_RETURN(const mk::LaunchStats done,
                        op->finish(static_cast<mk::CudaStream>(stream)));
    fill(stats, done);
    return {};
  });
}

mk_status mk_op_query(const mk_op* op, uint32_t what, void** data, uint64_t* count) {
  return guarded([&]() -> mk::Status {
    MK_RETURN_IF_ERROR(check_present(op, "op"));
    MK_ASSIGN_OR_RETURN(const Found found, op->query(what));
    if (data != nullptr) *data = const_cast<void*>(found.data);
    if (count != nullptr) *count = found.count;
    return {};
  });
}

mk_status mk_op_set_trace(mk_op* op, uint32_t on) {
  return guarded([&]() -> mk::Status {
    MK_RETURN_IF_ERROR(check_present(op, "op"));
    op->set_trace(on != 0);
    return {};
  });
}

mk_status mk_op_trace(mk_op* op, const mk_trace_span** spans, uint64_t* count) {
  return guarded([&]() -> mk::Status {
    MK_RETURN_IF_ERROR(check_present(op, "op"));
    MK_RETURN_IF_ERROR(check_present(spans, "spans"));
    MK_RETURN_IF_ERROR(check_present(count, "count"));
    std::vector<mk_trace_span> kept;
    for (const mk::TraceSpan& span : op->trace()) {
      kept.push_back({span.role,
                      span.block,
                      span.kind,
                      {span.index[0], span.index[1]},
                      span.rank,
                      span.begin_ns,
                      span.end_ns});
    }
    op->kept_trace = std::move(kept);
    *spans = op->kept_trace.data();
    *count = op->kept_trace.size();
    return {};
  });
}

void mk_op_destroy(mk_op* op) { delete op; }

void mk_rows_of_rank(uint64_t rows, uint32_t world, uint32_t rank, uint64_t* first,
                     uint64_t* count) {
  const mk::RowRange range = mk::rows_of_rank(rows, world, rank);
  if (first != nullptr) *first = range.first;
  if (count != nullptr) *count = range.count;
}

void mk_sequence_rows_of_rank(uint64_t seq, uint32_t causal, uint32_t world, uint32_t rank,
                              uint64_t first[2], uint64_t count[2]) {
  const mk::SequenceRows rows = mk::sequence_rows_of_rank(seq, causal != 0, world, rank);
  for (int part = 0; part < 2; ++part) {
    if (first != nullptr) first[part] = rows.parts[part].first;
    if (count != nullptr) count[part] = rows.parts[part].count;
  }
}

}  // extern "C"
