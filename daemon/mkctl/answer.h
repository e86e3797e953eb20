/// \file
/// What a daemon answered to a command, for users and for scripts.
#pragma once

#include <google/protobuf/message.h>

#include <string>

#include "daemon/mkctl/json.h"

namespace mk::mkctl {

/// Exit codes. Of several daemons, the greatest.
inline constexpr int kExitOk = 0;
inline constexpr int kExitUnhealthy = 1;  ///< the daemon answered, but is not well, or refused
inline constexpr int kExitUsage = 2;
inline constexpr int kExitUnreachable = 3;

/// The version of everything that --json prints: fields are only added under one number.
inline constexpr int kSchemaVersion = 1;

struct Answer {
  int code = kExitOk;
  std::string text;   ///< for users; lines end with a newline
  Json json;          ///< an object; null when there is only an error
  std::string error;  ///< one sentence; empty: none
};

inline Answer answer_of(const google::protobuf::Message& message, std::string text,
                        int code = kExitOk) {
  return {code, std::move(text), json_of(message), ""};
}
/// The JSON of one object, with the version and the command in front.
inline Json envelope(const std::string& command, const Json& body) {
  Json out = Json::object();
  out["schema_version"] = kSchemaVersion;
  out["command"] = command;
  if (body.is_object()) out.update(body);
  return out;
}

inline Answer error_answer(int code, std::string error) {
  return {code, "", nullptr, std::move(error)};
}

}  // namespace mk::mkctl
