// Row kernels of the policy-gradient head: everything between its matrix products, on the CPU.
//
// Plain C ABI, no torch headers: the library works with any Python and any torch, and builds in seconds. One thread
// owns a row from its first to its last column, so results do not depend on the number of threads. Meaning of the
// numbers: swe_rl/ops/row_stats.py. NaN logits give NaN results: a comparison keeps its NaN by the order of operands.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#define INLINE inline __attribute__((always_inline))

namespace {

constexpr int64_t BLOCK = 64;  // vectors summed in the row's own precision before they join a double
constexpr int STATS = 5;

// Explicit vectors, of the width that the target has: loops with exp do not vectorise by themselves, and wider ones
// than the target's are taken apart badly.
#if defined(__AVX512F__)
constexpr int WIDTH = 64;
#elif defined(__AVX2__)
constexpr int WIDTH = 32;
#else
constexpr int WIDTH = 16;
#endif
typedef float f32v __attribute__((vector_size(WIDTH)));
typedef int32_t i32v __attribute__((vector_size(WIDTH)));
typedef double f64v __attribute__((vector_size(WIDTH)));

template <typename T>
struct Of;
template <>
struct Of<float> {
    using Vec = f32v;
    static constexpr int LANES = WIDTH / 4;
    static constexpr float UNDERFLOW_AT = -104.0f;  // exp is 0 below
};
template <>
struct Of<double> {
    using Vec = f64v;
    static constexpr int LANES = WIDTH / 8;
    static constexpr double UNDERFLOW_AT = -746.0;
};

// A rounded product that no later sum may absorb into a fused multiply-add: the row's largest logit, rounded once, has
// to lie at distance 0 from itself, or probabilities above 1 come out.
template <typename V>
INLINE V rounded(V value) {
#if defined(__x86_64__)
    asm("" : "+v"(value));
#elif defined(__aarch64__)
    asm("" : "+w"(value));
#else
    asm("" : "+m"(value));
#endif
    return value;
}

// `bound` where x is above (or below) it, x elsewhere; NaN stays.
template <typename V, typename T>
INLINE V at_most(V x, T bound) {
    return bound < x ? V{} + bound : x;
}
template <typename V, typename T>
INLINE V at_least(V x, T bound) {
    return bound > x ? V{} + bound : x;
}

// exp for UNDERFLOW_AT <= x <= 0: 2^n e^r by Cody and Waite's reduction and a polynomial; relative error below 2e-7.
INLINE f32v exp_of(f32v x) {
    const i32v n = __builtin_convertvector(x * 1.44269504f - 0.5f, i32v);  // rounds, as x <= 0
    const f32v whole = __builtin_convertvector(n, f32v);
    const f32v r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    f32v p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const i32v half = n >> 1;  // two factors, as 2^n alone is no normal number below n = -126
    return p * (f32v)((half + 127) << 23) * (f32v)((n - half + 127) << 23);
}

INLINE f64v exp_of(f64v x) {
    f64v e;
    for (int k = 0; k < Of<double>::LANES; k++) e[k] = std::exp(x[k]);
    return e;
}

// Not inlined: one copy of the code gives one answer. Inlined twice, multiplications and additions are fused in
// different places, and the row's largest logit is not at distance 0 from itself.
__attribute__((noinline)) f32v tanh_of(f32v x) {
    const f32v size = x < 0.0f ? -x : x, square = x * x;
    f32v p = square * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * square - 5.37397155531e-2f;
    p = p * square + 1.33314422036e-1f;
    p = p * square - 3.33332819422e-1f;
    const f32v near = p * square * x + x;
    const f32v decay = exp_of(-2.0f * at_most(size, 40.0f));
    const f32v far = (1.0f - decay) / (1.0f + decay);
    return size < 0.625f ? near : (x < 0.0f ? -far : far);
}

INLINE f64v tanh_of(f64v x) {
    f64v t;
    for (int k = 0; k < Of<double>::LANES; k++) t[k] = std::tanh(x[k]);
    return t;
}

template <typename T>
INLINE typename Of<T>::Vec load(const T* from) {
    typename Of<T>::Vec v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

// The first `count` of a vector, then `fill`.
template <typename T>
INLINE typename Of<T>::Vec load_some(const T* from, int64_t count, T fill) {
    typename Of<T>::Vec v = typename Of<T>::Vec{} + fill;
    for (int64_t k = 0; k < count; k++) v[k] = from[k];
    return v;
}

// softcap tanh(x / softcap) / temperature, with tanh itself in `curve` for the derivative.
template <typename T, bool CAPPED>
INLINE typename Of<T>::Vec scaled(typename Of<T>::Vec logit, T inv_temperature, T softcap,
                                  typename Of<T>::Vec* curve) {
    if (!CAPPED) return rounded(logit * inv_temperature);
    *curve = tanh_of(logit / softcap);
    return rounded(*curve * softcap * inv_temperature);
}

template <typename T, bool CAPPED>
INLINE T scaled_one(T logit, T inv_temperature, T softcap) {  // by the same instructions as a whole vector
    typename Of<T>::Vec curve;
    return scaled<T, CAPPED>(typename Of<T>::Vec{} + logit, inv_temperature, softcap, &curve)[0];
}

// Ignores NaN, which the sums then show.
template <typename T>
INLINE T largest(const T* row, int64_t valid) {
    using Vec = typename Of<T>::Vec;
    constexpr int LANES = Of<T>::LANES;
    const T none = -std::numeric_limits<T>::infinity();
    Vec a = Vec{} + none, b = a;
    int64_t j = 0;
    for (; j + 2 * LANES <= valid; j += 2 * LANES) {
        const Vec x = load(row + j), y = load(row + j + LANES);
        a = x > a ? x : a, b = y > b ? y : b;
    }
    a = b > a ? b : a;
    T top = none;
    for (int k = 0; k < LANES; k++) top = a[k] > top ? a[k] : top;
    for (; j < valid; j++) top = row[j] > top ? row[j] : top;
    return top;
}

template <typename T>
struct Sums {
    typename Of<T>::Vec s = {}, t = {}, q = {};
    INLINE void add(typename Of<T>::Vec distance) {  // of a logit to the row's largest one
        const auto d = at_least(at_most(distance, T(0)), Of<T>::UNDERFLOW_AT);
        const auto e = exp_of(d);
        s += e, t += e * d, q += e * e;
    }
};

template <typename T, bool CAPPED>
INLINE void row_stats(const T* row, int64_t valid, int64_t label, T inv_temperature, T softcap, T* out) {
    using Vec = typename Of<T>::Vec;
    constexpr int LANES = Of<T>::LANES;
    const T none = -std::numeric_limits<T>::infinity();
    // Scaling is monotonic: the largest logit is the largest scaled one.
    const T top = valid ? scaled_one<T, CAPPED>(largest(row, valid), inv_temperature, softcap) : none;
    const T origin = top > none ? top : T(0);  // nothing but -inf (or NaN): sums of 0 (or NaN)
    double sum = 0, weighted = 0, squares = 0;
    Vec curve;
    for (int64_t start = 0; start < valid; start += BLOCK * LANES) {
        const int64_t stop = std::min(start + BLOCK * LANES, valid);
        Sums<T> part;
        int64_t j = start;
        for (; j + LANES <= stop; j += LANES)
            part.add(scaled<T, CAPPED>(load(row + j), inv_temperature, softcap, &curve) - origin);
        if (j < stop) {
            const Vec last = load_some(row + j, stop - j, T(0));
            Vec distance = scaled<T, CAPPED>(last, inv_temperature, softcap, &curve) - origin;
            for (int64_t k = stop - j; k < LANES; k++) distance[k] = Of<T>::UNDERFLOW_AT;
            part.add(distance);
        }
        for (int k = 0; k < LANES; k++) sum += part.s[k], weighted += part.t[k], squares += part.q[k];
    }
    const bool here = label >= 0 && label < valid;
    out[0] = top, out[1] = T(sum), out[2] = T(weighted), out[3] = T(squares);
    out[4] = here ? scaled_one<T, CAPPED>(row[label], inv_temperature, softcap) : none;
}

template <typename T, bool CAPPED>
INLINE typename Of<T>::Vec grad_of_logits(typename Of<T>::Vec logit, T inv_temperature, T softcap, const T* slopes,
                                          T at_label) {
    using Vec = typename Of<T>::Vec;
    Vec curve;
    Vec logp = scaled<T, CAPPED>(logit, inv_temperature, softcap, &curve) - slopes[0] - slopes[1];
    logp = at_least(at_most(logp, T(0)), Of<T>::UNDERFLOW_AT);
    const Vec outer = exp_of(logp) * (slopes[3] + slopes[4] * logp) + at_label;
    return outer * inv_temperature * (CAPPED ? T(1) - curve * curve : Vec{} + T(1));
}

template <typename T, bool CAPPED>
INLINE void row_grad(const T* row, int64_t cols, int64_t valid, int64_t label, T inv_temperature, T softcap,
                     const T* slopes, T* out) {
    using Vec = typename Of<T>::Vec;
    constexpr int LANES = Of<T>::LANES;
    T at_label = 0;
    const bool here = label >= 0 && label < valid;
    if (here)
        at_label = grad_of_logits<T, CAPPED>(Vec{} + row[label], inv_temperature, softcap, slopes, slopes[2])[0];
    int64_t j = 0;
    for (; j + LANES <= valid; j += LANES) {
        const Vec grad = grad_of_logits<T, CAPPED>(load(row + j), inv_temperature, softcap, slopes, T(0));
        std::memcpy(out + j, &grad, sizeof grad);
    }
    if (j < valid) {
        const Vec last = load_some(row + j, valid - j, T(0));
        const Vec grad = grad_of_logits<T, CAPPED>(last, inv_temperature, softcap, slopes, T(0));
        for (int64_t k = 0; j + k < valid; k++) out[j + k] = grad[k];
    }
    for (j = valid; j < cols; j++) out[j] = 0;
    if (here) out[label] = at_label;
}

// Rows [first, last) of one call.
struct Job {
    const void *logits, *inv_temperature, *slopes;
    const int64_t* labels;
    void* out;
    int64_t cols, valid;
    double softcap;
};

template <typename T>
void stats_of(const Job& job, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
        const T* row = static_cast<const T*>(job.logits) + i * job.cols;
        const T inv = static_cast<const T*>(job.inv_temperature)[i];
        T* out = static_cast<T*>(job.out) + i * STATS;
        if (job.softcap > 0)
            row_stats<T, true>(row, job.valid, job.labels[i], inv, T(job.softcap), out);
        else
            row_stats<T, false>(row, job.valid, job.labels[i], inv, T(1), out);
    }
}

template <typename T>
void grad_of(const Job& job, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
        const T* row = static_cast<const T*>(job.logits) + i * job.cols;
        const T inv = static_cast<const T*>(job.inv_temperature)[i];
        const T* slopes = static_cast<const T*>(job.slopes) + i * STATS;
        T* out = static_cast<T*>(job.out) + i * job.cols;
        if (job.softcap > 0)
            row_grad<T, true>(row, job.cols, job.valid, job.labels[i], inv, T(job.softcap), slopes, out);
        else
            row_grad<T, false>(row, job.cols, job.valid, job.labels[i], inv, T(1), slopes, out);
    }
}

