// The words of CUDA C++ that kernels.cu and plain.cu use, for g++. Each thread of a block is a fiber
// (machine.cpp).
//
// Authority: CUDA C++ Programming Guide, "C++ Language Extensions"; for the tensor cores the PTX ISA, "Matrix
// Fragments for mma.m16n8k16 with floating point type", and https://arxiv.org/abs/2511.10909 for their sums.
//
// A fiber runs until CUDA would make threads wait for each other: __syncthreads, or an instruction of a whole
// warp. The last lane to arrive there does the exchange for all of them: `collective`.
//
// Not here: what these files have to do without, e.g. textures, clusters, grid-wide barriers, static
// initialisers.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

// ---- The language -----------------------------------------------------------------------------------------

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static  // in a section of its own: build() in __init__.py

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

// ---- Number formats ---------------------------------------------------------------------------------------

template <class To, class From>
static inline To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

struct __nv_bfloat16 {
  uint16_t bits;
};

static inline float __bfloat162float(__nv_bfloat16 b) { return bits_of<float>(uint32_t(b.bits) << 16); }

static inline __nv_bfloat16 __float2bfloat16(float f) {  // to the nearest, ties to even
  uint32_t u = bits_of<uint32_t>(f);
  if ((u & 0x7fffffff) > 0x7f800000) return {0x7fff};  // NaN
  return {uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
}

static inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 b) { return b.bits; }
static inline unsigned __float_as_uint(float f) { return bits_of<unsigned>(f); }
static inline float __uint_as_float(unsigned u) { return bits_of<float>(u); }
static inline int __float_as_int(float f) { return bits_of<int>(f); }

// ---- The machine ------------------------------------------------------------------------------------------

namespace emulator {

struct Warp {
  uint32_t ready, live, arrived;  // one bit a lane: can run; has not returned; waits in a collective
  void *frame[32];                // where each waiting lane keeps its operands
};
struct Thread {
  void *stack;
  dim3 index;
  unsigned id;
};

extern Thread *self;
extern Warp warps[32];
extern dim3 block_index, block_size, grid_size;

enum Event { WARP_BARRIER, FENCE, ATOMIC, PREFETCH };
void wait_at_block_barrier();
void wait_in_warp();                                                  // until the collective is done
void note(Event event, void *address = nullptr, size_t n_bytes = 0);  // tells the checker
void begin_copy(void *to, const void *from, bool is_there);
void end_copies();
void await_copies(int n);

// Wait until every lane of `mask` is here; the last one runs exchange(frames) for all.
template <class Frame, class Exchange>
static inline void collective(uint32_t mask, Frame *mine, Exchange exchange) {
  Warp &warp = warps[self->id / 32];
  uint32_t bit = 1u << self->id % 32;
  warp.frame[self->id % 32] = mine;
  warp.arrived |= bit;
  if ((warp.arrived & mask & warp.live) == (mask & warp.live)) {
    exchange(reinterpret_cast<Frame **>(warp.frame));
    warp.arrived &= ~mask;
    warp.ready |= mask & warp.live;
  } else {
    warp.ready &= ~bit;
    wait_in_warp();
  }
}

template <class T>
struct Shuffle {
  T in, out;
  unsigned from;
};

template <class T>
static inline T shuffle(uint32_t mask, T value, unsigned from) {
  Shuffle<T> mine{value, value, from & 31};
  collective(mask, &mine, [mask](Shuffle<T> **lane) {
    for (int i = 0; i < 32; i++)
      if (mask >> i & 1) lane[i]->out = lane[lane[i]->from]->in;
  });
  return mine.out;
}

static inline unsigned lane() { return self->id % 32; }

}  // namespace emulator

#define threadIdx (emulator::self->index)
#define blockIdx (emulator::block_index)
#define blockDim (emulator::block_size)
#define gridDim (emulator::grid_size)

// ---- Waiting for each other -------------------------------------------------------------------------------

