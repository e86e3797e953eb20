/// \file
/// PeerMessage as a struct and as protobuf. What comes from outside is checked against the ABI's
/// limits here, so that the control plane sees only values that fit its types.
#pragma once

#include "daemon/control/peer_transport.h"
#include "proto/mkernel/v1/peer.pb.h"

namespace mk::daemon {

namespace v1 = ::mkernel::v1;

/// Every value survives the way there and back.
v1::PeerMessage to_proto(const PeerMessage& message);
/// kProtocol when the message is of no known kind (a newer peer's), or a value is out of its
/// limits.
Result<PeerMessage> from_proto(const v1::PeerMessage& message);

}  // namespace mk::daemon
