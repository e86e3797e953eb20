#include "daemon/service/own_certificates.h"

#include <algorithm>

namespace mk::daemon {

void OwnCertificates::note(const TlsReport& report) {
  const std::vector<std::string> before = faults();
  {
    std::lock_guard lock(mutex_);
    report_ = report;
  }
  for (const TlsFault& fault : report.faults) {
    if (std::ranges::find(before, fault.text) == before.end()) {
      logger_.write(LogLevel::kError, fault.text);
    }
  }
  if (report.faults.empty() && !before.empty()) {
    logger_.write(LogLevel::kInfo, "nothing is wrong with the certificates of [tls] any more");
  }
}

std::vector<std::string> OwnCertificates::faults() const {
  std::lock_guard lock(mutex_);
  std::vector<std::string> texts;
  for (const TlsFault& fault : report_.faults) texts.push_back(fault.text);
  return texts;
}

std::string OwnCertificates::why_dead() const {
  std::lock_guard lock(mutex_);
  const auto dead = std::ranges::find_if(report_.faults, &TlsFault::dead);
  return dead == report_.faults.end() ? std::string() : dead->text;
}

CertificateMetrics OwnCertificates::metrics() const {
  std::lock_guard lock(mutex_);
  return {report_.faults.size(), report_.expires};
}

}  // namespace mk::daemon
