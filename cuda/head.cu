// The head reduction: from a row of logits (V) to all its products, reading the row about once.
//
// A sample of the row's columns gives a threshold that at least k logits reach: the k-th largest of
// the maxima of STRIPES disjoint sets of them. One pass over the row then keeps the logits that
// reach it, more than k, as candidates, and sums exp(z - highest of the sample) over all others:
// the tail, directly. None of those is above the highest of the sample, so nothing overflows.
// Sorting the candidates by (logit, lower id first) gives the top-k in the one order that exists,
// so that how they came into the buffer doesn't matter. Should they not fit the buffer, the sample
// is the whole row; and should they not fit even so (a crowd of equal logits), the k-th largest key
// is found exactly, by its digits.
//
// One block of 512 threads a row. The bits of a row depend on that row alone.
#include "keys.cuh"

constexpr int THREADS = 512;
constexpr int LANES = 4;  // columns a thread reads together, each the start of a stripe
constexpr int STRIPES = THREADS * LANES;
constexpr int CANDIDATES = 2048;  // a power of two, at least twice the most k
constexpr int DIGIT_BITS = 8;
constexpr int DIGITS = 1 << DIGIT_BITS;
constexpr int AHEAD = 4;  // pieces of LANES columns that a thread reads before it looks at them
constexpr int SAMPLE_LEAST = 4;  // runs of STRIPES columns in a sample, where there are so many

// As in the backend's LogitRule.
struct LogitRule {
    int width;       // numbers from one row of logits to the next
    int vocab;       // that take part
    int vocab_real;  // from here to `vocab` is padding
    float scale;
    float cap;  // 0 for none
    int k;      // at most 1,024, and `vocab`
};

struct HeadRows {
    int* ids;            // (R, K), best first; equal logits by lower id
    f32* logp;           // (R, K)
    f32* tail;           // (R)
    f32* target_logp;    // (R)
    int* target_rank;    // (R)
    f32* logsumexp;      // (R)
    f32* entropy;        // (R)
    f32* padded_mass;    // (R)
    unsigned char* bad;  // (R), 1 for a row with NaN or +inf, or without a finite logit
};

struct Shared {
    u64 candidates[CANDIDATES];
    double spare[32];
    unsigned histogram[DIGITS];
    float stripe_max[STRIPES];
    int count;
    u64 prefix;
    int rank;
};

// A logit as the head leaves it. Adding 0 makes -0 the 0 that it equals.
DEVICE float finished(const LogitRule& rule, float z) {
    z *= rule.scale;
    // A NaN and an infinity must still be seen after the cap.
    if (rule.cap != 0.0f && fabsf(z) < __uint_as_float(0x7f800000u)) z = soft_cap(z, rule.cap);
    return z + 0.0f;
}

// LANES logits side by side from `at` on; -inf beyond the vocabulary.
DEVICE void read_columns(float (&z)[LANES], const f32* row, const LogitRule& rule, int at) {
    if (rule.width % LANES == 0 && at + LANES <= rule.vocab) {
        const float4 raw = *reinterpret_cast<const float4*>(row + at);
        z[0] = raw.x, z[1] = raw.y, z[2] = raw.z, z[3] = raw.w;
    } else {
        UNROLL
        for (int i = 0; i < LANES; i++)
            z[i] = at + i < rule.vocab ? row[at + i] : NEGATIVE_INFINITY;
    }
}

// Calls f(first id, logits) for this thread's columns of the row, LANES side by side at a time, in
// every `every`-th run of STRIPES columns.
template <class F>
DEVICE void for_columns(const f32* row, const LogitRule& rule, int every, F f) {
    const int step = STRIPES * every;
    for (int at = threadIdx.x * LANES; at < rule.vocab; at += AHEAD * step) {
        float z[AHEAD][LANES];
        UNROLL
        for (int i = 0; i < AHEAD; i++) read_columns(z[i], row, rule, at + i * step);
        if (rule.cap != 0.0f)
            UNROLL
            for (int i = 0; i < AHEAD * LANES; i++)
                z[i / LANES][i % LANES] = finished(rule, z[i / LANES][i % LANES]);
        else
            UNROLL
            for (int i = 0; i < AHEAD * LANES; i++) z[i / LANES][i % LANES] *= rule.scale;
        UNROLL
        for (int i = 0; i < AHEAD; i++) f(at + i * step, z[i]);
    }
}

