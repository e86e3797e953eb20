#include "tests/daemon/tls/certificate_maker.h"

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>

namespace mk::daemon {
namespace {

/// A test that cannot make its certificates cannot say anything.
template <class T>
T must(T value) {
  if (!value) std::abort();
  return value;
}

template <class Write>
void write_file(const std::string& path, Write&& write) {
  std::FILE* const file = must(std::fopen((path + ".new").c_str(), "w"));
  must(write(file) == 1);
  must(std::fclose(file) == 0);
  must(std::rename((path + ".new").c_str(), path.c_str()) == 0);
}

void extend(X509* certificate, X509* issuer, int kind, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* const one = must(X509V3_EXT_conf_nid(nullptr, &context, kind, value.c_str()));
  X509_add_ext(certificate, one, -1);
  X509_EXTENSION_free(one);
}

}  // namespace

struct CertificateMaker::Pair {
  X509* certificate = must(X509_new());
  EVP_PKEY* key = must(EVP_EC_gen("P-256"));

  Pair(const std::string& owner, const Wanted& wanted, const Pair* ca) {
    static long serial = 1;
    X509_set_version(certificate, 2);
    ASN1_INTEGER_set(X509_get_serialNumber(certificate), ++serial);
    ASN1_TIME_set(X509_getm_notBefore(certificate), std::time(nullptr) + wanted.from_s);
    ASN1_TIME_set(X509_getm_notAfter(certificate), std::time(nullptr) + wanted.until_s);
    X509_set_pubkey(certificate, key);
    X509_NAME_add_entry_by_txt(X509_get_subject_name(certificate), "CN", MBSTRING_ASC,
                               reinterpret_cast<const unsigned char*>(owner.c_str()), -1, -1, 0);
    const Pair& issuer = ca != nullptr ? *ca : *this;
    X509_set_issuer_name(certificate, X509_get_subject_name(issuer.certificate));
    if (ca == nullptr) {
      extend(certificate, issuer.certificate, NID_basic_constraints, "critical,CA:TRUE");
    } else if (!wanted.names.empty()) {
      extend(certificate, issuer.certificate, NID_subject_alt_name, wanted.names);
    }
    if (!wanted.use.empty()) {
      extend(certificate, issuer.certificate, NID_ext_key_usage, wanted.use);
    }
    must(X509_sign(certificate, issuer.key, EVP_sha256()));
  }
  ~Pair() {
    X509_free(certificate);
    EVP_PKEY_free(key);
  }
  void write_certificate(const std::string& path) const {
    write_file(path, [this](std::FILE* file) { return PEM_write_X509(file, certificate); });
  }
  void write_key(const std::string& path) const {
    write_file(path, [this](std::FILE* file) {
      return PEM_write_PrivateKey(file, key, nullptr, nullptr, 0, nullptr, nullptr);
    });
  }
};

CertificateMaker::CertificateMaker(std::string folder, std::string name, Wanted wanted)
    : folder_(std::move(folder)), name_(std::move(name)), ca_(new Pair(name_, wanted, nullptr)) {
  ca_->write_certificate(folder_ + "/" + name_ + ".pem");
}

CertificateMaker::~CertificateMaker() { delete ca_; }

void CertificateMaker::make(const std::string& owner, const Wanted& wanted) const {
  const Pair pair(owner, wanted, ca_);
  pair.write_key(folder_ + "/" + owner + "-key.pem");
  pair.write_certificate(folder_ + "/" + owner + "-cert.pem");
}

}  // namespace mk::daemon
