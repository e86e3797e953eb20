/// \file
/// The files of [tls], read again on a thread of their own: a mount that hangs holds nobody up.
#pragma once

#include <memory>

#include "daemon/rpc/grpc_channel.h"

namespace mk::daemon {

/// Thread-safe; nothing blocks.
class TlsReader {
 public:
  /// Texts without the names of files stay as they are.
  explicit TlsReader(TlsTexts first);
  ~TlsReader();
  TlsReader(const TlsReader&) = delete;
  TlsReader& operator=(const TlsReader&) = delete;

  /// Reads the files soon.
  void renew();
  /// The last ones that could all be read.
  TlsTexts texts() const;

 private:
  struct State;
  static void run(const std::shared_ptr<State>& state);
  const std::shared_ptr<State> state_;
};

}  // namespace mk::daemon
