#include "shm/host/result.h"

#include <cstring>

namespace mk {

std::string errno_text(int error_number) {
  char buffer[256];
  const char* text = strerror_r(error_number, buffer, sizeof buffer);
  const char* name = strerrorname_np(error_number);
  return name == nullptr ? std::string(text) : fmt::format("{} ({})", text, name);
}

}  // namespace mk
