//! numpy's array files: header written and parsed, arrays viewed where they lie.
//!
//! A stated shape is checked against the file's size, in checked arithmetic, before anything is
//! made of it; nothing is allocated for the data.

use std::fs::File;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use half::f16;

use super::bytes::{Bytes, Plain, cast};
use crate::products::Dtype;

const MAGIC: &[u8] = b"\x93NUMPY";
/// Where numpy makes data start, so that every element type lies well.
const ALIGNMENT: usize = 64;
/// Far above any header of a plain array.
const HEADER_BYTES_MAX: usize = 1 << 16;

/// What stands in front of the data.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Header {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// Where the data starts.
    pub data_at: usize,
}

impl Header {
    /// Parses the header of a file that is `file` in whole, and holds the stated shape against
    /// its size.
    pub fn parse(file: &[u8]) -> Result<Header> {
        let (text, data_at) = header_text(file)?;
        let fields = Fields::parse(text)?;
        let header = Header {
            dtype: dtype_from_descr(&fields.descr)?,
            shape: fields.shape,
            data_at,
        };
        ensure!(
            !fields.fortran_order || header.shape.len() < 2,
            "expected C order, found Fortran order; save numpy.ascontiguousarray of it"
        );
        let bytes = header.data_bytes().ok_or_else(|| {
            anyhow!(
                "expected a shape that fits in memory, found {:?}",
                header.shape
            )
        })?;
        ensure!(
            file.len() - data_at == bytes,
            "expected {bytes} bytes of data for {} {:?}, found {}: the file is cut or damaged",
            header.dtype.name(),
            header.shape,
            file.len() - data_at
        );
        Ok(header)
    }

    /// Elements times their size; `None` when that overflows.
    fn data_bytes(&self) -> Option<usize> {
        let elements = self
            .shape
            .iter()
            .try_fold(1usize, |product, &n| product.checked_mul(n))?;
        elements
            .checked_mul(self.dtype.size())
            .filter(|&n| isize::try_from(n).is_ok())
    }
}

/// The header numpy itself writes for an array of this dtype and shape; the data follow it.
pub fn header_bytes(dtype: Dtype, shape: &[usize]) -> Vec<u8> {
    let sizes: Vec<_> = shape.iter().map(usize::to_string).collect();
    let comma = if shape.len() == 1 { "," } else { "" };
    let text = format!(
        "{{'descr': '{}', 'fortran_order': False, 'shape': ({}{comma}), }}",
        dtype.descr(),
        sizes.join(", ")
    );
    let total = (MAGIC.len() + 4 + text.len() + 1).next_multiple_of(ALIGNMENT);
    let text_len = total - MAGIC.len() - 4;
    let mut out = Vec::with_capacity(total);
    out.extend(MAGIC);
    out.extend([1, 0]);
    out.extend((text_len as u16).to_le_bytes()); // a shape of six sizes takes under 256 bytes
    out.extend(text.as_bytes());
    out.resize(total - 1, b' ');
    out.push(b'\n');
    out
}

/// The header's text and where the data start.
fn header_text(file: &[u8]) -> Result<(&str, usize)> {
    ensure!(
        file.starts_with(MAGIC),
        "expected a numpy array (.npy), found another kind of file or an empty one"
    );
    let short = || anyhow!("expected a whole .npy header, found the file cut inside it");
    let version = *file.get(6).ok_or_else(short)?;
    let (length, text_at) = match version {
        1 => {
            let bytes = file.get(8..10).ok_or_else(short)?;
            (u16::from_le_bytes([bytes[0], bytes[1]]) as usize, 10)
        }
        2 | 3 => {
            let bytes = file.get(8..12).ok_or_else(short)?;
            let bytes = [bytes[0], bytes[1], bytes[2], bytes[3]];
            (u32::from_le_bytes(bytes) as usize, 12)
        }
        other => bail!("expected .npy format version 1, 2 or 3, found {other}"),
    };
    ensure!(
        length <= HEADER_BYTES_MAX,
        "expected a .npy header of at most {HEADER_BYTES_MAX} bytes, found {length}"
    );
    let text = file.get(text_at..text_at + length).ok_or_else(short)?;
    let text = std::str::from_utf8(text)
        .map_err(|_| anyhow!("expected a .npy header of text, found other bytes"))?;
    Ok((text, text_at + length))
}

fn dtype_from_descr(descr: &str) -> Result<Dtype> {
    let known = Dtype::ALL.into_iter().find(|d| d.descr() == descr);
    known.ok_or_else(|| {
        if descr.starts_with('>') {
            return anyhow!("expected little-endian data, found {descr:?}");
        }
        if descr.contains('O') {
            return anyhow!("expected numbers, found pickled objects ({descr:?})");
        }
        let names: Vec<_> = Dtype::ALL.iter().map(|d| d.name()).collect();
        anyhow!("expected {}, found dtype {descr:?}", names.join(", "))
    })
}

/// The three entries of the header's dictionary.
struct Fields {
    descr: String,
    fortran_order: bool,
    shape: Vec<usize>,
}

