/// \file
/// The C ABI's sessions: place, exchange, buffers, and what they refuse.

#include <cstdlib>

#include "tests/client/c_calls.h"

namespace mk {
namespace {

TEST(CApiSession, KnowsItsPlace) {
  const auto cluster = cluster_of(2);
  for_ranks(4, [&](std::uint32_t rank) {
    mk_session* const session = attach(*cluster, 2, rank);
    EXPECT_EQ(rank, mk_session_rank(session));
    EXPECT_EQ(4u, mk_session_world(session));
    auto found = sized<mk_place>();
    ASSERT_EQ(0, mk_session_place(session, &found));
    EXPECT_EQ(rank, found.rank);
    EXPECT_EQ(4u, found.world);
    EXPECT_EQ(rank / 2, found.node_rank);
    EXPECT_EQ(2u, found.nodes);
    EXPECT_EQ(rank % 2, found.local_rank);
    EXPECT_EQ(2u, found.local_size);
    EXPECT_STREQ("loopback", mk_session_fabric(session));
    EXPECT_EQ(0, mk_session_status(session));
    leave(session);
  });
}

TEST(CApiSession, TakesASecretOfAnyBytes) {
  const auto cluster = cluster_of(1);
  const char secret[] = {'a', '\0', 'b'};
  for_ranks(2, [&](std::uint32_t rank) {
    auto options = sized<mk_attach_options>();
    options.socket = cluster->socket_path(0).c_str();
    options.job = "secret";
    options.rank = options.local_rank = rank;
    options.world = options.local_size = 2;
    options.nodes = 1;
    options.job_secret = secret;
    options.job_secret_bytes = sizeof(secret);
    options.arrival_flags = 128;
    options.heartbeat_timeout_ms = 7000;
    mk_session* session = nullptr;
    ASSERT_EQ(0, mk_session_attach(&options, &session)) << mk_last_error();
    EXPECT_STREQ("", mk_last_error());
    leave(session);
    if (rank == 0) {
      options.job_secret_bytes = 129;
      expect_refused(mk_session_attach(&options, &session), ErrorCode::kInvalidArgument, {"129"});
      options.job_secret_bytes = 1;
      options.arrival_flags = 65;
      expect_refused(mk_session_attach(&options, &session), ErrorCode::kInvalidArgument, {"65"});
    }
  });
}

TEST(CApiSession, AttachesByTheLaunchersEnvironment) {
  const auto cluster = cluster_of(1);
  const auto set = [](const char* name, const char* value) { ::setenv(name, value, 1); };
  set("MKERNEL_SOCKET", "/nobody/listens.sock");
  set("MKERNEL_JOB", "of-the-environment");
  set("MKERNEL_RANK", "0");
  set("MKERNEL_WORLD_SIZE", "1");
  set("MKERNEL_LOCAL_RANK", "0");
  set("MKERNEL_LOCAL_SIZE", "1");
  mk_session* session = nullptr;
  auto options = sized<mk_attach_options>();
  options.timeout_ms = 200;
  options.rank = 7;  // the place is the environment's
  expect_refused(mk_session_attach_from_environment(&options, &session), ErrorCode::kUnavailable,
                 {"/nobody/listens.sock"});
  options.socket = cluster->socket_path(0).c_str();
  ASSERT_EQ(0, mk_session_attach_from_environment(&options, &session)) << mk_last_error();
  EXPECT_EQ(0u, mk_session_rank(session));
  leave(session);
  set("MKERNEL_SOCKET", cluster->socket_path(0).c_str());
  ASSERT_EQ(0, mk_session_attach_from_environment(nullptr, &session)) << mk_last_error();
  leave(session);
  options.struct_bytes = 1;
  expect_refused(mk_session_attach_from_environment(&options, &session),
                 ErrorCode::kInvalidArgument, {"struct_bytes"});
  for (const char* name : {"SOCKET", "JOB", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"})
    ::unsetenv((std::string("MKERNEL_") + name).c_str());
}

TEST(CApiSession, ExchangesBlobsOfDifferentLengths) {
  const auto cluster = cluster_of(2);
  for_ranks(2, [&](std::uint32_t rank) {
    mk_session* const session = attach(*cluster, 1, rank);
    const std::string mine(rank * 5, 'x');
    mk_blobs* blobs = nullptr;
    ASSERT_EQ(0, mk_session_exchange(session, "lengths", mine.data(), mine.size(), 0, &blobs))
        << mk_last_error();
    std::uint64_t bytes = 99;
    mk_blobs_at(blobs, 0, &bytes);
    EXPECT_EQ(0u, bytes);
    const void* const other = mk_blobs_at(blobs, 1, &bytes);
    ASSERT_EQ(5u, bytes);
    EXPECT_EQ("xxxxx", std::string(static_cast<const char*>(other), bytes));
    EXPECT_EQ(nullptr, mk_blobs_at(blobs, 2, &bytes));
    EXPECT_EQ(0u, bytes);
    mk_blobs_free(blobs);
    expect_refused(mk_session_exchange(session, nullptr, "", 0, 0, &blobs),
                   ErrorCode::kInvalidArgument, {"tag is null"});
    expect_refused(mk_session_exchange(session, "x", nullptr, 1, 0, &blobs),
                   ErrorCode::kInvalidArgument, {"blob is null"});
    expect_refused(mk_session_exchange(session, "x", "", 0, 0, nullptr),
                   ErrorCode::kInvalidArgument, {"out is null"});
    expect_refused(mk_session_exchange(session, "caf\xe9", "", 0, 0, &blobs),
                   ErrorCode::kInvalidArgument, {"UTF-8"});
    leave(session);
  });
  mk_blobs_free(nullptr);
  EXPECT_EQ(nullptr, mk_blobs_at(nullptr, 0, nullptr));
}

TEST(CApiSession, GivesAndTakesBuffers) {
  const auto cluster = cluster_of(1);
  mk_session* const session = attach(*cluster, 1, 0);
  auto buffer = sized<mk_buffer>();
  ASSERT_EQ(0, mk_session_alloc_buffer(session, 4096, "mine", MK_HOST, &buffer)) << mk_last_error();
  ASSERT_NE(nullptr, buffer.data);
  EXPECT_EQ(4096u, buffer.bytes);
  std::memset(buffer.data, 1, 4096);
  EXPECT_EQ(0, mk_session_free_buffer(session, &buffer)) << mk_last_error();
  EXPECT_NE(0, mk_session_free_buffer(session, &buffer));
  buffer.handle = 0x10000 + 1;
  expect_refused(mk_session_free_buffer(session, &buffer), ErrorCode::kInvalidArgument, {"65537"});
  expect_refused(mk_session_alloc_buffer(session, 4096, "mine", 2, &buffer),
                 ErrorCode::kInvalidArgument, {"kind 2"});
  expect_refused(mk_session_alloc_buffer(session, 4096, nullptr, MK_HOST, &buffer),
                 ErrorCode::kInvalidArgument, {"name is null"});
  leave(session);
}

TEST(CApiSession, IsNamedWhereItIsMissing) {
  auto options = sized<mk_attach_options>();
  auto space = sized<mk_place>();
  auto buffer = sized<mk_buffer>();
  mk_blobs* blobs = nullptr;
  EXPECT_EQ(0, mk_session_detach(nullptr));
  EXPECT_STREQ("", mk_session_fabric(nullptr));
  const auto refused = [](mk_status status) {
    expect_refused(status, ErrorCode::kInvalidArgument, {"is null"});
  };
  refused(mk_session_attach(nullptr, nullptr));
  refused(mk_session_attach(&options, nullptr));
  refused(mk_session_status(nullptr));
  refused(mk_session_barrier(nullptr, 1));
  refused(mk_session_place(nullptr, &space));
  refused(mk_session_exchange(nullptr, "x", "", 0, 0, &blobs));
  refused(mk_session_alloc_buffer(nullptr, 64, "x", MK_HOST, &buffer));
  refused(mk_session_free_buffer(nullptr, &buffer));
}

}  // namespace
}  // namespace mk
