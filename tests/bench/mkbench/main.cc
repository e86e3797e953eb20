/// \file
/// mkbench: the operators timed against their unfused forms, checked element by element. Exit
/// codes: 0 ok, 1 a wrong result or a failure, 2 usage.

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "client/tools/launch/local_job.h"
#include "client/tools/launch/process.h"
#include "shm/files/standard_output.h"
#include "tests/bench/mkbench/command.h"
#include "tests/bench/mkbench/rank_loop.h"

namespace mk::bench {
namespace {

int rank_main(const std::vector<std::string>& words) {
  const auto arguments = tools::parse_rank_arguments(words);
  if (!arguments) {
    fmt::print(stderr, "mkbench: {}\n", arguments.error().message);
    return 2;
  }
  const Status status = run_rank(arguments->spec.get<BenchSpec>(), arguments->rank,
                                 arguments->socket, arguments->job, tools::kReportFd);
  if (status) return 0;
  fmt::print(stderr, "rank {}: {}: {}\n", arguments->rank, error_code_name(status.error().code),
             status.error().message);
  return 1;
}

int run(int argc, char** argv) {
  tools::unwind_on_interrupt();
  if (argc > 1 && std::string_view(argv[1]) == tools::kRankCommand)
    return rank_main({argv + 2, argv + argc});
  CLI::App app{
      "mkbench: mkernel's operators, timed against their unfused forms and checked element by "
      "element"};
  app.require_subcommand(1);
  app.footer(
      "Examples:\n"
      "  mkbench gemm-ar --m 2048 --n 2048 --k 1024 --link-bandwidth balanced --json report.json\n"
      "  mkbench all\n\n"
      "`mkbench OPERATOR --help` lists an operator's options with their defaults.\n"
      "Exit status: 0 ok, 1 a failure or a wrong result, 2 usage. See mkbench(1).");
  // Of all commands: what is given twice counts as given last, so that a script's callers can
  // follow its own options with theirs.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.set_version_flag("--version", version());
  std::string line = "mkbench";
  for (int i = 1; i < argc; ++i) line += fmt::format(" {}", argv[i]);
  Commands commands(app, line);
  try {
    app.parse(argc, argv);
    commands.check();
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return commands.run();
}

}  // namespace
}  // namespace mk::bench

int main(int argc, char** argv) {
  try {
    return mk::finish_output("mkbench", mk::bench::run(argc, argv));
  } catch (const std::bad_alloc&) {
    fmt::print(stderr,
               "mkbench: out of memory: the matrices and their float64 reference must fit\n");
    return 1;
  }
}
