// fault_run: faults drawn from a seed against real daemons and real ranks; see README.md.
#include <CLI/CLI.hpp>

#include "tests/faults/run.h"

int main(int argc, char** argv) {
  mk::faults::Flags flags;
  flags.programs = {MK_TEST_MKERNELD, MK_TEST_MKCTL, MK_TEST_RANK};
  std::string programs;
  CLI::App app("Faults against real daemons and ranks");
  app.add_option("--repetitions", flags.repetitions,
                 "Faults, one kind after the other; 0: each of the quick ones once");
  app.add_option("--seed", flags.seed, "Of victims and moments");
  app.add_option("--deadline-ms", flags.deadline_ms, "From a death to each survivor's error");
  app.add_option("--seconds", flags.seconds, "No new fault after so long; 0: no end");
  app.add_option("--only", flags.only, "One fault");
  app.add_option("--json", flags.json, "Where the figures go");
  app.add_option("--programs", programs,
                 "A folder with mkerneld, mkctl and multiprocess_rank, not the build's");
  CLI11_PARSE(app, argc, argv);
  if (!programs.empty()) {
    flags.programs = {programs + "/mkerneld", programs + "/mkctl", programs + "/multiprocess_rank"};
  }
  mk::tools::unwind_on_interrupt();
  return mk::faults::Run(flags).all();
}
