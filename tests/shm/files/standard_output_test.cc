// What could not be printed is an exit status.
#include "shm/files/standard_output.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <iostream>
#include <string>

namespace mk {
namespace {

/// The exit status of a process that runs `body` with its standard output at `path`; empty: closed.
int status_of(const char* path, const std::function<int()>& body) {
  std::fflush(stdout);
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(STDOUT_FILENO);
    if (*path != '\0' && ::open(path, O_WRONLY) != STDOUT_FILENO) ::_exit(99);
    ::_exit(body());
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(StandardOutput, IsAnExitStatusWhereItIsFull) {
  const std::string much(100'000, 'x');
  for (const std::string& text : {std::string("a line\n"), much}) {
    const auto prints = [&](int code) {
      return [&text, code] {
        print_out("{}", text);
        return finish_output("program", code);
      };
    };
    EXPECT_EQ(0, status_of("/dev/null", prints(0)));
    EXPECT_EQ(3, status_of("/dev/null", prints(3)));
    EXPECT_EQ(1, status_of("/dev/full", prints(0)));
    EXPECT_EQ(3, status_of("/dev/full", prints(3))) << "the program's own, where it has one";
    EXPECT_EQ(1, status_of("", prints(0))) << "closed";
  }
  // Through a stream, as the command line's library prints its help.
  EXPECT_EQ(1, status_of("/dev/full", [] {
              std::cout << "help\n";
              return finish_output("program", 0);
            }));
  EXPECT_EQ(0, status_of("/dev/full", [] { return finish_output("program", 0); }))
      << "nothing was printed";
}

TEST(StandardOutput, TellsWhoPrintsWithoutEndThatItIsFull) {
  EXPECT_EQ(7, status_of("/dev/full", [] {
              for (int line = 0; line < 1000; ++line) {
                print_out("line {}\n", line);
                if (!flush_output()) return 7;
              }
              return 0;
            }));
}

}  // namespace
}  // namespace mk
