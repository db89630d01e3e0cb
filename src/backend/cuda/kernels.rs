//! One typed launch of every kernel: what a buffer must be, the grid, the block, the shared memory,
//! the parameters. The kernels' files in `cuda/` say the same from their side.
//!
//! Architecture invariant: the shape of a block follows from widths alone, never from the number
//! of rows.

use std::collections::HashMap;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};

use super::attention::{self, AttentionKernel, DeviceAttention};
use super::compile::Images;
use super::driver::{Argument, Device, Function, Launch, Module, Stream, count};
use super::experts::{Choices, DeviceRouter};
use super::parameters::{
    DeviceActivation, DeviceLinear, DeviceLogitRule, DeviceNorm, DeviceRope, DeviceRows,
};
use super::tensor::{Kind, View};
use crate::backend::{
    Activation, AttentionShape, Into, LogitRule, NormKind, NormShape, RopePairs, RopeShape,
};

/// Threads of blocks that run over a whole buffer, and the most blocks of such a grid.
const FLAT_THREADS: u32 = 256;
const FLAT_BLOCKS_MAX: usize = 4096;
/// Numbers a thread of them takes at once.
const PIECE: usize = 8;
/// Threads of blocks that take a row.
const ROW_THREADS: u32 = 128;
/// As in matmul.cuh: rows and columns of a tile, and what its stages take.
const TILE_THREADS: u32 = 256;
const TILE_SHARED_BYTES: u32 = 3 * 2 * 128 * 40 * 2;
/// As in experts.cu: rows a block routes, and bytes an expert takes there for each.
const ROUTE_ROWS: usize = 4;
const ROUTE_BYTES: usize = 16;
/// Experts that fit a block's shared memory on every device.
pub const EXPERTS_MAX: usize = 1024;
/// As in head.cu.
const HEAD_THREADS: u32 = 512;
/// Ids that a row can keep.
pub const K_MAX: usize = 1024;

/// Rows and columns of a tile of the project's own product.
pub fn tile_rows(kind: Kind) -> usize {
    match kind {
        Kind::Bf16 => 128,
        Kind::F32 => 64,
    }
}

fn tile_shared_bytes(kind: Kind) -> u32 {
    match kind {
        Kind::Bf16 => TILE_SHARED_BYTES,
        Kind::F32 => 0,
    }
}

/// The kernels of a device, loaded.
#[derive(Debug)]
pub struct Kernels {
    functions: HashMap<String, Function>,
    _modules: Vec<Module>,
}

/// Files with what each holds, and the most dynamic shared memory that its launches take.
fn catalogue() -> Vec<(&'static str, Vec<(String, u32)>)> {
    let plain = |names: &[&str]| -> Vec<(String, u32)> {
        let kinds = [Kind::Bf16, Kind::F32].into_iter();
        kinds
            .flat_map(|kind| {
                names
                    .iter()
                    .map(move |n| (format!("{n}_{}", kind.name()), 0))
            })
            .collect()
    };
    let one = |name: &str, bytes: u32| (name.to_owned(), bytes);
    let mut elementwise = plain(&[
        "scale",
        "clip",
        "add_scaled",
        "scale_rows",
        "gate_rows",
        "gather",
        "join_heads",
        "copy_f32",
        "copy_bf16",
    ]);
    elementwise.push(one("gate_rows_bf16_by_f32", 0));
    let norms = ["f32_f32", "f32_bf16", "bf16_bf16"];
    let norms = norms
        .iter()
        .flat_map(|pair| ["rms", "layer"].map(|kind| one(&format!("{kind}_norm_{pair}"), 0)));
    let own = |name: &str, kind: Kind| one(name, tile_shared_bytes(kind));
    let mut experts = plain(&["weigh_inputs", "combine"]);
    experts.extend([
        one("route", count(ROUTE_ROWS * ROUTE_BYTES * EXPERTS_MAX)),
        one("count_choices", 0),
        one("place_choices", 0),
        own("expert_matmul_bf16", Kind::Bf16),
        own("expert_matmul_f32", Kind::F32),
    ]);
    let attention = attention::KERNELS.iter();
    vec![
        ("activation.cu", plain(&["activate"])),
        (
            "attention.cu",
            attention.map(|k| one(k.name, k.shared_bytes())).collect(),
        ),
        (
            "attention_f32.cu",
            vec![one("attention_f32", attention::F32_SHARED_BYTES_MAX)],
        ),
        ("elementwise.cu", elementwise),
        ("embedding.cu", plain(&["embed_replace", "embed_add"])),
        ("experts.cu", experts),
        ("head.cu", vec![one("reduce_head", 0)]),
        (
            "matmul.cu",
            vec![
                own("matmul_bf16_bf16", Kind::Bf16),
                own("matmul_bf16_f32", Kind::Bf16),
                own("matmul_f32_f32", Kind::F32),
            ],
        ),
        ("norm.cu", norms.collect()),
        ("rope.cu", plain(&["rope_halves", "rope_neighbours"])),
    ]
}

