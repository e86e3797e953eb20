/// \file
/// What the functions of libibverbs begin and end with here, and what the NICs can do at most.
#pragma once

#include <cerrno>

#include "tests/daemon/fabric/verbs/soft_nic/network.h"

namespace mk::soft_nic {

inline constexpr int kWorkRequestsMax = 4096;
inline constexpr int kCompletionsMax = 65536;
inline constexpr std::uint32_t kInlineMax = 64;
inline constexpr std::uint32_t kMessageMax = 1 << 20;  ///< below the tests' longest write

/// Runs `body` under the lock, unless the test or the device refuses; errors as the verbs that
/// answer pointers give them.
template <class Body>
auto make(const char* function, ibv_context* context, Body&& body)
    -> decltype(body(Network::get())) {
  Network& network = Network::get();
  const std::lock_guard lock(network.mutex);
  if (const int error = network.refusal(function)) {
    errno = error;
    return nullptr;
  }
  if (context != nullptr && dead(context)) {
    errno = EIO;
    return nullptr;
  }
  auto* const made = body(network);
  if (made == nullptr) return made;
  ++network.objects;
  if (context != nullptr) ++network.made[context];
  return made;
}

/// The same for those that answer an error.
template <class Body>
int act(const char* function, Body&& body) {
  Network& network = Network::get();
  const std::lock_guard lock(network.mutex);
  if (const int error = network.refusal(function)) return error;
  return body(network);
}

/// `context`: that it was made of; null for one itself.
template <class T, class Body>
int destroy(T* object, ibv_context* context, Body&& body) {
  Network& network = Network::get();
  const std::lock_guard lock(network.mutex);
  body(network);
  --network.objects;
  if (context != nullptr) --network.made[context];
  delete object;
  return 0;
}

/// What a context needs of this file (queues.cc).
ibv_qp* create_qp_ex(ibv_context* context, ibv_qp_init_attr_ex* wanted);
int post_send(ibv_qp* qp, ibv_send_wr* list, ibv_send_wr** refused);
int post_recv(ibv_qp* qp, ibv_recv_wr* list, ibv_recv_wr** refused);
int post_srq_recv(ibv_srq* srq, ibv_recv_wr* list, ibv_recv_wr** refused);
/// Whether the path's own GID is in the device's table.
bool has_gid(const Device& device, const ibv_ah_attr& path);

}  // namespace mk::soft_nic
