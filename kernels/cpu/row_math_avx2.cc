// Compiled with -mavx2 -mf16c where the compiler has them; called only where the machine has them.
// So that no inline function of a shared header is instantiated here with those instructions, this
// file includes next to nothing.
#include "kernels/cpu/row_math.h"

#if defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>

namespace mk::kernels {
namespace {

constexpr std::size_t kLanes = 8;

__m128i load_halves(const std::uint16_t* source) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
}
void store_halves(std::uint16_t* target, __m128i value) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(target), value);
}

struct Bf16 {
  static __m256 widen(__m128i value) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(value), 16));
  }
  static __m128i narrow(__m256 value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i words = _mm256_blendv_epi8(rounded, quiet, is_nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  }
};

struct F16 {
  static __m256 widen(__m128i value) { return _mm256_cvtph_ps(value); }
  static __m128i narrow(__m256 value) { return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT); }
};

/// The last, short vector goes through zero-filled buffers, so that no byte outside the row is
/// touched.
template <class Element>
void widen(const std::uint16_t* source, float* target, std::size_t count) {
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    _mm256_storeu_ps(target + i, Element::widen(load_halves(source + i)));
  }
  if (i == count) return;
  std::uint16_t in[kLanes] = {};
  float out[kLanes];
  for (std::size_t j = 0; i + j < count; ++j) in[j] = source[i + j];
  _mm256_storeu_ps(out, Element::widen(load_halves(in)));
  for (std::size_t j = 0; i + j < count; ++j) target[i + j] = out[j];
}

template <class Element>
void narrow(const float* source, std::uint16_t* target, std::size_t count) {
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    store_halves(target + i, Element::narrow(_mm256_loadu_ps(source + i)));
  }
  if (i == count) return;
  float in[kLanes] = {};
  std::uint16_t out[kLanes];
  for (std::size_t j = 0; i + j < count; ++j) in[j] = source[i + j];
  store_halves(out, Element::narrow(_mm256_loadu_ps(in)));
  for (std::size_t j = 0; i + j < count; ++j) target[i + j] = out[j];
}

template <class Element>
void add(const std::uint16_t* source, float* sum, std::size_t count) {
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const __m256 value = Element::widen(load_halves(source + i));
    _mm256_storeu_ps(sum + i, _mm256_add_ps(_mm256_loadu_ps(sum + i), value));
  }
  if (i == count) return;
  std::uint16_t in[kLanes] = {};
  float out[kLanes];
  for (std::size_t j = 0; i + j < count; ++j) in[j] = source[i + j];
  _mm256_storeu_ps(out, Element::widen(load_halves(in)));
  for (std::size_t j = 0; i + j < count; ++j) sum[i + j] += out[j];
}

constexpr RowMath kBf16{"avx2", widen<Bf16>, narrow<Bf16>, add<Bf16>};
constexpr RowMath kF16{"avx2", widen<F16>, narrow<F16>, add<F16>};

}  // namespace

const RowMath* const kRowMathAvx2[2] = {&kBf16, &kF16};

}  // namespace mk::kernels
#else

namespace mk::kernels {
const RowMath* const kRowMathAvx2[2] = {nullptr, nullptr};
}  // namespace mk::kernels
#endif
