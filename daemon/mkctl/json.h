/// \file
/// Any protobuf message as JSON for scripts.
#pragma once

#include <google/protobuf/message.h>

#include <nlohmann/json.hpp>
#include <string>

namespace mk::mkctl {

using Json = nlohmann::ordered_json;

/// All fields by their names in the .proto, also those at their defaults. Unlike protobuf's own
/// mapping, 64-bit counts are numbers; fixed64 fields, which are identifiers, are strings of
/// 16 hexadecimal digits. Enumerators are lower-case without their prefix ("up").
Json json_of(const google::protobuf::Message& message);

/// STATE_UP of the enumeration State is "up".
std::string json_name(const google::protobuf::EnumValueDescriptor& value);

/// As text; what is not UTF-8 is replaced rather than refused. `indent` < 0: one line.
std::string text_of(const Json& json, int indent);
std::string to_json(const google::protobuf::Message& message, int indent);

}  // namespace mk::mkctl
