/// \file
/// What --json prints, as a JSON Schema (draft 2020-12), made from the messages themselves.
#pragma once

#include "daemon/mkctl/json.h"

namespace mk::mkctl {

/// "$defs" has one definition per message; "commands" says which of them each command prints.
Json json_schema();

}  // namespace mk::mkctl