static inline void __syncthreads() { emulator::wait_at_block_barrier(); }

static inline void __syncwarp(unsigned mask = ~0u) {
  int nothing;
  emulator::collective(mask, &nothing, [](int **) {});
  emulator::note(emulator::WARP_BARRIER);
}

static inline void __threadfence() { emulator::note(emulator::FENCE); }

template <class T>
static inline T __shfl_sync(unsigned mask, T value, int from) {
  return emulator::shuffle(mask, value, from);
}
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T value, int x) {
  return emulator::shuffle(mask, value, emulator::lane() ^ x);
}
template <class T>
static inline T __shfl_up_sync(unsigned mask, T value, int n) {
  return emulator::shuffle(mask, value, int(emulator::lane()) >= n ? emulator::lane() - n : emulator::lane());
}

static inline unsigned __ballot_sync(unsigned mask, int predicate) {
  emulator::Shuffle<unsigned> mine{predicate != 0, 0, 0};
  emulator::collective(mask, &mine, [mask](emulator::Shuffle<unsigned> **lane) {
    unsigned all = 0;
    for (int i = 0; i < 32; i++)
      if (mask >> i & 1) all |= lane[i]->in << i;
    for (int i = 0; i < 32; i++)
      if (mask >> i & 1) lane[i]->out = all;
  });
  return mine.out;
}

template <class T>
__attribute__((noinline, no_sanitize("thread"))) static T atomicAdd(T *address, T value) {
  emulator::note(emulator::ATOMIC, address, sizeof *address);
  T old = *address;
  *address = old + value;
  return old;
}

template <class T>
__attribute__((noinline, no_sanitize("thread"))) static T atomicOr(T *address, T value) {
  emulator::note(emulator::ATOMIC, address, sizeof *address);
  T old = *address;
  *address = old | value;
  return old;
}

template <class T>
__attribute__((noinline, no_sanitize("thread"))) static T atomicMax(T *address, T value) {
  emulator::note(emulator::ATOMIC, address, sizeof *address);
  T old = *address;
  if (old < value) *address = value;
  return old;
}

#define ALWAYS_INLINE static inline __attribute__((always_inline))  // so that the checker names the line
ALWAYS_INLINE void prefetch(const void *address, int n_bytes) {
  emulator::note(emulator::PREFETCH, (void *)address, n_bytes);
}

// Copies that go on by themselves arrive when they are waited for, and no sooner.
ALWAYS_INLINE void begin_copy(uint4 *to, const void *from, bool is_there) {
  emulator::begin_copy(to, from, is_there);
}
ALWAYS_INLINE void end_copies() { emulator::end_copies(); }
template <int N>
ALWAYS_INLINE void await_copies() {
  emulator::await_copies(N);
}

// ---- Arithmetic and memory --------------------------------------------------------------------------------

