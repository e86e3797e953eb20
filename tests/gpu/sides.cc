#include "tests/gpu/sides.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace mk::test {

Sides::Sides(Job& job, bool in_place, std::vector<std::unique_ptr<Unfused>> forms)
    : job_(job), forms_(std::move(forms)) {
  const auto add = [&](const char* name, std::function<void()> run) {
    sides_.push_back({name, std::move(run), {}, {}});
  };
  add("fused", [this] { run_fused(); });
  if (in_place) add("in_place", [this] { run_in_place(); });
  if (forms_.empty()) return;
  add("unfused", [this] { launch(kernels::Mode::kUnfused); });
  add("products", [this] { forms_[0]->products(); });
  for (const auto& form : forms_) {
    if (!form->has_collective()) continue;
    add("collective", [&one = *form] { one.collective(); });
    add("baseline", [&one = *form] { one.both(); });
  }
}

void Sides::take_turns(Stopwatch& stopwatch, int launches) {
  std::vector<Turn> turns;
  for (Side& side : sides_) turns.push_back({side.run, &side.by_turns});
  stopwatch.take_turns(turns, launches);
}

void Sides::endure(Stopwatch& stopwatch, double seconds) {
  constexpr int kRounds = 3;
  for (Side& side : sides_) {
    const bool wanted = side.name == "fused" || side.name == "products" || side.name == "baseline";
    if (!wanted || &side != find(side.name)) continue;
    const int launches = std::max(1, static_cast<int>(seconds * 1e6 / side.by_turns.us()));
    Timing settling;
    stopwatch.endure(side.run, launches, settling);
    for (int round = 0; round < kRounds; ++round) stopwatch.endure(side.run, launches, side.alone);
  }
}

const Side* Sides::find(const std::string& name) const {
  const Side* best = nullptr;
  for (const Side& side : sides_) {
    if (side.name == name && (best == nullptr || side.by_turns.us() < best->by_turns.us()))
      best = &side;
  }
  return best;
}

double Sides::us(const std::string& name) const {
  const Side* const side = find(name);
  return side == nullptr ? 0 : side->by_turns.us();
}

double Sides::alone_us(const std::string& name) const {
  const Side* const side = find(name);
  return side == nullptr ? 0 : side->alone.us();
}

void Sides::run_in_place() {
  job_.set_in_workspace(true);
  run_fused();
  job_.set_in_workspace(false);
}

bool Sides::right() const {
  return std::all_of(forms_.begin(), forms_.end(), [](const auto& form) { return form->right(); });
}

void Sides::launch(kernels::Mode mode) {
  for (std::uint32_t r = 0; r < job_.world(); ++r) {
    job_.make_current(r);
    if (auto launched = job_.launch(r, job_.setup().m, mode); !launched) {
      fmt::print(stderr, "{}\n", launched.error().message);
      std::exit(1);
    }
  }
}

}  // namespace mk::test
