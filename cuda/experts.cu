// A mixture of experts: which experts each row takes, the rows of an expert laid together, the
// products of all experts in one launch, and each row's results added by rising expert.
//
// A choice is one row at one of its experts: choice c is row c / chosen. Choices are laid together
// by expert, within an expert by rising row; the place of a choice is where it lies then. That is
// found by counting, not by atomics, so places are always the same.
#include "keys.cuh"
#include "matmul.cuh"

enum RouterScore { SOFTMAX, SOFTMAX_OF_CHOSEN, SIGMOID, SIGMOID_OF_CHOSEN };

struct RouterRule {
    int experts;
    int chosen;  // at most 32
    int score;
    int renormalise;
    int groups, groups_kept;  // 0 groups: all take part
    float scale;
};

constexpr int ROUTE_WARPS = 4;

// Shared memory of one warp that routes a row; experts numbers each.
struct Routing {
    u64* keys;
    f32* scores;
    f32* groups;
};

// Leaves the row's scores: its logits, or their softmax or sigmoid.
DEVICE void score_experts(const f32* logits, const RouterRule& rule, f32* scores) {
    const int lane = threadIdx.x % 32;
    float highest = NEGATIVE_INFINITY, total = 0.0f;
    for (int e = lane; e < rule.experts; e += 32) highest = fmaxf(highest, logits[e]);
    highest = warp_max(highest);
    for (int e = lane; e < rule.experts; e += 32) {
        const float z = logits[e];
        scores[e] = rule.score == SOFTMAX ? expf(z - highest)
                    : rule.score == SIGMOID ? sigmoid(z)
                                            : z;
        total += scores[e];
    }
    total = warp_sum(total);
    if (rule.score == SOFTMAX)
        for (int e = lane; e < rule.experts; e += 32) scores[e] /= total;
    __syncwarp();
}

// A NaN comes last, and -0 is 0.
DEVICE float comparable(float x) { return x == x ? x + 0.0f : NEGATIVE_INFINITY; }

// The sum of the two best of a group.
DEVICE float group_score(const u64* keys, int size) {
    float best = NEGATIVE_INFINITY, second = NEGATIVE_INFINITY;
    for (int i = 0; i < size; i++) {
        const float x = number_of(keys[i]);
        second = fmaxf(second, fminf(best, x));
        best = fmaxf(best, x);
    }
    return size > 1 ? best + second : best;
}

// Leaves only the experts of the best groups.
DEVICE void drop_groups(const RouterRule& rule, const Routing& r) {
    const int lane = threadIdx.x % 32, size = rule.experts / rule.groups;
    for (int g = lane; g < rule.groups; g += 32) r.groups[g] = group_score(r.keys + g * size, size);
    __syncwarp();
    for (int g = lane; g < rule.groups; g += 32) {
        int better = 0;
        for (int other = 0; other < rule.groups; other++)
            better += key_of(comparable(r.groups[other]), other) >
                      key_of(comparable(r.groups[g]), g);
        if (better < rule.groups_kept) continue;
        for (int e = g * size; e < (g + 1) * size; e++) r.keys[e] = key_of(NEGATIVE_INFINITY, e);
    }
    __syncwarp();
}

DEVICE u64 warp_greatest(u64 key) {
    for (int step = 16; step; step /= 2) {
        const u64 other = __shfl_xor_sync(ALL_LANES, key, step);
        if (other > key) key = other;
    }
    return key;
}

// The expert that comes as this lane's number among the best; -1 for lanes beyond the chosen.
DEVICE int choose(const RouterRule& rule, u64* keys) {
    const int lane = threadIdx.x % 32;
    int mine = -1;
    for (int i = 0; i < rule.chosen; i++) {
        u64 best = 0;
        for (int e = lane; e < rule.experts; e += 32)
            if (keys[e] > best) best = keys[e];
        best = warp_greatest(best);
        if (lane == i) mine = id_of(best);
        if (id_of(best) % 32 == lane) keys[id_of(best)] = 0;  // this lane's own, as in the scan
    }
    return mine;
}

// What this lane's expert weighs.
DEVICE float weigh(const RouterRule& rule, const f32* scores, int expert) {
    const bool is_chosen = expert >= 0;
    const float score = is_chosen ? scores[expert] : NEGATIVE_INFINITY;
    float weight = is_chosen ? score : 0.0f;
    if (rule.score == SIGMOID_OF_CHOSEN) weight = is_chosen ? sigmoid(score) : 0.0f;
    if (rule.score == SOFTMAX_OF_CHOSEN) {
        const float highest = warp_max(score);
        weight = is_chosen ? expf(score - highest) : 0.0f;
        weight /= warp_sum(weight);
    }
    // Sigmoids can all be 0; the term keeps 0 / 0 away.
    if (rule.renormalise) weight /= warp_sum(weight) + 1e-20f;
    return weight * rule.scale;
}

