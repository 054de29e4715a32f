// The ops of model.py as plain CUDA C++, to be read before kernels.cu and to hold its fast kernels against.
//
//     embed --> [qkv --> rotate, write_kv, attend --> out --> gate_up --> down] x n_layers --> logits --> pick
//
// A thread computes one number by one loop, from the first term to the last: no shared memory, no barriers,
// no tensor cores. An op whose kernel of kernels.cu fails its check at the start runs by these (check.py): they
// have the same names, and take the same arrays.
//
// Authority: the function of model.py or sampling.py that each kernel names; CUDA C++ Programming Guide.
//
// Rules of this file:
// 1. It shares no code with kernels.cu: a reference that shares code with what it checks shares its mistakes.
// 2. Weights, activations, keys and values are bfloat16; the residual stream and every sum are float32.
//    Numbers are rounded to bfloat16 at the same places as in kernels.cu, without contraction (--fmad=false).
// 3. Threads share out the numbers of a kernel, whatever its grid: EACH(i, n). block: THREADS. Any thread may
//    leave at any time, for no thread waits for another.
//
// From the compilation (devices/kernels.py, -DNAME=value):
//   the model      DIM HIDDEN_DIM N_HEADS N_KV_HEADS GROUP HEAD_DIM QKV_DIM VOCAB_SIZE NORM_EPS
//   a cache page   PAGE HEAD_PAD
//   a row of pick  TILE_WIDTH MASK_WORDS PICK_ROW_WIDTH SETTINGS_WIDTH SEEDS_WIDTH CHOICE_WIDTH MAX_TOP
//   its flags      PENALISED BIASED MASKED CHAINS ADVANCES SEEN_IN_PROMPT
//   a block        THREADS
//   a mixture      N_EXPERTS N_CHOSEN EXPERT_DIM PACKED NORMALISED CLAMPED LIMIT ALPHA
//
// Axes: n_rows rows of the step, which are tokens of any sequences; n_pages KV cache pages of the pool;
// max_pages entries of a page table; max_batch slots, a running sequence each. Arrays are row-major.
//
// Not here: speed (kernels.cu), which rows a step has (scheduler.py).

#include <cuda_bf16.h>

typedef __nv_bfloat16 bf16;
typedef const __nv_bfloat16 weight;  // a number of the checkpoint: no kernel writes it
typedef const unsigned char packed;  // bytes of MXFP4 in the checkpoint
typedef unsigned long long u64;

#define MINUS_INFINITY __uint_as_float(0xff800000u)
#define MAX_FLOAT 3.4028235e38f

// For each i below n that is this thread's: with a grid of any size and shape
#define EACH(i, n)                                                                             \
  for (size_t block = blockIdx.x + gridDim.x * (blockIdx.y + (size_t)gridDim.y * blockIdx.z),  \
              n_blocks = (size_t)gridDim.x * gridDim.y * gridDim.z,                            \
              i = block * THREADS + threadIdx.x;                                               \
       i < (size_t)(n); i += n_blocks * THREADS)

__device__ float rounded(float v) { return __bfloat162float(__float2bfloat16(v)); }
__device__ float bias(weight *b, size_t i) { return b ? __bfloat162float(b[i]) : 0; }

// ---- Rows -------------------------------------------------------------------------------------------------

// x[row] = embed[token of the row]                                                        NumpyOps.embed
// If the host has not read the token yet (-1), it is the one that the slot has chosen last.
//   embed   (VOCAB_SIZE, DIM) bfloat16
//   tokens  (n_rows,) int32           -1: chosen[slot]
//   slots   (n_rows,) int32
//   chosen  (max_batch,) int32
//   x       (n_rows, DIM) float32     written
extern "C" __global__ void __launch_bounds__(THREADS)
    embed(weight *embed, const int *tokens, const int *slots, const int *chosen, float *x, int n_rows) {
  EACH(i, (size_t)n_rows * DIM) {
    int row = i / DIM, column = i % DIM;
    int token = tokens[row] < 0 ? chosen[slots[row]] : tokens[row];
    x[i] = __bfloat162float(embed[(size_t)token * DIM + column]);
  }
}

// sum of x[k] w[k]: x (size,) bfloat16, w a row of a matrix                               NumpyOps._linear
__device__ float product(const bf16 *x, weight *w, int size) {
  float sum = 0;
  for (int k = 0; k < size; k++) sum += __bfloat162float(x[k]) * __bfloat162float(w[k]);
  return sum;
}