static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline uint64_t __umul64hi(uint64_t a, uint64_t b) { return uint64_t((unsigned __int128)a * b >> 64); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
template <class T>
static inline T __ldcs(const T *address) {
  return *address;
}  // "streaming": will not be read again
template <class T>
static inline T __ldcg(const T *address) {
  return *address;
}  // past the cache of this processor
template <class T>
static inline T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
static inline T max(T a, T b) {
  return a < b ? b : a;
}

// One number of d of the tensor cores, as those of Hopper (and Blackwell) compute it to the bit: the 16 products
// and d itself are 17 terms of one sum. Each is cut off at FRACTION_BITS behind the point of the term with the
// greatest exponent; their sum is exact, and cut off to float32. The exponent of a product is the sum of its
// factors': it is not normalised. https://arxiv.org/abs/2511.10909, and the model by its authors,
// https://github.com/microsoft/MMA-Sim. Ampere takes the products in two halves, at 24 bits.
namespace emulator {

const int FRACTION_BITS = 25, NO_EXPONENT = -1000;  // of zero

struct Parts {  // of a number: mantissa * 2^(exponent - fraction bits of its format)
  int mantissa, exponent;
};
static inline Parts parts_of(float f, int fraction_bits) {
  uint32_t u = bits_of<uint32_t>(f), field = u >> 23 & 255;
  int mantissa = int((u & 0x7fffff) | (field ? 0x800000 : 0)) >> (23 - fraction_bits);
  int exponent = (field ? int(field) : 1) - 127;
  return {u >> 31 ? -mantissa : mantissa, mantissa ? exponent : NO_EXPONENT};
}

static inline float cut_off(double d) {  // to float32, towards zero
  if (std::fabs(d) >= 0x1p128) return float(d);
  float f = float(d);
  return std::fabs(double(f)) > std::fabs(d) ? std::nextafter(f, 0.0f) : f;
}

// a, b: of bfloat16, with 7 fraction bits
static inline float fused_sum(float d, const Parts *a, const Parts *b) {
  const int n = 16;
  int exponents[n], products[n];
  Parts old = parts_of(d, 23);
  int top = old.exponent;
  for (int k = 0; k < n; k++) {
    exponents[k] = a[k].exponent + b[k].exponent;
    products[k] = a[k].mantissa * b[k].mantissa;
    top = std::max(top, exponents[k]);
  }
  if (top <= NO_EXPONENT / 2) return 0;
  auto aligned = [&](int64_t mantissa, int fraction_bits, int exponent) {
    int64_t magnitude = std::llabs(mantissa) << (FRACTION_BITS - fraction_bits) >> std::min(top - exponent, 60);
    return mantissa < 0 ? -magnitude : magnitude;
  };
  int64_t sum = aligned(old.mantissa, 23, old.exponent);
  for (int k = 0; k < n; k++) sum += aligned(products[k], 14, exponents[k]);
  return cut_off(std::ldexp(double(sum), top - FRACTION_BITS));
}

}  // namespace emulator

// d (16, 8) += a (16, 16) b (16, 8): bf16 factors, spread over the lanes as the PTX manual draws them.
static inline void mma_16x8x16(float *d, const unsigned *a, const unsigned *b) {
  struct Frame {
    float *d;
    const unsigned *a, *b;
  } mine{d, a, b};
  emulator::collective(~0u, &mine, [](Frame **lane) {
    auto low = [](unsigned u) { return bits_of<float>(u << 16); };
    auto high = [](unsigned u) { return bits_of<float>(u & 0xffff0000u); };
    float A[16][16], B[8][16];
    for (int l = 0; l < 32; l++) {
      for (int r = 0; r < 4; r++) {
        int row = l / 4 + 8 * (r & 1), k = l % 4 * 2 + 4 * (r & 2);
        A[row][k] = low(lane[l]->a[r]), A[row][k + 1] = high(lane[l]->a[r]);
      }
      for (int r = 0; r < 2; r++) {
        int k = l % 4 * 2 + 8 * r;
        B[l / 4][k] = low(lane[l]->b[r]), B[l / 4][k + 1] = high(lane[l]->b[r]);
      }
    }
    emulator::Parts A_parts[16][16], B_parts[8][16];
    for (int k = 0; k < 16; k++) {
      for (int i = 0; i < 16; i++) A_parts[i][k] = emulator::parts_of(A[i][k], 7);
      for (int i = 0; i < 8; i++) B_parts[i][k] = emulator::parts_of(B[i][k], 7);
    }
    for (int l = 0; l < 32; l++)
      for (int r = 0; r < 4; r++) {
        int i = l / 4 + 4 * (r & 2), j = l % 4 * 2 + (r & 1);
        float plain = lane[l]->d[r];
        for (int k = 0; k < 16; k++) plain += A[i][k] * B[j][k];
        if (std::isfinite(plain))
          lane[l]->d[r] = emulator::fused_sum(lane[l]->d[r], A_parts[i], B_parts[j]);
        else  // an infinity or NaN among the terms
          lane[l]->d[r] = plain;
      }
  });
}
