//! Reads source files row by row, in bounded blocks, hashing them on the way.

mod columns;
mod files;
mod text;

use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, bail};
use arrow_array::RecordBatch;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use self::columns::ColumnFile;
use self::files::{Kind, STDIN};
use self::text::TextFile;
use super::json::parse_object;
use super::problem::RowResult;
use super::rules::NullFields;
use crate::canonical::hex;
pub use files::{expanded, path_above};

/// Bytes of rows a block may hold before it is handed on.
const BLOCK_BYTES: usize = 4 << 20;

/// One source file as it was read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SourceFile {
    /// As given by the user.
    pub path: PathBuf,
    pub bytes: u64,
    pub sha256: String,
}

/// Some consecutive source rows, still text or columns.
#[derive(Debug, Default)]
pub struct Block {
    text: Vec<u8>,
    batches: Vec<RecordBatch>,
    rows: Vec<RawRow>,
    /// Bytes read from the files for this block, line ends and blank lines included.
    pub bytes_read: u64,
}

#[derive(Clone, Debug)]
struct RawRow {
    file: usize,
    /// Counted from 1.
    number: u64,
    held: Held,
}

#[derive(Clone, Debug)]
enum Held {
    Line(Range<usize>),
    Item(Range<usize>),
    Batch { batch: usize, row: usize },
}

impl Block {
    pub fn rows(&self) -> usize {
        self.rows.len()
    }
}

/// The source files of a run, read one after another.
#[derive(Debug)]
pub struct SourceReader {
    files: Vec<PathBuf>,
    kinds: Vec<Kind>,
    next: usize,
    /// Locked by nobody: rows are parsed on many threads while none reads on.
    open: Mutex<Option<OpenFile>>,
    read: Vec<SourceFile>,
    nulls: NullFields,
    /// Bytes that blocks so far said were read.
    bytes_told: u64,
}

#[derive(Debug)]
enum OpenFile {
    Text(TextFile),
    Columns(ColumnFile),
}

impl SourceReader {
    /// # Errors
    /// A file that is not there: before any is read.
    pub fn new(files: &[PathBuf], nulls: NullFields) -> Result<SourceReader> {
        Ok(SourceReader {
            kinds: files.iter().map(|f| Kind::of(f)).collect::<Result<_>>()?,
            files: files.to_vec(),
            next: 0,
            open: Mutex::new(None),
            read: Vec::new(),
            nulls,
            bytes_told: 0,
        })
    }

    /// The next rows, in order; `None` when all files are read. Where blocks end depends on the
    /// files alone.
    ///
    /// # Errors
    /// A file that can't be read, or a row above the limit.
    pub fn next_block(&mut self) -> Result<Option<Block>> {
        let mut block = Block::default();
        let mut held = 0;
        while held < BLOCK_BYTES {
            if self.opened().is_none() && !self.open_next()? {
                break;
            }
            let file = self.next - 1;
            let open = self.opened().as_mut().expect("opened above");
            let more = match open {
                OpenFile::Text(text) => text_row(text, file, &mut block),
                OpenFile::Columns(columns) => column_rows(columns, file, &mut block),
            };
            let more = more.with_context(|| self.files[file].display().to_string())?;
            if !more {
                self.close()?;
            }
            let batches = block.batches.iter().map(RecordBatch::get_array_memory_size);
            held = block.text.len() + batches.sum::<usize>();
        }
        block.bytes_read = self.bytes() - self.bytes_told;
        self.bytes_told += block.bytes_read;
        Ok((!block.rows.is_empty() || block.bytes_read > 0).then_some(block))
    }

    /// Bytes of the files read so far; a file of columns counts when it is done.
    fn bytes(&mut self) -> u64 {
        let open = match self.opened() {
            Some(OpenFile::Text(text)) => text.bytes(),
            _ => 0,
        };
        self.read.iter().map(|f| f.bytes).sum::<u64>() + open
    }

    /// The files read to their end, in order.
    pub fn into_read(self) -> Vec<SourceFile> {
        self.read
    }

    /// `file:line`, as errors name row `index` of a block of this reader.
    pub fn place(&self, block: &Block, index: usize) -> String {
        let row = &block.rows[index];
        let (path, number) = (self.files[row.file].display(), row.number);
        match row.held {
            Held::Line(_) => format!("{path}:{number}"),
            Held::Item(_) => format!("{path}: item {number}"),
            Held::Batch { .. } => format!("{path}: row {number}"),
        }
    }

    /// Row `index` of a block, parsed.
    ///
    /// # Errors
    /// Text that is not one JSON object, columns that can't be read as one.
    pub fn object(&self, block: &Block, index: usize) -> RowResult<Map<String, Value>> {
        match &block.rows[index].held {
            Held::Line(span) | Held::Item(span) => {
                let mut row = parse_object(&block.text[span.clone()])?;
                if self.nulls == NullFields::Drop {
                    columns::drop_nulls(&mut row);
                }
                Ok(row)
            }
            Held::Batch { batch, row } => columns::row(&block.batches[*batch], *row, self.nulls),
        }
    }