// 1 / sqrt(mean(x^2) + eps): x (DIM,) float32                                             NumpyOps._rms_norm
__device__ float rms_scale(const float *x) {
  float sum = 0;
  for (int k = 0; k < DIM; k++) sum += x[k] * x[k];
  return rsqrtf(sum / DIM + NORM_EPS);
}

// The same product, of x normed: x * rms_scale(x) * norm is rounded once, as in kernels.cu. norm (DIM,) bfloat16
__device__ float normed_product(const float *x, weight *norm, weight *w) {
  float scale = rms_scale(x), sum = 0;
  for (int k = 0; k < DIM; k++)
    sum += rounded(x[k] * scale * __bfloat162float(norm[k])) * __bfloat162float(w[k]);
  return sum;
}

// qkv = rms_norm(x) wqkv^T + b                                                            NumpyOps.qkv
//   wqkv       (QKV_DIM, DIM) bfloat16
//   bqkv       (QKV_DIM,) bfloat16        null: no bias
//   attn_norm  (DIM,) bfloat16
//   x          (n_rows, DIM) float32
//   qkv        (n_rows, QKV_DIM) float32  written
extern "C" __global__ void __launch_bounds__(THREADS)
    qkv(weight *wqkv, weight *bqkv, weight *attn_norm, const float *x, float *qkv, int n_rows) {
  EACH(i, (size_t)n_rows * QKV_DIM) {
    size_t row = i / QKV_DIM, column = i % QKV_DIM;
    qkv[i] = normed_product(x + row * DIM, attn_norm, wqkv + column * DIM) + bias(bqkv, column);
  }
}

// x += y wo^T + b                                                                         NumpyOps.out
//   wo  (DIM, N_HEADS * HEAD_DIM) bfloat16
//   bo  (DIM,) bfloat16               null: no bias
//   y   (n_rows, N_HEADS * HEAD_DIM) bfloat16
//   x   (n_rows, DIM) float32         added to
extern "C" __global__ void __launch_bounds__(THREADS)
    out(weight *wo, weight *bo, const bf16 *y, float *x, int n_rows) {
  const int SIZE = N_HEADS * HEAD_DIM;
  EACH(i, (size_t)n_rows * DIM) {
    size_t row = i / DIM, column = i % DIM;
    x[i] += product(y + row * SIZE, wo + column * SIZE, SIZE) + bias(bo, column);
  }
}

// h = silu(gate) * up, silu(g) = g / (1 + exp(-g))                                        NumpyOps.gate_up
//   w_gate_up  (2 * HIDDEN_DIM, DIM) bfloat16: the rows of the gates, then those of the ups
//   b_gate_up  (2 * HIDDEN_DIM,) bfloat16      null: no bias
//   mlp_norm   (DIM,) bfloat16
//   x          (n_rows, DIM) float32
//   h          (n_rows, HIDDEN_DIM) bfloat16   written
extern "C" __global__ void __launch_bounds__(THREADS)
    gate_up(weight *w_gate_up, weight *b_gate_up, weight *mlp_norm, const float *x, bf16 *h, int n_rows) {
  EACH(i, (size_t)n_rows * HIDDEN_DIM) {
    const float *of_row = x + i / HIDDEN_DIM * DIM;
    size_t g = i % HIDDEN_DIM, u = HIDDEN_DIM + g;
    float gate = normed_product(of_row, mlp_norm, w_gate_up + g * DIM) + bias(b_gate_up, g);
    float up = normed_product(of_row, mlp_norm, w_gate_up + u * DIM) + bias(b_gate_up, u);
    h[i] = __float2bfloat16(gate / (1 + expf(-gate)) * up);
  }
}

// x += h w_down^T + b                                                                     NumpyOps.down
//   w_down  (DIM, HIDDEN_DIM) bfloat16
//   b_down  (DIM,) bfloat16           null: no bias
//   h       (n_rows, HIDDEN_DIM) bfloat16
//   x       (n_rows, DIM) float32     added to
extern "C" __global__ void __launch_bounds__(THREADS)
    down(weight *w_down, weight *b_down, const bf16 *h, float *x, int n_rows) {
  EACH(i, (size_t)n_rows * DIM) {
    size_t row = i / DIM, column = i % DIM;
    x[i] += product(h + row * HIDDEN_DIM, w_down + column * HIDDEN_DIM, HIDDEN_DIM) + bias(b_down, column);
  }
}

