#include "daemon/service/tls_refusals.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace mk::daemon {

std::string handshake_cause(std::string_view openssl_error) {
  // OpenSSL's reason is behind the last colon: "error:0A000086:SSL routines::certificate verify
  // failed".
  std::string_view reason = openssl_error.substr(openssl_error.rfind(':') + 1);
  while (!reason.empty() && (reason.back() == '.' || reason.back() == ' ')) reason.remove_suffix(1);
  const auto says = [reason](std::string_view words) {
    return reason.find(words) != std::string_view::npos;
  };
  std::string mend;
  if (says("certificate verify failed")) {
    mend =
        "its certificate is expired, or not signed by tls.ca of this node: give it one of that CA";
  } else if (says("did not return a certificate")) {
    mend =
        "it shows no certificate: give it the files of [tls], as mkctl's --tls-cert and the like";
  } else if (says("alert certificate expired")) {
    mend = "it holds tls.cert of this node for expired";
  } else if (says("alert unknown ca") || says("alert bad certificate")) {
    mend = "it does not trust tls.cert of this node: its tls.ca must hold that certificate's CA";
  } else if (says("wrong version number") || says("http request")) {
    mend = "it speaks no TLS: it has no files of [tls], or is no program of mkernel's";
  }
  return mend.empty() ? std::string(reason) : fmt::format("{} ({})", mend, reason);
}

void TlsRefusals::note(const std::vector<std::string>& remotes, std::string_view openssl_error) {
  constexpr std::size_t kNamed = 3;
  std::string hosts, remote;
  for (std::size_t i = 0; i < std::min(remotes.size(), kNamed); ++i) {
    hosts += (i == 0 ? "" : " ") + remotes[i].substr(0, remotes[i].rfind(':'));
    remote += (i == 0 ? "" : " or ") + remotes[i];
  }
  if (remotes.size() > kNamed) remote += fmt::format(" or {} more", remotes.size() - kNamed);
  const std::string cause = handshake_cause(openssl_error);
  std::uint64_t unlogged = 0;
  {
    std::lock_guard lock(mutex_);
    const auto now = std::chrono::steady_clock::now();
    Entry entry{hosts, {remote, cause, 0, 0}, now, now, 0};
    const auto same = std::ranges::find(entries_, hosts, &Entry::hosts);
    bool repeated = false;
    if (same != entries_.end()) {
      repeated = same->refusal.cause == cause && now - same->logged < kLoggedEvery;
      if (repeated) entry.logged = same->logged;
      entry.refusal.count = same->refusal.count;
      entry.unlogged = same->unlogged;
      entries_.erase(same);
    }
    ++entry.refusal.count;
    unlogged = repeated ? 0 : std::exchange(entry.unlogged, 0);
    if (repeated) ++entry.unlogged;
    entries_.insert(entries_.begin(), std::move(entry));
    if (entries_.size() > kHosts) entries_.pop_back();
    if (repeated) return;
  }
  logger_.write_limited(
      "tls handshake", LogLevel::kWarning,
      fmt::format("a TLS handshake with {} failed: {}{}", remote, cause,
                  unlogged == 0 ? "" : fmt::format("; {} more from there before", unlogged)),
      {{"remote", remote}});
}

std::vector<TlsRefusal> TlsRefusals::list() const {
  std::lock_guard lock(mutex_);
  const auto now = std::chrono::steady_clock::now();
  std::vector<TlsRefusal> all;
  for (const Entry& entry : entries_) {
    const auto ago = now - entry.last;
    if (ago > kKept) continue;
    all.push_back(entry.refusal);
    all.back().ago_ns = static_cast<std::uint64_t>(std::chrono::nanoseconds(ago).count());
  }
  return all;
}

}  // namespace mk::daemon
