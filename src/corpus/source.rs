//! Reads source files line by line, in bounded blocks, hashing them on the way.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};

use crate::canonical::hex;

/// Bytes of lines a block may hold before it is handed on.
const BLOCK_BYTES: usize = 4 << 20;
/// Longest line accepted. A file without line ends would otherwise be read into memory whole.
const LINE_BYTES_MAX: usize = 256 << 20;

/// One source file as it was read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SourceFile {
    /// As given by the user.
    pub path: PathBuf,
    pub bytes: u64,
    pub sha256: String,
}

/// Some consecutive source rows, still text.
#[derive(Debug, Default)]
pub struct Block {
    text: Vec<u8>,
    rows: Vec<RawRow>,
    /// Bytes read from the files for this block, line ends and blank lines included.
    pub bytes_read: u64,
}

#[derive(Clone, Debug)]
struct RawRow {
    file: usize,
    line: u64,
    span: Range<usize>,
}

/// A line and where it stands.
#[derive(Clone, Copy, Debug)]
pub struct Line<'a> {
    pub text: &'a [u8],
    path: &'a Path,
    number: u64,
}

impl Line<'_> {
    /// `file:line`, as errors name it.
    pub fn place(&self) -> String {
        format!("{}:{}", self.path.display(), self.number)
    }
}

/// The source files of a run, read one after another.
#[derive(Debug)]
pub struct SourceReader {
    files: Vec<PathBuf>,
    next: usize,
    open: Option<OpenFile>,
    read: Vec<SourceFile>,
}

#[derive(Debug)]
struct OpenFile {
    reader: BufReader<File>,
    hash: Sha256,
    bytes: u64,
    line: u64,
}

impl SourceReader {
    /// # Errors
    /// A file that is not there, is no plain file, or is compressed: all before any is read.
    pub fn new(files: &[PathBuf]) -> Result<SourceReader> {
        ensure!(!files.is_empty(), "data: expected at least one file");
        files.iter().try_for_each(|f| check_plain(f))?;
        if let Some(i) = (1..files.len()).find(|&i| files[..i].contains(&files[i])) {
            bail!(
                "data: expected each file once, found {} twice",
                files[i].display()
            );
        }
        Ok(SourceReader {
            files: files.to_vec(),
            next: 0,
            open: None,
            read: Vec::new(),
        })
    }

    /// The next rows, in order; `None` when all files are read. Where blocks end depends on the
    /// files alone.
    ///
    /// # Errors
    /// A file that can't be read, or a line above the limit.
    pub fn next_block(&mut self) -> Result<Option<Block>> {
        let mut block = Block::default();
        while block.text.len() < BLOCK_BYTES {
            if self.open.is_none() && !self.open_next()? {
                break;
            }
            let file = self.next - 1;
            let open = self.open.as_mut().expect("opened above");
            let path = &self.files[file];
            let read = open
                .read_line(file, &mut block)
                .with_context(|| format!("{}: can't read", path.display()))?;
            if read == 0 {
                self.close();
            }
        }
        Ok((block.bytes_read > 0 || !block.rows.is_empty()).then_some(block))
    }

    /// The files read to their end, in order.
    pub fn into_read(self) -> Vec<SourceFile> {
        self.read
    }

    /// The line of row `index` of a block of this reader.
    pub fn line<'a>(&'a self, block: &'a Block, index: usize) -> Line<'a> {
        let row = &block.rows[index];
        Line {
            text: &block.text[row.span.clone()],
            path: &self.files[row.file],
            number: row.line,
        }
    }

    fn open_next(&mut self) -> Result<bool> {
        let Some(path) = self.files.get(self.next) else {
            return Ok(false);
        };
        let file = File::open(path).with_context(|| format!("{}: can't open", path.display()))?;
        self.next += 1;
        self.open = Some(OpenFile {
            reader: BufReader::with_capacity(1 << 20, file),
            hash: Sha256::new(),
            bytes: 0,
            line: 0,
        });
        Ok(true)
    }

    fn close(&mut self) {
        let open = self.open.take().expect("only an open file is closed");
        self.read.push(SourceFile {
            path: self.files[self.next - 1].clone(),
            bytes: open.bytes,
            sha256: hex(&open.hash.finalize()),
        });
    }
}

