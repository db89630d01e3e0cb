//! The commit protocol under every fault: each operation fails, or the process stops at it with
//! unsynced data lost in several ways, and two workers interleave at every operation. Whatever
//! happens, no set is ever damaged, and the same command again gives the same bytes.

mod support;

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::{Arc, Mutex};

use kdscore::corpus::ShardArrays;
use kdscore::products::{Dtype, ProductArray, ProductPlan};
use kdscore::store::verify::{Report, Watch, verify};
use kdscore::store::{CorpusReader, CorpusWriter, Job, LocalDisk, ScoredSet, Store};
use serde_json::{Value, json};
use support::memory_fs::{Crash, Fault, MemoryFs, Turns};
use support::*;

const OUT: &str = "/disk/run/out";
const CRASHES: [Crash; 8] = [
    Crash::Kept,
    Crash::Lost,
    Crash::NamesKept,
    Crash::DataKept,
    Crash::Mixed(1),
    Crash::Mixed(2),
    Crash::Mixed(3),
    Crash::Mixed(4),
];

type Tree = BTreeMap<String, Vec<u8>>;

/// A job, its corpus on a real disk, and the arrays every worker comes up with.
struct World {
    _folder: tempfile::TempDir,
    corpus: CorpusReader,
    job: Job,
    products: ProductPlan,
    pool: rayon::ThreadPool,
}

struct Quiet;

impl Watch for Quiet {
    fn shard_done(&self, _rows: u64) {}

    fn stopped(&self) -> bool {
        false
    }
}

/// One thread, so that operations come in the same order every time.
fn pool() -> rayon::ThreadPool {
    let builder = rayon::ThreadPoolBuilder::new().num_threads(1);
    builder.build().unwrap()
}

impl World {
    fn new() -> World {
        let folder = tempfile::tempdir().unwrap();
        let path = make_corpus(folder.path(), &[&[7, 0, 5], &[6]]);
        let corpus = CorpusReader::open(&path).unwrap();
        let mut products = products(Dtype::F16);
        products.extra.clear();
        World {
            job: job(&corpus, &products, None),
            _folder: folder,
            corpus,
            products,
            pool: pool(),
        }
    }

    fn store(fs: &MemoryFs) -> Arc<dyn Store> {
        Arc::new(LocalDisk::over(Path::new(OUT), Arc::new(fs.clone())))
    }

    /// Scores what is open; notes each shard that is committed when `commit` says so.
    fn score(
        &self,
        fs: &MemoryFs,
        worker: &Worker,
        done: &Mutex<Vec<String>>,
    ) -> anyhow::Result<()> {
        let set = ScoredSet::open_or_create_in(World::store(fs), &self.job)?;
        for planned in set.open_shards()? {
            let index = self.corpus.shard_index(&planned.corpus_shard).unwrap();
            let files = self.corpus.shard(index)?;
            let mut arrays = score(&files.view()?, &planned, &self.products);
            (worker.touch)(&mut arrays);
            set.commit(&planned, &files, arrays, &worker.provenance)?;
            done.lock().unwrap().push(planned.id);
        }
        Ok(())
    }

    fn resume(&self, fs: &MemoryFs) {
        self.pool
            .install(|| self.score(fs, &Worker::first(), &Mutex::default()))
            .unwrap();
    }

    fn verify(&self, fs: &MemoryFs) -> Report {
        self.pool.install(|| {
            let set = ScoredSet::open_in(World::store(fs)).unwrap();
            verify(&set, &self.corpus, &Quiet)
        })
    }

    /// The finished tree, leftovers removed.
    fn finished(&self, fs: &MemoryFs) -> Tree {
        let report = self.verify(fs);
        assert!(report.is_sound(), "{report:?}");
        clean(fs);
        fs.tree()
    }

    fn undisturbed(&self, renames_new: bool) -> (Tree, usize) {
        let fs = MemoryFs::new(renames_new);
        self.resume(&fs);
        let operations = fs.operations();
        (self.finished(&fs), operations)
    }
}

fn clean(fs: &MemoryFs) {
    let set = ScoredSet::open_in(World::store(fs)).unwrap();
    set.clean(&set.besides().unwrap()).unwrap();
}

/// What makes one worker's bits differ from another's.
struct Worker {
    provenance: Value,
    touch: fn(&mut [ProductArray]),
}

impl Worker {
    fn first() -> Worker {
        Worker {
            provenance: provenance(),
            touch: |_| {},
        }
    }

    /// Another device, whose last bits differ: the last log-prob of each shard's first row.
    fn other() -> Worker {
        Worker {
            provenance: json!({"device": "another"}),
            touch: |arrays| arrays[2].bytes[2 * (K - 1)] ^= 1,
        }
    }
}