// The highest of every `every`-th run of columns; leaves the maxima of its stripes.
DEVICE float sample(const f32* row, const LogitRule& rule, int every, Shared& s) {
    float highest[LANES];
    UNROLL
    for (int i = 0; i < LANES; i++) highest[i] = NEGATIVE_INFINITY;
    for_columns(row, rule, every, [&](int, const float(&z)[LANES]) {
        UNROLL
        for (int i = 0; i < LANES; i++) highest[i] = fmaxf(highest[i], z[i]);
    });
    UNROLL
    for (int i = 0; i < LANES; i++) s.stripe_max[threadIdx.x * LANES + i] = highest[i] + 0.0f;
    const float most = fmaxf(fmaxf(highest[0], highest[1]), fmaxf(highest[2], highest[3]));
    return block_max(most, reinterpret_cast<float*>(s.spare));
}

// Narrows a selection by one digit: finds the digit that holds the key of rank s.rank (from 0,
// greatest first) of those in the histogram, and leaves its rank among the keys of that digit.
// Warp 0; each lane takes 8 digits, lane 0 the greatest.
DEVICE void choose_digit(Shared& s, int shift) {
    constexpr int EACH = DIGITS / 32;
    const int lane = threadIdx.x, highest = DIGITS - 1 - EACH * lane;
    int own = 0;
    for (int i = 0; i < EACH; i++) own += (int)s.histogram[highest - i];
    int up_to = own;  // keys in this lane's digits and the greater ones
    for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_sync(ALL_LANES, up_to, lane >= step ? lane - step : lane);
        if (lane >= step) up_to += before;
    }
    int rank = s.rank - (up_to - own);
    __syncwarp();  // every lane has read the rank
    if (rank < 0 || rank >= own) return;
    int digit = highest;
    while (rank >= (int)s.histogram[digit]) rank -= (int)s.histogram[digit--];
    s.rank = rank;
    s.prefix |= (u64)digit << shift;
}

// The key of rank `rank` among those that `for_keys` calls its argument with, over all threads:
// its digits one by one, from the highest. `bits` is how many a key has.
template <class ForKeys>
DEVICE u64 select(Shared& s, int rank, int bits, ForKeys for_keys) {
    if (threadIdx.x == 0) s.rank = rank, s.prefix = 0;
    for (int shift = bits - DIGIT_BITS; shift >= 0; shift -= DIGIT_BITS) {
        for (int i = threadIdx.x; i < DIGITS; i += THREADS) s.histogram[i] = 0;
        __syncthreads();
        const u64 prefix = s.prefix;
        for_keys([&](u64 key) {
            const int above = shift + DIGIT_BITS;
            if (above < 64 && key >> above != prefix >> above) return;
            atomicAdd(&s.histogram[key >> shift & (DIGITS - 1)], 1u);
        });
        __syncthreads();
        if (threadIdx.x < 32) choose_digit(s, shift);
        __syncthreads();
    }
    const u64 found = s.prefix;
    __syncthreads();
    return found;
}

// A logit that at least k of the row reach.
DEVICE float threshold(Shared& s, int k) {
    const u64 key = select(s, k - 1, 32, [&](auto f) {
        for (int i = threadIdx.x; i < STRIPES; i += THREADS) f((u64)ordered(s.stripe_max[i]));
    });
    return unordered((unsigned)key);
}

// Sums of exp(z - base), and of that times (z - base).
struct ExpSums {
    float mass = 0.0f, moment = 0.0f, padded = 0.0f;

    // A NaN shows in the mass. exp of -inf is 0, and 0 times it must be, too.
    DEVICE_METHOD float add(float d) {
        const float e = exp2_flush(d * LOG2_E);
        mass += e;
        moment += e * fmaxf(d, -200.0f);
        return e;
    }
};