    fn opened(&mut self) -> &mut Option<OpenFile> {
        self.open.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    fn open_next(&mut self) -> Result<bool> {
        let Some(path) = self.files.get(self.next) else {
            return Ok(false);
        };
        let opened = Some(match self.kinds[self.next] {
            Kind::Text(packing) => OpenFile::Text(TextFile::open(path, packing)?),
            kind => OpenFile::Columns(ColumnFile::open(path, kind)?),
        });
        *self.opened() = opened;
        self.next += 1;
        Ok(true)
    }

    /// Notes the file as read.
    fn close(&mut self) -> Result<()> {
        let path = self.files[self.next - 1].clone();
        let (bytes, hash) = match self.opened().take() {
            Some(OpenFile::Text(text)) => text.finish(),
            _ => hash_file(&path)?,
        };
        self.read.push(SourceFile {
            path,
            bytes,
            sha256: hex(&hash.finalize()),
        });
        Ok(())
    }
}

/// Whether there was another row.
fn text_row(text: &mut TextFile, file: usize, block: &mut Block) -> Result<bool> {
    let Some(found) = text.next_row(&mut block.text)? else {
        return Ok(false);
    };
    let held = match text.is_list() {
        true => Held::Item(found.span),
        false => Held::Line(found.span),
    };
    block.rows.push(RawRow {
        file,
        number: found.number,
        held,
    });
    Ok(true)
}

/// Whether there was another batch.
fn column_rows(columns: &mut ColumnFile, file: usize, block: &mut Block) -> Result<bool> {
    let first = columns.rows + 1;
    let Some(batch) = columns.next_batch()? else {
        return Ok(false);
    };
    let at = block.batches.len();
    let row = |row: usize| RawRow {
        file,
        number: first + row as u64,
        held: Held::Batch { batch: at, row },
    };
    block.rows.extend((0..batch.num_rows()).map(row));
    block.batches.push(batch);
    Ok(true)
}

/// Bytes and sha256 of each file, without looking at rows.
///
/// # Errors
/// A file that can't be read.
pub fn hash_files(files: &[PathBuf]) -> Result<Vec<SourceFile>> {
    let hash = |path: &PathBuf| -> Result<SourceFile> {
        if path == Path::new(STDIN) {
            bail!(
                "data: standard input can't be compared with what the corpus was made from; give another --out"
            );
        }
        let (bytes, hash) = hash_file(path)?;
        Ok(SourceFile {
            path: path.clone(),
            bytes,
            sha256: hex(&hash.finalize()),
        })
    };
    files.iter().map(hash).collect()
}

fn hash_file(path: &Path) -> Result<(u64, Sha256)> {
    let failed = || format!("{}: can't read", path.display());
    let mut file = File::open(path).with_context(failed)?;
    let (mut hash, mut bytes) = (Sha256::new(), 0);
    let mut buffer = vec![0; 1 << 20];
    loop {
        let read = file.read(&mut buffer).with_context(failed)?;
        if read == 0 {
            return Ok((bytes, hash));
        }
        hash.update(&buffer[..read]);
        bytes += read as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_end_between_lines_and_every_byte_is_hashed() {
        let folder = tempfile::tempdir().unwrap();
        let long = "x".repeat(BLOCK_BYTES / 2);
        let (a, b) = (folder.path().join("a"), folder.path().join("b"));
        std::fs::write(&a, format!("\u{feff}one\r\n\n  \n{long}\n{long}\nfive")).unwrap();
        std::fs::write(&b, format!("\u{feff}first\n{long}\n")).unwrap();
        let files = [a, b];
        let mut reader = SourceReader::new(&files, NullFields::Error).unwrap();
        let mut found = Vec::new();
        let (mut blocks, mut bytes) = (0, 0);
        while let Some(block) = reader.next_block().unwrap() {
            blocks += 1;
            bytes += block.bytes_read;
            for index in 0..block.rows() {
                let place = reader.place(&block, index);
                let place = place.rsplit('/').next().unwrap().to_owned();
                let Held::Line(span) = &block.rows[index].held else {
                    panic!("a line")
                };
                found.push((place, span.len()));
            }
        }
        assert!(blocks >= 2, "{blocks}");
        let half = BLOCK_BYTES / 2;
        let expected = [
            ("a:1", 3),
            ("a:4", half),
            ("a:5", half),
            ("a:6", 4),
            ("b:1", 5),
            ("b:2", half),
        ];
        assert_eq!(
            found,
            expected.map(|(place, length)| (place.to_owned(), length))
        );
        let read = reader.into_read();
        assert_eq!(bytes, read.iter().map(|f| f.bytes).sum::<u64>());
        assert_eq!(read, hash_files(&files).unwrap());
    }

    #[test]
    fn a_file_is_given_once() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a");
        std::fs::write(&file, "{}").unwrap();
        let message = expanded(&[file.clone(), file], None)
            .unwrap_err()
            .to_string();
        assert!(message.contains("twice"), "{message}");
    }
}