// experts and weights (T, chosen) = what each row of logits (T, experts) chooses, by rising
// expert; `correction` (experts) or null. A warp a row, ROUTE_WARPS rows a block; dynamic shared
// memory: ROUTE_WARPS · experts · 16 bytes.
KERNEL(ROUTE_WARPS * 32)
route(int* experts, f32* weights, const f32* logits, const f32* correction, int rows,
      RouterRule rule) {
    DYN_SMEM(u64, shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const size_t row = (size_t)blockIdx.x * ROUTE_WARPS + warp;
    if (row >= (size_t)rows) return;
    Routing r;
    r.keys = shared + warp * rule.experts;
    f32* behind_keys = reinterpret_cast<f32*>(shared + ROUTE_WARPS * rule.experts);
    r.scores = behind_keys + warp * rule.experts * 2;
    r.groups = r.scores + rule.experts;

    score_experts(logits + row * rule.experts, rule, r.scores);
    for (int e = lane; e < rule.experts; e += 32) {
        const float key = r.scores[e] + (correction ? correction[e] : 0.0f);
        r.keys[e] = key_of(comparable(key), e);
    }
    __syncwarp();
    if (rule.groups) drop_groups(rule, r);
    const int expert = choose(rule, r.keys);
    const float weight = weigh(rule, r.scores, expert);
    int slot = 0;
    for (int i = 0; i < rule.chosen; i++) slot += __shfl_sync(ALL_LANES, expert, i) < expert;
    if (expert < 0) return;
    experts[row * rule.chosen + slot] = expert;
    weights[row * rule.chosen + slot] = weight;
}
REGISTER_KERNEL(route)

// counts (experts) = choices of each expert. One block of 256 threads an expert.
KERNEL(256) count_choices(int* counts, const int* experts, int choices) {
    SHARED(int, spare, [32]);
    int own = 0;
    for (int c = threadIdx.x; c < choices; c += 256) own += experts[c] == (int)blockIdx.x;
    own = block_sum(own, spare);
    if (threadIdx.x == 0) counts[blockIdx.x] = own;
}
REGISTER_KERNEL(count_choices)

// Rows of one expert that one block of the grouped product takes; none where count is 0.
struct ExpertTile {
    int expert;
    int first, count;  // places
};

constexpr int EACH = 16;  // choices a thread looks at together

// The sum of f(i) for i < count over a block of 256 threads.
template <class F>
DEVICE int sum_below(int count, int* spare, F f) {
    int own = 0;
    for (int i = threadIdx.x; i < count; i += 256) own += f(i);
    return block_sum(own, spare);
}

// Choices before this thread's of those that all threads of the block count.
DEVICE int counted_before(int own, int* warp_sums, int& all) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int up_to = own;
    for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_sync(ALL_LANES, up_to, lane >= step ? lane - step : lane);
        if (lane >= step) up_to += before;
    }
    if (lane == 31) warp_sums[warp] = up_to;
    __syncthreads();
    int before = up_to - own;
    all = 0;
    for (int w = 0; w < 8; w++) {
        if (w < warp) before += warp_sums[w];
        all += warp_sums[w];
    }
    __syncthreads();
    return before;
}

// places (choices) = where each choice lies; sources (choices) = the choice at each place; tiles
// (tiles) = the parts of `tile_rows` places of each expert, in order, then empty ones. `tiles` is
// at least choices / tile_rows + experts. One block of 256 threads an expert.
KERNEL(256)
place_choices(unsigned* places, unsigned* sources, ExpertTile* tiles, const int* experts,
              const int* counts, int choices, int tile_rows, int tiles_max) {
    SHARED(int, spare, [32]);
    const int expert = blockIdx.x, count = counts[expert];
    const auto tiles_of = [&](int e) { return (counts[e] + tile_rows - 1) / tile_rows; };
    const int first = sum_below(expert, spare, [&](int e) { return counts[e]; });
    const int first_tile = sum_below(expert, spare, tiles_of);
    for (int i = threadIdx.x; i < tiles_of(expert); i += 256) {
        const int left = count - i * tile_rows;
        const int rows = left < tile_rows ? left : tile_rows;
        tiles[first_tile + i] = {expert, first + i * tile_rows, rows};
    }
    if (expert == (int)gridDim.x - 1)
        for (int i = first_tile + tiles_of(expert) + threadIdx.x; i < tiles_max; i += 256)
            tiles[i] = {0, 0, 0};

    int place = first;
    for (int from = 0; from < choices; from += 256 * EACH) {
        const int begin = from + threadIdx.x * EACH;
        const int end = begin + EACH < choices ? begin + EACH : choices;
        int own = 0, all = 0;
        for (int c = begin; c < end; c++) own += experts[c] == expert;
        int mine = place + counted_before(own, spare, all);
        for (int c = begin; c < end; c++)
            if (experts[c] == expert) places[c] = mine, sources[mine++] = c;
        place += all;
    }
}
REGISTER_KERNEL(place_choices)

