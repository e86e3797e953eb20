#include "daemon/mkctl/completion.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <vector>

namespace mk::mkctl {
namespace {

/// A command ("link list"; "" is mkctl itself), what may follow it, and its flags.
struct Level {
  std::string path;
  std::vector<std::pair<std::string, std::string>> words;  ///< with their summaries
  std::vector<std::pair<std::string, std::string>> flags;
};

void visit(const CLI::App& app, const std::string& path, std::vector<Level>& levels) {
  Level level{path, {}, {}};
  for (const CLI::App* one : app.get_subcommands(nullptr)) {
    level.words.emplace_back(one->get_name(), one->get_description());
  }
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      level.flags.emplace_back("--" + name, option->get_description());
    }
  }
  levels.push_back(std::move(level));
  for (const CLI::App* one : app.get_subcommands(nullptr)) {
    visit(*one, path.empty() ? one->get_name() : path + " " + one->get_name(), levels);
  }
}

std::string joined(const std::vector<std::pair<std::string, std::string>>& words) {
  std::string text;
  for (const auto& [word, summary] : words) text += (text.empty() ? "" : " ") + word;
  return text;
}

std::string bash(const std::vector<Level>& levels) {
  std::string cases;
  for (const Level& level : levels) {
    cases += fmt::format("    '{}') words='{}' flags='{}' ;;\n", level.path, joined(level.words),
                         joined(level.flags));
  }
  return fmt::format(R"(# bash completion for mkctl: made by `mkctl completion bash`
_mkctl() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} path= word words flags i
  local all='{}'
  for ((i = 1; i < COMP_CWORD; ++i)); do
    word=${{COMP_WORDS[i]}}
    case $word in
      -*) ;;
      *) [[ " $(_mkctl_words "$path") " == *" $word "* ]] && path=${{path:+$path }}$word ;;
    esac
  done
  case $3 in
    --config | --tls-* | -o | --output) COMPREPLY=($(compgen -f -- "$current")); return ;;
  esac
  _mkctl_level "$path"
  if [[ $current == -* ]]; then words="$flags $all"; fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
_mkctl_words() {{ local words flags; _mkctl_level "$1"; printf '%s' "$words"; }}
_mkctl_level() {{
  case $1 in
{}    *) words= flags= ;;
  esac
}}
complete -o default -F _mkctl mkctl
)",
                     joined(levels.front().flags), cases);
}

/// In single quotes for fish.
std::string single_quoted(const std::string& text) {
  std::string out = "'";
  for (const char c : text) {
    if (c == '\'' || c == '\\') out += '\\';
    out += c;
  }
  return out + "'";
}

std::string fish(const std::vector<Level>& levels) {
  std::string out =
      "# fish completion for mkctl: made by `mkctl completion fish`\n"
      "complete -c mkctl -f\n";
  for (const Level& level : levels) {
    std::string condition;
    if (level.path.empty()) {
      condition = "__fish_use_subcommand";
    } else {
      for (std::size_t at = 0; at <= level.path.size();) {
        const std::size_t end = std::min(level.path.find(' ', at), level.path.size());
        condition +=
            fmt::format("{}__fish_seen_subcommand_from {}", condition.empty() ? "" : "; and ",
                        level.path.substr(at, end - at));
        at = end + 1;
      }
    }
    // Of "link", only until one of them is there.
    const std::string first = level.path.empty() || level.words.empty()
                                  ? condition
                                  : fmt::format("{}; and not __fish_seen_subcommand_from {}",
                                                condition, joined(level.words));
    for (const auto& [word, summary] : level.words) {
      out += fmt::format("complete -c mkctl -n {} -a {} -d {}\n", single_quoted(first), word,
                         single_quoted(summary));
    }
    for (const auto& [flag, summary] : level.flags) {
      out += fmt::format("complete -c mkctl{} -l {} -d {}\n",
                         level.path.empty() ? "" : " -n " + single_quoted(condition),
                         flag.substr(2), single_quoted(summary));
    }
  }
  return out;
}

}  // namespace

std::string completion_script(const CLI::App& app, const std::string& shell) {
  std::vector<Level> levels;
  visit(app, "", levels);
  if (shell == "bash") return bash(levels);
  if (shell == "fish") return fish(levels);
  if (shell == "zsh") {
    // zsh runs the file as the function that it defines when it is to complete a line for the first
    // time: the last line is for that time.
    return "#compdef mkctl\n# zsh completion for mkctl, by way of bash's: made by `mkctl "
           "completion "
           "zsh`\nautoload -U +X bashcompinit && bashcompinit\n" +
           bash(levels) + "(( ! ${+compstate} )) || _bash_complete -o default -F _mkctl\n";
  }
  return "";
}

}  // namespace mk::mkctl
