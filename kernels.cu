// The ops of model.py on a GPU, fast. Weights, keys and values are bfloat16; the residual stream and every
// sum are float32. devices/plain.cu has the same ops as plain loops: read it first.
//
//     embed --> [qkv --> attend --> out --> gate_up --> down] x n_layers --> logits --> pick
//
// What makes them fast: products and attention on the tensor cores, over few rows and over many; split
// attention over a paged KV cache (flash-decoding: the keys of a sequence are shared out to blocks); norms,
// biases, activations and the residual inside the products.
//
// Authority: the op of the same name in model.py, line by line; CUDA C++ Programming Guide; PTX ISA for the
// instructions that C++ has no name for. A split size that does not depend on the batch is the recipe for
// batch invariance of https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/.
//
// Rules of this file:
// 1. Batch invariance: a row of activations gets the same bits beside any other rows and from any kernel. The
//    order of every sum follows from the model and the token's position alone. The file is compiled without
//    contraction (--fmad=false), so only fmaf is a fused multiply-add. No float atomics.
// 2. What no kernel writes, weights and tables, has types of its own. A kernel prefetches what it likes, for a
//    prefetch reads nothing.
// 3. Sizes of the model are constants of the compilation, as is how much of a product a block computes:
//    devices/kernels.py compiles the file once for each shape. Rows of every matrix begin at multiples of 16
//    bytes.
// 4. A warp's instruction is entered by all its lanes, a barrier by all the block's threads.
// 5. Latency: a step of few rows is a chain of some hundred trips to memory. We start all reads of one
//    place at once, then use them.
//
// From the compilation (devices/kernels.py, -DNAME=value):
//   the model       DIM HIDDEN_DIM N_HEADS N_KV_HEADS GROUP HEAD_DIM QKV_DIM VOCAB_SIZE NORM_EPS
//   a product       BLOCK_ROWS BLOCK_COLUMNS PAIR_COLUMNS LOGITS_COLUMNS NORMED_ROWS
//   attention       PAGE HEAD_PAD QUERIES TILE_WIDTH SPLIT_KEYS PART_WIDTH
//   a row of pick   MASK_WORDS PICK_ROW_WIDTH SETTINGS_WIDTH SEEDS_WIDTH CHOICE_WIDTH MAX_TOP
//   its flags       PENALISED BIASED MASKED CHAINS ADVANCES SEEN_IN_PROMPT
//   a block         THREADS ATTEND_THREADS PICK_THREADS
//   a mixture       N_EXPERTS N_CHOSEN EXPERT_DIM GROUP_WIDTH PACKED NORMALISED CLAMPED LIMIT ALPHA
//
// Axes: n_rows rows of the step, which are tokens of any sequences; n_wanted those from which a token is
// chosen; n_pages KV cache pages of the pool; max_pages entries of a page table; max_batch slots, a running
// sequence each. Arrays are row-major; float is float32, bf16 and weight are bfloat16, int is int32.
//
// A kernel's argument is the array of its name; a bias, a norm of heads or sinks that the model does not have
// are null. For layers and weights the names are those of checkpoint/weights.py; devices/cuda.py
// (buffer_shapes) and devices/step_memory.py (step_layout) make the others, and give their shapes and contents.
//
// Not here: which rows a step has (scheduler.py), memory (devices/cuda.py), launches (devices/kernels.py).

#include <cuda_bf16.h>

#define ALL 0xffffffffu  // lanes of a warp
#define LOG2_E 1.44269504f
#define MAX_FLOAT 3.4028235e38f
#define UNROLLED _Pragma("unroll")  // a loop whose body is compiled once for each round
#define MINUS_INFINITY __uint_as_float(0xff800000u)  // the logit of a token that may not come

typedef __nv_bfloat16 bf16;
typedef const __nv_bfloat16 weight;  // a number of the checkpoint: no kernel writes it
typedef const int table;             // nor this, but for `pick`, the last kernel of the step before
typedef const unsigned char packed;  // bytes of MXFP4 in the checkpoint
typedef unsigned long long u64;

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
// Bring memory to the L2 cache. Address and size are multiples of 16 bytes.
__device__ __forceinline__ void prefetch(const void *address, int n_bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(n_bytes) : "memory");
#endif
}
// Begin to copy 16 bytes to shared memory (cp.async). If `is_there` is false, it reads nothing and writes
// zeros. The copies that a thread has begun since its last end_copies() are a group. await_copies<N>()
// returns when all groups of the thread but its last N have arrived. Only this thread sees them then; the
// others see them after a barrier.
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

// ---- Numbers ----------------------------------------------------------------------------------------------

// Every lane gets it, joined in one order
template <class T, class Join>
__device__ __forceinline__ T warp_reduce(T v, Join join) {
  for (int m = 16; m; m /= 2) v = join(v, __shfl_xor_sync(ALL, v, m));
  return v;
}
__device__ __forceinline__ float warp_sum(float v) {
  return warp_reduce(v, [](float a, float b) { return a + b; });
}
struct Larger {
  __device__ __forceinline__ u64 operator()(u64 a, u64 b) const { return a > b ? a : b; }
};