// out (places, N) = the place's row of x · its expert's weightᵀ (N, K) + bias (N). `weights` and
// `biases` (experts) point to each expert's; `biases` is null for none. `sources` leads from a
// place to its choice, and so to a row of x; null where x has a row a place. Grid (tiles of N,
// tiles of places).
template <class T, class OUT>
DEVICE void expert_linear(OUT* out, const T* x, const unsigned* sources, int chosen,
                          const T* const* weights, const f32* const* biases,
                          const ExpertTile* tiles, int n, int k, int tile) {
    const ExpertTile t = tiles[blockIdx.y];
    if (t.count == 0) return;
    Product<T, OUT> p;
    p.out = out, p.x = x, p.w = weights[t.expert], p.bias = biases ? biases[t.expert] : nullptr;
    p.rows = sources, p.divisor = chosen;
    p.n = n, p.k = k, p.adds = false;
    p.first_row = t.first, p.count = t.count, p.first_column = blockIdx.x * tile;
    multiply_tile(p);
}

#define EXPERT_LINEAR(T, TILE)                                                               \
    KERNEL(TILE_THREADS)                                                                     \
    expert_matmul_##T(T* out, const T* x, const unsigned* sources, int chosen,               \
                      const T* const* weights, const f32* const* biases,                     \
                      const ExpertTile* tiles, int n, int k) {                               \
        expert_linear(out, x, sources, chosen, weights, biases, tiles, n, k, TILE);          \
    }                                                                                        \
    REGISTER_KERNEL(expert_matmul_##T)

EXPERT_LINEAR(bf16, TILE)
EXPERT_LINEAR(f32, TILE_F32)

// Row `place` of out (places, H) = its row of x (T, H) times the choice's weight, for experts
// whose inputs are weighed. One block of 128 threads a place.
template <class T>
DEVICE void weigh_inputs(T* out, const T* x, const unsigned* sources, const f32* weights,
                         int chosen, int width) {
    const unsigned choice = sources[blockIdx.x];
    const T* from = x + (size_t)(choice / chosen) * width;
    T* to = out + (size_t)blockIdx.x * width;
    for_pieces(width, threadIdx.x, blockDim.x, [&](auto n, int at) {
        constexpr int N = decltype(n)::value;
        Numbers<N> v = load<N>(from + at);
        for (int i = 0; i < N; i++) v.v[i] *= weights[choice];
        store(to + at, v);
    });
}

// Row t of out (T, H) = the sum over the row's choices, by rising expert, of the result at its
// place times its weight, or of the result alone where `weights` is null. One block of 128
// threads a row.
template <class T>
DEVICE void combine(f32* out, const T* results, const unsigned* places, const f32* weights,
                    int chosen, int width) {
    const size_t first = (size_t)blockIdx.x * chosen;
    for_pieces(width, threadIdx.x, blockDim.x, [&](auto n, int at) {
        constexpr int N = decltype(n)::value;
        Numbers<N> sum = {};
        for (int slot = 0; slot < chosen; slot++) {
            const size_t place = places[first + slot];
            const float weight = weights ? weights[first + slot] : 1.0f;
            const Numbers<N> v = load<N>(results + place * width + at);
            for (int i = 0; i < N; i++) sum.v[i] += v.v[i] * weight;
        }
        store(out + (size_t)blockIdx.x * width + at, sum);
    });
}

#define EXPERT_ROWS(T)                                                                           \
    KERNEL(128) weigh_inputs_##T(T* out, const T* x, const unsigned* sources,                    \
                                 const f32* weights, int chosen, int width) {                    \
        weigh_inputs(out, x, sources, weights, chosen, width);                                   \
    }                                                                                            \
    REGISTER_KERNEL(weigh_inputs_##T)                                                            \
    KERNEL(128) combine_##T(f32* out, const T* results, const unsigned* places,                  \
                            const f32* weights, int chosen, int width) {                         \
        combine(out, results, places, weights, chosen, width);                                   \
    }                                                                                            \
    REGISTER_KERNEL(combine_##T)

EXPERT_ROWS(bf16)
EXPERT_ROWS(f32)
