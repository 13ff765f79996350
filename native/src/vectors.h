// Row elements: loads from the storage type of tables, and additions in the type of sums.
#pragma once

#include <cstring>

#include "kernels.h"

#ifdef LUTJAX_LEVEL
namespace lutjax {
namespace {

struct bfloat16 {
  uint16_t bits;
};

inline float value(float x) { return x; }
inline double value(double x) { return x; }
inline int32_t value(int8_t x) { return x; }
inline float value(bfloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

inline void store(float x, float* to) { *to = x; }
inline void store(float x, bfloat16* to) {  // to the nearest, ties to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  to->bits = x != x ? static_cast<uint16_t>((bits >> 16) | 0x40) : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

}  // namespace
}  // namespace lutjax
#endif
