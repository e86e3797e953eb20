/* A program without C++: what a machine that has libc6 alone can start. */
#include <stdio.h>
#include <string.h>

#include "mkernel/mkernel_c.h"

int main(void) {
  mk_attach_options options;
  memset(&options, 0, sizeof options);
  options.struct_bytes = sizeof options;
  options.socket = "/nobody/listens.sock";
  options.job = "bare";
  options.world = options.nodes = options.local_size = 1;
  options.timeout_ms = 200;
  mk_session* session = NULL;
  const mk_status status = mk_session_attach(&options, &session);
  printf("%d: %s\n", (int)status, mk_last_error());
  return status == 0;
}
