#include "daemon/fabric/ofi/survey.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "daemon/fabric/ofi/domain.h"

namespace mk::fabric::ofi {
namespace {

/// Providers that come with libfabric have its release as 117.0 for 1.17.
std::string provider_version(std::uint32_t version) {
  constexpr unsigned kReleases = 100;
  const unsigned major = FI_MAJOR(version);
  if (major < kReleases) return version_text(version);
  return fmt::format("{}.{}", major / kReleases, major % kReleases);
}

}  // namespace

Survey survey() {
  Survey result;
  result.version_number = ::fi_version();
  result.version = version_text(result.version_number);
  const Info hints = make_hints({});
  if (!hints) return result;
  std::free(std::exchange(hints->fabric_attr->prov_name, nullptr));  // all of them
  fi_info* list = nullptr;
  if (::fi_getinfo(kApiVersion, nullptr, nullptr, 0, hints.get(), &list) != 0) return result;
  const Info owned(list);
  for (const fi_info* info = list; info != nullptr; info = info->next) {
    std::pair<std::string, std::string> one(info->fabric_attr->prov_name,
                                            provider_version(info->fabric_attr->prov_version));
    if (info->domain_attr->cq_data_size >= 4 &&
        std::ranges::find(result.providers, one) == result.providers.end())
      result.providers.push_back(std::move(one));
  }
  return result;
}

}  // namespace mk::fabric::ofi
