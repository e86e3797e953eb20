/// \file
/// The operators as one, for tests of what becomes of them and not of their numbers: inputs of one
/// value, whose result everybody knows.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/ops/registry.h"
#include "mkernel/mkernel.h"
#include "shm/host/result.h"

namespace mk::test {

#define MK_KIND(id, name, Class) k##Class,
enum class Kind : std::uint32_t { MK_OPERATORS(MK_KIND) };
#undef MK_KIND
#define MK_KIND(id, name, Class) Kind::k##Class,
inline constexpr std::array kKinds = {MK_OPERATORS(MK_KIND)};
#undef MK_KIND
inline const char* name_of(Kind kind) {
#define MK_KIND(id, name, Class) #Class,
  constexpr const char* kNames[] = {MK_OPERATORS(MK_KIND)};
#undef MK_KIND
  return kNames[static_cast<std::uint32_t>(kind)];
}

using Elements = std::vector<std::uint16_t>;
/// A bf16 of a small whole number.
inline std::uint16_t element(std::uint32_t value) {
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(value)) >> 16);
}
inline Elements filled(std::uint64_t count, std::uint32_t value) {
  return Elements(count, element(value));
}
inline Status expect_all(const Elements& found, std::uint32_t value, const char* what) {
  const auto wrong = std::ranges::find_if(found, [&](auto e) { return e != element(value); });
  if (wrong == found.end()) return {};
  return fail(ErrorCode::kInternal, "{}: element {} of {} is {:#06x} instead of {}", what,
              wrong - found.begin(), found.size(), *wrong, value);
}

/// A launch of a collective with `rows` rows of the whole, for AnyOperator.
inline auto collective_launch(std::uint64_t rows, std::uint64_t columns, const AttachOptions& place,
                              const char* name) {
  return [=](auto& op, std::uint32_t value) -> Status {
    using Op = std::remove_cvref_t<decltype(op)>;
    const Elements input =
        filled(Op::input_rows(rows, place.world, place.rank).count * columns, value);
    Elements output(Op::output_rows(rows, place.world, place.rank).count * columns, 0xffff);
    MK_ASSIGN_OR_RETURN([[maybe_unused]] const auto stats,
                        op.launch(input.data(), output.data(), rows));
    return expect_all(output, Op::kSums ? value * place.world : value, name);
  };
}

