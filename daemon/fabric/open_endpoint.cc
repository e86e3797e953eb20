#include <algorithm>

#include "daemon/fabric/fabric.h"
#include "daemon/fabric/loopback/endpoint.h"
#include "daemon/fabric/null_fabric.h"
#include "daemon/fabric/staged/endpoint.h"
#include "daemon/fabric/striped/endpoint.h"
#ifdef MK_HAVE_OFI
#include "daemon/fabric/ofi/endpoint.h"
#endif
#ifdef MK_HAVE_VERBS
#include "daemon/fabric/verbs/endpoint.h"
#endif

namespace mk::fabric {

namespace {

/// The setting that names this rail's NICs; null where a fabric has none.
std::string* nic_names(EndpointConfig& config) {
  if (config.fabric == "ofi") return &config.bind_address;
  if (config.fabric != "verbs" || config.verbs.devices.empty()) return nullptr;
  return &config.verbs.devices[config.rail % config.verbs.devices.size()];
}

Result<std::unique_ptr<Endpoint>> open_plain(const EndpointConfig& config);

/// A rail of the NICs "a+b+...": an endpoint of each, as one.
Result<std::unique_ptr<Endpoint>> open_stripes(const EndpointConfig& config,
                                               const std::string& names) {
  std::vector<std::unique_ptr<Endpoint>> stripes;
  for (std::size_t at = 0; at <= names.size();) {
    const std::size_t end = std::min(names.find('+', at), names.size());
    if (end == at) {
      return fail(ErrorCode::kInvalidArgument,
                  "\"{}\" is no list of NICs: it is names with '+' in between", names);
    }
    EndpointConfig one = config;
    *nic_names(one) = names.substr(at, end - at);
    MK_ASSIGN_OR_RETURN(auto endpoint, open_plain(one));
    stripes.push_back(std::move(endpoint));
    at = end + 1;
  }
  return make_striped_endpoint(std::move(stripes));
}

Result<std::unique_ptr<Endpoint>> open_plain(const EndpointConfig& config) {
  EndpointConfig naming = config;
  const std::string* const names = nic_names(naming);
  if (names != nullptr && names->find('+') != std::string::npos)
    return open_stripes(config, *names);
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

}  // namespace

Result<std::unique_ptr<Endpoint>> open_endpoint(const EndpointConfig& config) {
  MK_ASSIGN_OR_RETURN(auto plain, open_plain(config));
  if (config.fabric != "ofi" && config.fabric != "verbs") return plain;
  StagedOptions staging;
  staging.direct = config.verbs.gpu_direct;
  staging.open_carrier = [carrier = config]() mutable {
    carrier.verbs.arrival = "immediate";
    carrier.gpu_memory = carrier.verbs.gpu_direct;
    return open_plain(carrier);
  };
  return make_staged_endpoint(std::move(plain), std::move(staging));
}

}  // namespace mk::fabric