impl OpenFile {
    /// Appends the next line to `block`, unless it is blank. Returns the bytes it took; 0 at the
    /// end of the file.
    fn read_line(&mut self, file: usize, block: &mut Block) -> Result<usize> {
        let start = block.text.len();
        let limit = LINE_BYTES_MAX as u64 + 1;
        let read = (&mut self.reader)
            .take(limit)
            .read_until(b'\n', &mut block.text)?;
        ensure!(
            read <= LINE_BYTES_MAX,
            "line {}: expected at most {LINE_BYTES_MAX} bytes, found more; is this a file of JSON lines?",
            self.line + 1
        );
        self.hash.update(&block.text[start..]);
        self.bytes += read as u64;
        block.bytes_read += read as u64;
        if read == 0 {
            return Ok(0);
        }
        self.line += 1;
        let span = trimmed(&block.text, start, self.line == 1);
        if span.is_empty() {
            block.text.truncate(start);
        } else {
            block.rows.push(RawRow {
                file,
                line: self.line,
                span,
            });
        }
        Ok(read)
    }
}

/// The line without byte order mark (on the first line), line end and outer spaces.
fn trimmed(text: &[u8], start: usize, first_line: bool) -> Range<usize> {
    const BOM: &[u8] = b"\xef\xbb\xbf";
    let mut start = start;
    if first_line && text[start..].starts_with(BOM) {
        start += BOM.len();
    }
    let space = |b: &u8| matches!(b, b' ' | b'\t' | b'\r' | b'\n');
    let line = &text[start..];
    let left = line.iter().take_while(|b| space(b)).count();
    let right = line[left..].iter().rev().take_while(|b| space(b)).count();
    start + left..text.len() - right
}

impl Block {
    pub fn rows(&self) -> usize {
        self.rows.len()
    }
}

fn check_plain(path: &Path) -> Result<()> {
    let name = path.display();
    let meta = std::fs::metadata(path).with_context(|| format!("{name}: can't open"))?;
    ensure!(
        meta.is_file(),
        "{name}: expected a file of JSON lines, found a folder or device"
    );
    let mut head = [0; 4];
    let mut file = File::open(path).with_context(|| format!("{name}: can't open"))?;
    let read = file
        .read(&mut head)
        .with_context(|| format!("{name}: can't read"))?;
    let found = match &head[..read] {
        [0x1f, 0x8b, ..] => "gzip",
        [0x28, 0xb5, 0x2f, 0xfd] => "zstd",
        b"PAR1" => "Parquet",
        b"ARRO" => "Arrow",
        _ => return Ok(()),
    };
    bail!("{name}: expected JSON lines, found {found} data; convert it to plain JSON lines first")
}

/// Bytes and sha256 of each file, without looking at rows.
///
/// # Errors
/// A file that can't be read.
pub fn hash_files(files: &[PathBuf]) -> Result<Vec<SourceFile>> {
    let hash = |path: &PathBuf| -> Result<SourceFile> {
        check_plain(path)?;
        let mut file = File::open(path)?;
        let (mut hash, mut bytes) = (Sha256::new(), 0);
        let mut buffer = vec![0; 1 << 20];
        loop {
            let read = file
                .read(&mut buffer)
                .with_context(|| format!("{}: can't read", path.display()))?;
            if read == 0 {
                break;
            }
            hash.update(&buffer[..read]);
            bytes += read as u64;
        }
        Ok(SourceFile {
            path: path.clone(),
            bytes,
            sha256: hex(&hash.finalize()),
        })
    };
    files.iter().map(hash).collect()
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
        let mut reader = SourceReader::new(&files).unwrap();
        let mut found = Vec::new();
        let (mut blocks, mut bytes) = (0, 0);
        while let Some(block) = reader.next_block().unwrap() {
            blocks += 1;
            bytes += block.bytes_read;
            for index in 0..block.rows() {
                let line = reader.line(&block, index);
                let place = line.place().rsplit('/').next().unwrap().to_owned();
                found.push((place, line.text.len()));
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
        let message = SourceReader::new(&[file.clone(), file])
            .unwrap_err()
            .to_string();
        assert!(message.contains("twice"), "{message}");
    }
}
