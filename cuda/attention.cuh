// What a block of attention works on, for the bf16 and the fp32 kernel alike.
//
// The heads that share one kv head are packed: packed row p of a segment is query p / group, head
// p % group of the kv head's group. A block takes one kv head and a tile of consecutive packed
// rows, counted from the segment's own start, and walks over keys in blocks counted from the
// sequence's own start. So neither the batch nor the place in it shapes a row's sums.
#pragma once
#include "common.cuh"

enum MaskKind { CAUSAL, WINDOW, CHUNK };

struct AttentionShape {
    int heads, kv_heads;
    int head_dim, value_dim;
    float scale;
    float cap;  // scores, scaled, become cap · tanh(score / cap); 0 for none
    int mask;
    int mask_size;  // of WINDOW or CHUNK
};

// The keys of a sequence lie in one span of rows or in several (a prefix that sequences share,
// then their own): those at positions up to `end` at row position + shift, in the first span that
// has them.
struct KeySpan {
    int end;
    int shift;
};

// The work of a block, laid out by the host, longest first.
struct AttentionTile {
    int query;    // first row of q of the segment
    int queries;  // of the segment
    int first;    // packed row of the segment that is the tile's row 0
    int span;     // first of the sequence's spans
};

DEVICE int first_key(const AttentionShape& s, int position) {
    if (s.mask == WINDOW) return position + 1 > s.mask_size ? position + 1 - s.mask_size : 0;
    if (s.mask == CHUNK) return position / s.mask_size * s.mask_size;
    return 0;
}

// The rows of a tile: which query and which head each is.
struct TileRows {
    int query, first, count;  // count of rows that exist from `first` on
    int group, head;          // heads a kv head serves, and the first of this one's

    DEVICE_METHOD bool has(int row) const { return row < count; }
    DEVICE_METHOD int query_of(int row) const { return query + (first + row) / group; }
    DEVICE_METHOD int head_of(int row) const { return head + (first + row) % group; }
};

DEVICE TileRows rows_of(const AttentionTile& tile, const AttentionShape& s, int kv_head, int most) {
    TileRows rows;
    rows.group = s.heads / s.kv_heads;
    rows.head = kv_head * rows.group;
    rows.query = tile.query;
    rows.first = tile.first;
    const int left = tile.queries * rows.group - tile.first;
    rows.count = left < most ? left : most;
    return rows;
}

// The keys that some row of a tile sees, and those that every row sees, as [first, end).
struct KeyRange {
    int first, end;
    int first_common, end_common;
};

// Positions rise within a tile, and with them the first key that a query sees.
DEVICE KeyRange keys_of(const TileRows& rows, const AttentionShape& s, const int* positions) {
    const int low = positions[rows.query_of(0)];
    const int high = positions[rows.query_of(rows.count - 1)];
    KeyRange keys;
    keys.first = first_key(s, low);
    keys.end = high + 1;
    keys.first_common = first_key(s, high);
    keys.end_common = low + 1;
    return keys;
}

// The row of k and v that holds the key at `position`.
DEVICE int key_row(const KeySpan* span, int position) {
    while (position >= span->end) span++;
    return position + span->shift;
}
