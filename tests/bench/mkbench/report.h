/// \file
/// A measurement for users and as JSON.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "shm/host/result.h"
#include "tests/bench/mkbench/bench.h"
#include "tests/bench/mkbench/operator_case.h"

namespace mk::bench {

/// Prints to stdout: what was run, whether it was right, how long it took, what the links carried.
void print_report(const OperatorCase& operation, const BenchOptions& options,
                  const BenchResult& result);

/// One line per measurement. `heading` says what `name` is.
struct SummaryRow {
  std::string name;
  BenchResult result;
};
void print_summary(const std::string& heading, const std::vector<SummaryRow>& rows);

/// The measurement itself; `document` adds what it was taken with.
nlohmann::json json_of(const BenchOptions& options, const BenchResult& result);

/// `body` with tool, version, date, command line and machine.
nlohmann::json document(const std::string& tool, const std::string& command, nlohmann::json body);

}  // namespace mk::bench
