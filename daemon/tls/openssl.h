/// \file
/// OpenSSL's objects with owners. Private to this folder.
#pragma once

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509_vfy.h>
#include <openssl/x509v3.h>

#include <memory>
#include <string>
#include <vector>

namespace mk::daemon {

template <auto kFree>
struct Freed {
  template <class T>
  void operator()(T* object) const {
    kFree(object);
  }
};
using OwnedBio = std::unique_ptr<BIO, Freed<BIO_free>>;
using OwnedX509 = std::unique_ptr<X509, Freed<X509_free>>;
using OwnedKey = std::unique_ptr<EVP_PKEY, Freed<EVP_PKEY_free>>;
using OwnedStore = std::unique_ptr<X509_STORE, Freed<X509_STORE_free>>;
using OwnedStoreContext = std::unique_ptr<X509_STORE_CTX, Freed<X509_STORE_CTX_free>>;
using OwnedContext = std::unique_ptr<SSL_CTX, Freed<SSL_CTX_free>>;
using OwnedSsl = std::unique_ptr<SSL, Freed<SSL_free>>;

/// The newest error of this thread, for users; empties OpenSSL's queue.
inline std::string openssl_error() {
  const unsigned long code = ERR_peek_last_error();
  ERR_clear_error();
  const char* const reason = code != 0 ? ERR_reason_error_string(code) : nullptr;
  return reason != nullptr ? reason : "no reason given";
}

/// All certificates of a PEM text, the owner's first.
inline std::vector<OwnedX509> certificates_of(const std::string& pem) {
  std::vector<OwnedX509> all;
  const OwnedBio in(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
  while (X509* one = PEM_read_bio_X509(in.get(), nullptr, nullptr, nullptr)) all.emplace_back(one);
  ERR_clear_error();
  return all;
}

/// Null where the text holds none, or one with a passphrase: a daemon asks nobody for that.
inline OwnedKey key_of(const std::string& pem) {
  const OwnedBio in(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
  OwnedKey key(PEM_read_bio_PrivateKey(
      in.get(), nullptr, [](char*, int, int, void*) { return -1; }, nullptr));
  ERR_clear_error();
  return key;
}

/// "CN = node7, O = us"
inline std::string text_of(const X509_NAME* name) {
  const OwnedBio out(BIO_new(BIO_s_mem()));
  X509_NAME_print_ex(out.get(), name, 0, XN_FLAG_ONELINE & ~ASN1_STRFLGS_ESC_MSB);
  char* text = nullptr;
  const long bytes = BIO_get_mem_data(out.get(), &text);
  return bytes > 0 ? std::string(text, static_cast<std::size_t>(bytes)) : "(no name)";
}

}  // namespace mk::daemon