// The smallest number above x, which is no NaN.
DEVICE float next_above(float x) {
    if (x == 0.0f) return __uint_as_float(1);
    const unsigned bits = __float_as_uint(x);
    return __uint_as_float(x < 0.0f ? bits - 1 : bits + (x < __uint_as_float(0x7f800000u)));
}

// What a pass over the row finds besides the candidates.
struct Passed {
    ExpSums rest;  // of the logits that are no candidates, relative to `base`
    int chosen;    // candidates, of which the buffer has as many as it has room for
    int rank;      // of the target
};

// Puts the keys of all logits for which `is_chosen` into the buffer as far as there is room, and
// sums the others.
template <class IsChosen>
DEVICE Passed pass(const f32* row, const LogitRule& rule, float base, float target_logit,
                   int target, Shared& s, IsChosen is_chosen) {
    if (threadIdx.x == 0) s.count = 0;
    __syncthreads();
    Passed found;
    int ahead = 0;
    // Of equal logits the lower ids come before the target: all columns before it, whole pieces.
    const float above = next_above(target_logit);
    for_columns(row, rule, 1, [&](int at, const float(&z)[LANES]) {
        const float bound = at < target ? target_logit : above;
        bool is_any = false;
        float e[LANES];
        UNROLL
        for (int i = 0; i < LANES; i++) {
            ahead += z[i] >= bound;
            const bool is = is_chosen(z[i], at + i);
            is_any |= is;
            e[i] = found.rest.add(is ? NEGATIVE_INFINITY : z[i] - base);
        }
        if (at + LANES > rule.vocab_real)
            for (int i = 0; i < LANES; i++)
                if (at + i >= rule.vocab_real) found.rest.padded += e[i];
        if (!is_any) return;
        UNROLL
        for (int i = 0; i < LANES; i++)
            if (at + i < rule.vocab && is_chosen(z[i], at + i)) {
                const int place = atomicAdd(&s.count, 1);
                if (place < CANDIDATES) s.candidates[place] = key_of(z[i] + 0.0f, at + i);
            }
    });
    // The target's own piece was compared as if all of it came before the target.
    const int piece = target / LANES * LANES;
    if (threadIdx.x == 0 && piece < target)
        for (int id = target; id < piece + LANES; id++) {
            const float z = id < rule.vocab ? finished(rule, row[id]) : NEGATIVE_INFINITY;
            ahead -= z == target_logit;
        }
    found.rank = block_sum(ahead, reinterpret_cast<int*>(s.spare));
    found.chosen = s.count;
    __syncthreads();
    return found;
}

// Sorts the first `count` candidates, greatest first: bitonic, padded with keys of 0.
DEVICE void sort_candidates(Shared& s, int count) {
    int size = 2;
    while (size < count) size *= 2;
    for (int i = count + threadIdx.x; i < size; i += THREADS) s.candidates[i] = 0;
    __syncthreads();
    for (int run = 2; run <= size; run *= 2)
        for (int step = run / 2; step; step /= 2) {
            for (int pair = threadIdx.x; pair < size / 2; pair += THREADS) {
                const int low = pair / step * step * 2 + pair % step, high = low + step;
                const bool falls = (low & run) == 0;
                const u64 a = s.candidates[low], b = s.candidates[high];
                if ((a < b) == falls) s.candidates[low] = b, s.candidates[high] = a;
            }
            __syncthreads();
        }
}

// The first sample takes so few runs of columns that about a quarter of the buffer is expected to
// be filled.
DEVICE int first_every(const LogitRule& rule) {
    const int runs = rule.vocab / STRIPES / SAMPLE_LEAST, fit = CANDIDATES / 4 / rule.k;
    const int every = runs < fit ? runs : fit;
    return every < 1 ? 1 : every < 16 ? every : 16;
}

