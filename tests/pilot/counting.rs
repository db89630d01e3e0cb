//! The FLOPs a description is said to need are those its decoder asks a backend for: counted by a
//! backend that does nothing else, for every teacher of every family.

use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;

use anyhow::Result;
use kdscore::backend::{
    Activation, AttentionShape, Backend, Experts, ExpertsRule, HeadRows, HostWeight, Into, Linear,
    LogitRule, Mlp, MlpSizes, MlpWork, Norm, Precision, RopeShape, Segments, Tensor,
};
use kdscore::batch::PackPlan;
use kdscore::model::{Decoder, Demand, Limits, Teacher, Unknown, Vocabulary, Work};

use super::golden::Sequences;

/// (rows, width), nothing in it.
struct Shape {
    rows: usize,
    width: usize,
}

impl Tensor for Shape {
    fn rows(&self) -> usize {
        self.rows
    }

    fn width(&self) -> usize {
        self.width
    }

    fn set_shape(&mut self, rows: usize, width: usize) {
        (self.rows, self.width) = (rows, width);
    }
}

/// Counts multiply-adds of products. A product that a reduction follows is the head's.
#[derive(Default)]
struct Counting {
    work: Mutex<(Work, u128)>,
}

impl Counting {
    fn product(&self, rows: usize, shape: &[usize]) {
        let products = (rows * shape[0] * shape[1]) as u128;
        let mut work = self.work.lock().unwrap();
        work.0.body += products;
        work.1 = products;
    }

    fn expert_products(mlp: &Mlp<Vec<usize>>) -> usize {
        let each = mlp.gate.iter().chain([&mlp.up, &mlp.down]);
        each.map(|l| l.weight.iter().product::<usize>()).sum()
    }
}

impl Backend for Counting {
    type Tensor = Shape;
    type Weight = Vec<usize>;
    type Index = usize;
    type Segments = Segments;
    type Experts = Experts<Vec<usize>>;
    type Routing = ();
    type Rows = ();

    fn provenance(&self) -> serde_json::Value {
        serde_json::json!("counting")
    }

    fn tensor(&self, _: Precision, rows: usize, width: usize) -> Result<Shape> {
        Ok(Shape { rows, width })
    }

    fn mlp_work(&self, sizes: &MlpSizes) -> Result<MlpWork<Shape, ()>> {
        let room = || self.tensor(Precision::Compute, sizes.rows_max, sizes.inner);
        Ok(MlpWork {
            rows: room()?,
            gate: room()?,
            up: room()?,
            result: room()?,
            routing: (),
        })
    }

    fn rows(&self, _: usize, _: usize) -> Result<()> {
        Ok(())
    }

    fn experts_of(&self, experts: Experts<Vec<usize>>) -> Result<Experts<Vec<usize>>> {
        Ok(experts)
    }

    fn segments(&self, segments: Segments) -> Result<Segments> {
        Ok(segments)
    }

    fn weight(&self, host: &HostWeight) -> Result<Vec<usize>> {
        Ok(host.shape.clone())
    }

    fn index(&self, values: &[u32]) -> Result<usize> {
        Ok(values.len())
    }

    fn download(&self, x: &Shape) -> Vec<f32> {
        vec![0.0; x.rows * x.width]
    }

    fn upload(&self, values: &[f32], x: &mut Shape) {
        x.rows = values.len() / x.width.max(1);
    }

    fn embed(&self, table: &Vec<usize>, rows: &usize, _: Into, out: &mut Shape) {
        out.set_shape(*rows, table[1]);
    }

    fn scale(&self, _: &mut Shape, _: f32) {}

    fn scale_rows(&self, _: &mut Shape, _: &Shape, _: &usize) {}

    fn gate_rows(&self, _: &mut Shape, _: &Shape) {}

    fn clip(&self, _: &mut Shape, _: f32) {}

    fn copy(&self, x: &Shape, out: &mut Shape) {
        out.set_shape(x.rows, x.width);
    }

    fn add_scaled(&self, _: &Shape, _: f32, _: &mut Shape) {}

    fn norm(&self, x: &Shape, _: &Norm<Vec<usize>>, out: &mut Shape) {
        out.set_shape(x.rows, x.width);
    }

    fn norm_in_place(&self, _: &mut Shape, _: &Norm<Vec<usize>>) {}

    fn linear(&self, x: &Shape, linear: &Linear<Vec<usize>>, into: Into, out: &mut Shape) {
        assert_eq!(x.width, linear.weight[1]);
        if into == Into::Replace {
            out.set_shape(x.rows, linear.weight[0]);
        }
        self.product(x.rows, &linear.weight);
    }

    fn rope(&self, _: &mut Shape, _: &RopeShape, _: &Shape, _: &Shape, _: &usize) {}

    fn join_heads(&self, own: &Shape, shared: &Shape, heads: usize, out: &mut Shape) {
        out.set_shape(own.rows, own.width + heads * shared.width);
    }