// What orders the tokens of a row: a larger logit is a larger number; of equals the first token has the larger
// one. A logit that is NaN or infinite has the largest of all: `pick` of kernels.cu looks for it.
__device__ u64 rank_of(float logit, int token) {
  if (!(logit <= MAX_FLOAT)) return ~0ull;
  unsigned bits = __float_as_uint(logit + 0.f);  // -0 becomes 0
  bits = bits >> 31 ? ~bits : bits | 1u << 31;
  return (u64)bits << 32 | (~0u - token);
}

// raw = rms_norm(x) head^T for the wanted rows                                            NumpyOps.logits
//   head    (VOCAB_SIZE, DIM) bfloat16
//   norm    (DIM,) bfloat16
//   x       (any, DIM) float32
//   wanted  (n_rows,) int32                   which rows of x
//   raw     (n_rows, VOCAB_SIZE) float32      written
//   best    (n_rows,) uint64                  becomes the greatest rank_of() of the row; 0 before
extern "C" __global__ void __launch_bounds__(THREADS)
    logits(weight *head, weight *norm, const float *x, const int *wanted, float *raw, u64 *best, int n_rows) {
  EACH(i, (size_t)n_rows * VOCAB_SIZE) {
    size_t row = i / VOCAB_SIZE, token = i % VOCAB_SIZE;
    raw[i] = normed_product(x + (size_t)wanted[row] * DIM, norm, head + token * DIM);
    atomicMax(&best[row], rank_of(raw[i], token));
  }
}

// ---- Attention over a paged KV cache ----------------------------------------------------------------------
//   qkv          (n_rows, QKV_DIM) float32              N_HEADS queries, N_KV_HEADS keys, N_KV_HEADS values
//   rope         (max_seq_len, HEAD_DIM / 2) complex64  cos + i sin of the angle of a pair of neighbours
//   keys         (n_pages, N_KV_HEADS, PAGE, HEAD_PAD) bfloat16
//   values       (n_pages, N_KV_HEADS, HEAD_PAD, PAGE) bfloat16, transposed: kernels.cu reads them so
//   positions    (n_rows,) int32                        -1: the row only pads the step
//   slots        (n_rows,) int32
//   page_tables  (max_batch, max_pages) int32           entry i: the page of positions PAGE * i and on

// The place in the pool of number k of a head's key, and of its value, for a sequence and a position
__device__ size_t key_at(const int *page_table, int kv_head, int position, int k) {
  size_t head = (size_t)page_table[position / PAGE] * N_KV_HEADS + kv_head;
  return (head * PAGE + position % PAGE) * HEAD_PAD + k;
}
__device__ size_t value_at(const int *page_table, int kv_head, int position, int k) {
  size_t head = (size_t)page_table[position / PAGE] * N_KV_HEADS + kv_head;
  return (head * HEAD_PAD + k) * PAGE + position % PAGE;
}

// v = v / sqrt(mean(v^2) + eps) * norm                                                    NumpyOps.attend
// (v[2j] + i v[2j + 1]) *= cos + i sin of pair j (RoPE)                                   model.rotate
// For each head of q and k, in place; then it is rounded.
//   q_norm, k_norm  (HEAD_DIM,) bfloat16         null: the model has none
//   rotary          0: this layer does not rotate
//   A thread has a whole head, over which the norm goes: n_rows * (N_HEADS + N_KV_HEADS)
extern "C" __global__ void __launch_bounds__(THREADS)
    rotate(float *qkv, weight *q_norm, weight *k_norm, const float2 *rope, const int *positions, int rotary,
           int n_rows) {
  EACH(i, n_rows * (N_HEADS + N_KV_HEADS)) {
    int row = i / (N_HEADS + N_KV_HEADS), head = i % (N_HEADS + N_KV_HEADS), position = positions[row];
    if (position < 0) continue;
    float *v = qkv + (size_t)row * QKV_DIM + head * HEAD_DIM;
    weight *norm = head < N_HEADS ? q_norm : k_norm;
    if (norm) {
      float sum = 0;
      for (int k = 0; k < HEAD_DIM; k++) sum += v[k] * v[k];
      float scale = rsqrtf(sum / HEAD_DIM + NORM_EPS);
      for (int k = 0; k < HEAD_DIM; k++) v[k] = v[k] * scale * __bfloat162float(norm[k]);
    }
    for (int k = 0; rotary && k < HEAD_DIM; k += 2) {
      float2 turn = rope[(size_t)position * (HEAD_DIM / 2) + k / 2];
      float a = v[k], b = v[k + 1];
      v[k] = a * turn.x - b * turn.y;
      v[k + 1] = a * turn.y + b * turn.x;
    }
    for (int k = 0; k < HEAD_DIM; k++) v[k] = __bfloat162float(__float2bfloat16(v[k]));
  }
}

