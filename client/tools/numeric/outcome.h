/// \file
/// What kinds of number a result may be: finite, an infinity, a NaN. Where it is known which, a
/// result of another kind is wrong; where errors decide between two, either is right.
#pragma once

#include <cmath>
#include <cstdint>

#include "client/tools/numeric/elements.h"

namespace mk::tools {

/// Magnitudes from here on round to infinity: the largest finite number and half its last unit.
constexpr double overflow_threshold(DataType type) {
  return type == DataType::kBf16 ? (2 - 0x1p-8) * 0x1p127 : (2 - 0x1p-11) * 0x1p15;
}
inline constexpr double kOverflowFp32 = (2 - 0x1p-24) * 0x1p127;

/// A set of kinds. Empty: nothing is right.
class Outcome {
 public:
  static constexpr Outcome finite() { return Outcome(kFinite); }
  static constexpr Outcome nan() { return Outcome(kNan); }
  static constexpr Outcome anything() { return Outcome(kFinite | kPlus | kMinus | kNan); }
  static Outcome infinity(double sign) { return Outcome(std::signbit(sign) ? kMinus : kPlus); }
  /// That one number's.
  static Outcome of(double value) {
    if (std::isnan(value)) return nan();
    return std::isinf(value) ? infinity(value) : finite();
  }
  /// Of a number within `error` of `value` that is rounded to where `threshold` is infinity.
  static Outcome rounded(double value, double error, double threshold) {
    if (!std::isfinite(value)) return of(value);
    const double magnitude = std::fabs(value);
    if (magnitude + error < threshold) return finite();
    if (magnitude - error >= threshold) return infinity(value);
    Outcome either = finite() | infinity(value);
    if (error - magnitude >= threshold) either = either | infinity(-value);
    return either;
  }

  bool allows(double value) const { return (kinds_ & of(value).kinds_) != 0; }
  constexpr bool may_be_finite() const { return (kinds_ & kFinite) != 0; }

  friend constexpr bool operator==(Outcome a, Outcome b) { return a.kinds_ == b.kinds_; }
  /// Either's.
  friend constexpr Outcome operator|(Outcome a, Outcome b) { return Outcome(a.kinds_ | b.kinds_); }
  /// Of what is finite here and goes through a further rounding, whose kinds are `next`.
  constexpr Outcome then(Outcome next) const {
    if (!may_be_finite()) return *this;
    return Outcome((kinds_ & ~kFinite) | next.kinds_);
  }
  /// Of a sum: infinities win over numbers, two of unlike sign are a NaN, and a NaN stays one.
  friend constexpr Outcome operator+(Outcome a, Outcome b) {
    const unsigned x = a.kinds_;
    const unsigned y = b.kinds_;
    unsigned sum = (x | y) & kNan;
    if (((x & kPlus) != 0 && (y & kMinus) != 0) || ((x & kMinus) != 0 && (y & kPlus) != 0)) {
      sum |= kNan;
    }
    for (const unsigned kind : {kPlus, kMinus}) {
      if (((x & kind) != 0 && (y & (kind | kFinite)) != 0) ||
          ((y & kind) != 0 && (x & (kind | kFinite)) != 0)) {
        sum |= kind;
      }
    }
    return Outcome(sum | (x & y & kFinite));
  }

 private:
  static constexpr unsigned kFinite = 1;
  static constexpr unsigned kPlus = 2;
  static constexpr unsigned kMinus = 4;
  static constexpr unsigned kNan = 8;
  constexpr explicit Outcome(unsigned kinds) : kinds_(static_cast<std::uint8_t>(kinds)) {}

  std::uint8_t kinds_;
};

}  // namespace mk::tools
