// What changed between two versions of a 16-bit tensor (bf16), on the CPU: compare, apply, checksum.
//
// Plain C ABI, no torch headers, as head_rows.cpp. The format is described in swe_rl/ops/weight_delta.py, which also has
// the same functions in torch; weight_delta.cu has them for a GPU. All three agree bit by bit.

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC's own header leaves a value undefined on purpose
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#endif

namespace {

constexpr int64_t BLOCK = 256;  // elements that share a count; an offset inside of it is one byte
constexpr int64_t STEP = 32;    // elements compared at once: one bit of a mask each
constexpr uint64_t KEY = 0x9E3779B97F4A7C15ull;
constexpr uint64_t SPREAD = 0x0001000100010001ull;

// Bit i is set where old[i] and fresh[i] differ, of STEP elements.
inline uint32_t differing(const uint16_t* old, const uint16_t* fresh) {
#if defined(__AVX512BW__)
    return _mm512_cmpneq_epi16_mask(_mm512_loadu_si512(old), _mm512_loadu_si512(fresh));
#elif defined(__AVX2__)
    auto load = [](const uint16_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); };
    const __m256i low = _mm256_cmpeq_epi16(load(old), load(fresh));
    const __m256i high = _mm256_cmpeq_epi16(load(old + 16), load(fresh + 16));
    const __m256i equal = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xD8);  // packs works by half
    return ~static_cast<uint32_t>(_mm256_movemask_epi8(equal));
#else
    uint32_t mask = 0;
    for (int64_t word = 0; word < STEP; word += 4) {
        uint64_t a, b;
        std::memcpy(&a, old + word, 8);
        std::memcpy(&b, fresh + word, 8);
        if (a == b) continue;
        for (int64_t i = word; i < word + 4; ++i) mask |= static_cast<uint32_t>(old[i] != fresh[i]) << i;
    }
    return mask;
#endif
}

inline uint64_t hash_of(uint64_t key, uint16_t value) {
    const uint64_t mixed = key ^ (value * SPREAD);
    return (mixed & 0xFFFFFFFFull) * (mixed >> 32);
}

struct Out {
    uint8_t* offsets;
    uint16_t* values;
    int64_t count;
};

// The set bits of `mask`, whose bit 0 is element `first` of its block, become entries.
inline void take(uint32_t mask, int64_t first, const uint16_t* fresh, uint16_t* old, bool update, Out& out) {
    while (mask) {
        const int bit = __builtin_ctz(mask);
        mask &= mask - 1;
        out.offsets[out.count] = static_cast<uint8_t>(first + bit);
        out.values[out.count++] = fresh[bit];
        if (update) old[bit] = fresh[bit];
    }
}

}  // namespace

extern "C" {

// Writes counts [ceil(size / 256)], and for every element that differs its offset inside its block and its new value, in
// order; both need room for `size` entries. With `update`, old becomes fresh. Returns the number of entries.
int64_t swe_rl_delta_compare(uint16_t* old, const uint16_t* fresh, int64_t size, int update, int16_t* counts,
                             uint8_t* offsets, uint16_t* values) {
    Out out{offsets, values, 0};
    for (int64_t start = 0; start < size; start += BLOCK) {
        const int64_t end = start + BLOCK < size ? start + BLOCK : size, before = out.count;
        int64_t at = start;
        for (; at + STEP <= end; at += STEP)
            take(differing(old + at, fresh + at), at - start, fresh + at, old + at, update, out);
        uint32_t mask = 0;
        for (int64_t i = at; i < end; ++i) mask |= static_cast<uint32_t>(old[i] != fresh[i]) << (i - at);
        take(mask, at - start, fresh + at, old + at, update, out);
        counts[start / BLOCK] = static_cast<int16_t>(out.count - before);
    }
    return out.count;
}

// Writes the entries into target [size]. Returns 0, or -1 with nothing written if counts do not add up to `entries` or
// an offset lies behind the end.
int swe_rl_delta_apply(uint16_t* target, int64_t size, const int16_t* counts, const uint8_t* offsets,
                       const uint16_t* values, int64_t entries) {
    const int64_t blocks = (size + BLOCK - 1) / BLOCK;
    int64_t total = 0;
    for (int64_t block = 0; block < blocks; ++block) {
        if (counts[block] < 0 || counts[block] > BLOCK) return -1;
        total += counts[block];
    }
    if (total != entries) return -1;
    if (size % BLOCK) {
        for (int64_t i = entries - counts[blocks - 1]; i < entries; ++i)
            if (offsets[i] >= size % BLOCK) return -1;
    }
    for (int64_t block = 0; block < blocks; ++block) {
        uint16_t* to = target + block * BLOCK;
        for (int count = counts[block]; count > 0; --count) to[*offsets++] = *values++;
    }
    return 0;
}

// Sum of the hashes of values [size], whose first element is number `first` of its tensor.
uint64_t swe_rl_delta_checksum(const uint16_t* values, int64_t size, int64_t first) {
    int64_t i = 0;
    uint64_t key = (static_cast<uint64_t>(first) + 1) * KEY, sum = 0;
#if defined(__AVX512F__) && defined(__AVX512BW__)
    __m512i keys = _mm512_set_epi64(key + 7 * KEY, key + 6 * KEY, key + 5 * KEY, key + 4 * KEY, key + 3 * KEY,
                                    key + 2 * KEY, key + KEY, key);
    const __m512i next = _mm512_set1_epi64(8 * KEY);
    const __m512i lanes = _mm512_set_epi64(0x0908090809080908, 0x0100010001000100, 0x0908090809080908,
                                           0x0100010001000100, 0x0908090809080908, 0x0100010001000100,
                                           0x0908090809080908, 0x0100010001000100);  // the low word of each lane, 4 times
    __m512i sums = _mm512_setzero_si512();
    for (; i + 8 <= size; i += 8) {
        const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values + i));
        const __m512i mixed = _mm512_xor_si512(keys, _mm512_shuffle_epi8(_mm512_cvtepu16_epi64(narrow), lanes));
        sums = _mm512_add_epi64(sums, _mm512_mul_epu32(mixed, _mm512_srli_epi64(mixed, 32)));
        keys = _mm512_add_epi64(keys, next);
    }
    sum = static_cast<uint64_t>(_mm512_reduce_add_epi64(sums));
#elif defined(__AVX2__)
    __m256i keys = _mm256_set_epi64x(key + 3 * KEY, key + 2 * KEY, key + KEY, key);
    const __m256i next = _mm256_set1_epi64x(4 * KEY);
    const __m256i lanes = _mm256_set_epi64x(0x0908090809080908, 0x0100010001000100, 0x0908090809080908,
                                            0x0100010001000100);
    __m256i sums = _mm256_setzero_si256();
    for (; i + 4 <= size; i += 4) {
        const __m128i narrow = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(values + i));
        const __m256i mixed = _mm256_xor_si256(keys, _mm256_shuffle_epi8(_mm256_cvtepu16_epi64(narrow), lanes));
        sums = _mm256_add_epi64(sums, _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32)));
        keys = _mm256_add_epi64(keys, next);
    }
    uint64_t parts[4];
    std::memcpy(parts, &sums, sizeof parts);
    sum = parts[0] + parts[1] + parts[2] + parts[3];
#endif
    key += static_cast<uint64_t>(i) * KEY;
    for (; i < size; ++i, key += KEY) sum += hash_of(key, values[i]);
    return sum;
}
}
