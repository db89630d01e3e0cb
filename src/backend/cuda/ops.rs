//! The backend's ops on a device. Each sets the shape of its output, then asks the stream for what
//! it takes.

use std::ops::Range;
use std::sync::Mutex;

use anyhow::{Context, Result, ensure};
use half::bf16;
use serde_json::Value;

use super::arena::{Room, Use};
use super::attention::{self, AttentionKernel, DeviceAttention, DeviceSegments, HEAD_DIM_MAX};
use super::driver::Stream;
use super::experts::{DeviceExperts, DeviceRouter, PointerTable, Routing, RoutingLayout};
use super::gemm::ROWS_LEAST;
use super::kernels::{EXPERTS_MAX, K_MAX, NormVectors};
use super::rows::{RowLayout, RowsOnDevice, Seat};
use super::tensor::{DeviceTensor, Kind, View};
use super::weights::DeviceWeight;
use super::{Cuda, encode, int_bytes, word_bytes};
use crate::backend::{
    Activation, AttentionShape, Backend, Experts, ExpertsRule, FloatDtype, HeadRows, HostWeight,
    Into, Linear, LogitRule, Mlp, MlpSizes, MlpWork, Norm, Precision, RopeShape, Segments, Tensor,
    Weighs,
};

/// Blocks of a grid's second side, at most.
const GRID_Y_MAX: usize = 65_535;

/// Row numbers, token ids or positions.
#[derive(Debug)]
pub struct DeviceIndex {
    room: Room,
    length: usize,
}

impl Backend for Cuda {
    type Tensor = DeviceTensor;
    type Weight = DeviceWeight;
    type Index = DeviceIndex;
    type Segments = DeviceSegments;
    type Experts = DeviceExperts;
    type Routing = Routing;
    type Rows = RowsOnDevice;

    fn compute_dtype(&self) -> FloatDtype {
        match self.made.kind {
            Kind::Bf16 => FloatDtype::Bf16,
            Kind::F32 => FloatDtype::F32,
        }
    }

    fn runs_behind(&self) -> bool {
        true
    }

    fn rehearses(&self) -> bool {
        !self.arena.is_dry()
    }

    fn provenance(&self) -> Value {
        let mut facts = self.made.facts.clone();
        facts["products"] = self.made.gemm.record();
        facts
    }

    fn tensor(&self, precision: Precision, rows_max: usize, width: usize) -> Result<DeviceTensor> {
        let kind = match precision {
            Precision::Compute => self.made.kind,
            Precision::Single => Kind::F32,
        };
        let rows_max = match rows_max {
            0 => 0,
            rows => rows.max(ROWS_LEAST),
        };
        let numbers = DeviceTensor::numbers(rows_max, width);
        let bytes = numbers.and_then(|n| n.checked_mul(kind.size()));
        let bytes =
            bytes.with_context(|| format!("a buffer of {rows_max} x {width} is too large"))?;
        let room = self.arena.take(bytes, Use::Buffers)?;
        Ok(DeviceTensor::new(room, kind, rows_max, width))
    }

    fn mlp_work(&self, sizes: &MlpSizes) -> Result<MlpWork<DeviceTensor, Routing>> {
        let tensor = |rows, width| self.tensor(Precision::Compute, rows, width);
        let Some(experts) = &sizes.experts else {
            return Ok(MlpWork {
                rows: tensor(0, 0)?,
                gate: tensor(sizes.rows_max, sizes.inner)?,
                up: tensor(sizes.rows_max, sizes.inner)?,
                result: tensor(0, 0)?,
                routing: Routing {
                    room: None,
                    layout: RoutingLayout::default(),
                },
            });
        };
        ensure!(
            experts.count <= EXPERTS_MAX && experts.chosen <= 32,
            "expected at most {EXPERTS_MAX} experts of which a token takes up to 32 on a CUDA device, found {} and {}",
            experts.count,
            experts.chosen
        );
        // Either the choices of all rows at an expert, or all rows at a plain MLP.
        let inner = sizes.inner.max(experts.chosen * experts.inner);
        let choices = sizes.rows_max * experts.chosen;
        let layout = RoutingLayout::new(sizes.rows_max, experts, self.made.kind);
        ensure!(
            layout.tiles_max() <= GRID_Y_MAX,
            "expected choices of experts in at most {GRID_Y_MAX} tiles, found {}; a smaller --token-budget has fewer",
            layout.tiles_max()
        );
        Ok(MlpWork {
            rows: tensor(
                if experts.weighs_inputs { choices } else { 0 },
                experts.hidden,
            )?,
            gate: tensor(sizes.rows_max, inner)?,
            up: tensor(sizes.rows_max, inner)?,
            result: tensor(choices, experts.hidden)?,
            routing: Routing {
                room: Some(self.arena.take(layout.bytes(), Use::Buffers)?),
                layout,
            },
        })
    }

