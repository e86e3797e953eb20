// What needs no daemon.
#include <fmt/format.h>

#include "daemon/mkctl/commands.h"
#include "daemon/mkctl/completion.h"
#include "daemon/mkctl/schema.h"

namespace mk::mkctl {

void declare_offline_commands(Commands& commands) {
  const auto shell = std::make_shared<std::string>();
  const CLI::App* app = &commands.app();
  commands
      .add_offline("completion", "Print a script that completes mkctl in a shell",
                   [app, shell] {
                     fmt::print("{}", completion_script(*app, *shell));
                     return kExitOk;
                   })
      .option("SHELL", *shell, "bash, zsh or fish")
      .required()
      .one_of({"bash", "zsh", "fish"});
  commands.add_offline("schema", "Print the JSON Schema of what --json prints", [] {
    fmt::print("{}\n", text_of(json_schema(), 2));
    return kExitOk;
  });
}

}  // namespace mk::mkctl
