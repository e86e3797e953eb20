#include "tests/gpu/client_unlike.h"

#include <fmt/format.h>

#include <memory>
#include <type_traits>
#include <utility>

#include "tests/gpu/client_collectives.h"
#include "tests/gpu/client_combine.h"
#include "tests/gpu/client_moe.h"
#include "tests/gpu/client_ring.h"

namespace mk {

template <class Tensors, class Create>
Result<UnlikeOperator> UnlikeOperator::made_of(Session& session, const Work& work,
                                               Create&& create) {
  auto tensors = std::make_shared<Tensors>(work, session.options());
  auto op = create(*tensors);
  if (!op) return tl::unexpected<Error>(op.error());
  using Op = typename decltype(op)::value_type;
  const auto kept = std::make_shared<Op>(std::move(*op));
  UnlikeOperator made;
  made.name_ = fmt::format("{} m={} n={} k={}", work.op, work.m, work.n, work.k);
  made.draw_ = [tensors](std::uint64_t launch, cudaStream_t stream) {
    tensors->draw(launch, stream);
  };
  made.launch_ = [tensors, kept, m = work.m](cudaStream_t stream) {
    return tensors->launch(*kept, stream, m);
  };
  made.finish_ = [kept](cudaStream_t stream) -> Status {
    const auto stats = kept->finish(stream);
    if (!stats) return tl::unexpected<Error>(stats.error());
    return {};
  };
  made.status_ = [kept] { return kept->status(); };
  made.bad_ = [tensors, m = work.m](cudaStream_t stream) { return tensors->bad(m, stream); };
  return made;
}

Result<UnlikeOperator> UnlikeOperator::create(Session& session, const Work& work, bool slow) {
  const auto multiply = [&]<class Op>() {
    return made_of<RankMatrices>(session, work, [&](const auto&) {
      return mk::create<Op>(session, work, std::chrono::seconds(20), slow ? 1 : 0);
    });
  };
#define MK_MAKE(id, name, Class)                                                              \
  if (work.op == name) {                                                                      \
    return made_of<RankParts<Class>>(                                                         \
        session, work, [&](const auto&) { return create_collective<Class>(session, work); }); \
  }
  MK_COLLECTIVES(MK_MAKE)
#undef MK_MAKE
  if (work.op == "ag-gemm") return multiply.operator()<AllGatherGemm>();
  if (work.op == "gemm-rs") return multiply.operator()<GemmReduceScatter>();
  if (work.op == "gemm-ar") return multiply.operator()<GemmAllReduce>();
  if (work.op == "moe" || work.op == "moe-engines") {
    return made_of<RankTokens>(session, work,
                               [&](const auto& tokens) { return create_moe(session, tokens); });
  }
  if (work.op == "combine") {
    return made_of<RankRows>(session, work,
                             [&](const auto& rows) { return create_combine(session, rows); });
  }
  return made_of<RankSequences>(session, work,
                                [&](const auto& rows) { return create_ring(session, rows); });
}

std::string launch_unlike(Session& session, const Work& work) {
  const std::uint32_t rank = session.options().rank;
  const bool last = rank + 1 == session.options().world;
  const auto wrong = [&](const char* step, const Error& error) {
    return fmt::format("rank {}, {}: {} ({})", rank, step, error.message,
                       error_code_name(error.code));
  };
  auto first =
      UnlikeOperator::create(session, {.op = "ag-gemm", .m = 4096, .n = 16384, .k = 16384}, last);
  if (!first) return wrong("create", first.error());
  auto second = UnlikeOperator::create(session, {.op = "gemm-ar", .m = 512, .n = 512, .k = 256});
  if (!second) return wrong("create", second.error());
  cudaStream_t stream = nullptr;
  test::require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  first->draw(1, stream);
  second->draw(1, stream);
  test::require(cudaStreamSynchronize(stream), "inputs");
  if (const Status here = session.barrier(); !here) return wrong("barrier", here.error());
  constexpr int kPairs = 150;
  for (int pair = 0; pair < kPairs; ++pair) {
    for (const UnlikeOperator* const one : {&*first, &*second}) {
      if (const Status put = one->launch(stream); !put) return wrong("launch", put.error());
    }
    if (pair == 0 && work.under_way) work.under_way();
  }
  const Status ended = second->finish(stream);
  cudaStreamDestroy(stream);
  if (!ended) return wrong("the launch that waits", ended.error());
  return "nothing held it up";
}

}  // namespace mk