    fn rows(&self, rows_max: usize, k: usize) -> Result<RowsOnDevice> {
        ensure!(
            k <= K_MAX,
            "k: expected at most {K_MAX} on a CUDA device, found {k}"
        );
        self.rows_of(RowLayout { rows_max, k })
    }

    fn weight(&self, host: &HostWeight) -> Result<DeviceWeight> {
        let kind = self.made.kind;
        Ok(match host.shape.len() {
            1 => {
                let values = host.values();
                let encoded = |kind: Kind| {
                    let mut bytes = vec![0; values.len() * kind.size()];
                    encode(&values, kind, &mut bytes);
                    self.sent(&bytes, Use::Weights)
                };
                DeviceWeight::Vector {
                    room: encoded(Kind::F32)?,
                    length: values.len(),
                    rounded: (kind == Kind::Bf16).then(|| encoded(kind)).transpose()?,
                }
            }
            _ => DeviceWeight::Matrix {
                room: self.matrix(host, kind)?,
                kind,
                outputs: host.rows(),
                inputs: host.width(),
            },
        })
    }

    fn experts_of(&self, experts: Experts<DeviceWeight>) -> Result<DeviceExperts> {
        let list = &experts.list;
        let of = |part: fn(&Mlp<DeviceWeight>) -> &Linear<DeviceWeight>| {
            let linears: Vec<&Linear<DeviceWeight>> = list.iter().map(part).collect();
            self.table(&linears)
        };
        let gates: Vec<_> = list.iter().filter_map(|mlp| mlp.gate.as_ref()).collect();
        Ok(DeviceExperts {
            gate: (!gates.is_empty())
                .then(|| self.table(&gates))
                .transpose()?,
            up: of(|mlp| &mlp.up)?,
            down: of(|mlp| &mlp.down)?,
            correction: experts.correction,
            list: experts.list,
        })
    }

    fn index(&self, values: &[u32]) -> Result<DeviceIndex> {
        Ok(DeviceIndex {
            room: self.sent(&word_bytes(values), Use::Batch)?,
            length: values.len(),
        })
    }

    fn segments(&self, segments: Segments) -> Result<DeviceSegments> {
        let spans = attention::spans(&segments);
        Ok(DeviceSegments {
            positions: self.sent(&word_bytes(&segments.query_positions), Use::Batch)?,
            spans: self.sent(&int_bytes(spans.as_flattened()), Use::Batch)?,
            tiles: Mutex::default(),
            host: segments,
        })
    }

    fn wait(&self) {
        self.run("waiting", |_| self.settled());
    }

    fn download(&self, x: &DeviceTensor) -> Vec<f32> {
        let view = x.view();
        let mut bytes = Vec::new();
        self.run("download", |_| {
            bytes = self.read(view.address, view.bytes())?;
            Ok(())
        });
        bytes.resize(view.bytes(), 0);
        match view.kind {
            Kind::F32 => {
                let (numbers, _) = bytes.as_chunks::<4>();
                numbers.iter().map(|b| f32::from_le_bytes(*b)).collect()
            }
            Kind::Bf16 => {
                let (numbers, _) = bytes.as_chunks::<2>();
                numbers
                    .iter()
                    .map(|b| bf16::from_le_bytes(*b).to_f32())
                    .collect()
            }
        }
    }

    fn upload(&self, values: &[f32], x: &mut DeviceTensor) {
        x.set_shape(values.len() / x.width().max(1), x.width());
        let view = x.view();
        self.run("upload", |_| {
            let mut bytes = vec![0; view.bytes()];
            encode(values, view.kind, &mut bytes);
            self.overwrite(view.address, &bytes)
        });
    }

