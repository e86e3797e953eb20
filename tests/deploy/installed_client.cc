// What a user's first program includes and calls, built against the installed tree alone. There is
// no daemon: the attach says so.
#include <mkernel/mkernel.h>
#include <mkernel/mkernel_c.h>

#include <cstdio>
#include <cstring>

int main() {
  mk::AttachOptions options;
  options.socket = "/nonexistent/mkerneld.sock";
  options.job = "first";
  const auto session = mk::Session::attach(options);
  if (session || session.error().message.find("/nonexistent/mkerneld.sock") == std::string::npos) {
    std::printf("an error that names the socket was expected\n");
    return 1;
  }
  return std::strcmp(mk::version(), mk_version()) != 0;
}
