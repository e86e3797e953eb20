/// \file
/// The faults of a certificate, its key and its CA, before and while gRPC uses them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "shm/host/result.h"

typedef struct x509_st X509;

namespace mk::daemon {

/// PEM files and what they are for.
struct TlsFiles {
  std::string section;  ///< of the configuration: "tls", "discovery.etcd"
  std::string cert, key, ca;
  /// Others know the certificate's owner by these names; it must be made out to each.
  std::vector<std::string> names{};
  bool server = true;  ///< is shown to callers, too
};

struct TlsFault {
  enum class Kind {
    kFile,   ///< a file is missing, unreadable or no PEM
    kPair,   ///< the key belongs to another certificate
    kDates,  ///< expired, or not valid yet
    kChain,  ///< the CA has not signed it
    kName,   ///< it is made out to somebody else
    kUse     ///< it is not meant for what a daemon does with it
  };
  Kind kind;
  std::string text;  ///< a sentence: what is wrong with which file, and what to do
  /// Whether nobody can be served with these files at all.
  bool dead() const { return kind == Kind::kFile || kind == Kind::kPair; }
};

struct TlsReport {
  std::vector<TlsFault> faults;
  std::optional<std::int64_t> expires;  ///< Unix seconds: when the first of its certificates does
  std::vector<std::string> names;       ///< that the certificate is made out to
};

/// The files' texts at one time.
struct TlsContents {
  struct File {
    std::string text;
    int error = 0;  ///< errno where it could not be read
  };
  File cert, key, ca;
};
/// Blocks as long as the files' mount does.
TlsContents read_contents(const TlsFiles& files);

/// The faults of `contents`, read from `files`. Does not block. `now`: Unix seconds.
TlsReport look_at(const TlsFiles& files, const TlsContents& contents, std::int64_t now);
/// Reads the files for that.
inline TlsReport look_at(const TlsFiles& files, std::int64_t now) {
  return look_at(files, read_contents(files), now);
}

/// What keeps the owner of `certificate` from speaking as `name`: its dates, and its names. `whose`
/// begins the sentence: "its certificate". Empty: nothing.
std::string fault_of(X509& certificate, const std::string& whose, const std::string& name,
                     std::int64_t now);

/// "2026-11-27 13:54:18 UTC"
std::string utc_text(std::int64_t unix_seconds);
/// The current time in Unix seconds.
std::int64_t unix_now();

}  // namespace mk::daemon