/// A norm's vectors on the device, 0 for none, and their lengths.
#[derive(Clone, Copy, Debug, Default)]
pub struct NormVectors {
    pub weight: (u64, usize),
    pub bias: (u64, usize),
}

/// One matrix product: out = or += x · wᵀ + bias.
#[derive(Clone, Copy, Debug)]
pub struct OwnProduct {
    pub out: View,
    pub x: View,
    pub weight: u64, // (N, K)
    pub bias: u64,   // (N) in fp32, or 0
    pub into: Into,
}

/// Threads of a piece of a norm, and pieces a block.
fn norm_block(width: usize) -> (u32, u32) {
    match width {
        0..=1024 => (32, 8),
        1025..=8192 => (256, 1),
        _ => (1024, 1),
    }
}

/// Numbers from one piece's vector to the next: its width, or 0 where all share one.
fn vector_step(length: usize, width: usize, row: usize) -> Result<i32> {
    ensure!(
        [0, width, row].contains(&length),
        "norm: expected a weight of {width} or {row} numbers, found {length}"
    );
    Ok(if length == row && row > width {
        count(width)
    } else {
        0
    })
}

fn flat(numbers: usize) -> Launch {
    let blocks = numbers.div_ceil(FLAT_THREADS as usize * PIECE);
    Launch::new(blocks.clamp(1, FLAT_BLOCKS_MAX), FLAT_THREADS)
}

impl Kernels {
    pub fn load(device: &Arc<Device>, images: &Images) -> Result<Kernels> {
        let (mut functions, mut modules) = (HashMap::new(), Vec::new());
        for (file, names) in catalogue() {
            let image = images.list.iter().find(|image| image.file == file);
            let image = image.with_context(|| format!("{file} was not compiled"))?;
            let module = Module::load(device, file, &image.bytes)?;
            for (name, shared_bytes) in names {
                let function = module.function(&name, shared_bytes)?;
                functions.insert(name, function);
            }
            modules.push(module);
        }
        Ok(Kernels {
            functions,
            _modules: modules,
        })
    }

    /// Launches a kernel over rows or tiles that are there; none is no work.
    fn launch(
        &self,
        stream: &Stream,
        name: &str,
        launch: Launch,
        arguments: &[&dyn Argument],
    ) -> Result<()> {
        if launch.grid.0 == 0 || launch.grid.1 == 0 {
            return Ok(());
        }
        let function = self.functions.get(name);
        let function = function.with_context(|| format!("kernel {name}: expected, not loaded"))?;
        // SAFETY: each wrapper below hands over its kernel's parameters, and views of buffers that
        // it has compared in kind and shape.
        unsafe { stream.launch(function, launch, arguments) }
    }

    pub fn embed(&self, s: &Stream, out: View, table: View, rows: u64, into: Into) -> Result<()> {
        same("embedding", &[(out.kind, Kind::F32)])?;
        widths("embedding", &[(out.width, table.width)])?;
        let verb = match into {
            Into::Replace => "replace",
            Into::Add => "add",
        };
        let name = format!("embed_{verb}_{}", table.kind.name());
        let launch = Launch::new(out.rows, ROW_THREADS);
        let width: i32 = count(out.width);
        self.launch(
            s,
            &name,
            launch,
            &[&out.address, &table.address, &rows, &width],
        )
    }