// A pair of bfloat16 as it lies in memory
__device__ __forceinline__ float low(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ unsigned pack(float low, float high) {
  return __bfloat16_as_ushort(__float2bfloat16(low)) | (unsigned)__bfloat16_as_ushort(__float2bfloat16(high))
                                                           << 16;
}

// A token and its logit as one number: the larger the logit the larger, and of equal logits the token that
// comes first is larger. A logit that is NaN or infinite is larger than all: NO_NUMBER.
#define NO_NUMBER ~0ull
__device__ __forceinline__ u64 rank_of(float logit, int token) {
  if (!(logit <= MAX_FLOAT)) return NO_NUMBER;
  unsigned bits = __float_as_uint(logit + 0.f);  // -0 becomes 0
  bits = bits >> 31 ? ~bits : bits | 0x80000000u;
  return (u64)bits << 32 | (0xffffffffu - token);
}
__device__ __forceinline__ int token_of(u64 rank) { return 0xffffffffu - (unsigned)rank; }

// ---- Norm -------------------------------------------------------------------------------------------------

// A row is cut into WARPS parts, each of equally many steps of 32 numbers. A warp adds up one part, here and
// in the products.
#define WARPS (THREADS / 32)
__device__ __forceinline__ constexpr int steps_sums(int size) {
  return ((size + 31) / 32 + WARPS - 1) / WARPS;
}

// What a lane has of a row (DIM,): four numbers side by side, in each 128 of its warp's part
struct RowOfLane {
  static const int N = (steps_sums(DIM) + 3) / 4;
  static __device__ __forceinline__ int place(int i) {
    return threadIdx.x / 32 * steps_sums(DIM) * 32 + i * 128 + threadIdx.x % 32 * 4;
  }
  static __device__ __forceinline__ bool has(int i) {
    return i * 128 + threadIdx.x % 32 * 4 < steps_sums(DIM) * 32 && place(i) < DIM;
  }
};

struct NormWeight : RowOfLane {
  uint2 of[N];
  __device__ __forceinline__ void load(weight *w) {
    UNROLLED for (int i = 0; i < N; i++) of[i] = has(i) ? *(const uint2 *)(w + place(i)) : uint2{};
  }
};

// y = x / sqrt(mean(x^2) + eps) * w of one row: NumpyOps._rms_norm. All threads of the block enter. Each warp
// adds up its part and norms it; the sums of the parts are added from first to last.
//   x (DIM,) float   y (DIM,) bf16, written   sums (WARPS,) float in shared memory
__device__ __forceinline__ void norm_row(const float *x, const NormWeight &w, bf16 *y, float *sums) {
  float4 v[RowOfLane::N];
  float sum = 0;
  UNROLLED for (int i = 0; i < w.N; i++) v[i] = w.has(i) ? *(const float4 *)(x + w.place(i)) : float4{};
  UNROLLED for (int i = 0; i < w.N; i++) {
    sum = fmaf(v[i].x, v[i].x, sum);
    sum = fmaf(v[i].y, v[i].y, sum);
    sum = fmaf(v[i].z, v[i].z, sum);
    sum = fmaf(v[i].w, v[i].w, sum);
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  UNROLLED for (int i = 0; i < WARPS; i++) sum += sums[i];
  float scale = rsqrtf(sum / DIM + NORM_EPS);
  UNROLLED for (int i = 0; i < w.N; i++) {
    uint2 normed = {pack(v[i].x * scale * low(w.of[i].x), v[i].y * scale * high(w.of[i].x)),
                    pack(v[i].z * scale * low(w.of[i].y), v[i].w * scale * high(w.of[i].y))};
    if (w.has(i)) *(uint2 *)(y + w.place(i)) = normed;
  }
}

// ---- Products ---------------------------------------------------------------------------------------------
// y = x w^T for x (n_rows, size), w (n_columns, size), on the tensor cores: NumpyOps._linear.
//
// Split-K within a block: a part of `size` is summed up step by step, from zero; then the parts are added
// from first to last. So the order of a sum depends on `size` alone, and a row's bits depend neither on the
// shape of the block nor on other rows.
//
// A block computes BLOCK_ROWS rows and 8 * N columns of each matrix, in one of two ways:
//   narrow  each warp takes one part, for the whole block: all weights are on their way at once
//   wide    each warp takes some tiles of the block, for all of `size`: two or four warps use what is read
//
// A lane reads 16 bytes of a row, 8 numbers side by side. The instruction wants pairs that lie 8 apart; but w
// and x are permuted alike, and so the sum has the same terms.

#define ROW_TILES (BLOCK_ROWS / 16)  // tiles of the tensor cores, 16 by 8, of a block
#define COLUMN_TILES (BLOCK_COLUMNS / 8)
#define PAIR_TILES (PAIR_COLUMNS / 8)
#define LOGITS_TILES (LOGITS_COLUMNS / 8)
#define ONE_TILE (ROW_TILES == 1 && COLUMN_TILES == 1)  // is it the smallest block?
#define NARROW (COLUMN_TILES <= 4)                      // else wide

// Rows of x, (n_rows, SIZE), as they lie in memory. RING: steps of them on their way to shared memory at once;
// 0: a step is read when it is its turn, and waits for a trip to the L2 cache.
template <int SIZE>
struct Rows {
  static const int RING = ROW_TILES == 1 ? 4 : 0;
  const bf16 *x;
  __device__ __forceinline__ void begin(int n_rows) {}
  __device__ __forceinline__ const bf16 *at(int row, int k) { return x + (size_t)row * SIZE + k; }
};

// Rows of the residual stream, normed. Up to NORMED_ROWS of them each block norms for itself, a warp the part
// that it multiplies with: that saves a launch. With more, the blocks, each with all rows, would read more
// than the weights are; then rms_norm has made x.
struct NormedRows : Rows<DIM> {
  static const int RING = ONE_TILE ? 0 : Rows<DIM>::RING;  // what a block norms is in shared memory
  const float *residual;
  weight *w;
  const int *rows;  // which of the residual stream, or null: all
  __device__ __forceinline__ void begin(int n_rows) {
    __shared__ __align__(16) bf16 few[NORMED_ROWS][DIM];
    __shared__ float sums[NORMED_ROWS][WARPS];
    bool is_few = ONE_TILE && n_rows <= NORMED_ROWS;
    if (!is_few) return;
    NormWeight norm;
    norm.load(w);
    for (int i = 0; i < n_rows; i++)
      norm_row(residual + (size_t)(rows ? rows[i] : i) * DIM, norm, few[i], sums[i]);
    __syncwarp();
    x = few[0];
  }
};

// sum (16, 8) += x (16, 32) w (8, 32)^T, by one warp: 16 bytes of a lane are good for two instructions
//   low, high: of x, rows g and g + 8 (mma_16x8x16)
__device__ __forceinline__ void multiply(float *sum, uint4 low, uint4 high, uint4 w) {
  unsigned a0[4] = {low.x, high.x, low.y, high.y}, b0[2] = {w.x, w.y};
  unsigned a1[4] = {low.z, high.z, low.w, high.w}, b1[2] = {w.z, w.w};
  mma_16x8x16(sum, a0, b0);
  mma_16x8x16(sum, a1, b1);
}

__device__ __forceinline__ void store(float *y, float v) { *y = v; }
__device__ __forceinline__ void store(bf16 *y, float v) { *y = __float2bfloat16(v); }

// linear(): y[row, column] = before[row, column] + value(column, sums of the MATRICES); before may be null. N: column tiles of each matrix. All threads of the block enter.
#if NARROW

// AHEAD: steps of a part whose weights are on their way to registers. Of the steps after them, a block has
// L2_BYTES brought to the L2 cache. With up to six blocks on each processor that is half of an H100's L2
// cache. If it were all that they read, lines would leave the cache before they are used, and be read twice.
#define AHEAD (ROW_TILES == 1 ? 4 : 1)
#define L2_BYTES (ROW_TILES == 1 ? 32768 : 0)

template <int MATRICES, int N, class Input, class T, class Value>
__device__ __forceinline__ void linear(weight *const (&w)[MATRICES], int size, int n_columns, int n_rows,
                                       Input input, const float *before, T *y, Value value) {
  __shared__ float4 sums_of_warp[WARPS][MATRICES][ROW_TILES][32];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int first_row = blockIdx.x * BLOCK_ROWS, first_column = blockIdx.y * N * 8;
  int part = steps_sums(size), begin = warp * part * 32;
  float sum[MATRICES][N][ROW_TILES][4] = {};
  uint4 ahead[AHEAD][MATRICES][N];
  auto fetch = [&](int step, uint4(&to)[MATRICES][N]) {  // a step of the part
    int k = begin + step * 32 + t * 8;
    for (int m = 0; m < MATRICES; m++)
      for (int n = 0; n < N; n++) {
        int column = first_column + n * 8 + g;
        bool is_there = step < part && k < size && column < n_columns;
        to[m][n] = is_there ? *(const uint4 *)(w[m] + (size_t)column * size + k) : uint4{};
      }
  };
  // x comes through a ring in shared memory. A thread reads what it has copied itself: it waits for no other.
  const int RING = Input::RING, PLACES = RING ? RING : 1;
  __shared__ uint4 x_of[PLACES][ROW_TILES * 2][THREADS];
  auto x_is_there = [&](int step, int r) {
    return step < part && begin + step * 32 + t * 8 < size && first_row + r * 8 + g < n_rows;
  };
  auto x_at = [&](int step, int r) {
    return (const uint4 *)input.at(first_row + r * 8 + g, begin + step * 32 + t * 8);
  };
  auto copy_x = [&](int step) {
    UNROLLED for (int r = 0; r < ROW_TILES * 2; r++)
      begin_copy(&x_of[step % PLACES][r][threadIdx.x], x_at(step, r), x_is_there(step, r));
    end_copies();
  };
  auto prefetch_behind = [&]() {
    const int MOST = L2_BYTES / (WARPS * MATRICES * N * 8);  // of a row's part
    int k = begin + AHEAD * 32, n_bytes = min(min((part - AHEAD) * 32, size - k) * 2, MOST);
    UNROLLED for (int m = 0; m < MATRICES; m++)
      UNROLLED for (int n = 0; n < N; n++) {
        int column = first_column + n * 8 + g;
        if (t == 0 && n_bytes > 0 && column < n_columns) prefetch(w[m] + (size_t)column * size + k, n_bytes);
      }
  };
  // The warps' sums are added for eight columns at a time: N_OF_THREAD numbers a thread, 32 rows apart. We
  // read all of `before` before we write, or each read would wait for the write ahead of it; with one tile of
  // rows, we read it while the product is computed.
  const int N_OF_THREAD = (ROW_TILES + 1) / 2;
  int row = threadIdx.x / 8, of_eight = threadIdx.x % 8;
  auto at = [&](int n, int i) {
    return (size_t)(first_row + row + i * 32) * n_columns + first_column + n * 8 + of_eight;
  };
  auto is_there = [&](int n, int i) {
    return row + i * 32 < BLOCK_ROWS && first_row + row + i * 32 < n_rows &&
           first_column + n * 8 + of_eight < n_columns;
  };
  float old[N][N_OF_THREAD];
  auto read_before = [&]() {
    UNROLLED for (int n = 0; n < N; n++)
      UNROLLED for (int i = 0; i < N_OF_THREAD; i++)
        old[n][i] = before && is_there(n, i) ? before[at(n, i)] : 0;
  };
  UNROLLED for (int a = 0; a < AHEAD; a++) fetch(a, ahead[a]);
  prefetch_behind();
  input.begin(n_rows);
  UNROLLED for (int i = 0; i < RING; i++) copy_x(i);
  if (ROW_TILES == 1) read_before();
  for (int step = 0; step < part; step += AHEAD) {
    UNROLLED for (int a = 0; a < AHEAD; a++) {
      if (step + a >= part || begin + (step + a) * 32 >= size) break;
      uint4 x[ROW_TILES * 2];
      if (RING) await_copies<PLACES - 1>();
      UNROLLED for (int r = 0; r < ROW_TILES * 2; r++) {
        if (RING) x[r] = x_of[(step + a) % PLACES][r][threadIdx.x];
        else x[r] = x_is_there(step + a, r) ? *x_at(step + a, r) : uint4{};
      }
      UNROLLED for (int m = 0; m < MATRICES; m++)
        UNROLLED for (int n = 0; n < N; n++)
          UNROLLED for (int r = 0; r < ROW_TILES; r++)
            multiply(sum[m][n][r], x[r * 2], x[r * 2 + 1], ahead[a][m][n]);
      fetch(step + a + AHEAD, ahead[a]);
      if (RING) copy_x(step + a + RING);
    }
  }
  if (RING) await_copies<0>();  // those behind the last step copy zeros, but no copy may outlive the block
  if (ROW_TILES > 1) read_before();
  UNROLLED for (int n = 0; n < N; n++) {
    UNROLLED for (int i = 0; i < MATRICES * ROW_TILES; i++) {
      float *d = sum[i / ROW_TILES][n][i % ROW_TILES];
      float4 v = {d[0], d[1], d[2], d[3]};
      sums_of_warp[warp][i / ROW_TILES][i % ROW_TILES][lane] = v;
    }
    __syncthreads();
    UNROLLED for (int i = 0; i < N_OF_THREAD; i++) {
      if (!is_there(n, i)) continue;
      int tile = (row + i * 32) / 16, from = row % 8 * 16 + of_eight / 2 * 4 + row / 8 % 2 * 2 + of_eight % 2;
      float v[MATRICES];
      for (int m = 0; m < MATRICES; m++) {
        v[m] = 0;
        for (int j = 0; j < WARPS; j++) v[m] += ((const float *)sums_of_warp[j][m][tile])[from];
      }
      store(y + at(n, i), old[n][i] + value(first_column + n * 8 + of_eight, v));
    }
    __syncthreads();
  }
}

#else  // wide

// x and w come through a ring in shared memory: while one step is computed with, STAGES - 1 are on their way.
// The stages fill what a block has without asking for more: three of 128 rows and 128 columns; four of 64
// rows, of which two blocks run on a processor.
// Four lanes copy or read the 32 numbers of a row, eight lanes two rows side by side: every bank once.
typedef uint4 Step[4];  // 32 numbers of a row
#define SHARED_BYTES 49152
#define STAGES (SHARED_BYTES / ((BLOCK_ROWS + BLOCK_COLUMNS) * (int)sizeof(Step)))

template <int N>
__device__ __forceinline__ void copy_rows(Step *to, const bf16 *from, int first, int n_rows, int size,
                                          int step) {
  int quarter = threadIdx.x % 4, k = step * 32 + quarter * 8;
  UNROLLED for (int i = 0; i < N; i += WARPS * 8) {
    int row = threadIdx.x / 4 + i;
    begin_copy(&to[row][quarter], from + (size_t)(first + row) * size + k, k < size && first + row < n_rows);
  }
}

template <int MATRICES, int N, int SIZE, class T, class Value>
__device__ __forceinline__ void linear(weight *const (&w)[MATRICES], int size, int n_columns, int n_rows,
                                       Rows<SIZE> input, const float *before, T *y, Value value) {
  const int COLUMNS = N * 8;               // of the block
  const int R = ROW_TILES / 2, C = N / 4;  // tiles of a warp: the warps lie 2 by 4
  __shared__ Step x_of[STAGES][BLOCK_ROWS], w_of[STAGES][MATRICES][COLUMNS];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int first_row = blockIdx.x * BLOCK_ROWS, row = warp % 2 * R * 16 + g;
  int first_column = blockIdx.y * COLUMNS, column = warp / 2 * C * 8;
  auto copy_w = [&](int step) {
    UNROLLED for (int m = 0; m < MATRICES; m++)
      copy_rows<COLUMNS>(w_of[step % STAGES][m], w[m], first_column, n_columns, size, step);
  };
  auto copy_x = [&](int step) {
    copy_rows<BLOCK_ROWS>(x_of[step % STAGES], input.x, first_row, n_rows, size, step);
    end_copies();
  };
  for (int step = 0; step < STAGES - 1; step++) copy_w(step);
  for (int step = 0; step < STAGES - 1; step++) copy_x(step);
  float total[C * R * 4][MATRICES] = {};
  for (int step = 0, n_steps = (size + 31) / 32; step < n_steps;) {
    float sum[C][R][MATRICES][4] = {};
#pragma unroll 1  // or four steps side by side take the registers of a second block
    for (int end = min(step + steps_sums(size), n_steps); step < end; step++) {
      await_copies<STAGES - 2>();
      __syncthreads();  // this step has come for all, and all have done with the one before it
      copy_w(step + STAGES - 1);
      copy_x(step + STAGES - 1);
      uint4 b[MATRICES][C];
      UNROLLED for (int m = 0; m < MATRICES; m++)
        UNROLLED for (int c = 0; c < C; c++) b[m][c] = w_of[step % STAGES][m][column + c * 8 + g][t];
      UNROLLED for (int r = 0; r < R; r++) {
        uint4 low = x_of[step % STAGES][row + r * 16][t], high = x_of[step % STAGES][row + r * 16 + 8][t];
        UNROLLED for (int m = 0; m < MATRICES; m++)
          UNROLLED for (int c = 0; c < C; c++) multiply(sum[c][r][m], low, high, b[m][c]);
      }
    }
    UNROLLED for (int i = 0; i < C * R * 4; i++)
      UNROLLED for (int m = 0; m < MATRICES; m++) total[i][m] += sum[i / 4 / R][i / 4 % R][m][i % 4];
  }
  await_copies<0>();  // those behind the last step copy zeros, but no copy may outlive the block
  auto each = [&](auto use) {  // use(i, column, place in y, has it one?) for each number i of the thread
    UNROLLED for (int i = 0; i < C * R * 4; i++) {
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
    if (is_there) store(y + at, result[i]);
  });
}
#endif

__device__ __forceinline__ float bias(weight *b, int column) { return b ? __bfloat162float(b[column]) : 0; }

// Every product: grid: n_rows / BLOCK_ROWS, columns / columns of a block, both rounded up; block: THREADS;
// all threads enter. The blocks that share weights come one after another, so that these stream by once.

// qkv = rms_norm(x) wqkv^T + bqkv                                                         NumpyOps.qkv
extern "C" __global__ void __launch_bounds__(THREADS)
    qkv(weight *wqkv, weight *bqkv, weight *attn_norm, const float *x, const bf16 *normed, float *qkv,
        int n_rows) {
  NormedRows input = {{normed}, x, attn_norm, nullptr};
  linear<1, COLUMN_TILES>({wqkv}, DIM, QKV_DIM, n_rows, input, nullptr, qkv,
                          [&](int column, float *v) { return v[0] + bias(bqkv, column); });
}

// x += y wo^T + bo                                                                        NumpyOps.out
// With one tile four blocks a processor, as in `down`.
extern "C" __global__ void __launch_bounds__(THREADS, ONE_TILE ? 4 : 0)
    out(weight *wo, weight *bo, const bf16 *y, float *x, int n_rows) {
  linear<1, COLUMN_TILES>({wo}, N_HEADS * HEAD_DIM, DIM, n_rows, Rows<N_HEADS * HEAD_DIM>{y}, x, x,
                          [&](int column, float *v) { return v[0] + bias(bo, column); });
}

// h = silu(gate) * up, with gate, up = rms_norm(x) w_gate_up^T + b_gate_up                NumpyOps.gate_up
// With one tile three blocks a processor, or ptxas spills to make room for a fourth; two if a lane has much
// of a row to norm.
#define GATE_UP_BLOCKS (!ONE_TILE ? 0 : DIM > 2048 ? 2 : 3)
extern "C" __global__ void __launch_bounds__(THREADS, GATE_UP_BLOCKS)
    gate_up(weight *w_gate_up, weight *b_gate_up, weight *mlp_norm, const float *x, const bf16 *normed, bf16 *h,
            int n_rows) {
  NormedRows input = {{normed}, x, mlp_norm, nullptr};
  weight *up = w_gate_up + (size_t)HIDDEN_DIM * DIM;
  linear<2, PAIR_TILES>({w_gate_up, up}, DIM, HIDDEN_DIM, n_rows, input, nullptr, h, [&](int column, float *v) {
    float gate = v[0] + bias(b_gate_up, column), up = v[1] + bias(b_gate_up, HIDDEN_DIM + column);
    return gate / (1 + expf(-gate)) * up;
  });
}

// x += h w_down^T + b_down                                                                NumpyOps.down
// With one tile four blocks a processor, or ptxas spills to make room for a fifth (sm_120).
extern "C" __global__ void __launch_bounds__(THREADS, ONE_TILE ? 4 : 0)
    down(weight *w_down, weight *b_down, const bf16 *h, float *x, int n_rows) {
  linear<1, COLUMN_TILES>({w_down}, HIDDEN_DIM, DIM, n_rows, Rows<HIDDEN_DIM>{h}, x, x,
                          [&](int column, float *v) { return v[0] + bias(b_down, column); });
}

// The likeliest of the tokens whose logits the block has just written, so that no row is read again
__device__ __forceinline__ void find_best(const float *y, u64 *best, int first_row, int n_rows,
                                          int first_column) {
  __syncthreads();
  int end = min(first_column + LOGITS_COLUMNS, VOCAB_SIZE);
  for (int row = first_row + threadIdx.x / 32; row < min(first_row + BLOCK_ROWS, n_rows); row += WARPS) {
    u64 rank = 0;
    for (int i = first_column + threadIdx.x % 32; i < end; i += 32)
      rank = max(rank, rank_of(y[(size_t)row * VOCAB_SIZE + i], i));
    rank = warp_reduce(rank, Larger());
    if (threadIdx.x % 32 == 0) atomicMax(&best[row], rank);
  }
}

// raw = rms_norm(x[wanted]) head^T                                                        NumpyOps.logits
// With one tile of rows two blocks a processor, or ptxas spills to make room for a third.
extern "C" __global__ void __launch_bounds__(THREADS, ROW_TILES == 1 ? 2 : 0)
    logits(weight *head, weight *norm, const float *x, const bf16 *normed, const int *wanted, float *raw,
           u64 *best, int n_rows) {
  NormedRows input = {{normed}, x, norm, wanted};
  linear<1, LOGITS_TILES>({head}, DIM, VOCAB_SIZE, n_rows, input, nullptr, raw,
                          [](int column, float *v) { return v[0]; });
  find_best(raw, best, blockIdx.x * BLOCK_ROWS, n_rows, blockIdx.y * LOGITS_COLUMNS);
}

#if ONE_TILE  // what follows is not a product, and is compiled for one shape alone

// ---- Rows -------------------------------------------------------------------------------------------------

// y = x[rows] / sqrt(mean(x[rows]^2) + eps) * w                                           NumpyOps._rms_norm
// For the products of more than NORMED_ROWS rows, with arguments that the caller names.
//   w     (DIM,)
//   rows  (n_rows,) int               which rows of x; null: all
//   y     (n_rows, DIM) bf16, written
//   grid: n_rows; block: THREADS; all threads enter
extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm(weight *w, const float *x, const int *rows, bf16 *y) {
  __shared__ float sums[WARPS];
  NormWeight norm;
  norm.load(w);
  int row = blockIdx.x;
  norm_row(x + (size_t)(rows ? rows[row] : row) * DIM, norm, y + (size_t)row * DIM, sums);
}

// x = embed[token]                                                                        NumpyOps.embed
//   grid: n_rows; block: THREADS
extern "C" __global__ void __launch_bounds__(THREADS)
    embed(weight *embed, const int *tokens, const int *slots, const int *chosen, float *x) {
  int row = blockIdx.x, token = tokens[row] < 0 ? chosen[slots[row]] : tokens[row];
  for (int i = threadIdx.x; i < DIM; i += THREADS)
    x[(size_t)row * DIM + i] = __bfloat162float(embed[(size_t)token * DIM + i]);
}

// ---- Attention --------------------------------------------------------------------------------------------
// y = softmax(q k^T / sqrt(HEAD_DIM)) v over a paged KV cache                             NumpyOps.attend
//
//   window       of the layer: a token sees so many positions, itself included; 0: all
//   rotary       0: the layer does not rotate
//
// The queries of a sequence to one key head are the GROUP heads of its rows, one row after another. A tile is
// QUERIES of them. A warp takes 32 keys at a time, with a softmax of their own. The warps of a block take a
// split of SPLIT_KEYS keys and merge what they have; the splits are added up from first to last. Splits begin
// at multiples of SPLIT_KEYS in the sequence, so the order of every sum follows from the position of the
// query alone.

static_assert(QUERIES == 16, "the rows of mma_16x8x16");
#define ATTEND_WARPS (ATTEND_THREADS / 32)
#define EMPTY -1e30f                                    // the greatest of no scores
#define AT_ONCE 8                                       // splits that are read together, to be added up
#define A_THREAD (HEAD_PAD * QUERIES / ATTEND_THREADS)  // numbers that a thread has of a tile's result

struct Tile {
  int row;         // of the step, where the rows of its sequence begin
  int start;       // position of that row
  int n_tokens;    // how many rows these are; 0: no tile
  int first;       // query
  int first_part;  // place in `part` of the sequence's first split
  int n_rows;      // queries of the tile
  const int *page_table;
  int first_split, last_split;
  __device__ __forceinline__ Tile(const int *tile, const int *page_tables, int max_pages, int window)
      : row(tile[0]), start(tile[1]), n_tokens(tile[2]), first(tile[3]), first_part(tile[5]),
        page_table(page_tables + (size_t)tile[4] * max_pages) {
    n_rows = min(QUERIES, n_tokens * GROUP - first);
    last_split = position(n_rows - 1) / SPLIT_KEYS;
    first_split = window ? max(0, position(0) - window + 1) / SPLIT_KEYS : 0;
  }
  __device__ __forceinline__ int position(int r) const { return start + (first + r) / GROUP; }
  __device__ __forceinline__ int token(int r) const { return row + (first + r) / GROUP; }
  __device__ __forceinline__ int head(int r, int kv) const { return kv * GROUP + (first + r) % GROUP; }
  // The places of a query's result in `y`, and of a split's result in `part`
  __device__ __forceinline__ bf16 *result(bf16 *y, int r, int kv) const {
    return y + ((size_t)token(r) * N_HEADS + head(r, kv)) * HEAD_DIM;
  }
  __device__ __forceinline__ float *part_of(float *part, int split, int r, int kv) const {
    size_t place = first_part + (size_t)split * n_tokens + (first + r) / GROUP;
    return part + (place * N_HEADS + head(r, kv)) * PART_WIDTH;
  }
};

struct Work {  // shared memory of a block
  bf16 q[QUERIES][HEAD_PAD + 8];
  float top[ATTEND_WARPS][QUERIES];  // greatest score
  float sum[ATTEND_WARPS][QUERIES];  // of the weights
  float out[ATTEND_WARPS][QUERIES][HEAD_PAD + 8];  // weighted values
};

// Norm a head of q or k, rotate its pairs (RoPE), round it; by one warp
//   head (HEAD_DIM,) float   norm (HEAD_DIM,), null: none   rope of the position, null: no rotation
//   to (HEAD_DIM,) bf16, written
__device__ __forceinline__ void rotate(const float *head, weight *norm, const float2 *rope, bf16 *to) {
  const int n = (HEAD_DIM / 2 + 31) / 32;  // pairs of a lane
  int lane = threadIdx.x % 32;
  float2 v[n];
  float sum = 0;
  UNROLLED for (int i = 0; i < n; i++) {
    v[i] = lane + 32 * i < HEAD_DIM / 2 ? ((const float2 *)head)[lane + 32 * i] : float2{};
    sum = fmaf(v[i].x, v[i].x, sum), sum = fmaf(v[i].y, v[i].y, sum);
  }
  float scale = norm ? rsqrtf(warp_sum(sum) / HEAD_DIM + NORM_EPS) : 1;
  UNROLLED for (int i = 0; i < n; i++) {
    int pair = lane + 32 * i;
    if (pair >= HEAD_DIM / 2) break;
    float a = v[i].x * scale, b = v[i].y * scale;
    if (norm) a *= __bfloat162float(norm[2 * pair]), b *= __bfloat162float(norm[2 * pair + 1]);
    float2 one = {1, 0}, turn = rope ? rope[pair] : one;
    *(unsigned *)(to + 2 * pair) = pack(a * turn.x - b * turn.y, a * turn.y + b * turn.x);
  }
}

// Write the key and the value that a head has of a token to the token's page; by one warp
//   qkv (QKV_DIM,) float   page_table (max_pages,)
__device__ __forceinline__ void write_token(const float *qkv, int kv, weight *k_norm, const float2 *rope,
                                            bf16 *keys, bf16 *values, const int *page_table, int position) {
  size_t at = ((size_t)page_table[position / PAGE] * N_KV_HEADS + kv) * PAGE * HEAD_PAD;
  const float *value = qkv + (N_HEADS + N_KV_HEADS + kv) * HEAD_DIM;
  const int n = (HEAD_DIM + 31) / 32;  // numbers of a lane
  int lane = threadIdx.x % 32;
  float v[n];
  UNROLLED for (int i = 0; i < n; i++) v[i] = lane + 32 * i < HEAD_DIM ? value[lane + 32 * i] : 0;
  rotate(qkv + (N_HEADS + kv) * HEAD_DIM, k_norm, rope, keys + at + position % PAGE * HEAD_PAD);
  UNROLLED for (int i = 0; i < n; i++)
    if (lane + 32 * i < HEAD_DIM)
      values[at + (lane + 32 * i) * PAGE + position % PAGE] = __float2bfloat16(v[i]);
}

// Zeros for the queries that a tile does not have, by pairs
__device__ __forceinline__ void clear_queries(Work &work, const Tile &tile) {
  const int width = (HEAD_PAD + 8) / 2;
  for (int i = threadIdx.x; i < QUERIES * width; i += ATTEND_THREADS)
    if (i / width >= tile.n_rows || i % width >= HEAD_DIM / 2) ((unsigned *)work.q)[i] = 0;
}

// The queries of a tile, normed and rotated, to shared memory
__device__ __forceinline__ void load_queries(Work &work, const Tile &tile, int kv, const float *qkv,
                                             weight *q_norm, const float2 *rope, int rotary) {
  for (int r = threadIdx.x / 32; r < tile.n_rows; r += ATTEND_WARPS)
    rotate(qkv + (size_t)tile.token(r) * QKV_DIM + tile.head(r, kv) * HEAD_DIM, q_norm,
           rotary ? rope + (size_t)tile.position(r) * (HEAD_DIM / 2) : nullptr, work.q[r]);
}

// One warp's 32 keys of a split, all queries of the tile: greatest score, sum of weights and weighted values,
// to `work`. Column 2t + e of the i-th product of 8 keys is key 8t + 2i + e, so a lane has the weights of 8
// neighbours; lane 4g + t has those of the queries g and g + 8.
__device__ __forceinline__ void attend_keys(Work &work, const Tile &tile, int split, int kv, const bf16 *keys,
                                            const bf16 *values, int window) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int begin = split * SPLIT_KEYS + warp * 32, last = tile.position(tile.n_rows - 1);
  float out[HEAD_PAD / 8][4] = {}, top[2] = {EMPTY, EMPTY}, sum[2] = {0, 0};
  if (begin <= last && (!window || begin + 31 > tile.position(0) - window)) {
    size_t at = ((size_t)tile.page_table[begin / PAGE] * N_KV_HEADS + kv) * PAGE * HEAD_PAD;
    const bf16 *k = keys + at + (begin % PAGE + g / 2 * 8 + g % 2) * HEAD_PAD + t * 8;
    const bf16 *v = values + at + g * PAGE + begin % PAGE + t * 8;
    uint4 value[HEAD_PAD / 8];
    UNROLLED for (int n = 0; n < HEAD_PAD / 8; n++) value[n] = *(const uint4 *)(v + n * 8 * PAGE);
    float score[4][4] = {};
    UNROLLED for (int c = 0; c < HEAD_PAD; c += 32) {
      uint4 q0 = *(const uint4 *)(work.q[g] + c + t * 8), q1 = *(const uint4 *)(work.q[g + 8] + c + t * 8);
      unsigned a0[4] = {q0.x, q1.x, q0.y, q1.y}, a1[4] = {q0.z, q1.z, q0.w, q1.w};
      UNROLLED for (int i = 0; i < 4; i++) {
        uint4 key = *(const uint4 *)(k + i * 2 * HEAD_PAD + c);
        unsigned b0[2] = {key.x, key.y}, b1[2] = {key.z, key.w};
        mma_16x8x16(score[i], a0, b0);
        mma_16x8x16(score[i], a1, b1);
      }
    }
    float scale = LOG2_E / sqrtf((float)HEAD_DIM);  // for exp2f
    UNROLLED for (int j = 0; j < 16; j++) {
      int r = g + j % 4 / 2 * 8, key = begin + t * 8 + j / 4 * 2 + j % 2, query = tile.position(r);
      bool is_seen = r < tile.n_rows && key <= query && (!window || key > query - window);
      float s = is_seen ? score[j / 4][j % 4] * scale : EMPTY;
      score[j / 4][j % 4] = s;
      top[j % 4 / 2] = fmaxf(top[j % 4 / 2], s);
    }
    unsigned p[4][2];  // the weights, rounded, of two keys each; rows g and g + 8
    UNROLLED for (int h = 0; h < 2; h++) {
      top[h] = fmaxf(top[h], __shfl_xor_sync(ALL, top[h], 1));
      top[h] = fmaxf(top[h], __shfl_xor_sync(ALL, top[h], 2));
      UNROLLED for (int i = 0; i < 4; i++) {
        float *s = score[i] + 2 * h;
        p[i][h] = pack(s[0] == EMPTY ? 0 : exp2f(s[0] - top[h]), s[1] == EMPTY ? 0 : exp2f(s[1] - top[h]));
        sum[h] += low(p[i][h]) + high(p[i][h]);
      }
      sum[h] += __shfl_xor_sync(ALL, sum[h], 1);
      sum[h] += __shfl_xor_sync(ALL, sum[h], 2);
    }
    unsigned a0[4] = {p[0][0], p[0][1], p[1][0], p[1][1]}, a1[4] = {p[2][0], p[2][1], p[3][0], p[3][1]};
    // of this lane's 8 keys; after them the page may hold anything, NaN too
    int n_keys = last + 1 - (begin + t * 8);
    UNROLLED for (int n = 0; n < HEAD_PAD / 8; n++) {
      unsigned b[4] = {value[n].x, value[n].y, value[n].z, value[n].w};
      for (int i = 0; i < 4; i++) b[i] = n_keys > 2 * i + 1 ? b[i] : n_keys > 2 * i ? b[i] & 0xffff : 0;
      mma_16x8x16(out[n], a0, b);
      mma_16x8x16(out[n], a1, b + 2);
    }
  }
  UNROLLED for (int h = 0; h < 2; h++) {
    int r = g + 8 * h;
    if (t == 0) {
      work.top[warp][r] = top[h];
      work.sum[warp][r] = sum[h];
    }
    UNROLLED for (int n = 0; n < HEAD_PAD / 8; n++) {
      float2 pair = {out[n][2 * h], out[n][2 * h + 1]};
      *(float2 *)&work.out[warp][r][n * 8 + t * 2] = pair;
    }
  }
}

// What the warps have of a split, merged, by all threads of the block. A thread has every eighth (or fourth)
// number of one query's result: those at column_of_thread(i).
__device__ __forceinline__ int row_of_thread() { return threadIdx.x / (ATTEND_THREADS / QUERIES); }
__device__ __forceinline__ int column_of_thread(int i) {
  return threadIdx.x % (ATTEND_THREADS / QUERIES) + i * (ATTEND_THREADS / QUERIES);
}
__device__ __forceinline__ void merge_warps(const Work &work, float &top, float &sum, float *out) {
  int r = row_of_thread();
  float factor[ATTEND_WARPS];
  top = EMPTY, sum = 0;
  UNROLLED for (int w = 0; w < ATTEND_WARPS; w++) top = fmaxf(top, work.top[w][r]);
  UNROLLED for (int w = 0; w < ATTEND_WARPS; w++) {
    factor[w] = exp2f(work.top[w][r] - top);
    sum = fmaf(work.sum[w][r], factor[w], sum);
  }
  UNROLLED for (int i = 0; i < A_THREAD; i++) {
    out[i] = 0;
    UNROLLED for (int w = 0; w < ATTEND_WARPS; w++)
      out[i] = fmaf(work.out[w][r][column_of_thread(i)], factor[w], out[i]);
  }
}

// What the sum of a head's weights, relative to its greatest score, is with the head's sink
__device__ __forceinline__ float with_sink(float sum, float top, weight *sinks, int head) {
  return sinks ? sum + exp2f(__bfloat162float(sinks[head]) * LOG2_E - top) : sum;
}

// The result of a query of the tile, from what the threads of its row have
__device__ __forceinline__ void write_result(const Tile &tile, int kv, float top, float sum, const float *out,
                                             weight *sinks, bf16 *y) {
  int r = row_of_thread();
  if (r >= tile.n_rows) return;
  sum = with_sink(sum, top, sinks, tile.head(r, kv));
  bf16 *result = tile.result(y, r, kv);
  for (int i = 0; i < A_THREAD; i++)
    if (column_of_thread(i) < HEAD_DIM) result[column_of_thread(i)] = __float2bfloat16(out[i] / sum);
}

// How the sum of the splits so far, and the next split, are scaled before they are added (online softmax).
// `top` becomes the greatest score of both.
__device__ __forceinline__ void rescale(float &top, float next_top, float &old_scale, float &new_scale) {
  float both = fmaxf(top, next_top);
  old_scale = exp2f(top - both);
  new_scale = exp2f(next_top - both);
  top = both;
}

// The pages and norms that a split needs, on their way to the L2 cache while its queries are loaded
__device__ __forceinline__ void prefetch_split(const Tile &tile, int split, int kv, const bf16 *keys,
                                               const bf16 *values, weight *q_norm, weight *k_norm) {
  int begin = split * SPLIT_KEYS + threadIdx.x * PAGE, end = tile.position(tile.n_rows - 1) + 1;
  if (threadIdx.x < SPLIT_KEYS / PAGE && begin < end) {
    size_t at = ((size_t)tile.page_table[begin / PAGE] * N_KV_HEADS + kv) * PAGE * HEAD_PAD;
    prefetch(keys + at, min(PAGE, end - begin) * HEAD_PAD * 2);
    prefetch(values + at, PAGE * HEAD_PAD * 2);
  }
  if (threadIdx.x == 32 && q_norm && HEAD_DIM % 8 == 0)
    prefetch(q_norm, HEAD_DIM * 2), prefetch(k_norm, HEAD_DIM * 2);
}

// keys[page, kv_head, place] = k; values[page, kv_head, :, place] = v, for sequences of more than one tile
//   grid: n_rows, N_KV_HEADS; block: 32; all threads enter
extern "C" __global__ void __launch_bounds__(32)
    write_kv(const float *qkv, weight *k_norm, const float2 *rope, bf16 *keys, bf16 *values,
             const int *positions, const int *slots, const int *page_tables, int max_pages, int rotary) {
  int row = blockIdx.x, position = positions[row];
  if (position < 0) return;
  write_token(qkv + (size_t)row * QKV_DIM, blockIdx.y, k_norm,
             rotary ? rope + (size_t)position * (HEAD_DIM / 2) : nullptr, keys, values,
             page_tables + (size_t)slots[row] * max_pages, position);
}

// Split attention: a block for each split of each tile; the last block of a tile adds up the splits. Between
// the blocks each sequence has a place in `part` for each split and each of its rows (Tile.part_of).
//   writes  1: the blocks write the keys and values of the step too, as `write_kv` does; a sequence is a tile
//   grid: splits of the longest sequence, N_KV_HEADS, n_tiles; block: ATTEND_THREADS; all threads enter
extern "C" __global__ void __launch_bounds__(ATTEND_THREADS)
    attend(const float *qkv, weight *q_norm, weight *k_norm, weight *sinks, const float2 *rope, bf16 *keys,
           bf16 *values, table *tiles, table *page_tables, float *part, int *n_done, bf16 *y, int max_pages,
           int window, int rotary, int writes) {
  __shared__ __align__(16) Work work;
  __shared__ int is_last;
  int split = blockIdx.x, kv = blockIdx.y;
  Tile tile(tiles + blockIdx.z * TILE_WIDTH, page_tables, max_pages, window);
  bool is_there = tile.n_tokens > 0 && tile.first_split <= split && split <= tile.last_split;
  if (!is_there) return;
  prefetch_split(tile, split, kv, keys, values, q_norm, k_norm);
  clear_queries(work, tile);
  if (writes)  // the last warps first: the first ones have queries to load
    for (int i = ATTEND_WARPS - 1 - threadIdx.x / 32; i < tile.n_tokens; i += ATTEND_WARPS)
      if ((tile.start + i) / SPLIT_KEYS == split)
        write_token(qkv + (size_t)(tile.row + i) * QKV_DIM, kv, k_norm,
                   rotary ? rope + (size_t)(tile.start + i) * (HEAD_DIM / 2) : nullptr, keys, values,
                   tile.page_table, tile.start + i);
  load_queries(work, tile, kv, qkv, q_norm, rope, rotary);
  __syncthreads();
  attend_keys(work, tile, split, kv, keys, values, window);
  __syncthreads();
  float top, sum, out[A_THREAD];
  merge_warps(work, top, sum, out);
  int r = row_of_thread(), n_splits = tile.last_split - tile.first_split + 1;
  if (n_splits == 1) return write_result(tile, kv, top, sum, out, sinks, y);
  if (r < tile.n_rows) {
    float *mine = tile.part_of(part, split, r, kv);
    for (int i = 0; i < A_THREAD; i++)
      if (column_of_thread(i) < HEAD_DIM) mine[column_of_thread(i)] = out[i];
    if (column_of_thread(0) == 0) mine[HEAD_DIM] = top, mine[HEAD_DIM + 1] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) {  // its fences serve the block: barriers separate it from the other threads
    int *count = n_done + blockIdx.z * N_KV_HEADS + kv;
    __threadfence();  // this split is written before it is counted
    is_last = atomicAdd(count, 1) == n_splits - 1;
    __threadfence();  // the other splits are read after that
    if (is_last) *count = 0;
  }
  __syncthreads();
  if (!is_last) return;
  for (int i = threadIdx.x; i < tile.n_rows * HEAD_DIM; i += ATTEND_THREADS) {
    int r = i / HEAD_DIM, column = i % HEAD_DIM;
    float top = EMPTY, sum = 0, out = 0;
    for (int first = tile.first_split; first <= tile.last_split; first += AT_ONCE) {
      float tops[AT_ONCE], sums[AT_ONCE], outs[AT_ONCE];
      UNROLLED for (int j = 0; j < AT_ONCE; j++) {
        bool is_split = first + j <= tile.last_split;  // else it is empty, and changes nothing
        const float *next = tile.part_of(part, first + j, r, kv);
        tops[j] = is_split ? __ldcg(next + HEAD_DIM) : EMPTY;
        sums[j] = is_split ? __ldcg(next + HEAD_DIM + 1) : 0;
        outs[j] = is_split ? __ldcg(next + column) : 0;
      }
      UNROLLED for (int j = 0; j < AT_ONCE; j++) {
        float old_scale, new_scale;
        rescale(top, tops[j], old_scale, new_scale);
        sum = sum * old_scale + sums[j] * new_scale;
        out = out * old_scale + outs[j] * new_scale;
      }
    }
    sum = with_sink(sum, top, sinks, tile.head(r, kv));
    tile.result(y, r, kv)[column] = __float2bfloat16(out / sum);
  }
}

// The same, to the bit, with a block for each tile, which goes through the splits itself: for prefill chunks,
// whose tiles are many. The keys of the step are in their pages already.
//   grid: n_tiles, N_KV_HEADS; block: ATTEND_THREADS; all threads enter
extern "C" __global__ void __launch_bounds__(ATTEND_THREADS)
    attend_prompt(const float *qkv, weight *q_norm, weight *sinks, const float2 *rope, const bf16 *keys,
                  const bf16 *values, table *tiles, table *page_tables, bf16 *y, int max_pages, int window,
                  int rotary) {
  __shared__ __align__(16) Work work;
  int kv = blockIdx.y;
  Tile tile(tiles + blockIdx.x * TILE_WIDTH, page_tables, max_pages, window);
  if (tile.n_tokens == 0) return;
  clear_queries(work, tile);
  load_queries(work, tile, kv, qkv, q_norm, rope, rotary);
  float top = EMPTY, sum = 0, out[A_THREAD] = {};
  for (int split = tile.first_split; split <= tile.last_split; split++) {
    __syncthreads();
    attend_keys(work, tile, split, kv, keys, values, window);
    __syncthreads();
    float next_top, next_sum, next[A_THREAD], old_scale, new_scale;
    merge_warps(work, next_top, next_sum, next);
    rescale(top, next_top, old_scale, new_scale);
    sum = sum * old_scale + next_sum * new_scale;
    UNROLLED for (int i = 0; i < A_THREAD; i++) out[i] = out[i] * old_scale + next[i] * new_scale;
  }
  write_result(tile, kv, top, sum, out, sinks, y);
}

// ---- Sampling ---------------------------------------------------------------------------------------------
// One block chooses a row's token: sampling.pick_token. A probability is a whole number here, in units of
// 2^-40 of the likeliest token's, so that sums are exact and the order of adding does not matter.
//
// The likeliest token is known from `logits`; a row that asks for no more is not read. Else the tokens that
// may come are a set in shared memory, a bit each. top_k or top_p make it small in two passes over the
// vocabulary; each pass after these, and the draw, goes through the few that are left.

#define NOTHING (40u << 26)  // the distance from which on a token weighs nothing

// What `pick` has to know of a row, in whole numbers
struct PickRow {
  int slot;       // -1: the row only pads the step
  int first_row;  // row of the step: the first wanted one of its sequence
  int n_before;   // how many wanted rows of its sequence come before this one
  int top_k, flags;
  int n_top;  // n_top_logprobs, -1: no logprobs
};
static_assert(sizeof(PickRow) == PICK_ROW_WIDTH * sizeof(int), "a row of pick_rows");
// and in floats. sharpness: log2(e) / temperature, 0: greedy; the penalties as in sampling.Sampling
struct Settings {
  float sharpness, top_p, min_p, presence, frequency, repetition;
};
static_assert(sizeof(Settings) == SETTINGS_WIDTH * sizeof(float), "a row of settings");

// The logit of a token after penalties, logit_bias and mask                         sampling.apply_penalties
__device__ __forceinline__ float penalised(float logit, int token, const PickRow &p, const Settings &s,
                                           const unsigned *counts, const int *tokens, const float *bias,
                                           const unsigned *mask) {
  if (p.flags & PENALISED) {
    unsigned count = counts[token];
    for (int i = 1; i <= p.n_before; i++)
      count += tokens[p.first_row + i] == token;  // drafts before this row
    if (count) logit = logit > 0 ? logit / s.repetition : logit * s.repetition;
    count &= ~SEEN_IN_PROMPT;
    if (count) logit -= s.presence + s.frequency * count;
  }
  if (p.flags & BIASED) logit += bias[token];
  if ((p.flags & MASKED) && !(mask[token / 32] >> token % 32 & 1)) logit = MINUS_INFINITY;
  return logit;
}

// The first 64 bits of Philox4x64-10 (Salmon et al., SC'11, https://doi.org/10.1145/2063384.2063405) with key
// (seed, choice) and counter number + 1                                            sampling.philox_uniform
// numpy.random.Philox(key, counter=number) gives the same first.
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

template <class T, class Join>
__device__ __forceinline__ T block_reduce(T *of_warp, T v, Join join) {  // for every thread, in one order
  v = warp_reduce(v, join);
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = v;
  __syncthreads();
  return warp_reduce(of_warp[threadIdx.x % 32], join);
}

// Call f(logit) for each token in the words [begin, end) of the set, by one warp. If f returns false, the
// token leaves the set. Eight logits of a lane are on their way at a time.
template <class F>
__device__ __forceinline__ void each_of(unsigned *set, int begin, int end, const float *logits, F f) {
  int lane = threadIdx.x % 32;
  for (int first = begin; first < end; first += 32) {
    unsigned word = first + lane < end ? set[first + lane] : 0, some = __ballot_sync(ALL, word != 0);
    for (int j = 0; j < 32; j += 8) {
      if (!(some >> j & 255)) continue;
      bool is_in[8];
      float logit[8];
      UNROLLED for (int i = 0; i < 8; i++) {
        is_in[i] = __shfl_sync(ALL, word, j + i) >> lane & 1;
        logit[i] = is_in[i] ? logits[(first + j + i) * 32 + lane] : 0;
      }
      UNROLLED for (int i = 0; i < 8; i++) {
        unsigned stay = __ballot_sync(ALL, is_in[i] && f(logit[i]));
        if (lane == j + i) word = stay;
      }
    }
    if (first + lane < end) set[first + lane] = word;
  }
}

// Leave in the set the tokens nearest to the top: those within the least distance at which they weigh
// need(weight of all) or more together. That distance is found byte by byte from the highest: the weights are
// added up in bins, by the byte of the token's distance, and tokens with a greater byte leave in the next
// pass. Tokens that weigh nothing leave at once: most are that far off at a low temperature, all in the same
// bins.
template <class Distance, class Weight, class Need>
__device__ __forceinline__ void narrow(unsigned *set, const float *logits, Distance distance, Weight weight,
                                       Need need) {
  // A sum of 64 bits is two numbers: an atomic add to shared memory is one instruction for 32 bits, a loop
  // for 64.
  __shared__ unsigned low_of[256], high_of[256], found;
  __shared__ u64 rest;
  const int n = (MASK_WORDS + 31) / 32;  // of a warp
  int warp = threadIdx.x / 32;
  unsigned prefix = 0;
  for (int shift = 24; shift >= -8; shift -= 8) {
    if (threadIdx.x < 256) low_of[threadIdx.x] = high_of[threadIdx.x] = 0;
    __syncthreads();
    each_of(set, n * warp, min(n * warp + n, MASK_WORDS), logits, [&](float logit) {
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

// The token of the set in whose part of [0, sum of weights) the number u * sum / 2^64 lies  sampling.draw
template <class Weight>
__device__ __forceinline__ int draw(u64 u, unsigned *set, const float *logits, Weight weight) {
  __shared__ u64 of_warp[32];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, begin = 0, end = MASK_WORDS, n;
  u64 target = 0;
  do {  // each warp adds up a run of words; the run that the number lies in is cut in runs, down to a word
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
    if (begin == 0 && end == MASK_WORDS) target = __umul64hi(u, total);
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

// The token of each wanted row: the likeliest, or drawn under temperature, top_k, top_p and min_p
//                                                                                         sampling.pick_token
// Drafts before a row count as its output. A chosen token is counted, and `embed` takes it in the next step; if
// that step has the same rows one token later, its numbers are made here (ADVANCES): row i of the step is tile
// i and wanted row i then.
//   grid: n_wanted; block: PICK_THREADS; all threads enter
extern "C" __global__ void __launch_bounds__(PICK_THREADS, 1)
    pick(const float *raw, u64 *best, float *logits, const int *pick_rows, const float *settings, u64 *seeds,
         const unsigned *masks, unsigned *counts, const float *biases, int *chosen, int *choices, int *tokens,
         int *positions, int *tiles) {
  __shared__ u64 of_warp[32], raw_best;
  __shared__ double sum_of_warp[32];
  __shared__ unsigned set[MASK_WORDS];
  int row = blockIdx.x;
  const PickRow &p = *(const PickRow *)(pick_rows + row * PICK_ROW_WIDTH);  // not copied: registers are few
  const Settings s = *(const Settings *)(settings + row * SETTINGS_WIDTH);
  if (threadIdx.x == 0) raw_best = best[row], best[row] = 0;
  __syncthreads();
  if (p.slot < 0) return;
  size_t of_slot = (size_t)p.slot * VOCAB_SIZE;
  raw += (size_t)row * VOCAB_SIZE, logits += (size_t)row * VOCAB_SIZE;
  const float *used = raw;
  u64 used_best = raw_best;

  if (p.flags & (PENALISED | BIASED | MASKED)) {
    used_best = 0;
    for (int i = threadIdx.x; i < VOCAB_SIZE; i += PICK_THREADS) {
      float logit = penalised(raw[i], i, p, s, counts + of_slot, tokens, biases + of_slot,
                              masks + (size_t)row * MASK_WORDS);
      logits[i] = logit;
      used_best = max(used_best, rank_of(logit, i));
    }
    used_best = block_reduce(of_warp, used_best, Larger());
    used = logits;
  }
  int token = token_of(used_best);
  float top = used[token];
  if (raw_best == NO_NUMBER || used_best == NO_NUMBER || top == MINUS_INFINITY) {
    if (threadIdx.x == 0) choices[row * CHOICE_WIDTH] = -1;
    return;
  }
  if (s.sharpness > 0) {
    // How far a logit is below the top, in powers of two of the probability, of which 40 make it 0; as a
    // whole number, in units of 2^-26 of these
    auto below = [&](float logit) { return (top - logit) * s.sharpness; };
    auto distance = [&](float logit) { return (unsigned)fminf(below(logit) * 67108864.f, 4294967040.f); };
    auto weight = [&](float logit) {
      float q = exp2f(-below(logit));
      return q >= fminf(s.min_p, 1) ? (u64)(q * 1099511627776.f) : 0ull;
    };
    for (int i = threadIdx.x; i < MASK_WORDS; i += PICK_THREADS)
      set[i] = i < VOCAB_SIZE / 32 ? ALL : (1u << VOCAB_SIZE % 32) - 1;
    __syncthreads();
    if (p.top_k > 0 && p.top_k < VOCAB_SIZE)
      narrow(set, used, distance, [](float) { return 1ull; }, [&](u64 all) { return (u64)p.top_k; });
    if (s.top_p < 1)
      narrow(set, used, distance, weight, [&](u64 all) { return max((u64)((double)all * s.top_p), 1ull); });
    const u64 *seed = seeds + row * SEEDS_WIDTH;
    u64 u = philox(seed[0], seed[1], seed[2]) >> 11 << 11;  // 53 bits, as a double has them
    token = draw(u, set, used, weight);
  }
  choices += row * CHOICE_WIDTH;
  if (threadIdx.x == 0) {
    choices[0] = token;
    if (p.flags & CHAINS) {
      chosen[p.slot] = token;
      if (p.flags & PENALISED) counts[of_slot + token] += 1;
    }
    if (p.flags & ADVANCES) {
      tokens[row] = -1;
      positions[row] += 1;
      tiles[row * TILE_WIDTH + 1] += 1;  // Tile.start
      seeds[row * SEEDS_WIDTH + 2] += 1;
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
      if (rank_of(raw[i], i) < below) next = max(next, rank_of(raw[i], i));
    next = block_reduce(of_warp, next, Larger());
  }
}

// How often each token of a slot has come, which penalties are computed from      sampling.apply_penalties
//   history  (n,) int                          prompt, then output
//   counts   how often in the output; SEEN_IN_PROMPT: in the prompt
//   grid: 1; block: PICK_THREADS; all threads enter
extern "C" __global__ void __launch_bounds__(PICK_THREADS, 1)
    count(const int *history, unsigned *counts, int slot, int n_prompt, int n) {
  counts += (size_t)slot * VOCAB_SIZE;
  for (int i = threadIdx.x; i < VOCAB_SIZE; i += PICK_THREADS) counts[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += PICK_THREADS) {
    if (i < n_prompt) atomicOr(&counts[history[i]], SEEN_IN_PROMPT);
    else atomicAdd(&counts[history[i]], 1u);
  }
}

#if N_EXPERTS
// ---- Mixture of experts -----------------------------------------------------------------------------------
// x += sum of share * down(swiglu(gate_up(rms_norm(x)))) over the experts that a row has chosen
//                                                                                         NumpyOps.experts
//     rms_norm --> router --> route --> rms_norm of each pair's row --> expert_gate_up --> expert_down
//              --> add_experts
//
// A pair is a row and an expert that it has chosen. `route` puts the pairs of an expert side by side, a group;
// then a block has some columns of one expert and all rows of its group, up to TILES * 16 at a time, and reads
// its weights once for these. Experts that no row has chosen are not read.
//
// n_pairs is n_rows * N_CHOSEN; pair i is of row i / N_CHOSEN. For a kernel of experts w (N_EXPERTS, columns,
// size) is w_gate_up or w_down, or blocks and scales are, as MXFP4: 16 bytes and 1 byte for 32 numbers.

// scores = normed router^T + b_router
extern "C" __global__ void __launch_bounds__(THREADS)
    router(weight *router, weight *b_router, const bf16 *normed, float *scores, int n_rows) {
  linear<1, COLUMN_TILES>({router}, DIM, N_EXPERTS, n_rows, Rows<DIM>{normed}, nullptr, scores,
                          [&](int column, float *v) { return v[0] + bias(b_router, column); });
}

// The experts with the highest scores, of equals the first, and their shares                NumpyOps._route
//   grid: 1; block: PICK_THREADS; all threads enter
extern "C" __global__ void __launch_bounds__(PICK_THREADS, 1)
    route(const float *scores, int *experts, float *shares, int *places, int *pair_rows, int *groups,
          int n_rows) {
  __shared__ int begin_of[N_EXPERTS];
  int lane = threadIdx.x % 32, n_pairs = n_rows * N_CHOSEN;
  for (int row = threadIdx.x / 32; row < n_rows; row += PICK_THREADS / 32) {
    const float *score = scores + (size_t)row * N_EXPERTS;
    // A score that is not a number is the lowest, so that a row always has N_CHOSEN experts.
    auto finite = [&](int e) { return fminf(fmaxf(score[e], -MAX_FLOAT), MAX_FLOAT); };
    float top = 0, mine = 0, total = 0;  // lane i has the score of the expert that is chosen as i-th
    u64 last = NO_NUMBER;
    for (int i = 0; i < N_CHOSEN; i++) {
      u64 best = 0;
      for (int e = lane; e < N_EXPERTS; e += 32) {
        u64 rank = rank_of(finite(e), e);
        if (rank < last) best = max(best, rank);
      }
      last = best = warp_reduce(best, Larger());
      int e = token_of(best);
      if (i == 0) top = finite(e);
      if (lane == i) mine = finite(e), experts[row * N_CHOSEN + i] = e;
    }
    float of_mine = expf(mine - top);
    if (NORMALISED)
      for (int i = 0; i < N_CHOSEN; i++) total += __shfl_sync(ALL, of_mine, i);
    else {
      for (int e = lane; e < N_EXPERTS; e += 32) total += expf(finite(e) - top);
      total = warp_sum(total);
    }
    if (lane < N_CHOSEN) shares[row * N_CHOSEN + lane] = of_mine / total;
  }
  __syncthreads();
  int e = threadIdx.x, n_of_expert = 0;
  if (e < N_EXPERTS) {
    for (int pair = 0; pair < n_pairs; pair++) n_of_expert += experts[pair] == e;
    begin_of[e] = n_of_expert;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    int n_groups = 0, begin = 0;
    for (int i = 0; i < N_EXPERTS; i++) {
      int n = begin_of[i];
      begin_of[i] = begin;
      if (n) {
        int *group = groups + n_groups++ * GROUP_WIDTH;
        group[0] = i, group[1] = begin, group[2] = n;
      }
      begin += n;
    }
    for (; n_groups < min(N_EXPERTS, n_pairs); n_groups++) groups[n_groups * GROUP_WIDTH + 2] = 0;
  }
  __syncthreads();
  if (n_of_expert)
    for (int pair = 0, place = begin_of[e]; pair < n_pairs; pair++)
      if (experts[pair] == e) pair_rows[place] = pair / N_CHOSEN, places[pair] = place++;
}

// The matrices of the experts
struct ExpertMatrices {
  weight *w;
  packed *blocks, *scales;
  // Numbers k to k + 7 of a row, as they lie in memory, and the scale of MXFP4
  struct Eight {
    uint4 bits;
    int scale;
  };
  __device__ __forceinline__ Eight load(size_t row, int size, int k) const {
    Eight eight = {};
    if (PACKED) {
      eight.bits.x = *(const unsigned *)(blocks + (row * size + k) / 2);
      eight.scale = scales[(row * size + k) / 32];
    } else eight.bits = *(const uint4 *)(w + row * size + k);
    return eight;
  }
  // The number of a half byte, E2M1, times 2^(scale - 127), to which bfloat16 is exact. With exponent 126
  // before them, two bits of exponent and one of mantissa are f = 0.5, 0.75, 1, 1.5, ..., 6: the first two
  // mean 0 and 0.5, the others themselves.
  static __device__ __forceinline__ float number(unsigned half, float factor) {
    float f = __uint_as_float((126u << 23) + ((half & 7) << 22));
    float v = (f + fminf(f - 1, 0)) * factor;
    return half & 8 ? -v : v;
  }
  static __device__ __forceinline__ uint4 decoded(Eight eight) {
    if (!PACKED) return eight.bits;
    unsigned half = eight.bits.x;
    float factor = __uint_as_float(eight.scale ? (unsigned)eight.scale << 23 : 1u << 22);
    uint4 pairs = {pack(number(half, factor), number(half >> 4, factor)),
                   pack(number(half >> 8, factor), number(half >> 12, factor)),
                   pack(number(half >> 16, factor), number(half >> 20, factor)),
                   pack(number(half >> 24, factor), number(half >> 28, factor))};
    return pairs;
  }
};

// y[row, column] = value(column, sums of the MATRICES) for 8 columns of each matrix and up to TILES * 16 rows;
// sums as in linear(), part by part, so the bits of a row depend on no other. All threads enter.
//   first_row  of the matrix: row `column` of matrix m is first_row + m * n_columns + column
template <int MATRICES, int TILES, class T, class Value>
__device__ __forceinline__ void expert_linear(const ExpertMatrices &w, size_t first_row, int size, int n_columns,
                                              const bf16 *x, int n_rows, T *y, float4 *sums_of_warp,
                                              Value value) {
  const int STEPS = 4;  // whose weights are on their way at once
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int column = blockIdx.x * 8 + g, part = steps_sums(size), begin = warp * part * 32;
  int end = min(begin + part * 32, size);
  float sum[MATRICES][TILES][4] = {};
  for (int k0 = begin + t * 8; k0 - t * 8 < end; k0 += STEPS * 32) {
    ExpertMatrices::Eight ahead[STEPS][MATRICES];
    UNROLLED for (int s = 0; s < STEPS; s++)
      UNROLLED for (int m = 0; m < MATRICES; m++) {
        bool is_there = k0 + s * 32 < end && column < n_columns;
        ahead[s][m] = {};
        if (is_there) ahead[s][m] = w.load(first_row + m * n_columns + column, size, k0 + s * 32);
      }
    UNROLLED for (int s = 0; s < STEPS; s++) {
      int k = k0 + s * 32;
      if (k - t * 8 >= end) break;
      uint4 of_w[MATRICES];
      UNROLLED for (int m = 0; m < MATRICES; m++) of_w[m] = ExpertMatrices::decoded(ahead[s][m]);
      UNROLLED for (int r = 0; r < TILES; r++) {
        int row = r * 16 + g;
        uint4 low = k < end && row < n_rows ? *(const uint4 *)(x + (size_t)row * size + k) : uint4{};
        uint4 high = k < end && row + 8 < n_rows ? *(const uint4 *)(x + (size_t)(row + 8) * size + k) : uint4{};
        UNROLLED for (int m = 0; m < MATRICES; m++) multiply(sum[m][r], low, high, of_w[m]);
      }
    }
  }
  UNROLLED for (int m = 0; m < MATRICES; m++)
    UNROLLED for (int r = 0; r < TILES; r++) {
      float *d = sum[m][r];
      float4 v = {d[0], d[1], d[2], d[3]};
      sums_of_warp[((warp * MATRICES + m) * TILES + r) * 32 + lane] = v;
    }
  __syncthreads();
  for (int i = threadIdx.x; i < TILES * 16 * 8; i += THREADS) {
    int row = i / 8, of_eight = i % 8, y_column = blockIdx.x * 8 + of_eight;
    if (row >= n_rows || y_column >= n_columns) continue;
    int from = row % 8 * 16 + of_eight / 2 * 4 + row / 8 % 2 * 2 + of_eight % 2;
    float v[MATRICES];
    for (int m = 0; m < MATRICES; m++) {
      v[m] = 0;
      for (int j = 0; j < WARPS; j++)
        v[m] += ((const float *)(sums_of_warp + ((j * MATRICES + m) * TILES + row / 16) * 32))[from];
    }
    store(y + (size_t)row * n_columns + y_column, value(y_column, v));
  }
  __syncthreads();
}

// All rows of a group: one tile if they are 16 or fewer, else four at a time
template <int MATRICES, class T, class Value>
__device__ __forceinline__ void expert_group(const ExpertMatrices &w, const int *group, int size, int n_columns,
                                             const bf16 *x, T *y, Value value) {
  __shared__ float4 sums_of_warp[WARPS * MATRICES * 4 * 32];
  group += blockIdx.y * GROUP_WIDTH;
  int expert = group[0], first = group[1], n = group[2];
  size_t first_row = (size_t)expert * MATRICES * n_columns;
  auto of_expert = [&](int column, float *v) { return value(expert, column, v); };
  x += (size_t)first * size, y += (size_t)first * n_columns;
  if (n <= 16 && n > 0)
    expert_linear<MATRICES, 1>(w, first_row, size, n_columns, x, n, y, sums_of_warp, of_expert);
  else
    for (int row = 0; row < n; row += 64)
      expert_linear<MATRICES, 4>(w, first_row, size, n_columns, x + (size_t)row * size, min(64, n - row),
                                 y + (size_t)row * n_columns, sums_of_warp, of_expert);
}

// expert_h = swiglu(expert_x w^T + b_gate_up)                                            NumpyOps._swiglu
//   grid: EXPERT_DIM / 8, groups that there may be; block: THREADS; all threads enter
extern "C" __global__ void __launch_bounds__(THREADS)
    expert_gate_up(weight *w, packed *blocks, packed *scales, weight *b_gate_up, const bf16 *expert_x,
                   const int *groups, bf16 *expert_h) {
  ExpertMatrices matrices = {w, blocks, scales};
  expert_group<2>(matrices, groups, DIM, EXPERT_DIM, expert_x, expert_h, [&](int expert, int column, float *v) {
    weight *of_expert = b_gate_up ? b_gate_up + (size_t)expert * 2 * EXPERT_DIM : b_gate_up;
    float gate = v[0] + bias(of_expert, column), up = v[1] + bias(of_expert, EXPERT_DIM + column);
    if (!CLAMPED) return gate / (1 + expf(-gate)) * up;
    gate = fminf(gate, LIMIT);
    up = fminf(fmaxf(up, -LIMIT), LIMIT);
    return gate / (1 + expf(-ALPHA * gate)) * (up + 1);
  });
}

// expert_y = expert_h w^T + b_down
//   grid: DIM / 8, groups that there may be; block: THREADS; all threads enter
// Two blocks a processor, or ptxas spills to make room for a third (NVRTC 13.0, sm_90).
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    expert_down(weight *w, packed *blocks, packed *scales, weight *b_down, const bf16 *expert_h,
                const int *groups, float *expert_y) {
  ExpertMatrices matrices = {w, blocks, scales};
  expert_group<1>(matrices, groups, EXPERT_DIM, DIM, expert_h, expert_y, [&](int expert, int column, float *v) {
    return v[0] + bias(b_down ? b_down + (size_t)expert * DIM : b_down, column);
  });
}

// x += sum of share * expert_y over the pairs of a row, from the first to the last
//   grid: n_rows; block: THREADS
extern "C" __global__ void __launch_bounds__(THREADS)
    add_experts(const float *shares, const int *places, const float *expert_y, float *x) {
  int first = blockIdx.x * N_CHOSEN;
  for (int i = threadIdx.x; i < DIM; i += THREADS) {
    float sum = x[(size_t)blockIdx.x * DIM + i];
    for (int pair = first; pair < first + N_CHOSEN; pair++)
      sum += shares[pair] * expert_y[(size_t)places[pair] * DIM + i];
    x[(size_t)blockIdx.x * DIM + i] = sum;
  }
}
#endif  // N_EXPERTS
#endif  // ONE_TILE
