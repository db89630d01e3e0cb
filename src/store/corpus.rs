//! Reads a token corpus: one that `prepare` made and sealed, or one made by hand with numpy.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail, ensure};
use rayon::prelude::*;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{Bytes, LocalDisk, NpyFile, PlannedShard, Store};
use crate::canonical::{self, Seal};
use crate::corpus::CorpusShard;

pub(super) const FORMAT_VERSION: u64 = 1;
pub(super) const MANIFEST: &str = "corpus.json";

/// What a hand-made `corpus.json` may say. A sealed one may say more.
const KEYS: [&str; 9] = [
    "format_version",
    "left_out",
    "loss",
    "shards",
    "sources",
    "template_args",
    "template_fingerprint",
    "tokenizer_fingerprint",
    "vocab_size",
];

/// A corpus whose `corpus.json` is read and checked; its arrays are opened shard by shard.
#[derive(Debug)]
pub struct CorpusReader {
    store: Arc<dyn Store>,
    facts: Map<String, Value>,
    known: KnownFacts,
    /// First sequence of each shard, counted over the corpus, and the number of all, (shards+1).
    first_sequences: Vec<u64>,
}

/// The facts kdscore itself uses. What a hand-made corpus leaves out is unknown.
#[derive(Deserialize, Debug)]
struct KnownFacts {
    /// Checked before this is made, so that another version is named as such.
    #[serde(rename = "format_version")]
    _format_version: u64,
    vocab_size: usize,
    tokenizer_fingerprint: Option<String>,
    template_fingerprint: Option<String>,
    loss: Option<String>,
    shards: Vec<ShardFacts>,
}

/// What `corpus.json` says about a shard.
#[derive(Deserialize, Clone, Debug)]
#[serde(deny_unknown_fields)]
pub struct ShardFacts {
    pub id: String,
    pub sequences: Option<u64>,
    pub tokens: Option<u64>,
    pub rows: Option<u64>,
    /// By array name.
    #[serde(default)]
    pub arrays: BTreeMap<String, ArrayFacts>,
}

/// What `corpus.json` says about an array file.
#[derive(Deserialize, Clone, Debug)]
#[serde(deny_unknown_fields)]
pub struct ArrayFacts {
    pub bytes: Option<u64>,
    pub sha256: String,
}

impl CorpusReader {
    pub fn open(folder: &Path) -> Result<CorpusReader> {
        CorpusReader::open_in(Arc::new(LocalDisk::new(folder)))
    }

    pub fn open_in(store: Arc<dyn Store>) -> Result<CorpusReader> {
        let place = store.place(MANIFEST);
        let bytes = store.read(MANIFEST)?.ok_or_else(|| {
            anyhow!(
                "{place}: expected a token corpus, found no such file; `kdscore prepare` makes one"
            )
        })?;
        let facts = canonical::unseal(&bytes, Seal::Optional).with_context(|| place.clone())?;
        let known = known_facts(&facts).with_context(|| place.clone())?;
        let mut reader = CorpusReader {
            store,
            facts,
            known,
            first_sequences: vec![0],
        };
        for shard in 0..reader.shards().len() {
            let counted = reader.count_sequences(shard)?;
            let next = reader.first_sequences[shard].checked_add(counted);
            let next = next.ok_or_else(|| {
                anyhow!("{place}: expected a number of sequences that can be, found {counted} in one shard")
            })?;
            reader.first_sequences.push(next);
        }
        Ok(reader)
    }

    /// Everything `corpus.json` says.
    pub fn facts(&self) -> &Map<String, Value> {
        &self.facts
    }

    pub fn shards(&self) -> &[ShardFacts] {
        &self.known.shards
    }

    /// Token ids are below this.
    pub fn vocab_size(&self) -> usize {
        self.known.vocab_size
    }

    pub fn tokenizer_fingerprint(&self) -> Option<&str> {
        self.known.tokenizer_fingerprint.as_deref()
    }

    pub fn template_fingerprint(&self) -> Option<&str> {
        self.known.template_fingerprint.as_deref()
    }

    /// Which tokens the student learns.
    pub fn loss(&self) -> Option<&str> {
        self.known.loss.as_deref()
    }

    /// Sequences of the whole corpus.
    pub fn sequences(&self) -> u64 {
        self.first_sequences[self.shards().len()]
    }

    /// Sequences of one shard.
    pub fn sequences_of(&self, shard: usize) -> u64 {
        self.first_sequences[shard + 1] - self.first_sequences[shard]
    }