// Leaves the k greatest keys of the row, in order, first in the buffer, and what all others but
// the candidates come to, relative to `base`. False for a row that is bad.
DEVICE bool best_of(const f32* row, const LogitRule& rule, int target, Shared& s, Passed& found,
                    float& base) {
    const float target_logit = finished(rule, row[target]), infinity = -NEGATIVE_INFINITY;
    for (int every = first_every(rule);; every = 1) {
        base = sample(row, rule, every, s);
        const float least = threshold(s, rule.k);
        if (every > 1 && least == NEGATIVE_INFINITY) continue;
        if (base == NEGATIVE_INFINITY || base == infinity) return false;
        found = pass(row, rule, base, target_logit, target, s,
                     [&](float z, int) { return z >= least; });
        if (found.chosen <= CANDIDATES || every == 1) break;
    }
    const bool is_nan = found.rest.mass != found.rest.mass;
    if (block_sum((int)is_nan, reinterpret_cast<int*>(s.spare))) return false;
    if (found.chosen > CANDIDATES) {
        const u64 lowest = select(s, rule.k - 1, 64, [&](auto f) {
            for_columns(row, rule, 1, [&](int at, const float(&z)[LANES]) {
                for (int i = 0; i < LANES; i++)
                    if (at + i < rule.vocab) f(key_of(z[i] + 0.0f, at + i));
            });
        });
        found = pass(row, rule, base, target_logit, target, s,
                     [&](float z, int id) { return key_of(z + 0.0f, id) >= lowest; });
    }
    sort_candidates(s, found.chosen);
    return number_of(s.candidates[0]) < infinity;
}

DEVICE void write_bad(const LogitRule& rule, const HeadRows& out, int row) {
    for (int i = threadIdx.x; i < rule.k; i += THREADS) {
        out.ids[(size_t)row * rule.k + i] = 0;
        out.logp[(size_t)row * rule.k + i] = 0.0f;
    }
    if (threadIdx.x) return;
    out.tail[row] = out.target_logp[row] = out.logsumexp[row] = out.entropy[row] = 0.0f;
    out.padded_mass[row] = 0.0f;
    out.target_rank[row] = 0;
    out.bad[row] = 1;
}

// Reduces each row of `logits` (R, width), which it only reads. Grid (R).
KERNEL(THREADS, 2)
reduce_head(const f32* logits, const int* targets, LogitRule rule, HeadRows out) {
    SHARED(Shared, s, );
    const int index = blockIdx.x, target = targets[index];
    const f32* row = logits + (size_t)index * rule.width;
    Passed found;
    float base;
    if (!best_of(row, rule, target, s, found, base)) return write_bad(rule, out, index);

    const float maximum = number_of(s.candidates[0]);
    // What was summed relative to `base`, relative to the maximum.
    const double lower = (double)base - (double)maximum, shrink = exp(lower);
    double rest = found.rest.mass * shrink, padded = found.rest.padded * shrink, top = 0.0;
    double moment = (found.rest.moment + lower * found.rest.mass) * shrink;
    for (int i = threadIdx.x; i < found.chosen; i += THREADS) {
        const u64 key = s.candidates[i];
        ExpSums one;
        const double e = one.add(number_of(key) - maximum);
        (i < rule.k ? top : rest) += e;
        moment += one.moment;
        if (id_of(key) >= rule.vocab_real) padded += e;
    }
    const double tail = block_sum(rest, s.spare);
    const double total = tail + block_sum(top, s.spare);
    moment = block_sum(moment, s.spare);
    padded = block_sum(padded, s.spare);

    const double ln_total = log(total);
    const auto logp_of = [&](float z) { return (float)((double)(z - maximum) - ln_total); };
    for (int i = threadIdx.x; i < rule.k; i += THREADS) {
        out.ids[(size_t)index * rule.k + i] = id_of(s.candidates[i]);
        out.logp[(size_t)index * rule.k + i] = logp_of(number_of(s.candidates[i]));
    }
    if (threadIdx.x) return;
    out.tail[index] = (float)(tail / total);
    out.target_logp[index] = logp_of(finished(rule, row[target]));
    out.target_rank[index] = found.rank;
    out.logsumexp[index] = (float)((double)maximum + ln_total);
    out.entropy[index] = (float)fmax(ln_total - moment / total, 0.0);
    out.padded_mass[index] = (float)(padded / total);
    out.bad[index] = 0;
}
REGISTER_KERNEL(reduce_head)
