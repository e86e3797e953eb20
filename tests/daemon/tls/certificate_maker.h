// Certificates with the faults that a test wants: no program, no RSA keys, no waiting for dates.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace mk::daemon {

struct Wanted {
  std::string names = "DNS:localhost,IP:127.0.0.1";  ///< subjectAltName; empty: none
  std::int64_t from_s = -3600, until_s = 86'400;     ///< from now
  std::string use{};                                 ///< extendedKeyUsage; empty: any
};

/// A CA of its own in `folder`: NAME.pem, and what it signs as OWNER-cert.pem and OWNER-key.pem.
class CertificateMaker {
 public:
  CertificateMaker(std::string folder, std::string name, Wanted wanted = {});
  ~CertificateMaker();
  CertificateMaker(const CertificateMaker&) = delete;
  CertificateMaker& operator=(const CertificateMaker&) = delete;
  /// The files take the place of older ones, each at once.
  void make(const std::string& owner, const Wanted& wanted = {}) const;

 private:
  struct Pair;
  const std::string folder_, name_;
  Pair* const ca_;
};

}  // namespace mk::daemon
