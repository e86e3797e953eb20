/// \file
/// libfabric objects that close themselves, and its errors as ours.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include <memory>

#include "shm/host/result.h"

namespace mk::fabric::ofi {

/// Whether this is built with a libfabric that knows dmabufs (1.20).
#if FI_MAJOR_VERSION > 1 || FI_MINOR_VERSION >= 20
#define MK_OFI_DMABUF 1
#else
#define MK_OFI_DMABUF 0
#endif

struct FidCloser {
  template <class T>
  void operator()(T* object) const {
    // Nothing can be done about a refusal here: it means an object was closed before those that use
    // it.
    [[maybe_unused]] const int ignored = ::fi_close(&object->fid);
  }
};
template <class T>
using Fid = std::unique_ptr<T, FidCloser>;

struct InfoCloser {
  void operator()(fi_info* info) const { ::fi_freeinfo(info); }
};
using Info = std::unique_ptr<fi_info, InfoCloser>;

/// An Error for a failed libfabric call; `rc` is its negative return value.
template <class... Args>
tl::unexpected<Error> fail_fi(long rc, fmt::format_string<Args...> format, Args&&... args) {
  return tl::unexpected<Error>(Error{
      rc == -FI_ENOMEM ? ErrorCode::kLimitExceeded : ErrorCode::kUnavailable,
      fmt::format(format, std::forward<Args>(args)...) +
          fmt::format(": {} (libfabric error {})", ::fi_strerror(static_cast<int>(-rc)), -rc)});
}

}  // namespace mk::fabric::ofi
