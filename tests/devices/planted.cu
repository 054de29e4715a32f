// Two kernels for test_emulator.py, which plants faults in them, a line at a time.

typedef __nv_bfloat16 bf16;
typedef const __nv_bfloat16 weight;

// y[0] = sum of x[i] * w[i], by blocks of 64; the last block to finish adds up what the blocks left in `part`
extern "C" __global__ void __launch_bounds__(64) total(weight *w, const float *x, float *part, int *n_done,
                                                       float *y, int n) {
  __shared__ float of_warp[2];
  __shared__ int is_last;
  int i = blockIdx.x * 64 + threadIdx.x;
  float factor = i < n ? __bfloat162float(w[i]) : 0;
  float sum = i < n ? x[i] * factor : 0;
  for (int m = 16; m; m /= 2) sum += __shfl_xor_sync(~0u, sum, m);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
  __syncthreads();  // 1
  if (threadIdx.x == 40) part[blockIdx.x] = of_warp[0] + of_warp[1];
  __syncthreads();  // 2
  if (threadIdx.x == 0) __threadfence();  // there
  if (threadIdx.x == 0) is_last = atomicAdd(n_done, 1) == gridDim.x - 1;
  if (threadIdx.x == 0) __threadfence();  // here
  __syncthreads();  // 3
  if (!is_last) return;
  if (threadIdx.x == 33) {
    float all = 0;
    for (int b = 0; b < gridDim.x; b++) all += part[b];
    y[0] = all;
    n_done[0] = 0;
  }
}

// y[i] = sum of the 4 numbers x[4 (63 - i)] and of those 256, 512, ... behind them, by copies one round ahead
extern "C" __global__ void __launch_bounds__(64) rounds(const float *x, float *y, int n) {
  __shared__ uint4 round[2][64];
  int at = threadIdx.x * 4;
  if (threadIdx.x == 0) prefetch(x, n * 4);
  begin_copy(&round[0][threadIdx.x], x + at, at < n);
  end_copies();
  float sum = 0;
  for (int i = 0; i * 256 < n; i++) {
    at += 256;
    begin_copy(&round[(i + 1) % 2][threadIdx.x], x + at, at < n);
    end_copies();  // of the next round
    await_copies<1>();
    __syncthreads();  // 1
    uint4 v = round[i % 2][63 - threadIdx.x];
    sum += __uint_as_float(v.x) + __uint_as_float(v.y) + __uint_as_float(v.z) + __uint_as_float(v.w);
    __syncthreads();  // 2
  }
  await_copies<0>();
  y[threadIdx.x] = sum;
}
