/// \file
/// What must not leave the machine in a configuration, a log or a support archive.
#pragma once

#include <string>
#include <string_view>

namespace mk::daemon {

/// What stands in a secret's place.
inline constexpr std::string_view kSecretText = "(secret)";

/// `text` (TOML, JSON, logs) with secrets replaced: the values of names that end in secret,
/// password, passphrase, token or credentials, as `name = value`, `name: value`, `name=value` or
/// `"name": "value"`; PEM blocks of private keys; passwords in URLs. Paths of files that hold
/// secrets stay: where a name ends in _file or _path, or the value is an absolute path.
std::string without_secrets(std::string_view text);

}  // namespace mk::daemon