/// Runs into `fault`, then looks at the disk after each way to crash: nothing is damaged, what
/// was committed is there, and going on gives `expected`.
fn run_into(world: &World, renames_new: bool, fault: Fault, crashes: &[Crash], expected: &Tree) {
    let fs = MemoryFs::new(renames_new);
    let worker = fs.worker(fault);
    let done = Mutex::default();
    let result = world
        .pool
        .install(|| world.score(&worker, &Worker::first(), &done));
    if let Err(error) = &result {
        let words = format!("{error:#}");
        assert!(
            words.starts_with('/') || words.contains("/disk"),
            "{fault:?}: no path in {words:?}"
        );
        if let Fault::FullFrom(_) = fault {
            assert!(words.contains("free some space"), "{words}");
        }
    }
    let done = done.into_inner().unwrap();
    for &crash in crashes {
        let fs = fs.after(crash);
        if fs.tree().contains_key(&format!("{OUT}/job.json")) {
            let report = world.verify(&fs);
            assert!(
                report.damaged.is_empty() && report.faults.is_empty(),
                "{fault:?} {crash:?}: {report:?}"
            );
            let lost: Vec<_> = done
                .iter()
                .filter(|id| report.missing.contains(id))
                .collect();
            assert!(
                lost.is_empty(),
                "{fault:?} {crash:?}: {lost:?} was committed and is gone"
            );
        } else {
            assert!(done.is_empty(), "{fault:?} {crash:?}: job.json is gone");
        }
        world.resume(&fs);
        assert!(
            world.finished(&fs) == *expected,
            "{fault:?} {crash:?}: other bytes"
        );
    }
}

#[test]
fn stopped_at_every_operation_it_resumes_to_the_same_bytes() {
    let world = World::new();
    for renames_new in [true, false] {
        let (expected, operations) = world.undisturbed(renames_new);
        assert!(operations > 80, "{operations}");
        for n in 0..=operations {
            run_into(&world, renames_new, Fault::Stop(n), &CRASHES, &expected);
        }
    }
}

#[test]
fn failing_at_every_operation_it_resumes_to_the_same_bytes() {
    let world = World::new();
    for renames_new in [true, false] {
        let (expected, operations) = world.undisturbed(renames_new);
        for n in 0..=operations {
            let faults = [
                Fault::Fail(n, ErrorKind::StorageFull),
                Fault::Fail(n, ErrorKind::Other),
                Fault::FullFrom(n),
            ];
            for fault in faults {
                run_into(
                    &world,
                    renames_new,
                    fault,
                    &[Crash::Kept, Crash::Lost],
                    &expected,
                );
            }
        }
    }
}

#[test]
fn stopped_again_while_resuming_it_still_ends_in_the_same_bytes() {
    let world = World::new();
    let (expected, operations) = world.undisturbed(true);
    for n in (0..operations).step_by(3) {
        for m in (n % 7..operations).step_by(7) {
            let crash = CRASHES[(n + m) % CRASHES.len()];
            let fs = MemoryFs::new(true);
            let mut disk = fs.clone();
            for stop in [n, m] {
                let worker = disk.worker(Fault::Stop(stop));
                let score = || world.score(&worker, &Worker::first(), &Mutex::default());
                let _ = world.pool.install(score);
                disk = worker.after(crash);
            }
            world.resume(&disk);
            assert!(world.finished(&disk) == expected, "{n} {m} {crash:?}");
        }
    }
}

/// Runs two workers in the given phases, the second cleaning up at its end if asked.
fn run_two(
    world: &World,
    workers: [Worker; 2],
    phases: &[(usize, usize)],
    cleaning: bool,
) -> MemoryFs {
    let fs = MemoryFs::new(true);
    let turns = Turns::new(phases);
    std::thread::scope(|scope| {
        for (i, worker) in workers.into_iter().enumerate() {
            let (fs, turns) = (fs.taking_turns(&turns, i), turns.clone());
            scope.spawn(move || {
                let run = || {
                    let result = world.score(&fs, &worker, &Mutex::default());
                    if cleaning && i == 1 {
                        clean(&fs);
                    }
                    result
                };
                let result = pool().install(run);
                turns.finish(i);
                result.unwrap_or_else(|e| panic!("worker {i}: {e:#}"));
            });
        }
    });
    fs
}

