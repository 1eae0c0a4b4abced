// weight_delta.cpp on a GPU: the same functions, the same bits. Plain C ABI; every function only queues work on `stream`
// and returns a CUDA error code.
//
// A warp owns a block of 256 elements: each lane loads 8 elements of either version (16 bytes), the differing ones are a
// mask of 8 bits, and a scan over the lanes' counts says where each writes. Finding and writing are two passes, with the
// sum over counts (by the caller) between them. Bytes moved per element: 4 to find, 4 to write, and 3 per entry.
// Nothing is added in floating point and no result depends on an order: the atomic sum of checksums is an integer's.

#include <cstdint>

#include <cuda_runtime.h>

namespace {

constexpr int BLOCK = 256;  // elements that share a count
constexpr int LANE = 8;     // elements of one lane
constexpr int WARPS = 8;    // warps of a thread block
constexpr unsigned FULL = 0xFFFFFFFFu;
constexpr uint64_t KEY = 0x9E3779B97F4A7C15ull;
constexpr uint64_t SPREAD = 0x0001000100010001ull;

struct Eight {
    uint16_t at[LANE];
};

// Elements [start, start + 8) of values [size]; zeros behind the end.
__device__ __forceinline__ Eight load(const uint16_t* values, int64_t start, int64_t size) {
    Eight out;
    if (start + LANE <= size && (reinterpret_cast<uintptr_t>(values + start) & 15) == 0) {
        const uint4 words = *reinterpret_cast<const uint4*>(values + start);
        const uint32_t parts[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < LANE; ++i) out.at[i] = static_cast<uint16_t>(parts[i / 2] >> (16 * (i % 2)));
    } else {
#pragma unroll
        for (int i = 0; i < LANE; ++i) out.at[i] = start + i < size ? values[start + i] : 0;
    }
    return out;
}

// Bit i is set where element i differs; elements behind the end are zeros in both.
__device__ __forceinline__ unsigned differing(const Eight& old, const Eight& fresh) {
    unsigned mask = 0;
#pragma unroll
    for (int i = 0; i < LANE; ++i) mask |= static_cast<unsigned>(old.at[i] != fresh.at[i]) << i;
    return mask;
}

__device__ __forceinline__ int64_t own_block() {
    return static_cast<int64_t>(blockIdx.x) * WARPS + threadIdx.x / 32;
}

__global__ void count_kernel(const uint16_t* old, const uint16_t* fresh, int64_t size, int16_t* counts) {
    const int64_t block = own_block(), start = block * BLOCK + (threadIdx.x % 32) * LANE;
    if (block * BLOCK >= size) return;
    const int own = __popc(differing(load(old, start, size), load(fresh, start, size)));
    const int total = __reduce_add_sync(FULL, own);
    if (threadIdx.x % 32 == 0) counts[block] = static_cast<int16_t>(total);
}

// ends [blocks]: inclusive sum of counts.
__global__ void fill_kernel(uint16_t* old, const uint16_t* fresh, int64_t size, int update, const int16_t* counts,
                            const int64_t* ends, uint8_t* offsets, uint16_t* values) {
    const int lane = threadIdx.x % 32;
    const int64_t block = own_block(), start = block * BLOCK + lane * LANE;
    if (block * BLOCK >= size || counts[block] == 0) return;
    const Eight now = load(fresh, start, size);
    const unsigned mask = differing(load(old, start, size), now);
    int before = __popc(mask);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(FULL, before, step);
        if (lane >= step) before += other;
    }
    int64_t to = ends[block] - counts[block] + before - __popc(mask);
#pragma unroll
    for (int i = 0; i < LANE; ++i) {
        if (mask >> i & 1) {
            offsets[to] = static_cast<uint8_t>(lane * LANE + i);
            values[to++] = now.at[i];
            if (update) old[start + i] = now.at[i];
        }
    }
}

__global__ void apply_kernel(uint16_t* target, int64_t size, const int16_t* counts, const int64_t* ends,
                             const uint8_t* offsets, const uint16_t* values) {
    const int64_t block = own_block();
    if (block * BLOCK >= size) return;
    const int64_t end = ends[block];
    for (int64_t entry = end - counts[block] + threadIdx.x % 32; entry < end; entry += 32)
        target[block * BLOCK + offsets[entry]] = values[entry];
}

__global__ void checksum_kernel(const uint16_t* values, int64_t size, int64_t first, unsigned long long* out) {
    uint64_t sum = 0;
    const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x * LANE;
    for (int64_t start = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * LANE; start < size;
         start += stride) {
        const Eight own = load(values, start, size);
        uint64_t key = (static_cast<uint64_t>(first + start) + 1) * KEY;
#pragma unroll
        for (int i = 0; i < LANE; ++i, key += KEY) {
            const uint64_t mixed = key ^ (own.at[i] * SPREAD);
            if (start + i < size) sum += (mixed & 0xFFFFFFFFull) * (mixed >> 32);
        }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(FULL, sum, step);
    if (threadIdx.x % 32 == 0) atomicAdd(out, static_cast<unsigned long long>(sum));
}

unsigned grid(int64_t size) {
    return static_cast<unsigned>((size + BLOCK * WARPS - 1) / (BLOCK * WARPS));
}

}  // namespace

extern "C" {

// counts [ceil(size / 256)]: how many elements of each block differ.
int swe_rl_delta_cuda_count(const uint16_t* old, const uint16_t* fresh, int64_t size, int16_t* counts, void* stream) {
    if (size > 0) count_kernel<<<grid(size), 32 * WARPS, 0, static_cast<cudaStream_t>(stream)>>>(old, fresh, size, counts);
    return cudaGetLastError();
}

// offsets and values [ends[-1]] of the elements that differ; with `update`, old becomes fresh.
int swe_rl_delta_cuda_fill(uint16_t* old, const uint16_t* fresh, int64_t size, int update, const int16_t* counts,
                           const int64_t* ends, uint8_t* offsets, uint16_t* values, void* stream) {
    if (size > 0)
        fill_kernel<<<grid(size), 32 * WARPS, 0, static_cast<cudaStream_t>(stream)>>>(old, fresh, size, update, counts,
                                                                                    ends, offsets, values);
    return cudaGetLastError();
}

// The caller has checked that counts, offsets and values belong together.
int swe_rl_delta_cuda_apply(uint16_t* target, int64_t size, const int16_t* counts, const int64_t* ends,
                            const uint8_t* offsets, const uint16_t* values, void* stream) {
    if (size > 0)
        apply_kernel<<<grid(size), 32 * WARPS, 0, static_cast<cudaStream_t>(stream)>>>(target, size, counts, ends, offsets,
                                                                                    values);
    return cudaGetLastError();
}

// Adds the checksum of values [size] to *out.
int swe_rl_delta_cuda_checksum(const uint16_t* values, int64_t size, int64_t first, unsigned long long* out,
                               void* stream) {
    const unsigned blocks = grid(size) < 4096 ? grid(size) : 4096;
    if (size > 0)
        checksum_kernel<<<blocks, 32 * WARPS, 0, static_cast<cudaStream_t>(stream)>>>(values, size, first, out);
    return cudaGetLastError();
}
}
