// Drives the row kernels under AddressSanitizer and UndefinedBehaviorSanitizer: buffers of exactly the documented
// sizes, every shape around the vector widths, shards of padding, logits that are huge, infinite or NaN. The gradient in
// place has to be the gradient out of place. Exits 0, or the sanitizer ends the program.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <vector>

extern "C" {
void swe_rl_row_stats(int, const void*, int64_t, int64_t, int64_t, const int64_t*, const void*, double, void*, int);
void swe_rl_row_grad(int, const void*, int64_t, int64_t, int64_t, const int64_t*, const void*, double, const void*,
                     void*, int);
}

namespace {

uint64_t state = 1;
uint64_t random_bits() { return state = state * 6364136223846793005u + 1442695040888963407u, state >> 33; }

template <typename T>
T random_logit() {
    const T infinity = std::numeric_limits<T>::infinity();
    const T special[] = {infinity,  -infinity, std::numeric_limits<T>::quiet_NaN(), std::numeric_limits<T>::max(),
                         std::numeric_limits<T>::lowest(), std::numeric_limits<T>::denorm_min(), T(0), T(-1e4)};
    if (random_bits() % 16 == 0) return special[random_bits() % 8];
    return T(random_bits() % 2000) / 100 - 10;
}

template <typename T>
bool check(int64_t rows, int64_t cols, int64_t valid, double softcap, int threads) {
    std::vector<T> logits(rows * cols), inverse(rows), stats(rows * 5), slopes(rows * 5), out(rows * cols);
    std::vector<int64_t> labels(rows);
    for (auto& logit : logits) logit = random_logit<T>();
    for (auto& one : inverse) one = T(random_bits() % 300 + 1) / 100;
    for (auto& label : labels) label = int64_t(random_bits() % (cols + 1)) - 1;
    const int wide = sizeof(T) == 8;
    swe_rl_row_stats(wide, logits.data(), rows, cols, valid, labels.data(), inverse.data(), softcap, stats.data(), threads);
    for (int64_t i = 0; i < rows; i++) {
        const T given[5] = {stats[5 * i], std::log(stats[5 * i + 1]), T(0.5), random_logit<T>(), T(-0.1)};
        std::memcpy(&slopes[5 * i], given, sizeof given);
    }
    const auto grad = [&](T* to) {
        swe_rl_row_grad(wide, logits.data(), rows, cols, valid, labels.data(), inverse.data(), softcap, slopes.data(), to,
                        threads);
    };
    grad(out.data());
    grad(logits.data());
    return rows == 0 || std::memcmp(out.data(), logits.data(), out.size() * sizeof(T)) == 0;
}

}  // namespace

int main() {
    for (int64_t rows = 0; rows <= 5; rows++)
        for (int64_t cols = 1; cols <= 70; cols++)
            for (int64_t valid = 0; valid <= cols; valid += cols < 8 || valid + 7 > cols ? 1 : 7)
                for (const double softcap : {0.0, 4.0})
                    if (!check<float>(rows, cols, valid, softcap, 2) || !check<double>(rows, cols, valid, softcap, 2)) {
                        std::printf("in place differs: %d rows, %d of %d columns\n", int(rows), int(valid), int(cols));
                        return 1;
                    }
    return check<float>(3, 5000, 4999, 0.0, 3) ? 0 : 1;  // more than a block of vectors
}