    pub fn scale(&self, s: &Stream, x: View, factor: f32) -> Result<()> {
        self.over_all(s, "scale", x, factor)
    }

    pub fn clip(&self, s: &Stream, x: View, bound: f32) -> Result<()> {
        self.over_all(s, "clip", x, bound)
    }

    fn over_all(&self, s: &Stream, op: &str, x: View, value: f32) -> Result<()> {
        let numbers: i64 = count(x.numbers());
        let name = format!("{op}_{}", x.kind.name());
        self.launch(s, &name, flat(x.numbers()), &[&x.address, &numbers, &value])
    }

    /// `factors` (P, 1) in fp32.
    pub fn scale_rows(&self, s: &Stream, x: View, factors: View, rows: u64) -> Result<()> {
        same("scale rows", &[(factors.kind, Kind::F32)])?;
        widths("scale rows", &[(factors.width, 1)])?;
        let (name, width) = (
            format!("scale_rows_{}", x.kind.name()),
            count::<i32>(x.width),
        );
        let launch = Launch::new(x.rows, ROW_THREADS);
        self.launch(
            s,
            &name,
            launch,
            &[&x.address, &factors.address, &rows, &width],
        )
    }

    /// `gate` (T, 1).
    pub fn gate_rows(&self, s: &Stream, x: View, gate: View) -> Result<()> {
        widths("gate rows", &[(gate.width, 1), (gate.rows, x.rows)])?;
        let name = match (x.kind, gate.kind) {
            (x, gate) if x == gate => format!("gate_rows_{}", x.name()),
            (Kind::Bf16, Kind::F32) => "gate_rows_bf16_by_f32".to_owned(),
            _ => anyhow::bail!("gate rows: no kernel for {:?} by {:?}", x.kind, gate.kind),
        };
        let width: i32 = count(x.width);
        let launch = Launch::new(x.rows, ROW_THREADS);
        self.launch(s, &name, launch, &[&x.address, &gate.address, &width])
    }

    pub fn gather(&self, s: &Stream, out: View, x: View, rows: u64) -> Result<()> {
        same("gather", &[(out.kind, x.kind)])?;
        widths("gather", &[(out.width, x.width)])?;
        let (name, width) = (format!("gather_{}", x.kind.name()), count::<i32>(x.width));
        let launch = Launch::new(out.rows, ROW_THREADS);
        self.launch(s, &name, launch, &[&out.address, &x.address, &rows, &width])
    }

    pub fn join_heads(
        &self,
        s: &Stream,
        [out, own, shared]: [View; 3],
        heads: usize,
    ) -> Result<()> {
        same(
            "join heads",
            &[(out.kind, own.kind), (out.kind, shared.kind)],
        )?;
        widths(
            "join heads",
            &[(own.width % heads, 0), (own.rows, shared.rows)],
        )?;
        let name = format!("join_heads_{}", out.kind.name());
        let [heads_, own_width, shared_width]: [i32; 3] =
            [heads, own.width / heads, shared.width].map(count);
        let launch = Launch::new(out.rows, ROW_THREADS);
        let [out, own, shared] = [out, own, shared].map(|view| view.address);
        self.launch(
            s,
            &name,
            launch,
            &[&out, &own, &shared, &heads_, &own_width, &shared_width],
        )
    }

    pub fn copy(&self, s: &Stream, out: View, x: View) -> Result<()> {
        widths("copy", &[(out.numbers(), x.numbers())])?;
        let name = format!("copy_{}_{}", x.kind.name(), out.kind.name());
        let numbers: i64 = count(x.numbers());
        self.launch(
            s,
            &name,
            flat(x.numbers()),
            &[&out.address, &x.address, &numbers],
        )
    }

