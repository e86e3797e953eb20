#include "tests/bench/mkbench/cases.h"

#include <iterator>

namespace mk::bench {
namespace {

using MakeCase = std::unique_ptr<OperatorCase> (*)();
#define MK_CASE(id, name, Class) make_##id##_case,
constexpr MakeCase kCases[] = {MK_OPERATORS(MK_CASE) make_moe_layer_case};
#undef MK_CASE

}  // namespace

std::vector<std::string> case_names() {
  std::vector<std::string> names;
  for (const MakeCase make : kCases) names.emplace_back(make()->name());
  return names;
}

std::unique_ptr<OperatorCase> make_case(const std::string& name) {
  for (const MakeCase make : kCases) {
    if (auto made = make(); made->name() == name) return made;
  }
  return nullptr;
}

Result<std::unique_ptr<OperatorCase>> case_of(const BenchSpec& spec) {
  auto made = make_case(spec.op);
  if (!made) return fail(ErrorCode::kNotFound, "there is no operator '{}'", spec.op);
  made->set_options(spec.operation);
  return made;
}

}  // namespace mk::bench
