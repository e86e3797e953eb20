// The files of one who looks for others over TLS, of a CA that changes, and what others show then.
#pragma once

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>

#include "daemon/rpc/grpc_channel.h"
#include "tests/daemon/service/temp_folder.h"
#include "tests/daemon/tls/certificate_maker.h"

namespace mk::daemon {

class TlsFiles {
 public:
  /// A new CA, and a certificate of it, take the place of what was there.
  void renew(const std::string& authority) {
    ca_ = std::make_unique<CertificateMaker>(folder_.path(), authority);
    ca_->make("us");
    std::filesystem::rename(folder_ / (authority + ".pem"), folder_ / "ca.pem");
  }
  TlsTexts read() const { return read("us"); }
  /// A server that uses them shows a certificate of the present CA, made out to `names`, and
  /// demands one.
  std::shared_ptr<grpc::ServerCredentials> serve(const std::string& owner,
                                                 const std::string& names = Wanted().names) const {
    ca_->make(owner, {.names = names});
    const TlsTexts texts = read(owner);
    grpc::SslServerCredentialsOptions options(
        GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
    options.pem_root_certs = texts.ca;
    options.pem_key_cert_pairs.push_back({texts.key, texts.cert});
    return grpc::SslServerCredentials(options);
  }

 private:
  TlsTexts read(const std::string& owner) const {
    const auto texts = read_tls(folder_ / (owner + "-cert.pem"), folder_ / (owner + "-key.pem"),
                                folder_ / "ca.pem");
    EXPECT_TRUE(texts) << texts.error().message;
    return texts ? *texts : TlsTexts{};
  }
  TempFolder folder_;
  std::unique_ptr<CertificateMaker> ca_;
};

}  // namespace mk::daemon