    /// The shard that holds a sequence of the corpus, and its place in it.
    pub fn locate(&self, sequence: u64) -> Result<(usize, usize)> {
        ensure!(
            sequence < self.sequences(),
            "sequence: expected less than {}, the sequences of {}, found {sequence}",
            self.sequences(),
            self.store.place("")
        );
        let shard = self
            .first_sequences
            .partition_point(|&first| first <= sequence)
            - 1;
        Ok((shard, (sequence - self.first_sequences[shard]) as usize))
    }

    pub fn shard_index(&self, id: &str) -> Option<usize> {
        self.shards().iter().position(|s| s.id == id)
    }

    /// A file beside the shards, for example `tokenizer/tokenizer.json`.
    pub fn read_file(&self, name: &str) -> Result<Option<Bytes>> {
        self.store.read(name)
    }

    /// What messages call a file of the corpus.
    pub fn place(&self, name: &str) -> String {
        self.store.place(name)
    }

    /// The arrays of a shard, mapped.
    pub fn shard(&self, shard: usize) -> Result<CorpusShardFiles> {
        let facts = &self.shards()[shard];
        let files = CorpusShardFiles {
            id: facts.id.clone(),
            place: self.store.place(&facts.id),
            vocab_size: self.vocab_size(),
            tokens: self.array(&facts.id, "tokens")?,
            offsets: self.array(&facts.id, "offsets")?,
            loss_mask: self.array(&facts.id, "loss_mask")?,
            source_rows: self.array_if_there(&facts.id, "source_rows")?,
        };
        let found = [
            ("tokens", facts.tokens, files.tokens.shape()[0]),
            (
                "sequences",
                facts.sequences,
                files.offsets.shape()[0].saturating_sub(1),
            ),
        ];
        for (what, stated, found) in found {
            ensure!(
                stated.is_none_or(|stated| stated == found as u64),
                "{}: expected {} {what}, as {MANIFEST} says, found {found}",
                files.place,
                stated.unwrap_or_default()
            );
        }
        Ok(files)
    }

    /// Tokens of a planned shard.
    pub fn tokens_of(&self, planned: &PlannedShard) -> Result<u64> {
        let shard = self
            .shard_index(&planned.corpus_shard)
            .with_context(|| format!("expected corpus shard {}", planned.corpus_shard))?;
        let files = self.shard(shard)?;
        let offsets = files.view()?.offsets();
        let range = planned.range();
        Ok((offsets[range.end] - offsets[range.start]) as u64)
    }

    /// Rows of a shard: as stated, or counted.
    pub fn rows_of(&self, shard: usize) -> Result<u64> {
        if let Some(rows) = self.shards()[shard].rows {
            return Ok(rows);
        }
        let files = self.shard(shard)?;
        let view = files.view()?;
        let rows = (0..view.sequences()).map(|s| view.sequence(s).rows().count() as u64);
        Ok(rows.sum())
    }

    /// What is wrong with a shard's files, each line naming one: sizes and hashes where
    /// `corpus.json` states them.
    pub fn check_hashes(&self, shard: usize) -> Vec<String> {
        let facts = &self.shards()[shard];
        let arrays: Vec<_> = facts.arrays.iter().collect();
        arrays
            .par_iter()
            .filter_map(|(array, stated)| self.check_hash(&facts.id, array, stated).err())
            .map(|e| format!("{e:#}"))
            .collect()
    }

    fn check_hash(&self, id: &str, array: &str, stated: &ArrayFacts) -> Result<()> {
        let name = array_name(id, array);
        let place = self.store.place(&name);
        let Some(file) = self.store.read(&name)? else {
            bail!("{place}: expected the array that {MANIFEST} names, found no such file");
        };
        if let Some(bytes) = stated.bytes {
            ensure!(
                bytes == file.len() as u64,
                "{place}: expected {bytes} bytes, found {}",
                file.len()
            );
        }
        let found = canonical::sha256_hex(&file);
        ensure!(
            found == stated.sha256,
            "{place}: expected sha256 {}, found {found}: the file was changed or damaged",
            stated.sha256
        );
        Ok(())
    }

    /// One hash for what is scored: every shard's tokens, offsets and mask, and the facts that
    /// say what they mean. Hashes that `corpus.json` does not state are taken of the files.
    pub fn fingerprint(&self) -> Result<String> {
        let shards: Vec<Value> = (0..self.shards().len())
            .into_par_iter()
            .map(|shard| self.shard_hashes(shard))
            .collect::<Result<_>>()?;
        Ok(canonical::fingerprint(&json!({
            "shards": shards,
            "vocab_size": self.vocab_size(),
            "tokenizer_fingerprint": self.tokenizer_fingerprint(),
            "template_fingerprint": self.template_fingerprint(),
            "loss": self.loss(),
        })))
    }

