//! Rows of text files: JSON lines, or the items of one JSON list.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Take};
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};

use super::files::{Packing, STDIN};

/// Longest row accepted. A file without line ends would otherwise be read into memory whole.
pub const ROW_BYTES_MAX: usize = 64 << 20;
const BOM: &[u8] = b"\xef\xbb\xbf";

/// What was read of a file so far.
#[derive(Debug, Default)]
pub struct Progress {
    pub hash: Sha256,
    pub bytes: u64,
}

/// Hashes a file's own bytes on their way into whatever unpacks them.
struct Hashing<R> {
    inner: R,
    read: Arc<Mutex<Progress>>,
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.inner.read(buffer)?;
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        read.hash.update(&buffer[..count]);
        read.bytes += count as u64;
        Ok(count)
    }
}

/// An open text file.
pub struct TextFile {
    reader: Box<dyn BufRead + Send>,
    read: Arc<Mutex<Progress>>,
    line: u64,
    rows: u64,
    layout: Layout,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Layout {
    /// A `.json` file: its first character decides.
    Unknown,
    Lines,
    List {
        after_item: bool,
    },
    Done,
}

/// A row's bytes in a block's text, and the line or item it is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    pub span: Range<usize>,
    pub number: u64,
}

impl std::fmt::Debug for TextFile {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "TextFile at line {}", self.line)
    }
}

impl TextFile {
    pub fn open(path: &Path, packing: Packing) -> Result<TextFile> {
        let read = Arc::new(Mutex::new(Progress::default()));
        let source: Box<dyn Read + Send> = match path == Path::new(STDIN) {
            true => Box::new(std::io::stdin()),
            false => Box::new(
                File::open(path).with_context(|| format!("{}: can't open", path.display()))?,
            ),
        };
        let hashing = Hashing {
            inner: source,
            read: read.clone(),
        };
        let hashing = BufReader::with_capacity(1 << 18, hashing);
        let reader: Box<dyn BufRead + Send> = match packing {
            Packing::Plain => Box::new(hashing),
            Packing::Gzip => Box::new(BufReader::with_capacity(
                1 << 18,
                flate2::bufread::MultiGzDecoder::new(hashing),
            )),
            Packing::Zstd => Box::new(BufReader::with_capacity(
                1 << 18,
                zstd::Decoder::with_buffer(hashing)?,
            )),
        };
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let unpacked = name.trim_end_matches(".gz").trim_end_matches(".zst");
        let layout = match unpacked.ends_with(".json") {
            true => Layout::Unknown,
            false => Layout::Lines,
        };
        Ok(TextFile {
            reader,
            read,
            line: 0,
            rows: 0,
            layout,
        })
    }

    /// Whether rows are items of a list rather than lines.
    pub fn is_list(&self) -> bool {
        matches!(self.layout, Layout::List { .. } | Layout::Done)
    }

    /// Bytes of the file read so far, and its hash when it is read to the end.
    pub fn finish(self) -> (u64, Sha256) {
        let read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        (read.bytes, read.hash.clone())
    }

    pub fn bytes(&self) -> u64 {
        self.read
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .bytes
    }

    /// Appends the next row that is not blank to `text`; `None` at the end.
    ///
    /// # Errors
    /// A file that can't be read or unpacked, a row above the limit, a list that breaks off.
    pub fn next_row(&mut self, text: &mut Vec<u8>) -> Result<Option<Found>> {
        if self.layout == Layout::Unknown {
            self.find_layout()?;
        }
        match self.layout {
            Layout::Lines => self.next_line(text),
            Layout::List { .. } => self.next_item(text),
            _ => Ok(None),
        }
    }

    fn next_line(&mut self, text: &mut Vec<u8>) -> Result<Option<Found>> {
        loop {
            let start = text.len();
            let limit = ROW_BYTES_MAX as u64 + 1;
            let read = limited(&mut self.reader, limit).read_until(b'\n', text)?;
            self.line += 1;
            ensure!(
                read <= ROW_BYTES_MAX,
                "line {}: expected at most {ROW_BYTES_MAX} bytes, found more; is this a file of JSON lines?",
                self.line
            );
            if read == 0 {
                return Ok(None);
            }
            let span = trimmed(text, start, self.line == 1);
            if !span.is_empty() {
                return Ok(Some(Found {
                    span,
                    number: self.line,
                }));
            }
            text.truncate(start);
        }
    }

