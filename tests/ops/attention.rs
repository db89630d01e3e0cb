//! Attention against f64, and a sequence's bits alone and between others.

use kdscore::backend::cpu::Cpu;
use kdscore::backend::{AttentionShape, Backend, Mask, Precision, Segment, Segments, Tensor};

use super::{bits, draws, tensor};

/// Lengths at and around every tile a backend may use, and sequences of one token.
const LENGTHS: [usize; 9] = [1, 63, 64, 65, 2, 129, 1, 200, 17];

struct Case {
    shape: AttentionShape,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

fn cases() -> Vec<Case> {
    let tokens = LENGTHS.iter().sum::<usize>();
    let shape = |heads, kv_heads, head_dim, value_dim, cap, mask| AttentionShape {
        heads,
        kv_heads,
        head_dim,
        value_dim,
        scale: 0.7 / (head_dim as f32).sqrt(),
        cap,
        mask,
    };
    let shapes = [
        shape(1, 1, 2, 2, None, Mask::Causal),
        shape(6, 2, 6, 6, None, Mask::Causal),
        shape(4, 1, 80, 80, None, Mask::Window(16)),
        shape(2, 2, 64, 64, None, Mask::Window(64)),
        shape(2, 1, 16, 16, Some(5.0), Mask::Causal),
        shape(2, 2, 24, 10, None, Mask::Chunk(48)),
        shape(1, 1, 128, 128, Some(2.0), Mask::Window(1)),
    ];
    let shapes = shapes.into_iter().enumerate();
    shapes
        .map(|(i, shape)| Case {
            q: draws(i as u64, tokens * shape.heads * shape.head_dim),
            k: draws(50 + i as u64, tokens * shape.kv_heads * shape.head_dim),
            v: draws(90 + i as u64, tokens * shape.kv_heads * shape.value_dim),
            shape,
        })
        .collect()
}

/// Segments of these lengths, every token a query.
fn segments(lengths: &[usize]) -> Segments {
    let mut start = 0;
    let list = lengths.iter().map(|&length| {
        let keys = start..start + length;
        start += length;
        Segment {
            queries: keys.clone(),
            keys,
        }
    });
    Segments {
        list: list.collect(),
        query_positions: lengths
            .iter()
            .flat_map(|&length| 0..length as u32)
            .collect(),
    }
}

fn attend<B: Backend>(b: &B, case: &Case, segments: &Segments, q: &[f32]) -> Vec<f32> {
    let s = &case.shape;
    let q = tensor(b, q, s.heads * s.head_dim);
    let k = tensor(b, &case.k, s.kv_heads * s.head_dim);
    let v = tensor(b, &case.v, s.kv_heads * s.value_dim);
    let width = s.heads * s.value_dim;
    let mut out = b.tensor(Precision::Single, q.rows(), width).unwrap();
    let segments = b.segments(segments.clone()).unwrap();
    b.attention(s, &segments, None, [&q, &k, &v], &mut out);
    b.download(&out)
}

/// One query's output in f64.
fn plain(case: &Case, query: usize, keys: std::ops::Range<usize>, head: usize) -> Vec<f64> {
    let s = &case.shape;
    let kv = head / (s.heads / s.kv_heads);
    let part = |x: &[f32], row: usize, heads: usize, head: usize, width: usize| -> Vec<f64> {
        let at = (row * heads + head) * width;
        x[at..at + width].iter().map(|&v| f64::from(v)).collect()
    };
    let q = part(&case.q, query, s.heads, head, s.head_dim);
    let scores = keys.clone().map(|key| {
        let k = part(&case.k, key, s.kv_heads, kv, s.head_dim);
        let dot: f64 = q.iter().zip(&k).map(|(a, b)| a * b).sum();
        let score = dot * f64::from(s.scale);
        s.cap.map_or(score, |cap| {
            f64::from(cap) * (score / f64::from(cap)).tanh()
        })
    });
    let scores: Vec<f64> = scores.collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let total: f64 = scores.iter().map(|s| (s - max).exp()).sum();
    let mut out = vec![0.0; s.value_dim];
    for (key, score) in keys.zip(scores) {
        let weight = (score - max).exp() / total;
        let v = part(&case.v, key, s.kv_heads, kv, s.value_dim);
        out.iter_mut().zip(v).for_each(|(o, v)| *o += weight * v);
    }
    out
}

fn attention_is_right<B: Backend>(b: &B) {
    for case in cases() {
        let s = &case.shape;
        let got = attend(b, &case, &segments(&LENGTHS), &case.q);
        let mut start = 0;
        for length in LENGTHS {
            for position in 0..length {
                let keys = start + s.mask.first_key(position)..start + position + 1;
                for head in 0..s.heads {
                    let exact = plain(&case, start + position, keys.clone(), head);
                    let at = ((start + position) * s.heads + head) * s.value_dim;
                    for (got, exact) in got[at..].iter().zip(exact) {
                        let error = (f64::from(*got) - exact).abs();
                        assert!(
                            error < 2e-5,
                            "{s:?} length {length} position {position}: {error:e}"
                        );
                    }
                }
            }
            start += length;
        }
    }
}

/// A sequence's rows have the same bits alone and between others, and a row the same bits when
/// only some queries are asked for, as in the last layer.
fn rows_keep_their_bits<B: Backend>(b: &B) {
    for case in cases() {
        let s = &case.shape;
        let (qw, vw) = (s.heads * s.head_dim, s.heads * s.value_dim);
        let all = attend(b, &case, &segments(&LENGTHS), &case.q);
        let (start, length) = (63 + 64 + 65 + 1 + 2, 129);
        let part = |x: &[f32], width: usize| x[start * width..(start + length) * width].to_vec();
        let alone = Case {
            q: part(&case.q, qw),
            k: part(&case.k, s.kv_heads * s.head_dim),
            v: part(&case.v, s.kv_heads * s.value_dim),
            shape: *s,
        };
        let got = attend(b, &alone, &segments(&[length]), &alone.q);
        assert_eq!(
            bits(&got),
            bits(&all[start * vw..(start + length) * vw]),
            "{s:?}"
        );

        let chosen: Vec<usize> = (0..length).filter(|p| p % 3 == 1 || *p > 120).collect();
        let some = Segments {
            list: vec![Segment {
                keys: 0..length,
                queries: 0..chosen.len(),
            }],
            query_positions: chosen.iter().map(|&p| p as u32).collect(),
        };
        let q: Vec<f32> = chosen
            .iter()
            .flat_map(|p| alone.q[p * qw..(p + 1) * qw].to_vec())
            .collect();
        let few = attend(b, &alone, &some, &q);
        for (row, position) in chosen.iter().enumerate() {
            let error = few[row * vw..(row + 1) * vw]
                .iter()
                .zip(&got[position * vw..])
                .map(|(a, b)| (a - b).abs())
                .fold(0.0, f32::max);
            assert!(error < 2e-5, "{s:?} position {position}: {error:e}");
        }
    }
}

#[test]
fn attention() {
    attention_is_right(&Cpu);
    rows_keep_their_bits(&Cpu);
}