impl Fields {
    fn parse(text: &str) -> Result<Fields> {
        let mut rest = Cursor(text);
        let (mut descr, mut fortran_order, mut shape) = (None, None, None);
        rest.expect('{')?;
        while !rest.take('}') {
            let key = rest.quoted()?;
            rest.expect(':')?;
            match key {
                "descr" if rest.take('[') => {
                    bail!("expected an array of plain numbers, found a structured dtype")
                }
                "descr" => descr = Some(rest.quoted()?.to_owned()),
                "fortran_order" => fortran_order = Some(rest.boolean()?),
                "shape" => shape = Some(rest.tuple()?),
                other => bail!("expected descr, fortran_order and shape, found {other:?}"),
            }
            if !rest.take(',') {
                rest.expect('}')?;
                break;
            }
        }
        ensure!(
            rest.0.trim().is_empty(),
            "expected the .npy header to end, found {:?}",
            rest.0.trim()
        );
        match (descr, fortran_order, shape) {
            (Some(descr), Some(fortran_order), Some(shape)) => Ok(Fields {
                descr,
                fortran_order,
                shape,
            }),
            _ => bail!("expected descr, fortran_order and shape in the .npy header"),
        }
    }
}

/// What is left of the header's text.
struct Cursor<'a>(&'a str);

impl<'a> Cursor<'a> {
    fn take(&mut self, wanted: char) -> bool {
        match self.0.trim_start().strip_prefix(wanted) {
            Some(rest) => {
                self.0 = rest;
                true
            }
            None => false,
        }
    }

    fn expect(&mut self, wanted: char) -> Result<()> {
        let found: String = self.0.chars().take(12).collect();
        ensure!(
            self.take(wanted),
            "expected {wanted:?} in the .npy header, found {found:?}"
        );
        Ok(())
    }

    fn quoted(&mut self) -> Result<&'a str> {
        let quote = if self.take('"') {
            '"'
        } else {
            self.expect('\'')?;
            '\''
        };
        let (text, rest) = self
            .0
            .split_once(quote)
            .ok_or_else(|| anyhow!("expected a closing quote in the .npy header"))?;
        self.0 = rest;
        Ok(text)
    }

    fn word(&mut self) -> &'a str {
        let text = self.0.trim_start();
        let end = text
            .find(|c: char| !c.is_ascii_alphanumeric())
            .unwrap_or(text.len());
        let (word, rest) = text.split_at(end);
        self.0 = rest;
        word
    }

    fn boolean(&mut self) -> Result<bool> {
        match self.word() {
            "True" => Ok(true),
            "False" => Ok(false),
            other => bail!("expected True or False in the .npy header, found {other:?}"),
        }
    }

    fn tuple(&mut self) -> Result<Vec<usize>> {
        self.expect('(')?;
        let mut sizes = Vec::new();
        while !self.take(')') {
            let word = self.word();
            let size = word
                .parse()
                .map_err(|_| anyhow!("expected a size in the .npy header, found {word:?}"))?;
            sizes.push(size);
            if !self.take(',') {
                self.expect(')')?;
                break;
            }
        }
        Ok(sizes)
    }
}

/// An array file, mapped: what it says is checked, its elements are viewed where they lie.
#[derive(Debug)]
pub struct NpyFile {
    place: String,
    header: Header,
    bytes: Bytes,
}

impl NpyFile {
    pub fn open(path: &Path) -> Result<NpyFile> {
        let place = path.display().to_string();
        let file = File::open(path).with_context(|| format!("{place}: can't open"))?;
        let bytes = Bytes::map(&file).with_context(|| format!("{place}: can't map"))?;
        NpyFile::from_bytes(place, bytes)
    }

    /// `place` is what messages call the file.
    pub fn from_bytes(place: String, bytes: Bytes) -> Result<NpyFile> {
        let header = Header::parse(&bytes).with_context(|| place.clone())?;
        Ok(NpyFile {
            place,
            header,
            bytes,
        })
    }

    pub fn place(&self) -> &str {
        &self.place
    }

    pub fn dtype(&self) -> Dtype {
        self.header.dtype
    }

    pub fn shape(&self) -> &[usize] {
        &self.header.shape
    }

    /// The whole file, header and all: what hashes are taken of.
    pub fn file_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The data, without the header.
    pub fn data(&self) -> &[u8] {
        &self.bytes[self.header.data_at..]
    }

    pub fn i32s(&self) -> Result<&[i32]> {
        self.view(&[Dtype::I32])
    }

    pub fn i64s(&self) -> Result<&[i64]> {
        self.view(&[Dtype::I64])
    }

    /// Flags: bool or uint8.
    pub fn u8s(&self) -> Result<&[u8]> {
        self.view(&[Dtype::Bool, Dtype::U8])
    }

    pub fn f16s(&self) -> Result<&[f16]> {
        self.view(&[Dtype::F16])
    }

    pub fn f32s(&self) -> Result<&[f32]> {
        self.view(&[Dtype::F32])
    }