    /// A byte order mark and spaces, then `[` or not.
    fn find_layout(&mut self) -> Result<()> {
        if self.reader.fill_buf()?.starts_with(BOM) {
            self.reader.consume(BOM.len());
        }
        self.skip_spaces()?;
        self.layout = match self.reader.fill_buf()?.first() {
            Some(b'[') => {
                self.reader.consume(1);
                Layout::List { after_item: false }
            }
            _ => Layout::Lines,
        };
        Ok(())
    }

    fn skip_spaces(&mut self) -> Result<Option<u8>> {
        loop {
            let buffer = self.reader.fill_buf()?;
            let Some(&first) = buffer.first() else {
                return Ok(None);
            };
            let spaces = buffer.iter().take_while(|b| is_space(b)).count();
            let next = buffer.get(spaces).copied();
            self.line += buffer[..spaces].iter().filter(|b| **b == b'\n').count() as u64;
            self.reader.consume(spaces);
            if spaces == 0 {
                return Ok(Some(first));
            }
            if next.is_some() {
                return Ok(next);
            }
        }
    }

    fn next_item(&mut self, text: &mut Vec<u8>) -> Result<Option<Found>> {
        let Layout::List { after_item } = self.layout else {
            return Ok(None);
        };
        let mut next = self.skip_spaces()?;
        if after_item && next == Some(b',') {
            self.reader.consume(1);
            next = self.skip_spaces()?;
            ensure!(
                next != Some(b']'),
                "item {}: expected an item after the comma, found the list's end",
                self.rows + 1
            );
        } else if next == Some(b']') {
            self.reader.consume(1);
            self.layout = Layout::Done;
            let behind = self.skip_spaces()?;
            ensure!(
                behind.is_none(),
                "expected nothing behind the list, found more"
            );
            return Ok(None);
        } else {
            ensure!(
                !after_item || next.is_none(),
                "item {}: expected a comma in front, found none",
                self.rows + 1
            );
        }
        ensure!(
            next.is_some(),
            "expected the list's end after item {}, found the file's: it is cut off",
            self.rows
        );
        self.rows += 1;
        let start = text.len();
        self.copy_item(text)?;
        self.layout = Layout::List { after_item: true };
        Ok(Some(Found {
            span: start..text.len(),
            number: self.rows,
        }))
    }

    /// Copies one JSON value: up to a comma or bracket outside strings and nested values.
    fn copy_item(&mut self, text: &mut Vec<u8>) -> Result<()> {
        let (mut depth, mut in_string, mut escaped) = (0_usize, false, false);
        let start = text.len();
        loop {
            let buffer = self.reader.fill_buf()?;
            ensure!(
                !buffer.is_empty(),
                "item {}: expected its end, found the file's: it is cut off",
                self.rows
            );
            let mut ended = false;
            let mut taken = 0;
            for &byte in buffer {
                match byte {
                    _ if escaped => escaped = false,
                    b'\\' if in_string => escaped = true,
                    b'"' => in_string = !in_string,
                    _ if in_string => {}
                    b'{' | b'[' => depth += 1,
                    b',' | b'}' | b']' if depth == 0 => {
                        ended = true;
                        break;
                    }
                    b'}' | b']' => depth -= 1,
                    _ => {}
                }
                taken += 1;
            }
            text.extend_from_slice(&buffer[..taken]);
            self.reader.consume(taken);
            ensure!(
                text.len() - start <= ROW_BYTES_MAX,
                "item {}: expected at most {ROW_BYTES_MAX} bytes, found more",
                self.rows
            );
            if ended {
                return Ok(());
            }
        }
    }
}

fn limited(reader: &mut Box<dyn BufRead + Send>, limit: u64) -> Take<&mut Box<dyn BufRead + Send>> {
    reader.take(limit)
}

fn is_space(byte: &u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\r' | b'\n')
}

/// The line without byte order mark (on the first line), line end and outer spaces.
fn trimmed(text: &[u8], start: usize, first_line: bool) -> Range<usize> {
    let mut start = start;
    if first_line && text[start..].starts_with(BOM) {
        start += BOM.len();
    }
    let line = &text[start..];
    let left = line.iter().take_while(|b| is_space(b)).count();
    let right = line[left..]
        .iter()
        .rev()
        .take_while(|b| is_space(b))
        .count();
    start + left..text.len() - right
}
