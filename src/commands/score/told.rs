//! What a pass tells machines while it runs: events as JSON lines, metrics in Prometheus' text
//! form (<https://prometheus.io/docs/instrumenting/exposition_formats/>).

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::pass::{ShardDone, Watcher};
use crate::canonical;
use crate::commands::written::write_page;
use crate::config::Listeners;
use crate::cost::bill::mfu;
use crate::progress;
use crate::score::WaveDone;
use crate::store::{LocalDisk, PlannedShard, Store};

/// Between two states of the metrics file.
const METRICS_INTERVAL: Duration = Duration::from_secs(5);

/// Sums of this process.
#[derive(Clone, Copy, Debug, Default)]
struct Totals {
    rows: u64,
    tokens: u64,
    flops: f64,
    shards: u64,
}

/// Tells listeners, and passes everything on.
pub struct Told<'a> {
    listeners: &'a Listeners,
    inner: &'a mut (dyn Watcher + Send),
    flops_of: &'a (dyn Fn(&WaveDone) -> f64 + Sync),
    peak_flops: f64,
    shards_planned: usize,
    started: Instant,
    told_metrics: Option<Instant>,
    totals: Totals,
    /// A listener that can't be told any more is said once; the pass goes on.
    failed: bool,
}

impl<'a> Told<'a> {
    /// `shards_planned` are those this pass is to score.
    pub fn new(
        listeners: &'a Listeners,
        inner: &'a mut (dyn Watcher + Send),
        flops_of: &'a (dyn Fn(&WaveDone) -> f64 + Sync),
        [peak_flops, shards_planned]: [f64; 2],
    ) -> Told<'a> {
        Told {
            listeners,
            inner,
            flops_of,
            peak_flops,
            shards_planned: shards_planned as usize,
            started: Instant::now(),
            told_metrics: None,
            totals: Totals::default(),
            failed: false,
        }
    }

    /// The last state, whatever the interval.
    pub fn finish(mut self) {
        self.event(json!({"event": "end", "shards": self.totals.shards, "rows": self.totals.rows}));
        self.told_metrics = None;
        self.metrics();
    }

    fn seconds(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    fn event(&mut self, mut event: Value) {
        let Some(path) = &self.listeners.events else {
            return;
        };
        event["seconds"] = self.seconds().into();
        let told = append(path, &event);
        self.note_failure(told);
    }

    fn metrics(&mut self) {
        let Some(path) = &self.listeners.metrics else {
            return;
        };
        let recent = |told: Instant| told.elapsed() < METRICS_INTERVAL;
        if self.told_metrics.is_some_and(recent) {
            return;
        }
        self.told_metrics = Some(Instant::now());
        let told = write_page(path, &self.metrics_text());
        self.note_failure(told);
    }

    fn metrics_text(&self) -> String {
        let (totals, seconds) = (&self.totals, self.seconds().max(1e-9));
        let figures = [
            ("rows_total", "counter", "Rows scored.", totals.rows as f64),
            (
                "tokens_total",
                "counter",
                "Tokens computed.",
                totals.tokens as f64,
            ),
            (
                "shards_committed_total",
                "counter",
                "Shards committed.",
                totals.shards as f64,
            ),
            (
                "shards_planned",
                "gauge",
                "Shards this pass is to score.",
                self.shards_planned as f64,
            ),
            (
                "tokens_per_second",
                "gauge",
                "Mean rate so far.",
                totals.tokens as f64 / seconds,
            ),
            (
                "mfu_ratio",
                "gauge",
                "Model FLOPs per second over the peak, so far.",
                mfu(totals.flops, seconds, self.peak_flops),
            ),
        ];
        let lines = figures.map(|(name, kind, help, value)| {
            format!("# HELP kdscore_{name} {help}\n# TYPE kdscore_{name} {kind}\nkdscore_{name} {value}\n")
        });
        lines.concat()
    }

    fn note_failure(&mut self, told: Result<()>) {
        if let (Err(error), false) = (told, self.failed) {
            progress::note(&format!("note: {error:#}; scoring goes on without telling"));
            self.failed = true;
        }
    }
}

fn append(path: &Path, event: &Value) -> Result<()> {
    let name = path.file_name().and_then(|name| name.to_str());
    let name =
        name.with_context(|| format!("events: expected a file, found {}", path.display()))?;
    let line = canonical::to_canonical(event) + "\n";
    LocalDisk::new(path.parent().unwrap_or(Path::new(""))).append(name, line.as_bytes())
}

impl Watcher for Told<'_> {
    fn start(&mut self, planned: &PlannedShard) {
        self.event(json!({"event": "shard_start", "shard": planned.id}));
        self.inner.start(planned);
    }

    fn wave(&mut self, planned: &PlannedShard, done: &WaveDone) {
        self.totals.rows += done.rows as u64;
        self.totals.tokens += done.tokens as u64;
        self.totals.flops += (self.flops_of)(done);
        let seconds = self.seconds();
        self.event(json!({
            "event": "wave",
            "shard": planned.id,
            "rows": done.rows,
            "tokens": done.tokens,
            "tokens_per_second": self.totals.tokens as f64 / seconds,
            "mfu": mfu(self.totals.flops, seconds, self.peak_flops),
        }));
        self.metrics();
        self.inner.wave(planned, done);
    }

    fn shard(&mut self, done: &ShardDone) {
        self.totals.shards += 1;
        self.event(json!({
            "event": "shard_done",
            "shard": done.planned.id,
            "rows": done.rows,
            "tokens": done.tokens,
            "shard_seconds": done.total_seconds,
        }));
        self.metrics();
        self.inner.shard(done);
    }
}
