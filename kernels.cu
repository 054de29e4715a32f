// The ops of model.py on a GPU. Weights, keys and values are bfloat16; the residual stream and every sum are
// float32.
//
//     embed --> [qkv --> attend --> out --> gate_up --> down] x n_layers --> logits --> pick
//
// Each op is there twice: plain, to be read first and to hold the other one against; and fast.
//
// Authority: the op of the same name in model.py, line by line; CUDA C++ Programming Guide; PTX ISA for the
// instructions that C++ has no name for. "Fixed split size, whatever the batch" is the recipe of
// https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/.
//
// Rules of this file:
// 1. A row of activations gets the same bits whatever rows are computed beside it, and by whichever kernel:
//    the order of every sum follows from the model and the token's position alone. It is compiled without
//    contraction (--fmad=false), so a fused multiply-add is where fmaf stands. No float atomics.
// 2. A kernel may start while those before it still run (programmatic dependent launch). Before
//    await_previous() it touches only what no kernel writes, weights and tables, which have types of their
//    own; and prefetches what it likes, for that reads nothing.
// 3. Sizes of the model are constants of the compilation, as are ROW_TILES and COLUMN_TILES, how much of a
//    product a block computes: devices/kernels.py compiles the file once for each shape. Rows of every matrix begin
//    at multiples of 16 bytes.
// 4. A warp's instruction is entered by all its lanes, a barrier by all the block's threads.
// 5. Plain kernels are a compilation of their own (PLAIN). They round to bfloat16 where the fast ones do.
//
// Written R: rows of this step (tokens); S: sequences in it; P: pages; all arrays are row-major.
//
// Not here: which rows a step has (engine.py), memory (devices/cuda.py), launches (devices/kernels.py).

#ifdef __CUDACC__
#include <cuda_bf16.h>
__device__ __forceinline__ void await_previous();  // until the kernel before this one has ended
#endif

// PLAIN: 1 in the compilation of the plain kernels, 0 in the others
// DIM HIDDEN_DIM N_HEADS N_KV_HEADS HEAD_DIM VOCAB_SIZE NORM_EPS ROW_TILES COLUMN_TILES: of the compilation
#define GROUP (N_HEADS / N_KV_HEADS)  // query heads that share a key head
#define QKV_DIM ((N_HEADS + 2 * N_KV_HEADS) * HEAD_DIM)
#define HEAD_PAD ((HEAD_DIM + 31) / 32 * 32)  // of a key in its page: whole steps of the tensor cores
#define PAGE 64                               // tokens of a page
#define ALL 0xffffffffu                       // lanes
#define LOG2_E 1.44269504f
#define NEVER __uint_as_float(0xff800000u)  // -infinity: the logit of what may not come

typedef __nv_bfloat16 bf16;
typedef const __nv_bfloat16 weight;  // no kernel writes it
typedef const int table;             // nor this: it comes from the host, before the first kernel of a step
typedef unsigned long long u64;

// ---- Plain ------------------------------------------------------------------------------------------------
// The ops in loops alone: a thread makes one number, and adds it up from the first term to the last. No
// shared memory and no tensor cores; each waits for the one before it, and lets none start early. devices/plain_ops.py
// launches them. plain_pick stands among the sampling, beside what it has in common with `pick`.
//   n: numbers to make; grid: n / 256, block: 256

#if PLAIN

__device__ int index_of_thread() { return blockIdx.x * 256 + threadIdx.x; }

// x = table[token]: NumpyOps.embed; where the host does not know the token, the one that its slot has chosen
//   table (VOCAB_SIZE, DIM)   tokens, slots (R,); token -1: chosen[slot]   chosen (max_batch,)   x (R, DIM)
extern "C" __global__ void plain_embed(weight *table, const int *tokens, const int *slots, const int *chosen,
                                       float *x, int n) {
  await_previous();
  int i = index_of_thread(), row = i / DIM;
  if (i >= n) return;
  int token = tokens[row] < 0 ? chosen[slots[row]] : tokens[row];
  x[i] = __bfloat162float(table[(size_t)token * DIM + i % DIM]);
}

// y = x / sqrt(mean(x^2) + eps) * w: NumpyOps._rms_norm
//   w (DIM,)   x (., DIM)   rows (n / DIM,) which of x, or null: all   y (n / DIM, DIM)
extern "C" __global__ void plain_rms_norm(weight *w, const float *x, const int *rows, bf16 *y, int n) {
  await_previous();
  int i = index_of_thread();
  if (i >= n) return;
  x += (size_t)(rows ? rows[i / DIM] : i / DIM) * DIM;
  float sum = 0;
  for (int k = 0; k < DIM; k++) sum += x[k] * x[k];
  y[i] = __float2bfloat16(x[i % DIM] * rsqrtf(sum / DIM + NORM_EPS) * __bfloat162float(w[i % DIM]));
}

// y = x w^T + b, or with adds y += x w^T + b: NumpyOps._linear, and what qkv, out, gate_up, down, logits are
//   w (n_columns, size)   b (n_columns,) or null   x (n / n_columns, size)   y (n / n_columns, n_columns)
extern "C" __global__ void plain_linear(weight *w, weight *b, const bf16 *x, float *y, int size,
                                        int n_columns, int adds, int n) {
  await_previous();
  int i = index_of_thread(), column = i % n_columns;
  if (i >= n) return;
  x += (size_t)(i / n_columns) * size, w += (size_t)column * size;
  float sum = 0;
  for (int k = 0; k < size; k++) sum += __bfloat162float(x[k]) * __bfloat162float(w[k]);
  sum += b ? __bfloat162float(b[column]) : 0;
  y[i] = adds ? y[i] + sum : sum;
}

// h = silu(gate) * up: the end of NumpyOps.gate_up
//   both (R, 2 * HIDDEN_DIM) gate, up   h (R, HIDDEN_DIM)
extern "C" __global__ void plain_silu_mul(const float *both, bf16 *h, int n) {
  await_previous();
  int i = index_of_thread();
  if (i >= n) return;
  both += (size_t)(i / HIDDEN_DIM) * 2 * HIDDEN_DIM + i % HIDDEN_DIM;
  float gate = both[0], up = both[HIDDEN_DIM];
  h[i] = __float2bfloat16(gate / (1 + expf(-gate)) * up);
}

// Where a page has the first number of a token's key, and of its value, whose next ones are PAGE apart
//   keys (P, N_KV_HEADS, PAGE, HEAD_PAD)   values (P, N_KV_HEADS, HEAD_PAD, PAGE)   pages (max_pages,)
__device__ size_t key_at(const int *pages, int kv, int position) {
  return (((size_t)pages[position / PAGE] * N_KV_HEADS + kv) * PAGE + position % PAGE) * HEAD_PAD;
}
__device__ size_t value_at(const int *pages, int kv, int position) {
  return ((size_t)pages[position / PAGE] * N_KV_HEADS + kv) * HEAD_PAD * PAGE + position % PAGE;
}

// Norm the heads of q and k, rotate their pairs, write k and v to the page of the token: NumpyOps.attend
// until it attends. A thread has a head, for the norm is of all of it.
//   qkv (R, QKV_DIM): q becomes what is attended with, rounded   q_norm, k_norm (HEAD_DIM,) or null
//   rope (max_seq_len, HEAD_DIM / 2) cos, sin   positions, sequences (R,); position -1: no row
//   pages (S, max_pages)   rotary: of the layer
extern "C" __global__ void plain_keep(float *qkv, weight *q_norm, weight *k_norm, const float2 *rope,
                                      bf16 *keys, bf16 *values, const int *positions, const int *sequences,
                                      const int *pages, int max_pages, int rotary, int n) {
  await_previous();
  int i = index_of_thread(), n_heads = N_HEADS + 2 * N_KV_HEADS, row = i / n_heads, head = i % n_heads;
  if (i >= n || positions[row] < 0) return;
  float *v = qkv + (size_t)i * HEAD_DIM;
  int position = positions[row], kv = head - N_HEADS;  // below 0: a query; from N_KV_HEADS on: a value
  pages += (size_t)sequences[row] * max_pages;
  if (kv >= N_KV_HEADS) {
    size_t at = value_at(pages, kv - N_KV_HEADS, position);
    for (int k = 0; k < HEAD_DIM; k++) values[at + k * PAGE] = __float2bfloat16(v[k]);
    return;
  }
  if (weight *norm = kv < 0 ? q_norm : k_norm) {
    float sum = 0;
    for (int k = 0; k < HEAD_DIM; k++) sum += v[k] * v[k];
    float scale = rsqrtf(sum / HEAD_DIM + NORM_EPS);
    for (int k = 0; k < HEAD_DIM; k++) v[k] = v[k] * scale * __bfloat162float(norm[k]);
  }
  for (int k = 0; k < HEAD_DIM; k += 2) {
    float2 one = {1, 0}, turn = rotary ? rope[(size_t)position * (HEAD_DIM / 2) + k / 2] : one;
    float a = v[k], b = v[k + 1];
    v[k] = a * turn.x - b * turn.y, v[k + 1] = a * turn.y + b * turn.x;
  }
  for (int k = 0; k < HEAD_DIM; k++) {
    bf16 rounded = __float2bfloat16(v[k]);
    if (kv < 0)
      v[k] = __bfloat162float(rounded);
    else
      keys[key_at(pages, kv, position) + k] = rounded;
  }
}

