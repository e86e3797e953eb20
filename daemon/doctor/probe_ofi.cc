#include "daemon/doctor/probe.h"

#ifdef MK_HAVE_OFI
#include "daemon/fabric/ofi/survey.h"
#endif

namespace mk::doctor {

void probe_ofi(Facts& facts) {
#ifdef MK_HAVE_OFI
  const fabric::ofi::Survey survey = fabric::ofi::survey();
  facts.ofi_version = survey.version;
  facts.ofi_version_number = survey.version_number;
  for (const auto& [name, version] : survey.providers) facts.providers.push_back({name, version});
#else
  facts.ofi_version.clear();
#endif
}

}  // namespace mk::doctor