// keys[page, kv_head, place] = k; values[page, kv_head, :, place] = v              NumpyOps.attend
// Writes the keys and values of the step's tokens to their pages.
//   qkv as `rotate` leaves it
//   A thread has a number of a key, and the same number of its value
extern "C" __global__ void __launch_bounds__(THREADS)
    write_kv(const float *qkv, bf16 *keys, bf16 *values, const int *positions, const int *slots,
             const int *page_tables, int max_pages, int n_rows) {
  EACH(i, (size_t)n_rows * N_KV_HEADS * HEAD_DIM) {
    int row = i / (N_KV_HEADS * HEAD_DIM), kv_head = i / HEAD_DIM % N_KV_HEADS, k = i % HEAD_DIM;
    int position = positions[row];
    if (position < 0) continue;
    const int *page_table = page_tables + (size_t)slots[row] * max_pages;
    const float *key = qkv + (size_t)row * QKV_DIM + (N_HEADS + kv_head) * HEAD_DIM;
    const float *value = key + N_KV_HEADS * HEAD_DIM;
    keys[key_at(page_table, kv_head, position, k)] = __float2bfloat16(key[k]);
    values[value_at(page_table, kv_head, position, k)] = __float2bfloat16(value[k]);
  }
}

// q k / sqrt(HEAD_DIM) of one head: q (HEAD_DIM,) float32, k (HEAD_DIM,) bfloat16
__device__ float score(const float *q, const bf16 *k) {
  float sum = 0;
  for (int i = 0; i < HEAD_DIM; i++) sum += q[i] * __bfloat162float(k[i]);
  return sum / sqrtf((float)HEAD_DIM);
}

// y = softmax(q k^T / sqrt(HEAD_DIM)) v over the positions that a token sees              NumpyOps._attention
// A thread goes through all keys twice: for the greatest score, then for the sums. A key's weight, e to the
// score less the greatest, is rounded in both sums, that of the weights and that of the values. (kernels.cu
// rounds it relative to another greatest score, that of the 32 keys around it.)
//   qkv as `rotate` leaves it, its keys and values in their pages
//   y       (n_rows, N_HEADS * HEAD_DIM) bfloat16, written
//   sinks   (N_HEADS,) bfloat16      a score of each head that no key has; null: none
//   window  of the layer: a token sees so many positions, itself included; 0: all
extern "C" __global__ void __launch_bounds__(THREADS)
    attend(const float *qkv, const bf16 *keys, const bf16 *values, const int *positions, const int *slots,
           const int *page_tables, weight *sinks, bf16 *y, int max_pages, int window, int n_rows) {
  EACH(i, (size_t)n_rows * N_HEADS * HEAD_DIM) {
    int row = i / (N_HEADS * HEAD_DIM), head = i / HEAD_DIM % N_HEADS, k = i % HEAD_DIM;
    int kv_head = head / GROUP, last = positions[row];
    if (last < 0) continue;
    int first = window ? max(0, last - window + 1) : 0;
    const float *q = qkv + (size_t)row * QKV_DIM + head * HEAD_DIM;
    const int *page_table = page_tables + (size_t)slots[row] * max_pages;

    float greatest = MINUS_INFINITY;
    for (int p = first; p <= last; p++)
      greatest = fmaxf(greatest, score(q, keys + key_at(page_table, kv_head, p, 0)));

    float sum = 0, out = 0;
    for (int p = first; p <= last; p++) {
      float e = expf(score(q, keys + key_at(page_table, kv_head, p, 0)) - greatest);
      float share = __bfloat162float(__float2bfloat16(e));
      sum += share;
      out += share * __bfloat162float(values[value_at(page_table, kv_head, p, k)]);
    }
    if (sinks) sum += expf(__bfloat162float(sinks[head]) - greatest);
    y[i] = __float2bfloat16(out / sum);
  }
}

