// Encoding with the dynamic map by one look-up: the upper bits of y choose a bucket that holds at most one of the floors
// between codes, and the lower bits tell on which side of it y lies.

#pragma once

#include "lanes.h"
// After lanes.h, whose overloads its templates use.
#include "../codecs.h"

namespace fused8 {

// The y of a bucket share the bits of their FP32 pattern from SHIFT on. An entry plus such a pattern, shifted down, ends
// with the code of the lowest y of the bucket: or of the next code, if the sum carried, for y beyond the floor. That is
// so for y >= 0. From -0 down the codes descend, and the sum has their complements, which ascend.
template <int SHIFT_, int COUNT>
struct Buckets {
  static constexpr int SHIFT = SHIFT_;
  int32_t entry[COUNT];
};

// With entries for all FP32 patterns, so that no state, however damaged, leads out of the table.
using SignedBuckets = Buckets<17, 1 << 15>;    // 64 for each power of two
using UnsignedBuckets = Buckets<16, 1 << 15>;  // 128, and none for the negative
extern const SignedBuckets SIGNED_BUCKETS;
extern const UnsignedBuckets UNSIGNED_BUCKETS;

namespace FUSED8_ISA::dynamic {

template <class B>
Ints bucket_code(Ints bits, const B& buckets) {
  return (lookup(buckets.entry, (Ints)((Uints)bits >> B::SHIFT)) + bits) >> B::SHIFT;
}

// In their low bytes these are the codes of `encode` and `encode_sq` in codecs.h.

inline Ints encode_by_bucket(Floats y) {
  const Ints bits = float_bits(y);
  return bucket_code(bits, SIGNED_BUCKETS) ^ (bits >> 31);
}

// Positive v are as large as the value of code 1 at least, and so never become 0.
inline Ints encode_sq_by_bucket(Floats y, Floats v) {
  constexpr int32_t FIRST = __builtin_bit_cast(int32_t, UNSIGNED.value[1]);
  const Ints code = bucket_code(larger(float_bits(y), Ints{} + FIRST), UNSIGNED_BUCKETS);
  return float_bits(v) > 0 ? code : Ints{};
}

}  // namespace FUSED8_ISA::dynamic
}  // namespace fused8
