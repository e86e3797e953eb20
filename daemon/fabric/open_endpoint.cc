#include "daemon/fabric/fabric.h"
#include "daemon/fabric/loopback/endpoint.h"
#include "daemon/fabric/null_fabric.h"
#ifdef MK_HAVE_OFI
#include "daemon/fabric/ofi/endpoint.h"
#endif
#ifdef MK_HAVE_VERBS
#include "daemon/fabric/verbs/endpoint.h"
#endif

namespace mk::fabric {

Result<std::unique_ptr<Endpoint>> open_endpoint(const EndpointConfig& config) {
  if (config.fabric == "loopback") return make_loopback_endpoint(config);
  if (config.fabric == "null") return make_null_endpoint(config);
  if (config.fabric == "ofi") {
#ifdef MK_HAVE_OFI
    return make_ofi_endpoint(config);
#else
    return fail(
        ErrorCode::kUnsupported,
        "fabric \"ofi\" is not in this build: install libfabric-dev and build with MK_OFI=ON");
#endif
  }
  if (config.fabric == "verbs") {
#ifdef MK_HAVE_VERBS
    return make_verbs_endpoint(config);
#else
    return fail(
        ErrorCode::kUnsupported,
        "fabric \"verbs\" is not in this build: install libibverbs-dev and build with MK_VERBS=ON");
#endif
  }
  return fail(ErrorCode::kInvalidArgument,
              "there is no fabric \"{}\": it is \"loopback\", \"ofi\", \"verbs\" or \"null\"",
              config.fabric);
}

}  // namespace mk::fabric