    pub fn add_scaled(&self, s: &Stream, out: View, x: View, factor: f32) -> Result<()> {
        same("add", &[(out.kind, Kind::F32)])?;
        widths("add", &[(out.numbers(), x.numbers())])?;
        let name = format!("add_scaled_{}", x.kind.name());
        let numbers: i64 = count(x.numbers());
        self.launch(
            s,
            &name,
            flat(x.numbers()),
            &[&out.address, &x.address, &numbers, &factor],
        )
    }

    pub fn activate(
        &self,
        s: &Stream,
        activation: Activation,
        x: View,
        up: Option<View>,
    ) -> Result<()> {
        if let Some(up) = up {
            same("activation", &[(up.kind, x.kind)])?;
            widths("activation", &[(up.numbers(), x.numbers())])?;
        }
        let name = format!("activate_{}", x.kind.name());
        let (up, numbers) = (up.map_or(0, |up| up.address), count::<i64>(x.numbers()));
        let activation = DeviceActivation::from(activation);
        self.launch(
            s,
            &name,
            flat(x.numbers()),
            &[&x.address, &up, &numbers, &activation],
        )
    }

    pub fn norm(
        &self,
        s: &Stream,
        [out, x]: [View; 2],
        shape: &NormShape,
        vectors: NormVectors,
    ) -> Result<()> {
        widths(
            "norm",
            &[(out.numbers(), x.numbers()), (x.width % shape.width, 0)],
        )?;
        let pieces = x.width / shape.width;
        let kind = match shape.kind {
            NormKind::Rms => "rms",
            NormKind::Layer => "layer",
        };
        let name = format!("{kind}_norm_{}_{}", x.kind.name(), out.kind.name());
        let (threads, per_block) = norm_block(shape.width);
        let rule = DeviceNorm {
            width: count(shape.width),
            pieces: count(pieces),
            count: count(x.rows * pieces),
            weight_step: vector_step(vectors.weight.1, shape.width, x.width)?,
            bias_step: vector_step(vectors.bias.1, shape.width, x.width)?,
            eps: shape.eps,
        };
        let launch = Launch {
            grid: (count((x.rows * pieces).div_ceil(per_block as usize)), 1),
            block: (threads, per_block),
            shared_bytes: 0,
        };
        let (weight, bias) = (vectors.weight.0, vectors.bias.0);
        self.launch(
            s,
            &name,
            launch,
            &[&out.address, &x.address, &weight, &bias, &rule],
        )
    }

    /// `cos` and `sin` (P, half) in fp32.
    pub fn rope(
        &self,
        s: &Stream,
        x: View,
        shape: &RopeShape,
        [cos, sin]: [View; 2],
        positions: u64,
    ) -> Result<()> {
        same("rope", &[(cos.kind, Kind::F32), (sin.kind, Kind::F32)])?;
        widths(
            "rope",
            &[(x.width % shape.head_dim, 0), (cos.width, sin.width)],
        )?;
        let pairs = match shape.pairs {
            RopePairs::Halves => "halves",
            RopePairs::Neighbours => "neighbours",
        };
        let name = format!("rope_{pairs}_{}", x.kind.name());
        let rule = DeviceRope {
            heads: count(x.width / shape.head_dim),
            head_dim: count(shape.head_dim),
            start: count(shape.start),
            half: count(cos.width),
        };
        let launch = Launch::new(x.rows, ROW_THREADS);
        self.launch(
            s,
            &name,
            launch,
            &[&x.address, &cos.address, &sin.address, &positions, &rule],
        )
    }

    /// `tiles` point to AttentionTile; `data` to queries, keys, values and what leads to them.
    pub fn attention(
        &self,
        s: &Stream,
        kernel: &AttentionKernel,
        shape: &AttentionShape,
        tiles: (u64, usize),
        data: DeviceAttention,
    ) -> Result<()> {
        let launch = Launch {
            grid: (count(tiles.1), count(shape.kv_heads)),
            block: (ROW_THREADS, 1),
            shared_bytes: kernel.shared_bytes_for(shape),
        };
        let rule = attention::DeviceShape::from(shape);
        self.launch(s, kernel.name, launch, &[&rule, &tiles.0, &data])
    }

