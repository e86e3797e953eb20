/// \file
/// What a device's asynchronous event means for links; pure.
#pragma once

#include <infiniband/verbs.h>

#include <string_view>

namespace mk::fabric::verbs {

struct EventMeaning {
  enum class Scope {
    kNothing,
    kQueue,      ///< the queue pair it names is in error
    kPort,       ///< all links of the port
    kPlace,      ///< all links of the port, whose LID is another one now
    kGidTable,   ///< all links, if the entry this endpoint speaks from changed
    kPkeyTable,  ///< all links, if the partition is at another place, or at none
    kDevice,     ///< all that was opened: it has to be opened anew
  };
  Scope scope = Scope::kNothing;
  std::string_view what;  ///< "the port went down"
};

constexpr EventMeaning meaning_of(ibv_event_type type) {
  using Scope = EventMeaning::Scope;
  switch (type) {
    case IBV_EVENT_PORT_ERR:
      return {Scope::kPort, "the port went down"};
    case IBV_EVENT_LID_CHANGE:
      return {Scope::kPlace, "the port's LID changed"};
    case IBV_EVENT_PKEY_CHANGE:
      return {Scope::kPkeyTable, "the port's partitions changed"};
    case IBV_EVENT_GID_CHANGE:
      return {Scope::kGidTable, "the port's GID changed (its address did)"};
    case IBV_EVENT_DEVICE_FATAL:
      return {Scope::kDevice, "the device failed"};
    case IBV_EVENT_CQ_ERR:
      return {Scope::kDevice, "a completion queue broke"};
    case IBV_EVENT_SRQ_ERR:
      return {Scope::kDevice, "the shared receive queue broke"};
    case IBV_EVENT_QP_FATAL:
      return {Scope::kQueue, "the NIC gave the queue pair up"};
    case IBV_EVENT_QP_REQ_ERR:
      return {Scope::kQueue, "the queue pair got an invalid request"};
    case IBV_EVENT_QP_ACCESS_ERR:
      return {Scope::kQueue, "the queue pair got a request for memory it may not touch"};
    case IBV_EVENT_PATH_MIG_ERR:
      return {Scope::kQueue, "the queue pair's path could not be changed"};
    default:
      return {};
  }
}

}  // namespace mk::fabric::verbs