template <typename Work>
void over_rows(const Work& work, const Job& job, int64_t rows, int threads) {
    const int64_t count = std::max<int64_t>(1, std::min<int64_t>(threads, rows));
    std::vector<std::thread> others;
    for (int64_t part = 1; part < count; part++)
        others.emplace_back([&, part] { work(job, rows * part / count, rows * (part + 1) / count); });
    work(job, 0, rows / count);
    for (auto& other : others) other.join();
}

}  // namespace

extern "C" {

// logits [rows, cols] contiguous, fp32 or (is_double) fp64; labels [rows], -1 where another shard has it; columns from
// `valid` on count as -inf. Writes out [rows, 5] in the same precision.
void swe_rl_row_stats(int is_double, const void* logits, int64_t rows, int64_t cols, int64_t valid,
                      const int64_t* labels, const void* inv_temperature, double softcap, void* out, int threads) {
    const Job job{logits, inv_temperature, nullptr, labels, out, cols, valid, softcap};
    over_rows(is_double ? stats_of<double> : stats_of<float>, job, rows, threads);
}

// Writes out [rows, cols] = dloss/dlogits from slopes [rows, 5]; `out` may be `logits`.
void swe_rl_row_grad(int is_double, const void* logits, int64_t rows, int64_t cols, int64_t valid,
                     const int64_t* labels, const void* inv_temperature, double softcap, const void* slopes, void* out,
                     int threads) {
    const Job job{logits, inv_temperature, slopes, labels, out, cols, valid, softcap};
    over_rows(is_double ? grad_of<double> : grad_of<float>, job, rows, threads);
}
}
