#include "daemon/control/job_secret.h"

#include <array>
#include <bit>
#include <string>

namespace mk::daemon {
namespace {

using Words = std::array<std::uint32_t, 8>;

/// The first 64 primes' cube roots' and the first 8 primes' square roots' fractional bits are the
/// constants of FIPS 180-4, sections 4.2.2 and 5.3.3: integer roots give them without a table.
struct Constants {
  std::array<std::uint32_t, 64> round{};
  Words initial{};
};

/// floor(frac(prime^(1/degree)) * 2^32): the largest r with r^degree <= prime * 2^(32 * degree).
constexpr std::uint32_t root_bits(std::uint32_t prime, int degree) {
  using Wide = unsigned __int128;
  std::uint64_t root = 0;
  for (int bit = 35; bit >= 0; --bit) {
    const std::uint64_t tried = root | std::uint64_t{1} << bit;
    // tried < 2^36, so its cube has at most 108 bits; prime * 2^96 has at most 105.
    Wide power = tried;
    for (int i = 1; i < degree; ++i) power *= tried;
    if (power <= Wide{prime} << 32 * degree) root = tried;
  }
  return static_cast<std::uint32_t>(root);
}

constexpr Constants make_constants() {
  Constants constants;
  std::uint32_t found = 0;
  for (std::uint32_t candidate = 2; found < 64; ++candidate) {
    bool prime = true;
    for (std::uint32_t d = 2; d * d <= candidate; ++d) prime = prime && candidate % d != 0;
    if (!prime) continue;
    if (found < 8) constants.initial[found] = root_bits(candidate, 2);
    constants.round[found++] = root_bits(candidate, 3);
  }
  return constants;
}

constexpr Constants kConstants = make_constants();
static_assert(kConstants.initial[0] == 0x6a09e667 && kConstants.initial[7] == 0x5be0cd19);
static_assert(kConstants.round[0] == 0x428a2f98 && kConstants.round[63] == 0xc67178f2);

void add_block(Words& state, const std::byte* block) {
  std::array<std::uint32_t, 64> w{};
  for (std::size_t i = 0; i < 16; ++i) {
    for (std::size_t byte = 0; byte < 4; ++byte) {
      w[i] = w[i] << 8 | std::to_integer<std::uint32_t>(block[4 * i + byte]);
    }
  }
  for (std::size_t i = 16; i < 64; ++i) {
    const std::uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
    const std::uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (std::size_t i = 0; i < 64; ++i) {
    const std::uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const std::uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kConstants.round[i] + w[i];
    const std::uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const std::uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
  }
  const Words add{a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < state.size(); ++i) state[i] += add[i];
}

}  // namespace

Bytes sha256(std::span<const std::byte> message) {
  constexpr std::size_t kBlock = 64;
  Words state = kConstants.initial;
  Bytes padded(message.begin(), message.end());
  padded.push_back(std::byte{0x80});
  while (padded.size() % kBlock != kBlock - 8) padded.push_back(std::byte{0});
  const std::uint64_t bits = std::uint64_t{message.size()} * 8;
  for (int shift = 56; shift >= 0; shift -= 8) {
    padded.push_back(static_cast<std::byte>(bits >> shift));
  }
  for (std::size_t at = 0; at < padded.size(); at += kBlock) add_block(state, padded.data() + at);
  Bytes digest;
  for (const std::uint32_t word : state) {
    for (int shift = 24; shift >= 0; shift -= 8) {
      digest.push_back(static_cast<std::byte>(word >> shift));
    }
  }
  return digest;
}

Bytes job_secret_digest(std::string_view job, std::string_view secret) {
  if (secret.empty()) return {};
  // A name has no zero byte, so no two pairs make the same text.
  std::string text = "mkernel job";
  text.push_back('\0');
  text.append(job);
  text.push_back('\0');
  text.append(secret);
  return sha256(std::as_bytes(std::span(text)));
}

Bytes hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> message) {
  constexpr std::size_t kBlock = 64;
  const Bytes short_key = key.size() > kBlock ? sha256(key) : Bytes(key.begin(), key.end());
  const auto keyed = [&](std::byte pad, std::span<const std::byte> text) {
    Bytes all(kBlock, pad);
    for (std::size_t i = 0; i < short_key.size(); ++i) all[i] ^= short_key[i];
    all.insert(all.end(), text.begin(), text.end());
    return sha256(all);
  };
  return keyed(std::byte{0x5c}, keyed(std::byte{0x36}, message));
}

Bytes job_proof(std::span<const std::byte> digest, std::string_view job, const ProofParty& from,
                const ProofParty& to) {
  // The name goes last: all that stands before it has a fixed length.
  std::string text = "mkernel proof";
  const auto number = [&text](std::uint64_t value) {
    for (int shift = 0; shift < 64; shift += 8) text.push_back(static_cast<char>(value >> shift));
  };
  for (const ProofParty* party : {&from, &to}) {
    number(party->node);
    number(party->uid);
    number(party->part_id);
    text.append(reinterpret_cast<const char*>(party->nonce.data()), party->nonce.size());
  }
  text.append(job);
  return hmac_sha256(digest, std::as_bytes(std::span(text)));
}

bool same_proof(std::span<const std::byte> a, std::span<const std::byte> b) {
  if (a.size() != b.size()) return false;
  unsigned difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i) difference |= std::to_integer<unsigned>(a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace mk::daemon
