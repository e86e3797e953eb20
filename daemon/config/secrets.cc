#include "daemon/config/secrets.h"

#include <algorithm>
#include <array>
#include <cctype>

namespace mk::daemon {
namespace {

constexpr std::array<std::string_view, 6> kSecretNames{"secret",     "password", "passwd",
                                                       "passphrase", "token",    "credentials"};

bool is_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '-'; }
bool is_blank(char c) { return c == ' ' || c == '\t'; }
bool ends_value(char c) {
  return is_blank(c) || c == '\n' || c == '\r' || c == ',' || c == ';' || c == '}' || c == ']';
}

bool names_secret(std::string_view name) {
  std::string lower(name);
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return std::any_of(kSecretNames.begin(), kSecretNames.end(),
                     [&](std::string_view end) { return lower.ends_with(end); });
}

/// Where the value that `text` begins with ends: of a quoted one, behind its quote.
std::size_t value_end(std::string_view text) {
  const std::size_t line = std::min(text.find('\n'), text.size());
  if (text.empty() || (text[0] != '"' && text[0] != '\'')) {
    std::size_t end = 0;
    while (end < line && !ends_value(text[end])) ++end;
    return end;
  }
  const char quote = text[0];
  const std::string_view triple = quote == '"' ? "\"\"\"" : "'''";
  if (text.starts_with(triple)) {
    const std::size_t end = text.find(triple, 3);
    return end == text.npos ? text.size() : end + 3;
  }
  for (std::size_t i = 1; i < line; ++i) {
    if (text[i] == '\\' && quote == '"') {
      ++i;
    } else if (text[i] == quote) {
      return i + 1;
    }
  }
  return line;
}

/// `name = value` where the name is a secret's. Looks from the name's end, so that it does not
/// matter what is before it.
std::string without_named(std::string_view text) {
  std::string out;
  std::size_t at = 0;
  while (at < text.size()) {
    if (!is_name(text[at])) {
      out += text[at++];
      continue;
    }
    std::size_t end = at;
    while (end < text.size() && is_name(text[end])) ++end;
    const std::string_view name = text.substr(at, end - at);
    out += name;
    at = end;
    if (!names_secret(name)) continue;
    std::size_t value = at;
    if (value < text.size() && (text[value] == '"' || text[value] == '\'')) ++value;
    while (value < text.size() && is_blank(text[value])) ++value;
    if (value >= text.size() || (text[value] != '=' && text[value] != ':')) continue;
    ++value;
    while (value < text.size() && is_blank(text[value])) ++value;
    const std::string_view rest = text.substr(value);
    const std::size_t bytes = value_end(rest);
    const std::size_t first = !rest.empty() && (rest[0] == '"' || rest[0] == '\'') ? 1 : 0;
    const bool path = bytes > first && rest[first] == '/';
    if (bytes <= 2 * first || path) continue;  // nothing there, or only where it is
    out += text.substr(at, value - at);
    const std::string quote(rest.substr(0, first));
    out += quote;
    out += kSecretText;
    out += quote;
    at = value + bytes;
  }
  return out;
}

/// From "-----BEGIN ... PRIVATE KEY" to the end of its block.
std::string without_private_keys(std::string_view text) {
  std::string out;
  for (;;) {
    std::size_t begin = text.find("-----BEGIN ");
    while (begin != text.npos) {
      const std::size_t title_end = text.find("-----", begin + 11);
      if (text.substr(begin, title_end - begin).ends_with("PRIVATE KEY")) break;
      begin = text.find("-----BEGIN ", begin + 11);
    }
    out += text.substr(0, begin);
    if (begin == text.npos) return out;
    out += kSecretText;
    const std::size_t end = text.find("-----END ", begin);
    if (end == text.npos) return out;
    const std::size_t close = text.find("-----", end + 9);
    if (close == text.npos) return out;
    text.remove_prefix(close + 5);
  }
}

/// "//user:password@host".
std::string without_url_passwords(std::string_view text) {
  std::string out;
  for (;;) {
    const std::size_t slashes = text.find("://");
    if (slashes == text.npos) return out += text;
    const std::size_t host = slashes + 3;
    std::size_t end = host;
    while (end < text.size() && !ends_value(text[end]) && text[end] != '/' && text[end] != '"') {
      ++end;
    }
    const std::string_view authority = text.substr(host, end - host);
    const std::size_t at_sign = authority.rfind('@');
    const std::size_t colon = authority.find(':');
    out += text.substr(0, host);
    if (at_sign != authority.npos && colon < at_sign) {
      out += authority.substr(0, colon + 1);
      out += kSecretText;
      out += authority.substr(at_sign);
    } else {
      out += authority;
    }
    text.remove_prefix(end);
  }
}

}  // namespace

std::string without_secrets(std::string_view text) {
  return without_url_passwords(without_named(without_private_keys(text)));
}

}  // namespace mk::daemon
