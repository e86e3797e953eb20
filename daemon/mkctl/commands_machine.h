/// \file
/// mkctl topology, mkctl doctor: about this machine, without a daemon.
#pragma once

#include "daemon/mkctl/commands.h"

namespace mk::mkctl {

void declare_machine_commands(Commands& commands);

}  // namespace mk::mkctl
