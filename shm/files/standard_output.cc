#include "shm/files/standard_output.h"

#include <cerrno>
#include <cstdio>

#include "shm/host/result.h"

namespace mk {
namespace {

/// Of the first write that failed; 0: none did, or nobody knows.
int first_error = 0;

void note_error() {
  if (first_error == 0) first_error = errno;
}

}  // namespace

void print_out(std::string_view text) {
  errno = 0;
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size()) note_error();
}

bool flush_output() {
  errno = 0;
  if (std::fflush(stdout) != 0) note_error();
  return std::ferror(stdout) == 0;
}

int finish_output(const char* program, int code) {
  if (flush_output()) return code;
  const std::string why = first_error != 0 ? errno_text(first_error) : "it is not complete";
  std::fprintf(stderr, "%s: cannot write to standard output: %s\n", program, why.c_str());
  return code != 0 ? code : 1;
}

}  // namespace mk