    fn shard_hashes(&self, shard: usize) -> Result<Value> {
        let facts = &self.shards()[shard];
        let mut hashes = Map::new();
        hashes.insert("id".into(), facts.id.as_str().into());
        for array in ["tokens", "offsets", "loss_mask"] {
            let hash = match facts.arrays.get(array) {
                Some(stated) => stated.sha256.clone(),
                None => canonical::sha256_hex(self.array(&facts.id, array)?.file_bytes()),
            };
            hashes.insert(array.into(), hash.into());
        }
        Ok(Value::Object(hashes))
    }

    fn count_sequences(&self, shard: usize) -> Result<u64> {
        let facts = &self.shards()[shard];
        match facts.sequences {
            Some(sequences) => Ok(sequences),
            None => {
                let offsets = self.array(&facts.id, "offsets")?;
                Ok(offsets.shape()[0].saturating_sub(1) as u64)
            }
        }
    }

    fn array(&self, id: &str, array: &str) -> Result<NpyFile> {
        self.array_if_there(id, array)?.ok_or_else(|| {
            anyhow!(
                "{}: expected the array of this shard, found no such file",
                self.store.place(&array_name(id, array))
            )
        })
    }

    fn array_if_there(&self, id: &str, array: &str) -> Result<Option<NpyFile>> {
        let name = array_name(id, array);
        let Some(bytes) = self.store.read(&name)? else {
            return Ok(None);
        };
        let file = NpyFile::from_bytes(self.store.place(&name), bytes)?;
        ensure!(
            file.shape().len() == 1,
            "{}: expected one dimension, found shape {:?}",
            file.place(),
            file.shape()
        );
        Ok(Some(file))
    }
}

/// The mapped arrays of one corpus shard.
#[derive(Debug)]
pub struct CorpusShardFiles {
    id: String,
    place: String,
    vocab_size: usize,
    tokens: NpyFile,              // (T)
    offsets: NpyFile,             // (S+1)
    loss_mask: NpyFile,           // (T)
    source_rows: Option<NpyFile>, // (S)
}

impl CorpusShardFiles {
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The arrays as a checked view: offsets, mask and ids are what they must be.
    pub fn view(&self) -> Result<CorpusShard<'_>> {
        let tokens = self.tokens.i32s()?;
        let view = CorpusShard::new(tokens, self.offsets.i64s()?, self.loss_mask.u8s()?)
            .with_context(|| self.place.clone())?;
        let outside = |id: i32| usize::try_from(id).map_or(true, |id| id >= self.vocab_size);
        if let Some(t) = tokens.iter().position(|&id| outside(id)) {
            bail!(
                "{}: expected token ids from 0 to below {}, found {} at token {t}",
                self.tokens.place(),
                self.vocab_size,
                tokens[t]
            );
        }
        Ok(view)
    }

    /// Index of each sequence's source row; `None` where nobody noted it.
    pub fn source_rows(&self) -> Result<Option<&[i64]>> {
        self.source_rows.as_ref().map(NpyFile::i64s).transpose()
    }
}

/// Where an array of a corpus shard lies.
pub(super) fn array_name(id: &str, array: &str) -> String {
    format!("{id}/{array}.npy")
}

fn known_facts(facts: &Map<String, Value>) -> Result<KnownFacts> {
    let sealed = facts.contains_key("self_sha256");
    if let Some(key) = facts
        .keys()
        .find(|k| !sealed && !KEYS.contains(&k.as_str()))
    {
        bail!(
            "expected only {} in a corpus.json without a seal, found {key:?}",
            KEYS.join(", ")
        );
    }
    if let Some(version) = facts.get("format_version") {
        ensure!(
            *version == json!(FORMAT_VERSION),
            "format_version: expected {FORMAT_VERSION}, found {version}; it was written by another version of kdscore"
        );
    }
    let known: KnownFacts = serde_json::from_value(Value::Object(facts.clone()))?;
    ensure!(
        (1..=i32::MAX as usize).contains(&known.vocab_size),
        "vocab_size: expected 1 to {}, found {}",
        i32::MAX,
        known.vocab_size
    );
    let mut ids = BTreeSet::new();
    known
        .shards
        .iter()
        .try_for_each(|shard| check_shard_facts(shard, ids.insert(shard.id.as_str())))?;
    Ok(known)
}

fn check_shard_facts(shard: &ShardFacts, is_new: bool) -> Result<()> {
    let id = &shard.id;
    check_id(id)?;
    ensure!(is_new, "shards: expected each id once, found {id:?} twice");
    if let Some(unknown) = shard.arrays.keys().find(|a| !ARRAYS.contains(&a.as_str())) {
        bail!(
            "{id}: expected the arrays {}, found {unknown:?}",
            ARRAYS.join(", ")
        );
    }
    Ok(())
}