// ---- Sampling ---------------------------------------------------------------------------------------------
// One thread chooses a row's token by going through the vocabulary again and again. A probability is a whole
// number, in units of 2^-40 of the likeliest token's, so sums are exact in any order.

// A logit after penalties, logit_bias and mask                                     sampling.apply_penalties
//   count       how often the token has come in the output; bit SEEN_IN_PROMPT: in the prompt
//   bias        logit_bias of the token
//   is_allowed  by the mask of the structured output
__device__ float penalised(float logit, unsigned count, float bias, bool is_allowed, int flags,
                           const float *settings) {
  float presence = settings[3], frequency = settings[4], repetition = settings[5];
  unsigned n_output = count & ~SEEN_IN_PROMPT;
  if (flags & PENALISED) {
    if (count > 0 && logit > 0) logit = logit / repetition;
    else if (count > 0) logit = logit * repetition;
    if (n_output > 0) logit -= presence + frequency * n_output;
  }
  if (flags & BIASED) logit += bias;
  if ((flags & MASKED) && !is_allowed) return MINUS_INFINITY;
  return logit;
}

// The first 64 bits of Philox4x64-10 (Salmon et al., SC'11, https://doi.org/10.1145/2063384.2063405) for the
// key (seed, choice) and the counter number + 1                                    sampling.philox_uniform
// numpy.random.Philox(key, counter=number) gives the same first.
__device__ u64 philox(u64 seed, u64 choice, u64 number) {
  const u64 MULTIPLIER[2] = {0xD2E7470EE14C6C93ull, 0xCA5A826395121157ull};
  const u64 KEY_STEP[2] = {0x9E3779B97F4A7C15ull, 0xBB67AE8584CAA73Bull};  // golden ratio, sqrt(3) - 1
  u64 counter[4] = {number + 1, number + 1 == 0, 0, 0};                    // with the carry of number + 1
  u64 key[2] = {seed, choice};
  for (int round = 0; round < 10; round++) {
    u64 mixed[4] = {__umul64hi(MULTIPLIER[1], counter[2]) ^ counter[1] ^ key[0], MULTIPLIER[1] * counter[2],
                    __umul64hi(MULTIPLIER[0], counter[0]) ^ counter[3] ^ key[1], MULTIPLIER[0] * counter[0]};
    for (int i = 0; i < 4; i++) counter[i] = mixed[i];
    for (int i = 0; i < 2; i++) key[i] += KEY_STEP[i];
  }
  return counter[0];
}

// The greatest logit such that the tokens from it upwards weigh `needed` or more; weight(i) of token i
template <class Weight>
__device__ float lowest_logit(const float *logits, u64 needed, Weight weight) {
  float lowest = -MINUS_INFINITY;
  for (u64 sum = 0; sum < needed;) {
    float next = MINUS_INFINITY;  // the greatest logit below the last one
    for (int i = 0; i < VOCAB_SIZE; i++)
      if (logits[i] < lowest) next = fmaxf(next, logits[i]);
    if (next == MINUS_INFINITY) break;
    for (int i = 0; i < VOCAB_SIZE; i++)
      if (logits[i] == next) sum += weight(i);
    lowest = next;
  }
  return lowest;
}

