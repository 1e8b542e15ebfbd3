#include "dynamic_buckets.h"

namespace fused8 {
namespace {

using FUSED8_ISA::MAGNITUDE_MASK;
using FUSED8_ISA::dynamic::Map;

constexpr uint32_t SIGN_BIT = 0x80000000;

constexpr uint32_t magnitude_bits(float x) {
  return __builtin_bit_cast(uint32_t, x) & MAGNITUDE_MASK;
}

// Fills in the buckets from 0 to 1, or from -0 to -1, by ascending |y|. `code` is that of 0.
template <class B>
constexpr void fill(B& buckets, const Map& map, int code, bool negative) {
  constexpr uint32_t WIDTH = 1u << B::SHIFT;
  const int last_code = negative ? 0 : 255;
  const uint32_t sign = negative ? SIGN_BIT : 0;
  for (uint32_t begin = 0; begin <= magnitude_bits(1.0f); begin += WIDTH) {
    const int first = code;
    uint32_t beyond = WIDTH;  // how far into the bucket the next code begins
    while (code != last_code) {
      // y has the code above its floor; below zero it has the code whose floor it is above.
      const uint32_t next = negative ? magnitude_bits(map.floor[code]) : magnitude_bits(map.floor[code + 1]) + 1;
      if (next >= begin + WIDTH) break;
      if (beyond != WIDTH) throw "two floors in one bucket";
      beyond = next - begin;
      code += negative ? -1 : 1;
    }
    const auto start = static_cast<uint32_t>(negative ? ~first : first) * WIDTH;
    buckets.entry[(sign | begin) >> B::SHIFT] = static_cast<int32_t>(start + (WIDTH - beyond) - (sign | begin));
  }
}

constexpr SignedBuckets signed_buckets() {
  SignedBuckets buckets = {};
  fill(buckets, FUSED8_ISA::dynamic::SIGNED, FUSED8_ISA::dynamic::SIGNED_ZERO, false);
  fill(buckets, FUSED8_ISA::dynamic::SIGNED, FUSED8_ISA::dynamic::SIGNED_ZERO, true);
  return buckets;
}

constexpr UnsignedBuckets unsigned_buckets() {
  UnsignedBuckets buckets = {};
  fill(buckets, FUSED8_ISA::dynamic::UNSIGNED, 0, false);
  return buckets;
}

}  // namespace

constexpr SignedBuckets SIGNED_BUCKETS = signed_buckets();
constexpr UnsignedBuckets UNSIGNED_BUCKETS = unsigned_buckets();

}  // namespace fused8