// q k / sqrt(HEAD_DIM), of a head
__device__ float score(const float *q, const bf16 *k) {
  float sum = 0;
  for (int i = 0; i < HEAD_DIM; i++) sum += q[i] * __bfloat162float(k[i]);
  return sum / sqrtf((float)HEAD_DIM);
}

// softmax(q k^T / sqrt(HEAD_DIM)) v over what a token sees: NumpyOps._attend_one. Each number goes through
// all keys twice, for the greatest score and for the sums. (`attend` rounds a key's share below another
// greatest score: that of the 32 keys around it.)
//   qkv (R, QKV_DIM), as plain_keep leaves it   y (R, N_HEADS * HEAD_DIM)   window: of the layer, 0: none
extern "C" __global__ void plain_attend(const float *qkv, const bf16 *keys, const bf16 *values,
                                        const int *positions, const int *sequences, const int *pages, bf16 *y,
                                        int max_pages, int window, int n) {
  await_previous();
  int i = index_of_thread(), row = i / (N_HEADS * HEAD_DIM), head = i / HEAD_DIM % N_HEADS, kv = head / GROUP;
  if (i >= n || positions[row] < 0) return;
  const float *q = qkv + (size_t)row * QKV_DIM + head * HEAD_DIM;
  int last = positions[row], first = window ? max(0, last - window + 1) : 0;
  pages += (size_t)sequences[row] * max_pages;
  float top = NEVER, sum = 0, out = 0;
  for (int p = first; p <= last; p++) top = fmaxf(top, score(q, keys + key_at(pages, kv, p)));
  for (int p = first; p <= last; p++) {
    float share = expf(score(q, keys + key_at(pages, kv, p)) - top);
    share = __bfloat162float(__float2bfloat16(share));
    sum += share;
    out += share * __bfloat162float(values[value_at(pages, kv, p) + i % HEAD_DIM * PAGE]);
  }
  y[i] = __float2bfloat16(out / sum);
}
#endif  // PLAIN

// ---- What C++ has no name for -----------------------------------------------------------------------------

