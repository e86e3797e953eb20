/// \file
/// One operator behind the C ABI. `COperator<Kind>` makes it of a C++ class; a Kind says what is
/// the operator's own:
///
///     using Op;                                   // the C++ class
///     using Shape, Arguments;                     // its C structs
///     static constexpr const char *kName, *kShapeName, *kArgumentsName;
///     static typename Op::Shape shape_of(const Shape&);
///     static constexpr std::size_t least_bytes(const Shape*);             // of a struct that has
///     static constexpr std::size_t least_bytes(const Arguments*);         // grown, before that
///     static void tune(typename Op::Tuning&, const Shape&);               // may be left out
///     static Result<LaunchStats> launch(Op&, const Arguments&, LaunchMode);
///     static Status launch_on(Op&, CudaStream, const Arguments&, LaunchMode);  // on GPUs only
///     static Result<Found> query(const Op&, const Shape&, const AttachOptions&,
///                               std::uint32_t what);
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "client/src/c_api_support.h"
#include "client/src/session_impl.h"
#include "mkernel/types.h"

namespace mk::c_api {

/// What mk_op_query answers.
struct Found {
  const void* data = nullptr;
  std::uint64_t count = 0;
};
/// For a Kind's `query`: the operator has no such thing.
Result<Found> nothing_of(const char* name, std::uint32_t what);

/// `given` may be null: all defaults.
Result<Tuning> tuning_of(const mk_tuning* given);
/// Before a launch: `to` is null or large enough.
Status check_stats(const mk_launch_stats* to);
/// `to` may be null.
void fill(mk_launch_stats* to, const LaunchStats& stats);

}  // namespace mk::c_api

/// The C ABI's handle.
struct mk_op {
  mk_op() = default;
  mk_op(const mk_op&) = delete;
  mk_op& operator=(const mk_op&) = delete;
  virtual ~mk_op() = default;

  virtual mk::Result<mk::LaunchStats> launch(const void* arguments, mk::LaunchMode mode) = 0;
  virtual mk::Status launch_on(mk::CudaStream stream, const void* arguments,
                               mk::LaunchMode mode) = 0;
  virtual mk::Status status() const = 0;
  virtual mk::Result<mk::LaunchStats> finish(mk::CudaStream stream) = 0;
  virtual mk::Result<mk::c_api::Found> query(std::uint32_t what) const = 0;
  virtual void set_trace(bool on) = 0;
  virtual std::vector<mk::TraceSpan> trace() const = 0;

  std::vector<mk_trace_span> kept_trace;  ///< what mk_op_trace has handed out
};

namespace mk::c_api {

template <class Kind>
class COperator final : public mk_op {
 public:
  using Op = typename Kind::Op;
  using Shape = typename Kind::Shape;
  using Arguments = typename Kind::Arguments;

  static Result<std::unique_ptr<mk_op>> create(mk_session& session, const void* given) {
    MK_ASSIGN_OR_RETURN(const Wanted wanted, checked(given));
    MK_ASSIGN_OR_RETURN(auto op,
                        Op::create(session.session, Kind::shape_of(wanted.shape), wanted.tuning));
    return std::unique_ptr<mk_op>(new COperator(session.session, wanted.shape, std::move(op)));
  }
  static Result<std::uint64_t> workspace_bytes(const mk_session& session, const void* given) {
    MK_ASSIGN_OR_RETURN(const Wanted wanted, checked(given));
    return Op::workspace_bytes(session.session, Kind::shape_of(wanted.shape), wanted.tuning);
  }

  Result<LaunchStats> launch(const void* given, LaunchMode mode) override {
    MK_ASSIGN_OR_RETURN(const Arguments arguments, arguments_of(given));
    return Kind::launch(op_, arguments, mode);
  }
  Status launch_on(CudaStream stream, const void* given, LaunchMode mode) override {
    MK_ASSIGN_OR_RETURN(const Arguments arguments, arguments_of(given));
    if constexpr (kOnGpus) {
      return Kind::launch_on(op_, stream, arguments, mode);
    } else {
      return no_gpus();
    }
  }
  Status status() const override {
    if constexpr (kOnGpus) {
      return op_.status();
    } else {
      return session_->status();
    }
  }
  Result<LaunchStats> finish(CudaStream stream) override {
    if constexpr (kOnGpus) {
      return op_.finish(stream);
    } else {
      return no_gpus();
    }
  }
  Result<Found> query(std::uint32_t what) const override {
    return Kind::query(op_, shape_, session_->options(), what);
  }
  void set_trace(bool on) override { op_.set_trace(on); }
  std::vector<TraceSpan> trace() const override { return op_.trace(); }

 private:
  static constexpr bool kOnGpus = requires(Op & op) { op.finish(CudaStream{}); };

  struct Wanted {
    Shape shape;
    typename Op::Tuning tuning;
  };

  COperator(const Session& session, const Shape& shape, Op&& op)
      : session_(session.impl()), shape_(shape), op_(std::move(op)) {}

  static Result<Wanted> checked(const void* given) {
    Wanted wanted;
    MK_ASSIGN_OR_RETURN(wanted.shape, copied<Shape>(given, least_of<Shape>(), Kind::kShapeName));
    MK_ASSIGN_OR_RETURN(static_cast<Tuning&>(wanted.tuning), tuning_of(wanted.shape.tuning));
    if constexpr (requires { Kind::tune(wanted.tuning, wanted.shape); })
      Kind::tune(wanted.tuning, wanted.shape);
    return wanted;
  }
  static Result<Arguments> arguments_of(const void* given) {
    return copied<Arguments>(given, least_of<Arguments>(), Kind::kArgumentsName);
  }
  /// Bytes that a caller of any age knows of it.
  template <class Struct>
  static constexpr std::size_t least_of() {
    if constexpr (requires { Kind::least_bytes(static_cast<const Struct*>(nullptr)); }) {
      return Kind::least_bytes(static_cast<const Struct*>(nullptr));
    } else {
      return sizeof(Struct);
    }
  }
  template <class Struct>
  static Result<Struct> copied(const void* given, std::size_t least, const char* name) {
    MK_RETURN_IF_ERROR(check_grown_struct(given, least, sizeof(Struct), name));
    std::size_t bytes = 0;
    std::memcpy(&bytes, given, sizeof(bytes));
    Struct whole{};
    std::memcpy(&whole, given, std::min(bytes, sizeof(Struct)));
    return whole;
  }
  static tl::unexpected<Error> no_gpus() {
    return fail(ErrorCode::kUnsupported, "{} runs on CPUs only; launch it without a stream",
                Kind::kName);
  }

  std::shared_ptr<Session::Impl> session_;  ///< which an operator may outlive as it is destroyed
  Shape shape_;
  Op op_;
};

}  // namespace mk::c_api
