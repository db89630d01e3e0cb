//! A store that notes how long its writes took.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use anyhow::Result;

use super::{Bytes, Created, Entry, FileParts, Store};

/// Passes everything on; the time of writes adds up.
#[derive(Debug)]
pub struct TimedStore {
    inner: Arc<dyn Store>,
    write_ns: AtomicU64,
}

impl TimedStore {
    pub fn new(inner: Arc<dyn Store>) -> TimedStore {
        TimedStore {
            inner,
            write_ns: AtomicU64::new(0),
        }
    }

    /// Seconds of writes since this was last asked.
    pub fn take_write_seconds(&self) -> f64 {
        self.write_ns.swap(0, Ordering::Relaxed) as f64 * 1e-9
    }

    fn write<T>(&self, work: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let done = work();
        let spent = started.elapsed().as_nanos() as u64;
        self.write_ns.fetch_add(spent, Ordering::Relaxed);
        done
    }
}

impl Store for TimedStore {
    fn place(&self, name: &str) -> String {
        self.inner.place(name)
    }

    fn put(&self, files: &[FileParts]) -> Result<()> {
        self.write(|| self.inner.put(files))
    }

    fn create(&self, name: &str, bytes: &[u8]) -> Result<Created> {
        self.write(|| self.inner.create(name, bytes))
    }

    fn read(&self, name: &str) -> Result<Option<Bytes>> {
        self.inner.read(name)
    }

    fn read_range(&self, name: &str, range: Range<usize>) -> Result<Vec<u8>> {
        self.inner.read_range(name, range)
    }

    fn list(&self) -> Result<Vec<Entry>> {
        self.inner.list()
    }

    fn remove(&self, name: &str) -> Result<()> {
        self.inner.remove(name)
    }

    fn move_aside(&self, from: &str, to: &str) -> Result<()> {
        self.inner.move_aside(from, to)
    }

    fn append(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.write(|| self.inner.append(name, bytes))
    }
}
