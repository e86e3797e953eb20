/// \file
/// Scripts that complete mkctl's commands and flags in a shell, made from the declarations
/// themselves.
#pragma once

#include <string>

namespace CLI {
class App;
}

namespace mk::mkctl {

/// `shell`: "bash", "zsh" or "fish"; empty for another.
std::string completion_script(const CLI::App& app, const std::string& shell);

}  // namespace mk::mkctl