    fn view<T: Plain>(&self, dtypes: &[Dtype]) -> Result<&[T]> {
        let names: Vec<_> = dtypes.iter().map(|d| d.name()).collect();
        ensure!(
            dtypes.contains(&self.dtype()),
            "{}: expected {}, found {}",
            self.place,
            names.join(" or "),
            self.dtype().name()
        );
        cast(self.data()).ok_or_else(|| {
            anyhow!(
                "{}: expected data at a multiple of {} bytes, found it at byte {}; save it again with numpy",
                self.place,
                size_of::<T>(),
                self.header.data_at
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str, data: &[u8]) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend([1, 0]);
        out.extend((text.len() as u16).to_le_bytes());
        out.extend(text.as_bytes());
        out.extend(data);
        out
    }

    #[test]
    fn what_is_written_is_parsed_back() {
        for dtype in Dtype::ALL {
            for shape in [&[][..], &[0], &[3], &[2, 5], &[1, 2, 3]] {
                let mut bytes = header_bytes(dtype, shape);
                assert_eq!(bytes.len() % ALIGNMENT, 0);
                let data_at = bytes.len();
                bytes.resize(data_at + shape.iter().product::<usize>() * dtype.size(), 0);
                let header = Header::parse(&bytes).unwrap();
                assert_eq!(
                    (header.dtype, &header.shape[..], header.data_at),
                    (dtype, shape, data_at)
                );
            }
        }
    }

    #[test]
    fn headers_of_other_writers_are_parsed() {
        let header = Header::parse(&file(
            r#"{"shape":(2,),"fortran_order":True,"descr":"|b1"}"#,
            b"ab",
        ));
        assert_eq!(header.unwrap().shape, [2]);
        let text = "{'descr': '<i4', 'fortran_order': False, 'shape': (1,), }\n";
        for version in [2, 3] {
            let mut bytes = MAGIC.to_vec();
            bytes.extend([version, 0]);
            bytes.extend((text.len() as u32).to_le_bytes());
            bytes.extend(text.as_bytes());
            bytes.extend([0; 4]);
            assert_eq!(Header::parse(&bytes).unwrap().shape, [1]);
        }
    }

    #[test]
    fn what_can_not_be_used_is_refused_in_words() {
        let dict = |descr: &str, fortran: &str, shape: &str| {
            file(
                &format!("{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}\n"),
                &[0; 16],
            )
        };
        let table = [
            (Vec::new(), "expected a numpy array"),
            (b"PK\x03\x04".to_vec(), "expected a numpy array"),
            (MAGIC.to_vec(), "cut inside it"),
            (
                dict("'<i4'", "False", "(4,)")[..20].to_vec(),
                "cut inside it",
            ),
            (b"\x93NUMPY\x09\x00".to_vec(), "version 1, 2 or 3, found 9"),
            (
                b"\x93NUMPY\x02\x00\xff\xff\xff\xff".to_vec(),
                "at most 65536 bytes",
            ),
            (dict("'|O'", "False", "(4,)"), "pickled objects"),
            (dict("'>i4'", "False", "(4,)"), "little-endian"),
            (dict("'<f8'", "False", "(2,)"), "found dtype \"<f8\""),
            (dict("[('a', '<i4')]", "False", "(4,)"), "structured"),
            (dict("'<i4'", "True", "(2, 2)"), "Fortran order"),
            (dict("'<i4'", "maybe", "(4,)"), "True or False"),
            (
                dict("'<i4'", "False", "(5,)"),
                "expected 20 bytes of data for int32 [5], found 16",
            ),
            (dict("'<i4'", "False", "(3,)"), "expected 12 bytes"),
            (dict("'<i4'", "False", "(-1,)"), "expected a size"),
            (
                dict("'<i4'", "False", "(4294967296, 4294967296)"),
                "fits in memory",
            ),
            (
                dict("'<i8'", "False", "(2305843009213693952,)"),
                "fits in memory",
            ),
            (
                dict("'<i4'", "False", "(99999999999999999999,)"),
                "expected a size",
            ),
            (dict("'<i4'", "False", "(4"), "in the .npy header"),
            (dict("'<i4", "False", "(4,)"), "in the .npy header"),
            (
                file("{'descr': '<i4'}", &[0; 4]),
                "expected descr, fortran_order and shape",
            ),
            (
                file("{'descr': '<i4'} x", &[0; 4]),
                "expected the .npy header to end",
            ),
        ];
        for (bytes, words) in table {
            let error = Header::parse(&bytes).unwrap_err().to_string();
            assert!(error.contains(words), "expected {words:?}, found {error:?}");
        }
    }

    #[test]
    fn no_bytes_at_all_make_it_panic() {
        let whole = file(
            "{'descr': '<i4', 'fortran_order': False, 'shape': (4,), }\n",
            &[0; 16],
        );
        for at in 0..whole.len() {
            let _ = Header::parse(&whole[..at]);
            for value in 0..=255 {
                let mut damaged = whole.clone();
                damaged[at] = value;
                let _ = Header::parse(&damaged);
            }
        }
    }
}