#ifdef __CUDACC__
// d (16, 8) += a (16, 16) b (16, 8) on the tensor cores. A lane l holds, with g = l / 4 and t = l % 4:
// a: (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8), each with its right neighbour;
// b: (2t, g), (2t + 8, g), each with the one below;
// d: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
__device__ __forceinline__ void mma_16x8x16(float *d, const unsigned *a, const unsigned *b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// The kernel behind this one may be put on the processors; it waits in await_previous() until this one has
// ended.
__device__ __forceinline__ void start_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void await_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Bring memory to the L2 cache; address and size are multiples of 16 bytes.
__device__ __forceinline__ void prefetch(const void *address, int n_bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(n_bytes) : "memory");
#endif
}
// Begin to copy 16 bytes to shared memory; zeros, and nothing is read, where `is_there` is false. What a
// thread has begun since its last end_copies() is a group; await_copies<N>() returns when its groups but the
// last N have arrived, for its own eyes: others see them after a barrier.
__device__ __forceinline__ void begin_copy(uint4 *to, const void *from, bool is_there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((unsigned)__cvta_generic_to_shared(to)),
               "l"(from), "r"(is_there ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
#endif

// ---- Small things -----------------------------------------------------------------------------------------

__device__ __forceinline__ float warp_sum(float v) {  // for every lane, in one order
  for (int m = 16; m; m /= 2) v += __shfl_xor_sync(ALL, v, m);
  return v;
}

__device__ __forceinline__ float low(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ unsigned pack(float low, float high) {
  return __bfloat16_as_ushort(__float2bfloat16(low)) | (unsigned)__bfloat16_as_ushort(__float2bfloat16(high))
                                                           << 16;
}
__device__ __forceinline__ uint4 nothing() {
  uint4 zero = {0, 0, 0, 0};
  return zero;
}

// Of two tokens the one with the larger logit is the larger number; of equals the one that comes first. What
// is no number, or infinite, is larger than all: NO_NUMBER.
#define NO_NUMBER ~0ull
__device__ __forceinline__ u64 rank_of(float logit, int token) {
  if (!(logit <= 3.4028235e38f)) return NO_NUMBER;
  unsigned bits = __float_as_uint(logit + 0.f);  // -0 becomes 0
  bits = bits >> 31 ? ~bits : bits | 0x80000000u;
  return (u64)bits << 32 | (0xffffffffu - token);
}
__device__ __forceinline__ int token_of(u64 rank) { return 0xffffffffu - (unsigned)rank; }

#if !PLAIN
// ---- Norm -------------------------------------------------------------------------------------------------

// A row is cut into WARPS parts, of equally many steps of 32 numbers: a warp's share of a sum, here and in
// products
#define WARPS 8
__device__ __forceinline__ int steps_of_part(int size) { return ((size + 31) / 32 + WARPS - 1) / WARPS; }

// y = x / sqrt(mean(x^2) + eps) * w of a row (DIM,), by a block: a warp adds up its part, and norms it; the
// sums of the parts are added from first to last
//   of_part (WARPS,) shared
__device__ __forceinline__ void norm_row(const float *x, weight *w, bf16 *y, float *of_part) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n = steps_of_part(DIM) * 32;
  int begin = warp * n + lane * 4, end = min(warp * n + n, DIM);
  float sum = 0;
  for (int k = begin; k < end; k += 128) {
    float4 v = *(const float4 *)(x + k);
    sum = fmaf(v.x, v.x, sum), sum = fmaf(v.y, v.y, sum), sum = fmaf(v.z, v.z, sum),
    sum = fmaf(v.w, v.w, sum);
  }
  sum = warp_sum(sum);
  if (lane == 0) of_part[warp] = sum;
  __syncthreads();
  sum = 0;
  for (int i = 0; i < WARPS; i++) sum += of_part[i];
  float scale = rsqrtf(sum / DIM + NORM_EPS);
  for (int k = begin; k < end; k += 128) {
    float4 v = *(const float4 *)(x + k);
    uint2 of_w = *(const uint2 *)(w + k);
    uint2 normed = {pack(v.x * scale * low(of_w.x), v.y * scale * high(of_w.x)),
                    pack(v.z * scale * low(of_w.y), v.w * scale * high(of_w.y))};
    *(uint2 *)(y + k) = normed;
  }
}

// ---- Products ---------------------------------------------------------------------------------------------
// y = x w^T for x (n_rows, size), w (n_columns, size), on the tensor cores.
//
// A part of `size` is summed up step by step, from zero; then the parts are added from first to last. So the
// order of a sum depends on `size` alone, and a row's bits do not depend on the shape of the block or on
// other rows.
//
// A block computes 16 * ROW_TILES rows and 8 * N columns of each matrix, in one of two ways:
// few rows    each warp takes a part, for the whole block: all weights are on their way at once
// many rows   each warp takes a part of the block, for all of `size`: what is read, two or four warps use
//
// A lane reads 16 bytes of a row: 8 numbers side by side. The instruction wants pairs that lie 8 apart; but w
// and x are permuted alike, and so the sum has the same terms.

// Rows of x as they lie there
struct Plain {
  const bf16 *x;
  int size;
  __device__ __forceinline__ void begin(int n_rows) { await_previous(); }
  __device__ __forceinline__ uint4 load(int row, int k) {
    return *(const uint4 *)(x + (size_t)row * size + k);
  }
};

// Rows of the residual stream, normed. Up to NORMED_ROWS each block norms for itself, a warp the part that it
// multiplies with: that saves a launch. Of more, the blocks would read more than the weights are, each all
// rows: rms_norm has made x.
#define NORMED_ROWS 2
struct Normed : Plain {
  const float *residual;
  weight *w;
  const int *rows;  // which of the residual stream, or null: all
  __device__ __forceinline__ void begin(int n_rows) {
    __shared__ __align__(16) bf16 few[NORMED_ROWS][DIM];
    __shared__ float of_part[NORMED_ROWS][WARPS];
    bool is_few = ROW_TILES == 1 && n_rows <= NORMED_ROWS;
    if (is_few && threadIdx.x == 0) prefetch(w, DIM * 2);
    await_previous();
    if (!is_few) return;
    for (int i = 0; i < n_rows; i++)
      norm_row(residual + (size_t)(rows ? rows[i] : i) * DIM, w, few[i], of_part[i]);
    __syncwarp();
    x = few[0];
  }
};

// The two products that one lane's 16 bytes of each are good for: sum (16, 8) += x (16, 32) w (8, 32)^T.
// low, high: of x, rows g and g + 8
__device__ __forceinline__ void multiply(float *sum, uint4 low, uint4 high, uint4 w) {
  unsigned a0[4] = {low.x, high.x, low.y, high.y}, b0[2] = {w.x, w.y};
  unsigned a1[4] = {low.z, high.z, low.w, high.w}, b1[2] = {w.z, w.w};
  mma_16x8x16(sum, a0, b0);
  mma_16x8x16(sum, a1, b1);
}

__device__ __forceinline__ void put(float *y, float v) { *y = v; }
__device__ __forceinline__ void put(bf16 *y, float v) { *y = __float2bfloat16(v); }

// linear(): y[row, column] = before[row, column] + value(column, its sums by MATRICES); before may be null
#if ROW_TILES < 8  // few rows

// AHEAD: steps of a part whose weights are on their way to registers. Of those behind them, a block has
// L2_BYTES brought to the L2 cache. With up to six blocks on each processor that is half of an H100's; of all
// that they read, lines would leave it before they are used, and be read twice.
#if ROW_TILES == 1
#define AHEAD 4
#define L2_BYTES 32768
#define LOGITS_TILES 4
#else
#define AHEAD 1
#define L2_BYTES 0
#endif

template <int MATRICES, int N, class Input, class T, class Value>
__device__ __forceinline__ void linear(weight *const (&w)[MATRICES], int size, int n_columns, int n_rows,
                                       Input input, const float *before, T *y, Value value) {
  __shared__ float4 of_warp[WARPS][MATRICES][ROW_TILES][32];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int first_row = blockIdx.x * ROW_TILES * 16, first_column = blockIdx.y * N * 8;
  int part = steps_of_part(size), begin = warp * part * 32;
  float sum[MATRICES][N][ROW_TILES][4] = {};
  uint4 ahead[AHEAD][MATRICES][N];
  auto fetch = [&](int step, uint4(&to)[MATRICES][N]) {  // a step of the part
    int k = begin + step * 32 + t * 8;
    for (int m = 0; m < MATRICES; m++)
      for (int n = 0; n < N; n++) {
        int column = first_column + n * 8 + g;
        bool is_there = step < part && k < size && column < n_columns;
        to[m][n] = is_there ? *(const uint4 *)(w[m] + (size_t)column * size + k) : nothing();
      }
  };
  auto prefetch_behind = [&]() {
    const int MOST = L2_BYTES / (WARPS * MATRICES * N * 8);  // of a row's part
    int k = begin + AHEAD * 32, n_bytes = min(min((part - AHEAD) * 32, size - k) * 2, MOST);
#pragma unroll
    for (int m = 0; m < MATRICES; m++)
#pragma unroll
      for (int n = 0; n < N; n++) {
        int column = first_column + n * 8 + g;
        if (t == 0 && n_bytes > 0 && column < n_columns) prefetch(w[m] + (size_t)column * size + k, n_bytes);
      }
  };
  start_next();
  prefetch_behind();
#pragma unroll
  for (int a = 0; a < AHEAD; a++) fetch(a, ahead[a]);
  input.begin(n_rows);
  for (int step = 0; step < part; step += AHEAD) {
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
      int k = begin + (step + a) * 32 + t * 8;
      if (step + a >= part || k - t * 8 >= size) break;
      uint4 x[ROW_TILES][2];
#pragma unroll
      for (int r = 0; r < ROW_TILES * 2; r++) {
        int row = first_row + r * 8 + g;
        x[r / 2][r % 2] = k < size && row < n_rows ? input.load(row, k) : nothing();
      }
#pragma unroll
      for (int m = 0; m < MATRICES; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
          for (int r = 0; r < ROW_TILES; r++) multiply(sum[m][n][r], x[r][0], x[r][1], ahead[a][m][n]);
      fetch(step + a + AHEAD, ahead[a]);
    }
  }
  // The warps' sums are put together for eight columns at a time: MINE numbers a thread, 32 rows apart. What
  // they are added to is read before anything is written, or each would wait for the one ahead of it.
  const int MINE = (ROW_TILES + 1) / 2;
  int row = threadIdx.x / 8, of_eight = threadIdx.x % 8;
  auto at = [&](int n, int i) {
    return (size_t)(first_row + row + i * 32) * n_columns + first_column + n * 8 + of_eight;
  };
  auto is_there = [&](int n, int i) {
    return row + i * 32 < ROW_TILES * 16 && first_row + row + i * 32 < n_rows &&
           first_column + n * 8 + of_eight < n_columns;
  };
  float old[N][MINE];
#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int i = 0; i < MINE; i++) old[n][i] = before && is_there(n, i) ? before[at(n, i)] : 0;
#pragma unroll
  for (int n = 0; n < N; n++) {
#pragma unroll
    for (int i = 0; i < MATRICES * ROW_TILES; i++) {
      float *d = sum[i / ROW_TILES][n][i % ROW_TILES];
      float4 v = {d[0], d[1], d[2], d[3]};
      of_warp[warp][i / ROW_TILES][i % ROW_TILES][lane] = v;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      if (!is_there(n, i)) continue;
      int tile = (row + i * 32) / 16, from = row % 8 * 16 + of_eight / 2 * 4 + row / 8 % 2 * 2 + of_eight % 2;
      float v[MATRICES];
      for (int m = 0; m < MATRICES; m++) {
        v[m] = 0;
        for (int j = 0; j < WARPS; j++) v[m] += ((const float *)of_warp[j][m][tile])[from];
      }
      put(y + at(n, i), old[n][i] + value(first_column + n * 8 + of_eight, v));
    }
    __syncthreads();
  }
}

#else  // many rows

// x and w come through shared memory, a step at a time: while one is computed with, two are on their way.
// Four lanes copy or read a row's 32 numbers, eight lanes two rows, side by side: all banks, each once.
#define STAGES 3
typedef uint4 Rows[4];  // 32 numbers of each

template <int N>
__device__ __forceinline__ void copy_rows(Rows *to, const bf16 *from, int first, int n_rows, int size,
                                          int step) {
  int piece = threadIdx.x % 4, k = step * 32 + piece * 8;
#pragma unroll
  for (int i = 0; i < N; i += WARPS * 8) {
    int row = threadIdx.x / 4 + i;
    begin_copy(&to[row][piece], from + (size_t)(first + row) * size + k, k < size && first + row < n_rows);
  }
}

template <int MATRICES, int N, class T, class Value>
__device__ __forceinline__ void linear(weight *const (&w)[MATRICES], int size, int n_columns, int n_rows,
                                       Plain input, const float *before, T *y, Value value) {
  const int ROWS = ROW_TILES * 16, COLUMNS = N * 8;  // of the block
  const int R = ROW_TILES / 2, C = N / 4;            // tiles of a warp: the warps lie 2 by 4
  __shared__ Rows x_of[STAGES][ROWS], w_of[STAGES][MATRICES][COLUMNS];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int first_row = blockIdx.x * ROWS, row = warp % 2 * R * 16 + g;
  int first_column = blockIdx.y * COLUMNS, column = warp / 2 * C * 8;
  auto copy_w = [&](int step) {
#pragma unroll
    for (int m = 0; m < MATRICES; m++)
      copy_rows<COLUMNS>(w_of[step % STAGES][m], w[m], first_column, n_columns, size, step);
  };
  auto copy_x = [&](int step) {
    copy_rows<ROWS>(x_of[step % STAGES], input.x, first_row, n_rows, size, step);
    end_copies();
  };
  start_next();
  for (int step = 0; step < STAGES - 1; step++) copy_w(step);
  await_previous();
  for (int step = 0; step < STAGES - 1; step++) copy_x(step);
  float total[C * R * 4][MATRICES] = {};
  for (int step = 0, n_steps = (size + 31) / 32; step < n_steps;) {
    float sum[C][R][MATRICES][4] = {};
    for (int end = min(step + steps_of_part(size), n_steps); step < end; step++) {
      await_copies<STAGES - 2>();
      __syncthreads();  // this step has come for all, and all have done with the one before it
      copy_w(step + STAGES - 1);
      copy_x(step + STAGES - 1);
      uint4 b[MATRICES][C];
#pragma unroll
      for (int m = 0; m < MATRICES; m++)
#pragma unroll
        for (int c = 0; c < C; c++) b[m][c] = w_of[step % STAGES][m][column + c * 8 + g][t];
#pragma unroll
      for (int r = 0; r < R; r++) {
        uint4 low = x_of[step % STAGES][row + r * 16][t], high = x_of[step % STAGES][row + r * 16 + 8][t];
#pragma unroll
        for (int m = 0; m < MATRICES; m++)
#pragma unroll
          for (int c = 0; c < C; c++) multiply(sum[c][r][m], low, high, b[m][c]);
      }
    }
#pragma unroll
    for (int i = 0; i < C * R * 4; i++)
#pragma unroll
      for (int m = 0; m < MATRICES; m++) total[i][m] += sum[i / 4 / R][i / 4 % R][m][i % 4];
  }
  await_copies<0>();  // of what is behind the last step: zeros, but they may not outlive the block
  auto each = [&](auto use) {  // number: which, its column, its place in y, has it one?
#pragma unroll
    for (int i = 0; i < C * R * 4; i++) {
      int y_row = first_row + row + i / 4 % R * 16 + i % 4 / 2 * 8;
      int y_column = first_column + column + i / 4 / R * 8 + t * 2 + i % 2;
      size_t at = (size_t)y_row * n_columns + y_column;
      use(i, min(y_column, n_columns - 1), at, y_row < n_rows && y_column < n_columns);
    }
  };
  float result[C * R * 4];  // all is read before anything is written, as above
  each([&](int i, int, size_t at, bool is_there) { result[i] = before && is_there ? before[at] : 0; });
  each([&](int i, int column, size_t, bool) { result[i] += value(column, total[i]); });
  each([&](int i, int, size_t at, bool is_there) {
    if (is_there) put(y + at, result[i]);
  });
}
#endif

#if ROW_TILES > 1
#define LOGITS_TILES COLUMN_TILES
#endif
#define PAIR_TILES ((COLUMN_TILES + 1) / 2)  // of each of two matrices

__device__ __forceinline__ float bias(weight *b, int column) { return b ? __bfloat162float(b[column]) : 0; }

// y = rms_norm(x) w^T + b: NumpyOps.qkv
//   w (QKV_DIM, DIM)   b (QKV_DIM,) or null   norm (DIM,)   x (R, DIM)   normed (R, DIM)   y (R, QKV_DIM)
//   grid: R / (16 ROW_TILES), QKV_DIM / (8 COLUMN_TILES); block: 256; as for all products. The blocks that
//   share weights come one after another, so that these stream by once.
extern "C" __global__ void __launch_bounds__(256)
    qkv(weight *w, weight *b, weight *norm, const float *x, const bf16 *normed, float *y, int n_rows) {
  Normed input = {{normed, DIM}, x, norm, nullptr};
  weight *const matrices[1] = {w};
  linear<1, COLUMN_TILES>(matrices, DIM, QKV_DIM, n_rows, input, nullptr, y,
                          [&](int column, float *v) { return v[0] + bias(b, column); });
}

// x += y w^T + b: NumpyOps.out
//   w (DIM, N_HEADS * HEAD_DIM)   b (DIM,) or null   y (R, N_HEADS * HEAD_DIM)   x (R, DIM)
extern "C" __global__ void __launch_bounds__(256)
    out(weight *w, weight *b, const bf16 *y, float *x, int n_rows) {
  Plain input = {y, N_HEADS * HEAD_DIM};
  weight *const matrices[1] = {w};
  linear<1, COLUMN_TILES>(matrices, N_HEADS * HEAD_DIM, DIM, n_rows, input, x, x,
                          [&](int column, float *v) { return v[0] + bias(b, column); });
}

// h = silu(gate) * up, of rms_norm(x) w^T + b: NumpyOps.gate_up
//   w (2 * HIDDEN_DIM, DIM) gate, up   b (2 * HIDDEN_DIM,) or null   norm (DIM,)   x, normed (R, DIM)
//   h (R, HIDDEN_DIM)   grid: R / (16 ROW_TILES), HIDDEN_DIM / (8 PAIR_TILES)
//   Of one tile three blocks a processor, or ptxas spills to make room for a fourth.
extern "C" __global__ void __launch_bounds__(256, ROW_TILES == 1 ? 3 : 0)
    gate_up(weight *w, weight *b, weight *norm, const float *x, const bf16 *normed, bf16 *h, int n_rows) {
  Normed input = {{normed, DIM}, x, norm, nullptr};
  weight *const matrices[2] = {w, w + (size_t)HIDDEN_DIM * DIM};
  linear<2, PAIR_TILES>(matrices, DIM, HIDDEN_DIM, n_rows, input, nullptr, h,
                        [&](int column, float *v) {
                          float gate = v[0] + bias(b, column), up = v[1] + bias(b, HIDDEN_DIM + column);
                          return gate / (1 + expf(-gate)) * up;
                        });
}

// x += h w^T + b: NumpyOps.down
//   w (DIM, HIDDEN_DIM)   b (DIM,) or null   h (R, HIDDEN_DIM)   x (R, DIM)
extern "C" __global__ void __launch_bounds__(256)
    down(weight *w, weight *b, const bf16 *h, float *x, int n_rows) {
  Plain input = {h, HIDDEN_DIM};
  weight *const matrices[1] = {w};
  linear<1, COLUMN_TILES>(matrices, HIDDEN_DIM, DIM, n_rows, input, x, x,
                          [&](int column, float *v) { return v[0] + bias(b, column); });
}

// The likeliest of the tokens whose logits the block has just written: no row is read again as a whole
__device__ __forceinline__ void find_best(const float *y, u64 *best, int first_row, int n_rows,
                                          int first_column) {
  __syncthreads();
  int end = min(first_column + 8 * LOGITS_TILES, VOCAB_SIZE);
  for (int row = first_row + threadIdx.x / 32; row < min(first_row + 16 * ROW_TILES, n_rows); row += WARPS) {
    u64 rank = 0;
    for (int i = first_column + threadIdx.x % 32; i < end; i += 32)
      rank = max(rank, rank_of(y[(size_t)row * VOCAB_SIZE + i], i));
    for (int m = 16; m; m /= 2) rank = max(rank, __shfl_xor_sync(ALL, rank, m));
    if (threadIdx.x % 32 == 0) atomicMax(&best[row], rank);
  }
}

// y = rms_norm(x[rows]) w^T: NumpyOps.logits
//   w (VOCAB_SIZE, DIM)   norm (DIM,)   x (R, DIM)   normed (n_rows, DIM)   rows (n_rows,) which of x
//   y (n_rows, VOCAB_SIZE)   best (n_rows,) 0 before; the greatest rank_of
//   grid: n_rows / (16 ROW_TILES), VOCAB_SIZE / (8 LOGITS_TILES)
//   Of one tile two blocks a processor, or ptxas spills to make room for a third.
extern "C" __global__ void __launch_bounds__(256, ROW_TILES == 1 ? 2 : 0)
    logits(weight *w, weight *norm, const float *x, const bf16 *normed, const int *rows, float *y, u64 *best,
           int n_rows) {
  Normed input = {{normed, DIM}, x, norm, rows};
  weight *const matrices[1] = {w};
  linear<1, LOGITS_TILES>(matrices, DIM, VOCAB_SIZE, n_rows, input, nullptr, y,
                          [](int column, float *v) { return v[0]; });
  find_best(y, best, blockIdx.x * 16 * ROW_TILES, n_rows, blockIdx.y * 8 * LOGITS_TILES);
}

#if ROW_TILES == 1  // what follows is no product, and needs no second compilation

// y = x / sqrt(mean(x^2) + eps) * w: NumpyOps._rms_norm, for the products of more than NORMED_ROWS rows
//   w (DIM,)   x (., DIM)   rows (n_rows,) which of x, or null: all   y (n_rows, DIM)
//   grid: n_rows, block: 256
extern "C" __global__ void __launch_bounds__(256)
    rms_norm(weight *w, const float *x, const int *rows, bf16 *y) {
  __shared__ float of_part[WARPS];
  start_next();
  if (threadIdx.x == 0) prefetch(w, DIM * 2);
  await_previous();
  int row = blockIdx.x;
  norm_row(x + (size_t)(rows ? rows[row] : row) * DIM, w, y + (size_t)row * DIM, of_part);
}

// x = table[token]: NumpyOps.embed; where the host does not know the token, the one that its slot has chosen
//   table (VOCAB_SIZE, DIM)   tokens, slots (R,); token -1: chosen[slot]   chosen (max_batch,)   x (R, DIM)
//   grid: R, block: 256
extern "C" __global__ void __launch_bounds__(256)
    embed(weight *table, const int *tokens, const int *slots, const int *chosen, float *x) {
  start_next();
  await_previous();
  int row = blockIdx.x, token = tokens[row] < 0 ? chosen[slots[row]] : tokens[row];
  for (int i = threadIdx.x; i < DIM; i += 256)
    x[(size_t)row * DIM + i] = __bfloat162float(table[(size_t)token * DIM + i]);
}

// ---- Attention --------------------------------------------------------------------------------------------
// softmax(q k^T / sqrt(HEAD_DIM)) v over the pages of a sequence: NumpyOps.attend.
//
// keys   (P, N_KV_HEADS, PAGE, HEAD_PAD)   a token's key is a row
// values (P, N_KV_HEADS, HEAD_PAD, PAGE)   a token's value is a column: a lane finds 8 keys' numbers at once
// rope   (max_seq_len, HEAD_DIM / 2)       cos, sin
// tiles  (n_tiles, TILE)                   16 queries each: the row where their span begins, the position of
//                                          that token, tokens of the span, first query, sequence
// pages  (S, max_pages)                    which of P holds the tokens 64 i, 64 i + 1, ... of a sequence
//
// The queries of a sequence and a key head are its tokens' GROUP heads, one token after another; a tile is 16
// of them. A warp takes 32 keys at a time, with a softmax of their own; the warps of a block take a piece of
// PIECE keys and put it together; the pieces are added up from first to last. Pieces begin at multiples of
// PIECE in the sequence, so the order of every sum follows from the position of the query alone.

#define TILE 5
#define ATTEND_WARPS (HEAD_PAD <= 128 ? 4 : 2)  // as the shared memory allows
#define ATTEND_THREADS (ATTEND_WARPS * 32)
#define PIECE (ATTEND_WARPS * 32)
#define EMPTY -1e30f                               // the greatest of no scores
#define A_THREAD (HEAD_PAD * 16 / ATTEND_THREADS)  // numbers of a tile's result

struct Tile {
  int row, start, n_tokens, first, n_rows;
  const int *pages;
  int first_piece, last_piece;
  __device__ __forceinline__ Tile(const int *tile, const int *pages, int max_pages, int window)
      : row(tile[0]),
        start(tile[1]),
        n_tokens(tile[2]),
        first(tile[3]),
        pages(pages + (size_t)tile[4] * max_pages) {
    n_rows = min(16, n_tokens * GROUP - first);
    last_piece = position(n_rows - 1) / PIECE;
    first_piece = window ? max(0, position(0) - window + 1) / PIECE : 0;
  }
  __device__ __forceinline__ int position(int r) const { return start + (first + r) / GROUP; }
  __device__ __forceinline__ int token(int r) const { return row + (first + r) / GROUP; }
  __device__ __forceinline__ int head(int r, int kv) const { return kv * GROUP + (first + r) % GROUP; }
};

struct Work {  // shared memory of a block
  bf16 q[16][HEAD_PAD + 8];
  float top[ATTEND_WARPS][16], sum[ATTEND_WARPS][16], out[ATTEND_WARPS][16][HEAD_PAD + 8];
};

// Norm a head of q or k, rotate its pairs, round; by one warp. head, to (HEAD_DIM,); norm may be null; rope
// too: no rotation.
__device__ __forceinline__ void rotate(const float *head, weight *norm, const float2 *rope, bf16 *to) {
  const int n = (HEAD_DIM / 2 + 31) / 32;  // pairs of a lane
  int lane = threadIdx.x % 32;
  float2 v[n];
  float sum = 0;
#pragma unroll
  for (int i = 0; i < n; i++) {
    float2 zero = {0, 0};
    v[i] = lane + 32 * i < HEAD_DIM / 2 ? ((const float2 *)head)[lane + 32 * i] : zero;
    sum = fmaf(v[i].x, v[i].x, sum), sum = fmaf(v[i].y, v[i].y, sum);
  }
  float scale = norm ? rsqrtf(warp_sum(sum) / HEAD_DIM + NORM_EPS) : 1;
#pragma unroll
  for (int i = 0; i < n; i++) {
    int pair = lane + 32 * i;
    if (pair >= HEAD_DIM / 2) break;
    float a = v[i].x * scale, b = v[i].y * scale;
    if (norm) a *= __bfloat162float(norm[2 * pair]), b *= __bfloat162float(norm[2 * pair + 1]);
    float2 one = {1, 0}, turn = rope ? rope[pair] : one;
    *(unsigned *)(to + 2 * pair) = pack(a * turn.x - b * turn.y, a * turn.y + b * turn.x);
  }
}

// Write the key and the value of a token to its page; by one warp. qkv (QKV_DIM,) of the token
__device__ __forceinline__ void write_page(const float *qkv, int kv, weight *k_norm, const float2 *rope,
                                           bf16 *keys, bf16 *values, const int *pages, int position) {
  size_t at = ((size_t)pages[position / PAGE] * N_KV_HEADS + kv) * PAGE * HEAD_PAD;
  rotate(qkv + (N_HEADS + kv) * HEAD_DIM, k_norm, rope, keys + at + position % PAGE * HEAD_PAD);
  const float *v = qkv + (N_HEADS + N_KV_HEADS + kv) * HEAD_DIM;
  for (int i = threadIdx.x % 32; i < HEAD_DIM; i += 32)
    values[at + i * PAGE + position % PAGE] = __float2bfloat16(v[i]);
}

// The queries of a tile, normed and rotated, to shared memory; what there is none of is 0.
__device__ __forceinline__ void load_queries(Work &work, const Tile &tile, int kv, const float *qkv,
                                             weight *q_norm, const float2 *rope, int rotary) {
  for (int i = threadIdx.x; i < 16 * (HEAD_PAD + 8); i += ATTEND_THREADS)
    if (i / (HEAD_PAD + 8) >= tile.n_rows || i % (HEAD_PAD + 8) >= HEAD_DIM)
      ((bf16 *)work.q)[i] = __float2bfloat16(0);
  for (int r = threadIdx.x / 32; r < tile.n_rows; r += ATTEND_WARPS)
    rotate(qkv + (size_t)tile.token(r) * QKV_DIM + tile.head(r, kv) * HEAD_DIM, q_norm,
           rotary ? rope + (size_t)tile.position(r) * (HEAD_DIM / 2) : nullptr, work.q[r]);
}

// One warp's 32 keys of a piece, all 16 queries: greatest score, sum of weights, weighted values, in `work`.
// Column 2t + e of the i-th product of 8 keys is key 8t + 2i + e: a lane has weights of 8 neighbours.
__device__ __forceinline__ void attend_keys(Work &work, const Tile &tile, int piece, int kv, const bf16 *keys,
                                            const bf16 *values, int window) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int begin = piece * PIECE + warp * 32, last = tile.position(tile.n_rows - 1);
  float out[HEAD_PAD / 8][4] = {}, top[2] = {EMPTY, EMPTY}, sum[2] = {0, 0};
  if (begin <= last && (!window || begin + 31 > tile.position(0) - window)) {
    size_t at = ((size_t)tile.pages[begin / PAGE] * N_KV_HEADS + kv) * PAGE * HEAD_PAD;
    const bf16 *k = keys + at + (begin % PAGE + g / 2 * 8 + g % 2) * HEAD_PAD + t * 8;
    const bf16 *v = values + at + g * PAGE + begin % PAGE + t * 8;
    uint4 value[HEAD_PAD / 8];
#pragma unroll
    for (int n = 0; n < HEAD_PAD / 8; n++) value[n] = *(const uint4 *)(v + n * 8 * PAGE);
    float score[4][4] = {};
#pragma unroll
    for (int c = 0; c < HEAD_PAD; c += 32) {
      uint4 q0 = *(const uint4 *)(work.q[g] + c + t * 8), q1 = *(const uint4 *)(work.q[g + 8] + c + t * 8);
      unsigned a0[4] = {q0.x, q1.x, q0.y, q1.y}, a1[4] = {q0.z, q1.z, q0.w, q1.w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        uint4 key = *(const uint4 *)(k + i * 2 * HEAD_PAD + c);
        unsigned b0[2] = {key.x, key.y}, b1[2] = {key.z, key.w};
        mma_16x8x16(score[i], a0, b0);
        mma_16x8x16(score[i], a1, b1);
      }
    }
    // in units of log2, for exp2f
    float scale = LOG2_E / sqrtf((float)HEAD_DIM);
#pragma unroll
    for (int j = 0; j < 16; j++) {
      int r = g + j % 4 / 2 * 8, key = begin + t * 8 + j / 4 * 2 + j % 2, query = tile.position(r);
      bool seen = r < tile.n_rows && key <= query && (!window || key > query - window);
      float s = seen ? score[j / 4][j % 4] * scale : EMPTY;
      score[j / 4][j % 4] = s;
      top[j % 4 / 2] = fmaxf(top[j % 4 / 2], s);
    }
    unsigned p[4][2];  // the weights, rounded, of two keys each; rows g and g + 8
#pragma unroll
    for (int h = 0; h < 2; h++) {
      top[h] = fmaxf(top[h], __shfl_xor_sync(ALL, top[h], 1));
      top[h] = fmaxf(top[h], __shfl_xor_sync(ALL, top[h], 2));
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float *s = score[i] + 2 * h;
        p[i][h] = pack(s[0] == EMPTY ? 0 : exp2f(s[0] - top[h]), s[1] == EMPTY ? 0 : exp2f(s[1] - top[h]));
        sum[h] += low(p[i][h]) + high(p[i][h]);
      }
      sum[h] += __shfl_xor_sync(ALL, sum[h], 1);
      sum[h] += __shfl_xor_sync(ALL, sum[h], 2);
    }
    unsigned a0[4] = {p[0][0], p[0][1], p[1][0], p[1][1]}, a1[4] = {p[2][0], p[2][1], p[3][0], p[3][1]};
    int n_keys =
        last + 1 - (begin + t * 8);  // of this lane's 8; behind them the page may hold anything, a NaN too
#pragma unroll
    for (int n = 0; n < HEAD_PAD / 8; n++) {
      unsigned b[4] = {value[n].x, value[n].y, value[n].z, value[n].w};
      for (int i = 0; i < 4; i++) b[i] = n_keys > 2 * i + 1 ? b[i] : n_keys > 2 * i ? b[i] & 0xffff : 0;
      mma_16x8x16(out[n], a0, b);
      mma_16x8x16(out[n], a1, b + 2);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    int r = g + 8 * h;
    if (t == 0) work.top[warp][r] = top[h], work.sum[warp][r] = sum[h];
#pragma unroll
    for (int n = 0; n < HEAD_PAD / 8; n++) {
      float2 pair = {out[n][2 * h], out[n][2 * h + 1]};
      *(float2 *)&work.out[warp][r][n * 8 + t * 2] = pair;
    }
  }
}

// The warps' parts of a piece, put together. A thread has every eighth (or fourth) number of one query's
// result, from the column_of_thread() on.
__device__ __forceinline__ int row_of_thread() { return threadIdx.x / (ATTEND_THREADS / 16); }
__device__ __forceinline__ int column_of_thread(int i) {
  return threadIdx.x % (ATTEND_THREADS / 16) + i * (ATTEND_THREADS / 16);
}
__device__ __forceinline__ void put_together(const Work &work, float &top, float &sum, float *out) {
  int r = row_of_thread();
  float factor[ATTEND_WARPS];
  top = EMPTY, sum = 0;
#pragma unroll
  for (int w = 0; w < ATTEND_WARPS; w++) top = fmaxf(top, work.top[w][r]);
#pragma unroll
  for (int w = 0; w < ATTEND_WARPS; w++) {
    factor[w] = exp2f(work.top[w][r] - top);
    sum = fmaf(work.sum[w][r], factor[w], sum);
  }
#pragma unroll
  for (int i = 0; i < A_THREAD; i++) {
    out[i] = 0;
#pragma unroll
    for (int w = 0; w < ATTEND_WARPS; w++)
      out[i] = fmaf(work.out[w][r][column_of_thread(i)], factor[w], out[i]);
  }
}

// How the sum of the pieces so far, and the next one, are scaled to be added; the greatest score becomes that
// of both.
__device__ __forceinline__ void rescale(float &top, float next_top, float &keep, float &take) {
  float both = fmaxf(top, next_top);
  keep = exp2f(top - both), take = exp2f(next_top - both);
  top = both;
}

// What a piece needs from memory beside this step's own numbers, on its way to the L2 cache while those come
__device__ __forceinline__ void prefetch_piece(const Tile &tile, int piece, int kv, const bf16 *keys,
                                               const bf16 *values, weight *q_norm, weight *k_norm) {
  int begin = piece * PIECE + threadIdx.x * PAGE, end = tile.position(tile.n_rows - 1) + 1;
  if (threadIdx.x < PIECE / PAGE && begin < end) {
    size_t at = ((size_t)tile.pages[begin / PAGE] * N_KV_HEADS + kv) * PAGE * HEAD_PAD;
    prefetch(keys + at, min(PAGE, end - begin) * HEAD_PAD * 2);
    prefetch(values + at, PAGE * HEAD_PAD * 2);
  }
  if (threadIdx.x == 32 && q_norm && HEAD_DIM % 8 == 0)
    prefetch(q_norm, HEAD_DIM * 2), prefetch(k_norm, HEAD_DIM * 2);
}

// Write the keys and values of the step's tokens to their pages; for spans of more than one tile
//   qkv (R, QKV_DIM)   k_norm (HEAD_DIM,) or null   positions, sequences (R,)   window, rotary: of the layer
//   grid: R, N_KV_HEADS; block: 32
extern "C" __global__ void __launch_bounds__(32)
    keep(const float *qkv, weight *k_norm, const float2 *rope, bf16 *keys, bf16 *values, const int *positions,
         const int *sequences, const int *pages, int max_pages, int rotary) {
  start_next();
  await_previous();
  int row = blockIdx.x, position = positions[row];
  if (position < 0) return;
  write_page(qkv + (size_t)row * QKV_DIM, blockIdx.y, k_norm,
             rotary ? rope + (size_t)position * (HEAD_DIM / 2) : nullptr, keys, values,
             pages + (size_t)sequences[row] * max_pages, position);
}

// Attention with a block for each piece of each tile; the last block of a tile adds up the pieces.
//   qkv (R, QKV_DIM)   q_norm, k_norm (HEAD_DIM,) or null   y (R, N_HEADS * HEAD_DIM)
//   part (R, N_HEADS, grid.x, HEAD_DIM + 2) and n_done (n_tiles, N_KV_HEADS), 0 before and after: between the
//   blocks   window, rotary: of the layer
//   writes: 1: the blocks write the keys and values of the step too, as `keep` does; each span is one tile
//   grid: pieces of the longest sequence, N_KV_HEADS, n_tiles; block: ATTEND_THREADS
extern "C" __global__ void __launch_bounds__(ATTEND_THREADS)
    attend(const float *qkv, weight *q_norm, weight *k_norm, const float2 *rope, bf16 *keys, bf16 *values,
           table *tiles, table *pages, float *part, int *n_done, bf16 *y, int max_pages, int window,
           int rotary, int writes) {
  __shared__ __align__(16) Work work;
  __shared__ int is_last;
  start_next();
  int piece = blockIdx.x, kv = blockIdx.y;
  Tile tile(tiles + blockIdx.z * TILE, pages, max_pages, window);
  bool is_there = tile.n_tokens > 0 && tile.first_piece <= piece && piece <= tile.last_piece;
  if (is_there) prefetch_piece(tile, piece, kv, keys, values, q_norm, k_norm);
  await_previous();
  if (!is_there) return;
  if (writes)
    for (int i = threadIdx.x / 32; i < tile.n_tokens; i += ATTEND_WARPS)
      if ((tile.start + i) / PIECE == piece)
        write_page(qkv + (size_t)(tile.row + i) * QKV_DIM, kv, k_norm,
                   rotary ? rope + (size_t)(tile.start + i) * (HEAD_DIM / 2) : nullptr, keys, values,
                   tile.pages, tile.start + i);
  load_queries(work, tile, kv, qkv, q_norm, rope, rotary);
  __syncthreads();
  attend_keys(work, tile, piece, kv, keys, values, window);
  __syncthreads();
  float top, sum, out[A_THREAD];
  put_together(work, top, sum, out);
  int r = row_of_thread(), n_pieces = tile.last_piece - tile.first_piece + 1;
  if (n_pieces == 1) {
    if (r < tile.n_rows)
      for (int i = 0; i < A_THREAD; i++)
        if (column_of_thread(i) < HEAD_DIM)
          y[((size_t)tile.token(r) * N_HEADS + tile.head(r, kv)) * HEAD_DIM + column_of_thread(i)] =
              __float2bfloat16(out[i] / sum);
    return;
  }
  if (r < tile.n_rows) {
    float *mine =
        part + (((size_t)tile.token(r) * N_HEADS + tile.head(r, kv)) * gridDim.x + piece) * (HEAD_DIM + 2);
    for (int i = 0; i < A_THREAD; i++)
      if (column_of_thread(i) < HEAD_DIM) mine[column_of_thread(i)] = out[i];
    if (column_of_thread(0) == 0) mine[HEAD_DIM] = top, mine[HEAD_DIM + 1] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) {  // its fences are for the block: barriers stand between it and the others
    int *count = n_done + blockIdx.z * N_KV_HEADS + kv;
    __threadfence();  // this piece can be seen before it is counted
    is_last = atomicAdd(count, 1) == n_pieces - 1;
    __threadfence();  // the others' pieces are seen after that
    if (is_last) *count = 0;
  }
  __syncthreads();
  if (!is_last) return;
  for (int i = threadIdx.x; i < tile.n_rows * HEAD_DIM; i += ATTEND_THREADS) {
    size_t head = (size_t)tile.token(i / HEAD_DIM) * N_HEADS + tile.head(i / HEAD_DIM, kv);
    const float *parts = part + head * gridDim.x * (HEAD_DIM + 2);
    float top = EMPTY, sum = 0, out = 0;
#pragma unroll 8
    for (int p = tile.first_piece; p <= tile.last_piece; p++) {
      const float *next = parts + (size_t)p * (HEAD_DIM + 2);
      float keep, take;
      rescale(top, __ldcg(next + HEAD_DIM), keep, take);
      sum = sum * keep + __ldcg(next + HEAD_DIM + 1) * take;
      out = out * keep + __ldcg(next + i % HEAD_DIM) * take;
    }
    y[head * HEAD_DIM + i % HEAD_DIM] = __float2bfloat16(out / sum);
  }
}

// The same, to the bit, with a block for each tile, which goes through the pieces itself: for prompts, whose
// tiles are many. The keys of the step are in their pages already.
//   grid: n_tiles, N_KV_HEADS; block: ATTEND_THREADS
extern "C" __global__ void __launch_bounds__(ATTEND_THREADS)
    attend_prompt(const float *qkv, weight *q_norm, const float2 *rope, const bf16 *keys, const bf16 *values,
                  table *tiles, table *pages, bf16 *y, int max_pages, int window, int rotary) {
  __shared__ __align__(16) Work work;
  start_next();
  await_previous();
  int kv = blockIdx.y, r = row_of_thread();
  Tile tile(tiles + blockIdx.x * TILE, pages, max_pages, window);
  if (tile.n_tokens == 0) return;
  load_queries(work, tile, kv, qkv, q_norm, rope, rotary);
  float top = EMPTY, sum = 0, out[A_THREAD] = {};
  for (int piece = tile.first_piece; piece <= tile.last_piece; piece++) {
    __syncthreads();
    attend_keys(work, tile, piece, kv, keys, values, window);
    __syncthreads();
    float next_top, next_sum, next[A_THREAD], keep, take;
    put_together(work, next_top, next_sum, next);
    rescale(top, next_top, keep, take);
    sum = sum * keep + next_sum * take;
#pragma unroll
    for (int i = 0; i < A_THREAD; i++) out[i] = out[i] * keep + next[i] * take;
  }
  if (r < tile.n_rows)
    for (int i = 0; i < A_THREAD; i++)
      if (column_of_thread(i) < HEAD_DIM)
        y[((size_t)tile.token(r) * N_HEADS + tile.head(r, kv)) * HEAD_DIM + column_of_thread(i)] =
            __float2bfloat16(out[i] / sum);
}
#endif  // ROW_TILES == 1
#endif  // !PLAIN

#if PLAIN || ROW_TILES == 1
// ---- Sampling ---------------------------------------------------------------------------------------------
// One block chooses a row's token, or plainly one thread: model.py's _pick. A probability is a whole number
// here, in units of 2^-40 of the likeliest token's, so that sums are exact and the order of adding does not
// matter.
//
// For the block, the likeliest token is known from `logits`; a row that asks for no more is not read. Else
// the tokens that may come are a set in shared memory, a bit each. top_k or top_p make it small in two passes
// over the vocabulary; each pass after these, and the draw, goes through the few that are left.

#define PICK_THREADS 1024
#define WORDS ((VOCAB_SIZE + 31) / 32)  // of a bit a token
#define NOTHING (40u << 26)             // the distance from which on a token weighs nothing
#define MAX_TOP 20  // likeliest tokens whose logprobs can be had
#define CHOICE (2 + 2 * MAX_TOP)
#define SEEN_IN_PROMPT 0x80000000u
enum Flags { PENALISED = 1, BIASED = 2, MASKED = 4, CHAINS = 8 };

// A row's settings: slot; the row of the step where its span begins; how many rows of the span come before
// it; top_k; Flags; n_top_logprobs or -1
struct Picked {
  int slot, first_row, n_before, top_k, flags, n_top;
};
#define PICKED 6
// sharpness: log2(e) / temperature, 0: the likeliest; the penalties as in model.py's Sampling
struct Settings {
  float sharpness, top_p, min_p, presence, frequency, repetition;
};
#define SETTINGS 6
#define SEEDS 3  // seed, choice, number of the output token

// The logit of a token after penalties, bias and mask: _penalised
__device__ __forceinline__ float penalised(float logit, int token, const Picked &p, const Settings &s,
                                           const unsigned *counts, const int *tokens, const float *bias,
                                           const unsigned *mask) {
  if (p.flags & PENALISED) {
    unsigned count = counts[token];
    for (int i = 1; i <= p.n_before; i++)
      count += tokens[p.first_row + i] == token;  // drafts before this one
    if (count) logit = logit > 0 ? logit / s.repetition : logit * s.repetition;
    count &= ~SEEN_IN_PROMPT;
    if (count) logit -= s.presence + s.frequency * count;
  }
  if (p.flags & BIASED) logit += bias[token];
  if ((p.flags & MASKED) && !(mask[token / 32] >> token % 32 & 1)) logit = NEVER;
  return logit;
}

// The first 64 bits of Philox4x64-10 (Salmon et al., SC'11, https://doi.org/10.1145/2063384.2063405) with key
// (seed, choice) and counter number + 1, which is what numpy.random.Philox(key, counter=number) gives first
__device__ __forceinline__ u64 philox(u64 seed, u64 choice, u64 number) {
  u64 c0 = number + 1, c1 = c0 == 0, c2 = 0, c3 = 0;
  for (int round = 0; round < 10; round++) {
    u64 high0 = __umul64hi(0xD2E7470EE14C6C93ull, c0), low0 = 0xD2E7470EE14C6C93ull * c0;
    u64 high1 = __umul64hi(0xCA5A826395121157ull, c2), low1 = 0xCA5A826395121157ull * c2;
    c0 = high1 ^ c1 ^ seed, c1 = low1, c2 = high0 ^ c3 ^ choice, c3 = low0;
    seed += 0x9E3779B97F4A7C15ull, choice += 0xBB67AE8584CAA73Bull;
  }
  return c0;
}

#if PLAIN
// The greatest logit such that the tokens from it upwards weigh `need` or more; weight(i) of token i
template <class Weight>
__device__ float lowest(const float *logits, u64 need, Weight weight) {
  float least = -NEVER;
  for (u64 sum = 0; sum < need;) {
    float next = NEVER;
    for (int i = 0; i < VOCAB_SIZE; i++)
      if (logits[i] < least) next = fmaxf(next, logits[i]);
    if (next == NEVER) break;
    for (int i = 0; i < VOCAB_SIZE; i++)
      if (logits[i] == next) sum += weight(i);
    least = next;
  }
  return least;
}

// Choose a token for each wanted row, by a thread: NumpyOps.pick, line by line. Arguments as of `pick` below.
extern "C" __global__ void plain_pick(const float *raw, float *logits, const int *picked,
                                      const float *settings, const u64 *seeds, const unsigned *masks,
                                      const int *tokens, unsigned *counts, const float *biases, int *chosen,
                                      int *choices, int n) {
  await_previous();
  int row = index_of_thread();
  if (row >= n) return;
  const Picked p = *(const Picked *)(picked + row * PICKED);
  const Settings s = *(const Settings *)(settings + row * SETTINGS);
  if (p.slot < 0) return;
  raw += (size_t)row * VOCAB_SIZE, logits += (size_t)row * VOCAB_SIZE, choices += row * CHOICE;
  counts += (size_t)p.slot * VOCAB_SIZE, biases += (size_t)p.slot * VOCAB_SIZE;
  masks += (size_t)row * ((VOCAB_SIZE + 31) / 32), seeds += row * SEEDS;

  int token = 0;
  bool finite = true;
  float raw_top = NEVER;
  for (int i = 0; i < VOCAB_SIZE; i++) {
    finite = finite && raw[i] <= 3.4028235e38f;  // no NaN either
    raw_top = fmaxf(raw_top, raw[i]);
    logits[i] = penalised(raw[i], i, p, s, counts, tokens, biases, masks);
    if (logits[i] > logits[token]) token = i;
  }
  float top = logits[token];
  if (!finite || top == NEVER) {
    choices[0] = -1;
    return;
  }
  if (s.sharpness > 0) {
    float least = NEVER;
    if (p.top_k > 0 && p.top_k < VOCAB_SIZE) least = lowest(logits, p.top_k, [](int i) { return 1ull; });
    auto weight = [&](int i) {
      float q = exp2f((logits[i] - top) * s.sharpness);
      return q >= fminf(s.min_p, 1) && logits[i] >= least ? (u64)(q * 1099511627776.f) : 0ull;
    };
    u64 total = 0;
    for (int i = 0; i < VOCAB_SIZE; i++) total += weight(i);
    if (s.top_p < 1) {
      least = fmaxf(least, lowest(logits, max((u64)((double)total * s.top_p), 1ull), weight));
      total = 0;
      for (int i = 0; i < VOCAB_SIZE; i++) total += weight(i);
    }
    u64 target = __umul64hi(philox(seeds[0], seeds[1], seeds[2]) >> 11 << 11, total);
    for (token = 0; weight(token) <= target; token++) target -= weight(token);
  }
  choices[0] = token;
  if (p.flags & CHAINS) {
    chosen[p.slot] = token;
    if (p.flags & PENALISED) counts[token] += 1;
  }
  if (p.n_top < 0) return;

  double sum = 0;
  for (int i = 0; i < VOCAB_SIZE; i++) sum += expf(raw[i] - raw_top);
  float normaliser = log(sum);
  choices[1] = __float_as_int(raw[token] - raw_top - normaliser);
  u64 above = ~0ull;
  for (int k = 0; k < p.n_top; k++) {
    u64 next = 0;
    for (int i = 0; i < VOCAB_SIZE; i++)
      if (rank_of(raw[i], i) < above) next = max(next, rank_of(raw[i], i));
    choices[2 + k] = token_of(next);
    choices[2 + MAX_TOP + k] = __float_as_int(raw[token_of(next)] - raw_top - normaliser);
    above = next;
  }
}
#else

template <class T, class Join>
__device__ __forceinline__ T block_reduce(T *of_warp, T v, Join join) {  // for every thread, in one order
  for (int m = 16; m; m /= 2) v = join(v, __shfl_xor_sync(ALL, v, m));
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = v;
  __syncthreads();
  v = of_warp[threadIdx.x % 32];
  for (int m = 16; m; m /= 2) v = join(v, __shfl_xor_sync(ALL, v, m));
  return v;
}

// Calls f(logit) for each token in the words [begin, end) of the set, by one warp; where f says no, the token
// leaves the set. Eight logits of a lane are on their way at a time.
template <class F>
__device__ __forceinline__ void each_of(unsigned *set, int begin, int end, const float *logits, F f) {
  int lane = threadIdx.x % 32;
  for (int first = begin; first < end; first += 32) {
    unsigned word = first + lane < end ? set[first + lane] : 0, some = __ballot_sync(ALL, word != 0);
    for (int j = 0; j < 32; j += 8) {
      if (!(some >> j & 255)) continue;
      bool is_in[8];
      float logit[8];
#pragma unroll
      for (int i = 0; i < 8; i++) {
        is_in[i] = __shfl_sync(ALL, word, j + i) >> lane & 1;
        logit[i] = is_in[i] ? logits[(first + j + i) * 32 + lane] : 0;
      }
#pragma unroll
      for (int i = 0; i < 8; i++) {
        unsigned stay = __ballot_sync(ALL, is_in[i] && f(logit[i]));
        if (lane == j + i) word = stay;
      }
    }
    if (first + lane < end) set[first + lane] = word;
  }
}

// Leave in the set the tokens nearest to the top: those within the least distance such that they weigh
// need(the weight of all) or more. It is found byte by byte from the highest: what the tokens weigh is added
// up by their byte, and those with a greater one leave in the next pass. distance(logit), weight(logit)
// Tokens that weigh nothing leave at once: most are that far off at a low temperature, all in the same bins.
template <class Distance, class Weight, class Need>
__device__ __forceinline__ void narrow(unsigned *set, const float *logits, Distance distance, Weight weight,
                                       Need need) {
  // a sum of 64 bits is two numbers: shared memory adds 32 bits at once, 64 in a loop of tries
  __shared__ unsigned low_of[256], high_of[256], found;
  __shared__ u64 rest;
  const int n = (WORDS + 31) / 32;  // of a warp
  int warp = threadIdx.x / 32;
  unsigned prefix = 0;
  for (int shift = 24; shift >= -8; shift -= 8) {
    if (threadIdx.x < 256) low_of[threadIdx.x] = high_of[threadIdx.x] = 0;
    __syncthreads();
    each_of(set, n * warp, min(n * warp + n, WORDS), logits, [&](float logit) {
      unsigned d = distance(logit), before = shift == 24 ? 0 : d >> (shift + 8);
      if (d >= NOTHING) return false;
      if (before == prefix && shift >= 0) {
        u64 w = weight(logit);
        unsigned byte = d >> shift & 255, low = (unsigned)w, high = (unsigned)(w >> 32);
        if (w && atomicAdd(&low_of[byte], low) + low < low) high++;
        if (high) atomicAdd(&high_of[byte], high);
      }
      return before <= prefix;
    });
    __syncthreads();
    if (shift >= 0 && warp == 0) {  // a lane takes 8 bytes
      auto sum_of = [&](int byte) { return (u64)high_of[byte] << 32 | low_of[byte]; };
      u64 mine = 0, all;
      for (int i = 0; i < 8; i++) mine += sum_of(threadIdx.x * 8 + i);
      all = mine;
      for (int m = 1; m < 32; m *= 2) {
        u64 other = __shfl_up_sync(ALL, all, m);
        if (threadIdx.x >= m) all += other;
      }
      u64 needed = shift == 24 ? need(__shfl_sync(ALL, all, 31)) : rest;
      unsigned enough = __ballot_sync(ALL, all >= needed);
      __syncwarp();
      if (threadIdx.x == (enough ? __ffs(enough) - 1 : 31)) {
        int byte = threadIdx.x * 8, last = byte + 7;
        needed -= all - mine;
        for (; byte < last && sum_of(byte) < needed; byte++) needed -= sum_of(byte);
        found = byte, rest = needed;
      }
    }
    __syncthreads();
    if (shift >= 0) prefix = prefix << 8 | found;
  }
}

// The token of the set in whose part of [0, sum of weights) the number u * sum lies, u of 64 bits: _draw
template <class Weight>
__device__ __forceinline__ int draw(u64 u, unsigned *set, const float *logits, Weight weight) {
  __shared__ u64 of_warp[32];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, begin = 0, end = WORDS, n;
  u64 target = 0;
  do {  // a run of words a warp; then the run where it lies in runs; then one word
    n = (end - begin + 31) / 32;
    int first = begin + n * warp;
    u64 mine = 0, total = 0;
    each_of(set, first, min(first + n, end), logits, [&](float logit) {
      mine += weight(logit);
      return true;
    });
    for (int m = 16; m; m /= 2) mine += __shfl_xor_sync(ALL, mine, m);
    if (lane == 0) of_warp[warp] = mine;
    __syncthreads();
    for (int w = 0; w < 32; w++) total += of_warp[w];
    if (begin == 0 && end == WORDS) target = __umul64hi(u, total);
    for (int w = 0; target >= of_warp[w]; w++) target -= of_warp[w], begin += n;
    end = min(begin + n, end);
    __syncthreads();
  } while (n > 1);
  u64 all = set[begin] >> lane & 1 ? weight(logits[begin * 32 + lane]) : 0;
  for (int m = 1; m < 32; m *= 2) {
    u64 other = __shfl_up_sync(ALL, all, m);
    if (lane >= m) all += other;
  }
  return begin * 32 + __ffs(__ballot_sync(ALL, all > target)) - 1;
}

// Choose a token for each wanted row: NumpyOps.pick
//   raw (n, VOCAB_SIZE)   best (n,) of it, by `logits`; 0 after   logits (n, VOCAB_SIZE) for those after
//   penalties, where there are any   picked (n, PICKED)   settings (n, SETTINGS)   seeds (n, SEEDS)
//   masks (n, WORDS), bit set: may come   tokens (R,) of the step   counts, biases (max_batch, VOCAB_SIZE)
//   chosen (max_batch,)   choices (n, CHOICE): token, or -1 where the logits are no finite numbers; logprob;
//   MAX_TOP likeliest; their logprobs   grid: n, block: PICK_THREADS; a row with slot -1 is none
extern "C" __global__ void __launch_bounds__(PICK_THREADS, 1)
    pick(const float *raw, u64 *best, float *logits, const int *picked, const float *settings,
         const u64 *seeds, const unsigned *masks, const int *tokens, unsigned *counts, const float *biases,
         int *chosen, int *choices) {
  __shared__ u64 of_warp[32], raw_best;
  __shared__ double sum_of_warp[32];
  __shared__ unsigned set[WORDS];
  start_next();
  await_previous();
  int row = blockIdx.x;
  const Picked &p = *(const Picked *)(picked + row * PICKED);  // no copy: registers are few
  const Settings s = *(const Settings *)(settings + row * SETTINGS);
  if (threadIdx.x == 0) raw_best = best[row], best[row] = 0;
  __syncthreads();
  if (p.slot < 0) return;
  size_t of_slot = (size_t)p.slot * VOCAB_SIZE;
  raw += (size_t)row * VOCAB_SIZE, logits += (size_t)row * VOCAB_SIZE;
  auto larger = [](u64 a, u64 b) { return a > b ? a : b; };
  const float *used = raw;
  u64 used_best = raw_best;

  if (p.flags & (PENALISED | BIASED | MASKED)) {
    used_best = 0;
    for (int i = threadIdx.x; i < VOCAB_SIZE; i += PICK_THREADS) {
      float logit = penalised(raw[i], i, p, s, counts + of_slot, tokens, biases + of_slot,
                              masks + (size_t)row * WORDS);
      logits[i] = logit;
      used_best = larger(used_best, rank_of(logit, i));
    }
    used_best = block_reduce(of_warp, used_best, larger);
    used = logits;
  }
  int token = token_of(used_best);
  float top = used[token];
  if (raw_best == NO_NUMBER || used_best == NO_NUMBER || top == NEVER) {
    if (threadIdx.x == 0) choices[row * CHOICE] = -1;
    return;
  }
  if (s.sharpness > 0) {
    // How far below the top: in powers of two of the probability, of which 40 make it 0; and in 2^-26 of them
    auto below = [&](float logit) { return (top - logit) * s.sharpness; };
    auto distance = [&](float logit) { return (unsigned)fminf(below(logit) * 67108864.f, 4294967040.f); };
    auto weight = [&](float logit) {
      float q = exp2f(-below(logit));
      return q >= fminf(s.min_p, 1) ? (u64)(q * 1099511627776.f) : 0ull;
    };
    for (int i = threadIdx.x; i < WORDS; i += PICK_THREADS)
      set[i] = i < VOCAB_SIZE / 32 ? ALL : (1u << VOCAB_SIZE % 32) - 1;
    __syncthreads();
    if (p.top_k > 0 && p.top_k < VOCAB_SIZE)
      narrow(set, used, distance, [](float) { return 1ull; }, [&](u64 all) { return (u64)p.top_k; });
    if (s.top_p < 1)
      narrow(set, used, distance, weight, [&](u64 all) { return max((u64)((double)all * s.top_p), 1ull); });
    seeds += row * SEEDS;
    u64 u = philox(seeds[0], seeds[1], seeds[2]) >> 11 << 11;  // 53 bits, as a double has them
    token = draw(u, set, used, weight);
  }
  choices += row * CHOICE;
  if (threadIdx.x == 0) {
    choices[0] = token;
    if (p.flags & CHAINS) {
      chosen[p.slot] = token;
      if (p.flags & PENALISED) counts[of_slot + token] += 1;
    }
  }
  if (p.n_top < 0) return;

  float raw_top = raw[token_of(raw_best)];
  double sum = 0;
  for (int i = threadIdx.x; i < VOCAB_SIZE; i += PICK_THREADS) sum += expf(raw[i] - raw_top);
  sum = block_reduce(sum_of_warp, sum, [](double a, double b) { return a + b; });
  float normaliser = log(sum);
  if (threadIdx.x == 0) choices[1] = __float_as_int(raw[token] - raw_top - normaliser);
  u64 next = raw_best;
  for (int n = 0; n < p.n_top; n++) {
    if (threadIdx.x == 0) {
      choices[2 + n] = token_of(next);
      choices[2 + MAX_TOP + n] = __float_as_int(raw[token_of(next)] - raw_top - normaliser);
    }
    u64 below = next;
    next = 0;
    for (int i = threadIdx.x; i < VOCAB_SIZE; i += PICK_THREADS)
      if (rank_of(raw[i], i) < below) next = larger(next, rank_of(raw[i], i));
    next = block_reduce(of_warp, next, larger);
  }
}

// How often each token has come: what penalties are computed from, of one slot
//   tokens (n,) prompt, then output   counts (max_batch, VOCAB_SIZE)   grid: 1, block: PICK_THREADS
extern "C" __global__ void __launch_bounds__(PICK_THREADS, 1)
    count(const int *tokens, unsigned *counts, int slot, int n_prompt, int n) {
  start_next();
  await_previous();
  counts += (size_t)slot * VOCAB_SIZE;
  for (int i = threadIdx.x; i < VOCAB_SIZE; i += PICK_THREADS) counts[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += PICK_THREADS) {
    if (i < n_prompt) atomicOr(&counts[tokens[i]], SEEN_IN_PROMPT);
    else atomicAdd(&counts[tokens[i]], 1u);
  }
}
#endif  // !PLAIN
#endif  // PLAIN || ROW_TILES == 1