    /// The project's own product, on exactly the rows of x.
    pub fn multiply(&self, s: &Stream, p: &OwnProduct) -> Result<()> {
        let (x, out) = (p.x, p.out);
        let tile = tile_rows(x.kind);
        let shape = DeviceLinear {
            m: count(x.rows),
            n: count(out.width),
            k: count(x.width),
            adds: i32::from(p.into == Into::Add),
        };
        let launch = Launch {
            grid: (
                count(x.rows.div_ceil(tile)),
                count(out.width.div_ceil(tile)),
            ),
            block: (TILE_THREADS, 1),
            shared_bytes: tile_shared_bytes(x.kind),
        };
        let name = format!("matmul_{}_{}", x.kind.name(), out.kind.name());
        self.launch(
            s,
            &name,
            launch,
            &[&out.address, &x.address, &p.weight, &p.bias, &shape],
        )
    }

    /// `choices.experts` and `.weights` of every row of `logits` (T, E) in fp32.
    pub fn route(
        &self,
        s: &Stream,
        choices: &Choices,
        logits: View,
        correction: u64,
        rule: &DeviceRouter,
    ) -> Result<()> {
        same("router", &[(logits.kind, Kind::F32)])?;
        let rows: i32 = count(logits.rows);
        let launch = Launch {
            shared_bytes: count(ROUTE_ROWS * ROUTE_BYTES * logits.width),
            ..Launch::new(logits.rows.div_ceil(ROUTE_ROWS), ROW_THREADS)
        };
        let arguments: [&dyn Argument; 6] = [
            &choices.experts,
            &choices.weights,
            &logits.address,
            &correction,
            &rows,
            rule,
        ];
        self.launch(s, "route", launch, &arguments)
    }

    /// Lays the choices of `experts` experts together, in tiles of the product's height.
    pub fn place(&self, s: &Stream, c: &Choices, experts: usize, kind: Kind) -> Result<()> {
        let launch = Launch::new(experts, FLAT_THREADS);
        let choices: i32 = count(c.count);
        self.launch(
            s,
            "count_choices",
            launch,
            &[&c.counts, &c.experts, &choices],
        )?;
        let [rows, tiles_max]: [i32; 2] = [tile_rows(kind), c.tile_count].map(count);
        let arguments: [&dyn Argument; 8] = [
            &c.places, &c.sources, &c.tiles, &c.experts, &c.counts, &choices, &rows, &tiles_max,
        ];
        self.launch(s, "place_choices", launch, &arguments)
    }

    /// out (places, N) = each place's row of x · its expert's weightᵀ + bias. `sources` leads from a
    /// place to its choice, 0 where x has a row a place. `weights` and `biases` point to each
    /// expert's, 0 for no bias.
    pub fn expert_multiply(
        &self,
        s: &Stream,
        [out, x]: [View; 2],
        choices: &Choices,
        sources: u64,
        [weights, biases]: [u64; 2],
    ) -> Result<()> {
        same("experts", &[(out.kind, x.kind)])?;
        let [chosen, n, k]: [i32; 3] = [choices.chosen, out.width, x.width].map(count);
        let launch = Launch {
            grid: (
                count(out.width.div_ceil(tile_rows(x.kind))),
                count(choices.tile_count),
            ),
            block: (TILE_THREADS, 1),
            shared_bytes: tile_shared_bytes(x.kind),
        };
        let name = format!("expert_matmul_{}", x.kind.name());
        let tiles = choices.tiles;
        let arguments: [&dyn Argument; 9] = [
            &out.address,
            &x.address,
            &sources,
            &chosen,
            &weights,
            &biases,
            &tiles,
            &n,
            &k,
        ];
        self.launch(s, &name, launch, &arguments)
    }

    pub fn weigh_inputs(&self, s: &Stream, [out, x]: [View; 2], c: &Choices) -> Result<()> {
        same("experts' inputs", &[(out.kind, x.kind)])?;
        let [chosen, width]: [i32; 2] = [c.chosen, x.width].map(count);
        let name = format!("weigh_inputs_{}", x.kind.name());
        let launch = Launch::new(c.count, ROW_THREADS);
        let [out, x] = [out, x].map(|view| view.address);
        self.launch(
            s,
            &name,
            launch,
            &[&out, &x, &c.sources, &c.weights, &chosen, &width],
        )
    }

