// What another daemon says: any bytes as a PeerMessage. What is accepted goes the way back to the
// same message.
#include <cstdlib>

#include "daemon/service/peer_convert.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes);
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  mkernel::v1::PeerMessage message;
  if (!message.ParseFromArray(data, static_cast<int>(bytes))) return 0;
  const auto taken = mk::daemon::from_proto(message);
  if (!taken) {
    if (taken.error().message.empty()) std::abort();
    return 0;
  }
  const auto back = mk::daemon::to_proto(*taken);
  const auto again = mk::daemon::from_proto(back);
  if (!again || mk::daemon::to_proto(*again).SerializeAsString() != back.SerializeAsString()) {
    std::abort();
  }
  return 0;
}
