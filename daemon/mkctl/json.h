/// \file
/// Any protobuf message as JSON for scripts.
#pragma once

#include <google/protobuf/message.h>

#include <string>

namespace mk::mkctl {

/// All fields by their names in the .proto, also those at their defaults. Unlike protobuf's own
/// mapping, 64-bit counts are numbers; fixed64 fields, which are identifiers, are strings of
/// 16 hexadecimal digits. Enumerators are lower-case without their prefix ("up"). `indent` < 0: one
/// line.
std::string to_json(const google::protobuf::Message& message, int indent);

}  // namespace mk::mkctl