// The token of each wanted row: the likeliest, or drawn under temperature, top_k, top_p and min_p
//                                                                                         sampling.pick_token
//   raw        (n, VOCAB_SIZE) float32           the model's logits
//   logits     (n, VOCAB_SIZE) float32, written  after penalties, bias and mask
//   pick_rows  (n, PICK_ROW_WIDTH) int32         slot, -1: the row only pads the step; row of the step: the
//                                                first wanted one of its sequence; how many of these come
//                                                before this one; top_k; flags; n_top_logprobs, -1: none
//   settings   (n, SETTINGS_WIDTH) float32       log2(e) / temperature, 0: greedy; top_p; min_p; presence,
//                                                frequency and repetition penalty
//   seeds      (n, SEEDS_WIDTH) uint64           seed; choice; number of the output token
//   positions, tiles                             of the step: with ADVANCES row i, which is tile i, becomes that
//                                                of the next step
//   masks      (n, MASK_WORDS) uint32            a bit a token, 1: structured output allows it
//   tokens     (n_rows,) int32                   of the step: drafts before a row count as its output
//   counts     (max_batch, VOCAB_SIZE) uint32    of each slot's tokens; a chosen token is counted
//   biases     (max_batch, VOCAB_SIZE) float32   logit_bias
//   chosen     (max_batch,) int32, written       the token that `embed` takes in the next step
//   choices    (n, CHOICE_WIDTH) int32, written  token, -1: the logits are not finite; its logprob;
//                                                the MAX_TOP likeliest tokens; their logprobs, as float32
//   best       (n,) uint64                       of `logits`; 0 after it
// grid: n rows; the first thread of a block has the row, the others nothing to do
extern "C" __global__ void __launch_bounds__(THREADS)
    pick(const float *raw, u64 *best, float *logits, const int *pick_rows, const float *settings, u64 *seeds,
         const unsigned *masks, unsigned *counts, const float *biases, int *chosen, int *choices, int *tokens,
         int *positions, int *tiles) {
  int row = blockIdx.x;
  if (threadIdx.x) return;
  best[row] = 0;
  const int *of_row = pick_rows + row * PICK_ROW_WIDTH;
  int slot = of_row[0], first_row = of_row[1], n_before = of_row[2];
  int top_k = of_row[3], flags = of_row[4], n_top = of_row[5];
  if (slot < 0) return;
  raw += (size_t)row * VOCAB_SIZE;
  logits += (size_t)row * VOCAB_SIZE;
  masks += (size_t)row * MASK_WORDS;
  counts += (size_t)slot * VOCAB_SIZE;
  biases += (size_t)slot * VOCAB_SIZE;
  settings += row * SETTINGS_WIDTH;
  seeds += row * SEEDS_WIDTH;
  choices += row * CHOICE_WIDTH;
  float sharpness = settings[0], top_p = settings[1], min_p = settings[2];

  // Penalties; the likeliest token, of equals the first
  int token = 0;
  bool is_finite = true;
  float raw_top = MINUS_INFINITY;
  for (int i = 0; i < VOCAB_SIZE; i++) {
    is_finite = is_finite && raw[i] <= MAX_FLOAT;  // false for NaN too
    raw_top = fmaxf(raw_top, raw[i]);
    unsigned count = (flags & PENALISED) ? counts[i] : 0;
    for (int draft = 1; draft <= n_before; draft++)
      if (tokens[first_row + draft] == i) count++;
    float bias = (flags & BIASED) ? biases[i] : 0;
    bool is_allowed = (flags & MASKED) ? masks[i / 32] >> (i % 32) & 1 : true;
    logits[i] = penalised(raw[i], count, bias, is_allowed, flags, settings);
    if (logits[i] > logits[token]) token = i;
  }
  float top = logits[token];
  if (!is_finite || top == MINUS_INFINITY) {
    choices[0] = -1;
    return;
  }

  // The draw: tokens that top_k, top_p or min_p forbid weigh nothing
  if (sharpness > 0) {
    float least = MINUS_INFINITY;
    auto weight = [&](int i) {
      float q = exp2f((logits[i] - top) * sharpness);
      bool may_come = q >= fminf(min_p, 1) && logits[i] >= least;
      return may_come ? (u64)(q * 1099511627776.f) : 0ull;  // 2^40
    };
    auto total_weight = [&]() {
      u64 total = 0;
      for (int i = 0; i < VOCAB_SIZE; i++) total += weight(i);
      return total;
    };
    if (top_k > 0 && top_k < VOCAB_SIZE) least = lowest_logit(logits, top_k, [](int i) { return 1ull; });
    if (top_p < 1) {
      u64 needed = max((u64)((double)total_weight() * top_p), 1ull);
      least = fmaxf(least, lowest_logit(logits, needed, weight));
    }
    u64 random = philox(seeds[0], seeds[1], seeds[2]) >> 11 << 11;  // 53 bits, as a double has them
    u64 target = __umul64hi(random, total_weight());
    for (token = 0; weight(token) <= target; token++) target -= weight(token);
  }
  choices[0] = token;
  if (flags & CHAINS) chosen[slot] = token;
  if ((flags & CHAINS) && (flags & PENALISED)) counts[token] += 1;
  if (flags & ADVANCES) {
    tokens[row] = -1;
    positions[row] += 1;
    tiles[row * TILE_WIDTH + 1] += 1;
    seeds[2] += 1;
  }
  if (n_top < 0) return;

  // Logprobs: the model's own, before penalties
  double sum = 0;
  for (int i = 0; i < VOCAB_SIZE; i++) sum += expf(raw[i] - raw_top);
  float normaliser = log(sum);
  choices[1] = __float_as_int(raw[token] - raw_top - normaliser);
  for (int k = 0, last = -1; k < n_top; k++) {
    int next = -1;  // the likeliest after the last one; of equals the first
    for (int i = 0; i < VOCAB_SIZE; i++) {
      bool is_behind = last < 0 || raw[i] < raw[last] || (raw[i] == raw[last] && i > last);
      if (is_behind && (next < 0 || raw[i] > raw[next])) next = i;
    }
    choices[2 + k] = next;
    choices[2 + MAX_TOP + k] = __float_as_int(raw[next] - raw_top - normaliser);
    last = next;
  }
}

