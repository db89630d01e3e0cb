// What an MLP does between its projections, in place over a whole buffer, by any grid of
// 256-thread blocks.
#include "common.cuh"

enum ActivationKind { SILU, GELU, GELU_TANH, RELU, RELU2, CLAMPED_SWIGLU };

struct Activation {
    int kind;
    float alpha, limit;  // of CLAMPED_SWIGLU
};

DEVICE float gelu_tanh(float x) {
    const float sqrt_2_over_pi = 0.797884561f;
    return 0.5f * x * (1.0f + tanhf(sqrt_2_over_pi * (x + 0.044715f * (x * x * x))));
}

DEVICE float activation_of(const Activation& a, float x) {
    switch (a.kind) {
        case SILU: return x * sigmoid(x);
        case GELU: return 0.5f * x * (1.0f + erff(x * 0.707106781f));
        case GELU_TANH: return gelu_tanh(x);
        case RELU: return x < 0.0f ? 0.0f : x;
        case RELU2: return x < 0.0f ? 0.0f : x * x;
        default: {  // the gate of CLAMPED_SWIGLU, limited from above
            const float gate = x > a.limit ? a.limit : x;
            return gate * sigmoid(a.alpha * gate);
        }
    }
}

// What the activated gate is multiplied by.
DEVICE float factor_of(const Activation& a, float up) {
    if (a.kind != CLAMPED_SWIGLU) return up;
    return (up < -a.limit ? -a.limit : up > a.limit ? a.limit : up) + 1.0f;
}

// x (T, I) = activation(x), or activation(x) · up (T, I) where `up` is not null.
template <class T>
DEVICE void activate(T* x, const T* up, long long count, const Activation& a) {
    for_all(count, [&](auto n, long long at) {
        constexpr int N = decltype(n)::value;
        Numbers<N> v = load<N>(x + at);
        for (int i = 0; i < N; i++) v.v[i] = activation_of(a, v.v[i]);
        if (up) {
            const Numbers<N> u = load<N>(up + at);
            for (int i = 0; i < N; i++) v.v[i] *= factor_of(a, u.v[i]);
        }
        store(x + at, v);
    });
}

#define ACTIVATE(T)                                                                    \
    KERNEL(256) activate_##T(T* x, const T* up, long long count, Activation a) {       \
        activate(x, up, count, a);                                                     \
    }                                                                                  \
    REGISTER_KERNEL(activate_##T)

ACTIVATE(bf16)
ACTIVATE(f32)