#[test]
fn two_workers_at_every_operation_give_the_same_bytes() {
    let world = World::new();
    let (expected, operations) = world.undisturbed(true);
    let always = usize::MAX;
    let mut schedules: Vec<(usize, usize)> = (0..operations).map(|n| (n, always)).collect();
    for n in (0..operations).step_by(4) {
        schedules.extend((1 + n % 5..operations).step_by(5).map(|m| (n, m)));
    }
    for (n, m) in schedules {
        let phases = [(0, n), (1, m), (0, always), (1, always)];
        let workers = [Worker::first(), Worker::first()];
        let fs = run_two(&world, workers, &phases, n % 2 == 0);
        assert!(world.finished(&fs) == expected, "{n} {m}");
    }
}

#[test]
fn two_workers_of_other_devices_never_mix_their_arrays() {
    let world = World::new();
    let (_, operations) = world.undisturbed(true);
    let always = usize::MAX;
    for n in 0..operations {
        for m in [always, 1 + n * 7 % operations, 1 + n * 13 % operations] {
            let phases = [(0, n), (1, m), (0, always), (1, always)];
            let workers = [Worker::first(), Worker::other()];
            let fs = run_two(&world, workers, &phases, n % 2 == 0);
            let tree = world.finished(&fs);
            // job.json, and for each shard a manifest and five arrays.
            assert_eq!(tree.len(), 1 + 2 * 6, "{n} {m}: {:?}", tree.keys());
        }
    }
}

/// Makes the damage of one shard, then moves it aside with a stop at every operation.
#[test]
fn moving_a_damaged_shard_aside_can_be_stopped_anywhere() {
    let world = World::new();
    let (expected, _) = world.undisturbed(true);
    let discard = |fs: &MemoryFs| -> anyhow::Result<usize> {
        let set = ScoredSet::open_in(World::store(fs))?;
        let before = fs.operations();
        set.discard("shard-000000")?;
        Ok(fs.operations() - before)
    };
    let fs = MemoryFs::new(true);
    world.resume(&fs);
    let operations = discard(&fs.after(Crash::Kept)).unwrap() + 2;
    for n in 0..=operations {
        for crash in [Crash::Kept, Crash::Lost] {
            let worker = fs.after(Crash::Kept).worker(Fault::Stop(n));
            let _ = discard(&worker);
            let disk = worker.after(crash);
            // Stopped between arrays and manifest the shard is damaged, as it was: discarding it
            // again ends it.
            if !world.verify(&disk).damaged.is_empty() {
                discard(&disk).unwrap();
            }
            let report = world.verify(&disk);
            assert!(report.damaged.is_empty(), "{n} {crash:?}: {report:?}");
            world.resume(&disk);
            let mut tree = world.finished(&disk);
            tree.retain(|name, _| !name.contains("/discarded"));
            assert!(tree == expected, "{n} {crash:?}");
        }
    }
}

fn write_corpus(fs: &MemoryFs) -> anyhow::Result<()> {
    let mut writer = CorpusWriter::create_over(Path::new("/disk/corpus"), Arc::new(fs.clone()))?;
    writer.write_file("tokenizer/tokenizer.json", b"{}")?;
    for first in [0, 10] {
        writer.write_shard(&ShardArrays {
            tokens: (first..first + 5).collect(),
            offsets: vec![0, 2, 5],
            loss_mask: vec![1; 5],
            source_rows: vec![0, 1],
        })?;
    }
    let facts = json!({"vocab_size": 20, "source_files": []});
    writer.finish(facts.as_object().unwrap().clone()).map(drop)
}

#[test]
fn a_corpus_is_there_whole_or_not_at_all() {
    let disk = || {
        let fs = MemoryFs::new(true);
        kdscore::store::fs::Fs::make_folder(&fs, Path::new("/disk")).unwrap();
        kdscore::store::fs::Fs::sync_folder(&fs, Path::new("/")).unwrap();
        fs
    };
    let whole = disk();
    write_corpus(&whole).unwrap();
    let expected = whole.tree();
    assert_eq!(expected.len(), 2 + 2 * 4);
    for n in 0..=whole.operations() {
        for crash in CRASHES {
            for fault in [Fault::Stop(n), Fault::Fail(n, ErrorKind::StorageFull)] {
                let fs = disk();
                let worker = fs.worker(fault);
                let result = write_corpus(&worker);
                let after = worker.after(crash);
                let mut tree = after.tree();
                tree.retain(|name, _| name.starts_with("/disk/corpus"));
                assert!(
                    tree.is_empty() || tree == expected,
                    "{fault:?} {crash:?}: {:?}",
                    tree.keys()
                );
                if result.is_ok() {
                    assert!(tree == expected, "{fault:?} {crash:?}: finished and gone");
                } else if matches!(fault, Fault::Fail(..)) {
                    let left = worker
                        .tree()
                        .into_keys()
                        .filter(|name| name.contains("staging"));
                    assert_eq!(left.count(), 0, "{fault:?}: staging is left");
                }
            }
        }
    }
}