// How often each token of a slot has come                                          sampling.apply_penalties
//   history  (n,) int32                        prompt, then output
//   counts   how often in the output; SEEN_IN_PROMPT: in the prompt
//   A thread has a token
extern "C" __global__ void __launch_bounds__(THREADS)
    count(const int *history, unsigned *counts, int slot, int n_prompt, int n) {
  EACH(token, VOCAB_SIZE) {
    unsigned found = 0;
    for (int i = 0; i < n; i++)
      if (history[i] == (int)token) found = i < n_prompt ? found | SEEN_IN_PROMPT : found + 1;
    counts[(size_t)slot * VOCAB_SIZE + token] = found;
  }
}

#if N_EXPERTS
// ---- Mixture of experts -----------------------------------------------------------------------------------
// x += sum of share * down(swiglu(gate_up(rms_norm(x)))) over the experts that a row has chosen
//                                                                                         NumpyOps.experts
// A pair is a row and an expert that it has chosen: pair i is of row i / N_CHOSEN.
//   experts  (n_pairs,) int32
//   shares   (n_pairs,) float32

// scores = rms_norm(x) router^T + b
//   router    (N_EXPERTS, DIM) bfloat16
//   b_router  (N_EXPERTS,) bfloat16            null: no bias
//   scores    (n_rows, N_EXPERTS) float32      written
extern "C" __global__ void __launch_bounds__(THREADS)
    router(weight *router, weight *b_router, weight *mlp_norm, const float *x, float *scores, int n_rows) {
  EACH(i, n_rows * N_EXPERTS) {
    size_t row = i / N_EXPERTS, expert = i % N_EXPERTS;
    scores[i] = normed_product(x + row * DIM, mlp_norm, router + expert * DIM) + bias(b_router, expert);
  }
}

// The experts with the highest scores, of equals the first; a share is the softmax of a score, over those of
// the row or over all experts                                                                NumpyOps._route
//   scores  (n_rows, N_EXPERTS) float32       experts, shares  written
extern "C" __global__ void __launch_bounds__(THREADS)
    route(const float *scores, int *experts, float *shares, int n_rows) {
  EACH(row, n_rows) {
    const float *of_row = scores + row * N_EXPERTS;
    int *chosen = experts + row * N_CHOSEN;
    for (int i = 0; i < N_CHOSEN; i++) {
      int best = -1;
      for (int e = 0; e < N_EXPERTS; e++) {
        bool is_chosen = false;
        for (int j = 0; j < i; j++) is_chosen = is_chosen || chosen[j] == e;
        if (!is_chosen && (best < 0 || of_row[e] > of_row[best])) best = e;
      }
      chosen[i] = best;
    }
    float top = of_row[chosen[0]], total = 0;
    if (NORMALISED)
      for (int i = 0; i < N_CHOSEN; i++) total += expf(of_row[chosen[i]] - top);
    else
      for (int e = 0; e < N_EXPERTS; e++) total += expf(of_row[e] - top);
    for (int i = 0; i < N_CHOSEN; i++) shares[row * N_CHOSEN + i] = expf(of_row[chosen[i]] - top) / total;
  }
}