    fn embed(&self, table: &DeviceWeight, rows: &DeviceIndex, into: Into, out: &mut DeviceTensor) {
        let (address, kind, table_rows, width) = table.matrix();
        let table = View {
            address,
            kind,
            rows: table_rows,
            width,
        };
        match into {
            Into::Replace => out.set_shape(rows.length, width),
            Into::Add => assert_eq!(out.rows(), rows.length, "embedding"),
        }
        let rows = rows.room.address();
        self.run("embedding", |s| {
            self.made.kernels.embed(s, out.view(), table, rows, into)
        });
    }

    fn scale(&self, x: &mut DeviceTensor, factor: f32) {
        self.run("scale", |s| self.made.kernels.scale(s, x.view(), factor));
    }

    fn scale_rows(&self, x: &mut DeviceTensor, factors: &DeviceTensor, rows: &DeviceIndex) {
        let (x, factors, rows) = (x.view(), factors.view(), rows.room.address());
        self.run("scale rows", |s| {
            self.made.kernels.scale_rows(s, x, factors, rows)
        });
    }

    fn gate_rows(&self, x: &mut DeviceTensor, gate: &DeviceTensor) {
        self.run("gate rows", |s| {
            self.made.kernels.gate_rows(s, x.view(), gate.view())
        });
    }

    fn clip(&self, x: &mut DeviceTensor, bound: f32) {
        self.run("clip", |s| self.made.kernels.clip(s, x.view(), bound));
    }

    fn copy(&self, x: &DeviceTensor, out: &mut DeviceTensor) {
        out.set_shape(x.rows(), x.width());
        self.run("copy", |s| self.made.kernels.copy(s, out.view(), x.view()));
    }

    fn add_scaled(&self, x: &DeviceTensor, factor: f32, out: &mut DeviceTensor) {
        self.run("add", |s| {
            self.made
                .kernels
                .add_scaled(s, out.view(), x.view(), factor)
        });
    }

    fn norm(&self, x: &DeviceTensor, norm: &Norm<DeviceWeight>, out: &mut DeviceTensor) {
        out.set_shape(x.rows(), x.width());
        let views = [out.view(), x.view()];
        let vectors = vectors_of(norm);
        self.run("norm", |s| {
            self.made.kernels.norm(s, views, &norm.shape, vectors)
        });
    }

    fn norm_in_place(&self, x: &mut DeviceTensor, norm: &Norm<DeviceWeight>) {
        let (views, vectors) = ([x.view(); 2], vectors_of(norm));
        self.run("norm", |s| {
            self.made.kernels.norm(s, views, &norm.shape, vectors)
        });
    }

    fn linear(
        &self,
        x: &DeviceTensor,
        linear: &Linear<DeviceWeight>,
        into: Into,
        out: &mut DeviceTensor,
    ) {
        let outputs = linear.weight.matrix().2;
        match into {
            Into::Replace => out.set_shape(x.rows(), outputs),
            Into::Add => assert_eq!((out.rows(), out.width()), (x.rows(), outputs), "linear"),
        }
        self.run("linear", |s| self.multiply(s, x, linear, into, out));
    }

    fn rope(
        &self,
        x: &mut DeviceTensor,
        shape: &RopeShape,
        cos: &DeviceTensor,
        sin: &DeviceTensor,
        positions: &DeviceIndex,
    ) {
        let (x, tables) = (x.view(), [cos.view(), sin.view()]);
        let positions = positions.room.address();
        self.run("rope", |s| {
            self.made.kernels.rope(s, x, shape, tables, positions)
        });
    }

    fn join_heads(
        &self,
        own: &DeviceTensor,
        shared: &DeviceTensor,
        heads: usize,
        out: &mut DeviceTensor,
    ) {
        out.set_shape(own.rows(), own.width() + heads * shared.width());
        let views = [out.view(), own.view(), shared.view()];
        self.run("join heads", |s| {
            self.made.kernels.join_heads(s, views, heads)
        });
    }

