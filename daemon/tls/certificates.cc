#include "daemon/tls/certificates.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <fstream>
#include <iterator>
#include <set>

#include "daemon/tls/openssl.h"

namespace mk::daemon {
namespace {

using Kind = TlsFault::Kind;

TlsContents::File read(const std::string& path) {
  TlsContents::File read;
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (file) read.text.assign(std::istreambuf_iterator<char>(file), {});
  if (!file || file.bad()) read.error = errno != 0 ? errno : EIO;
  return read;
}

std::int64_t unix_of(const ASN1_TIME* time) {
  std::tm parts{};
  return ASN1_TIME_to_tm(time, &parts) == 1 ? static_cast<std::int64_t>(::timegm(&parts)) : 0;
}

std::string dates_fault(const X509& certificate, const std::string& whose, std::int64_t now) {
  const std::int64_t from = unix_of(X509_get0_notBefore(&certificate));
  const std::int64_t until = unix_of(X509_get0_notAfter(&certificate));
  if (now > until) {
    return fmt::format("{} expired on {}: a new one is needed", whose, utc_text(until));
  }
  if (now < from) {
    return fmt::format(
        "{} is not valid before {}, and it is {} here: check the clocks, or wait for that time",
        whose, utc_text(from), utc_text(now));
  }
  return {};
}

std::string address_text(const ASN1_OCTET_STRING& address) {
  const unsigned char* const bytes = ASN1_STRING_get0_data(&address);
  const int size = ASN1_STRING_length(&address);
  if (size == 4) return fmt::format("{}.{}.{}.{}", bytes[0], bytes[1], bytes[2], bytes[3]);
  std::string text;
  for (int i = 0; i + 1 < size; i += 2) {
    text += fmt::format("{}{:x}", i == 0 ? "" : ":", bytes[i] * 256 + bytes[i + 1]);
  }
  return text;
}

/// Those of subjectAltName; where there are none, the subject's common name.
std::vector<std::string> names_of(const X509& certificate) {
  std::vector<std::string> names;
  auto* const all = static_cast<GENERAL_NAMES*>(
      X509_get_ext_d2i(&certificate, NID_subject_alt_name, nullptr, nullptr));
  for (int i = 0; i < sk_GENERAL_NAME_num(all); ++i) {
    const GENERAL_NAME& name = *sk_GENERAL_NAME_value(all, i);
    if (name.type == GEN_DNS) {
      names.emplace_back(reinterpret_cast<const char*>(ASN1_STRING_get0_data(name.d.dNSName)),
                         static_cast<std::size_t>(ASN1_STRING_length(name.d.dNSName)));
    } else if (name.type == GEN_IPADD) {
      names.push_back(address_text(*name.d.iPAddress));
    }
  }
  GENERAL_NAMES_free(all);
  if (!names.empty()) return names;
  char common[256];
  const int bytes = X509_NAME_get_text_by_NID(X509_get_subject_name(&certificate), NID_commonName,
                                              common, sizeof common);
  if (bytes > 0) names.emplace_back(common, static_cast<std::size_t>(bytes));
  return names;
}

bool made_out_to(X509& certificate, const std::string& name) {
  return X509_check_ip_asc(&certificate, name.c_str(), 0) == 1 ||
         X509_check_host(&certificate, name.c_str(), name.size(), 0, nullptr) == 1;
}

std::string name_fault(X509& certificate, const std::string& whose, const std::string& name) {
  if (name.empty() || made_out_to(certificate, name)) return {};
  return fmt::format("{} is made out to '{}', and not to '{}'", whose,
                     fmt::join(names_of(certificate), "', '"), name);
}

/// What the check of a chain has found; every error is noted, and none ends the check.
struct ChainErrors {
  std::set<int> seen;
  std::string chain, dates;
};

int note_chain_error(int good, X509_STORE_CTX* context) {
  if (good == 1) return 1;
  auto& errors = *static_cast<ChainErrors*>(X509_STORE_CTX_get_app_data(context));
  const int error = X509_STORE_CTX_get_error(context);
  X509* const at = X509_STORE_CTX_get_current_cert(context);
  const bool dates = error == X509_V_ERR_CERT_HAS_EXPIRED || error == X509_V_ERR_CERT_NOT_YET_VALID;
  if (dates && X509_STORE_CTX_get_error_depth(context) == 0) return 1;  // said for itself
  std::string& text = dates ? errors.dates : errors.chain;
  if (!text.empty()) return 1;
  text = X509_verify_cert_error_string(error);
  if (at != nullptr) {
    text += fmt::format("; subject {}, issuer {}", text_of(X509_get_subject_name(at)),
                        text_of(X509_get_issuer_name(at)));
    if (error == X509_V_ERR_CERT_HAS_EXPIRED)
      text += fmt::format(", expired on {}", utc_text(unix_of(X509_get0_notAfter(at))));
  }
  return 1;
}

ChainErrors check_chain(const std::vector<OwnedX509>& own, const std::vector<OwnedX509>& trusted,
                        std::int64_t now) {
  ChainErrors errors;
  const OwnedStore store(X509_STORE_new());
  for (const OwnedX509& one : trusted) X509_STORE_add_cert(store.get(), one.get());
  STACK_OF(X509)* between = sk_X509_new_null();
  for (std::size_t i = 1; i < own.size(); ++i) sk_X509_push(between, own[i].get());
  {
    const OwnedStoreContext context(X509_STORE_CTX_new());
    X509_STORE_CTX_init(context.get(), store.get(), own.front().get(), between);
    X509_VERIFY_PARAM* const how = X509_STORE_CTX_get0_param(context.get());
    X509_VERIFY_PARAM_set_time(how, static_cast<std::time_t>(now));
    // A CA between counts as trusted where it is named: what gRPC does, and no false alarm.
    X509_VERIFY_PARAM_set_flags(how, X509_V_FLAG_PARTIAL_CHAIN);
    X509_STORE_CTX_set_app_data(context.get(), &errors);
    X509_STORE_CTX_set_verify_cb(context.get(), note_chain_error);
    X509_verify_cert(context.get());
  }
  sk_X509_free(between);
  ERR_clear_error();
  return errors;
}

/// The owner's certificate and those between it and the CA.
void look_at_certificate(const TlsFiles& files, const std::vector<OwnedX509>& own,
                         const std::vector<OwnedX509>& trusted, std::int64_t now,
                         TlsReport& report) {
  X509& leaf = *own.front();
  const std::string whose = fmt::format("{}.cert {}", files.section, files.cert);
  for (const OwnedX509& one : own) {
    const std::int64_t until = unix_of(X509_get0_notAfter(one.get()));
    report.expires = std::min(report.expires.value_or(until), until);
  }
  report.names = names_of(leaf);
  const auto note = [&report](Kind kind, std::string text) {
    if (!text.empty()) report.faults.push_back({kind, std::move(text)});
  };
  note(Kind::kDates, dates_fault(leaf, whose, now));
  for (const std::string& name : files.names) note(Kind::kName, name_fault(leaf, whose, name));
  const auto serves = [&leaf](int purpose) { return X509_check_purpose(&leaf, purpose, 0) == 1; };
  if (!serves(X509_PURPOSE_SSL_CLIENT) || (files.server && !serves(X509_PURPOSE_SSL_SERVER))) {
    note(Kind::kUse,
         fmt::format("{} is not meant for TLS {}: let its extendedKeyUsage be {}", whose,
                     files.server ? "servers and clients, and a daemon is both" : "clients",
                     files.server ? "serverAuth and clientAuth" : "clientAuth"));
  }
  if (trusted.empty()) return;
  const ChainErrors errors = check_chain(own, trusted, now);
  if (!errors.chain.empty()) {
    note(Kind::kChain, fmt::format("{} is not signed by {}.ca {} ({}): name the CA that signs the "
                                   "daemons' certificates",
                                   whose, files.section, files.ca, errors.chain));
  }
  if (!errors.dates.empty()) {
    note(Kind::kDates, fmt::format("a CA of {} is outside of its dates ({}): a new one is needed",
                                   whose, errors.dates));
  }
}

}  // namespace

std::string utc_text(std::int64_t unix_seconds) {
  return fmt::format("{:%Y-%m-%d %H:%M:%S} UTC",
                     fmt::gmtime(static_cast<std::time_t>(unix_seconds)));
}

std::int64_t unix_now() {
  return std::chrono::duration_cast<std::chrono::seconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

std::string fault_of(X509& certificate, const std::string& whose, const std::string& name,
                     std::int64_t now) {
  std::string fault = dates_fault(certificate, whose, now);
  return fault.empty() ? name_fault(certificate, whose, name) : fault;
}

TlsContents read_contents(const TlsFiles& files) {
  return {read(files.cert), read(files.key), read(files.ca)};
}

TlsReport look_at(const TlsFiles& files, const TlsContents& contents, std::int64_t now) {
  TlsReport report;
  const auto text_of = [&](const char* which, const std::string& path,
                           const TlsContents::File& file) {
    if (file.error == 0) return &file.text;
    report.faults.push_back(
        {Kind::kFile, fmt::format("{}.{} {} cannot be read: {}; name a file that the daemon's user "
                                  "may read",
                                  files.section, which, path, errno_text(file.error))});
    return static_cast<const std::string*>(nullptr);
  };
  const std::string* const cert = text_of("cert", files.cert, contents.cert);
  const std::string* const key = text_of("key", files.key, contents.key);
  const std::string* const ca = text_of("ca", files.ca, contents.ca);
  const auto no_pem = [&](const char* which, const std::string& path, const char* what) {
    report.faults.push_back({Kind::kFile, fmt::format("{}.{} {} holds no {} in PEM form",
                                                      files.section, which, path, what)});
  };
  const auto own = cert ? certificates_of(*cert) : std::vector<OwnedX509>();
  const auto trusted = ca ? certificates_of(*ca) : std::vector<OwnedX509>();
  const OwnedKey secret = key ? key_of(*key) : OwnedKey();
  if (cert && own.empty()) no_pem("cert", files.cert, "certificate");
  if (key && !secret) no_pem("key", files.key, "private key without a passphrase");
  if (ca && trusted.empty()) no_pem("ca", files.ca, "certificate");
  if (own.empty()) return report;
  if (secret && X509_check_private_key(own.front().get(), secret.get()) != 1) {
    ERR_clear_error();
    report.faults.push_back(
        {Kind::kPair, fmt::format("{0}.key {1} does not belong to {0}.cert {2}: name the key that "
                                  "the certificate was made for",
                                  files.section, files.key, files.cert)});
  }
  look_at_certificate(files, own, trusted, now, report);
  return report;
}

}  // namespace mk::daemon