// Number k of a row of a matrix: bfloat16, or MXFP4, which has a scale for 32 numbers of 4 bits (E2M1): a sign,
// two bits of exponent e, one of mantissa m. The number is (2 + m) 2^(e - 2), with e = 0 it is m / 2: 0, 0.5, 1,
// 1.5, 2, 3, 4 or 6. A table of these would be an array in the memory of the device.
__device__ float number(weight *w, packed *blocks, packed *scales, size_t row, int size, int k) {
  size_t at = row * size + k;
  if (!PACKED) return __bfloat162float(w[at]);
  int half = k % 2 ? blocks[at / 2] >> 4 : blocks[at / 2] & 15, e = half >> 1 & 3, m = half & 1;
  float value = ldexpf(e ? 2 + m : m, max(e, 1) - 2 + scales[at / 32] - 127);
  return half & 8 ? -value : value;
}

// expert_h = silu(gate) * up, or with both clamped gate / (1 + exp(-ALPHA * gate)) * (up + 1)
//                                                                       NumpyOps._expert_linear, ._swiglu
//   w          (N_EXPERTS, 2 * EXPERT_DIM, DIM) bfloat16, or MXFP4: blocks, scales
//   b_gate_up  (N_EXPERTS, 2 * EXPERT_DIM) bfloat16   null: no bias
//   expert_h   (n_pairs, EXPERT_DIM) bfloat16, written
extern "C" __global__ void __launch_bounds__(THREADS)
    expert_gate_up(weight *w, packed *blocks, packed *scales, weight *b_gate_up, weight *mlp_norm, const float *x,
                   const int *experts, bf16 *expert_h, int n_rows) {
  EACH(i, (size_t)n_rows * N_CHOSEN * EXPERT_DIM) {
    size_t pair = i / EXPERT_DIM, g = (size_t)experts[pair] * 2 * EXPERT_DIM + i % EXPERT_DIM, u = g + EXPERT_DIM;
    const float *of_row = x + pair / N_CHOSEN * DIM;
    float scale = rms_scale(of_row), gate = 0, up = 0;
    for (int k = 0; k < DIM; k++) {
      float normed = rounded(of_row[k] * scale * __bfloat162float(mlp_norm[k]));
      gate += normed * number(w, blocks, scales, g, DIM, k);
      up += normed * number(w, blocks, scales, u, DIM, k);
    }
    gate += bias(b_gate_up, g);
    up += bias(b_gate_up, u);
    if (CLAMPED) {
      gate = fminf(gate, LIMIT);
      up = fminf(fmaxf(up, -LIMIT), LIMIT);
      expert_h[i] = __float2bfloat16(gate / (1 + expf(-ALPHA * gate)) * (up + 1));
    } else expert_h[i] = __float2bfloat16(gate / (1 + expf(-gate)) * up);
  }
}

// expert_y = expert_h w^T + b                                                        NumpyOps._expert_linear
//   w         (N_EXPERTS, DIM, EXPERT_DIM) bfloat16, or MXFP4: blocks, scales
//   b_down    (N_EXPERTS, DIM) bfloat16         null: no bias
//   expert_y  (n_pairs, DIM) float32, written
extern "C" __global__ void __launch_bounds__(THREADS)
    expert_down(weight *w, packed *blocks, packed *scales, weight *b_down, const bf16 *expert_h,
                const int *experts, float *expert_y, int n_rows) {
  EACH(i, (size_t)n_rows * N_CHOSEN * DIM) {
    size_t pair = i / DIM, row = (size_t)experts[pair] * DIM + i % DIM;
    const bf16 *h = expert_h + pair * EXPERT_DIM;
    float sum = 0;
    for (int k = 0; k < EXPERT_DIM; k++)
      sum += __bfloat162float(h[k]) * number(w, blocks, scales, row, EXPERT_DIM, k);
    expert_y[i] = sum + bias(b_down, row);
  }
}

// x += sum of share * expert_y over the pairs of a row
//   x  (n_rows, DIM) float32          added to
extern "C" __global__ void __launch_bounds__(THREADS)
    add_experts(const float *shares, const float *expert_y, float *x, int n_rows) {
  EACH(i, (size_t)n_rows * DIM)
    for (size_t pair = i / DIM * N_CHOSEN; pair < (i / DIM + 1) * N_CHOSEN; pair++)
      x[i] += shares[pair] * expert_y[pair * DIM + i % DIM];
}
#endif  // N_EXPERTS