    fn attention(
        &self,
        shape: &AttentionShape,
        segments: &DeviceSegments,
        sinks: Option<&DeviceWeight>,
        [q, k, v]: [&DeviceTensor; 3],
        out: &mut DeviceTensor,
    ) {
        out.set_shape(q.rows(), shape.heads * shape.value_dim);
        let out = out.view();
        self.run("attention", |s| {
            let kernel = AttentionKernel::of(out.kind, shape).with_context(|| {
                format!(
                    "expected heads of at most {HEAD_DIM_MAX} numbers, found {} and {}",
                    shape.head_dim, shape.value_dim
                )
            })?;
            let tiles = self.tiles(segments, shape.heads / shape.kv_heads, kernel.rows)?;
            let data = DeviceAttention {
                out: out.address,
                q: q.view().address,
                k: k.view().address,
                v: v.view().address,
                positions: segments.positions.address(),
                spans: segments.spans.address(),
                sinks: sinks.map_or(0, |sinks| sinks.vector().0),
            };
            self.made.kernels.attention(s, &kernel, shape, tiles, data)
        });
    }

    fn activate(&self, activation: Activation, x: &mut DeviceTensor, up: Option<&DeviceTensor>) {
        let (x, up) = (x.view(), up.map(DeviceTensor::view));
        self.run("activation", |s| {
            self.made.kernels.activate(s, activation, x, up)
        });
    }

    fn experts(
        &self,
        x: &DeviceTensor,
        logits: &DeviceTensor,
        rule: &ExpertsRule,
        experts: &DeviceExperts,
        work: &mut MlpWork<DeviceTensor, Routing>,
        out: &mut DeviceTensor,
    ) {
        let choices = x.rows() * rule.router.chosen;
        out.set_shape(x.rows(), x.width());
        work.gate.set_shape(choices, experts.up.outputs);
        work.up.set_shape(choices, experts.up.outputs);
        work.result.set_shape(choices, x.width());
        if rule.router.weighs == Weighs::Inputs {
            work.rows.set_shape(choices, x.width());
        }
        let views = [x.view(), logits.view(), out.view()];
        self.run("experts", |s| self.mix(s, views, rule, experts, work));
    }

    fn gather(&self, x: &DeviceTensor, rows: &DeviceIndex, out: &mut DeviceTensor) {
        out.set_shape(rows.length, x.width());
        let (views, rows) = ([out.view(), x.view()], rows.room.address());
        self.run("gather", |s| {
            self.made.kernels.gather(s, views[0], views[1], rows)
        });
    }

    fn slice(&self, x: &DeviceTensor, rows: Range<usize>, out: &mut DeviceTensor) {
        out.set_shape(rows.len(), x.width());
        let (from, to) = (x.view().at_row(rows.start, rows.len()), out.view());
        self.run("slice", |s| {
            ensure!(from.kind == to.kind, "slice: expected numbers of one kind");
            // SAFETY: `set_shape` made sure of `out`; the rows are of `x`, another buffer.
            unsafe { s.copy(to.address, from.address, from.bytes()) }
        });
    }

    fn reduce_head(
        &self,
        logits: &mut DeviceTensor,
        rule: &LogitRule,
        targets: &[i32],
        out: &mut RowsOnDevice,
    ) {
        let logits = logits.view();
        let (layout, first) = (out.layout, out.filled);
        out.filled += targets.len();
        self.run("head", |s| {
            ensure!(
                targets.len() == logits.rows && out.filled <= layout.rows_max,
                "head: expected a target and room for each of {} rows",
                logits.rows
            );
            let targets = self.sent(&int_bytes(targets), Use::Batch)?;
            let rows = layout.at_row(out.seat().room.address(), first);
            let (kernels, k) = (&self.made.kernels, layout.k);
            kernels.reduce_head(s, logits, targets.address(), rule, k, rows)
        });
    }

    fn send_rows(&self, rows: &mut RowsOnDevice) {
        let bytes = rows.layout.bytes();
        self.run("rows", |s| {
            let Seat { room, slot, .. } = rows.seat();
            let staging = &self.made.staging;
            staging.send_down(s, room.address(), bytes, slot)?;
            rows.sent = Some(self.arena.given());
            Ok(())
        });
    }

