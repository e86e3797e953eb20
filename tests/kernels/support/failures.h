/// \file
/// Launches that fail: started together, ended, and asked for their errors.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <vector>

#include "shm/atomic.h"
#include "shm/host/result.h"
#include "tests/kernels/support/cluster.h"

namespace mk::kernels::testing {

using std::chrono::milliseconds;

/// Long enough that a quarter of it, by which an indirect wait outlasts a direct one, is more than
/// a busy machine keeps a thread waiting.
#ifdef MK_SANITIZED
inline constexpr milliseconds kWaitForMissing(6000);
#else
inline constexpr milliseconds kWaitForMissing(2000);
#endif

inline bool contains(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

/// A result that is an error, of that code and with that part in its message.
template <class Answer>
void expect_refused(const Answer& answer, std::string_view part,
                    ErrorCode code = ErrorCode::kInvalidArgument) {
  ASSERT_FALSE(answer) << part;
  EXPECT_EQ(answer.error().code, code) << part;
  EXPECT_TRUE(contains(answer.error().message, part))
      << answer.error().message << "\nlacks: " << part;
}

/// Calls `launch(rank)` of those ranks at the same time. Answers by rank.
template <class Launch>
auto launch_together(std::uint32_t size, const std::vector<std::uint32_t>& ranks, Launch&& launch) {
  std::vector<std::invoke_result_t<Launch&, std::uint32_t>> results(size);
  std::vector<std::thread> threads;
  for (std::uint32_t rank : ranks)
    threads.emplace_back([&, rank] { results[rank] = launch(rank); });
  for (std::thread& thread : threads) thread.join();
  return results;
}

/// Launches on those ranks at the same time; `m` by rank. kOk where nothing is wrong.
template <class Job>
std::vector<Error> launch_on(Job& job, const std::vector<std::uint32_t>& ranks,
                             const std::vector<std::uint32_t>& m) {
  return launch_together(job.size(), ranks, [&](std::uint32_t rank) {
    const auto result = job.launch(rank, {m[rank]});
    return result.stats ? Error{ErrorCode::kOk, ""} : result.stats.error();
  });
}

/// The answer of `launch()`, whose ranks 0 to 2 are told to end after 50 ms: the first
/// `of_session` by the session's abort word, the others by their process's.
template <class Launch>
auto launch_and_abort(Cluster& cluster, std::uint32_t of_session, Launch&& launch) {
  std::thread aborter([&] {
    std::this_thread::sleep_for(milliseconds(50));
    for (std::uint32_t rank = 0; rank < 3; ++rank) {
      RankMemory& memory = cluster.rank(rank);
      shm::store_release(rank < of_session ? &memory.session_abort : &memory.process_abort, 1u);
    }
  });
  auto results = launch();
  aborter.join();
  return results;
}

/// Rank 0, launched with m0, or rank 1 with m1 names both.
inline void expect_different_m_named(const std::vector<Error>& errors, std::uint32_t m0,
                                     std::uint32_t m1) {
  const auto says = [&](std::uint32_t rank, std::uint32_t own, std::uint32_t other) {
    return contains(errors[rank].message, "launched with m = " + std::to_string(own) + ", rank " +
                                              std::to_string(1 - rank) +
                                              " with m = " + std::to_string(other));
  };
  EXPECT_TRUE(says(0, m0, m1) || says(1, m1, m0)) << errors[0].message << "\n" << errors[1].message;
}

/// Where nobody takes commands: every rank's error.
inline void expect_daemon_named(const std::vector<Error>& errors) {
  for (const Error& error : errors) {
    EXPECT_EQ(error.code, ErrorCode::kTimeout);
    EXPECT_TRUE(contains(error.message,
                         "for its daemon: commands taken from lane 0 shows 0, expected at least 1"))
        << error.message;
  }
}

}  // namespace mk::kernels::testing
