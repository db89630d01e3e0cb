// Keys that put numbers and their ids in the one order that exists: greater numbers first, and
// equal ones by lower id.
#pragma once
#include "common.cuh"

typedef unsigned long long u64;

// Greater floats have greater bits; none is 0. Neither NaN nor -0 may come here.
DEVICE unsigned ordered(float z) {
    const unsigned bits = __float_as_uint(z);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
DEVICE float unordered(unsigned bits) {
    return __uint_as_float(bits & 0x80000000u ? bits & 0x7fffffffu : ~bits);
}

// Never 0.
DEVICE u64 key_of(float z, int id) { return (u64)ordered(z) << 32 | (unsigned)~id; }
DEVICE int id_of(u64 key) { return (int)~(unsigned)key; }
DEVICE float number_of(u64 key) { return unordered((unsigned)(key >> 32)); }
