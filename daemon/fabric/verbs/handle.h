/// \file
/// libibverbs' objects that close themselves, and its errors as ours.
#pragma once

#include <infiniband/verbs.h>

#include <cerrno>
#include <memory>

#include "shm/host/result.h"

namespace mk::fabric::verbs {

template <auto Close>
struct Closer {
  template <class T>
  void operator()(T* object) const {
    // A refusal means that something still uses the object; nothing can be done about it here.
    [[maybe_unused]] const int ignored = Close(object);
  }
};
using ContextHandle = std::unique_ptr<ibv_context, Closer<&::ibv_close_device>>;
using DomainHandle = std::unique_ptr<ibv_pd, Closer<&::ibv_dealloc_pd>>;
using RegionHandle = std::unique_ptr<ibv_mr, Closer<&::ibv_dereg_mr>>;
using ChannelHandle = std::unique_ptr<ibv_comp_channel, Closer<&::ibv_destroy_comp_channel>>;
using CompletionQueueHandle = std::unique_ptr<ibv_cq, Closer<&::ibv_destroy_cq>>;
using ReceiveQueueHandle = std::unique_ptr<ibv_srq, Closer<&::ibv_destroy_srq>>;
using QueuePairHandle = std::unique_ptr<ibv_qp, Closer<&::ibv_destroy_qp>>;
using PathHandle = std::unique_ptr<ibv_ah, Closer<&::ibv_destroy_ah>>;

/// An Error for a verb that failed; `error` is an errno value.
template <class... Args>
tl::unexpected<Error> fail_verb(int error, fmt::format_string<Args...> format, Args&&... args) {
  const std::string hint =
      error == ENOMEM ? "; is the limit on locked memory too small? (`ulimit -l`, LimitMEMLOCK=)"
                      : "";
  return tl::unexpected<Error>(
      Error{error == ENOMEM ? ErrorCode::kLimitExceeded : ErrorCode::kUnavailable,
            fmt::format(format, std::forward<Args>(args)...) + ": " + errno_text(error) + hint});
}

}  // namespace mk::fabric::verbs
