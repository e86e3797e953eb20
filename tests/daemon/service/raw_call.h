// gRPC's own services, called by hand: their .proto files are not installed.
#pragma once

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/codegen/client_unary_call.h>

#include <memory>
#include <string>

#include "tests/daemon/service/temp_folder.h"

namespace mk::daemon {

/// grpc.health.v1.HealthCheckResponse.ServingStatus; kHealthUnknown: NOT_FOUND.
inline constexpr int kServing = 1;
inline constexpr int kNotServing = 2;
inline constexpr int kHealthUnknown = -1;

inline grpc::ByteBuffer buffer_of(const std::string& text) {
  const grpc::Slice slice(text);
  return grpc::ByteBuffer(&slice, 1);
}

inline std::string text_of(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  std::string text;
  if (!buffer.Dump(&slices).ok()) return text;
  for (const grpc::Slice& slice : slices) {
    text.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return text;
}

/// Health of a service by grpc.health.v1.Health.Check.
inline int health_of(grpc::Channel& channel, const std::string& service) {
  std::string request;  // field 1: the name
  if (!service.empty())
    request = "\x0a" + std::string(1, static_cast<char>(service.size())) + service;
  grpc::ByteBuffer response;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kPatience);
  const grpc::internal::RpcMethod method("/grpc.health.v1.Health/Check",
                                         grpc::internal::RpcMethod::NORMAL_RPC);
  const grpc::Status done = grpc::internal::BlockingUnaryCall<grpc::ByteBuffer, grpc::ByteBuffer,
                                                              grpc::ByteBuffer, grpc::ByteBuffer>(
      &channel, method, &context, buffer_of(request), &response);
  if (!done.ok()) return kHealthUnknown;
  const std::string text = text_of(response);  // field 1: the status
  return text.size() == 2 && text[0] == 0x08 ? text[1] : 0;
}

/// The raw answer to "list the services" of gRPC reflection; it holds their names.
inline std::string reflection_list_services(grpc::Channel& channel) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kPatience);
  const grpc::internal::RpcMethod method(
      "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
      grpc::internal::RpcMethod::BIDI_STREAMING);
  const std::unique_ptr<grpc::ClientReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>> stream(
      grpc::internal::ClientReaderWriterFactory<grpc::ByteBuffer, grpc::ByteBuffer>::Create(
          &channel, method, &context));
  grpc::ByteBuffer answer;
  stream->Write(buffer_of(std::string("\x3a\x01*", 3)));  // field 7: list_services
  stream->WritesDone();
  const bool read = stream->Read(&answer);
  stream->Finish();
  return read ? text_of(answer) : "";
}

}  // namespace mk::daemon
