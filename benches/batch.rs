//! The batch builder: a shard's sequences to packed batches. Every row is checked to come once
//! before anything is timed.
//!
//!     cargo bench --bench batch

use divan::counter::ItemsCount;
use kdscore::batch::PackPlan;
use kdscore::corpus::CorpusShard;

const TOKEN_BUDGET: usize = 4096;

fn main() {
    let arrays = Arrays::new(300);
    let plan = PackPlan::new(&arrays.shard(), 0..300, TOKEN_BUDGET);
    let mut seen = vec![false; plan.rows()];
    for batch in plan.batches(arrays.shard()) {
        for row in &batch.rows {
            assert!(
                !std::mem::replace(&mut seen[row.row], true),
                "row {} twice",
                row.row
            );
        }
    }
    assert!(seen.into_iter().all(|s| s), "a row is missing");
    divan::main();
}

struct Arrays {
    tokens: Vec<i32>,
    offsets: Vec<i64>,
    mask: Vec<u8>,
}

impl Arrays {
    /// Lengths spread evenly over 32 to 1,055 tokens; the last two thirds of each are scored.
    fn new(sequences: usize) -> Arrays {
        let (mut tokens, mut offsets, mut mask) = (Vec::new(), vec![0], Vec::new());
        for s in 0..sequences {
            let length = 32 + (s * 7919) % 1024;
            tokens.extend((0..length).map(|t| ((s + t) % 50_000) as i32));
            mask.extend((0..length).map(|t| u8::from(t > length / 3)));
            offsets.push(tokens.len() as i64);
        }
        Arrays {
            tokens,
            offsets,
            mask,
        }
    }

    fn shard(&self) -> CorpusShard<'_> {
        CorpusShard::new(&self.tokens, &self.offsets, &self.mask).unwrap()
    }
}

#[divan::bench(args = [1_000, 10_000])]
fn sequences(bencher: divan::Bencher, sequences: usize) {
    let arrays = Arrays::new(sequences);
    let shard = arrays.shard();
    bencher
        .counter(ItemsCount::new(arrays.tokens.len()))
        .bench_local(|| {
            let plan = PackPlan::new(&shard, 0..sequences, TOKEN_BUDGET);
            plan.batches(shard)
                .map(|batch| batch.rows.len())
                .sum::<usize>()
        });
}