/// One rank's operator, whatever it is.
class AnyOperator {
 public:
  /// `size`: from 0; each has another shape.
  static Result<AnyOperator> create(Session& session, Kind kind, std::uint32_t size = 0) {
    AnyOperator made;
    const AttachOptions& place = session.options();
    const std::uint64_t rows = 16 + 24 * (size % 5);
    const std::uint64_t columns = 16 + 8 * (size % 7);
    const auto take = [&](auto op, auto launch) -> Status {
      if (!op) return propagate(op);
      using Op = typename decltype(op)::value_type;
      auto kept = std::make_shared<Op>(std::move(*op));
      made.launch_ = [kept, launch](std::uint32_t value) { return launch(*kept, value); };
      return {};
    };
    Tuning tuning;
    tuning.wait_timeout = std::chrono::seconds(60);
    // So few threads that many ranks fit a small machine.
    tuning.compute_sms = tuning.reduce_sms = tuning.send_sms = tuning.receive_sms =
        tuning.share_sms = tuning.pull_sms = 1;
    Status done;
    switch (kind) {
      case Kind::kAllGatherGemm:
        done = take(AllGatherGemm::create(session, {rows, columns, kDepth}, tuning),
                    [place, rows, columns](AllGatherGemm& op, std::uint32_t value) -> Status {
                      const auto own = AllGatherGemm::rows_of(rows, place.world, place.rank);
                      const Elements a = filled(own.count * kDepth, value);
                      const Elements b = filled(kDepth * columns, 1);
                      Elements c(rows * columns, 0xffff);
                      MK_ASSIGN_OR_RETURN(
                          [[maybe_unused]] const auto stats,
                          op.launch(a.data(), b.data(), c.data(), rows, LaunchMode::kFused));
                      return expect_all(c, value * kDepth, "ag-gemm");
                    });
        break;
      case Kind::kGemmReduceScatter:
        done =
            take(GemmReduceScatter::create(session, {rows, columns, kDepth}, tuning),
                 [place, rows, columns](GemmReduceScatter& op, std::uint32_t value) -> Status {
                   const Elements a = filled(rows * kDepth, value);
                   const Elements b = filled(kDepth * columns, 1);
                   Elements c(rows_of_rank(rows, place.world, place.rank).count * columns, 0xffff);
                   MK_ASSIGN_OR_RETURN(
                       [[maybe_unused]] const auto stats,
                       op.launch(a.data(), b.data(), c.data(), rows, LaunchMode::kFused));
                   return expect_all(c, value * kDepth * place.world, "gemm-rs");
                 });
        break;
      case Kind::kGemmAllReduce:
        done = take(GemmAllReduce::create(session, {rows, columns, kDepth}, tuning),
                    [place, rows, columns](GemmAllReduce& op, std::uint32_t value) -> Status {
                      const Elements a = filled(rows * kDepth, value);
                      const Elements b = filled(kDepth * columns, 1);
                      Elements c(rows * columns, 0xffff);
                      MK_ASSIGN_OR_RETURN(
                          [[maybe_unused]] const auto stats,
                          op.launch(a.data(), b.data(), c.data(), rows, LaunchMode::kFused));
                      return expect_all(c, value * kDepth * place.world, "gemm-ar");
                    });
        break;
      case Kind::kMoeDispatchGemm: {
        MoeDispatchGemm::Shape shape;
        shape.tokens_max = rows;
        shape.hidden = kDepth;
        shape.features = columns;
        shape.experts = place.world;
        shape.top_k = 1;
        // Every rank's tokens go to the next rank's expert.
        done =
            take(MoeDispatchGemm::create(session, shape, tuning),
                 [place, rows, columns](MoeDispatchGemm& op, std::uint32_t value) -> Status {
                   const Elements tokens = filled(rows * kDepth, value);
                   const std::vector<std::int32_t> ids(
                       rows, static_cast<std::int32_t>((place.rank + 1) % place.world));
                   const std::vector<float> weights(rows, 1.0f);
                   const Elements experts = filled(kDepth * columns, 1);
                   Elements y(rows * columns, 0xffff);
                   MK_ASSIGN_OR_RETURN(
                       [[maybe_unused]] const auto stats,
                       op.launch({tokens.data(), ids.data(), weights.data(), rows, experts.data()},
                                 {y.data(), rows}, LaunchMode::kFused));
                   return expect_all(y, value * kDepth, "moe-dispatch");
                 });
        break;
      }
      case Kind::kGemmCombine: {
        GemmCombine::Shape shape;
        shape.tokens_max = rows;
        shape.hidden = columns;
        shape.features = kDepth;
        shape.experts = place.world;
        shape.top_k = 1;
        // This rank's expert has the rows of the rank before it.
        done = take(
            GemmCombine::create(session, shape, tuning),
            [place, rows, columns](GemmCombine& op, std::uint32_t value) -> Status {
              const Elements y = filled(rows * kDepth, value);
              std::vector<MoeRow> whose;
              for (std::uint32_t token = 0; token < rows; ++token)
                whose.push_back({(place.rank + place.world - 1) % place.world, token, 0, 1.0f});
              const std::vector<std::uint32_t> offsets = {0, static_cast<std::uint32_t>(rows)};
              const Elements experts = filled(kDepth * columns, 1);
              const std::vector<std::int32_t> ids(
                  rows, static_cast<std::int32_t>((place.rank + 1) % place.world));
              Elements out(rows * columns, 0xffff);
              MK_ASSIGN_OR_RETURN(
                  [[maybe_unused]] const auto stats,
                  op.launch({y.data(), whose, offsets, experts.data(), ids.data(), rows},
                            out.data(), LaunchMode::kFused));
              return expect_all(out, value * kDepth, "combine");
            });
        break;
      }
      case Kind::kRingAttention: {
        constexpr std::uint32_t kHeadDim = 64;
        const std::uint64_t seq = rows * place.world;
        RingAttention::Tuning own;
        static_cast<Tuning&>(own) = tuning;
        done = take(RingAttention::create(session, {seq, 2, 1, kHeadDim, size % 2 == 1}, own),
                    [rows, seq](RingAttention& op, std::uint32_t value) -> Status {
                      const Elements q = filled(rows * 2 * kHeadDim, 1);
                      const Elements k = filled(rows * kHeadDim, 1);
                      const Elements v = filled(rows * kHeadDim, value);
                      Elements out(rows * 2 * kHeadDim, 0xffff);
                      MK_ASSIGN_OR_RETURN([[maybe_unused]] const auto stats,
                                          op.launch({q.data(), k.data(), v.data()}, {out.data()},
                                                    seq, LaunchMode::kFused));
                      return expect_all(out, value, "ring-attention");
                    });
        break;
      }
#define MK_CASE(id, name, Class)                                 \
  case Kind::k##Class:                                           \
    done = take(Class::create(session, {rows, columns}, tuning), \
                collective_launch(rows, columns, place, name));  \
    break;
        MK_COLLECTIVES(MK_CASE)
#undef MK_CASE
    }
    if (!done) return propagate(done);
    return made;
  }

  /// All of the inputs that make a difference are `value`, 1 to 4; checks the result. Ranks launch
  /// with the same.
  Status launch(std::uint32_t value) { return launch_(value); }

 private:
  /// So that all results are whole numbers that bf16 has: up to 256, of four ranks.
  static constexpr std::uint32_t kDepth = 16;
  AnyOperator() = default;
  std::function<Status(std::uint32_t)> launch_;
};

}  // namespace mk::test