const ARRAYS: [&str; 4] = ["tokens", "offsets", "loss_mask", "source_rows"];

/// Ids are folder names, here and in the scored set.
pub(super) fn check_id(id: &str) -> Result<()> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    ensure!(
        !id.is_empty() && !id.starts_with('.') && id.chars().all(plain),
        "shard id: expected letters, digits, '-', '_' and '.', found {id:?}"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::corpus::ShardArrays;
    use crate::store::CorpusWriter;

    fn arrays(first: i32) -> ShardArrays {
        ShardArrays {
            tokens: (first..first + 6).collect(),
            offsets: vec![0, 4, 4, 6],
            loss_mask: vec![0, 1, 0, 1, 1, 1],
            source_rows: vec![0, 1, 2],
        }
    }

    fn written(folder: &Path) -> std::path::PathBuf {
        let out = folder.join("corpus");
        let mut writer = CorpusWriter::create(&out).unwrap();
        writer
            .write_file("tokenizer/tokenizer.json", b"{}")
            .unwrap();
        writer.write_shard(&arrays(0)).unwrap();
        writer.write_shard(&arrays(10)).unwrap();
        assert!(
            !out.exists(),
            "nothing stands under the final name before the end"
        );
        let facts = json!({"vocab_size": 16, "loss": "assistant", "left_out": {}});
        writer.finish(facts.as_object().unwrap().clone()).unwrap();
        out
    }

    #[test]
    fn what_is_written_is_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let reader = CorpusReader::open(&written(folder.path())).unwrap();
        assert_eq!(reader.sequences(), 6);
        assert_eq!(reader.locate(4).unwrap(), (1, 1));
        assert!(reader.locate(6).is_err());
        assert_eq!(reader.loss(), Some("assistant"));
        assert_eq!(reader.rows_of(1).unwrap(), 3);
        assert!(reader.check_hashes(0).is_empty());
        let files = reader.shard(1).unwrap();
        assert_eq!(files.view().unwrap().sequence(0).tokens, [10, 11, 12, 13]);
        assert_eq!(files.source_rows().unwrap().unwrap(), [0, 1, 2]);
        let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
        assert_eq!(left.len(), 1, "no staging folder stays");
        assert!(CorpusWriter::create(&folder.path().join("corpus")).is_err());
    }

    #[test]
    fn a_writer_that_is_dropped_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = CorpusWriter::create(&folder.path().join("corpus")).unwrap();
        writer.write_shard(&arrays(0)).unwrap();
        drop(writer);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_hand_made_corpus_has_the_same_fingerprint_for_the_same_arrays() {
        let folder = tempfile::tempdir().unwrap();
        let out = written(folder.path());
        let sealed = CorpusReader::open(&out).unwrap().fingerprint().unwrap();
        let by_hand = r#"{"format_version": 1, "vocab_size": 16, "loss": "assistant",
            "shards": [{"id": "shard-000000"}, {"id": "shard-000001"}]}"#;
        std::fs::write(out.join(MANIFEST), by_hand).unwrap();
        let reader = CorpusReader::open(&out).unwrap();
        assert_eq!(reader.fingerprint().unwrap(), sealed);
        assert_eq!((reader.sequences(), reader.rows_of(0).unwrap()), (6, 3));
    }

    #[test]
    fn a_broken_corpus_json_is_refused_in_words() {
        let folder = tempfile::tempdir().unwrap();
        let says = |text: &str| {
            std::fs::write(folder.path().join(MANIFEST), text).unwrap();
            format!("{:#}", CorpusReader::open(folder.path()).unwrap_err())
        };
        assert!(says("").contains("expected a JSON document"));
        assert!(says("[]").contains("expected a JSON object"));
        assert!(
            says(r#"{"format_version": 2, "vocab_size": 4, "shards": []}"#).contains("found 2")
        );
        let with = |shards: &str| {
            says(&format!(
                r#"{{"format_version": 1, "vocab_size": 4, "shards": {shards}}}"#
            ))
        };
        assert!(with(r#"[{"id": "../x"}]"#).contains("found \"../x\""));
        assert!(with(r#"[{"id": "a"}]"#).contains("a/offsets.npy: expected the array"));
        assert!(
            with(r#"[{"id": "a", "sequences": 1}, {"id": "a", "sequences": 1}]"#).contains("twice")
        );
        assert!(with(r#"[{"id": "a", "token": 1}]"#).contains("unknown field `token`"));
        assert!(with(r#"[], "self_sha257": "00""#).contains("found \"self_sha257\""));
        assert!(with(r#"[], "self_sha256": "00""#).contains("edited or damaged"));
    }
}