    fn attention(
        &self,
        shape: &AttentionShape,
        segments: &Segments,
        _: Option<&Vec<usize>>,
        [q, k, v]: [&Shape; 3],
        out: &mut Shape,
    ) {
        assert_eq!(q.width, shape.heads * shape.head_dim);
        assert_eq!(k.width, shape.kv_heads * shape.head_dim);
        assert_eq!(v.width, shape.kv_heads * shape.value_dim);
        let mut pairs = 0;
        for segment in &segments.list {
            for query in segment.queries.clone() {
                let position = segments.query_positions[query] as usize;
                let keys = shape.mask.first_key(position)..position + 1;
                pairs += keys.filter(|key| *key < segment.keys.len()).count();
            }
        }
        out.set_shape(q.rows, shape.heads * shape.value_dim);
        let each = shape.heads * (shape.head_dim + shape.value_dim);
        self.work.lock().unwrap().0.attention += (pairs * each) as u128;
    }

    fn activate(&self, _: Activation, _: &mut Shape, _: Option<&Shape>) {}

    fn experts(
        &self,
        x: &Shape,
        _: &Shape,
        rule: &ExpertsRule,
        experts: &Experts<Vec<usize>>,
        _: &mut MlpWork<Shape, ()>,
        out: &mut Shape,
    ) {
        // Whichever are chosen, all are of one shape.
        let each = Counting::expert_products(&experts.list[0]);
        let same = |mlp: &Mlp<Vec<usize>>| Counting::expert_products(mlp) == each;
        assert!(experts.list.iter().all(same));
        out.set_shape(x.rows, x.width);
        let products = (x.rows * rule.router.chosen * each) as u128;
        self.work.lock().unwrap().0.body += products;
    }

    fn gather(&self, x: &Shape, rows: &usize, out: &mut Shape) {
        out.set_shape(*rows, x.width);
    }

    fn slice(&self, x: &Shape, rows: Range<usize>, out: &mut Shape) {
        out.set_shape(rows.len(), x.width);
    }

    fn take_rows(&self, (): (), _: &mut HeadRows) -> Result<()> {
        Ok(())
    }

    fn reduce_head(&self, _: &mut Shape, _: &LogitRule, _: &[i32], (): &mut ()) {
        let mut work = self.work.lock().unwrap();
        let head = std::mem::take(&mut work.1);
        work.0.body -= head;
        work.0.head += head;
    }
}

fn counted(teacher: &Teacher, corpus: &Sequences, budget: usize, vocab: usize) -> Work {
    let limits = Limits {
        tokens: budget.max(corpus.longest()),
        sequence: corpus.longest(),
        head_chunk: 37,
        wave: 2,
    };
    let backend = Counting::default();
    let vocabulary = Vocabulary {
        scored: vocab,
        tokenizer: vocab,
    };
    let mut decoder = Decoder::new(&backend, teacher, limits, vocabulary).unwrap();
    let plan = PackPlan::new(&corpus.shard(), 0..corpus.count(), budget);
    let batches: Vec<_> = plan.batches(corpus.shard()).collect();
    for wave in batches.chunks(2) {
        let mut out = vec![HeadRows::default(); wave.len()];
        decoder.score(wave, &mut out).unwrap();
    }
    backend.work.into_inner().unwrap().0
}

#[test]
fn flops_are_those_the_decoder_asks_for_in_every_family() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/teachers");
    let corpus = Sequences::read(&folder.join("corpus.json")).unwrap();
    let mut families = std::collections::BTreeSet::new();
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        if !path.is_dir() {
            continue;
        }
        let teacher = Teacher::open(&path, Unknown::Refuse).unwrap();
        let description = &teacher.description;
        families.insert(description.family);
        let mut demand = Demand::none(description);
        for s in 0..corpus.count() {
            let rows = corpus.shard().sequence(s).rows();
            let positions: Vec<usize> = rows.map(|row| row.position).collect();
            demand.add(positions.iter().copied());
        }
        for vocab in [description.vocab, description.vocab - 3] {
            let said = description.work(&demand, vocab);
            for budget in [50, 450] {
                let found = counted(&teacher, &corpus, budget, vocab);
                assert_eq!(said, found, "{}", path.display());
            }
        }
        assert!(description.parameters().active <= description.parameters().total);
    }
    assert!(families.len() >= 25, "{families:?}");
}

#[test]
fn parameters_are_the_numbers_in_the_files() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/teachers");
    // Of each: every stored tensor is read, none twice, in 32 bits.
    for name in ["llama_llama3rope_untied", "qwen2", "mixtral", "gpt2"] {
        let teacher = Teacher::open(&folder.join(name), Unknown::Refuse).unwrap();
        let tensors = teacher.checkpoint.tensors.values();
        let numbers: usize = tensors.map(|t| t.shape.iter().product::<usize>()).sum();
        let parameters = teacher.description.parameters();
        assert_eq!(parameters.total, numbers as u64, "{name}");
        let has_experts = name == "mixtral";
        assert_eq!(parameters.active < parameters.total, has_experts, "{name}");
    }
}