    fn take_rows(&self, mut rows: RowsOnDevice, out: &mut HeadRows) -> Result<()> {
        self.run("rows", |_| {
            let sent = rows.sent.take();
            let given = sent.context("rows are sent before they are taken")?;
            let (layout, filled) = (rows.layout, rows.filled);
            let bytes = self.made.staging.receive(&mut rows.seat().slot)?;
            out.append(layout.read(bytes, filled));
            self.arena.settle(given);
            Ok(())
        });
        self.take_failure()
    }
}

fn vectors_of(norm: &Norm<DeviceWeight>) -> NormVectors {
    let [weight, bias] = [&norm.weight, &norm.bias]
        .map(|vector| vector.as_ref().map_or((0, 0), DeviceWeight::vector));
    NormVectors { weight, bias }
}

impl Cuda {
    /// Pointers to one projection of each expert.
    fn table(&self, linears: &[&Linear<DeviceWeight>]) -> Result<PointerTable> {
        let pointers = |addresses: Vec<u64>| {
            let bytes: Vec<u8> = addresses.iter().flat_map(|a| a.to_le_bytes()).collect();
            self.sent(&bytes, Use::Weights)
        };
        let weights = linears.iter().map(|linear| linear.weight.matrix().0);
        let biases = linears.iter().filter_map(|linear| linear.bias.as_ref());
        let biases: Vec<u64> = biases.map(|bias| bias.vector().0).collect();
        ensure!(
            biases.is_empty() || biases.len() == linears.len(),
            "experts: expected a bias for all or none, found {} of {}",
            biases.len(),
            linears.len()
        );
        Ok(PointerTable {
            weights: pointers(weights.collect())?,
            biases: (!biases.is_empty()).then(|| pointers(biases)).transpose()?,
            outputs: linears[0].weight.matrix().2,
        })
    }

    /// Tiles of the segments for a kernel, cut and sent once a batch.
    fn tiles(&self, s: &DeviceSegments, group: usize, rows: usize) -> Result<(u64, usize)> {
        let mut tiles = s.tiles.lock().expect("no thread panics with it");
        if let Some((room, count)) = tiles.get(&(group, rows)) {
            return Ok((room.address(), *count));
        }
        let cut = attention::tiles(&s.host, group, rows);
        let room = self.sent(&int_bytes(cut.as_flattened()), Use::Batch)?;
        let found = (room.address(), cut.len());
        tiles.insert((group, rows), (room, cut.len()));
        Ok(found)
    }

    /// What `experts` does once the shapes of the work are set.
    fn mix(
        &self,
        stream: &Stream,
        [x, logits, out]: [View; 3],
        rule: &ExpertsRule,
        experts: &DeviceExperts,
        work: &MlpWork<DeviceTensor, Routing>,
    ) -> Result<()> {
        let (kernels, count) = (&self.made.kernels, experts.list.len());
        let room = work
            .routing
            .room
            .as_ref()
            .context("no room for choices was planned")?;
        let chosen = rule.router.chosen;
        let choices = work
            .routing
            .layout
            .choices(room.address(), x.rows, chosen, count);
        let correction = experts.correction.as_ref().map_or(0, |c| c.vector().0);
        let router = DeviceRouter::new(&rule.router, count);
        kernels.route(stream, &choices, logits, correction, &router)?;
        kernels.place(stream, &choices, count, x.kind)?;
        let (input, sources, weights) = match rule.router.weighs {
            Weighs::Outputs => (x, choices.sources, choices.weights),
            Weighs::Inputs => {
                kernels.weigh_inputs(stream, [work.rows.view(), x], &choices)?;
                (work.rows.view(), 0, 0)
            }
        };
        let (gate, up, result) = (work.gate.view(), work.up.view(), work.result.view());
        let up_table = experts.up.addresses();
        kernels.expert_multiply(stream, [up, input], &choices, sources, up_table)?;
        let inner = match &experts.gate {
            Some(table) => {
                let table = table.addresses();
                kernels.expert_multiply(stream, [gate, input], &choices, sources, table)?;
                kernels.activate(stream, rule.activation, gate, Some(up))?;
                gate
            }
            None => {
                kernels.activate(stream, rule.activation, up, None)?;
                up
            }
        };
        let down = experts.down.addresses();
        kernels.expert_multiply(stream, [result, inner], &choices, 0, down)?;
        kernels.combine(stream, [out, result], &choices, weights)
    }
}