    /// out (T, H) in fp32 = the choices' results, weighted or (`weights` 0) not.
    pub fn combine(
        &self,
        s: &Stream,
        [out, results]: [View; 2],
        c: &Choices,
        weights: u64,
    ) -> Result<()> {
        same("experts' results", &[(out.kind, Kind::F32)])?;
        let [chosen, width]: [i32; 2] = [c.chosen, out.width].map(count);
        let name = format!("combine_{}", results.kind.name());
        let launch = Launch::new(out.rows, ROW_THREADS);
        let [out, results] = [out, results].map(|view| view.address);
        self.launch(
            s,
            &name,
            launch,
            &[&out, &results, &c.places, &weights, &chosen, &width],
        )
    }

    /// `logits` in fp32; `targets` (R); `rows` have room for as many.
    pub fn reduce_head(
        &self,
        s: &Stream,
        logits: View,
        targets: u64,
        rule: &LogitRule,
        k: usize,
        rows: DeviceRows,
    ) -> Result<()> {
        same("head", &[(logits.kind, Kind::F32)])?;
        ensure!(
            k <= K_MAX.min(rule.vocab) && rule.vocab <= logits.width,
            "head: expected k up to {K_MAX} and the vocabulary {}, found {k}",
            rule.vocab
        );
        let device = DeviceLogitRule {
            width: count(logits.width),
            vocab: count(rule.vocab),
            vocab_real: count(rule.vocab_real),
            scale: rule.scale,
            cap: rule.cap.unwrap_or(0.0),
            k: count(k),
        };
        let launch = Launch::new(logits.rows, HEAD_THREADS);
        self.launch(
            s,
            "reduce_head",
            launch,
            &[&logits.address, &targets, &device, &rows],
        )
    }
}

/// Kinds that an op needs to be the same.
fn same(op: &str, pairs: &[(Kind, Kind)]) -> Result<()> {
    for (found, expected) in pairs {
        ensure!(
            found == expected,
            "{op}: expected numbers in {expected:?}, found {found:?}"
        );
    }
    Ok(())
}

/// Sizes that an op needs to be the same.
fn widths(op: &str, pairs: &[(usize, usize)]) -> Result<()> {
    for (found, expected) in pairs {
        ensure!(
            found == expected,
            "{op}: expected a size of {expected}, found {found}"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_shapes_follow_from_the_width() {
        assert_eq!(norm_block(64), (32, 8));
        assert_eq!(norm_block(1024), (32, 8));
        assert_eq!(norm_block(4096), (256, 1));
        assert_eq!(norm_block(8193), (1024, 1));
        assert_eq!(flat(1), Launch::new(1, 256));
        assert_eq!(flat(2049), Launch::new(2, 256));
        assert_eq!(flat(1 << 30).grid.0, 4096);
    }

    #[test]
    fn a_vector_is_one_for_all_pieces_or_one_for_each() {
        assert_eq!(vector_step(0, 64, 256).unwrap(), 0);
        assert_eq!(vector_step(64, 64, 256).unwrap(), 0);
        assert_eq!(vector_step(256, 64, 256).unwrap(), 64);
        assert_eq!(vector_step(256, 256, 256).unwrap(), 0);
        assert!(vector_step(65, 64, 256).is_err());
    }

    /// The catalogue names every kernel of the sources, and no other.
    #[test]
    fn every_kernel_has_a_launch() {
        for (file, names) in catalogue() {
            let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("cuda")
                .join(file);
            let text = std::fs::read_to_string(path).unwrap();
            let registered = text.matches("REGISTER_KERNEL(").count();
            assert!(registered > 0, "{file}");
            for (name, _) in &names {
                let stem = name.trim_end_matches("_bf16").trim_end_matches("_f32");
                let stem = stem.trim_end_matches("_bf16").trim_end_matches("_f32");
                assert!(text.contains(stem), "{file}: {name}");
            }
        }
    }
}
