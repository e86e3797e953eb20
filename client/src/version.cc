#include "mk_version.h"
#include "mkernel/session.h"

namespace mk {

const char* version() { return MK_VERSION; }

}  // namespace mk
