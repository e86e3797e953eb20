// What needs no daemon.
#include "daemon/mkctl/commands.h"
#include "daemon/mkctl/completion.h"
#include "daemon/mkctl/schema.h"
#include "shm/files/standard_output.h"

namespace mk::mkctl {

void declare_offline_commands(Commands& commands) {
  const auto shell = std::make_shared<std::string>();
  const CLI::App* app = &commands.app();
  commands
      .add_offline("completion", "Print a script that completes mkctl in a shell",
                   [app, shell] {
                     print_out(completion_script(*app, *shell));
                     return kExitOk;
                   })
      .option("SHELL", *shell, "bash, zsh or fish")
      .required()
      .one_of({"bash", "zsh", "fish"});
  commands.add_offline("schema", "Print the JSON Schema of what --json prints", [] {
    print_out("{}\n", text_of(json_schema(), 2));
    return kExitOk;
  });
}

}  // namespace mk::mkctl
