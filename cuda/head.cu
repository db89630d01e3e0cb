// The head reduction: from a row of logits (V), in two passes, to all its products.
//
// Pass 1 finds the maximum and a threshold that at least k logits reach: the k-th largest of the
// maxima of STRIPES disjoint sets of columns. Pass 2 keeps the logits that reach it, a few more
// than k, as candidates, and sums exp(z - maximum) over all others: the tail, directly. Sorting
// the candidates by (logit, lower id first) gives the top-k in the one order that exists, so that
// how they came into the buffer doesn't matter. Should they not fit the buffer (a crowd of equal
// logits), the k-th largest key is found exactly, by its digits, and pass 2 is made again with it.
//
// One block of 512 threads a row. The bits of a row depend on that row alone.
#include "keys.cuh"

constexpr int THREADS = 512;
constexpr int LANES = 4;  // columns a thread reads together, each the start of a stripe
constexpr int STRIPES = THREADS * LANES;
constexpr int CANDIDATES = 2048;  // a power of two, at least twice the most k
constexpr int DIGIT_BITS = 8;
constexpr int DIGITS = 1 << DIGIT_BITS;

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

// Calls f(id, logit, lane) for this thread's columns of the row, LANES side by side at a time.
template <class F>
DEVICE void for_columns(const f32* row, const LogitRule& rule, F f) {
    const bool is_whole = rule.width % LANES == 0;
    for (int at = threadIdx.x * LANES; at < rule.vocab; at += THREADS * LANES) {
        float z[LANES] = {};
        if (is_whole && at + LANES <= rule.vocab) {
            const float4 raw = *reinterpret_cast<const float4*>(row + at);
            z[0] = raw.x, z[1] = raw.y, z[2] = raw.z, z[3] = raw.w;
        } else {
            UNROLL
            for (int i = 0; i < LANES; i++)
                if (at + i < rule.vocab) z[i] = row[at + i];
        }
        UNROLL
        for (int i = 0; i < LANES; i++)
            if (at + i < rule.vocab) f(at + i, finished(rule, z[i]), i);
    }
}

struct FirstPass {
    float maximum;
    int rank;     // of the target
    bool is_bad;  // has NaN or +inf, or nothing finite
};

// Also leaves the maxima of the stripes in shared memory.
DEVICE FirstPass first_pass(const f32* row, const LogitRule& rule, int target, Shared& s) {
    const float target_logit = finished(rule, row[target]);
    float highest[LANES];
    UNROLL
    for (int i = 0; i < LANES; i++) highest[i] = NEGATIVE_INFINITY;
    int ahead = 0, unsound = 0;
    for_columns(row, rule, [&](int id, float z, int lane) {
        highest[lane] = fmaxf(highest[lane], z);
        ahead += z > target_logit || (z == target_logit && id < target);
        // A NaN fails the comparison as +inf does.
        unsound += !(z < __uint_as_float(0x7f800000u));
    });
    float maximum = NEGATIVE_INFINITY;
    UNROLL
    for (int i = 0; i < LANES; i++) {
        s.stripe_max[threadIdx.x * LANES + i] = highest[i];
        maximum = fmaxf(maximum, highest[i]);
    }
    FirstPass found;
    found.maximum = block_max(maximum, reinterpret_cast<float*>(s.spare));
    found.rank = block_sum(ahead, reinterpret_cast<int*>(s.spare));
    unsound = block_sum(unsound, reinterpret_cast<int*>(s.spare));
    found.is_bad = unsound > 0 || found.maximum == NEGATIVE_INFINITY;
    return found;
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

// Sums of exp(z - maximum), and of that times (z - maximum).
struct ExpSums {
    float mass = 0.0f, moment = 0.0f, padded = 0.0f;

    DEVICE_METHOD void add(const LogitRule& rule, float maximum, float z, int id) {
        const float d = fmaxf(z - maximum, -200.0f);  // exp of less is 0, and 0 · -inf is NaN
        const float e = expf(d);
        mass += e;
        moment += e * d;
        if (id >= rule.vocab_real) padded += e;
    }
};

// The second pass: puts the keys of all logits for which `is_chosen` into the buffer as far as
// there is room, and the other logits into `rest`. Returns how many were chosen.
template <class IsChosen>
DEVICE int collect(const f32* row, const LogitRule& rule, float maximum, Shared& s, ExpSums& rest,
                   IsChosen is_chosen) {
    if (threadIdx.x == 0) s.count = 0;
    rest = ExpSums();
    __syncthreads();
    for_columns(row, rule, [&](int id, float z, int) {
        if (!is_chosen(z, id)) return rest.add(rule, maximum, z, id);
        const int at = atomicAdd(&s.count, 1);
        if (at < CANDIDATES) s.candidates[at] = key_of(z, id);
    });
    __syncthreads();
    const int count = s.count;
    __syncthreads();
    return count;
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

// Leaves the k greatest keys of the row, in order, first in the buffer, and in `top` and `rest`
// what they and all others come to.
DEVICE void best_of(const f32* row, const LogitRule& rule, float maximum, Shared& s, ExpSums& top,
                    ExpSums& rest) {
    const float least = threshold(s, rule.k);
    int count = collect(row, rule, maximum, s, rest, [&](float z, int) { return z >= least; });
    if (count > CANDIDATES) {
        const u64 lowest = select(s, rule.k - 1, 64, [&](auto f) {
            for_columns(row, rule, [&](int id, float z, int) { f(key_of(z, id)); });
        });
        count = collect(row, rule, maximum, s, rest,
                        [&](float z, int id) { return key_of(z, id) >= lowest; });
    }
    sort_candidates(s, count);
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const u64 key = s.candidates[i];
        if (i < rule.k)
            top.add(rule, maximum, number_of(key), id_of(key));
        else
            rest.add(rule, maximum, number_of(key), id_of(key));
    }
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
KERNEL(THREADS)
reduce_head(const f32* logits, const int* targets, LogitRule rule, HeadRows out) {
    SHARED(Shared, s, );
    const int index = blockIdx.x, target = targets[index];
    const f32* row = logits + (size_t)index * rule.width;
    const FirstPass first = first_pass(row, rule, target, s);
    if (first.is_bad) return write_bad(rule, out, index);

    ExpSums rest, top;
    best_of(row, rule, first.maximum, s, top, rest);
    const double tail = block_sum((double)rest.mass, s.spare);
    const double total = tail + block_sum((double)top.mass, s.spare);
    const double moment = block_sum((double)rest.moment + (double)top.moment, s.spare);
    const double padded = block_sum((double)rest.padded + (double)top.padded, s.spare);

    const double ln_total = log(total);
    const auto logp_of = [&](float z) { return (float)((double)(z - first.maximum) - ln_total); };
    for (int i = threadIdx.x; i < rule.k; i += THREADS) {
        out.ids[(size_t)index * rule.k + i] = id_of(s.candidates[i]);
        out.logp[(size_t)index * rule.k + i] = logp_of(number_of(s.candidates[i]));
    }
    if (threadIdx.x) return;
    out.tail[index] = (float)(tail / total);
    out.target_logp[index] = logp_of(finished(rule, row[target]));
    out.target_rank[index] = first.rank;
    out.logsumexp[index] = (float)((double)first.maximum + ln_total);
    out.entropy[index] = (float)fmax(ln_total - moment / total, 0.0);
    out.padded_mass[index] = (float)(padded / total);
    out.bad[index] = 0;
}
REGISTER_KERNEL(reduce_head)
